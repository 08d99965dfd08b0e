// Which attention, which layer, which head; and the few settings a view asks for.
import { check, el, segmented, slider, stepper } from "./dom.js";

const around = (n, size, low = 0) => ((n - low + size - low) % (size - low)) + low;

/** Kind, layer and head as the look has them: a link may ask for more than this model's, a view for `only` one kind. */
export function placed(look, now, only) {
  const kinds = Object.keys(look.kinds), asked = only ?? now.kind;
  const kind = kinds.includes(asked) ? asked : kinds.includes("cross") ? "cross" : kinds[0];
  const { layers, heads } = look.kinds[kind];
  return { kind, layer: Math.min(Math.max(0, now.layer), layers - 1), head: Math.min(Math.max(-1, now.head), heads - 1) };
}

export function stepped(app, what, by) {
  const where = app.where(), { layers, heads } = app.look.kinds[where.kind];
  app.state.set(what === "layer" ? { layer: around(where.layer + by, layers) } : { head: around(where.head + by, heads, -1) });
}

export function controls(app, wants) {
  const { look, state, t } = app, { kind, layer, head } = app.where(), kinds = Object.keys(look.kinds), parts = [];
  const asks = (what) => wants.includes(what);
  if (app.source.only) { // one head alone came with the page
    const name = `${t(`kind.${kind}`)} · ${t("layer")} ${layer} · ${t("head")} ${head < 0 ? t("head.mean") : head}`;
    parts.push(el("span", { class: "quiet" }, name));
    wants = wants.filter((want) => !["kind", "layer", "head"].includes(want));
  }
  if (asks("kind") && kinds.length > 1) {
    parts.push(segmented(t("kind"), kinds.map((k) => [k, t(`kind.${k}`)]), kind,
      (k) => state.set({ kind: k, row: -1, col: -1, zoom: "", from: 0 })));
  }
  if (asks("layer")) {
    const shownLayer = `${layer} / ${look.kinds[kind].layers - 1}`;
    parts.push(stepper(t("layer"), shownLayer, () => stepped(app, "layer", -1), () => stepped(app, "layer", 1)));
  }
  if (asks("head")) {
    const shownHead = head < 0 ? t("head.mean") : `${head} / ${look.kinds[kind].heads - 1}`;
    parts.push(stepper(t("head"), shownHead, () => stepped(app, "head", -1), () => stepped(app, "head", 1)));
  }
  if (asks("threshold")) {
    parts.push(slider(t("threshold"), { min: 0, max: 1, step: 0.01 }, state.now.threshold, (v) => v.toFixed(2),
      (threshold) => state.set({ threshold })));
  }
  if (asks("top")) {
    parts.push(slider(t("top"), { min: 1, max: 12, step: 1 }, state.now.top, String, (top) => state.set({ top })));
  }
  if (asks("log")) parts.push(check(t("log"), state.now.log, (log) => state.set({ log })));
  if (asks("find")) {
    const find = el("input", { class: "find", type: "search", placeholder: `${t("find")}  /`, "aria-label": t("find"),
      oninput: () => state.set({ find: find.value }) });
    find.value = state.now.find;
    parts.push(find);
  }
  return parts;
}
