// The page: a head, what is looked at, the views, and the one that is open.
import { Failure } from "./api.js";
import { Composer, example } from "./composer.js";
import { controls, placed } from "./controls.js";
import { Data } from "./data.js";
import { after, el } from "./dom.js";
import { exported } from "./export.js";
import { LANGUAGES, speaker } from "./i18n.js";
import { help, listen } from "./keys.js";
import { Panel } from "./panel.js";
import { State, kept } from "./state.js";
import { tip } from "./tip.js";
import { VIEWS } from "./views/index.js";

const EYE = '<svg viewBox="0 0 32 32" aria-hidden="true"><path d="M3 16C8 7 24 7 29 16C24 25 8 25 3 16Z" fill="none" stroke="var(--accent)" stroke-width="2.4" stroke-linejoin="round"/><circle cx="16" cy="16" r="4.4" fill="var(--accent)"/></svg>';

export class App {
  constructor(root, source, initial = {}) {
    Object.assign(this, { root, source, look: null, data: null, view: null, models: [] });
    this.state = new State(initial);
    this.state.on((changed, outside) => this.changed(changed, outside));
    this.relabel = after(120, () => this.showControls());
    listen(this);
  }

  async start() {
    this.dress();
    this.build();
    await this.guarded(async () => {
      this.models = await this.source.models();
      if (!this.model()) this.state.now.model = this.models[0]?.id ?? "";
      this.showHead();
      if (!this.state.now.text) this.state.now.text = example(this.model());
      this.composer.update(this.model());
      if (this.source.offline || !this.composer.missing()) await this.run();
      else this.forget();
    });
  }

  model() { return this.models.find((model) => model.id === this.state.now.model); }

  language() {
    const asked = [this.state.now.lang, kept.get("lang"), navigator.language?.slice(0, 2)];
    return asked.find((one) => LANGUAGES.includes(one)) ?? "en";
  }

  /** Language and theme, before anything is drawn. */
  dress() {
    this.t = speaker(this.language());
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const theme = this.state.now.theme || kept.get("theme") || (dark.matches ? "dark" : "light");
    document.documentElement.lang = this.language();
    document.documentElement.dataset.theme = theme;
    document.title = `regard · ${this.t("title")}`;
  }

  build() {
    const { t, state } = this;
    this.parts = {
      head: el("header"), message: el("p", { class: "message", role: "alert" }), nav: el("nav", { role: "tablist" }),
      controls: el("div", { class: "controls" }), stage: el("section", { class: "stage" }), aside: el("aside", { "aria-live": "polite" }),
      footer: el("footer"),
    };
    this.parts.main = el("main", {}, this.parts.stage, this.parts.aside);
    const picture = this.composer?.picture ?? null; // outlives a change of language
    this.composer = new Composer({ t, state, picture, onLook: (values) => { state.set(values); this.guarded(() => this.run()); } });
    this.panel = new Panel(this.parts.aside, t, state);
    const { head, message, nav, main, footer } = this.parts;
    const writing = this.source.offline ? [this.said()] : [this.composer.node];
    this.root.replaceChildren(head, ...writing, message, nav, this.parts.controls, main, footer);
    this.showHead();
  }

  /** What was looked at, on a page that cannot look again. */
  said() {
    const { text, target } = this.source.content.look;
    return el("div", { class: "said" }, text ? el("bdi", { dir: "auto" }, text) : "", target ? el("bdi", { class: "quiet", dir: "auto" }, target) : "");
  }

  showHead() {
    const { t, state } = this, theme = document.documentElement.dataset.theme;
    const mark = el("h1", { class: "mark" });
    mark.innerHTML = `${EYE}regard`;
    const choice = el("select", { "aria-label": t("model"), onchange: () => this.change(choice.value) },
      this.models.map((m) => el("option", { value: m.id, selected: m.id === state.now.model }, m.name)));
    this.parts.head.replaceChildren(mark, this.models.length > 1 ? choice : el("span", { class: "quiet" }, this.models[0]?.name ?? ""), el("span", { class: "room" }),
      el("button", { class: "plain", type: "button", title: t("help"), "aria-label": t("help"), onclick: () => help(t) }, "?"),
      el("button", { class: "plain", type: "button", title: t("theme"), "aria-label": t("theme"), "data-do": "theme",
        onclick: () => { const to = theme === "dark" ? "light" : "dark"; kept.set("theme", to); state.set({ theme: to }); } }, theme === "dark" ? "☀︎" : "☾"),
      el("button", { class: "plain", type: "button", "data-do": "language",
        onclick: () => { const to = this.language() === "ko" ? "en" : "ko"; kept.set("lang", to); state.set({ lang: to }); } }, t("language")));
  }

  change(model) {
    this.look = null; // nothing is asked of the old one any more
    this.state.set({ model, kind: "", layer: 0, head: -1, row: -1, col: -1, target: "", zoom: "", off: "", from: 0 });
    if (!this.state.now.text) this.state.now.text = example(this.model());
    this.composer.update(this.model());
    this.forget();
    if (!this.composer.missing()) this.guarded(() => this.run());
  }

  /** Look at what is written. */
  async run(variant) {
    const missing = this.source.offline ? null : this.composer.missing();
    if (missing) throw new Failure(this.t(missing));
    this.composer.busy(this.t("looking"));
    this.parts.stage.classList.add("waiting");
    const look = await this.source.look(this.source.offline ? null : this.composer.request(variant));
    this.open(look);
  }

  open(look) {
    this.look = look;
    this.data = new Data(this.source, look);
    this.composer.wrote(look);
    this.show();
  }

  forget() {
    this.view?.close();
    this.view = this.look = null;
    for (const part of ["nav", "controls", "stage", "aside", "footer"]) this.parts[part].replaceChildren();
    const missing = this.composer.missing();
    if (missing) this.parts.stage.append(el("p", { class: "caption" }, this.t(missing)));
  }

  /** Views that have something to show of this look. */
  views() { return VIEWS.filter((view) => view.fits(this)); }

  /** One failure, one sentence; the page stays as it was. */
  async guarded(work) {
    this.parts.message.textContent = "";
    this.busy(1);
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Failure)) console.error(error);
      this.parts.message.textContent = error.message === "offline" ? this.t("error.offline") : error.message;
    } finally {
      this.composer.busy(null);
      this.parts.stage.classList.remove("waiting");
      this.busy(-1);
    }
  }

  busy(change) {
    this.works = (this.works ?? 0) + change;
    this.root.setAttribute("aria-busy", String(this.works > 0));
  }

  where() { return this.source.only ?? placed(this.look, this.state.now, this.opened?.kind); }

  show() {
    tip.hide();
    this.view?.close();
    this.parts.stage.replaceChildren();
    const views = this.views(), kind = views.find((view) => view.id === this.state.now.view) ?? views[0];
    this.opened = kind;
    this.parts.nav.replaceChildren(...views.map((view) => el("button", {
      type: "button", role: "tab", "aria-selected": String(view === kind), "data-view": view.id,
      onclick: () => this.state.set({ view: view.id }),
    }, this.t(`view.${view.id}`))));
    this.panelled = kind.panel && !this.source.overviewOnly;
    this.parts.main.classList.toggle("wide", !this.panelled);
    this.view = kind.open(this.parts.stage, this);
    this.showControls();
    this.showFooter();
    this.refresh(new Set(["view"]));
  }

  showControls() {
    if (!this.look || document.activeElement?.closest?.(".controls input")) return;
    const held = document.activeElement?.closest?.(".controls [aria-label]")?.getAttribute("aria-label");
    this.parts.controls.replaceChildren(...controls(this, this.opened.controls ?? []));
    if (held) this.parts.controls.querySelector(`[aria-label="${CSS.escape(held)}"]`)?.focus(); // the keyboard stays where it was
  }

  showFooter() {
    const { t, view } = this, name = `regard-${this.opened.id}`;
    const save = (kind) => el("button", { type: "button", class: "plain", "data-export": kind,
      onclick: () => this.guarded(() => exported(kind, name, this)) }, kind.toUpperCase());
    const link = el("button", { type: "button", class: "plain", onclick: async () => {
      await navigator.clipboard?.writeText(location.href);
      link.textContent = t("copied");
    } }, t("copy"));
    this.parts.footer.replaceChildren(el("span", {}, t("export")), ...(view.sheet ? [save("svg"), save("png")] : []),
      view.rows ? save("csv") : "", this.source.offline ? "" : save("html"), el("span", { class: "room" }), this.source.offline ? "" : link);
  }

  refresh(changed) {
    this.guarded(async () => {
      const work = [this.view.update(changed)];
      if (this.panelled) work.push(this.panel.update(this.data, this.where()));
      await Promise.all(work);
    });
  }

  changed(changed, outside) {
    const has = (...names) => names.some((name) => changed.has(name));
    if (outside && !this.source.offline && has("model", "text", "target", "beam")) {
      if (!this.model()) this.state.now.model = this.models[0]?.id ?? "";
      this.composer.update(this.model());
      this.guarded(() => this.run());
    }
    if (has("lang", "theme")) {
      this.dress();
      if (has("lang")) { this.build(); if (this.model()) this.composer.update(this.model()); if (this.look) this.composer.wrote(this.look); }
      this.showHead();
      if (this.look) this.show();
      return;
    }
    if (!this.look) return;
    if (has("view")) { this.show(); return; }
    if (has("kind", "layer", "head")) this.showControls();
    else this.relabel();
    this.refresh(changed);
  }
}
