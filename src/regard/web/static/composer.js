// What is looked at: a text, a text and its translation, or an image and its caption.
import { el } from "./dom.js";

const BEAMS = [1, 2, 3, 4, 5, 8];

/** A text that suits the model, so that the first page is not an empty one. */
export function example(model) {
  if (model.image) return "";
  if (model.example) return model.example;
  return model.source ? "The teacher gave the student a book." : "The cat sat on the mat because it was warm.";
}

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
    this.picture ??= model.image ? model.example ?? null : null;
    const two = model.source || (model.image && model.generates), texts = [];
    if (model.image) texts.push(this.imagePicker());
    else texts.push(this.area(model.source ? t("source") : t("text"), "text", t("text.hint")));
    if (two) texts.push(this.area(model.image ? t("caption") : t("target"), "target", t("target.hint")));
    this.beam = model.generates
      ? el("select", { name: "beam" }, BEAMS.map((n) => el("option", { value: String(n), selected: n === state.now.beam }, String(n))))
      : null;
    const beam = this.beam && el("label", {}, t("beam"), this.beam);
    this.node.classList.toggle("two", two);
    this.node.replaceChildren(el("div", { class: "texts" }, texts), el("div", { class: "go" }, beam, this.button));
  }

  imagePicker() {
    const file = el("input", { type: "file", accept: "image/*", name: "image", onchange: async () => {
      this.picture = file.files[0] ? await base64(file.files[0]) : null;
      this.preview.hidden = !this.picture;
      if (!this.picture) return;
      this.preview.src = `data:image/png;base64,${this.picture}`;
      this.submit();
    } });
    this.preview = el("img", { alt: "", hidden: !this.picture, src: this.picture ? `data:image/png;base64,${this.picture}` : "" });
    return el("label", { class: "area" }, el("span", {}, this.t("image")), el("div", { class: "picture" }, this.preview, file));
  }

  submit() {
    const values = { beam: this.beam ? Number(this.beam.value) : 1, row: -1, col: -1, zoom: "", from: 0, position: -1 };
    if (this.text) values.text = this.text.value;
    if (this.target) values.target = this.target.value;
    this.onLook(values);
  }

  /** The words of POST /api/looks. */
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

  /** Whether what is asked for can be watched while it is written. */
  streams() {
    const { target, beam } = this.state.now;
    return Boolean(this.model.source && this.model.generates && !target && beam === 1);
  }

  /** What the model wrote stands where a translation of one's own would. */
  wrote(look) {
    if (this.target && look.target) this.target.placeholder = look.target;
  }

  /** What is missing before anything can be looked at: the key of a sentence, or nothing. */
  missing() {
    if (this.model.image) return this.picture ? null : "error.image";
    return this.state.now.text.trim() ? null : "error.text";
  }

  busy(word) {
    this.button.disabled = Boolean(word);
    this.button.textContent = word ?? this.t("look");
  }
}
