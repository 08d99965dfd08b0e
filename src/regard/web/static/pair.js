// Two selects for a pair of tokens: the query and the key.
import { el, offer } from "./dom.js";

export class PairPicker {
  constructor(app) {
    this.app = app;
    const { t, state } = app, pick = (key, name) => {
      this[key] = el("select", { class: "field", "data-axis": key, onchange: (event) => state.set({ [key]: Number(event.target.value) }) });
      return el("label", {}, el("span", { class: "quiet" }, `${name} `), this[key]);
    };
    this.node = el("div", { class: "row" }, pick("row", t("walk.from")), pick("col", t("walk.to")));
  }

  /** The pinned pair; by default the least certain token and the key with its largest weight. */
  async chosen() {
    const { data, state } = this.app, { kind, layer, head } = this.app.where(), { rows, cols } = data.size(kind), one = Math.max(0, head);
    const least = kind === "encoder" ? 0 : data.look.uncertain ?? rows - 1;
    const row = state.now.row >= 0 && state.now.row < rows ? state.now.row : least;
    const [rowLabels, colLabels] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols")]);
    const asked = state.now.col >= 0 && state.now.col < cols ? state.now.col : null;
    const col = asked ?? (await data.top(kind, layer, one, row, 1))[0]?.index ?? 0;
    return { kind, layer, head: one, isMean: head < 0, row, col, rowLabels, colLabels };
  }

  show({ row, col, rowLabels, colLabels }) {
    offer(this.row, rowLabels, row);
    offer(this.col, colLabels, col);
  }
}
