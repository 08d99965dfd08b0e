// A model that runs in the page: ONNX graphs in onnxruntime-web and tokenizers in JavaScript, both exported with it.
import { Failure } from "../api.js";
import { PageFiles, readPage } from "./files.js";
import { decodeImage, pixelValues, shownImage } from "./pixels.js";
import { write } from "./writing.js";

const SWITCHES = ["gates", "score_factor", "see_all", "depths", "depth"];

/** Text to ids and back with a tokenizer.json; mirrors text/tokenizer.py. */
class PageTokenizer {
  constructor(library, content, about) {
    // regard's own tokenizers treat the typed name of a special token as text.
    const added = about.literal ? (content.added_tokens ?? []).filter((token) => !token.special) : content.added_tokens;
    this.tokenizer = new library.Tokenizer({ ...content, added_tokens: added }, {});
    this.special = new Set(about.special);
    this.empty = about.empty; // the ids of an empty text: the special tokens around any text
    this.unknown = about.unknown;
  }

  /** The words of a text that contain the unknown token. */
  unknownTexts(text) {
    if (this.unknown === null) return [];
    return [...new Set(text.split(/\s+/u))].filter((word) => word && this.split(word)[1].includes(this.unknown));
  }

  encode(text) {
    return Array.from(this.tokenizer.encode(text.replace(/\p{Surrogate}/gu, "\ufffd")).ids, Number);
  }

  /** The special tokens before a text, its own ids, and the special tokens after it. */
  split(text) {
    const ids = this.encode(text), { empty } = this, same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
    for (let first = empty.length; first >= 0; first--) {
      const last = empty.length - first, end = ids.length - last;
      if (end < first) continue;
      if (same(ids.slice(0, first), empty.slice(0, first)) && same(ids.slice(end), empty.slice(first))) {
        return [ids.slice(0, first), ids.slice(first, end), ids.slice(end)];
      }
    }
    return [[], ids, []];
  }

  decode(ids) {
    const own = ids.filter((id) => !this.special.has(id));
    return own.length ? this.tokenizer.decode(own, { skip_special_tokens: false, clean_up_tokenization_spaces: false }) : "";
  }
}

/** One ONNX graph. */
class PageGraph {
  constructor(ort, session) {
    Object.assign(this, { ort, session, inputs: new Set(session.inputNames), outputs: session.outputNames });
  }

  integers(values, dims) { return new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims); }
  floats(values, dims) { return new this.ort.Tensor("float32", Float32Array.from(values), dims); }
  booleans(values, dims) { return new this.ort.Tensor("bool", Uint8Array.from(values), dims); }

  run(feeds, wanted = this.outputs) {
    const own = Object.entries(feeds).filter(([name]) => this.inputs.has(name));
    return this.session.run(Object.fromEntries(own), wanted);
  }
}

const range = (n, start = 0) => Array.from({ length: n }, (_, i) => start + i);

/** Select rows of a tensor (B, …); rows may repeat. */
function selectRows(ort, tensor, rows) {
  const [n, ...rest] = tensor.dims, size = tensor.data.length / n;
  if (rows.length === n && rows.every((row, i) => row === i)) return tensor;
  const data = new tensor.data.constructor(rows.length * size);
  rows.forEach((row, i) => data.set(tensor.data.subarray(row * size, (row + 1) * size), i * size));
  return new ort.Tensor(tensor.type, data, [rows.length, ...rest]);
}

/** A decoder with its key-value cache. */
class CachedDecoder {
  constructor(model, prompt, encoded, switches) {
    Object.assign(this, { model, graph: model.graphs.decoder, prompt, switches });
    this.kept = Object.fromEntries(Object.entries(encoded).filter(([name]) => name === "keep" || name.startsWith("cross_")));
    this.wanted = ["logits", ...this.graph.outputs.filter((name) => name.startsWith("present_"))];
  }

  async prefill() {
    this.past = this.model.emptyPast(1);
    this.length = 0;
    return this.read([this.prompt]);
  }

  /** Continue these rows of the batch by one token each. */
  async step(rows, tokens) {
    for (const kept of [this.past, this.kept]) {
      for (const name of Object.keys(kept)) kept[name] = selectRows(this.graph.ort, kept[name], rows);
    }
    return this.read(tokens.map((token) => [token]));
  }

  async read(rows) {
    const { graph, past, length } = this, n = rows.length, width = rows[0].length;
    const out = await graph.run({
      ...this.kept, ...past, ...this.switches,
      tokens: graph.integers(rows.flat(), [n, width]),
      positions: graph.integers(rows.flatMap(() => range(width, length)), [n, width]),
      past_positions: graph.integers(rows.flatMap(() => range(length)), [n, length]),
      wanted: graph.integers([width - 1], [1]),
      ...this.model.depths([this.model.depth("decoder")]),
    }, this.wanted);
    this.length += width;
    this.past = Object.fromEntries(Object.entries(out).filter(([name]) => name.startsWith("present_"))
      .map(([name, tensor]) => [name.replace("present_", "past_"), tensor]));
    const { dims, data } = out.logits, vocab = dims.at(-1);
    return range(n).map((row) => data.subarray(row * vocab, (row + 1) * vocab));
  }
}

export class PageModel {
  /**
   * Load the model of a page. `base`: the URL of page.json's folder; `onProgress(share)` receives the downloaded share;
   * `modules`: the folder that scripts are imported from, if it differs.
   */
  static async open(base, onProgress, modules = base) {
    const page = await readPage(base), model = new PageModel();
    const files = new PageFiles(base, page.files, page.digest, onProgress);
    const [ort, library] = await Promise.all([
      import(new URL("runtime/ort.mjs", modules)), page.tokenizers.source ? import(new URL("runtime/tokenizers.mjs", modules)) : null,
    ]);
    Object.assign(model, { page, files, ort, config: page.config, graphs: {}, tokenizers: {} });
    ort.env.wasm.numThreads = 1; // more threads need headers that plain file hosts do not send
    ort.env.wasm.wasmBinary = await files.read("runtime/ort.wasm.gz");
    ort.env.logLevel = "error";
    for (const [side, about] of Object.entries(page.tokenizers)) {
      model.tokenizers[side] = new PageTokenizer(library, await files.json(about.file), about);
    }
    for (const [name, file] of Object.entries(page.graphs)) {
      const session = await ort.InferenceSession.create(await files.read(file), { executionProviders: ["wasm"] });
      model.graphs[name] = new PageGraph(ort, session);
    }
    onProgress(1);
    return model;
  }

  /** The entry of /api/models. */
  describe() { return this.page.model; }

  get isDecoder() { return this.config.architecture === "decoder"; }
  get isEncoder() { return this.config.architecture === "encoder"; }
  get source() { return this.tokenizers.source; }
  get target() { return this.tokenizers.target ?? this.tokenizers.source; }
  /** The ids that end a text, the model's eos first, and those that none contains. */
  get rules() {
    const { eos_id: eos, more_eos_ids: more, forbidden_ids: forbidden } = this.config;
    return { ends: [eos, ...more].filter((id) => id !== null), forbidden };
  }
  get targetLimit() { return this.config.max_target_len ?? this.config.max_len; }

  // ---- inputs

  /** The ids of a text: a prompt without, a source with the special tokens after it. */
  readText(text) {
    if (!text) throw new Failure("text is empty: there is nothing to look at");
    const [first, own, last] = this.source.split(text), name = this.isDecoder || this.isEncoder ? "text" : "source";
    if (!own.length) throw new Failure(`${name} 0 is empty: there is nothing to ${this.isDecoder ? "continue" : "read"}`);
    return this.checked(name, this.isDecoder ? [...first, ...own] : [...first, ...own, ...last], this.config.max_len);
  }

  /** The decoder's input: bos, then the target without eos. */
  readTarget(text) {
    const { bos_id: bos, eos_id: eos } = this.config;
    let ids = this.target.encode(text);
    if (ids.at(-1) === eos) ids = ids.slice(0, -1);
    return this.checked("target", bos === null || ids[0] === bos ? ids : [bos, ...ids], this.targetLimit);
  }

  checked(name, ids, most) {
    if (!ids.length) throw new Failure(`${name} is empty: there is nothing to look at`);
    const number = (n) => n.toLocaleString("en-US");
    if (ids.length > most) throw new Failure(`${name} has ${number(ids.length)} tokens, but this model reads at most max_len=${number(most)}`);
    return ids;
  }

  // ---- graphs

  depth(stack) { return this.page.attention[stack === "decoder" ? "self" : "encoder"].length; }
  depths(values) { const graph = this.graphs.decoder; return { depths: graph.integers(values, [values.length]) }; }

  /** The graph inputs for interventions; the defaults leave the model as trained. */
  switches(graphName, { off = [], scale = 1, causal = true } = {}) {
    const graph = this.graphs[graphName], isDecoder = graphName === "decoder";
    const kinds = Object.entries(this.page.attention).filter(([kind]) => (kind !== "encoder") === isDecoder);
    const places = kinds.flatMap(([kind, layers]) => layers.map((_, layer) => `${kind} ${layer}`));
    const heads = Math.max(...kinds.flatMap(([, layers]) => layers.map((layer) => layer.heads)));
    const gates = new Float32Array(places.length * heads).fill(1);
    for (const [kind, layer, head] of off) {
      const at = places.indexOf(`${kind} ${layer}`);
      if (at >= 0 && head < heads) gates[at * heads + head] = 0;
    }
    const all = {
      gates: graph.floats(gates, [places.length, heads]), score_factor: graph.floats([scale], [1]),
      see_all: graph.booleans([causal ? 0 : 1], [1]), depth: graph.integers([isDecoder ? 0 : this.depth("encoder")], [1]),
    };
    return Object.fromEntries(Object.entries(all).filter(([name]) => SWITCHES.includes(name) && graph.inputs.has(name)));
  }

  emptyPast(batch) {
    const graph = this.graphs.decoder;
    return Object.fromEntries(this.page.attention.self.flatMap(({ kv_heads: heads, d_head: width }, layer) =>
      ["k", "v"].map((part) => [`past_${part}_${layer}`, graph.floats([], [batch, heads, 0, width])])));
  }

  /** The inputs of an encoder graph for one source. */
  sourceFeeds(graph, read) {
    if (read.pixels) return { source: graph.floats(read.pixels.data, read.pixels.dims) };
    const dims = [1, read.ids.length];
    return {
      source: graph.integers(read.ids, dims), keep: graph.booleans(read.ids.map(() => 1), dims),
      segments: graph.integers(read.ids.map(() => 0), dims),
    };
  }

  /** One pass of the decoder over all tokens: the logits of positions `wanted` after `depths` layers, and all other outputs. */
  async decode(ids, encoded, switches, wanted, depths, names) {
    const graph = this.graphs.decoder, out = await graph.run({
      ...encoded, ...switches, ...this.emptyPast(1), ...this.depths(depths),
      tokens: graph.integers(ids, [1, ids.length]), positions: graph.integers(range(ids.length), [1, ids.length]),
      past_positions: graph.integers([], [1, 0]), wanted: graph.integers(wanted, [wanted.length]),
    }, names);
    return out;
  }

  // ---- traces

  /**
   * Read a text or an image; generate, or take the given target; then run one pass over everything.
   * generate: {beam, max_new_tokens, temperature, top_k, top_p, seed}; variant: {causal, scale, off: [[kind, layer, head]]};
   * repeat: a trace whose inputs are run again under another variant, without generating
   */
  async trace({ text = "", target = null, image = null, generate = null, variant = null, repeat = null }, onToken = () => {}) {
    const changes = variant ?? {};
    if (repeat) return this.repeat(repeat, changes);
    const read = await this.readSource(text, image);
    const common = {
      source: read.ids ? { ids: read.ids } : null, text: read.ids ? text : null, image: read.shown, read, variant: changes,
      unknown: read.ids ? this.source.unknownTexts(text) : [],
    };
    if (this.isEncoder) return this.traceEncoder(common, read, changes);
    if (this.isDecoder) return this.traceDecoder(common, read, generate, changes, onToken);
    return this.traceBoth(common, read, target, generate, changes, onToken);
  }

  async repeat(trace, changes) {
    const common = { ...trace, variant: changes };
    if (this.isEncoder) return this.traceEncoder(common, trace.read, changes);
    if (this.isDecoder) return this.traceDecoder(common, { ids: trace.source.ids }, null, changes);
    return this.traceBoth(common, trace.read, trace.target, null, changes);
  }

  async readSource(text, image) {
    if (this.config.source !== "image") return { ids: this.readText(text), shown: null };
    if (!image) throw new Failure(`model '${this.page.model.id}' reads an image: send one as base64 in the field image`);
    const rgb = await decodeImage(image);
    return { pixels: pixelValues(rgb, this.page.image), shown: await shownImage(rgb, this.page.image) };
  }

  async traceEncoder(common, read, changes) {
    const graph = this.graphs.model, feeds = { ...this.sourceFeeds(graph, read), ...this.switches("model", changes) };
    const out = await graph.run(feeds);
    return { ...common, target: null, target_text: null, generated: null, feeds, ...parted(out) };
  }

  async traceDecoder(common, read, generate, changes, onToken) {
    const switches = this.switches("decoder", changes);
    let { ids } = read, generated = null;
    if (generate) {
      if (ids.length >= this.config.max_len) {
        throw new Failure(`prompt 0 has ${ids.length} tokens, and max_len=${this.config.max_len} leaves no room; truncate=True keeps its end`);
      }
      const limit = Math.min(generate.max_new_tokens ?? 128, this.config.max_len - ids.length);
      generated = await write(new CachedDecoder(this, ids, {}, switches), generate, limit, this.rules, onToken);
      ids = [...ids, ...generated.tokens];
    }
    const rows = range(ids.length), out = await this.decode(ids, {}, switches, rows, rows.map(() => this.depth("decoder")));
    const text = generated ? this.source.decode(ids) : common.text;
    return { ...common, text, source: { ids }, target: null, target_text: null, generated, encoded: {}, ...parted(out) };
  }

  async traceBoth(common, read, target, generate, changes, onToken) {
    const graph = this.graphs.encoder, feeds = this.sourceFeeds(graph, read), { bos_id: bos } = this.config;
    const encoderOut = await graph.run({ ...feeds, ...this.switches("encoder", changes) });
    const encoded = Object.fromEntries(Object.entries(encoderOut).filter(([name]) => name.startsWith("cross_")));
    if (feeds.keep) encoded.keep = feeds.keep;
    const switches = this.switches("decoder", changes);
    let generated = null, ids, hasEnd = true;
    if (target?.ids) {
      [ids, hasEnd] = [target.ids, target.has_end];
    } else if (target === null) {
      const longest = Math.max(1, Math.min(read.ids ? 2 * read.ids.length + 20 : Infinity, this.targetLimit - 1));
      const limit = Math.min(generate?.max_new_tokens ?? longest, this.targetLimit - 1);
      const prompt = bos === null ? [] : [bos];
      generated = await write(new CachedDecoder(this, prompt, encoded, switches), generate ?? {}, limit, this.rules, onToken);
      [ids, hasEnd] = [[...prompt, ...generated.tokens], generated.has_end];
    } else {
      ids = this.readTarget(target);
    }
    const rows = range(ids.length), out = await this.decode(ids, encoded, switches, rows, rows.map(() => this.depth("decoder")));
    const { activations, logits } = parted(out);
    return {
      ...common, target: { ids, has_end: hasEnd }, target_text: typeof target === "string" ? target : this.target.decode(ids), generated, encoded, logits,
      activations: { ...parted(encoderOut).activations, ...activations },
    };
  }

  /** The logits at one position after 0, 1, … all layers, under the trace's variant: {rows, vocab, data}. */
  async layer_logits(trace, position) {
    if (!this.isEncoder) {
      const { ids } = trace.target ?? trace.source, n = this.depth("decoder") + 1;
      const at = position < 0 ? ids.length + position : position;
      const out = await this.decode(ids, trace.encoded, this.switches("decoder", trace.variant), range(n).map(() => at), range(n), ["logits"]);
      return parted(out).logits;
    }
    const graph = this.graphs.model, rows = [];
    for (let depth = 0; depth <= this.depth("encoder"); depth++) {
      const out = await graph.run({ ...trace.feeds, depth: graph.integers([depth], [1]) }, ["logits"]);
      const { vocab, rows: n, data } = parted(out).logits, at = n === 1 ? 0 : position < 0 ? n + position : position;
      rows.push(data.subarray(at * vocab, (at + 1) * vocab));
    }
    const vocab = rows[0].length, data = new Float32Array(rows.length * vocab);
    rows.forEach((row, i) => data.set(row, i * vocab));
    return { rows: rows.length, vocab, data };
  }
}

/** The outputs of a pass: logits {rows, vocab, data} and activations by name, without caches. */
function parted(out) {
  const activations = {};
  let logits = null;
  for (const [name, { dims, data }] of Object.entries(out)) {
    if (name === "logits" || name === "states") {
      const vocab = dims.at(-1);
      logits = { rows: data.length / vocab, vocab, data };
    } else if (!/^(present|past|cross_[kv])_/.test(name)) activations[name] = { dims, data };
  }
  return { logits, activations };
}
