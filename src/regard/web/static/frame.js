// The parts of the page around the views: header, classes, warnings and footer.
import { el, percent } from "./dom.js";
import { exported } from "./export.js";
import { help } from "./keys.js";
import { kept } from "./state.js";

const EYE = '<svg viewBox="0 0 32 32" aria-hidden="true"><path d="M3 16C8 7 24 7 29 16C24 25 8 25 3 16Z" fill="none" stroke="var(--accent)" stroke-width="2.4" stroke-linejoin="round"/><circle cx="16" cy="16" r="4.4" fill="var(--accent)"/></svg>';

const button = (text, props) => el("button", { class: "plain", type: "button", ...props }, text);

/** The logo with the library's name. */
export function wordMark() {
  const mark = el("h1", { class: "mark", lang: "en" }); // the same typeface in all languages
  mark.innerHTML = `${EYE}regard`;
  return mark;
}

/** The theme and language buttons; they call choose("theme" | "lang", value). */
export function themeAndLanguage(t, language, choose) {
  const dark = document.documentElement.dataset.theme === "dark";
  return [button(dark ? "☀︎" : "☾", { title: t("theme"), "aria-label": t("theme"), "data-do": "theme", onclick: () => choose("theme", dark ? "light" : "dark") }),
    button(t("language"), { "data-do": "language", onclick: () => choose("lang", language === "ko" ? "en" : "ko") })];
}

/** The header: logo, model, help, theme and language. */
export function head(app) {
  const { models, state, t } = app;
  const choice = el("select", { "aria-label": t("model"), onchange: () => app.change(choice.value) },
    models.map((m) => el("option", { value: m.id, selected: m.id === state.now.model }, m.name)));
  const choose = (what, to) => { kept.set(what, to); state.set({ [what]: to }); };
  const learn = app.source.offline || app.source.inPage ? "" : el("a", { class: "plain", href: "static/watch/index.html", "data-do": "watch" }, t("watch"));
  return [wordMark(), models.length > 1 ? choice : el("span", { class: "quiet" }, models[0]?.name ?? ""), el("span", { class: "room" }), learn,
    button("?", { title: t("help"), "aria-label": t("help"), onclick: () => help(t) }), ...themeAndLanguage(t, document.documentElement.lang, choose)];
}

/** The input of the look, on a page that has no model. */
export function said({ source }) {
  const { text, target } = source.content.look;
  return el("div", { class: "said" }, text ? el("bdi", { dir: "auto" }, text) : "", target ? el("bdi", { class: "quiet", dir: "auto" }, target) : "");
}

const CLASSES = 5; // the rest is summed up

/** A classifier's classes, likeliest first; null for other models. */
export function classes(look, t) {
  if (!look.classes) return null;
  const all = Object.entries(look.classes), best = all.slice(0, all.length > CLASSES + 1 ? CLASSES : all.length);
  const rest = all.slice(best.length).reduce((sum, [, share]) => sum + share, 0);
  if (all.length > best.length) best.push([t("classes.rest", { n: all.length - best.length }), rest]);
  return el("ol", { class: "classes", "aria-label": t("classes") }, best.map(([name, share]) => el("li", {},
    el("bdi", {}, name), el("span", { class: "num" }, percent(share)), el("i", {}, el("b", { style: `width:${100 * share}%` })))));
}

/** A warning about words and tags that the model has not learned; null if there are none. */
export function outside(look, missesTag, t) {
  const words = look.unfamiliar ?? [];
  if (!missesTag && !words.length) return null;
  const reasons = [missesTag && t("outside.tag"), words.length && t("outside.words", { words: [...new Set(words)].join(", ") })];
  return el("p", { class: "outside", role: "note" }, el("strong", {}, t("outside")), " ", reasons.filter(Boolean).join(" "));
}

/** The footer: buttons to save what is shown and to copy a link to it. */
export function footer(app) {
  const { opened, source, t, view } = app;
  const save = (kind) => button(kind.toUpperCase(), { "data-export": kind, onclick: () => app.guarded(() => exported(kind, `regard-${opened.id}`, app)) });
  const link = button(t("copy"), { onclick: () => app.guarded(async () => {
    await navigator.clipboard.writeText(location.href);
    link.textContent = t("copied");
  }) });
  const kinds = [...(view.sheet ? ["svg", "png"] : []), ...(view.rows ? ["csv"] : []), ...(source.html ? ["html"] : [])];
  return [el("span", {}, t("export")), ...kinds.map(save), el("span", { class: "room" }), source.offline || !navigator.clipboard ? "" : link]; // a page over http from another machine has no clipboard
}
