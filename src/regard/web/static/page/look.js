// One traced pass of the in-page model, with the queries of web/look_queries.py: weights, labels, predictions.
import { Failure } from "../api.js";
import { AttentionMap, cuts, entropy, largest, logSumExp, softmax } from "./attention_map.js";
import { Vocabulary, joinLabels, moreLabel, patchLabels, spelledWords } from "./labels.js";

const UNCERTAIN_AMONG = 512; // leading tokens that are searched for the least certain prediction

/** A pass: inputs and outputs, attention maps of every kind, predictions. */
export class PageLook {
  constructor(id, page, trace, variant = null) {
    Object.assign(this, { id, page, trace, variant });
    const { config, vocabulary } = page;
    this.source = new Vocabulary(vocabulary.source, config);
    this.target = new Vocabulary(vocabulary.target ?? vocabulary.source, config);
    this.labels = this.readLabels();
    this.maps = {};
    for (const [kind, sites] of Object.entries(page.attention)) {
      this.maps[kind] = sites.map((site) => new AttentionMap(site, this.at(`${site.site}.q`).data, this.at(`${site.site}.k`).data, variant ?? {}));
    }
    this.views = new Map();
  }

  /** The activation of a hook site: {dims, data}. */
  at(name) { return this.trace.activations[name]; }

  /** One token's row of an activation (T, width). */
  vector(name, row) {
    const x = this.at(name);
    if (!x) return null;
    const width = x.dims.at(-1);
    return x.data.subarray(row * width, (row + 1) * width);
  }

  /** Labels of rows and columns of each kind; a row of cross-attention is labelled with the token it predicts. */
  readLabels() {
    const { trace, page: { config } } = this, source = config.source === "image" ? patchLabels(config) : this.source.labels(trace.source.ids);
    if (config.architecture === "encoder") return { encoder: { rows: source, cols: source } };
    if (config.architecture === "decoder") return { self: { rows: source, cols: source } };
    const fed = trace.target.ids, ends = trace.target.has_end && config.eos_id !== null;
    const read = this.target.labels(fed), written = this.target.labels([...fed.slice(1), ...(ends ? [config.eos_id] : [])]);
    if (written.length < fed.length) written.push(moreLabel(written.length));
    return { encoder: { rows: source, cols: source }, self: { rows: read, cols: read }, cross: { rows: written, cols: source } };
  }

  /** The rows and columns to show: token by token, or with words joined and special tokens hidden. */
  view(kind, { words = false, specials = true } = {}) {
    const key = `${kind} ${words} ${specials}`;
    if (!this.maps[kind]) throw new Failure(`kind='${kind}' is not one of this look's: ${Object.keys(this.maps).join(", ")}`);
    if (!this.views.has(key)) this.views.set(key, new View(this, kind, words, specials));
    const view = this.views.get(key);
    if (view.rows.length && view.cols.length) return view;
    throw new Failure(`specials=false leaves no ${kind} attention: all its tokens are special`);
  }

  /** What the page needs to know of a look before it requests weights. */
  document(reading = {}) {
    const { trace, id, page: { model } } = this, kinds = {};
    for (const [kind, maps] of Object.entries(this.maps)) {
      const { rows, cols } = this.view(kind, reading);
      kinds[kind] = { layers: maps.length, heads: maps[0].heads, n_rows: rows.length, n_cols: cols.length, normalised: !maps[0].site.sinks };
    }
    return { id, model: model.id, text: trace.text ?? null, target: trace.target_text ?? null, kinds, beams: Boolean(trace.generated?.steps), ...this.summary(), ...(trace.image ? { image: trace.image } : {}) };
  }

  /** The words that the model hardly knows, its classes, and the position of its least certain prediction. */
  summary() {
    const { page, trace } = this, { model, config } = page, { cols } = Object.values(this.labels).at(-1);
    const unknown = trace.unknown ?? [], spelled = page.spells_examples === false && !model.image ? spelledWords(cols) : [];
    const out = { unfamiliar: [...unknown, ...spelled] };
    if (config.head === "classify" && config.problem_type !== "regression") out.classes = this.classes();
    if (model.generates) {
      const first = model.source || model.image ? 0 : Math.min(1, this.positions - 1); // a language model's prediction after the first token has hardly any context
      const chaos = Array.from({ length: Math.min(this.positions, UNCERTAIN_AMONG) - first }, (_, n) => entropy(this.chances(first + n)));
      out.uncertain = first + largest(chaos, 1)[0];
    }
    return out;
  }

  /** The number of positions with predictions. */
  get positions() { return this.page.config.head === "classify" ? Object.values(this.labels)[0].rows.length : this.trace.logits.rows; }

  /** Negative positions count from the end. */
  position(n = -1) {
    const total = this.positions;
    if (n < -total || n >= total) throw new Failure(`position=${n}: there are ${total} tokens, 0 … ${total - 1}`);
    return n < 0 ? n + total : n;
  }

  logits(position) {
    const { vocab, data } = this.trace.logits;
    return data.subarray(position * vocab, (position + 1) * vocab);
  }

  /** The probabilities of all tokens after a position, or of all classes; of a regression, its value. */
  chances(position) { return this.share(this.logits(this.page.config.head === "classify" ? 0 : position)); }

  share(logits) {
    const { head, problem_type: type } = this.page.config;
    if (head !== "classify") return softmax(logits);
    return type === "regression" ? logits : type === "multi_label" ? Float64Array.from(logits, (x) => 1 / (1 + Math.exp(-x))) : softmax(logits);
  }

  /** The classes with their probabilities, likeliest first. */
  classes() {
    const chances = this.chances(0);
    return Object.fromEntries(largest(chances, chances.length).map((n) => [this.text(n), chances[n]]));
  }

  /** The text of a token, or the name of a class. */
  text(index) {
    if (this.page.config.head === "classify") return this.page.classes?.[index] ?? `LABEL_${index}`;
    return this.target.text(index);
  }

  prediction(chances, token) { return { token, text: this.text(token), probability: chances[token] }; }

  /** The likeliest tokens after a position, under temperature, top-k and top-p. */
  next({ position, k = 10, temperature, top_k: topK, top_p: topP }) {
    let scores = Float64Array.from(this.logits(this.position(position)), (x) => x / (temperature ?? 1));
    if (topK) { const last = scores[largest(scores, topK).at(-1)]; scores = scores.map((x) => (x < last ? -Infinity : x)); }
    if (topP !== undefined && topP < 1) scores = nucleus(scores, topP);
    const chances = softmax(scores);
    return largest(chances, k).filter((n) => chances[n] > 0).map((n) => this.prediction(chances, n));
  }

  /** The target tokens of the positions, as target_tokens in lens/effects.py. */
  written() {
    const { architecture } = this.page.config;
    const rows = architecture === "decoder" ? this.labels.self.rows.slice(1) : this.labels.cross?.rows ?? [];
    return rows.map(({ id }) => id).filter((id) => id !== null);
  }

  /** How well the model predicts the text: tokens, those that were its likeliest prediction, geometric mean of probabilities. */
  fit() {
    const tokens = this.written();
    if (!tokens.length || this.page.config.head === "classify") return { tokens: 0 };
    const right = tokens.filter((token, n) => largest(this.logits(n), 1)[0] === token).length;
    return { tokens: tokens.length, right, probability: Math.exp(this.logChance(tokens)) };
  }

  /** The mean log-probability of these tokens, one per position from the first. */
  logChance(tokens) {
    return tokens.reduce((sum, token, n) => sum + this.logits(n)[token] - logSumExp(this.logits(n)), 0) / tokens.length;
  }
}

/** Nucleus filter (Holtzman et al. 2020): drop the least likely tokens with a total probability of at most 1 − p. */
function nucleus(scores, p) {
  const chances = softmax(scores), order = largest(scores, scores.length).reverse(), out = Float64Array.from(scores);
  let sum = 0;
  for (const n of order.slice(0, -1)) {
    sum += chances[n];
    if (sum <= 1 - p) out[n] = -Infinity;
  }
  return out;
}

/** The rows and columns of one kind; rows of joined tokens are averaged, columns summed. */
class View {
  constructor(look, kind, words, specials) {
    const { rows, cols } = look.labels[kind], isPlain = specials && !words;
    Object.assign(this, { maps: look.maps[kind], isPlain });
    this.rows = isPlain ? rows : joinLabels(rows, words, specials);
    this.cols = isPlain ? cols : joinLabels(cols, words, specials);
    const present = new Set(this.cols.flatMap(({ span: [a, b] }) => Array.from({ length: b - a }, (_, n) => a + n)));
    this.hidden = isPlain ? [] : cols.map((_, n) => n).filter((n) => !present.has(n));
  }

  /** The weights of a row; if columns are hidden, the others are scaled up to the sum of the whole row. */
  weights(layer, head, row) {
    const map = this.maps[layer];
    if (this.isPlain) return map.weights(head, row);
    const [from, to] = this.rows[row].span, out = new Float64Array(this.cols.length);
    let lost = 0, total = 0;
    for (let token = from; token < to; token++) {
      const weights = map.weights(head, token);
      this.cols.forEach(({ span: [a, b] }, col) => { for (let n = a; n < b; n++) out[col] += weights[n] / (to - from); });
      for (const n of this.hidden) lost += weights[n] / (to - from);
      for (const weight of weights) total += weight / (to - from);
    }
    const left = total - lost;
    if (!this.hidden.length) return out;
    return left > 1e-6 ? out.map((weight) => weight * total / left) : out.fill(0); // anything smaller is rounding error
  }

  tile(layer, head, r0, r1, c0, c1) {
    const wide = c1 - c0, values = new Float32Array((r1 - r0) * wide);
    for (let row = r0; row < r1; row++) values.set(this.weights(layer, head, row).subarray(c0, c1), (row - r0) * wide);
    return { shape: [r1 - r0, wide], values };
  }

  /** The whole matrix pooled into at most h × w cells by mean or "max"; the "max" of the mean over heads is the mean of
   *  the heads' pooled matrices, unless tokens are joined. */
  pooled(layer, head, tall, wide, reduce) {
    if (head < 0 && this.isPlain && reduce === "max") {
      const each = Array.from({ length: this.maps[layer].heads }, (_, h) => this.pooled(layer, h, tall, wide, reduce));
      return { shape: each[0].shape, values: each[0].values.map((_, n) => each.reduce((sum, { values }) => sum + values[n] / each.length, 0)) };
    }
    const h = Math.min(tall, this.rows.length), w = Math.min(wide, this.cols.length);
    const values = new Float32Array(h * w), down = cuts(this.rows.length, h), across = cuts(this.cols.length, w);
    for (let i = 0; i < h; i++) {
      const cells = new Float64Array(w);
      for (let row = down[i]; row < down[i + 1]; row++) {
        const weights = this.weights(layer, head, row);
        for (let j = 0; j < w; j++) {
          for (let col = across[j]; col < across[j + 1]; col++) cells[j] = reduce === "max" ? Math.max(cells[j], weights[col]) : cells[j] + weights[col];
        }
      }
      for (let j = 0; j < w; j++) values[i * w + j] = reduce === "max" ? cells[j] : cells[j] / ((down[i + 1] - down[i]) * (across[j + 1] - across[j]));
    }
    return { shape: [h, w], values };
  }

  top(layer, head, row, k) {
    const weights = this.weights(layer, head, row);
    return largest(weights, k).filter((n) => weights[n] > 0).map((index) => ({ index, text: this.cols[index].text, weight: weights[index] }));
  }
}
