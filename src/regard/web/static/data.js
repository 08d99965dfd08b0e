// The data of one look, each part fetched once: labels in pages, weights in tiles of 256 × 256.
const SIDE = 256;
const PAGE = 2048;
const KEEP = 160; // tiles of 256 KB: at most 40 MB

export class Data {
  constructor(source, look) {
    this.source = source;
    this.look = look;
    this.memory = new Map();
  }

  /** A cached promise, least recently used dropped first; a failed one is not kept, so it can be retried. */
  once(key, make) {
    let found = this.memory.get(key);
    if (found) this.memory.delete(key); // move to the end: most recently used
    else {
      found = make();
      found.catch(() => this.memory.delete(key));
    }
    this.memory.set(key, found);
    if (this.memory.size > KEEP) this.memory.delete(this.memory.keys().next().value);
    return found;
  }

  size(kind) {
    const { n_rows: rows, n_cols: cols, layers, heads } = this.look.kinds[kind];
    return { rows, cols, layers, heads };
  }

  /** The kind whose rows are the tokens that the model reads, one after another; a recurrent decoder has no self-attention. */
  get mainKind() { return ["self", "cross", "encoder"].find((kind) => kind in this.look.kinds); }

  /** Whether each row of this kind is a position with a next-token prediction. */
  writes(kind) { return kind !== "encoder" && this.look.uncertain !== undefined && !this.look.reading && !this.source.offline; }

  labels(kind, axis) {
    const total = this.size(kind)[axis];
    return this.once(`labels ${kind} ${axis}`, async () => {
      const starts = Array.from({ length: Math.ceil(total / PAGE) }, (_, i) => i * PAGE);
      const pages = await Promise.all(starts.map((start) =>
        this.source.labels(this.look, kind, axis, start, Math.min(total, start + PAGE))));
      return pages.flat();
    });
  }

  tile(kind, layer, head, r, c) {
    const { rows, cols } = this.size(kind);
    return this.once(`tile ${kind} ${layer} ${head} ${r} ${c}`, () =>
      this.source.tile(this.look, kind, layer, head, r, Math.min(rows, r + SIDE), c, Math.min(cols, c + SIDE)));
  }

  /** The weights of any rows × cols, assembled from aligned tiles. */
  async block(kind, layer, head, r0, r1, c0, c1) {
    const height = r1 - r0, width = c1 - c0, values = new Float32Array(height * width);
    const { cols } = this.size(kind), work = [];
    for (let r = r0 - (r0 % SIDE); r < r1; r += SIDE) {
      for (let c = c0 - (c0 % SIDE); c < c1; c += SIDE) {
        work.push(this.tile(kind, layer, head, r, c).then((tile) => {
          const wide = Math.min(SIDE, cols - c), left = Math.max(c, c0), right = Math.min(c + wide, c1);
          for (let i = Math.max(r, r0); i < Math.min(r + SIDE, r1); i++) {
            const from = (i - r) * wide + left - c;
            values.set(tile.values.subarray(from, from + right - left), (i - r0) * width + left - c0);
          }
        }));
      }
    }
    await Promise.all(work);
    return { rows: height, cols: width, values };
  }

  async row(kind, layer, head, row) {
    const { cols } = this.size(kind);
    return (await this.block(kind, layer, head, row, row + 1, 0, cols)).values;
  }

  top(kind, layer, head, row, k) {
    return this.once(`top ${kind} ${layer} ${head} ${row} ${k}`, () =>
      this.source.top(this.look, kind, layer, head, row, Math.min(k, this.size(kind).cols)));
  }

  /** The whole matrix pooled into at most h × w cells; unpooled if it is small. */
  overview(kind, layer, head, h, w) {
    const { rows, cols } = this.size(kind);
    if (rows <= SIDE && cols <= SIDE) return this.block(kind, layer, head, 0, rows, 0, cols);
    const tall = Math.min(h, rows), wide = Math.min(w, cols);
    return this.once(`pooled ${kind} ${layer} ${head} ${tall} ${wide}`, async () => {
      const { shape, values } = await this.source.pooled(this.look, kind, layer, head, tall, wide);
      return { rows: shape[0], cols: shape[1], values };
    });
  }

  thumbnails(kind, layer, size) {
    return this.once(`thumbnails ${kind} ${layer} ${size}`, () =>
      this.source.thumbnails(this.look, kind, layer, size));
  }

  walk(kind, layer, head, row, col) {
    return this.once(`walk ${kind} ${layer} ${head} ${row} ${col}`, () =>
      this.source.walk(this.look, kind, layer, head, row, col));
  }

  why(kind, layer, head, row, col) {
    return this.once(`why ${kind} ${layer} ${head} ${row} ${col}`, () => this.source.why(this.look, kind, layer, head, row, col));
  }

  story(kind, layer, head, row) { return this.once(`story ${kind} ${layer} ${head} ${row}`, () => this.source.story(this.look, kind, layer, head, row)); }
  contributions(options) { return this.once(`contributions ${JSON.stringify(options)}`, () => this.source.contributions(this.look, options)); }
  patterns(kind) { return this.once(`patterns ${kind}`, () => this.source.patterns(this.look, kind)); }
  experts(kind, layer) { return this.once(`experts ${kind} ${layer}`, () => this.source.experts(this.look, kind, layer)); }
  history(kind) { return this.once(`history ${kind}`, () => this.source.history(this.look, kind)); }
  beams() { return this.once("beams", () => this.source.beams(this.look)); }
  next(options) { return this.once(`next ${JSON.stringify(options)}`, () => this.source.next(this.look, options)); }
}

/** The same look with sub-words joined or special tokens hidden. */
export class Readings {
  constructor(source, look) { Object.assign(this, { source, look, found: new Map() }); }

  of(reading) {
    const key = JSON.stringify(reading), { found, source } = this;
    if (!found.has(key)) {
      const asked = source.read(this.look, reading).then((look) => new Data(source, look));
      asked.catch(() => found.delete(key)); // can be retried
      found.set(key, asked);
    }
    return found.get(key);
  }
}
