// The image with one token's weights overlaid on its patches.
import { css, heat, scaled } from "../colour.js";
import { brief, el, screenBelow, shown, slider, tokenText } from "../dom.js";
import { largest, strongest } from "../matrix.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const MOST = 256; // tokens to choose from

class ImageOverlay {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, shade: 0.75, over: null });
    const { t } = app;
    this.chips = el("div", { class: "chips" });
    this.place = el("div");
    host.append(this.chips, el("div", { class: "row" }, el("p", { class: "caption" }, t("image.caption")),
      slider(t("image.shade"), { min: 0, max: 1, step: 0.05 }, this.shade, (v) => v.toFixed(2), (v) => { this.shade = v; this.sheet.redraw(); })), this.place);
    this.sheet = new Surface(this.place, {
      label: t("view.image"), draw: (pen) => this.draw(pen), height: (w) => this.side(w)[1] + 40,
      hover: (hit, event) => this.hover(hit, event), leave: () => { this.over = null; this.sheet.redraw(); },
      press: (hit) => this.press(hit),
    });
    this.picture = new Image();
    this.picture.addEventListener("load", () => this.sheet.redraw());
    this.picture.src = app.source.imageUrl(app.look);
  }

  async update() {
    const mine = ++this.asked, { data, state } = this.app, { kind, layer, head } = this.app.where(), { rows } = data.size(kind);
    if (state.now.row < 0) state.now.row = kind === "cross" ? data.look.uncertain ?? 0 : 0; // there is always a query
    const [rowLabels, colLabels] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols")]);
    const row = state.now.row < rows ? state.now.row : 0;
    const weights = await data.row(kind, layer, head, row);
    if (mine !== this.asked) return;
    this.shown = { kind, row, rowLabels, colLabels, weights, max: largest(weights) };
    const chip = (label, r) => !label.box && el("button", { // patches are chosen on the image itself
      type: "button", "aria-pressed": String(r === row), "data-row": String(r), onclick: () => state.set({ row: r, col: -1 }),
    }, el("bdi", {}, shown(label)));
    this.chips.replaceChildren(...rowLabels.slice(0, MOST).map(chip).filter(Boolean));
    this.sheet.redraw();
  }

  side(width) {
    const { naturalWidth: w, naturalHeight: h } = this.picture, wide = Math.min(width, 520, Math.max(300, screenBelow(this.place) - 44));
    return [wide, w ? (wide * h) / w : wide];
  }

  draw(pen) {
    const [wide, tall] = this.side(pen.width), { theme, accent, quiet } = pen.colours, { log, col } = this.app.state.now;
    if (this.picture.complete && this.picture.naturalWidth) pen.image(this.picture, 0, 0, wide, tall);
    if (!this.shown) return;
    const { colLabels, weights, max, rowLabels, row } = this.shown;
    const place = ([x0, y0, x1, y1]) => [x0 * wide, y0 * tall, (x1 - x0) * wide, (y1 - y0) * tall];
    const named = new Set(strongest(weights.map((w, c) => (colLabels[c].box ? w : 0)), 0, this.app.state.now.top));
    colLabels.forEach((label, c) => {
      if (!label.box) return;
      const t = scaled(weights[c], max, log), colour = heat(t, theme), box = place(label.box), fill = css(colour);
      pen.rect(...box, { fill, opacity: this.shade * (0.18 + 0.82 * t) });
      if (box[2] > 44 && named.has(c) && this.shade > 0) this.value(pen, brief(weights[c]), box[0] + box[2] / 2, box[1] + box[3] / 2);
      if (c === col || c === this.over) pen.rect(box[0] + 1, box[1] + 1, box[2] - 2, box[3] - 2, { stroke: accent, width: 2 });
      pen.hit(...box, c);
    });
    if (rowLabels[row].box) { // the query is itself a patch
      const box = place(rowLabels[row].box);
      pen.rect(box[0] + 2, box[1] + 2, box[2] - 4, box[3] - 4, { stroke: accent, width: 2.5 });
    }
    const off = colLabels.reduce((sum, label, c) => sum + (label.box ? 0 : weights[c]), 0);
    if (off > 0) pen.text(`${colLabels.filter((label) => !label.box).map(shown).join(" ")}  ${brief(off)}`, 0, tall + 18, { size: 12, fill: quiet });
  }

  /** Draw a number that is readable on any image. */
  value(pen, text, x, y) {
    pen.rect(x - 19, y - 10, 38, 20, { fill: "#1d1915", radius: 6, opacity: 0.62 });
    pen.text(text, x, y, { size: 12, align: "center", fill: "#ffffff" });
  }

  hover(hit, event) {
    if (hit !== this.over) { this.over = hit; this.sheet.redraw(); }
    if (hit === undefined) return;
    const { rowLabels, row, colLabels, weights } = this.shown;
    tip.show(event, weights[hit], `${shown(rowLabels[row])} → ${shown(colLabels[hit])}`);
  }

  press(hit) {
    if (hit === undefined) return;
    const { state } = this.app, { row } = this.shown;
    if (this.shown.kind === "encoder") state.set({ row: hit, col: -1 }); // queries are patches: choose the query
    else state.set({ row, col: state.now.col === hit ? -1 : hit });
  }

  rows() {
    const { colLabels, weights } = this.shown;
    return [["patch", "x0", "y0", "x1", "y1", "weight"], ...colLabels.map((label, c) => [tokenText(label), ...(label.box ?? ["", "", "", ""]), weights[c]])];
  }

  close() { this.sheet.close(); }
}

export default {
  id: "image", panel: true, controls: ["kind", "layer", "head", "top", "log", "words"],
  fits: ({ look, source }) => Boolean(look.image) && !source.overviewOnly,
  open: (host, app) => new ImageOverlay(host, app),
};
