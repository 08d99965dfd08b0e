// The computation of one weight, and one token's path through a layer; mirrors web/arithmetic.py and web/story.py.
import { dot, entropy, largest } from "./attention_map.js";

const KEYS = 10; // keys with the largest weights
const NUMBERS = 48; // leading numbers of a vector
const WORDS = 6; // likeliest predictions
const ROW_KEYS = 64; // keys of a row whose computation is shown

const numbers = (x, most = NUMBERS) => Array.from(x.subarray(0, most), (value) => Number(value.toFixed(6)));
const finite = (value) => (Number.isFinite(value) ? value : null); // as in JSON

/** v of a key for a query head. */
function value(look, kind, layer, head, col) {
  const map = look.maps[kind][layer], { site, width, cols } = map, { data } = look.at(`${site.site}.v`), n = map.group(head) * cols + col;
  return data.subarray(n * width, (n + 1) * width);
}

/** s_ij = q_i · k_j / √D + b_ij, A_ij = exp(s_ij − lse_i), A_ij v_j, for one pair. */
export function weightArithmetic(look, kind, layer, asked, row, col) {
  const map = look.maps[kind][layer], { site } = map, every = Array.from({ length: map.heads }, (_, h) => map.row(h, row)[col]);
  const head = asked < 0 ? every.indexOf(Math.max(...every)) : asked, q = map.query(head, row), k = map.key(head, col), v = value(look, kind, layer, head, col);
  const product = dot(q, k), scaled = map.scaled(product), bias = map.bias(head, row, col), masked = !map.allows(row, col), scores = map.scores(head, row), weight = map.row(head, row)[col];
  return {
    mechanism: site.cap ? "capped-dot" : "dot", normaliser: "softmax", q: Array.from(q), k: Array.from(k), dot: site.cap ? null : product, factor: site.cap ? null : map.factor,
    scaled, bias, masked, score: masked ? null : scaled + bias, lse: finite(map.lse(head, scores)), sink: map.sink(head, scores), weight,
    v: Array.from(v), contribution: Array.from(v, (x) => weight * x), head, row: rowArithmetic(look, kind, layer, head, map.row(head, row), scores, col),
  };
}

/** Scores, weights and weighted values of a row; a long one is cut to the largest weights and the requested key. */
function rowArithmetic(look, kind, layer, head, weights, scores, col) {
  const ranked = Float64Array.from(weights, (weight, n) => (n === col ? Infinity : weight)), cols = largest(ranked, ROW_KEYS).sort((a, b) => a - b);
  const shares = (n) => Array.from(value(look, kind, layer, head, n), (x) => weights[n] * x);
  const keys = cols.map((index) => ({ index, score: finite(scores[index]), weight: weights[index], contribution: shares(index) }));
  const total = (list) => list.reduce((sum, weight) => sum + weight, 0), others = weights.length - cols.length;
  const output = Array.from(weights, (_, n) => shares(n)).reduce((sum, share) => sum.map((x, n) => x + share[n]));
  return { keys, others, rest: others ? Math.max(0, total(weights) - total(keys.map(({ weight }) => weight))) : 0, output };
}

/** One token's path through a head and a layer; `layers` are the logits after each layer, as if it were the last one. */
export function storyNumbers(look, kind, layer, head, row, position, layers) {
  const stack = kind === "encoder" ? "encoder" : "decoder", block = `${stack}.blocks.${layer}`;
  const chances = look.chances(position);
  return {
    embedding: embedding(look, stack, row), head: headNumbers(look, kind, layer, head, row), block: blockNumbers(look, kind, block, row), norm_place: look.page.config.norm_place,
    layers: layers.map((logits, n) => { const shares = look.share(logits), [best] = largest(shares, 1); return { layer: n - 1, text: look.text(best), probability: shares[best] }; }),
    position, predictions: largest(chances, WORDS).map((n) => look.prediction(chances, n)),
  };
}

/** The row whose prediction ends the story: its own, or the least certain one if the story is about the encoder. */
export function predictingRow(look, kind, row) {
  const isEncoderOnly = look.page.config.architecture === "encoder";
  if ((kind === "encoder") === isEncoderOnly) return row;
  return largest(Array.from({ length: look.positions }, (_, n) => entropy(look.chances(n))), 1)[0];
}

/** The stack's input at a row, and the vectors it is the sum of. */
function embedding(look, stack, row) {
  const whole = look.vector(stack, row), parts = {};
  for (const name of ["token", "segment", "position"]) {
    const part = look.vector(`${stack}.${name}`, row);
    if (part) parts[name] = numbers(part);
  }
  return { parts, sum: numbers(whole), width: whole.length, normed: Boolean(look.page.config.embedding_norm) && Object.keys(parts).length > 0 };
}

/** Query, keys, values, scores, weights and output of one head. */
function headNumbers(look, kind, layer, head, row) {
  const map = look.maps[kind][layer], { site, width, rows } = map, weights = map.row(head, row), scores = map.scores(head, row), q = map.query(head, row), sink = map.sink(head, scores);
  const hidden = [...scores.keys()].filter((n) => scores[n] === -Infinity), nVisible = scores.length - hidden.length;
  const visible = largest(weights.map((weight, n) => (scores[n] === -Infinity ? -1 : weight)), Math.min(KEYS, nVisible));
  const cols = [...visible, ...hidden.slice(0, 1)].sort((a, b) => a - b), outputs = look.at(`${site.site}.heads`).data; // with one masked key as an example
  const heads = Array.from({ length: map.heads }, (_, h) => outputs.subarray((h * rows + row) * width, (h * rows + row + 1) * width));
  return {
    q: numbers(q), width, normaliser: "softmax", factor: site.cap ? null : map.factor,
    keys: cols.map((index) => {
      const k = map.key(head, index);
      return { index, k: numbers(k), v: numbers(value(look, kind, layer, head, index)), dot: site.cap ? null : dot(q, k), score: finite(scores[index]), weight: weights[index] };
    }),
    others: nVisible - visible.length, rest: Math.max(0, 1 - cols.reduce((sum, n) => sum + weights[n], 0) - (sink ?? 0)), sink,
    output: numbers(heads[head]), heads: heads.map((each) => numbers(each, 16)),
  };
}

/** The residual stream before and after an attention and at the end of its layer, and what is added in between. */
function blockNumbers(look, kind, block, row) {
  const names = { ...(kind === "cross" ? { before: "after_attention", attention: "cross_attention.output", between: "after_cross_attention" }
    : { before: "input", attention: "attention.output", between: "after_attention", cross: "cross_attention.output" }), ff: "ff.output", after: "output" };
  const out = {}, neurons = look.vector(`${block}.ff.neurons`, row);
  for (const [name, site] of Object.entries(names)) {
    const vector = look.vector(`${block}.${site}`, row);
    if (vector) out[name] = numbers(vector);
  }
  return neurons ? { ...out, neurons: neurons.length, active: neurons.filter((x) => x > 0).length } : out;
}
