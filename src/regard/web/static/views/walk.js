// The computation of one weight step by step, with the model's numbers: q · k, the softmax of its row, the sum of the values.
import { css, signed } from "../colour.js";
import { el, rounded, shown, tokenText } from "../dom.js";
import { PairPicker } from "../pair.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const STRIP = 26;
const LINE = 28;
const MOST_VALUES = 12; // values drawn individually before the sum

class Walk {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    this.pair = new PairPicker(app);
    this.place = el("div", { style: "max-width:880px" });
    this.note = el("p", { class: "caption" });
    const { t, state } = app;
    host.append(el("p", { class: "caption" }, t("walk.caption")), this.pair.node, this.note, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.walk"), draw: (pen) => this.draw(pen), height: () => this.height ?? 700,
      hover: (hit, event) => hit && tip.show(event, hit.value, hit.name),
      press: (hit) => hit?.col !== undefined && state.set({ row: this.shown.row, col: hit.col }),
    });
  }

  async update() {
    const mine = ++this.asked, { data } = this.app, pair = await this.pair.chosen(), { kind, layer, row, col } = pair;
    const steps = await data.walk(kind, layer, pair.head, row, col), absent = steps.v_absent && await this.app.sentence(steps.v_absent);
    if (mine !== this.asked) return;
    this.shown = { ...pair, steps, absent };
    this.note.textContent = this.pair.note(pair, steps.head);
    this.pair.show(pair);
    this.sheet.redraw();
  }

  draw(pen) {
    if (!this.shown) return;
    const { steps: s, queryToken, keyToken, absent } = this.shown, { t } = this.app, top = largest(s.q, s.k);
    const vectors = () => {
      this.strip(pen, `q  ${shown(queryToken)}`, s.q, top, "q");
      this.strip(pen, `k  ${shown(keyToken)}`, s.k, top, "k");
    };
    const isDot = s.dot !== null && s.dot !== undefined;
    Object.assign(this, { y: 14, nth: 0 });
    this.title(pen, t(isDot ? "walk.dot" : "walk.both"));
    vectors();
    if (isDot) {
      const product = s.q.map((q, i) => q * s.k[i]);
      this.strip(pen, "q × k", product, largest(product), "q × k");
      this.line(pen, "q · k", `${t("walk.sum")} =`, s.dot, "dot");
      this.title(pen, t("walk.scale"));
      this.line(pen, "÷ √d", `${rounded(s.dot)} × ${rounded(s.factor)} =`, s.scaled, "scaled");
    } else this.line(pen, s.mechanism ?? "", `${t("walk.score")} =`, s.scaled, "scaled");
    this.title(pen, t("walk.mask"));
    const may = s.masked ? t("walk.maynot") : t("walk.may");
    this.line(pen, "+ b", `${rounded(s.scaled)} + ${rounded(s.bias)} (${t("walk.bias")}),  ${may}  →`, s.masked ? -Infinity : s.score, "score");
    this.softmax(pen);
    if (s.v) this.values(pen);
    else if (absent) this.small(pen, absent);
    if (Math.abs((this.height ?? 0) - this.y - 12) > 1) { this.height = this.y + 12; this.sheet.redraw(); }
  }

  /** All scores of the row and what its normaliser makes of them (eˢ and shares of the sum); the chosen key in colour. */
  softmax(pen) {
    const { steps: s, col, colLabels } = this.shown, { t } = this.app, { accent, ink, quiet, line, wash } = pen.colours;
    const form = s.normaliser, isSoft = form === "softmax", isShare = isSoft || form === "linear", sum = Math.exp(s.lse), small = pen.width < 520, left = small ? 96 : 150;
    const at = small ? [left + 62, left + 124, left + 186] : [left + 90, left + 190, left + 280], bar = at[2] + 14, room = pen.width - bar;
    const middle = () => this.y + LINE / 2, cell = (text, n, style = {}) => pen.text(text, at[n], middle(), { size: 13, align: "right", ...style });
    this.title(pen, t(`walk.${form}`));
    ["s", isSoft ? "eˢ" : "", { softmax: "eˢ ÷ Σ", linear: "s ÷ Σ", sigmoid: "σ(s)", none: "" }[form]].forEach((name, n) => cell(name, n, { fill: quiet, size: 12 }));
    this.y += LINE;
    for (const { index, score, weight } of s.row.keys) {
      const chosen = index === col, fill = chosen ? accent : score === null ? quiet : ink, style = { fill, weight: chosen ? 600 : 400 };
      pen.text(fitted(shown(colLabels[index]), left - 12, pen.font(13)), left - 12, middle(), { size: 13, align: "right", ...style });
      cell(score === null ? "−∞" : rounded(score), 0, style);
      if (isSoft) cell(score === null ? "0" : rounded(Math.exp(score)), 1, style);
      if (form !== "none") cell(rounded(weight), 2, style);
      pen.rect(bar, this.y + 7, room, LINE - 14, { fill: wash, radius: 4 });
      if (weight > 0) pen.rect(bar, this.y + 7, Math.max(2, room * weight), LINE - 14, { fill: chosen ? accent : quiet, radius: 4 });
      pen.hit(0, this.y, pen.width, LINE, { value: weight, name: shown(colLabels[index]), col: index });
      this.y += LINE;
    }
    if (s.row.others) {
      pen.text(t("story.others", { n: s.row.others }), left - 12, middle(), { size: 13, align: "right", fill: quiet });
      cell(rounded(s.row.rest), 2, { fill: quiet });
      this.y += LINE;
    }
    if (s.sink !== null && s.sink !== undefined) { // part of the sum, but not a token
      pen.text(t("walk.sink.row"), left - 12, middle(), { size: 13, align: "right", fill: quiet });
      cell(rounded(s.sink), 2, { fill: quiet });
      this.y += LINE;
    }
    pen.path([small ? 0 : left - 40, this.y + 2, pen.width, this.y + 2], { stroke: line });
    this.y += 6;
    pen.text("Σ", left - 12, middle(), { size: 13, align: "right", weight: 600 });
    if (isShare) cell(rounded(sum), isSoft ? 1 : 0, { weight: 600 });
    cell(rounded(s.row.keys.reduce((total, { weight }) => total + weight, s.row.rest + (s.sink ?? 0))), form === "none" ? 0 : 2, { weight: 600 });
    this.y += LINE + 6;
    const how = {
      softmax: `${s.masked ? "0" : rounded(Math.exp(s.score))} ÷ ${rounded(sum)} =`, linear: `${s.masked ? "0" : rounded(s.score)} ÷ ${rounded(sum)} =`,
      sigmoid: `1 ÷ (1 + ${s.masked ? "∞" : rounded(Math.exp(-s.score))}) =`, none: "s =",
    }[form];
    this.line(pen, { sigmoid: "σ", none: "" }[form] ?? "÷ Σ", how, s.weight, "weight", true);
    if (s.sink !== null && s.sink !== undefined) this.small(pen, `${rounded(s.sink)}: ${t("walk.sink")}`);
  }

  /** Each value times its weight, and their sum: the output of the head. */
  values(pen) {
    const { steps: { row, v, weight, contribution }, col, colLabels } = this.shown, { t } = this.app;
    const told = row.keys.filter((key) => key.index === col || key.weight >= 0.005).sort((a, b) => b.weight - a.weight);
    const some = told.slice(0, MOST_VALUES), listed = [...some, ...told.slice(MOST_VALUES).filter((key) => key.index === col)].sort((a, b) => a.index - b.index);
    const rest = row.output.map((value, n) => listed.reduce((left, key) => left - key.contribution[n], value)), top = largest(row.output, ...listed.map((key) => key.contribution));
    this.title(pen, t("walk.value"));
    this.strip(pen, `v  ${shown(colLabels[col])}`, v, largest(v), "v");
    this.strip(pen, `${rounded(weight)} × v`, contribution, largest(v), t("walk.share"));
    this.small(pen, t("walk.share"), 8);
    this.title(pen, t("walk.added"));
    listed.forEach((key, n) => this.strip(pen, `${n ? "+ " : ""}${rounded(key.weight)} × v ${shown(colLabels[key.index])}`, key.contribution, top, shown(colLabels[key.index]), key.index));
    if (listed.length < row.keys.length + row.others) this.strip(pen, `+ ${t("walk.rest")}`, rest, top, t("walk.rest"));
    this.strip(pen, `= ${t("walk.output")}`, row.output, top, t("walk.output"));
  }

  title(pen, text) {
    pen.text(`${++this.nth} · ${text}`, 0, this.y + 14, { size: 14, weight: 600 });
    pen.path([0, this.y + 30, pen.width, this.y + 30], { stroke: pen.colours.line });
    this.y += 44;
  }

  /** A vector as a strip of colours, accent for positive and slate for negative; tooltips have the numbers. */
  strip(pen, name, values, top, about, col) {
    const small = pen.width < 520, left = small ? 0 : 150, wide = (pen.width - left) / values.length, { ink, quiet, accent, theme } = pen.colours;
    const fill = col === undefined ? quiet : col === this.shown.col ? accent : ink;
    if (small) { pen.text(fitted(name, pen.width, pen.font(12)), 0, this.y + 8, { size: 12, fill }); this.y += 20; }
    else pen.text(fitted(name, left - 14, pen.font(13)), left - 12, this.y + STRIP / 2, { size: 13, align: "right", fill });
    values.forEach((value, i) => {
      pen.rect(left + i * wide, this.y, wide - (wide > 6 ? 1 : 0), STRIP, { fill: css(signed(value, top, theme)), radius: wide > 6 ? 2 : 0 });
      pen.hit(left + i * wide, this.y, wide, STRIP, { value, name: `${about}[${i}]`, col });
    });
    this.y += STRIP + 8;
  }

  line(pen, sign, sum, value, name, strong = false) {
    const small = pen.width < 520, { accent, ink, quiet } = pen.colours, result = rounded(value), width = result.length * (strong ? 13 : 9.6) + 6;
    if (!small) pen.text(sign, 138, this.y + 12, { size: 13, align: "right", fill: quiet });
    pen.text(sum, small ? 0 : 150, this.y + 12, { size: small ? 13 : 14 });
    if (small && sum.length > 24) this.y += 24;
    pen.text(result, pen.width, this.y + 12, { size: strong ? 22 : 16, weight: 600, align: "right", fill: strong ? accent : ink });
    pen.hit(pen.width - width, this.y, width, 24, { value, name });
    this.y += 36;
  }

  small(pen, text, above = 0) {
    this.y += above;
    pen.text(text, pen.width < 520 ? 0 : 150, this.y, { size: 12, fill: pen.colours.quiet });
    this.y += 26;
  }

  rows() {
    const { steps: s, colLabels } = this.shown;
    const numbers = ["dot", "factor", "scaled", "bias", "score", "lse", "weight"].map((name) => [name, s[name] ?? ""]);
    const row = s.row.keys.flatMap(({ index, score, weight }) => [[`score ${index} ${tokenText(colLabels[index])}`, score ?? -Infinity], [`weight ${index} ${tokenText(colLabels[index])}`, weight]]);
    const vectors = [["q", s.q], ["k", s.k], ["v", s.v], ["contribution", s.contribution], ["output", s.row.output]];
    return [["step", "value"], ...numbers, ...row, ...vectors.flatMap(([name, values]) => (values ?? []).map((v, i) => [`${name}[${i}]`, v]))];
  }

  close() { this.sheet.close(); }
}

const largest = (...lists) => lists.flat().reduce((a, b) => Math.max(a, Math.abs(b)), 0);

export default {
  id: "walk", panel: false, controls: ["kind", "layer", "head"],
  fits: ({ source }) => !source.offline,
  open: (host, app) => new Walk(host, app),
};
