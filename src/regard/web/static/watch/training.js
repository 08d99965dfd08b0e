// One training run: batches, Adam steps, and evaluation on unseen texts.
import { Adam, Tape } from "./engine.js";
import { TASKS, batchOf, generator, heldOut, normalFrom } from "./tasks.js";
import { SIZES, Transformer } from "./transformer.js";

/** The settings and their defaults. */
export const DEFAULTS = { task: "reverse", n_layers: 1, n_heads: 2, causal: true, scaled: true, positions: "sinusoidal", lr: 0.005, seed: 1, word: "" };
export const BATCH = 16;
const LOOKED_BACK = 10; // steps over which the loss is averaged

export class Training {
  constructor(settings) {
    this.settings = settings;
    this.task = TASKS[settings.task];
    const { n_layers, n_heads, causal, scaled, positions, seed, lr, word } = settings;
    this.random = generator(seed);
    this.model = new Transformer({ ...SIZES, n_layers, n_heads, causal, scaled, positions }, normalFrom(this.random));
    this.adam = new Adam(Object.values(this.model.parameters), { lr });
    this.shown = this.task.text(this.task.takes(word) ? word : this.task.example);
    this.unseen = heldOut(this.task, this.shown);
    this.losses = [];
  }

  get n_steps() { return this.losses.length; }

  /** The mean loss of the last few batches. */
  get loss() {
    const last = this.losses.slice(-LOOKED_BACK);
    return last.reduce((sum, loss) => sum + loss, 0) / last.length;
  }

  step() {
    const texts = [];
    while (texts.length < BATCH) {
      const text = this.task.draw(this.random);
      if (!this.unseen.isHeldOut(text)) texts.push(text);
    }
    const { ids, targets } = batchOf(this.task, texts);
    this.losses.push(this.model.loss(ids, targets, BATCH));
    this.adam.step();
  }

  /** Greedy continuations of the given letters. */
  write(texts) {
    const { vocab_size } = this.model.config, written = texts.map((text) => text.slice(0, this.task.first + 1));
    for (let T = this.task.first + 1; T < this.task.length; T++) {
      const { data } = this.model.forward(new Tape(), written.flat(), texts.length).logits;
      written.forEach((text, n) => {
        const row = data.subarray(((n + 1) * T - 1) * vocab_size, (n + 1) * T * vocab_size);
        text.push(row.indexOf(Math.max(...row)));
      });
    }
    return written;
  }

  /** The share of unseen texts written without a mistake, and the attention patterns of each head in them. */
  examine() {
    const { texts } = this.unseen, written = this.write(texts);
    const accuracy = written.filter((text, n) => text.join() === texts[n].join()).length / texts.length;
    const { weights } = this.model.forward(new Tape(), batchOf(this.task, texts).ids, texts.length);
    return { accuracy, patterns: weights.map((layer) => this.patterns(layer)) };
  }

  /** For each head of a layer, the share of its weight on the letter to write, the previous one, itself and the next one. */
  patterns({ data, shape: [B, H, T] }) {
    const { task, unseen } = this, sums = Array.from({ length: H }, () => ({ source: 0, before: 0, itself: 0, next: 0 }));
    for (let b = 0, at = 0; b < B; b++) for (let h = 0; h < H; h++) for (let row = 0; row < T; row++, at += T) {
      if (row >= task.first) sums[h].source += data[at + task.source(unseen.texts[b], row)] / (T - task.first) / B;
      if (row > 0) sums[h].before += data[at + row - 1] / (T - 1) / B;
      if (row < T - 1) sums[h].next += data[at + row + 1] / (T - 1) / B;
      sums[h].itself += data[at + row] / T / B;
    }
    return sums;
  }

  /** The attention of each head on the text on the screen (one T × T matrix each), and the model's output for it. */
  look() {
    const ids = this.shown.slice(0, -1), T = ids.length, { weights } = this.model.forward(new Tape(), ids, 1);
    const maps = weights.map(({ data }) => Array.from({ length: data.length / T ** 2 }, (_, h) => data.slice(h * T * T, (h + 1) * T * T)));
    return { tokens: this.shown, written: this.write([this.shown])[0], maps };
  }
}
