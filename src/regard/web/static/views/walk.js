// One weight from q and k to what it hands over, step by step, with the numbers the model used.
import { css, signed } from "../colour.js";
import { el, number, offer, shown } from "../dom.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const MARGIN = 84;
const STRIP = 26;

class Walk {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    const pick = (key) => el("select", { class: "field", "data-axis": key, onchange: (event) => app.state.set({ [key]: Number(event.target.value) }) });
    this.pickers = { row: pick("row"), col: pick("col") };
    this.place = el("div", { style: "max-width:880px" });
    this.note = el("p", { class: "caption" });
    const { t } = app;
    host.append(el("p", { class: "caption" }, t("walk.caption")), el("div", { class: "row" },
      el("label", {}, el("span", { class: "quiet" }, `${t("walk.from")} `), this.pickers.row),
      el("label", {}, el("span", { class: "quiet" }, `${t("walk.to")} `), this.pickers.col)), this.note, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.walk"), draw: (pen) => this.draw(pen), height: () => this.height ?? 700,
      hover: (hit, event) => hit ? tip.show(event, hit.value, hit.name) : tip.hide(), leave: () => tip.hide(),
    });
  }

  async update() {
    const mine = ++this.asked, { data, state, t } = this.app, { kind, layer, head } = this.app.where();
    const { rows, cols } = data.size(kind), one = Math.max(0, head);
    const least = kind === "encoder" ? 0 : data.look.uncertain ?? rows - 1; // where the model was least sure
    const row = state.now.row >= 0 && state.now.row < rows ? state.now.row : least;
    const [rowLabels, colLabels] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols")]);
    const asked = state.now.col >= 0 && state.now.col < cols ? state.now.col : null;
    const col = asked ?? (await data.top(kind, layer, one, row, 1))[0]?.index ?? 0;
    const steps = await data.walk(kind, layer, one, row, col);
    if (mine !== this.asked) return;
    this.shown = { kind, layer, head: one, row, col, rowLabels, colLabels, steps };
    this.note.textContent = head < 0 ? t("walk.onehead", { h: one + 1 }) : "";
    offer(this.pickers.row, rowLabels, row);
    offer(this.pickers.col, colLabels, col);
    this.sheet.redraw();
  }

  draw(pen) {
    if (!this.shown) return;
    const { steps: s, row, col, rowLabels, colLabels } = this.shown, { t } = this.app;
    const names = { q: `q  ${shown(rowLabels[row])}`, k: `k  ${shown(colLabels[col])}`, v: `v  ${shown(colLabels[col])}` };
    this.y = 14;
    this.title(pen, t("walk.dot"));
    if (s.dot !== null && s.dot !== undefined) {
      const product = s.q.map((q, i) => q * s.k[i]), top = largest(s.q, s.k);
      this.strip(pen, names.q, s.q, top, "q");
      this.strip(pen, names.k, s.k, top, "k");
      this.strip(pen, "q × k", product, largest(product), "q × k");
      this.line(pen, "q · k", `${t("walk.sum")} =`, number(s.dot), "dot");
      this.title(pen, t("walk.scale"));
      this.line(pen, "÷ √d", `${number(s.dot)} × ${number(s.factor)} =`, number(s.scaled), "scaled");
    } else {
      const top = largest(s.q, s.k);
      this.strip(pen, names.q, s.q, top, "q");
      this.strip(pen, names.k, s.k, top, "k");
      this.line(pen, s.mechanism ?? "", `${t("walk.score")} =`, number(s.scaled), "scaled");
    }
    this.title(pen, t("walk.mask"));
    const may = s.masked ? t("walk.maynot") : t("walk.may");
    this.line(pen, "+ b", `${number(s.scaled)} + ${number(s.bias)} (${t("walk.bias")}),  ${may}  →`, s.masked ? "−∞" : number(s.score), "score");
    this.title(pen, t("walk.softmax"));
    if (s.normaliser === "linear") this.line(pen, "÷ Σ", `${number(s.score)} ÷ exp(${number(s.lse)}) =`, number(s.weight), "weight", true);
    else this.line(pen, "exp", s.masked ? "exp(−∞) =" : `exp(${number(s.score)} − ${number(s.lse)}) =`, number(s.weight), "weight", true);
    this.small(pen, `${number(s.lse)}: ${t("walk.norm")}`);
    if (s.v) {
      this.title(pen, t("walk.value"));
      this.strip(pen, names.v, s.v, largest(s.v), "v");
      this.strip(pen, `${number(s.weight)} × v`, s.contribution, largest(s.v), t("walk.share"));
      this.y += 8;
      this.small(pen, t("walk.share"));
    } else if (s.v_absent) this.small(pen, s.v_absent);
    if (Math.abs((this.height ?? 0) - this.y - 12) > 1) { this.height = this.y + 12; this.sheet.redraw(); }
  }

  title(pen, text) {
    pen.text(text, 0, this.y + 14, { size: 14, weight: 600 });
    pen.path([0, this.y + 30, pen.width, this.y + 30], { stroke: pen.colours.line });
    this.y += 44;
  }

  /** A vector as a strip of colours: accent for plus, slate for minus; the numbers are under the pointer. */
  strip(pen, name, values, top, about) {
    const small = pen.width < 520, left = small ? 0 : Math.max(MARGIN, 150), wide = (pen.width - left) / values.length;
    if (small) { pen.text(name, 0, this.y + 8, { size: 12, fill: pen.colours.quiet }); this.y += 20; }
    else pen.text(name, left - 12, this.y + STRIP / 2, { size: 13, align: "right", fill: pen.colours.quiet });
    const colour = (v) => signed(v, top, pen.colours.theme);
    values.forEach((value, i) => {
      pen.rect(left + i * wide, this.y, wide - (wide > 6 ? 1 : 0), STRIP, { fill: css(colour(value)), radius: wide > 6 ? 2 : 0 });
      pen.hit(left + i * wide, this.y, wide, STRIP, { value, name: `${about}[${i}]` });
    });
    this.y += STRIP + 8;
  }

  line(pen, sign, sum, result, name, strong = false) {
    const small = pen.width < 520, { accent, ink, quiet } = pen.colours;
    if (!small) pen.text(sign, 138, this.y + 12, { size: 13, align: "right", fill: quiet });
    const width = result.length * (strong ? 13 : 9.6) + 6;
    if (small) { pen.text(sum, 0, this.y + 12, { size: 13 }); this.y += 24; pen.text(result, pen.width, this.y + 12, { size: strong ? 22 : 16, weight: 600, align: "right", fill: strong ? accent : ink }); }
    else {
      pen.text(sum, 150, this.y + 12, { size: 14 });
      pen.text(result, pen.width, this.y + 12, { size: strong ? 22 : 16, weight: 600, align: "right", fill: strong ? accent : ink });
    }
    pen.hit(pen.width - width, this.y, width, 24, { value: result, name });
    this.y += 36;
  }

  small(pen, text) {
    pen.text(text, pen.width < 520 ? 0 : 150, this.y, { size: 12, fill: pen.colours.quiet });
    this.y += 26;
  }

  rows() {
    const { steps: s } = this.shown;
    const numbers = ["dot", "factor", "scaled", "bias", "score", "lse", "weight"].map((name) => [name, s[name] ?? ""]);
    return [["step", "value"], ...numbers, ...["q", "k", "v", "contribution"].flatMap((name) => (s[name] ?? []).map((v, i) => [`${name}[${i}]`, v]))];
  }

  close() { this.sheet.close(); tip.hide(); }
}

const largest = (...lists) => lists.flat().reduce((a, b) => Math.max(a, Math.abs(b)), 0);

export default {
  id: "walk", panel: false, controls: ["kind", "layer", "head"],
  fits: ({ source }) => !source.offline,
  open: (host, app) => new Walk(host, app),
};
