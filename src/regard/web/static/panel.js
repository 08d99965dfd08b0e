// The panel beside a view: the pinned token's largest weights, its predictions, and the pinned pair's weight.
import { el, number, percent, shown } from "./dom.js";

export class Panel {
  /** `onArithmetic` opens the computation of the pinned pair; null if the page lacks that view. */
  constructor(node, t, state, onArithmetic) {
    Object.assign(this, { node, t, state, onArithmetic });
    this.asked = 0;
  }

  async update(data, where) {
    const mine = ++this.asked, { t } = this, { row, col, top } = this.state.now;
    const size = data.size(where.kind);
    if (row < 0 || row >= size.rows) {
      this.node.replaceChildren(el("p", { class: "quiet" }, t("panel.hint")));
      return;
    }
    const { kind, layer, head } = where;
    const [rows, cols, best] = await Promise.all([
      data.labels(kind, "rows"), data.labels(kind, "cols"), data.top(kind, layer, head, row, top),
    ]);
    const isPair = col >= 0 && col < size.cols;
    const [pair, said] = await Promise.all([
      isPair ? data.block(kind, layer, head, row, row + 1, col, col + 1).then((block) => block.values[0]) : null,
      data.writes(kind) ? data.next({ position: row, k: 3 }) : [],
    ]);
    if (mine !== this.asked) return;
    this.node.replaceChildren(
      el("h2", {}, t("panel.looks")),
      el("p", { class: "who" }, el("bdi", {}, shown(rows[row]))),
      said.length && row === data.look.uncertain ? el("p", { class: "quiet" }, t("panel.uncertain")) : "",
      said.length ? el("p", { class: "next" }, el("span", { class: "quiet" }, t(kind === "cross" ? "panel.here" : "panel.next")),
        ...said.flatMap((one) => [el("bdi", {}, shown(one.text)), el("span", { class: "num" }, percent(one.probability))])) : "",
      !isPair ? "" : el("div", { class: "pair" },
        el("div", { class: "quiet" }, el("bdi", {}, shown(rows[row])), " → ", el("bdi", {}, shown(cols[col]))),
        el("div", { class: "num", "data-weight": `${row},${col}` }, number(pair)),
        this.onArithmetic && !data.look.reading && el("button", { type: "button", class: "plain open", "data-open": "walk", onclick: this.onArithmetic }, t("walk.open"))),
      el("h2", {}, t("panel.most", { k: best.length })),
      el("ol", {}, best.map((one) => el("li", { onclick: () => this.state.set({ col: one.index }) },
        el("bdi", {}, shown(cols[one.index])), el("span", { class: "num", "data-weight": `${row},${one.index}` }, number(one.weight)),
        el("i", {}, el("b", { style: `width:${100 * one.weight}%` }))))),
      el("button", { type: "button", class: "plain", onclick: () => this.state.set({ row: -1, col: -1 }) }, t("panel.unlock")),
    );
  }
}
