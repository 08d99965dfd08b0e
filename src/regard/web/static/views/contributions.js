// The contribution of each part of the model to one logit: embeddings, heads and feed-forward networks, layer by layer.
import { css, signed } from "../colour.js";
import { el, number, offer, percent, shown } from "../dom.js";
import { fitted, textWidth } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";
import { withSign, writerName } from "../writers.js";

const LEFT = 92;
const RIGHT = 74;
const GAP = 14; // between groups of bars
const TOP = 44;
const HEADS = ["self", "cross", "encoder"];

class Contributions {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    const { t, state } = app;
    this.after = el("select", { class: "field", "aria-label": t("next.after"), onchange: () => state.set({ position: Number(this.after.value), token: -1 }) });
    this.token = el("select", { class: "field", name: "token", "aria-label": t("contributions.into"), onchange: () => state.set({ token: Number(this.token.value) }) });
    this.picks = el("div", { class: "row" });
    this.says = el("p", { class: "told", "aria-live": "polite" });
    this.place = el("div");
    host.append(el("p", { class: "caption" }, t("contributions.caption")), this.picks, this.says, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.contributions"), draw: (pen) => this.draw(pen), height: () => this.shown ? this.rowsOf().length * this.tall() + TOP + 52 : 240,
      hover: (hit, event) => hit && tip.show(event, hit.value, writerName(t, hit)),
      press: (hit) => hit?.head !== undefined && app.go("heatmap", { kind: hit.name, layer: hit.layer, head: hit.head, row: this.shown.position ?? -1, col: -1 }),
    });
  }

  async update() {
    const { app } = this, { data, look, state, t } = app, mine = ++this.asked;
    let position, labels;
    if (!look.classes) {
      const { now } = state;
      labels = await data.labels(data.mainKind, "rows");
      position = now.position >= 0 && now.position < labels.length ? now.position : look.uncertain ?? labels.length - 1;
    }
    const { token } = state.now, found = await data.contributions({ position, ...(token < 0 ? {} : { token }) });
    if (mine !== this.asked) return;
    this.shown = { ...found, position };
    if (labels) offer(this.after, labels, position);
    this.token.replaceChildren(...found.choices.map((one) => el("option", { value: String(one.token), selected: one.token === found.token }, `${shown(one.text)}  ${percent(one.probability)}`)));
    const named = (name, select) => el("label", {}, el("span", { class: "quiet" }, `${name} `), select);
    if (!this.picks.firstChild) this.picks.replaceChildren(...(labels ? [named(t("next.after"), this.after)] : []), named(t("contributions.into"), this.token));
    this.tell();
    this.sheet.redraw();
  }

  /** Say which parts contribute most for and against the prediction. */
  tell() {
    const { t } = this.app, words = (list) => list.map((part) => `${writerName(t, part)} (${withSign(part.value, 2)})`).join(", ");
    const parts = this.parts().sort((a, b) => b.value - a.value), most = parts.filter((part) => part.value > 0).slice(0, 3), least = parts.filter((part) => part.value < 0).slice(-1);
    this.says.textContent = t("contributions.says", { token: shown(this.shown.text), most: words(most) || "–" })
      + (least.length ? ` ${t("contributions.against", { least: words(least) })}` : "");
  }

  /** All parts with their values. */
  parts() { return this.rowsOf().flatMap((row) => row.groups.flat()); }

  /** Embeddings, then the layers, then the biases: each a row of groups of bars. */
  rowsOf() {
    const { parts } = this.shown, { t } = this.app, kinds = HEADS.filter((kind) => kind in parts), layers = parts.ff.length;
    const alone = Object.keys(parts).filter((name) => typeof parts[name] === "number" && name !== "bias");
    const rows = [{ name: t("contributions.embeddings"), groups: [alone.map((name) => ({ name, value: parts[name] }))], named: true }];
    for (let layer = 0; layer < layers; layer++) {
      const groups = kinds.map((kind) => (parts[kind][layer] ?? []).map((value, head) => ({ name: kind, layer, head, value })));
      for (const kind of ["mixer", "ff"]) if (parts[kind]) groups.push([{ name: kind, layer, value: parts[kind][layer] }]);
      rows.push({ name: t("variant.nth", { l: layer + 1 }), groups });
    }
    return [...rows, { name: t("contributions.biases"), groups: [[{ name: "bias", value: parts.bias }]], last: true }];
  }

  tall() { return Math.max(38, Math.min(72, 620 / (this.shown.parts.ff.length + 2))); }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { ink, quiet, line, accent, theme } = pen.colours, rows = this.rowsOf(), tall = this.tall(), small = pen.width < 560;
    const size = small ? 12 : 13, left = Math.max(small ? 60 : LEFT, ...rows.map(({ name }) => textWidth(name, pen.font(size)) + 12)), right = small ? 58 : RIGHT, layer = rows[1].groups, n = layer.reduce((sum, group) => sum + Math.max(1, group.length), 0) + 1;
    const unit = Math.min(72, (pen.width - left - right - GAP * layer.length) / n), max = Math.max(...this.parts().map((part) => Math.abs(part.value)), 1e-9);
    this.headings(pen, layer, left, unit);
    rows.forEach(({ name, groups, named }, r) => {
      const y = TOP + r * tall, middle = y + tall / 2, sum = groups.flat().reduce((total, part) => total + part.value, 0);
      pen.text(name, 0, middle, { size, fill: ink });
      pen.path([left, middle, pen.width - right, middle], { stroke: line });
      let x = left;
      for (const group of groups) {
        const wide = named ? Math.min(40, unit) : group.length > 1 ? unit : Math.min(72, 2 * unit);
        for (const part of group) {
          const size = (Math.abs(part.value) / max) * (tall / 2 - 5), step = named ? wide + (small ? 66 : 110) : wide;
          pen.rect(x + 1, part.value < 0 ? middle : middle - size, wide - 2, Math.max(0.75, size), { fill: css(signed(part.value, max * 0.7, theme)), radius: 2, stroke: part.value < 0 ? quiet : accent, width: 0.4 });
          if (named) pen.text(fitted(small ? t(`part.${part.name}`) : `${t(`part.${part.name}`)} ${withSign(part.value, 2)}`, step - wide - 4, pen.font(11)), x + wide + 4, middle - 9, { size: 11, fill: quiet });
          else if (wide >= 38 && tall > 44) pen.text(withSign(part.value, 2), x + wide / 2, part.value < 0 ? middle - 8 : middle + 9, { size: 11, align: "center", fill: quiet });
          pen.hit(x, y + 2, step, tall - 4, part);
          x += step;
        }
        x += GAP;
      }
      pen.text(withSign(sum, 2), pen.width, middle, { size: 13, align: "right", fill: ink });
    });
    const y = TOP + rows.length * tall + 8;
    pen.path([0, y, pen.width, y], { stroke: ink, width: 1 });
    pen.text(t("contributions.sum"), 0, y + 22, { size: 14, weight: 600 });
    pen.text(`${t("contributions.logit")} ${number(this.shown.logit)}`, pen.width, y + 22, { size: small ? 15 : 18, weight: 600, align: "right", fill: accent });
  }

  /** Headings above the columns, with the numbers of the heads if there is room. */
  headings(pen, groups, left, unit) {
    const { t } = this.app, { quiet } = pen.colours;
    let x = left;
    for (const group of groups) {
      const wide = group.length > 1 ? unit * group.length : Math.min(72, 2 * unit), [{ name }] = group;
      if (group.length > 1) {
        pen.text(fitted(t(`contributions.${name}`), wide, pen.font(12)), x, 12, { size: 12, fill: quiet });
        if (unit >= 15) group.forEach(({ head }) => pen.text(String(head + 1), x + (head + 0.5) * unit, 32, { size: 11, fill: quiet, align: "center" }));
      } else pen.text(t(`contributions.${name}`), x, 12, { size: 12, fill: quiet });
      x += wide + GAP;
    }
  }

  rows() { return !this.shown ? [] : [["part", "layer", "head", "value"], ...this.parts().map(({ name, layer, head, value }) => [name, String(layer ?? ""), String(head ?? ""), value]), ["logit", "", "", this.shown.logit]]; }

  close() { this.sheet.close(); }
}

export default {
  id: "contributions", panel: false, controls: [],
  fits: (app) => !app.source.offline && Boolean(app.model()?.contributes),
  open: (host, app) => new Contributions(host, app),
};
