// Pattern scores of the heads of a kind, as in lens/patterns.py: the weight on the pairs of a pattern, averaged over the
// queries that have such a key.
import { entropy } from "./attention_map.js";

const NAMES = {
  previous: "previous token", current: "itself", next: "next token", first: "first token", last: "last token",
  delimiter: "delimiters", repeated: "same token before", induction: "what followed it before",
};
const SCORES = ["previous", "current", "next", "local", "first", "last", "delimiter", "repeated", "induction", "entropy", "distance"];
const LEAST = 0.4; // the least score that names a head after a pattern

const isDelimiter = ({ special, box, text }) => special || (!box && /^[\p{P}\p{Z}]+$/u.test(text));

/** Positions of rows: the index in a text, the grid cell in an image, none for a class token. */
function places(labels, isImage) {
  const box = isImage && labels.find((label) => label.box)?.box;
  if (!box) return labels.map((_, n) => [n]);
  return labels.map((label) => label.box ? [label.box[0] / (box[2] - box[0]), label.box[1] / (box[3] - box[1])] : null);
}

const distance = (a, b) => (a && b ? Math.hypot(...a.map((x, n) => x - b[n])) : NaN);
const even = (x) => { const n = Math.round(x); return Math.abs(x % 1) === 0.5 && n % 2 ? n - 1 : n; }; // rounds half to even, as torch does

/** The keys of each pattern for one query: {name: col → share of the weight that counts}. */
function members(kind, rows, cols, at) {
  const isSquare = kind !== "cross" && rows.length === cols.length, n = cols.length;
  const ids = isSquare && rows.every(({ id }) => id !== null) ? rows.map(({ id }) => id) : null, delimiters = cols.map(isDelimiter);
  const diagonal = isSquare ? null : (i) => even((i * (n - 1)) / Math.max(rows.length - 1, 1));
  const reach = isSquare && at[at.length - 1]?.length === 2 ? 1.5 : 2, firstAt = new Map(), gap = [];
  ids?.forEach((id, i) => { if (!firstAt.has(id)) firstAt.set(id, i); gap.push(i - firstAt.get(id)); });
  return {
    current: { of: (i) => (j) => j === (diagonal ? diagonal(i) : i) }, first: { of: () => (j) => j === 0 }, last: { of: () => (j) => j === n - 1 },
    ...(delimiters.some(Boolean) ? { delimiter: { of: () => (j) => delimiters[j] } } : {}),
    ...(isSquare ? {
      previous: { of: (i) => (j) => j === i - 1, has: (i) => i >= 1 }, next: { of: (i) => (j) => j === i + 1, has: (i) => i < n - 1 },
      local: { of: (i) => (j) => distance(at[i], at[j]) <= reach }, distance: { of: (i) => (j) => distance(at[i], at[j]) || 0 },
    } : {}),
    ...(ids ? {
      repeated: { of: (i) => (j) => j < i && ids[j] === ids[i], has: (i) => gap[i] >= 1 },
      induction: { of: (i) => (j) => j >= 1 && j < i && ids[j - 1] === ids[i], has: (i) => gap[i] >= 2 },
    } : {}),
  };
}

/** Scores by pattern as [layer][head] (null if no query has such a key), and the label of each head. */
export function headPatterns(kind, maps, rows, cols, isImage) {
  const found = members(kind, rows, cols, places(rows, isImage && kind === "encoder"));
  const scores = Object.fromEntries(SCORES.map((name) => [name, maps.map((map) => Array(map.heads).fill(null))]));
  maps.forEach((map, layer) => {
    for (let head = 0; head < map.heads; head++) {
      const sums = {}, counts = {};
      const add = (name, value) => { sums[name] = (sums[name] ?? 0) + value; counts[name] = (counts[name] ?? 0) + 1; };
      for (let i = 0; i < map.rows; i++) {
        const weights = map.row(head, i);
        if (!weights.some((weight) => weight > 0)) continue; // a fully masked row follows no pattern
        add("entropy", entropy(weights));
        for (const [name, { of, has }] of Object.entries(found)) {
          if (has && !has(i)) continue;
          const counted = of(i);
          add(name, weights.reduce((sum, weight, j) => sum + weight * Number(counted(j)), 0));
        }
      }
      for (const name of SCORES) if (counts[name]) scores[name][layer][head] = sums[name] / counts[name];
    }
  });
  const labels = maps.map((map, layer) => Array.from({ length: map.heads }, (_, head) => nameOf(kind, (name) => scores[name][layer][head])));
  return { kind, ...scores, labels };
}

function nameOf(kind, score) {
  const best = Object.keys(NAMES).reduce((a, b) => ((score(b) ?? -1) > (score(a) ?? -1) ? b : a));
  if (!((score(best) ?? -1) >= LEAST)) return "mixed";
  return kind === "cross" && best === "current" ? "diagonal" : NAMES[best];
}
