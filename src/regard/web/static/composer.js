// The input form: a text, a text and its translation, or an image and its caption.
import { el, segmented } from "./dom.js";
import { NEW_INPUT } from "./state.js";

const BEAMS = [1, 2, 3, 4, 5, 8];

/** An example text for the model, from its own data if available, so that the page never opens empty. */
export function example(model) {
  if (model.image) return "";
  return model.examples[0] ?? (model.source ? "The teacher gave the student a book." : "The cat sat on the mat because it was warm.");
}

/** The model's tag that a text starts with, if any. */
export const tagOf = (model, text) => model.tags.find((tag) => text.startsWith(tag));

const pngUrl = (base64) => `data:image/png;base64,${base64}`;

const base64 = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(String(reader.result).split(",")[1]);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

export class Composer {
  constructor({ t, state, picture, onLook }) {
    Object.assign(this, { t, state, picture, onLook });
    this.node = el("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } });
    this.button = el("button", { class: "primary", type: "submit" }, t("look"));
  }

  area(name, key, hint) {
    const area = el("textarea", { rows: 1, name: key, dir: "auto", placeholder: hint ?? "", spellcheck: false });
    area.value = this.state.now[key];
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
    });
    this[key] = area;
    return el("label", { class: "area" }, el("span", {}, name), area);
  }

  update(model) {
    const { t, state } = this;
    this.model = model;
    this.text = this.target = null;
    this.picture ??= model.image ? model.examples[0] ?? null : null;
    const two = model.source || (model.image && model.generates), texts = [];
    if (model.image) texts.push(this.imagePicker());
    else texts.push(this.area(model.source ? t("source") : t("text"), "text", t("text.hint")));
    if (two) texts.push(this.area(model.image ? t("caption") : t("target"), "target", t("target.hint")));
    this.beam = model.generates
      ? el("select", { name: "beam" }, BEAMS.map((n) => el("option", { value: String(n), selected: n === state.now.beam }, String(n))))
      : null;
    const beam = this.beam && el("label", {}, t("beam"), this.beam);
    this.node.classList.toggle("two", two);
    this.node.replaceChildren(el("div", { class: "texts" }, texts), el("div", { class: "go" }, beam, this.button),
      el("div", { class: "offers" }, this.tags(), this.examples()));
    this.text?.addEventListener("input", () => this.node.querySelector(".tags")?.replaceWith(this.tags()));
  }

  /** Buttons for the tags that the model's training sentences start with; the one of this text is selected. */
  tags() {
    const { tags } = this.model, text = this.text?.value ?? "", tag = tagOf(this.model, text);
    if (!tags.length) return null;
    const pick = (to) => { this.text.value = `${to} ${text.slice(tag?.length ?? 0).trimStart()}`; this.submit(); };
    return el("div", { class: "tags" }, el("span", {}, this.t("tags")), segmented(this.t("tags"), tags.map((one) => [one, one]), tag, pick));
  }

  /** Buttons for held-out examples of the model's data. */
  examples() {
    const { image, examples } = this.model;
    if (!examples.length) return null;
    const pick = (one) => {
      if (image) this.picture = one;
      else this.text.value = one;
      if (this.target) this.target.value = "";
      this.submit();
    };
    const shown = (one) => image ? el("img", { src: pngUrl(one), alt: "" }) : el("bdi", {}, one);
    return el("div", { class: "examples" }, el("span", {}, this.t("examples")), examples.map((one, i) => el("button", {
      type: "button", "data-example": String(i), onclick: () => pick(one), ...(image ? { "aria-label": `${this.t("examples")} ${i + 1}` } : { title: one }),
    }, shown(one))));
  }

  imagePicker() {
    const file = el("input", { type: "file", accept: "image/*", name: "image", onchange: async () => {
      this.picture = file.files[0] ? await base64(file.files[0]) : null;
      if (this.picture) this.submit();
    } });
    this.preview = el("img", { alt: "" });
    this.showPicture();
    return el("label", { class: "area" }, el("span", {}, this.t("image")), el("div", { class: "picture" }, this.preview, file, el("span", { class: "pick" }, this.t("image.choose"))));
  }

  showPicture() {
    this.preview.hidden = !this.picture;
    if (this.picture) this.preview.src = pngUrl(this.picture);
  }

  submit() {
    if (this.model.image) this.showPicture();
    this.node.querySelector(".tags")?.replaceWith(this.tags());
    const values = { ...NEW_INPUT, beam: this.beam ? Number(this.beam.value) : 1 };
    if (this.text) values.text = this.text.value;
    if (this.target) values.target = this.target.value;
    this.onLook(values);
  }

  /** The body of POST /api/looks. */
  request(variant) {
    const { model, text, target, beam } = this.state.now;
    const out = { model, ...(variant ? { variant } : {}) };
    if (this.model.image) out.image = this.picture;
    else out.text = text;
    const writes = this.model.generates && !target && (this.model.source || this.model.image || beam > 1);
    if (target && (this.model.source || this.model.image)) out.target = target;
    if (writes) out.generate = { beam, ...(this.model.source || this.model.image ? {} : { max_new_tokens: 16 }) };
    return out;
  }

  /** Whether the text can be streamed while it is generated. */
  streams() {
    const { target, beam } = this.state.now;
    return Boolean(this.model.source && this.model.generates && !target && beam === 1);
  }

  /** Show the generated text in the field for a target. */
  wrote(look) {
    if (this.target && look.target) this.target.placeholder = look.target;
  }

  /** The key of a message about missing input; null if there is none. */
  missing() {
    if (this.model.image) return this.picture ? null : "error.image";
    return this.state.now.text.trim() ? null : "error.text";
  }

  busy(word) {
    this.button.disabled = Boolean(word);
    this.button.textContent = word ?? this.t("look");
  }
}
