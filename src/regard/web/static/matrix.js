// What several views do with a matrix of weights {rows, cols, values}.
import { shown } from "./dom.js";

export const rowOf = ({ cols, values }, r) => values.subarray(r * cols, (r + 1) * cols);

export const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

/** The columns a row looks at most, heaviest first: not below the threshold, and no more than `top`. */
export function strongest(weights, threshold, top) {
  const least = Math.max(threshold, 1e-6);
  return [...weights.keys()].filter((c) => weights[c] >= least).sort((a, b) => weights[b] - weights[a]).slice(0, top);
}

/** Rows of a table: the columns' names first, then each row's name and weights. */
export const tableOf = (rowLabels, colLabels, matrix) =>
  [["", ...colLabels.map(shown)], ...rowLabels.map((label, r) => [shown(label), ...rowOf(matrix, r)])];

/** Whether a token is one that is searched for. */
export const isFound = (label, find) => Boolean(find) && shown(label).toLowerCase().includes(find.toLowerCase());
