// The page: a head, what is looked at, the views, and the one that is open.
import { Failure } from "./api.js";
import { Composer, example, tagOf } from "./composer.js";
import { controls, placed } from "./controls.js";
import { Data, Readings } from "./data.js";
import { after, el } from "./dom.js";
import { classes, footer, head, outside, said } from "./frame.js";
import { LANGUAGES, speaker } from "./i18n.js";
import { listen } from "./keys.js";
import { Panel } from "./panel.js";
import { State, kept } from "./state.js";
import { tip } from "./tip.js";
import { VIEWS } from "./views/index.js";

export class App {
  constructor(root, source, initial = {}) {
    Object.assign(this, { root, source, look: null, data: null, view: null, models: [], shows: 0 });
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
      head: el("header"), says: el("div", { class: "says" }), message: el("p", { class: "message", role: "alert" }), nav: el("nav", { role: "tablist" }),
      controls: el("div", { class: "controls" }), stage: el("section", { class: "stage" }), aside: el("aside", { "aria-live": "polite" }),
      footer: el("footer"),
    };
    this.parts.main = el("main", {}, this.parts.stage, this.parts.aside);
    const picture = this.composer?.picture ?? null; // outlives a change of language
    this.composer = new Composer({ t, state, picture, onLook: (values) => { state.set(values); this.guarded(() => this.run()); } });
    this.panel = new Panel(this.parts.aside, t, state);
    const { head, says, message, nav, main, footer } = this.parts;
    const writing = this.source.offline ? said(this) : this.composer.node;
    this.root.replaceChildren(head, writing, message, says, nav, this.parts.controls, main, footer);
    this.showHead();
  }

  showHead() { this.parts.head.replaceChildren(...head(this)); }

  change(model) {
    this.look = null; // nothing is asked of the old one any more
    const { text } = this.state.now, own = text !== example(this.model()); // an example was not the reader's own
    this.state.set({ model, text: own ? text : "", kind: "", layer: -1, head: -1, row: -1, col: -1, target: "", zoom: "", off: "", from: 0 });
    if (!this.state.now.text) this.state.now.text = example(this.model());
    this.composer.update(this.model());
    this.forget();
    if (!this.composer.missing()) this.guarded(() => this.run());
  }

  /** Look at what is written. */
  async run() {
    const missing = this.source.offline ? null : this.composer.missing();
    if (missing) throw new Failure(this.t(missing));
    if (this.look && this.view?.write && this.composer.streams()) { // a view that shows how it is written
      this.composer.busy(this.t("writing"));
      await this.view.write();
      return;
    }
    this.composer.busy(this.t("looking"));
    this.parts.stage.classList.add("waiting");
    const look = await this.source.look(this.source.offline ? null : this.composer.request());
    await this.open(look);
  }

  async open(look) {
    this.look = look;
    this.tokens = new Data(this.source, look);
    this.readings = new Readings(this.source, look);
    this.composer.wrote(look);
    this.hold(look);
    this.showSaid();
    await this.present();
  }

  /** Until the reader chooses a view or a token, the one is held where the model was least sure. */
  hold(look) {
    const { now } = this.state;
    if (!now.view && now.row < 0 && placed(look, now, this.opening().kind).kind !== "encoder") now.row = look.uncertain ?? -1;
  }

  /** What the model says of its input, and what of the input it never learned. */
  showSaid() {
    const { look, t } = this, model = this.source.offline ? null : this.model();
    const missesTag = Boolean(model?.tags.length) && !tagOf(model, look.text ?? "");
    this.parts.says.replaceChildren(...[classes(look, t), outside(look, missesTag, t)].filter(Boolean));
  }

  /** Whether tokens are joined or hidden, in views that can. */
  isMerged(view) {
    const { words, specials } = this.state.now;
    return view.controls.includes("words") && !this.source.offline && (words || !specials);
  }

  /** The look's numbers as a view reads them: token by token, or with words joined and special tokens hidden. */
  reading(view) {
    const { words, specials } = this.state.now;
    return this.isMerged(view) ? this.readings.of({ words, specials }) : this.tokens;
  }

  /** What a reader has to know of joined words and hidden tokens. */
  readingNote() {
    const { words = false, specials = true } = this.data.look.reading ?? this.source.reading ?? {};
    return [words && this.t("words.joined"), !specials && this.t("specials.hidden")].filter(Boolean).join(" ");
  }

  /** To another view; rows of words are not rows of tokens, so nothing stays held between the two. */
  go(id, values = {}) {
    const view = VIEWS.find((one) => one.id === id), held = this.isMerged(view) === this.isMerged(this.opened) ? {} : { row: -1, col: -1 };
    this.state.set({ ...held, ...values, view: id });
  }

  forget() {
    this.view?.close();
    this.view = this.look = null;
    for (const part of ["says", "nav", "controls", "stage", "aside", "footer"]) this.parts[part].replaceChildren();
    const missing = this.composer.missing();
    if (missing) this.parts.stage.append(el("p", { class: "caption" }, this.t(missing)));
  }

  /** Views that have something to show of this look. */
  views() { return VIEWS.filter((view) => view.fits(this)); }

  /** The view that is asked for, or else the first that suits this look. */
  opening() {
    const views = this.views();
    return views.find((view) => view.id === this.state.now.view) ?? views.find((view) => view.opens?.(this) ?? true);
  }

  /** One failure, one sentence; the page stays as it was. */
  async guarded(work) {
    this.parts.message.textContent = "";
    this.busy(1);
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Failure)) console.error(error);
      this.parts.message.textContent = await this.sentence(error.message);
    } finally {
      this.composer.busy(null);
      this.parts.stage.classList.remove("waiting");
      this.busy(-1);
    }
  }

  /** What went wrong in the reader's language; the server's sentences are fetched when one is needed. */
  async sentence(message) {
    if (message === "offline") return this.t("error.offline");
    if (this.source.offline) return message;
    return (await import("./server_errors.js")).serverError(message, this.language());
  }

  busy(change) {
    this.works = (this.works ?? 0) + change;
    this.root.setAttribute("aria-busy", String(this.works > 0));
  }

  where() { return this.source.only ?? placed(this.look, this.state.now, this.opened?.kind); }

  show() { this.guarded(() => this.present()); }

  async present() {
    const mine = ++this.shows, views = this.views(), kind = this.opening();
    const data = await this.reading(kind);
    if (mine !== this.shows || !this.look) return;
    tip.hide();
    this.view?.close();
    this.parts.stage.replaceChildren();
    Object.assign(this, { data, opened: kind });
    this.parts.nav.replaceChildren(...views.map((view) => el("button", {
      type: "button", role: "tab", "aria-selected": String(view === kind), "data-view": view.id,
      onclick: () => this.go(view.id),
    }, this.t(`view.${view.id}`))));
    const { nav } = this.parts, chosen = nav.querySelector("[aria-selected=true]"); // on a phone not all of them fit
    nav.scrollLeft = chosen.offsetLeft - nav.offsetLeft - (nav.clientWidth - chosen.offsetWidth) / 2;
    this.panelled = kind.panel && !this.source.overviewOnly;
    this.parts.main.classList.toggle("wide", !this.panelled);
    this.view = kind.open(this.parts.stage, this);
    this.showControls();
    this.parts.footer.replaceChildren(...footer(this));
    this.refresh(new Set(["view"]));
  }

  showControls() {
    if (!this.look || document.activeElement?.closest?.(".controls input")) return;
    const held = document.activeElement?.closest?.(".controls [aria-label]")?.getAttribute("aria-label");
    this.parts.controls.replaceChildren(...controls(this, this.opened.controls ?? []));
    if (held) this.parts.controls.querySelector(`[aria-label="${CSS.escape(held)}"]`)?.focus(); // the keyboard stays where it was
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
      if (has("lang")) { this.build(); if (this.model()) this.composer.update(this.model()); if (this.look) { this.composer.wrote(this.look); this.showSaid(); } }
      this.showHead();
      if (this.look) this.show();
      return;
    }
    if (!this.look) return;
    if (has("view", "words", "specials")) { this.show(); return; }
    if (has("kind", "layer", "head")) this.showControls();
    else this.relabel();
    this.refresh(changed);
  }
}
