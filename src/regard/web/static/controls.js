// The controls above a view: kind, layer and head, and the view's own settings.
import { check, el, segmented, slider, stepper } from "./dom.js";

const around = (n, size, low = 0) => ((n - low + size - low) % (size - low)) + low;
const kindName = (t, kind) => kind.startsWith("stage") ? t("kind.stage", { n: Number(kind.slice(5)) + 1 }) : t(`kind.${kind}`);
const START = { row: -1, col: -1, zoom: "", from: 0 }; // a new matrix starts unpinned and unzoomed

/** Kind, layer and head, clamped to what the look has; `only`: the one kind that a view shows. */
export function placed(look, now, only) {
  const kinds = Object.keys(look.kinds), asked = only ?? now.kind;
  const kind = kinds.includes(asked) ? asked : kinds.includes("cross") ? "cross" : kinds[0];
  const { layers, heads } = look.kinds[kind];
  return { kind, layer: now.layer < 0 ? layers - 1 : Math.min(now.layer, layers - 1), head: Math.min(Math.max(-1, now.head), heads - 1) };
}

export function stepped(app, what, by) {
  const where = app.where(), { layers, heads } = app.look.kinds[where.kind];
  app.state.set(what === "layer" ? { layer: around(where.layer + by, layers) } : { head: around(where.head + by, heads, -1) });
}

const PARTS = {
  kind({ look, state, t }, { kind }) {
    const kinds = Object.keys(look.kinds);
    return kinds.length > 1 && segmented(t("kind"), kinds.map((k) => [k, kindName(t, k)]), kind, (k) => state.set({ ...START, kind: k }));
  },
  layer(app, { kind, layer }) {
    const text = `${layer + 1} / ${app.look.kinds[kind].layers}`;
    return stepper(app.t("layer"), text, () => stepped(app, "layer", -1), () => stepped(app, "layer", 1));
  },
  head(app, { kind, head }) {
    const text = head < 0 ? app.t("head.mean") : `${head + 1} / ${app.look.kinds[kind].heads}`;
    return stepper(app.t("head"), text, () => stepped(app, "head", -1), () => stepped(app, "head", 1));
  },
  threshold({ state, t }) {
    return slider(t("threshold"), { min: 0, max: 1, step: 0.01 }, state.now.threshold, (v) => v.toFixed(2), (threshold) => state.set({ threshold }));
  },
  top: ({ state, t }) => slider(t("top"), { min: 1, max: 12, step: 1 }, state.now.top, String, (top) => state.set({ top })),
  log: ({ state, t }) => check(t("log"), state.now.log, (log) => state.set({ log })),
  words({ look, source, state, t }) {
    if (source.offline) return null; // a page from a file has a fixed choice
    const { words, specials } = state.now, hasText = Boolean(look.text || look.target);
    return [hasText && check(t("words"), words, (on) => state.set({ ...START, words: on }), "words"),
      check(t("specials"), specials, (on) => state.set({ ...START, specials: on }), "specials")];
  },
  discarded: ({ state, t }) => check(t("beams.discarded"), state.now.discarded, (discarded) => state.set({ discarded }), "discarded"),
  find({ state, t }) {
    const find = el("input", { class: "find", type: "search", placeholder: `${t("find")}  /`, "aria-label": t("find"),
      oninput: () => state.set({ find: find.value }) });
    find.value = state.now.find;
    return find;
  },
};
const WHERE = ["kind", "layer", "head"];

/** Two groups of controls: the selected attention, and the settings. */
export function controls(app, wants) {
  const { t } = app, where = app.where(), line = (name, parts) => parts.some(Boolean) && el("div", { class: name }, parts);
  const made = (names) => names.filter((name) => wants.includes(name)).flatMap((name) => PARTS[name](app, where));
  const place = app.source.only // the page contains a single head
    ? [el("span", { class: "quiet" }, `${kindName(t, where.kind)} · ${t("layer")} ${where.layer + 1} · ${t("head")} ${where.head < 0 ? t("head.mean") : where.head + 1}`)]
    : made(WHERE);
  return [line("where", place), line("how", made(Object.keys(PARTS).filter((name) => !WHERE.includes(name))))].filter(Boolean);
}
