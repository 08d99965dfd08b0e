// Why a head attends there: one score as a sum over pairs of writers, one of the query and one of the key.
import { css, signed } from "../colour.js";
import { el, number, percent, shown } from "../dom.js";
import { PairPicker } from "../pair.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";
import { withSign, writerName } from "../writers.js";

const WIDE = 640; // minimum width at which both writers and the bar fit on one line
const TOP = 40;

class Why {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    const { t } = app;
    this.pair = new PairPicker(app);
    this.says = el("p", { class: "told", "aria-live": "polite" });
    this.note = el("p", { class: "caption" });
    this.place = el("div", { style: "max-width:980px" });
    host.append(el("p", { class: "caption" }, t("why.caption")), this.pair.node, this.note, this.says, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.why"), draw: (pen) => this.draw(pen),
      height: (w) => this.shown ? (w < WIDE ? 8 : TOP) + this.lines().length * this.step(w) + 56 : 240,
      hover: (hit, event) => hit && tip.show(event, hit.value, hit.name),
      press: (hit) => hit?.to && app.go("heatmap", hit.to),
    });
  }

  step(width) { return width < WIDE ? 62 : 34; }

  async update() {
    const { app } = this, { data, t } = app, mine = ++this.asked;
    const splits = app.model().splits.includes(app.where().kind);
    this.pair.node.hidden = this.place.hidden = !splits;
    if (!splits) { this.note.textContent = ""; this.says.textContent = t("why.none"); return; }
    const pair = await this.pair.chosen(), { kind, layer, head, row, col } = pair;
    const found = await data.why(kind, layer, head, row, col);
    if (mine !== this.asked) return;
    this.shown = { ...pair, ...found };
    this.note.textContent = this.pair.note(pair, found.head);
    this.pair.show(pair);
    this.tell();
    this.sheet.redraw();
  }

  tell() {
    const { t } = this.app, { layer, head, row, col, rowLabels, colLabels, weight, score, pairs: [best] } = this.shown;
    const names = { row: shown(rowLabels[row]), col: shown(colLabels[col]) }, { query, key } = this.writers(best);
    this.says.textContent = t("why.says", { ...names, l: layer + 1, h: head + 1, weight: percent(weight), score: score.toFixed(2) })
      + (query ? ` ${t("why.most", { value: withSign(best.value, 2), query, key })}` : "");
  }

  /** The names of both writers of a pair; the keys of cross-attention come from the encoder. */
  writers(pair) {
    const { t } = this.app, { kind, queryToken, keyToken } = this.shown, inEncoder = (part) => kind === "cross" && part.name === "ff" ? { ...part, name: "encoder.ff" } : part;
    return pair ? { query: writerName(t, pair.query, queryToken), key: writerName(t, inEncoder(pair.key), keyToken) } : {};
  }

  /** The terms of the score: the largest pairs, the sum of the others, and the position bias. */
  lines() {
    const { t } = this.app, { pairs, others, n_others: n, position_bias: bias, row, col } = this.shown;
    const to = ({ name, layer, head }, at) => head === undefined ? null : { kind: name, layer, head, row: at, col: -1 };
    const lines = pairs.map((pair) => ({ ...this.writers(pair), value: pair.value, toQuery: to(pair.query, row), toKey: to(pair.key, col) }));
    if (n > 0) lines.push({ whole: t("why.others", { n }), value: others });
    if (bias) lines.push({ whole: t("why.bias"), value: bias });
    return lines;
  }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { ink, quiet, line, accent, theme } = pen.colours, wide = pen.width >= WIDE, lines = this.lines(), step = this.step(pen.width);
    const names = wide ? Math.min(300, pen.width * 0.31) : 0, left = wide ? 2 * names + 34 : 0, right = 72, top = wide ? TOP : 8;
    const values = lines.map(({ value }) => value), low = Math.min(0, ...values), max = Math.max(-low, ...values, 1e-9);
    const scale = (pen.width - left - right - 8) / (Math.max(0, ...values) - low || 1), middle = left - low * scale;
    if (wide) {
      pen.text(fitted(t("why.query", { token: shown(this.shown.queryToken) }), names, pen.font(12)), names, 14, { size: 12, fill: quiet, align: "right" });
      pen.text(fitted(t("why.key", { token: shown(this.shown.keyToken) }), names, pen.font(12)), names + 28, 14, { size: 12, fill: quiet });
    }
    if (wide) pen.path([middle, top - 6, middle, top + lines.length * step], { stroke: line });
    lines.forEach((one, i) => {
      const y = top + i * step, at = y + step - (wide ? 17 : 14), size = Math.abs(one.value) * scale, name = one.whole ?? `${one.query} × ${one.key}`;
      if (wide && one.whole) pen.text(fitted(one.whole, 2 * names, pen.font(13)), names + 28, at, { size: 13, fill: quiet });
      else if (wide) {
        pen.text(fitted(one.query, names, pen.font(13)), names, at, { size: 13, align: "right", fill: ink });
        pen.text("×", names + 14, at, { size: 13, align: "center", fill: quiet });
        pen.text(fitted(one.key, names, pen.font(13)), names + 28, at, { size: 13, fill: ink });
        pen.hit(0, y, names, step, { value: one.value, name, to: one.toQuery });
        pen.hit(names + 28, y, names, step, { value: one.value, name, to: one.toKey });
      } else {
        pen.text(fitted(one.whole ?? one.query, pen.width, pen.font(12)), 0, y + 10, { size: 12, fill: one.whole ? quiet : ink });
        if (!one.whole) pen.text(fitted(`× ${one.key}`, pen.width, pen.font(12)), 0, y + 28, { size: 12, fill: ink });
      }
      pen.rect(one.value < 0 ? middle - size : middle, at - 8, Math.max(1, size), 16, { fill: css(signed(one.value, max * 0.8, theme)), radius: 3 });
      pen.text(withSign(one.value, 2), pen.width, at, { size: 13, align: "right", fill: ink });
      pen.hit(left, y, pen.width - left, step, { value: one.value, name });
    });
    const y = top + lines.length * step + 8;
    pen.path([0, y, pen.width, y], { stroke: ink });
    pen.text(t("why.sum"), 0, y + 22, { size: 14, weight: 600 });
    pen.text(`${number(this.shown.score)}`, pen.width, y + 22, { size: 18, weight: 600, align: "right", fill: accent });
  }

  rows() {
    if (!this.shown) return [];
    const { pairs, others, position_bias: bias, score, weight } = this.shown, name = ({ name, layer, head }) => [name, layer, head].filter((one) => one !== undefined).join(".");
    return [["query side", "key side", "value"], ...pairs.map(({ query, key, value }) => [name(query), name(key), value]),
      ["others", "", others], ["position bias", "", bias], ["score", "", score], ["weight", "", weight]];
  }

  close() { this.sheet.close(); }
}

export default {
  id: "why", panel: false, controls: ["kind", "layer", "head"],
  fits: (app) => !app.source.offline && app.model()?.splits.length > 0,
  open: (host, app) => new Why(host, app),
};
