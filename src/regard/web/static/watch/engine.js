// Reverse-mode automatic differentiation on typed arrays. Each operation computes its result and records on a tape how
// a gradient flows back through it; `backward` replays the tape in reverse. A tensor (…, n) is stored as rows of n numbers.

export class Tensor {
  constructor(shape, data = new Float32Array(product(shape))) {
    Object.assign(this, { shape, data, grad: new Float32Array(data.length) });
  }
  /** The length and the number of rows. */
  get width() { return this.shape.at(-1); }
  get rows() { return this.data.length / this.width; }
}

const product = (shape) => shape.reduce((a, b) => a * b, 1);

/** out (m, n) += a (m, k) · b (k, n). Adds whole rows of b, in memory order, four at a time: twice as fast as one by one. */
function addProduct(out, a, b, m, k, n, [atOut, atA, atB] = [0, 0, 0]) { // offsets into batched matrices
  for (let i = 0; i < m; i++) {
    const row = atOut + i * n, factors = atA + i * k;
    let j = 0;
    for (; j + 3 < k; j += 4) {
      const f0 = a[factors + j], f1 = a[factors + j + 1], f2 = a[factors + j + 2], f3 = a[factors + j + 3];
      const r0 = atB + j * n, r1 = r0 + n, r2 = r1 + n, r3 = r2 + n;
      for (let c = 0; c < n; c++) out[row + c] += f0 * b[r0 + c] + f1 * b[r1 + c] + f2 * b[r2 + c] + f3 * b[r3 + c];
    }
    for (; j < k; j++) {
      const factor = a[factors + j], from = atB + j * n;
      for (let c = 0; c < n; c++) out[row + c] += factor * b[from + c];
    }
  }
}

/** The transpose of a (rows, cols) matrix at offset `at`. */
function transposed(a, rows, cols, at = 0) {
  const out = new Float32Array(rows * cols);
  for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) out[j * rows + i] = a[at + i * cols + j];
  return out;
}

export class Tape {
  constructor() { this.steps = []; }

  /** Compute a result of this shape; `back` adds to the gradients of its inputs. */
  note(shape, compute, back) {
    const out = new Tensor(shape);
    compute(out);
    this.steps.push(() => back(out));
    return out;
  }

  /** Backpropagate from a scalar loss. */
  backward(loss) {
    loss.grad[0] = 1;
    while (this.steps.length) this.steps.pop()();
  }

  /** a + b, of the same shape. */
  add(a, b) {
    return this.note(a.shape, (out) => {
      for (let i = 0; i < out.data.length; i++) out.data[i] = a.data[i] + b.data[i];
    }, (out) => {
      for (let i = 0; i < out.grad.length; i++) { a.grad[i] += out.grad[i]; b.grad[i] += out.grad[i]; }
    });
  }

  /** x Wᵀ + b: x (…, m), w (n, m) as in torch, bias (n,) or null → (…, n). */
  linear(x, w, bias = null) {
    const n = w.shape[0], m = x.width, { rows } = x;
    return this.note([...x.shape.slice(0, -1), n], (out) => {
      if (bias) for (let i = 0; i < rows; i++) out.data.set(bias.data, i * n);
      addProduct(out.data, x.data, transposed(w.data, n, m), rows, m, n);
    }, (out) => {
      addProduct(x.grad, out.grad, w.data, rows, n, m); // dx = dy W
      addProduct(w.grad, transposed(out.grad, rows, n), x.data, n, rows, m); // dW = dyᵀ x
      if (bias) for (let i = 0; i < out.grad.length; i++) bias.grad[i % n] += out.grad[i];
    });
  }

  /** Rows of a table (v, m) by ids: (…shape, m). */
  embed(table, ids, shape) {
    const m = table.width;
    return this.note([...shape, m], (out) => {
      ids.forEach((id, i) => out.data.set(table.data.subarray(id * m, (id + 1) * m), i * m));
    }, (out) => {
      ids.forEach((id, i) => { for (let c = 0; c < m; c++) table.grad[id * m + c] += out.grad[i * m + c]; });
    });
  }

  relu(x) {
    return this.note(x.shape, (out) => {
      for (let i = 0; i < x.data.length; i++) out.data[i] = Math.max(0, x.data[i]);
    }, (out) => {
      for (let i = 0; i < x.data.length; i++) if (x.data[i] > 0) x.grad[i] += out.grad[i];
    });
  }

  /** Normalise each row to mean 0 and variance 1, times gain plus bias (Ba et al. 2016). */
  layerNorm(x, gain, bias, eps = 1e-5) {
    const n = x.width, { rows } = x, normal = new Float32Array(x.data.length), inverse = new Float32Array(rows);
    return this.note(x.shape, (out) => {
      for (let r = 0; r < rows; r++) {
        let mean = 0, variance = 0;
        for (let c = 0; c < n; c++) mean += x.data[r * n + c] / n;
        for (let c = 0; c < n; c++) variance += (x.data[r * n + c] - mean) ** 2 / n;
        inverse[r] = 1 / Math.sqrt(variance + eps);
        for (let i = r * n, c = 0; c < n; i++, c++) {
          normal[i] = (x.data[i] - mean) * inverse[r];
          out.data[i] = normal[i] * gain.data[c] + bias.data[c];
        }
      }
    }, (out) => {
      for (let r = 0; r < rows; r++) {
        let sum = 0, along = 0; // the gradient through mean and variance
        for (let i = r * n, c = 0; c < n; i++, c++) {
          const g = out.grad[i] * gain.data[c];
          gain.grad[c] += out.grad[i] * normal[i];
          bias.grad[c] += out.grad[i];
          sum += g / n;
          along += g * normal[i] / n;
        }
        for (let i = r * n, c = 0; c < n; i++, c++) x.grad[i] += inverse[r] * (out.grad[i] * gain.data[c] - sum - normal[i] * along);
      }
    });
  }

  /** One part of each row, split into heads: x (B, T, parts · H · D) → (B, H, T, D). */
  splitHeads(x, part, heads, d) {
    const [B, T] = x.shape, out = [B, heads, T, d];
    const each = (visit) => {
      for (let b = 0, i = 0; b < B; b++) for (let h = 0; h < heads; h++) for (let t = 0; t < T; t++, i += d) {
        visit(i, (b * T + t) * x.width + (part * heads + h) * d);
      }
    };
    return this.note(out, (y) => each((to, from) => y.data.set(x.data.subarray(from, from + d), to)),
      (y) => each((to, from) => { for (let c = 0; c < d; c++) x.grad[from + c] += y.grad[to + c]; }));
  }

  /** Concatenate heads: (B, H, T, D) → (B, T, H · D). */
  joinHeads(x) {
    const [B, H, T, D] = x.shape;
    const each = (visit) => {
      for (let b = 0, i = 0; b < B; b++) for (let h = 0; h < H; h++) for (let t = 0; t < T; t++, i += D) visit((b * T + t) * H * D + h * D, i);
    };
    return this.note([B, T, H * D], (y) => each((to, from) => y.data.set(x.data.subarray(from, from + D), to)),
      (y) => each((to, from) => { for (let c = 0; c < D; c++) x.grad[from + c] += y.grad[to + c]; }));
  }

  /** scale · q kᵀ of every head: q, k (B, H, T, D) → (B, H, T, T). */
  scores(q, k, scale) {
    const [B, H, T, D] = q.shape;
    return this.note([B, H, T, T], (out) => {
      for (let n = 0; n < B * H; n++) addProduct(out.data, q.data, transposed(k.data, T, D, n * T * D), T, D, T, [n * T * T, n * T * D, 0]);
      for (let i = 0; i < out.data.length; i++) out.data[i] *= scale;
    }, (out) => {
      for (let i = 0; i < out.grad.length; i++) out.grad[i] *= scale;
      for (let n = 0; n < B * H; n++) {
        addProduct(q.grad, out.grad, k.data, T, T, D, [n * T * D, n * T * T, n * T * D]); // dq = dS k
        addProduct(k.grad, transposed(out.grad, T, T, n * T * T), q.data, T, T, D, [n * T * D, 0, n * T * D]); // dk = dSᵀ q
      }
    });
  }

  /** Softmax of each row; with `causal`, row i has no columns after i. */
  softmax(x, causal) {
    const n = x.width, seen = (r) => (causal ? (r % n) + 1 : n);
    return this.note(x.shape, (out) => {
      for (let r = 0; r < x.rows; r++) {
        const row = out.data.subarray(r * n, r * n + seen(r));
        let most = -Infinity, sum = 0;
        for (let c = 0; c < row.length; c++) most = Math.max(most, x.data[r * n + c]);
        for (let c = 0; c < row.length; c++) sum += row[c] = Math.exp(x.data[r * n + c] - most);
        for (let c = 0; c < row.length; c++) row[c] /= sum;
      }
    }, (out) => {
      for (let r = 0; r < x.rows; r++) {
        let mean = 0; // dx = p ∘ (dp − Σ p dp)
        for (let i = r * n; i < r * n + seen(r); i++) mean += out.data[i] * out.grad[i];
        for (let i = r * n; i < r * n + seen(r); i++) x.grad[i] += out.data[i] * (out.grad[i] - mean);
      }
    });
  }

  /** Weights times values: (B, H, T, T) · (B, H, T, D) → (B, H, T, D). */
  mix(weights, v) {
    const [B, H, T, D] = v.shape;
    return this.note(v.shape, (out) => {
      for (let n = 0; n < B * H; n++) addProduct(out.data, weights.data, v.data, T, T, D, [n * T * D, n * T * T, n * T * D]);
    }, (out) => {
      for (let n = 0; n < B * H; n++) {
        addProduct(weights.grad, out.grad, transposed(v.data, T, D, n * T * D), T, D, T, [n * T * T, n * T * D, 0]); // dW = dO vᵀ
        addProduct(v.grad, transposed(weights.data, T, T, n * T * T), out.grad, T, T, D, [n * T * D, 0, n * T * D]); // dv = Wᵀ dO
      }
    });
  }

  /** The mean of −log softmax(logits)[target] over the rows with a non-negative target. */
  crossEntropy(logits, targets) {
    const n = logits.width, shares = new Float32Array(logits.data.length), counted = targets.reduce((sum, t) => sum + (t >= 0), 0);
    return this.note([1], (out) => {
      targets.forEach((target, r) => {
        if (target < 0) return;
        let most = -Infinity, sum = 0;
        for (let i = r * n; i < (r + 1) * n; i++) most = Math.max(most, logits.data[i]);
        for (let i = r * n; i < (r + 1) * n; i++) sum += shares[i] = Math.exp(logits.data[i] - most);
        for (let i = r * n; i < (r + 1) * n; i++) shares[i] /= sum;
        out.data[0] -= (logits.data[r * n + target] - most - Math.log(sum)) / counted;
      });
    }, (out) => {
      targets.forEach((target, r) => { // softmax − one-hot
        if (target < 0) return;
        for (let c = 0; c < n; c++) logits.grad[r * n + c] += out.grad[0] * (shares[r * n + c] - (c === target)) / counted;
      });
    });
  }
}

/** Adam (Kingma and Ba 2015): lr times the mean gradient over its root mean square. */
export class Adam {
  constructor(parameters, { lr, betas = [0.9, 0.98], eps = 1e-8 }) {
    Object.assign(this, { parameters, lr, betas, eps, n: 0 });
    this.means = parameters.map(({ data }) => new Float32Array(data.length));
    this.squares = parameters.map(({ data }) => new Float32Array(data.length));
  }

  /** Take one step and zero the gradients. */
  step() {
    const [b1, b2] = this.betas;
    this.n += 1;
    const size = this.lr / (1 - b1 ** this.n), unbiased = 1 - b2 ** this.n;
    this.parameters.forEach(({ data, grad }, p) => {
      const mean = this.means[p], square = this.squares[p];
      for (let i = 0; i < data.length; i++) {
        mean[i] = b1 * mean[i] + (1 - b1) * grad[i];
        square[i] = b2 * square[i] + (1 - b2) * grad[i] ** 2;
        data[i] -= size * mean[i] / (Math.sqrt(square[i] / unbiased) + this.eps);
      }
      grad.fill(0);
    });
  }
}
