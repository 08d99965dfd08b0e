// Thumbnails of every head of every layer; a click opens one.
import { heat, scaled } from "../colour.js";
import { el, shown } from "../dom.js";
import { largest } from "../matrix.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const SIZE = 32; // cells of a thumbnail's longer side

class Grid {
  constructor(host, app) {
    Object.assign(this, { app, layers: [], asked: 0, over: null });
    this.place = el("div");
    host.append(el("p", { class: "caption" }, app.t("grid.caption")), this.place);
    this.sheet = new Surface(this.place, {
      label: app.t("view.grid"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event, at) => this.hover(hit, event, at), leave: () => { this.over = null; this.sheet.redraw(); },
      press: (hit) => hit && app.go("heatmap", { layer: hit.layer, head: hit.head }),
    });
  }

  async update() {
    const mine = ++this.asked, { data } = this.app, { kind } = this.app.where(), { layers } = data.size(kind);
    if (this.kind !== kind) Object.assign(this, { kind, layers: [] });
    [this.rowLabels, this.colLabels] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols")]);
    await Promise.all(Array.from({ length: layers }, async (_, layer) => {
      const found = await data.thumbnails(kind, layer, SIZE);
      if (mine !== this.asked) return;
      this.layers[layer] = found; // drawn as they arrive
      this.sheet.redraw();
    }));
  }

  layout(width) {
    const { rows, cols, layers, heads } = this.app.data.size(this.app.where().kind), left = 40, top = 28, gap = 12;
    const side = Math.min(150, (width - left) / heads - gap);
    const tall = Math.max(12, side * Math.min(1.4, Math.max(0.4, Math.min(rows, 4096) / cols)));
    return { left, top, gap, side, tall, height: top + layers * (tall + gap) + 8 };
  }

  draw(pen) {
    const { left, top, gap, side, tall } = this.layout(pen.width), { heads } = this.app.data.size(this.app.where().kind);
    const { log } = this.app.state.now, { theme, quiet, accent, line } = pen.colours, now = this.app.where();
    const { t } = this.app, named = side > 64 ? `${t("head")} ` : "";
    pen.text(t("layer"), 0, 12, { size: 12, fill: quiet });
    for (let h = 0; h < heads; h++) pen.text(`${named}${h + 1}`, left + h * (side + gap) + side / 2, 12, { size: 12, fill: quiet, align: "center" });
    this.layers.forEach((thumbs, layer) => {
      const [n, rows, cols] = thumbs.shape, y = top + layer * (tall + gap);
      pen.text(String(layer + 1), 14, y + tall / 2, { size: 12, fill: quiet, align: "center" });
      for (let h = 0; h < n; h++) {
        const values = thumbs.values.subarray(h * rows * cols, (h + 1) * rows * cols), x = left + h * (side + gap);
        const max = largest(values);
        pen.matrix(x, y, side, tall, { values, rows, cols, colour: (v) => heat(scaled(v, max, log), theme) });
        const on = (layer === now.layer && h === now.head) || (this.over?.layer === layer && this.over?.head === h);
        pen.rect(x - 0.5, y - 0.5, side + 1, tall + 1, { stroke: on ? accent : line, width: on ? 2 : 1, radius: 2 });
        pen.hit(x, y, side, tall, { layer, head: h, x, y });
      }
    });
  }

  hover(hit, event, at) {
    if (hit?.layer !== this.over?.layer || hit?.head !== this.over?.head) { this.over = hit; this.sheet.redraw(); }
    if (!hit) return;
    const { side, tall } = this.layout(this.sheet.size().width), { t, data } = this.app, size = data.size(this.kind);
    const { shape: [, rows, cols], values } = this.layers[hit.layer];
    const r = Math.min(rows - 1, Math.floor(((at.y - hit.y) / tall) * rows)), c = Math.min(cols - 1, Math.floor(((at.x - hit.x) / side) * cols));
    const value = values[(hit.head * rows + r) * cols + c], name = t("grid.cell", { l: hit.layer + 1, h: hit.head + 1 });
    const exact = rows === size.rows && cols === size.cols;
    tip.show(event, value, exact ? `${shown(this.rowLabels[r])} → ${shown(this.colLabels[c])}` : t("grid.block"), name);
  }

  rows() {
    const out = [["layer", "head", "row", "column", "weight"]];
    this.layers.forEach(({ shape: [n, rows, cols], values }, layer) => {
      for (let i = 0; i < n * rows * cols; i++) {
        out.push([layer, Math.floor(i / (rows * cols)), Math.floor(i / cols) % rows, i % cols, values[i]].map((v, j) => j < 4 ? String(v) : v));
      }
    });
    return out;
  }

  close() { this.sheet.close(); }
}

export default {
  id: "grid", panel: false, controls: ["kind", "log", "words"],
  fits: ({ source }) => !source.only,
  open: (host, app) => new Grid(host, app),
};
