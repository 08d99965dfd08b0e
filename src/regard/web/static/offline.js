// The methods of Server in api.js over numbers embedded in the page (written by lens/render_html.py).
async function unpacked({ bytes, shape }) {
  const packed = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return { shape, values: new Float32Array(await new Response(stream).arrayBuffer()) };
}

/** The boundaries of `n` blocks of `total` items; the first blocks are one larger (as in torch.tensor_split). */
function cuts(total, n) {
  const size = Math.floor(total / n), larger = total % n;
  return Array.from({ length: n + 1 }, (_, i) => i * size + Math.min(i, larger));
}

function pooled({ shape: [rows, cols], values }, h, w) {
  const out = new Float32Array(h * w), tall = cuts(rows, h), wide = cuts(cols, w);
  for (let i = 0; i < h; i++) {
    for (let j = 0; j < w; j++) {
      let sum = 0;
      for (let r = tall[i]; r < tall[i + 1]; r++) for (let c = wide[j]; c < wide[j + 1]; c++) sum += values[r * cols + c];
      out[i * w + j] = sum / ((tall[i + 1] - tall[i]) * (wide[j + 1] - wide[j]));
    }
  }
  return { shape: [h, w], values: out };
}

export class Offline {
  offline = true;

  constructor(content) {
    Object.assign(this, { content, found: new Map() });
    this.only = content.only ?? null; // the single head in the page; null if it has all
    this.hasPatterns = Boolean(content.patterns);
    this.overviewOnly = Boolean(content.overview);
    this.reading = content.reading ?? null; // the choice of joined words and hidden tokens in this page
  }

  async models() { return [{ examples: [], tags: [], ...this.content.model }]; }
  async look() { return this.content.look; }
  async labels(_, kind, axis, start, stop) {
    return this.content.labels[kind][axis].slice(start, stop).map(([text, special, box]) => ({ text, special: Boolean(special), box }));
  }

  /** The whole matrix of a head, or of the mean over heads if it is negative. */
  matrix(kind, layer, head) {
    const key = `${kind} ${layer} ${head}`;
    if (!this.found.has(key)) this.found.set(key, this.make(kind, layer, head));
    return this.found.get(key);
  }

  async make(kind, layer, head) {
    if (this.only) return unpacked(this.content.overview ?? this.content.weights);
    const { shape: [heads, rows, cols], values } = await this.layer(kind, layer), size = rows * cols;
    if (head >= 0) return { shape: [rows, cols], values: values.subarray(head * size, (head + 1) * size) };
    const mean = new Float32Array(size);
    for (let i = 0; i < heads * size; i++) mean[i % size] += values[i];
    return { shape: [rows, cols], values: mean.map((sum) => sum / heads) };
  }

  layer(kind, layer) {
    const key = `${kind} ${layer}`;
    if (!this.found.has(key)) this.found.set(key, unpacked(this.content.weights[kind][layer]));
    return this.found.get(key);
  }

  async tile(_, kind, layer, head, r0, r1, c0, c1) {
    const { shape: [, cols], values } = await this.matrix(kind, layer, head), wide = c1 - c0;
    const out = new Float32Array((r1 - r0) * wide);
    for (let r = r0; r < r1; r++) out.set(values.subarray(r * cols + c0, r * cols + c1), (r - r0) * wide);
    return { shape: [r1 - r0, wide], values: out };
  }

  async pooled(_, kind, layer, head, h, w) {
    const whole = await this.matrix(kind, layer, head);
    return this.overviewOnly ? whole : pooled(whole, h, w);
  }

  async thumbnails(_, kind, layer, size) {
    const { shape: [heads, rows, cols] } = await this.layer(kind, layer), h = Math.min(size, rows), w = Math.min(size, cols);
    const values = new Float32Array(heads * h * w);
    for (let head = 0; head < heads; head++) values.set(pooled(await this.matrix(kind, layer, head), h, w).values, head * h * w);
    return { shape: [heads, h, w], values };
  }

  async top(_, kind, layer, head, row, k) {
    const { shape: [, cols], values } = await this.matrix(kind, layer, head), line = values.subarray(row * cols, (row + 1) * cols);
    const order = [...line.keys()].sort((a, b) => line[b] - line[a] || a - b).slice(0, k);
    return order.filter((index) => line[index] > 0).map((index) => ({ index, weight: line[index] }));
  }

  async patterns(_, kind) { return this.content.patterns[kind]; }
  imageUrl() { return this.content.look.image; }
}
