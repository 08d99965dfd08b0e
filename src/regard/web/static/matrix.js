// What several views do with a matrix of weights {rows, cols, values}.
import { shown, tokenText } from "./dom.js";
import { fitted, textWidth } from "./pen.js";

const LONGEST_NAME = 108;
const nameFont = () => `400 13px ${getComputedStyle(document.body).fontFamily}`;

/** The width of the longest name beside or above a matrix. */
export const longestName = (labels) => labels.reduce((most, label) => Math.min(LONGEST_NAME, Math.max(most, textWidth(shown(label), nameFont()))), 0);

/** The size of names beside cells, where it must not be larger than `most`: names of neighbours do not touch. */
export const nameSize = (cell, most) => Math.min(most, Math.max(8, 0.85 * cell));

/** The name of a column over the middle of it: level where it fits, else rising to the right. */
export function columnName(pen, label, x, top, slanted, style) {
  const text = fitted(shown(label), LONGEST_NAME, pen.font(style.size));
  if (slanted) pen.text(text, x - 2, top - 8, { ...style, turn: -45 });
  else pen.text(text, x, top - 13, { ...style, align: "center" });
}

export const rowOf = ({ cols, values }, r) => values.subarray(r * cols, (r + 1) * cols);

export const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

/** The columns a row looks at most, heaviest first: not below the threshold, and no more than `top`. */
export function strongest(weights, threshold, top) {
  const least = Math.max(threshold, 1e-6);
  return [...weights.keys()].filter((c) => weights[c] >= least).sort((a, b) => weights[b] - weights[a]).slice(0, top);
}

/** Rows of a table: the columns' names first, then each row's name and weights. */
export const tableOf = (rowLabels, colLabels, matrix) =>
  [["", ...colLabels.map(tokenText)], ...rowLabels.map((label, r) => [tokenText(label), ...rowOf(matrix, r)])];

/** Whether a token is one that is searched for. */
export const isFound = (label, find) => Boolean(find) && shown(label).toLowerCase().includes(find.toLowerCase());
