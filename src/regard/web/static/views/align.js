// Source above, translation below, and the lines of cross-attention; tokens appear as the model writes them.
import { el, shown } from "../dom.js";
import { fitted, textWidth } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const SIZE = 17;
const MOST = 256; // tokens of either side: what is shown is one tile

class Align {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, over: null, written: null });
    const { t } = app, now = app.state.now;
    this.again = el("button", { type: "button", class: "primary", "data-do": "write", onclick: () => app.guarded(() => this.write()) }, t("align.write"));
    const canWrite = !app.source.offline && app.model()?.generates && now.beam === 1;
    this.live = el("p", { class: "caption live", "aria-live": "polite" });
    this.place = el("div");
    host.append(el("p", { class: "caption" }, t("align.caption")), canWrite ? el("div", { class: "row" }, this.again, this.live) : "", this.place);
    this.sheet = new Surface(this.place, {
      label: t("view.align"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => this.hover(hit, event), press: (hit) => this.press(hit),
      leave: () => { this.over = null; tip.hide(); this.sheet.redraw(); },
    });
  }

  async update() {
    if (this.written) return;
    const mine = ++this.asked, { data } = this.app, { layer, head } = this.app.where(), { rows, cols } = data.size("cross");
    const [rowLabels, colLabels, matrix] = await Promise.all([data.labels("cross", "rows"), data.labels("cross", "cols"),
      data.block("cross", layer, head, 0, Math.min(MOST, rows), 0, Math.min(MOST, cols))]);
    if (mine !== this.asked) return;
    this.shown = { layer, head, rowLabels: rowLabels.slice(0, MOST), colLabels: colLabels.slice(0, MOST), matrix };
    this.sheet.redraw();
  }

  /** Write the translation again, in view: token after token, and the lines when the look at it is there. */
  async write() {
    const { app } = this;
    this.again.disabled = true;
    this.written = [];
    this.sheet.redraw();
    try {
      const request = app.composer.request();
      const found = await app.source.stream({ model: request.model, text: request.text, generate: { beam: 1 } }, (token) => {
        if (token.text) this.written.push({ text: token.text, special: false });
        this.live.textContent = this.written.map((one) => one.text).join("");
        this.sheet.redraw();
      });
      this.written = null;
      app.state.now.target = "";
      if (app.view === this) app.open({ ...found, id: found.look });
    } finally {
      this.written = null;
      this.again.disabled = false;
    }
  }

  /** Two lines of tokens where they fit, two columns where they do not. */
  layout(width) {
    if (!this.shown) return { height: 260 };
    const { colLabels } = this.shown, rowLabels = this.written ?? this.shown.rowLabels;
    const font = `400 ${SIZE}px ${getComputedStyle(document.body).fontFamily}`, gap = 18;
    const wide = (labels) => labels.map((label) => Math.min(180, textWidth(shown(label), font)) + gap);
    const [above, below] = [wide(colLabels), wide(rowLabels)], sum = (list) => list.reduce((a, b) => a + b, 0);
    if (Math.max(sum(above), sum(below)) <= width) {
      const line = (sizes, y) => {
        let x = (width - sum(sizes)) / 2;
        return sizes.map((size) => { const at = { x: x + size / 2, y, w: size - 4, h: 34 }; x += size; return at; });
      };
      return { height: 330, flat: true, cols: line(above, 36), rows: line(below, 282), room: 180 };
    }
    const step = 34, text = Math.min(190, width * 0.34);
    const column = (labels, x, align) => labels.map((_, i) => ({ x, y: 24 + i * step, w: text, h: step, align }));
    const span = Math.min(width, 2 * text + 320);
    return { height: 40 + step * Math.max(rowLabels.length, colLabels.length, 1), flat: false, room: text - 12,
      cols: column(colLabels, text / 2, "right"), rows: column(rowLabels, span - text / 2, "left") };
  }

  draw(pen) {
    if (!this.shown) return;
    const at = this.layout(pen.width), { colLabels, matrix } = this.shown, { find } = this.app.state.now;
    const rowLabels = this.written ?? this.shown.rowLabels, { accent, ink, quiet } = pen.colours;
    const row = this.over?.row ?? this.app.state.now.row, col = this.over?.col ?? (this.over ? -1 : this.app.state.now.col);
    if (!this.written) this.lines(pen, at, row, col);
    const chosen = !this.written && row >= 0 && row < matrix.rows, weight = (r, c) => matrix.values[r * matrix.cols + c];
    const token = (label, { x, y, w, h, align = "center" }, on, payload, shade) => {
      const edge = { center: 0, right: w / 2 - 8, left: 8 - w / 2 }[align];
      if (shade > 0.01) pen.rect(x - w / 2, y - 14, w, 28, { fill: accent, radius: 8, opacity: 0.04 + 0.36 * shade });
      const found = find && shown(label).toLowerCase().includes(find.toLowerCase());
      pen.text(fitted(shown(label), at.room, pen.font(SIZE)), x + edge, y, { size: SIZE, align, weight: on ? 600 : 400, fill: on || found ? accent : label.special ? quiet : ink });
      pen.hit(x - w / 2, y - h / 2, w, h, payload);
    };
    colLabels.forEach((label, c) => token(label, at.cols[c], c === col, { col: c }, chosen ? weight(row, c) : 0));
    rowLabels.forEach((label, r) => token(label, at.rows[r], r === row, { row: r }, !this.written && row < 0 && col >= 0 ? weight(r, col) : 0));
  }

  lines(pen, at, row, col) {
    const { matrix } = this.shown, { threshold, top } = this.app.state.now;
    for (let r = 0; r < matrix.rows; r++) {
      if (row >= 0 && r !== row) continue;
      const weights = matrix.values.subarray(r * matrix.cols, (r + 1) * matrix.cols);
      const order = [...weights.keys()].filter((c) => weights[c] >= Math.max(threshold, 1e-6)).sort((a, b) => weights[b] - weights[a]);
      for (const c of row < 0 && col >= 0 ? order.filter((i) => i === col) : order.slice(0, row < 0 ? top : undefined)) {
        const from = at.rows[r], to = at.cols[c], w = weights[c], style = { stroke: pen.colours.accent, width: 0.8 + 3.4 * w, opacity: 0.1 + 0.9 * w };
        if (at.flat) {
          const [y1, y2] = [from.y - 18, to.y + 18], half = (y1 - y2) / 2;
          pen.path([from.x, y1, from.x, y1 - half, to.x, y2 + half, to.x, y2], style);
        } else {
          const [x1, x2] = [from.x - from.w / 2, to.x + to.w / 2], half = (x1 - x2) / 2;
          pen.path([x1, from.y, x1 - half, from.y, x2 + half, to.y, x2, to.y], style);
        }
      }
    }
  }

  hover(hit, event) {
    if (hit?.row !== this.over?.row || hit?.col !== this.over?.col) { this.over = hit ?? null; this.sheet.redraw(); }
    const { matrix, rowLabels, colLabels } = this.shown ?? {}, { row } = this.app.state.now;
    if (hit?.col === undefined || row < 0 || row >= (matrix?.rows ?? 0)) { tip.hide(); return; }
    tip.show(event, matrix.values[row * matrix.cols + hit.col], `${shown(rowLabels[row])} → ${shown(colLabels[hit.col])}`);
  }

  press(hit) {
    if (!hit || this.written) return;
    const { state } = this.app, { row, col } = state.now;
    if (hit.row !== undefined) state.set(row === hit.row ? { row: -1, col: -1 } : { row: hit.row, col: -1 });
    else state.set({ col: col === hit.col ? -1 : hit.col });
  }

  rows() {
    const { matrix, rowLabels, colLabels } = this.shown;
    return [["", ...colLabels.map(shown)], ...rowLabels.map((label, r) => [shown(label), ...matrix.values.subarray(r * matrix.cols, (r + 1) * matrix.cols)])];
  }

  close() { this.sheet.close(); tip.hide(); }
}

export default {
  id: "align", panel: true, kind: "cross", controls: ["layer", "head", "threshold", "top", "find"],
  fits: ({ look, source }) => "cross" in look.kinds && !look.image && !source.overviewOnly && (source.only?.kind ?? "cross") === "cross",
  open: (host, app) => new Align(host, app),
};
