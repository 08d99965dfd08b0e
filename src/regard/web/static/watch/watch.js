// The training page: settings above, the loss on the left, every head's attention on the right.
import { css, heat } from "../colour.js";
import { check, count, el, percent, refill, segmented } from "../dom.js";
import { themeAndLanguage, wordMark } from "../frame.js";
import { addWords, speaker } from "../i18n.js";
import { dressPage, kept } from "../state.js";
import { Surface } from "../surface.js";
import { TASKS, letters } from "./tasks.js";
import { DEFAULTS } from "./training.js";
import { expectation, whatHappened } from "./sentences.js";
import { WATCH_WORDS } from "./words.js";

addWords(WATCH_WORDS);
const CHOICES = { task: ["reverse", "repeat"], n_layers: [1, 2, 3], n_heads: [1, 2, 4], positions: ["none", "sinusoidal", "learned"], lr: [0.0003, 0.001, 0.003, 0.005, 0.03, 0.1] };
// Settings that suit a task, applied when it is chosen: it is learned within a minute or two.
const SUITED = { reverse: { n_layers: 1, positions: "sinusoidal", lr: 0.005 }, repeat: { n_layers: 2, positions: "learned", lr: 0.003 } };

/** The settings in a link; invalid values keep their defaults. */
function linked(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, "")), out = { ...DEFAULTS, ...SUITED[asked.get("task")] };
  for (const [name, choices] of Object.entries(CHOICES)) out[name] = choices.find((one) => String(one) === asked.get(name)) ?? out[name];
  for (const name of ["causal", "scaled"]) if (asked.has(name)) out[name] = asked.get(name) !== "0";
  if (/^\d{1,9}$/.test(asked.get("seed") ?? "")) out.seed = Number(asked.get("seed"));
  if (TASKS[out.task].takes(asked.get("word") ?? "")) out.word = asked.get("word");
  return { settings: out, lang: asked.get("lang") ?? "", theme: asked.get("theme") ?? "" };
}

class Watch {
  constructor(root) {
    this.root = root;
    Object.assign(this, linked(location.hash), { losses: [], previous: null, now: null });
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.receive(data));
    addEventListener("keydown", (event) => this.press(event));
    this.build();
    this.restart();
  }

  /** Rebuild the page in the chosen language and theme; training continues. */
  build() {
    const language = dressPage(this);
    this.t = speaker(language);
    document.title = `regard · ${this.t("watch.title")}`;
    for (const drawing of this.drawings ?? []) drawing.close();
    const choose = (what, to) => { kept.set(what, to); this[what] = to; this.remember(); this.build(); this.show(); };
    this.parts = { lead: el("p", { class: "lead" }), transport: el("div", { class: "transport" }), settings: el("fieldset", { class: "settings" }),
      expect: el("p", {}), saw: el("p", { "aria-live": "polite", class: "saw" }), figures: el("dl", { class: "figures" }),
      chart: el("div", {}), written: el("p", { class: "written-letters", lang: "en" }), maps: el("div", { class: "maps" }) };
    const { lead, transport, settings, expect, saw, figures, chart, written, maps } = this.parts, { t } = this;
    this.root.replaceChildren(
      el("header", {}, wordMark(), el("span", { class: "quiet" }, t("watch.title")), el("span", { class: "room" }), themeAndLanguage(t, language, choose)),
      el("main", { class: "watch" }, el("div", { class: "full" }, lead, transport, settings, el("div", { class: "lines" }, expect, saw)),
        el("section", {}, el("h2", {}, t("watch.loss")), figures, chart, el("p", { class: "caption" }, t("watch.loss.about"))),
        el("section", {}, el("h2", {}, t("watch.attention")), el("p", { class: "caption" }, t("watch.attention.about")), written, maps)),
      el("footer", {}, el("span", {}, t("watch.keys"))));
    this.drawings = [new Surface(chart, { draw: (pen) => this.drawLosses(pen), height: () => 260, label: t("watch.loss") })];
    this.heads = [];
    this.showSettings();
    this.showTransport();
  }

  /** Keep the settings in the URL, so that a link restores the run. */
  remember() {
    const out = new URLSearchParams();
    for (const [name, value] of Object.entries(this.settings)) if (value !== DEFAULTS[name]) out.set(name, typeof value === "boolean" ? Number(value) : value);
    for (const name of ["lang", "theme"]) if (this[name]) out.set(name, this[name]);
    history.replaceState(null, "", `#${out}`);
  }

  // ---- messages to and from the worker

  restart() {
    if (this.losses.length > 1) this.previous = this.losses;
    this.losses = [];
    this.remember();
    this.worker.postMessage({ do: "start", settings: this.settings });
  }

  change(values) {
    const wasPlaying = this.now?.playing;
    this.settings = { ...this.settings, ...values };
    this.showSettings();
    this.restart();
    if (wasPlaying) this.ask("play");
  }

  ask(order) { this.worker.postMessage({ do: order }); }

  toggle() { this.ask(this.now?.playing ? "pause" : "play"); }

  receive(now) {
    if (now.step < this.losses.length) this.losses = []; // a late message of the previous run
    this.losses.push(...now.losses);
    this.now = now;
    this.show();
  }

  press(event) {
    if (event.target.matches?.("input, button, a, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = { " ": () => this.toggle(), s: () => this.ask("step"), r: () => this.restart() }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // ---- display

  showTransport() {
    const { t } = this, button = (name, onclick, kind = "second") => el("button", { type: "button", class: kind, "data-do": name, onclick }, t(`watch.${name}`));
    this.playButton = button("play", () => this.toggle(), "primary");
    this.parts.transport.replaceChildren(this.playButton, button("step", () => this.ask("step")), button("restart", () => this.restart()),
      this.field("seed", this.settings.seed, { type: "number", min: 0, max: 999999999 }, (text) => /^\d{1,9}$/.test(text) && { seed: Number(text) }));
  }

  /** A text input; the browser says what is wrong with an invalid value, which is not applied. */
  field(name, value, props, read) {
    const input = el("input", { class: "field", name, ...props, onchange: () => {
      const values = read(input.value.trim().toLowerCase());
      input.setAttribute("aria-invalid", String(!values));
      input.setCustomValidity(values ? "" : props.placeholder ?? "");
      if (input.reportValidity() && values) this.change(values);
    } });
    input.value = value;
    return el("label", { class: "choice" }, el("span", { class: "quiet" }, this.t(`watch.${name}`)), " ", input);
  }

  showSettings() {
    const { t, settings } = this, { task } = settings, hint = t(`watch.word.hint.${task}`);
    const choice = (name, text = String, pick = (value) => ({ [name]: value }), label = name.replace("n_", "")) => el("div", { class: "choice", "data-name": name },
      el("span", {}, t(`watch.${label}`)), segmented(t(`watch.${label}`), CHOICES[name].map((value) => [value, text(value)]), settings[name], (value) => this.change(pick(value))));
    refill(this.parts.settings, [el("legend", {}, t("watch.settings")),
      el("div", { class: "row" }, choice("task", (value) => t(`watch.task.${value}`), (value) => ({ ...SUITED[value], task: value, word: "" })), el("span", {}, t(`watch.about.${task}`))),
      el("div", { class: "row" }, choice("n_layers"), choice("n_heads"), choice("positions", (value) => t(`watch.positions.${value}`)),
        check(t("watch.causal"), settings.causal, (causal) => this.change({ causal }), "causal"), check(t("watch.scaled"), settings.scaled, (scaled) => this.change({ scaled }), "scaled")),
      el("div", { class: "row" }, choice("lr"), this.field("word", settings.word, { type: "text", size: 12, placeholder: hint, title: hint, autocomplete: "off", spellcheck: "false" },
        (word) => (word === "" || TASKS[task].takes(word)) && { word }), el("span", { class: "quiet" }, t("watch.restarts")))]);
    this.parts.expect.replaceChildren(el("strong", {}, t("watch.expect")), " ", t(expectation(settings)));
  }

  show() {
    if (!this.now) return;
    const { t, now, parts } = this, loss = now.step ? now.loss.toFixed(3) : "–";
    parts.lead.textContent = t("watch.lead", { size: count(now.size) });
    this.playButton.textContent = t(now.playing ? "watch.pause" : "watch.play");
    this.playButton.disabled = now.ended;
    const figures = [["watch.nth", now.step], ["watch.loss", loss], ["watch.accuracy", percent(now.accuracy)]];
    parts.figures.replaceChildren(...figures.map(([name, value]) => el("div", { "data-figure": name.replace("watch.", "") }, el("dt", {}, t(name)), el("dd", {}, String(value)))));
    const happened = whatHappened(now, this.settings, this.previous).map(([key, values]) => t(key, values)).join("");
    parts.saw.replaceChildren(el("strong", {}, t("watch.saw")), " ", happened);
    this.showWritten();
    this.showMaps();
    this.drawings[0].redraw();
  }

  /** The given letters, and the model's output letter by letter. */
  showWritten() {
    const { tokens, written } = this.now, { first } = TASKS[this.settings.task];
    const signs = letters(written).map((sign, n) => (n > first ? el("span", { class: written[n] === tokens[n] ? "right" : "wrong" }, sign) : sign));
    this.parts.written.replaceChildren(el("span", { class: "quiet" }, `${this.t("watch.writes")}: `), ...signs);
  }

  showMaps() {
    const { t, now, parts } = this, { n_layers, n_heads } = this.settings, flat = now.maps.flatMap((heads, l) => heads.map((values, h) => ({ l, h, values })));
    if (flat.length !== n_layers * n_heads) return; // from the previous run
    if (this.heads.length !== flat.length) {
      for (const drawing of this.drawings.splice(1)) drawing.close();
      parts.maps.style.setProperty("--map", flat.length <= 4 ? "250px" : flat.length <= 6 ? "200px" : "150px");
      this.heads = flat.map(({ l, h }) => ({ name: t("watch.head", { l: l + 1, h: h + 1 }), host: el("div", {}), about: el("span", { class: "quiet" }) }));
      parts.maps.replaceChildren(...this.heads.map(({ name, host, about }) => el("figure", {}, host, el("figcaption", {}, el("span", {}, name), about))));
      this.heads.forEach((head, n) => this.drawings.push(new Surface(head.host, { draw: (pen) => this.drawMap(pen, n), height: (width) => width, label: head.name })));
    }
    flat.forEach(({ l, h, values }, n) => {
      const [name, share] = Object.entries(now.patterns[l][h]).reduce((a, b) => (b[1] > a[1] ? b : a));
      this.heads[n].values = values;
      this.heads[n].about.textContent = t(`watch.pattern.${share < 0.35 ? "mixed" : name}`, { w: percent(share) });
    });
    for (const drawing of this.drawings.slice(1)) drawing.redraw();
  }

  /** One head: a cell for each pair of letters, a frame around the letter to write. */
  drawMap(pen, n) {
    const { values } = this.heads[n], { tokens } = this.now, T = tokens.length - 1, task = TASKS[this.settings.task];
    if (!values || values.length !== T * T) return;
    const signs = letters(tokens), edge = Math.min(20, pen.width / 14), cell = (pen.width - edge - 1) / T, size = Math.min(13, 0.8 * edge), { theme, ink, accent, line } = pen.colours;
    pen.matrix(edge, edge, cell * T, cell * T, { values, rows: T, cols: T, colour: (value) => heat(value, theme) });
    pen.rect(edge, edge, cell * T, cell * T, { stroke: line });
    for (let i = 0; i < T; i++) {
      pen.text(signs[i], edge + (i + 0.5) * cell, edge / 2, { size, align: "center", fill: ink });
      pen.text(signs[i], edge / 2, edge + (i + 0.5) * cell, { size, align: "center", fill: ink });
      if (i >= task.first) pen.rect(edge + task.source(tokens, i) * cell, edge + i * cell, cell, cell, { stroke: accent, width: 1.5 });
    }
  }

  /** The loss of every step; the previous run in grey. */
  drawLosses(pen) {
    const { accent, quiet, line } = pen.colours, left = 30, top = 8, width = pen.width - left - 8, height = pen.height - top - 26;
    const steps = Math.max(200, this.losses.length, this.losses.length ? 0 : this.previous?.length ?? 0), most = Math.max(4, ...this.losses.slice(0, 50));
    for (let value = 0; value <= most; value++) {
      const y = top + height * (1 - value / most);
      pen.path([left, y, left + width, y], { stroke: line });
      pen.text(String(value), left - 8, y, { size: 12, align: "right", fill: quiet });
    }
    for (const share of [0, 0.5, 1]) pen.text(String(Math.round(steps * share)), left + width * share, top + height + 15, { size: 12, align: share === 1 ? "right" : share ? "center" : "left", fill: quiet });
    for (const [losses, stroke, thick] of [[this.previous ?? [], css([150, 140, 130], 0.6), 1], [this.losses, accent, 1.6]]) {
      const shown = losses.slice(0, steps), at = (n) => [left + (width * n) / steps, top + height * (1 - Math.min(most, shown[n]) / most)];
      for (let n = 1; n < shown.length; n++) pen.path([...at(n - 1), ...at(n)], { stroke, width: thick });
    }
  }
}

new Watch(document.getElementById("app"));
