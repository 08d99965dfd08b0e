// Patterns of heads: the scores of one pattern, or the strongest pattern of each head.
import { css, heat, inkOn } from "../colour.js";
import { el, number, refill, segmented } from "../dom.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const SHARES = ["previous", "current", "next", "first", "last", "delimiter", "repeated", "induction"]; // weight, 0 … 1
const OTHERS = ["local", "entropy", "distance"];

class Patterns {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    this.choice = el("div", { class: "row" });
    this.about = el("p", { class: "caption" });
    this.place = el("div");
    host.append(el("p", { class: "caption" }, app.t("patterns.caption")), this.choice, this.about, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: app.t("view.patterns"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => hit && this.tell(hit, event),
      press: (hit) => hit && app.go("heatmap", { layer: hit.layer, head: hit.head }),
    });
  }

  async update() {
    const mine = ++this.asked, { kind } = this.app.where(), scores = await this.app.data.patterns(kind);
    if (mine !== this.asked) return;
    const known = [...SHARES, ...OTHERS].filter((name) => scores[name]?.flat().some((value) => value !== null));
    const asked = this.app.state.now.pattern, name = known.includes(asked) ? asked : "";
    this.shown = { scores, known, name };
    this.showChoice();
    this.sheet.redraw();
  }

  showChoice() {
    const { t, state } = this.app, { known, name } = this.shown;
    const options = [["", t("pattern.most")], ...known.map((one) => [one, t(`pattern.${one}`)])];
    refill(this.choice, [segmented(t("view.patterns"), options, name, (pattern) => state.set({ pattern }))]);
    this.about.textContent = t(`pattern.${name || "most"}.about`);
  }

  /** A head's score for the chosen pattern, or its strongest one: {value, name}; mixed: no pattern is strong enough. */
  of(layer, head) {
    const { scores, name, known } = this.shown;
    if (name) return { value: scores[name][layer][head], name };
    const best = known.filter((one) => SHARES.includes(one)).map((one) => ({ value: scores[one][layer][head], name: one }))
      .reduce((a, b) => ((b.value ?? -1) > (a.value ?? -1) ? b : a), { value: null, name: "" });
    return { ...best, label: scores.labels[layer][head], mixed: scores.labels[layer][head] === "mixed" };
  }

  layout(width) {
    const { layers, heads } = this.app.data.size(this.app.where().kind), left = 40, wide = Math.min(118, (width - left) / heads);
    const tall = Math.max(34, Math.min(58, wide * 0.66));
    return { left, wide, tall, height: 34 + layers * tall };
  }

  draw(pen) {
    if (!this.shown) return;
    const { left, wide, tall } = this.layout(pen.width), { layers, heads } = this.app.data.size(this.app.where().kind), { t } = this.app;
    const { theme, quiet, wash } = pen.colours, { name } = this.shown, isShare = !name || SHARES.includes(name) || name === "local";
    const all = Array.from({ length: layers }, (_, l) => Array.from({ length: heads }, (_, h) => this.of(l, h)));
    const top = isShare ? 1 : Math.max(1e-9, ...all.flat().map((one) => one.value ?? 0));
    pen.text(t("layer"), 0, 14, { size: 12, fill: quiet });
    for (let h = 0; h < heads; h++) pen.text(`${wide > 64 ? `${t("head")} ` : ""}${h + 1}`, left + (h + 0.5) * wide, 14, { size: 12, fill: quiet, align: "center" });
    all.forEach((line, l) => {
      const y = 28 + l * tall;
      pen.text(String(l + 1), 12, y + tall / 2, { size: 12, fill: quiet, align: "center" });
      line.forEach((one, h) => {
        const x = left + h * wide, none = one.value === null || one.value === undefined, colour = none ? null : heat(one.value / top, theme);
        const faint = !name && one.mixed, ink = none || faint ? quiet : inkOn(colour);
        pen.rect(x, y, wide - 4, tall - 4, { fill: none || faint ? wash : css(colour), radius: 6 });
        const value = none ? "–" : one.value.toFixed(wide > 60 ? 3 : 2), middle = x + (wide - 4) / 2;
        if (name || wide < 60) pen.text(value, middle, y + tall / 2 - 2, { size: wide < 40 ? 10 : 13, align: "center", fill: ink });
        else {
          pen.text(fitted(t(`label.${one.label}`), wide - 12, pen.font(12)), middle, y + tall / 2 - 10, { size: 12, align: "center", fill: ink });
          pen.text(value, middle, y + tall / 2 + 8, { size: 12, align: "center", fill: ink });
        }
        pen.hit(x, y, wide - 4, tall - 4, { layer: l, head: h });
      });
    });
  }

  tell({ layer, head }, event) {
    const { t } = this.app, { scores, known } = this.shown, one = this.of(layer, head);
    const lines = known.map((name) => `${t(`pattern.${name}`)} ${number(scores[name][layer][head])}`);
    tip.show(event, one.label ? t(`label.${one.label}`) : one.name ? `${t(`pattern.${one.name}`)} ${number(one.value)}` : "–", t("grid.cell", { l: layer + 1, h: head + 1 }), ...lines);
  }

  rows() {
    const { scores, known } = this.shown, { layers, heads } = this.app.data.size(this.app.where().kind), out = [["layer", "head", "label", ...known]];
    for (let l = 0; l < layers; l++) for (let h = 0; h < heads; h++) out.push([String(l), String(h), scores.labels[l][h], ...known.map((name) => scores[name][l][h])]);
    return out;
  }

  close() { this.sheet.close(); }
}

export default {
  id: "patterns", panel: false, controls: ["kind"],
  fits: ({ source }) => !source.offline || source.hasPatterns,
  open: (host, app) => new Patterns(host, app),
};
