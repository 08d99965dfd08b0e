// Activation patching: activations of this text put one by one into the run of a changed text, and how much each restores.
import { css, inkOn, signed } from "../colour.js";
import { Data } from "../data.js";
import { count, el, number, offer, percent, refill, segmented, shown } from "../dom.js";
import { columnName, largest, longestName, nameSize } from "../matrix.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const OVER = ["residual", "attention", "ff", "heads"];
const CELL = 15; // minimum width of a token
const TALL = 30; // height of a layer
const BAR = 28;

class Patching {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, live: null, asked: 0, others: new Map() });
    const { t, state } = app;
    this.text = el("textarea", { class: "field corrupted", rows: 1, name: "corrupted", dir: "auto", spellcheck: false, "aria-label": t("patching.corrupted"),
      onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.compare(); } } });
    this.text.value = state.now.corrupted || app.look.text || "";
    this.button = el("button", { type: "button", class: "second", "data-do": "compare", onclick: () => this.compare() }, t("patching.compare"));
    this.after = el("select", { class: "field", "aria-label": t("next.after"), onchange: () => state.set({ position: Number(this.after.value), patch: "" }) });
    this.picks = el("div", { class: "row" });
    this.says = el("p", { class: "told", "aria-live": "polite" });
    this.pager = el("div", { class: "row" });
    this.place = el("div");
    this.form = el("div", { class: "row" }, el("label", { class: "grow" }, el("span", { class: "quiet" }, t("patching.corrupted")), this.text), this.button);
    host.append(el("p", { class: "caption" }, t("patching.caption")), this.form, this.picks, this.says, this.pager, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.patching"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => this.hover(hit, event),
      press: (hit) => hit?.unit !== undefined && state.set({ patch: `${hit.layer},${hit.unit}` }),
    });
  }

  compare() { this.app.state.set({ corrupted: this.text.value, patch: "", from: 0 }); }

  /** The look at the changed text, with the same translation if there is one, so that only the input differs. */
  other(text) {
    const { app } = this;
    if (!this.others.has(text)) {
      const target = app.model().source && app.look.target ? { target: app.look.target } : {};
      const asked = app.source.look({ model: app.state.now.model, text, ...target }).then((look) => new Data(app.source, look));
      asked.catch(() => this.others.delete(text));
      this.others.set(text, asked);
    }
    return this.others.get(text);
  }

  async update(changed) {
    const { app } = this, { data, look, state, t } = app, { corrupted, over } = state.now, mine = ++this.asked;
    this.giveUp?.abort();
    if (!corrupted || corrupted === look.text) { this.says.textContent = t("patching.first"); this.shown = null; this.sheet.redraw(); return; }
    if (this.shown && [...changed].every((name) => ["patch", "from"].includes(name))) { this.page(); await this.patch(); return; }
    const { kind } = app.where(), then = await this.other(corrupted), { signal } = this.giveUp = new AbortController();
    const position = await this.position(then), options = { kind, over, ...(position === undefined ? {} : { position }) };
    this.says.textContent = t("patching.busy");
    let found;
    try {
      found = await app.source.patching(look, then.look, options, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.says.textContent = "";
      throw error;
    }
    const axis = kind === "encoder" ? ["encoder", "cols"] : [data.mainKind, "rows"];
    const [labels, changedLabels] = await Promise.all([data.labels(...axis), then.labels(...axis)]);
    if (mine !== this.asked) return;
    const byHead = found.axes[1] === "head", cols = found.effects[0].length;
    const names = byHead ? Array.from({ length: cols }, (_, h) => ({ text: String(h + 1) })) : labels;
    this.shown = { ...found, then, options, byHead, cols, names, labels, changedLabels, layers: found.effects.length, values: Float32Array.from(found.effects.flat()) };
    this.live = null;
    this.choose();
    this.page();
    this.tell();
    this.sheet.redraw();
    await this.patch();
  }

  /** The position of the prediction: the chosen one, else the last, or for a translation the one that changes most. */
  async position(then) {
    const { app } = this, { look, data, state } = app;
    if (look.classes) return undefined;
    const labels = await data.labels(data.mainKind, "rows"), { position } = state.now;
    let at = position >= 0 && position < labels.length ? position : labels.length - 1;
    if (position < 0 && app.model().source && labels.length === then.size(then.mainKind).rows) {
      const changes = await app.source.changes(then.look, look);
      at = changes.indexOf(largest(changes));
    }
    offer(this.after, labels, at);
    return at;
  }

  choose() {
    const { t, state, look } = this.app, pick = segmented(t("patching.over"), OVER.map((one) => [one, t(`patching.${one}`)]), state.now.over, (over) => state.set({ over, patch: "" }));
    refill(this.picks, [pick, ...(look.classes ? [] : [el("label", {}, el("span", { class: "quiet" }, `${t("next.after")} `), this.after)])]);
  }

  tell() {
    const { t } = this.app, { answer, wrong, exact, effects } = this.shown, [layer, unit] = this.best();
    const best = { name: this.nameOf(layer, unit), p: percent(effects[layer][unit]) };
    this.says.textContent = [t("patching.says", { answer: shown(answer), wrong: shown(wrong) }), effects[layer][unit] > 0 ? t("patching.most", best) : t("patching.nothing"),
      exact ? "" : t("patching.estimate")].filter(Boolean).join(" ");
  }

  nameOf(layer, unit) {
    const { t } = this.app, { byHead, labels } = this.shown;
    return byHead ? t("grid.cell", { l: layer + 1, h: unit + 1 }) : t("patching.cell", { l: layer + 1, token: shown(labels[unit]) });
  }

  /** The cell that restores most; for the residual stream not in the first layer, whose input is the text itself. */
  best() {
    const { values, cols, byHead, layers } = this.shown, skip = this.app.state.now.over === "residual" && !byHead && layers > 1 ? cols : 0;
    const at = values.subarray(skip).reduce((best, value, i, all) => value > all[best] ? i : best, 0) + skip;
    return [Math.floor(at / cols), at % cols];
  }

  chosen() {
    const { layers, cols } = this.shown, [layer, unit] = this.app.state.now.patch.split(",").map(Number);
    return this.app.state.now.patch && layer < layers && unit < cols ? [layer, unit] : this.best();
  }

  /** Run the changed text with a single patch. */
  async patch() {
    const mine = this.asked, { app } = this, { then, options } = this.shown, [layer, unit] = this.chosen();
    this.sheet.redraw();
    const { predictions } = await app.source.patched(app.look, then.look, { ...options, layer, unit });
    if (mine !== this.asked) return;
    this.live = { layer, unit, predictions };
    this.sheet.redraw();
  }

  /** The visible tokens: as many as fit. */
  part(width) {
    const { cols } = this.shown, most = Math.max(4, Math.floor((width - this.left(width) - 70) / CELL));
    if (cols <= most) return [0, cols];
    const from = Math.min(Math.max(0, this.app.state.now.from), cols - most);
    return [from, from + most];
  }

  left(width) { return width < 560 ? 44 : 70; }

  page() {
    const { t, state } = this.app, { cols } = this.shown, [from, to] = this.part(this.sheet.size().width), step = to - from;
    this.pager.hidden = step === cols;
    const go = (at) => () => state.set({ from: Math.min(Math.max(0, at), cols - step) });
    this.pager.replaceChildren(el("button", { type: "button", class: "plain", "aria-label": "‹", onclick: go(from - step) }, "‹"),
      el("span", { class: "quiet num" }, t("sentence.part", { a: count(from + 1), b: count(to), n: count(cols) })),
      el("button", { type: "button", class: "plain", "aria-label": "›", onclick: go(from + step) }, "›"));
  }

  layout(width) {
    if (!this.shown) return { height: 10 };
    const { names, layers, byHead } = this.shown, [from, to] = this.part(width), left = this.left(width);
    const over = byHead ? 12 : longestName(names.slice(from, to)), cell = Math.min(byHead ? 64 : 46, (width - left - (byHead ? 0 : 0.62 * over)) / (to - from));
    const above = byHead ? 26 : 0.72 * over + 22, tall = Math.max(16, Math.min(TALL, 480 / layers)), below = above + layers * tall + 34;
    const bars = this.live ? 58 + BAR * this.live.predictions.length : 0;
    return { from, to, left, cell, above, tall, below, height: below + bars };
  }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { effects, layers, names, labels, changedLabels, byHead, values } = this.shown, at = this.layout(pen.width), { theme, ink, quiet, accent, line } = pen.colours;
    const { from, to, left, cell, above, tall } = at, max = Math.max(0.05, ...values.map(Math.abs)), [layer, unit] = this.chosen(), size = nameSize(cell, 12);
    for (let c = from; c < to; c++) {
      const isChanged = !byHead && labels[c].text !== changedLabels[c].text;
      columnName(pen, names[c], left + (c - from + 0.5) * cell, above, !byHead && cell, { size, fill: isChanged || c === unit ? accent : quiet, weight: isChanged ? 600 : 400 });
    }
    for (let l = 0; l < layers; l++) {
      pen.text(pen.width < 560 ? String(l + 1) : t("variant.nth", { l: l + 1 }), left - 10, above + (l + 0.5) * tall, { size: 12, align: "right", fill: quiet });
      for (let c = from; c < to; c++) {
        const value = effects[l][c], colour = signed(value, max, theme), x = left + (c - from) * cell, y = above + l * tall;
        pen.rect(x, y, cell - 1, tall - 1, { fill: css(colour), radius: cell > 20 ? 3 : 0 });
        if (cell >= 34 && Math.abs(value) >= 0.005) pen.text(value.toFixed(2).replace("-", "−"), x + cell / 2, y + tall / 2, { size: 11, align: "center", fill: inkOn(colour) });
        pen.hit(x, y, cell, tall, { layer: l, unit: c, value });
      }
    }
    pen.rect(left - 0.5, above - 0.5, (to - from) * cell, layers * tall, { stroke: line });
    if (unit >= from && unit < to) pen.rect(left + (unit - from) * cell, above + layer * tall, cell - 1, tall - 1, { stroke: accent, width: 2, radius: 3 });
    if (this.live) this.bars(pen, at.below);
  }

  /** Each prediction under the patch, with marks for both texts without it. */
  bars(pen, top) {
    const { t } = this.app, { layer, unit, predictions } = this.live, { accent, ink, quiet, wash } = pen.colours, small = pen.width < 560, left = small ? 76 : 130, wide = Math.min(620, pen.width - left - 66);
    pen.text(fitted(t("patching.now", { name: this.nameOf(layer, unit) }), pen.width, pen.font(14, 600)), 0, top + 8, { size: 14, weight: 600 });
    const mark = (x, y, fill, text) => { pen.path([x, y - 6, x, y + 6], { stroke: fill, width: 2 }); pen.text(text, x + 8, y, { size: 11, fill: quiet }); };
    mark(2, top + 32, ink, t("patching.clean"));
    mark(small ? 120 : 150, top + 32, quiet, t("patching.was"));
    predictions.forEach((one, i) => {
      const y = top + 50 + i * BAR, x = (share) => left + wide * share;
      pen.text(fitted(shown(one.text), left - 14, pen.font(14)), left - 12, y + BAR / 2, { size: 14, align: "right", fill: ink });
      pen.rect(left, y + 6, wide, BAR - 12, { fill: wash, radius: 4 });
      pen.rect(left, y + 6, Math.max(2, wide * one.patched), BAR - 12, { fill: accent, radius: 4, opacity: 0.85 });
      pen.path([x(one.corrupted), y + 3, x(one.corrupted), y + BAR - 3], { stroke: quiet, width: 2 });
      pen.path([x(one.clean), y + 3, x(one.clean), y + BAR - 3], { stroke: ink, width: 2 });
      pen.text(percent(one.patched), left + wide + 60, y + BAR / 2, { size: 12, align: "right", fill: ink });
      pen.hit(0, y, left + wide + 60, BAR, { bar: one });
    });
  }

  hover(hit, event) {
    const { t } = this.app;
    if (hit?.bar) tip.show(event, hit.bar.patched, shown(hit.bar.text), `${t("patching.clean")}: ${number(hit.bar.clean)}`, `${t("patching.was")}: ${number(hit.bar.corrupted)}`);
    else if (hit) {
      const { labels, changedLabels, byHead } = this.shown, { unit } = hit;
      const was = !byHead && labels[unit].text !== changedLabels[unit].text ? `${shown(changedLabels[unit])} → ${shown(labels[unit])}` : "";
      tip.show(event, hit.value, this.nameOf(hit.layer, unit), was);
    }
  }

  rows() {
    if (!this.shown) return [];
    const { effects, names, axes } = this.shown;
    return [["layer", axes[1], "text", "effect"], ...effects.flatMap((line, l) => line.map((value, c) => [String(l), String(c), names[c].text, value]))];
  }

  close() { this.giveUp?.abort(); this.sheet.close(); }
}

export default {
  id: "patching", panel: false, controls: ["kind"],
  fits: (app) => !app.source.offline && Boolean(app.model()?.layered) && !app.look.image,
  open: (host, app) => new Patching(host, app),
};
