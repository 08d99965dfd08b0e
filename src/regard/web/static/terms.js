// Technical terms: their definitions, and the chapters of the course that explain them.
import { el } from "./dom.js";

const CHAPTER = {
  token: 1, embedding: 1, position: 3, query: 2, score: 2, root: 2, mask: 3, softmax: 2, value: 2, head: 4, residual: 6, norm: 6, ff: 6, layer: 6, logit: 7,
  attention: 2, cross: 6, beam: 7, sampling: 7, teacher: 6,
};
const VIEW_TERMS = { // the story lists its own terms, stage by stage
  image: ["cross", "head"], align: ["cross", "head"], sentence: ["attention", "head"], heatmap: ["attention", "softmax", "mask", "head"], grid: ["head", "layer"],
  walk: ["query", "score", "root", "mask", "softmax", "value"], next: ["logit", "sampling"], contributions: ["residual", "logit"], why: ["score", "query"],
  patching: ["residual", "ff"], patterns: ["attention", "head"], history: ["head", "layer"], beams: ["beam", "logit"], variant: ["mask", "root", "head", "teacher"],
};

/** A term marked ⓘ that opens to its definition, with a link to the chapter if the page has the course. */
export function explained(app, term) {
  const { t, source } = app, { lang, dataset } = document.documentElement, n = CHAPTER[term];
  const address = source.chapter?.(n, lang, dataset.theme);
  const chapter = t("term.chapter", { n });
  return el("details", { "data-term": term }, el("summary", {}, `ⓘ ${t(`term.${term}`)}`),
    el("p", {}, `${t(`term.${term}.about`)} `, address ? el("a", { href: address, target: "_blank", rel: "noopener" }, `${chapter} →`) : `(${chapter})`));
}

/** The terms of a view. */
export const viewTerms = (app, view) => (VIEW_TERMS[view] ?? []).map((term) => explained(app, term));
