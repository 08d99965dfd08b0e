// The state of the page, kept in the URL's hash, so that a link restores it.
// The hash counts layers, heads and tokens from 0, as Python does; the page shows them from 1.
import { LANGUAGES } from "./i18n.js";

export const DEFAULTS = {
  model: "", text: "", target: "", view: "", kind: "", layer: -1, head: -1, // the last layer, the mean of its heads
  row: -1, col: -1, threshold: 0.05, top: 3, log: false, words: false, specials: true, from: 0, zoom: "", find: "", pattern: "",
  beam: 1, discarded: true, temperature: 1, topk: 0, topp: 1, position: -1, token: -1, corrupted: "", over: "residual", patch: "",
  causal: true, scale: 1, off: "", lang: "", theme: "",
};

/** What was chosen in one input and means nothing in another. */
export const NEW_INPUT = { row: -1, col: -1, zoom: "", from: 0, position: -1, token: -1, corrupted: "", patch: "" };

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

/** The current state and its listeners. */
export class State {
  constructor(initial = {}) {
    this.now = parse(location.hash, { ...DEFAULTS, ...initial });
    this.listeners = new Set();
    this.mine = location.hash;
    addEventListener("hashchange", () => {
      if (location.hash !== this.mine) this.set(parse(location.hash), true);
    });
  }

  /** `outside`: the change comes from a link, not from the page's controls. */
  set(patch, outside = false) {
    const changed = Object.keys(patch).filter((key) => patch[key] !== this.now[key]);
    if (!changed.length) return;
    this.now = { ...this.now, ...patch };
    this.mine = `#${written(this.now)}`;
    try { history.replaceState(null, "", this.mine); } catch { /* too many per second: the next one includes this change */ }
    for (const listen of [...this.listeners]) listen(new Set(changed), outside);
  }

  on(listen) {
    this.listeners.add(listen);
    return () => this.listeners.delete(listen);
  }
}

/** Preferences that persist if the browser allows it. */
export const kept = {
  get(key) { try { return localStorage.getItem(`regard.${key}`); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(`regard.${key}`, value); } catch { /* not allowed for a page from a file */ } },
};

/** Set the language and theme: those of the link, else the saved ones, else the browser's. Returns the language. */
export function dressPage({ lang, theme }) {
  const language = [lang, kept.get("lang"), navigator.language?.slice(0, 2)].find((one) => LANGUAGES.includes(one)) ?? "en";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.lang = language;
  document.documentElement.dataset.theme = theme || kept.get("theme") || (dark ? "dark" : "light");
  return language;
}
