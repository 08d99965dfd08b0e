// The Transformer that learns in the page: that of `regard.build("gpt2", …)`, with the same parameter names.
import { Tape, Tensor } from "./engine.js";

/** Fixed sizes, small enough for hundreds of steps in a few seconds. */
export const SIZES = { d_model: 32, d_ff: 64, vocab_size: 27, max_len: 16 };

export class Transformer {
  /** `normal` samples a standard normal distribution; without it all parameters are 0, to be loaded. */
  constructor(config, normal = () => 0) {
    this.config = config;
    this.parameters = {};
    const { d_model, d_ff, n_layers, vocab_size, max_len, positions } = config;
    const matrix = (name, rows, cols, spread) => { this.parameters[name] = new Tensor([rows, cols], Float32Array.from({ length: rows * cols }, () => spread * normal())); };
    const vector = (name, n, value = 0) => { this.parameters[name] = new Tensor([n], new Float32Array(n).fill(value)); };
    const linear = (name, rows, cols, spread = cols ** -0.5) => { matrix(`${name}.weight`, rows, cols, spread); vector(`${name}.bias`, rows); };
    const norm = (name) => { vector(`${name}.weight`, d_model, 1); vector(`${name}.bias`, d_model); };
    matrix("token.weight", vocab_size, d_model, d_model ** -0.5);
    if (positions === "learned") matrix("embeddings.position.weight", max_len, d_model, d_model ** -0.5);
    for (let layer = 0; layer < n_layers; layer++) {
      const block = `decoder.blocks.${layer}`, small = (2 * n_layers) ** -0.5; // writers to the residual stream start small
      norm(`${block}.attention_norm`);
      linear(`${block}.attention.w_qkv`, 3 * d_model, d_model);
      linear(`${block}.attention.w_o`, d_model, d_model, small * d_model ** -0.5);
      norm(`${block}.ff_norm`);
      linear(`${block}.ff.w_in`, d_ff, d_model);
      linear(`${block}.ff.w_out`, d_model, d_ff, small * d_ff ** -0.5);
    }
    norm("decoder.norm");
  }

  get size() { return Object.values(this.parameters).reduce((sum, { data }) => sum + data.length, 0); }

  /** ids of B texts of T tokens → logits (B, T, V) and the attention weights (B, H, T, T) of every layer. */
  forward(tape, ids, batch) {
    const { parameters: p, config } = this, T = ids.length / batch, weights = [];
    let x = tape.embed(p["token.weight"], ids, [batch, T]);
    const places = this.places(tape, batch, T);
    if (places) x = tape.add(x, places);
    for (let layer = 0; layer < config.n_layers; layer++) {
      const block = `decoder.blocks.${layer}`;
      const attended = this.attention(tape, this.norm(tape, x, `${block}.attention_norm`), `${block}.attention`);
      weights.push(attended.weights);
      x = tape.add(x, attended.out);
      const wide = tape.relu(this.linear(tape, this.norm(tape, x, `${block}.ff_norm`), `${block}.ff.w_in`));
      x = tape.add(x, this.linear(tape, wide, `${block}.ff.w_out`));
    }
    return { logits: tape.linear(this.norm(tape, x, "decoder.norm"), p["token.weight"]), weights };
  }

  /** softmax(q kᵀ / √D) v in every head, under the causal mask. */
  attention(tape, x, name) {
    const { n_heads, d_model, scaled, causal } = this.config, d = d_model / n_heads;
    const qkv = this.linear(tape, x, `${name}.w_qkv`), [q, k, v] = [0, 1, 2].map((part) => tape.splitHeads(qkv, part, n_heads, d));
    const weights = tape.softmax(tape.scores(q, k, scaled ? d ** -0.5 : 1), causal);
    return { weights, out: this.linear(tape, tape.joinHeads(tape.mix(weights, v)), `${name}.w_o`) };
  }

  linear(tape, x, name) { return tape.linear(x, this.parameters[`${name}.weight`], this.parameters[`${name}.bias`]); }

  norm(tape, x, name) { return tape.layerNorm(x, this.parameters[`${name}.weight`], this.parameters[`${name}.bias`]); }

  /** Position vectors 0 … T − 1 for each text: a learned table, the paper's sinusoids, or none. */
  places(tape, batch, T) {
    const { positions, d_model } = this.config, ids = Array.from({ length: batch * T }, (_, i) => i % T);
    if (positions === "none") return null;
    if (positions === "learned") return tape.embed(this.parameters["embeddings.position.weight"], ids, [batch, T]);
    const angle = (place, c) => place * 10000 ** (-2 * Math.floor(c / 2) / d_model);
    return new Tensor([batch, T, d_model], Float32Array.from({ length: batch * T * d_model }, (_, i) => {
      const c = i % d_model, at = angle(ids[Math.floor(i / d_model)], c);
      return c % 2 ? Math.cos(at) : Math.sin(at);
    }));
  }

  /** The mean loss of a batch; gradients are left in the parameters. */
  loss(ids, targets, batch) {
    const tape = new Tape(), loss = tape.crossEntropy(this.forward(tape, ids, batch).logits, targets);
    tape.backward(loss);
    return loss.data[0];
  }
}
