// Helpers for matrices of weights {rows, cols, values} and their labels.
import { shown, tokenText } from "./dom.js";
import { fitted, textWidth } from "./pen.js";

const LONGEST_NAME = 108;
const nameFont = () => `400 13px ${getComputedStyle(document.body).fontFamily}`;

/** The width in pixels of the longest label, up to a limit. */
export const longestName = (labels) => labels.reduce((most, label) => Math.min(LONGEST_NAME, Math.max(most, textWidth(shown(label), nameFont()))), 0);

/** The font size of labels, at most `most`, so that those of neighbouring cells do not touch. */
export const nameSize = (cell, most) => Math.min(most, Math.max(8, 0.85 * cell));

/** Draw the label of a column above its middle: horizontally or, given the width of a column, slanted so far that neighbours do not touch. */
export function columnName(pen, label, x, top, wide, style) {
  const text = fitted(shown(label), LONGEST_NAME, pen.font(style.size));
  if (wide) pen.text(text, x - 2, top - 8, { ...style, turn: -Math.max(45, Math.ceil((Math.asin(Math.min(1, (1.05 * style.size) / wide)) * 180) / Math.PI)) });
  else pen.text(text, x, top - 13, { ...style, align: "center" });
}

export const rowOf = ({ cols, values }, r) => values.subarray(r * cols, (r + 1) * cols);

export const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

/** The columns with the largest weights of a row, in descending order: at least the threshold, and at most `top`. */
export function strongest(weights, threshold, top) {
  const least = Math.max(threshold, 1e-6);
  return [...weights.keys()].filter((c) => weights[c] >= least).sort((a, b) => weights[b] - weights[a]).slice(0, top);
}

/** The matrix as rows of a table with labels. */
export const tableOf = (rowLabels, colLabels, matrix) =>
  [["", ...colLabels.map(tokenText)], ...rowLabels.map((label, r) => [tokenText(label), ...rowOf(matrix, r)])];

/** Whether a token matches the search. */
export const isFound = (label, find) => Boolean(find) && shown(label).toLowerCase().includes(find.toLowerCase());
