// The attention matrix: exact weights when zoomed in, block means otherwise.
import { heat, inkOn, scaled } from "../colour.js";
import { brief, count, el, screenBelow, shown, tokenText } from "../dom.js";
import { columnName, isFound, largest, longestName, nameSize } from "../matrix.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const EXACT = 512; // largest number of rows or columns shown with exact weights
const OVERVIEW = 320;
const LARGEST_CELL = 58;
const READABLE_CELL = { wide: 12, narrow: 16 }; // phones scroll anyway

class HeatMap {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    const { t } = app;
    this.caption = el("p", { class: "caption" });
    const button = (text, name, go) => el("button", { type: "button", class: "plain", title: name, "aria-label": name, onclick: go }, text);
    this.zooming = el("div", { class: "row" }, button("+", t("zoom.in"), () => this.zoom(0.5)),
      button("−", t("zoom.out"), () => this.zoom(2)), button("⤢", t("zoom.all"), () => app.state.set({ zoom: "" })));
    this.place = el("div");
    host.append(this.caption, this.zooming, this.place);
    this.sheet = new Surface(this.place, {
      label: t("view.heatmap"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (_, event, at) => this.hover(event, at), leave: () => { this.over = null; this.sheet.redraw(); },
      press: (_, __, at) => this.press(at),
    });
    this.sheet.node.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.cell(this.sheet.place(event)));
    }, { passive: false });
    this.dragging();
  }

  /** The visible part of the matrix: [r0, r1, c0, c1]. */
  window() {
    const { rows, cols } = this.app.data.size(this.app.where().kind);
    const asked = this.app.state.now.zoom.split(",").map(Number);
    const [r0, r1, c0, c1] = asked.length === 4 && asked.every(Number.isInteger) ? asked : [0, rows, 0, cols];
    const low = (a, total) => Math.min(Math.max(0, a), total - 1);
    const [top, left] = [low(r0, rows), low(c0, cols)];
    return [top, Math.min(rows, Math.max(top + 1, r1)), left, Math.min(cols, Math.max(left + 1, c1))];
  }

  async update() {
    const mine = ++this.asked, { data } = this.app, where = this.app.where();
    const { kind, layer, head } = where, [r0, r1, c0, c1] = this.window();
    const labels = Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols")]);
    const exact = r1 - r0 <= EXACT && c1 - c0 <= EXACT && !this.app.source.overviewOnly;
    const cells = exact
      ? data.block(kind, layer, head, r0, r1, c0, c1)
      : data.overview(kind, layer, head, OVERVIEW, OVERVIEW);
    const [[rowLabels, colLabels], matrix] = await Promise.all([labels, cells]);
    if (mine !== this.asked) return;
    const size = data.size(kind), span = exact ? [r0, r1, c0, c1] : [0, size.rows, 0, size.cols];
    this.shown = { ...where, matrix, span, window: [r0, r1, c0, c1], exact, rowLabels, colLabels, max: largest(matrix.values) };
    const { t } = this.app, step = (total, n) => (total / n).toFixed(total % n ? 1 : 0);
    const isWhole = exact || (matrix.rows === size.rows && matrix.cols === size.cols);
    this.shown.whole = isWhole;
    this.caption.textContent = [isWhole ? `${t("heatmap.caption")} ${this.app.look.kinds[kind].normalised === false ? "" : t("heatmap.sums")}`
      : t("heatmap.pooled", { r: step(size.rows, matrix.rows), c: step(size.cols, matrix.cols) }), this.app.readingNote()].join(" ");
    this.zooming.hidden = Math.max(size.rows, size.cols) < 24;
    this.sheet.redraw();
  }

  layout(width) {
    if (!this.shown) return { height: 240, left: 0, top: 0, side: [0, 0] };
    const { window: [r0, r1, c0, c1], rowLabels, colLabels } = this.shown, rows = r1 - r0, cols = c1 - c0;
    const longest = (labels, a, b) => b - a > 120 ? 0 : longestName(labels.slice(a, b));
    const left = Math.min(longest(rowLabels, r0, r1), width * 0.3) + 12, over = longest(colLabels, c0, c1);
    const tall = Math.max(screenBelow(this.place) - 0.72 * over - 70, Math.min(READABLE_CELL[width < 560 ? "narrow" : "wide"] * rows, Math.max(620, width * 0.7)));
    const cellIn = (room) => Math.min(LARGEST_CELL, room / cols, tall / rows);
    const slanted = over > cellIn(width - left - 8) - 6; // long labels are slanted and need room on the right
    const cell = cellIn(width - left - 8 - (slanted ? Math.min(0.62 * over, width * 0.15) : 0));
    const labelled = cell >= 10.5, upright = labelled && slanted;
    const above = !labelled ? 8 : upright ? over * 0.72 + 22 : 26;
    const side = cols > EXACT || rows > EXACT || cell < 2
      ? [Math.min(width - left - 8, 720), Math.min(width - left - 8, 720) * Math.min(1.6, rows / cols)] : [cell * cols, cell * rows];
    return { left: labelled ? left : 8, top: above, cell: [side[0] / cols, side[1] / rows], side, labelled, upright, height: above + side[1] + 44 };
  }

  draw(pen) {
    if (!this.shown) return;
    const { matrix, span, window: [r0, r1, c0, c1], rowLabels, colLabels, max } = this.shown;
    const { log, find, row, col } = this.app.state.now, { theme, ink, quiet, accent, line } = pen.colours;
    const { left, top, cell: [wide, tall], side, labelled, upright } = this.layout(pen.width), size = nameSize(Math.min(wide, tall), 13);
    const colour = (value) => heat(scaled(value, max, log), theme);
    const x = (c) => left + (c - c0) * wide, y = (r) => top + (r - r0) * tall;
    pen.clip(left, top, side[0], side[1], () => {
      pen.matrix(x(span[2]), y(span[0]), (span[3] - span[2]) * wide, (span[1] - span[0]) * tall, { ...matrix, colour });
    });
    pen.rect(left - 0.5, top - 0.5, side[0] + 1, side[1] + 1, { stroke: line });
    const held = [this.over?.row ?? row, this.over?.col ?? col];
    const style = (label, on) => ({ size, fill: on ? accent : label.special ? quiet : ink, weight: on ? 600 : 400 });
    for (let r = r0; labelled && r < r1; r++) {
      const label = rowLabels[r];
      pen.text(fitted(shown(label), left - 10, pen.font(size)), left - 8, y(r) + tall / 2, { ...style(label, isFound(label, find) || r === held[0]), align: "right" });
    }
    for (let c = c0; labelled && c < c1; c++) {
      const label = colLabels[c], on = isFound(label, find) || c === held[1];
      columnName(pen, label, x(c) + wide / 2, top, upright && wide, style(label, on));
    }
    if (wide >= 32 && this.shown.exact) this.values(pen, x, y, wide, tall, colour);
    this.frames(pen, x, y, wide, tall, held);
    this.legend(pen, left, top + side[1] + 20, Math.min(side[0], 220), max);
  }

  values(pen, x, y, wide, tall, colour) {
    const { matrix, span } = this.shown;
    for (let i = 0; i < matrix.values.length; i++) {
      const r = span[0] + Math.floor(i / matrix.cols), c = span[2] + (i % matrix.cols), value = matrix.values[i];
      if (value < 0.005) continue;
      pen.text(brief(value), x(c) + wide / 2, y(r) + tall / 2, { size: 11, align: "center", fill: inkOn(colour(value)) });
    }
  }

  frames(pen, x, y, wide, tall, [row, col]) {
    const { window: [r0, r1, c0, c1] } = this.shown, stroke = pen.colours.accent;
    const inRows = row >= r0 && row < r1, inCols = col >= c0 && col < c1;
    if (inRows) pen.rect(x(c0), y(row), (c1 - c0) * wide, Math.max(1, tall), { stroke, opacity: 0.5 });
    if (inRows && inCols && wide > 3) pen.rect(x(col), y(row), wide, tall, { stroke, width: 2 });
  }

  legend(pen, left, top, width, max) {
    const { log } = this.app.state.now, { theme, quiet } = pen.colours, n = 64;
    const ramp = Float32Array.from({ length: n }, (_, i) => i / (n - 1));
    pen.matrix(left, top, width, 6, { values: ramp, rows: 1, cols: n, colour: (v) => heat(v, theme) });
    pen.text(log ? brief(max / 1e4) : "0", left, top + 16, { size: 11, fill: quiet });
    pen.text(brief(max), left + width, top + 16, { size: 11, fill: quiet, align: "right" });
  }

  /** The cell at a point of the drawing. */
  cell({ x, y }) {
    if (!this.shown) return null;
    const { left, top, cell: [wide, tall], side } = this.layout(this.sheet.size().width);
    if (x < left || y < top || x >= left + side[0] || y >= top + side[1]) return null;
    const [r0, r1, c0, c1] = this.shown.window;
    return { row: Math.min(r1 - 1, r0 + Math.floor((y - top) / tall)), col: Math.min(c1 - 1, c0 + Math.floor((x - left) / wide)) };
  }

  hover(event, at) {
    const found = this.cell(at);
    if (found?.row !== this.over?.row || found?.col !== this.over?.col) { this.over = found; this.sheet.redraw(); }
    if (!found || this.dragged) return;
    const { matrix, span, rowLabels, colLabels, whole } = this.shown, { row, col } = found;
    const pair = `${shown(rowLabels[row])} → ${shown(colLabels[col])}`;
    if (whole) {
      tip.show(event, matrix.values[(row - span[0]) * matrix.cols + col - span[2]], pair);
      return;
    }
    const r = blockOf(row, span[1], matrix.rows), c = blockOf(col, span[3], matrix.cols);
    const about = { r0: count(r.from + 1), r1: count(r.to), c0: count(c.from + 1), c1: count(c.to) };
    tip.show(event, matrix.values[r.at * matrix.cols + c.at], this.app.t("heatmap.cell", about), pair);
  }

  press(at) {
    const found = this.cell(at);
    if (!found || this.dragged) return;
    const { row, col } = this.app.state.now;
    this.app.state.set(row === found.row && col === found.col ? { row: -1, col: -1 } : found);
  }

  zoom(factor, around) {
    const { rows, cols } = this.app.data.size(this.app.where().kind), [r0, r1, c0, c1] = this.window();
    const { row, col } = this.app.state.now;
    const centre = around ?? (row >= 0 ? { row, col: Math.max(0, col) } : { row: (r0 + r1) / 2, col: (c0 + c1) / 2 });
    const scaledTo = (a, b, at, total) => {
      const size = Math.min(total, Math.max(Math.min(8, total), Math.round((b - a) * factor)));
      const start = Math.min(total - size, Math.max(0, Math.round(at - ((at - a) / (b - a || 1)) * size)));
      return [start, start + size];
    };
    const next = [...scaledTo(r0, r1, centre.row, rows), ...scaledTo(c0, c1, centre.col, cols)];
    this.app.state.set({ zoom: next[1] - next[0] === rows && next[3] - next[2] === cols ? "" : next.join(",") });
  }

  dragging() {
    const { node } = this.sheet;
    let from = null;
    node.addEventListener("pointerdown", (event) => { from = { x: event.clientX, y: event.clientY, window: this.window() }; this.dragged = false; });
    node.addEventListener("pointermove", (event) => {
      if (!from || !this.shown || !this.app.state.now.zoom) return;
      const { cell: [wide, tall] } = this.layout(this.sheet.size().width), { rows, cols } = this.app.data.size(this.app.where().kind);
      const by = [Math.round((from.y - event.clientY) / tall), Math.round((from.x - event.clientX) / wide)];
      if (!by[0] && !by[1]) return;
      this.dragged = true;
      const [r0, r1, c0, c1] = from.window, moved = (a, b, d, total) => { const s = Math.min(total - (b - a), Math.max(0, a + d)); return [s, s + b - a]; };
      this.app.state.set({ zoom: [...moved(r0, r1, by[0], rows), ...moved(c0, c1, by[1], cols)].join(",") });
    });
    const end = () => { from = null; setTimeout(() => { this.dragged = false; }); };
    node.addEventListener("pointerup", end);
    node.addEventListener("pointerleave", end);
  }

  /** The visible weights as rows of a table. */
  rows() {
    const { matrix, span, rowLabels, colLabels, exact } = this.shown;
    const name = (labels, at, from, n, total) => exact ? tokenText(labels[at + from]) : `${Math.floor((at * total) / n)}`;
    const head = Array.from({ length: matrix.cols }, (_, c) => name(colLabels, c, span[2], matrix.cols, span[3]));
    return [["", ...head], ...Array.from({ length: matrix.rows }, (_, r) =>
      [name(rowLabels, r, span[0], matrix.rows, span[1]), ...matrix.values.subarray(r * matrix.cols, (r + 1) * matrix.cols)])];
  }

  close() { this.sheet.close(); }
}

/** The block of an index among `n` blocks of `total`; the first blocks are one larger (as in torch.tensor_split). */
export function blockOf(index, total, n) {
  const size = Math.floor(total / n), larger = total % n, edge = larger * (size + 1);
  const at = index < edge ? Math.floor(index / (size + 1)) : larger + Math.floor((index - edge) / size);
  const from = at * size + Math.min(at, larger);
  return { at, from, to: from + size + (at < larger ? 1 : 0) };
}

export default {
  id: "heatmap", panel: true, controls: ["kind", "layer", "head", "find", "top", "log", "words"],
  fits: () => true,
  open: (host, app) => new HeatMap(host, app),
};
