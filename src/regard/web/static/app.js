// The application: header, input, tabs of the views, and the open view.
import { Failure } from "./api.js";
import { Composer, example, tagOf } from "./composer.js";
import { controls, placed } from "./controls.js";
import { Data, Readings } from "./data.js";
import { after, chooseNeighbour, el, refill } from "./dom.js";
import { classes, footer, head, outside, said } from "./frame.js";
import { speaker } from "./i18n.js";
import { listen } from "./keys.js";
import { Panel } from "./panel.js";
import { NEW_INPUT, State, dressPage } from "./state.js";
import { VIEWS, viewTerms } from "./views/index.js";

/** Shown in place of a view that this source has no data for: the reason. */
function sentence(host, text) {
  host.append(el("p", { class: "told unavailable" }, text));
  return { update: async () => {}, close: () => {} };
}

export class App {
  constructor(root, source, initial = {}) {
    Object.assign(this, { root, source, look: null, data: null, view: null, models: [], runs: 0, shows: 0 });
    this.state = new State(initial);
    this.state.on((changed, outside) => this.changed(changed, outside));
    this.relabel = after(120, () => this.showControls());
    listen(this);
  }

  async start() {
    this.dress();
    this.build();
    await this.guarded(async () => {
      this.models = await this.source.models((share) => this.showLoading(share)).finally(() => this.parts.stage.replaceChildren());
      this.showHead();
      await this.begin();
    });
  }

  /** Look at the input of the state; without a text at an example. */
  async begin() {
    const { now } = this.state;
    if (!this.model()) now.model = this.models[0]?.id ?? "";
    if (!now.text) now.text = example(this.model());
    this.composer.update(this.model());
    if (!this.lacks()) await this.run();
  }

  /** Whether an image or a text is missing, which the page then asks for. */
  lacks() {
    const missing = this.source.offline ? null : this.composer.missing();
    if (missing) this.parts.stage.replaceChildren(el("p", { class: "caption" }, this.t(missing)));
    return missing !== null;
  }

  /** Show how much of an in-page model has been downloaded, from 0 to 1. */
  showLoading(share) {
    const { stage } = this.parts, { t } = this;
    if (!stage.querySelector("progress")) stage.replaceChildren(el("label", { class: "loading" }, t("loading"), el("progress")));
    stage.querySelector("progress").value = share;
  }

  model() { return this.models.find((model) => model.id === this.state.now.model); }

  /** Apply language and theme; called before anything is drawn. */
  dress() {
    this.t = speaker(dressPage(this.state.now));
    document.title = `regard · ${this.t("title")}`;
  }

  build() {
    const { t, state } = this;
    this.parts = {
      head: el("header"), says: el("div", { class: "says" }), message: el("p", { class: "message", role: "alert" }), nav: el("nav", { role: "tablist", onkeydown: chooseNeighbour }),
      controls: el("div", { class: "controls" }), stage: el("section", { class: "stage" }), aside: el("aside", { "aria-live": "polite" }),
      terms: el("div", { class: "terms" }), footer: el("footer"),
    };
    this.parts.main = el("main", {}, this.parts.stage, this.parts.aside);
    const picture = this.composer?.picture ?? null; // kept when the language changes
    this.composer = new Composer({ t, state, picture, onLook: (values) => { state.set(values); this.guarded(() => this.run()); } });
    this.panel = new Panel(this.parts.aside, t, state, this.source.offline ? null : () => this.go("walk"));
    const { head, says, message, nav, main, terms, footer } = this.parts;
    const writing = this.source.offline ? said(this) : this.composer.node;
    this.root.replaceChildren(head, writing, message, says, nav, this.parts.controls, main, terms, footer);
    this.showHead();
  }

  showHead() { this.parts.head.replaceChildren(...head(this)); }

  change(model) {
    const { text } = this.state.now, own = text !== example(this.model()); // keep the text unless it is the old model's example
    this.forget(); // no further requests to the old model
    this.state.set({ ...NEW_INPUT, model, text: own ? text : "", kind: "", layer: -1, head: -1, target: "", off: "" });
    this.guarded(() => this.begin());
  }

  /** Request a look at the current input; only the look that was requested last is shown. */
  async run() {
    const missing = this.source.offline ? null : this.composer.missing();
    if (missing) throw new Failure(missing);
    const mine = ++this.runs;
    const isStreamed = this.look && this.view?.write && this.composer.streams(); // to a view that shows the text being generated
    this.composer.busy(this.t(isStreamed ? "writing" : "looking"));
    this.parts.stage.classList.toggle("waiting", !isStreamed);
    try {
      const look = await (isStreamed ? this.view.write() : this.source.look(this.source.offline ? null : this.composer.request()));
      if (mine !== this.runs || !look) return;
      this.adopt(look);
      await this.present();
    } catch (error) {
      if (mine === this.runs) throw error;
    } finally {
      if (mine === this.runs) this.idle();
    }
  }

  /** No look is on its way any more. */
  idle() {
    this.composer.busy(null);
    this.parts.stage.classList.remove("waiting");
  }

  /** Make this the current look; the screen does not change until `present`. */
  adopt(look) {
    this.look = look;
    this.tokens = new Data(this.source, look);
    this.readings = new Readings(this.source, look);
    this.composer.wrote(look);
    this.hold(look);
    this.showSaid();
  }

  /** Pin the least certain token, unless the user has chosen a view or a token. */
  hold(look) {
    const { now } = this.state;
    if (!now.view && now.row < 0 && placed(look, now, this.opening().kind).kind !== "encoder") now.row = look.uncertain ?? -1;
  }

  /** Show the predicted classes, and the parts of the input that the model never learned. */
  showSaid() {
    const { look, t } = this, model = this.source.offline ? null : this.model();
    const missesTag = Boolean(model?.tags.length) && !tagOf(model, look.text ?? "");
    this.parts.says.replaceChildren(...[classes(look, t), outside(look, missesTag, t)].filter(Boolean));
  }

  /** Whether this view shows joined words or hides special tokens. */
  isMerged(view) {
    const { words, specials } = this.state.now;
    return view.controls.includes("words") && !this.source.offline && (words || !specials);
  }

  /** The data of a view: token by token, or with words joined and special tokens hidden. */
  reading(view) {
    const { words, specials } = this.state.now;
    return this.isMerged(view) ? this.readings.of({ words, specials }) : this.tokens;
  }

  /** A note on joined words and hidden tokens. */
  readingNote() {
    const { words = false, specials = true } = this.data.look.reading ?? this.source.reading ?? {};
    return [words && this.t("words.joined"), !specials && this.t("specials.hidden")].filter(Boolean).join(" ");
  }

  /** Open another view. Rows of words are not rows of tokens, so a switch between the two unpins everything. */
  go(id, values = {}) {
    const view = VIEWS.find((one) => one.id === id), held = this.isMerged(view) === this.isMerged(this.opened) ? {} : { row: -1, col: -1 };
    this.state.set({ ...held, ...values, view: id });
  }

  forget() {
    this.view?.close();
    this.view = this.look = null;
    this.runs += 1; // a look still to come is of another model
    this.idle();
    for (const part of ["says", "nav", "controls", "stage", "aside", "terms", "footer"]) this.parts[part].replaceChildren();
  }

  /** The views that apply to this look. */
  views() { return VIEWS.filter((view) => view.fits(this)); }

  /** The requested view, or else the first that opens by default for this look. */
  opening() {
    const views = this.views();
    return views.find((view) => view.id === this.state.now.view) ?? views.find((view) => view.opens?.(this) ?? true);
  }

  /** Run `work`; a failure shows its message and leaves the page as it was. */
  async guarded(work) {
    this.parts.message.textContent = "";
    this.busy(1);
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Failure)) console.error(error);
      this.parts.message.textContent = await this.sentence(error.message);
    } finally {
      this.busy(-1);
    }
  }

  /** An error message in the page's language; the translations are loaded when the first one is needed. */
  async sentence(message) {
    if (message === "offline") return this.t(this.source.inPage ? "page.offline" : "error.offline");
    if (message.startsWith("error.")) return this.t(message);
    if (this.source.offline) return message;
    return (await import("./server_errors.js")).serverError(message, document.documentElement.lang);
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
    this.view?.close();
    this.parts.stage.replaceChildren();
    Object.assign(this, { data, opened: kind });
    const { nav } = this.parts, isHeld = nav.contains(document.activeElement);
    nav.replaceChildren(...views.map((view) => el("button", {
      type: "button", role: "tab", "aria-selected": String(view === kind), "data-view": view.id,
      onclick: () => this.go(view.id),
    }, this.t(`view.${view.id}`))));
    const chosen = nav.querySelector("[aria-selected=true]");
    if (isHeld) chosen.focus({ preventScroll: true });
    nav.scrollLeft = chosen.offsetLeft - nav.offsetLeft - (nav.clientWidth - chosen.offsetWidth) / 2; // not all tabs fit on a phone
    const missing = this.source.unavailable?.[kind.id];
    this.wants = missing ? [] : kind.controls ?? [];
    this.panelled = kind.panel && !this.source.overviewOnly;
    this.parts.main.classList.toggle("wide", !this.panelled);
    this.view = missing ? sentence(this.parts.stage, this.t(missing)) : kind.open(this.parts.stage, this);
    this.showControls();
    this.parts.terms.replaceChildren(...viewTerms(this, kind.id));
    this.parts.footer.replaceChildren(...(missing ? [] : footer(this)));
    this.refresh(new Set(["view"]));
  }

  showControls() {
    if (!this.look || document.activeElement?.closest?.(".controls input")) return;
    refill(this.parts.controls, controls(this, this.wants));
  }

  refresh(changed) {
    this.guarded(async () => {
      const work = [this.view.update(changed)];
      if (this.panelled) work.push(this.panel.update(this.data, this.where()));
      await (this.drawn = Promise.all(work));
    });
  }

  changed(changed, outside) {
    const has = (...names) => names.some((name) => changed.has(name));
    if (outside && !this.source.offline && has("model", "text", "target", "beam")) {
      if (has("model")) this.forget();
      this.showHead();
      this.guarded(() => this.begin());
    }
    if (has("lang", "theme")) {
      this.dress();
      if (has("lang")) { this.build(); if (this.model()) this.composer.update(this.model()); if (this.look) { this.composer.wrote(this.look); this.showSaid(); } }
      this.showHead();
      if (this.look) this.show();
      else if (this.model()) this.lacks();
      return;
    }
    if (!this.look) return;
    if (outside || has("view", "words", "specials")) { this.show(); return; } // a link may set what only a new view reads
    if (has("kind", "layer", "head")) this.showControls();
    else this.relabel();
    this.refresh(changed);
  }
}
