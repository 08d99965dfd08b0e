// Two selects for a pair of tokens: the query and the key.
import { el, offer, shown } from "./dom.js";

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
    const { data, state } = this.app, { kind, layer, head } = this.app.where(), { rows, cols } = data.size(kind);
    const least = kind === "encoder" ? 0 : data.look.uncertain ?? rows - 1;
    const row = state.now.row >= 0 && state.now.row < rows ? state.now.row : least;
    const [rowLabels, colLabels, read] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols"), data.labels(kind === "cross" ? data.mainKind : kind, "rows")]);
    const asked = state.now.col >= 0 && state.now.col < cols ? state.now.col : null;
    const col = asked ?? (await data.top(kind, layer, head, row, 1))[0]?.index ?? 0;
    return { kind, layer, head, row, col, rowLabels, colLabels, queryToken: read[row], keyToken: colLabels[col] };
  }

  /** Which head stands in for the mean, and which token the query comes from: a row of cross-attention has the name of the token it writes. */
  note({ kind, head, row, rowLabels, queryToken }, explained) {
    const { data, t } = this.app;
    return [head < 0 && t("walk.onehead.most", { h: explained + 1 }), kind === "cross" && data.mainKind === "self" && t("walk.writes", { row: shown(rowLabels[row]), read: shown(queryToken) })].filter(Boolean).join(" ");
  }

  show({ row, col, rowLabels, colLabels }) {
    offer(this.row, rowLabels, row);
    offer(this.col, colLabels, col);
  }
}
