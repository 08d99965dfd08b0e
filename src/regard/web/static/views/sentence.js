// Two columns of tokens with lines between them; squares beside the tokens show every head's weights for the pinned token.
import { css, heat, scaled } from "../colour.js";
import { count, el, number, shown } from "../dom.js";
import { isFound, rowOf, strongest, tableOf } from "../matrix.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const PART = 160; // tokens shown at once
const STEP = 30; // height of a token
const SIZE = 15;

class Sentence {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, over: null, heads: null });
    this.pager = el("div", { class: "row", hidden: true });
    this.place = el("div");
    this.note = el("p", { class: "caption num" });
    const caption = [app.t("sentence.caption"), app.readingNote()].join(" ");
    host.append(el("p", { class: "caption" }, caption), this.pager, this.place, this.note);
    this.sheet = new Surface(this.place, {
      label: app.t("view.sentence"), draw: (pen) => this.draw(pen),
      height: () => 16 + STEP * (this.shown ? Math.max(this.shown.part[1] - this.shown.part[0], this.shown.part[3] - this.shown.part[2]) : 6),
      hover: (hit, event) => this.hover(hit, event), press: (hit) => this.press(hit),
      leave: () => { this.over = null; this.sheet.redraw(); },
    });
  }

  async update() {
    const mine = ++this.asked, { data, state } = this.app, where = this.app.where(), { kind, layer, head } = where;
    const { rows, cols } = data.size(kind), from = Math.min(Math.max(0, state.now.from), Math.max(0, Math.max(rows, cols) - 1));
    const within = (total) => total <= PART ? [0, total] : [Math.min(from, total - PART), Math.min(from, total - PART) + PART];
    const part = [...within(rows), ...within(cols)];
    const row = state.now.row < rows ? state.now.row : -1;
    const [rowLabels, colLabels, matrix, heads] = await Promise.all([
      data.labels(kind, "rows"), data.labels(kind, "cols"), data.block(kind, layer, head, ...part), this.everyHead(where, row, part),
    ]);
    if (mine !== this.asked) return;
    this.shown = { ...where, part, rowLabels, colLabels, matrix, row, heads };
    this.page(rows, cols, from);
    this.outside();
    this.sheet.redraw();
  }

  /** One row of each head of the layer, for the squares beside the tokens. */
  async everyHead({ kind, layer }, row, part) {
    const { data } = this.app, n = data.size(kind).heads;
    if (row < part[0] || row >= part[1] || this.app.source.only) return null;
    return Promise.all(Array.from({ length: n }, (_, h) =>
      data.block(kind, layer, h, row, row + 1, part[2], part[3]).then((b) => b.values)));
  }

  page(rows, cols, from) {
    const { t, state } = this.app, total = Math.max(rows, cols);
    this.pager.hidden = total <= PART;
    if (total <= PART) return;
    const go = (to) => () => state.set({ from: Math.min(Math.max(0, to), total - PART) });
    const start = Math.min(from, total - PART);
    this.pager.replaceChildren(el("button", { type: "button", class: "plain", onclick: go(start - PART) }, "‹"),
      el("span", { class: "quiet num" }, t("sentence.part", { a: count(start + 1), b: count(start + PART), n: count(total) })),
      el("button", { type: "button", class: "plain", onclick: go(start + PART) }, "›"));
  }

  /** For a long text, show the total weight of the keys outside the visible part. */
  outside() {
    const { part, matrix, row } = this.shown, { cols } = this.app.data.size(this.shown.kind);
    const is = row >= part[0] && row < part[1] && part[3] - part[2] < cols;
    if (!is) { this.note.textContent = ""; return; }
    const inside = rowOf(matrix, row - part[0]).reduce((a, b) => a + b, 0);
    this.note.textContent = this.app.t("sentence.outside", { w: number(Math.max(0, 1 - inside)) });
  }

  columns(width) {
    const squares = this.shown.heads ? Math.min(14, Math.max(5, (width * 0.3) / this.shown.heads.length)) : 0;
    const strip = squares * (this.shown.heads?.length ?? 0);
    const text = Math.min(190, (width - strip - 60) * 0.4);
    const span = Math.min(width - strip - 16, 2 * text + 380);
    return { left: text, right: span - text, text, squares, strip };
  }

  draw(pen) {
    if (!this.shown) return;
    const { part: [r0, r1, c0, c1], matrix, rowLabels, colLabels } = this.shown, { find } = this.app.state.now;
    const at = this.columns(pen.width), row = this.over?.row ?? this.shown.row, colOver = this.over?.col ?? -1;
    const y = (i) => 8 + STEP * (i + 0.5), weight = (r, c) => matrix.values[(r - r0) * matrix.cols + c - c0];
    const chosen = row >= r0 && row < r1, { accent, ink, quiet } = pen.colours;
    this.lines(pen, at, y, chosen ? row : -1, colOver);
    const name = (label, x, i, align, on, payload) => {
      const text = fitted(shown(label), at.text - 16, pen.font(SIZE));
      pen.text(text, x, y(i), { size: SIZE, align, weight: on ? 600 : 400, fill: on || isFound(label, find) ? accent : label.special ? quiet : ink });
      pen.hit(align === "right" ? 0 : x - 8, y(i) - STEP / 2, at.text + 8, STEP, payload);
    };
    for (let c = c0; c < c1; c++) {
      const w = chosen ? weight(row, c) : 0;
      if (chosen) pen.rect(at.right + 2, y(c - c0) - 12, at.text - 4, 24, { fill: accent, radius: 6, opacity: 0.04 + 0.4 * w });
      name(colLabels[c], at.right + 10, c - c0, "left", c === colOver, { col: c });
    }
    for (let r = r0; r < r1; r++) name(rowLabels[r], at.left - 10, r - r0, "right", r === row, { row: r });
    if (chosen && this.shown.heads && row === this.shown.row) this.squares(pen, at, y);
  }

  lines(pen, at, y, row, col) {
    const { part: [r0, r1, c0, c1], matrix } = this.shown, { threshold, top } = this.app.state.now;
    const half = (at.right - at.left) / 2;
    for (let r = row < 0 ? r0 : row; r < (row < 0 ? r1 : row + 1); r++) {
      const weights = rowOf(matrix, r - r0), order = strongest(weights, threshold, row < 0 && col < 0 ? top : undefined);
      for (const i of col >= 0 ? order.filter((c) => c + c0 === col) : order) {
        const [x1, y1, x2, y2] = [at.left, y(r - r0), at.right, y(i)], w = weights[i];
        pen.path([x1, y1, x1 + half, y1, x2 - half, y2, x2, y2], { stroke: pen.colours.accent, width: 0.8 + 3 * w, opacity: 0.12 + 0.88 * w });
      }
    }
  }

  squares(pen, at, y) {
    const { part: [, , c0, c1], heads, row } = this.shown, size = at.squares, x0 = at.right + at.text + 14;
    heads.forEach((weights, h) => {
      for (let c = c0; c < c1; c++) {
        const x = x0 + h * size, fill = css(heat(scaled(weights[c - c0], 1, false), pen.colours.theme));
        pen.rect(x, y(c - c0) - 9, size - 1.5, 18, { fill, radius: 2 });
        pen.hit(x, y(c - c0) - STEP / 2, size, STEP, { row, col: c, square: h, weight: weights[c - c0] });
      }
    });
  }

  hover(hit, event) {
    const held = this.shown?.row ?? -1;
    const next = hit && hit.square === undefined ? hit : null;
    if (next?.row !== this.over?.row || next?.col !== this.over?.col) { this.over = next; this.sheet.redraw(); }
    if (!hit) return;
    const { rowLabels, colLabels, matrix, part } = this.shown, { t } = this.app;
    if (hit.square !== undefined) {
      tip.show(event, hit.weight, `${shown(rowLabels[hit.row])} → ${shown(colLabels[hit.col])}`, `${t("head")} ${hit.square + 1}`);
    } else if (hit.col !== undefined && held >= part[0] && held < part[1]) {
      tip.show(event, matrix.values[(held - part[0]) * matrix.cols + hit.col - part[2]], `${shown(rowLabels[held])} → ${shown(colLabels[hit.col])}`);
    }
  }

  press(hit) {
    if (!hit) return;
    const { state } = this.app, { row, col } = state.now;
    if (hit.square !== undefined) state.set({ head: hit.square });
    else if (hit.row !== undefined) state.set(row === hit.row ? { row: -1, col: -1 } : { row: hit.row, col: -1 });
    else if (row >= 0) state.set({ col: col === hit.col ? -1 : hit.col });
  }

  rows() {
    const { part: [r0, r1, c0, c1], matrix, rowLabels, colLabels } = this.shown;
    return tableOf(rowLabels.slice(r0, r1), colLabels.slice(c0, c1), matrix);
  }

  close() { this.sheet.close(); }
}

export default {
  id: "sentence", panel: true, controls: ["kind", "layer", "head", "find", "threshold", "top", "words"],
  fits: ({ source }) => !source.overviewOnly,
  opens: ({ look }) => Object.values(look.kinds).every(({ n_rows: rows, n_cols: cols }) => Math.max(rows, cols) <= PART),
  open: (host, app) => new Sentence(host, app),
};
