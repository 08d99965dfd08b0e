// Everything a link needs to bring the same picture back stands in the address, after the #.
// Layers, heads and tokens count from 0 there, as in Python; on the page from 1.
export const DEFAULTS = {
  model: "", text: "", target: "", view: "", kind: "", layer: -1, head: -1, // the last layer, the mean of its heads
  row: -1, col: -1, threshold: 0.05, top: 3, log: false, words: false, specials: true, from: 0, zoom: "", find: "", pattern: "",
  beam: 1, discarded: true, temperature: 1, topk: 0, topp: 1, position: -1,
  causal: true, scale: 1, off: "", lang: "", theme: "",
};

export function parse(hash, start = DEFAULTS) {
  const out = { ...start };
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(key in DEFAULTS)) continue;
    const kind = typeof DEFAULTS[key];
    if (kind === "number") { if (text !== "" && Number.isFinite(Number(text))) out[key] = Number(text); }
    else out[key] = kind === "boolean" ? text === "1" : text;
  }
  return out;
}

export function written(state) {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (value !== DEFAULTS[key]) out.set(key, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
  }
  return out.toString();
}

/** The state and those who want to know when it changes. */
export class State {
  constructor(initial = {}) {
    this.now = parse(location.hash, { ...DEFAULTS, ...initial });
    this.listeners = new Set();
    this.mine = location.hash;
    addEventListener("hashchange", () => {
      if (location.hash !== this.mine) this.set(parse(location.hash), true);
    });
  }

  /** `outside`: somebody followed a link, rather than used the page. */
  set(patch, outside = false) {
    const changed = Object.keys(patch).filter((key) => patch[key] !== this.now[key]);
    if (!changed.length) return;
    this.now = { ...this.now, ...patch };
    this.mine = `#${written(this.now)}`;
    try { history.replaceState(null, "", this.mine); } catch { /* too many a second: the next one carries it all */ }
    for (const listen of [...this.listeners]) listen(new Set(changed), outside);
  }

  on(listen) {
    this.listeners.add(listen);
    return () => this.listeners.delete(listen);
  }
}

/** Reader's own choices outlive the page where the browser allows it. */
export const kept = {
  get(key) { try { return localStorage.getItem(`regard.${key}`); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(`regard.${key}`, value); } catch { /* a page from a file may not */ } },
};
