// Source above, translation below, and lines of cross-attention between them; the translation can be replayed token by token.
import { el, shown } from "../dom.js";
import { isFound, rowOf, strongest, tableOf } from "../matrix.js";
import { fitted, textWidth } from "../pen.js";
import { Player } from "../player.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const SIZE = 17;
const MOST = 256; // tokens of either side: one tile of weights

class Align {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, live: null, asked: 0, over: null });
    const { t } = app;
    this.again = el("button", { type: "button", class: "second", "data-do": "write", onclick: () => app.guarded(() => this.write()) }, t("align.write"));
    const canWrite = !app.source.offline && app.model()?.generates;
    this.said = el("span", { class: "live", "aria-live": "polite" });
    this.player = canWrite ? new Player(t, { onStep: () => this.showLive(), onEnd: () => this.wrote() }) : null;
    this.place = el("div");
    const caption = [t("align.caption"), app.readingNote()].join(" ");
    host.append(el("div", { class: "row" }, el("p", { class: "caption" }, caption), canWrite && [this.again, this.player.node, this.said]), this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.align"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => this.hover(hit, event), press: (hit) => this.press(hit),
      leave: () => { this.over = null; this.sheet.redraw(); },
    });
  }

  async update(changed) {
    if (this.live && !["layer", "head"].some((name) => changed.has(name))) { this.sheet.redraw(); return; }
    if (this.live) { this.player.stop(); this.wrote(); return; } // the streamed weights belong to the old head
    const mine = ++this.asked, { data } = this.app, { layer, head } = this.app.where(), { rows, cols } = data.size("cross");
    const [rowLabels, colLabels, matrix] = await Promise.all([data.labels("cross", "rows"), data.labels("cross", "cols"),
      data.block("cross", layer, head, 0, Math.min(MOST, rows), 0, Math.min(MOST, cols))]);
    if (mine !== this.asked) return;
    this.shown = { rowLabels: rowLabels.slice(0, MOST), colLabels: colLabels.slice(0, MOST), matrix };
    this.sheet.redraw();
  }

  /** Stream the translation, token by token, each with its row of weights. Returns the look at it if this view no longer shows it. */
  async write() {
    const { app } = this;
    if (!app.composer.streams()) { this.replay(); return null; } // beam search or the user's own text: nothing to stream
    const { layer, head } = app.where(), { model, text } = app.composer.request(), live = this.begin([]);
    try {
      const request = { model, text, generate: { beam: 1 }, watch: { layer, ...(head < 0 ? {} : { head }) } };
      const found = await app.source.stream(request, (line) => this.live === live && this.told(line)), look = { ...found, id: found.look };
      if (this.live !== live) return look; // another text, another head or another view
      app.adopt(look);
      this.player.complete();
      return null;
    } catch (error) {
      if (this.live === live) { this.player.stop(); this.live = null; this.showLive(); }
      throw error;
    }
  }

  /** Replay an existing text. */
  replay() {
    const { rowLabels, colLabels, matrix } = this.shown;
    this.begin(colLabels);
    rowLabels.forEach((label, r) => this.add(label, rowOf(matrix, r), label.special ? "" : `${label.text} `));
    this.player.complete();
  }

  begin(colLabels) {
    const live = this.live = { rowLabels: [], texts: [], colLabels, matrix: { rows: 0, cols: 0, values: new Float32Array() } };
    this.player.start();
    return live;
  }

  told({ source, label, weights, text }) {
    if (source) this.live.colLabels = source.slice(0, MOST);
    if (weights && this.live.rowLabels.length < MOST) this.add(label, weights, text ?? "");
    else if (text) this.live.texts[this.live.texts.length - 1] += text;
    this.showLive();
  }

  add(label, weights, text) {
    const { live } = this, { rows } = live.matrix, cols = weights.length, values = rows ? live.matrix.values : new Float32Array(MOST * cols);
    values.set(weights, rows * cols);
    live.rowLabels.push(label);
    live.texts.push(text);
    live.matrix = { rows: rows + 1, cols, values };
    this.player.arrive(rows + 1);
  }

  /** Show the player's current step. */
  showLive() {
    this.again.hidden = Boolean(this.live);
    this.said.textContent = this.live ? this.live.texts.slice(0, this.player.at).join("") : "";
    this.sheet?.redraw();
  }

  /** The replay is over: show the look. */
  wrote() {
    this.live = null;
    this.showLive();
    if (this.app.view === this) this.app.show();
  }

  /** What is drawn: the replayed part of the text, or the look. */
  now() {
    if (!this.live) return this.shown;
    const { at } = this.player, { rowLabels, colLabels, matrix } = this.live;
    return { colLabels, rowLabels: rowLabels.slice(0, at), matrix: { ...matrix, rows: Math.min(at, matrix.rows) } };
  }

  /** Two lines of tokens if they fit, otherwise two columns. */
  layout(width) {
    if (!this.now()) return { height: 260 };
    const { rowLabels, colLabels } = this.now(), font = `400 ${SIZE}px ${getComputedStyle(document.body).fontFamily}`;
    const texts = (labels) => labels.map((label) => Math.min(180, textWidth(shown(label), font)));
    const sum = (list) => list.reduce((a, b) => a + b, 0), lines = [texts(colLabels), texts(rowLabels)];
    const gap = Math.min(34, ...lines.map((line) => (width - sum(line)) / Math.max(1, line.length)));
    const [above, below] = lines.map((line) => line.map((size) => size + gap));
    if (gap >= 16) {
      const line = (sizes, y) => {
        let x = 0;
        return sizes.map((size) => { const at = { x: x + size / 2, y, w: size - 4, h: 34 }; x += size; return at; });
      };
      return { height: 310, flat: true, cols: line(above, 28), rows: line(below, 276), room: 180 };
    }
    const step = 34, text = Math.min(190, width * 0.34), span = Math.min(width, 2 * text + 320);
    const column = (labels, x, align) => labels.map((_, i) => ({ x, y: 24 + i * step, w: text, h: step, align }));
    return { height: 40 + step * Math.max(rowLabels.length, colLabels.length, 1), flat: false, room: text - 12,
      cols: column(colLabels, text / 2, "right"), rows: column(rowLabels, span - text / 2, "left") };
  }

  draw(pen) {
    if (!this.now()) return;
    const at = this.layout(pen.width), { rowLabels, colLabels, matrix } = this.now(), { find } = this.app.state.now;
    const { accent, ink, quiet } = pen.colours, held = this.live ? { row: -1, col: -1 } : this.app.state.now;
    const row = this.over?.row ?? held.row, col = this.over?.col ?? (this.over ? -1 : held.col);
    this.lines(pen, at, row, col);
    const weight = (r, c) => matrix.values[r * matrix.cols + c] ?? 0;
    const token = (label, { x, y, w, h, align = "center" }, on, payload, shade) => {
      const edge = { center: 0, right: w / 2 - 8, left: 8 - w / 2 }[align];
      if (shade > 0.01) pen.rect(x - w / 2, y - 14, w, 28, { fill: accent, radius: 8, opacity: 0.04 + 0.36 * shade });
      pen.text(fitted(shown(label), at.room, pen.font(SIZE)), x + edge, y,
        { size: SIZE, align, weight: on ? 600 : 400, fill: on || isFound(label, find) ? accent : label.special ? quiet : ink });
      pen.hit(x - w / 2, y - h / 2, w, h, payload);
    };
    colLabels.forEach((label, c) => token(label, at.cols[c], c === col, { col: c }, row >= 0 ? weight(row, c) : 0));
    rowLabels.forEach((label, r) => token(label, at.rows[r], r === row, { row: r }, row < 0 && col >= 0 ? weight(r, col) : 0));
  }

  lines(pen, at, row, col) {
    const { matrix } = this.now(), { threshold, top } = this.app.state.now, every = row < 0 && col < 0;
    for (let r = 0; r < matrix.rows; r++) {
      const weights = rowOf(matrix, r), order = strongest(weights, threshold, every || r !== row ? top : undefined);
      const faint = row >= 0 && r !== row ? 0.22 : 1;
      for (const c of row < 0 && col >= 0 ? order.filter((i) => i === col) : order) this.line(pen, at, at.rows[r], at.cols[c], weights[c], faint);
    }
  }

  line(pen, at, from, to, weight, faint) {
    const style = { stroke: pen.colours.accent, width: 0.8 + 3.4 * weight, opacity: faint * (0.1 + 0.9 * weight) };
    if (at.flat) {
      const [y1, y2] = [from.y - 18, to.y + 18], half = (y1 - y2) / 2;
      pen.path([from.x, y1, from.x, y1 - half, to.x, y2 + half, to.x, y2], style);
    } else {
      const [x1, x2] = [from.x - from.w / 2, to.x + to.w / 2], half = (x1 - x2) / 2;
      pen.path([x1, from.y, x1 - half, from.y, x2 + half, to.y, x2, to.y], style);
    }
  }

  hover(hit, event) {
    if (hit?.row !== this.over?.row || hit?.col !== this.over?.col) { this.over = hit ?? null; this.sheet.redraw(); }
    const { matrix, rowLabels, colLabels } = this.shown ?? {}, { row } = this.app.state.now;
    if (this.live || hit?.col === undefined || row < 0 || row >= (matrix?.rows ?? 0)) return;
    tip.show(event, matrix.values[row * matrix.cols + hit.col], `${shown(rowLabels[row])} → ${shown(colLabels[hit.col])}`);
  }

  press(hit) {
    if (!hit || this.live) return;
    const { state } = this.app, { row, col } = state.now;
    if (hit.row !== undefined) state.set(row === hit.row ? { row: -1, col: -1 } : { row: hit.row, col: -1 });
    else state.set({ col: col === hit.col ? -1 : hit.col });
  }

  rows() {
    const { matrix, rowLabels, colLabels } = this.now();
    return tableOf(rowLabels, colLabels, matrix);
  }

  close() { this.player?.stop(); this.live = null; this.sheet.close(); }
}

export default {
  id: "align", panel: true, kind: "cross", controls: ["layer", "head", "find", "threshold", "top", "words"],
  fits: ({ look, source }) => "cross" in look.kinds && !look.image && !source.overviewOnly && (source.only?.kind ?? "cross") === "cross",
  open: (host, app) => new Align(host, app),
};
