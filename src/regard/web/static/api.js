// The server's API. offline.js and page/page_source.js have the same methods without a server.
const HEAD = (head) => (head < 0 ? "mean" : String(head));

export class Failure extends Error {}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("offline");
  }
  if (answer.ok) return answer;
  let sentence = `${answer.status} ${answer.statusText}`;
  try { sentence = (await answer.json()).error ?? sentence; } catch { /* not JSON: keep the status */ }
  throw new Failure(sentence);
}

const json = async (path, options) => (await ask(path, options)).json();
const post = (body) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const query = (values) => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== undefined && v !== null));

async function floats(path) {
  const answer = await ask(path);
  const shape = (answer.headers.get("X-Shape") ?? "").split(",").map(Number);
  return { shape, values: new Float32Array(await answer.arrayBuffer()) };
}

export class Server {
  offline = false;

  constructor(base = "") { this.base = `${base}/api`; }

  /** The URL of a chapter of the course. */
  chapter(n, language, theme) { return `${this.base.replace(/\/api$/, "")}/learn/${language}/${n}?theme=${theme}`; }

  models() { return json(`${this.base}/models`); }
  look(request) { return json(`${this.base}/looks`, post(request)); }
  /** The same look with sub-words joined or special tokens hidden. */
  async read(look, reading) { return { ...(await json(this.at({ ...look, reading }, "", {}))), reading }; }
  at(look, what, values) {
    const path = [this.base, "looks", encodeURIComponent(look.id), what].filter(Boolean).join("/");
    return `${path}?${query({ ...values, ...look.reading })}`;
  }

  labels(look, kind, axis, start, stop) { return json(this.at(look, "labels", { kind, axis, start, stop })); }
  tile(look, kind, layer, head, r0, r1, c0, c1) {
    return floats(this.at(look, "tile", { kind, layer, head: HEAD(head), r0, r1, c0, c1 }));
  }
  pooled(look, kind, layer, head, h, w, reduce = "mean") {
    return floats(this.at(look, "pooled", { kind, layer, head: HEAD(head), h, w, reduce }));
  }
  thumbnails(look, kind, layer, size) { return floats(this.at(look, "thumbnails", { kind, layer, size })); }
  top(look, kind, layer, head, row, k) {
    return json(this.at(look, "top", { kind, layer, head: HEAD(head), row, k }));
  }
  walk(look, kind, layer, head, row, col) {
    return json(this.at(look, "walk", { kind, layer, head: HEAD(head), row, col }));
  }
  why(look, kind, layer, head, row, col) { return json(this.at(look, "why", { kind, layer, head: HEAD(head), row, col })); }
  story(look, kind, layer, head, row) { return json(this.at(look, "story", { kind, layer, head: HEAD(head), row })); }
  contributions(look, options) { return json(this.at(look, "contributions", options)); }
  /** How much each activation of a look restores in another one's run; `signal` aborts. */
  patching(look, other, options, signal) { return json(this.at(look, "patching", { other: other.id, ...options }), { signal }); }
  patched(look, other, options) { return json(this.at(look, "patched", { other: other.id, ...options })); }
  patterns(look, kind) { return json(this.at(look, "patterns", { kind })); }
  experts(look, kind, layer) { return json(this.at(look, "experts", { kind, layer })); }
  history(look, kind) { return json(this.at(look, "history", { kind })); }
  next(look, options) { return json(this.at(look, "next", options)); }
  /** The distance of the predictions from those of another look at the same text, at each position. */
  changes(look, other) { return json(this.at(look, "changes", { other: other.id })); }
  fit(look) { return json(this.at(look, "fit", {})); }
  heads(look) { return json(this.at(look, "heads", {})); }
  logitLens(look, position) { return json(this.at(look, "logit-lens", { position })); }
  beams(look) { return json(this.at(look, "beams", {})); }
  imageUrl(look) { return look.image; }

  /** The look as a single file that opens in the same state. */
  async html(look, { kind, layer, head }, state) {
    const text = await (await ask(this.at(look, "html", { kind, layer, head: HEAD(head) }))).text();
    const opening = JSON.stringify(state).replaceAll("<", "\\u003c");
    return text.replace(/(id="opening">)[^<]*/, (_, start) => start + opening);
  }

  /** Generate: `onLine` receives each token as it arrives; resolves to the look at the whole text. */
  async stream(request, onLine) {
    const answer = await ask(`${this.base}/stream`, post(request));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", last = null;
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines.filter((text) => text.trim())) {
        const event = JSON.parse(line);
        if (event.error) throw new Failure(event.error);
        if (event.look !== undefined) last = event;
        else onLine(event);
      }
      if (done) return last;
    }
  }
}
