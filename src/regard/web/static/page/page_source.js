// The methods of Server in api.js over a model that runs in the page; `model` is a PageModel.
import { Failure } from "../api.js";
import { beamTree } from "./beam_tree.js";
import { PageLook } from "./look.js";
import { entropy, largest } from "./attention_map.js";
import { headPatterns } from "./patterns.js";
import { predictingRow, storyNumbers, weightArithmetic } from "./story_numbers.js";

const KEEP = 24; // looks kept; the least recently used is dropped first

async function openModel(onProgress) {
  const { PageModel } = await import("./model.js"), model = await PageModel.open(new URL(".", location.href), onProgress);
  await model.files.keepForOffline();
  return model;
}

export class PageSource {
  offline = false;
  inPage = true;
  /** Views that need more than forward passes, with the key of the text that explains it. */
  unavailable = { contributions: "page.contributions", why: "page.why", patching: "page.patching", history: "page.history" };

  /** `open(onProgress)` loads the model; by default the one beside the page. */
  constructor(open = openModel) { Object.assign(this, { open, model: null, looks: new Map(), count: 0 }); }

  async models(onProgress) {
    this.model ??= await this.open(onProgress);
    return [this.model.page.model];
  }

  async look(request) { return (await this.trace(request)).document(); }

  async trace(request, onToken) {
    const { model: _, watch: __, ...rest } = request, look = new PageLook(`page-${++this.count}`, this.model.page, await this.model.trace(rest, onToken), rest.variant ?? null);
    this.looks.set(look.id, look);
    if (this.looks.size > KEEP) this.looks.delete(this.looks.keys().next().value);
    return look;
  }

  of({ id }) {
    const look = this.looks.get(id);
    if (!look) throw new Failure(`look '${id}' does not exist or was dropped: open it again`);
    this.looks.delete(id); // move to the end: most recently used
    this.looks.set(id, look);
    return look;
  }

  view(look, kind) { return this.of(look).view(kind, look.reading); }

  async read(look, reading) { return { ...this.of(look).document(reading), reading }; }
  async labels(look, kind, axis, start, stop) { return this.view(look, kind)[axis].slice(start, stop).map(({ text, special, box }) => ({ text, special, ...(box ? { box } : {}) })); }
  async tile(look, kind, layer, head, r0, r1, c0, c1) { return this.view(look, kind).tile(layer, head, r0, r1, c0, c1); }
  async pooled(look, kind, layer, head, h, w, reduce = "mean") { return this.view(look, kind).pooled(layer, head, h, w, reduce); }
  async thumbnails(look, kind, layer, size) {
    const view = this.view(look, kind), { heads } = this.of(look).maps[kind][layer], each = Array.from({ length: heads }, (_, head) => view.pooled(layer, head, size, size, "mean"));
    const values = new Float32Array(heads * each[0].values.length);
    each.forEach((one, head) => values.set(one.values, head * one.values.length));
    return { shape: [heads, ...each[0].shape], values };
  }
  async top(look, kind, layer, head, row, k) { return this.view(look, kind).top(layer, head, row, k); }
  async walk(look, kind, layer, head, row, col) { return weightArithmetic(this.of(look), kind, layer, head, row, col); }
  async story(look, kind, layer, head, row) {
    const own = this.of(look), position = predictingRow(own, kind, row);
    return storyNumbers(own, kind, layer, head, row, position, await this.layerLogits(own, position));
  }
  async patterns(look, kind) {
    const own = this.of(look), { rows, cols } = own.labels[kind];
    return headPatterns(kind, own.maps[kind], rows, cols, own.page.config.source === "image");
  }
  async next(look, options) { return this.of(look).next(options); }
  /** ½ Σ |p − q| at each position: the distance of the predictions from those of another look at the same text. */
  async changes(look, other) {
    const [a, b] = [this.of(look), this.of(other)];
    return Array.from({ length: a.positions }, (_, n) => { const q = b.chances(n); return a.chances(n).reduce((sum, p, i) => sum + Math.abs(p - q[i]) / 2, 0); });
  }
  async fit(look) { return this.of(look).fit(); }
  async beams(look) { const own = this.of(look); return beamTree(own.trace.generated, own.target); }
  imageUrl(look) { return look.image; }

  /** The logits after each layer, as if it were the last one. */
  async layerLogits(look, position) {
    const { rows, vocab, data } = await this.model.layer_logits(look.trace, position);
    return Array.from({ length: rows }, (_, n) => data.subarray(n * vocab, (n + 1) * vocab));
  }
  async logitLens(look, position) {
    const own = this.of(look), layers = await this.layerLogits(own, own.position(position));
    return layers.map((logits, n) => {
      const chances = own.share(logits);
      return { layer: n - 1, best: largest(chances, 5).map((token) => own.prediction(chances, token)), entropy: entropy(chances) };
    });
  }

  /** The prediction with each head switched off alone: one pass per head. */
  async heads(look) {
    const own = this.of(look), { trace, page, variant } = own, isClass = page.config.head === "classify", tokens = isClass ? null : own.written();
    const [name] = isClass ? Object.keys(own.classes()) : [], chance = (one) => (isClass ? one.classes()[name] : Math.exp(one.logChance(tokens)));
    const without = {}, changes = variant ?? { causal: true, scale: 1, off: [] };
    for (const [kind, maps] of Object.entries(own.maps)) {
      without[kind] = [];
      for (const [layer, map] of maps.entries()) {
        without[kind].push([]);
        for (let head = 0; head < map.heads; head++) {
          const again = await this.model.trace({ repeat: trace, variant: { ...changes, off: [...changes.off, [kind, layer, head]] } });
          without[kind][layer].push(chance(new PageLook(own.id, page, again, variant)));
        }
      }
    }
    return { before: chance(own), without };
  }

  /** Generate, then replay: `onLine` receives each token with its row of cross-attention; resolves to the look. */
  async stream(request, onLine) {
    const look = await this.trace(request), { watch } = request, map = watch && look.maps.cross[watch.layer];
    const { rows, cols } = look.labels.cross ?? look.labels.self;
    if (map) onLine({ source: cols.map(({ text, special }) => ({ text, special })) });
    const texts = look.target.spans(rows.map(({ id }) => id ?? -1));
    rows.forEach(({ text, special, id }, n) => {
      const span = texts.find(({ last }) => last === n + 1), said = span && !span.special ? span.text : "";
      onLine({ token: id, text: said, ...(map ? { label: { text, special }, weights: Array.from(map.weights(watch.head ?? -1, n)) } : {}) });
    });
    return { ...look.document(), look: look.id };
  }
}
