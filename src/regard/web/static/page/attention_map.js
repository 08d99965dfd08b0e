// Attention weights from q and k: A_ij = exp(s_ij − lse_i), s_ij = factor · q_i · k_j + b(j − i), −∞ where masked.
// The whole matrix is never stored: rows are computed on demand, as in attention/attention_map.py.

const KEEP = 1 << 20; // cached weights per map: 8 MB

/** The attention map of one layer of a traced pass: weights (T, S) of every head. */
export class AttentionMap {
  /** `site`: its entry in page.json; q (H, T, D), k (G, S, D); the last argument is the variant. */
  constructor(site, q, k, { causal = true, scale = 1 } = {}) {
    Object.assign(this, { site, q, k, heads: site.heads, width: site.d_head });
    this.rows = q.length / (site.heads * site.d_head);
    this.cols = k.length / (site.kv_heads * site.d_head);
    this.factor = site.factor * scale;
    this.isCausal = site.causal && causal;
    const [size, ahead] = site.window ?? [Infinity, Infinity];
    this.window = { size, ahead: site.causal && !causal ? Math.max(ahead, size - 1) : ahead };
    this.kept = new Map(); // the most recent rows
  }

  query(head, row) { return slice(this.q, head * this.rows + row, this.width); }
  key(head, col) { return slice(this.k, this.group(head) * this.cols + col, this.width); }
  /** The key head of a query head (grouped-query attention). */
  group(head) { return Math.floor((head * this.site.kv_heads) / this.heads); }

  /** Whether the mask lets a query attend to a key. */
  allows(row, col) { return !(this.isCausal && col > row) && col > row - this.window.size && col <= row + this.window.ahead; }

  bias(head, row, col) {
    const { bias } = this.site;
    return bias ? bias.values[head][col - row - bias.low] : 0;
  }

  /** A dot product as a score: scaled, and capped if the model caps its scores. */
  scaled(product) {
    const score = this.factor * product, { cap } = this.site;
    return cap ? cap * Math.tanh(score / cap) : score;
  }

  /** The scores of a row (S,). A plain loop for speed: 1,000 tokens have a million scores per head. */
  scores(head, row) {
    const { width, cols, k } = this, q = this.query(head, row), start = this.group(head) * cols * width, out = new Float64Array(cols);
    for (let col = 0, at = start; col < cols; col++, at += width) {
      out[col] = -Infinity;
      if (!this.allows(row, col)) continue;
      let product = 0;
      for (let d = 0; d < width; d++) product += q[d] * k[at + d];
      out[col] = this.scaled(product) + this.bias(head, row, col);
    }
    return out;
  }

  /** log Σ exp(s) of a row's scores, including the head's sink (a logit without a key), if it has one. */
  lse(head, scores) {
    const lse = logSumExp(scores), { sinks } = this.site;
    return sinks && lse !== Infinity ? logSumExp([lse, sinks[head]]) : lse;
  }

  /** The weight of the head's sink, by which a row falls short of 1; null without sinks. */
  sink(head, scores) {
    const lse = this.lse(head, scores), { sinks } = this.site;
    return !sinks ? null : lse === Infinity ? 1 : Math.exp(sinks[head] - lse);
  }

  /** The weights of a row (S,); all 0 if it is fully masked. */
  row(head, row) {
    const at = head * this.rows + row;
    let weights = this.kept.get(at);
    if (!weights) {
      const scores = this.scores(head, row), lse = this.lse(head, scores);
      weights = scores.map((score) => Math.exp(score - lse));
      if (this.kept.size * this.cols > KEEP) this.kept.clear();
      this.kept.set(at, weights);
    }
    return weights;
  }

  /** The row of one head, or the mean over heads if `head` is negative. */
  weights(head, row) {
    if (head >= 0) return this.row(head, row);
    const mean = new Float64Array(this.cols);
    for (let h = 0; h < this.heads; h++) this.row(h, row).forEach((weight, col) => { mean[col] += weight / this.heads; });
    return mean;
  }
}

const slice = (x, n, width) => x.subarray(n * width, (n + 1) * width);

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** log Σ exp(s); +∞ for a fully masked row, so that its weights are 0. */
export function logSumExp(scores) {
  const top = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  return top === -Infinity ? Infinity : top + Math.log(scores.reduce((sum, score) => sum + Math.exp(score - top), 0));
}

export function softmax(scores) {
  const lse = logSumExp(scores);
  return Float64Array.from(scores, (score) => Math.exp(score - lse));
}

/** −Σ p log p in nats. */
export const entropy = (p) => p.reduce((sum, x) => (x > 0 ? sum - x * Math.log(x) : sum), 0);

/** Indices of the k largest values, in descending order; the earlier one first among equals. */
export function largest(values, k) {
  if (k > 16) return [...values.keys()].sort((a, b) => values[b] - values[a] || a - b).slice(0, k);
  const best = []; // few of many: no full sort
  for (let n = 0; n < values.length; n++) {
    if (best.length === k && !(values[n] > values[best[k - 1]])) continue;
    let at = best.length;
    while (at && values[n] > values[best[at - 1]]) at--;
    best.splice(at, 0, n);
    if (best.length > k) best.pop();
  }
  return best;
}

/** The boundaries of `n` blocks of `total` items; the first blocks are one larger (as in torch.tensor_split). */
export function cuts(total, n) {
  const size = Math.floor(total / n), larger = total % n;
  return Array.from({ length: n + 1 }, (_, i) => i * size + Math.min(i, larger));
}
