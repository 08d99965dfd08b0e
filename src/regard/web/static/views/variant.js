// Interventions: no causal mask, another scale, heads switched off; texts, predictions and weights before and after.
import { heat, scaled } from "../colour.js";
import { Data } from "../data.js";
import { after, check, el, number, offer, percent, shown, slider, tokenText } from "../dom.js";
import { columnName, largest, longestName, nameSize } from "../matrix.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";
import { writerName } from "../writers.js";

const CELLS = 160;
const LABELLED = 40; // largest number of rows or columns with labels
const CLASSES = 5;
const TOKENS = 3;
const STEP = 28;
const NEW = 24; // tokens that a language model generates

class Variant {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, looks: new Map() });
    const { t, state } = app;
    this.settings = el("div", { class: "row" });
    this.switches = el("div", { class: "switches", role: "group", "aria-label": t("variant.off") });
    this.matters = el("p", { class: "told matters", "aria-live": "polite" });
    this.written = el("div", { class: "written" });
    this.happened = el("p", { class: "told happened", "aria-live": "polite" });
    this.edited = el("p", { class: "caption" });
    this.forced = el("div", { class: "row" });
    this.most = el("span");
    this.after = el("select", { class: "field", "aria-label": t("next.after"), onchange: () => state.set({ position: Number(this.after.value) }) });
    this.boards = el("div");
    host.append(el("p", { class: "caption" }, t(app.model().generates ? "variant.caption" : "variant.caption.class")), el("div", { class: "changes" }, this.settings, this.switches), this.matters,
      this.written, this.happened, this.forced, this.edited, this.boards);
    this.sheet = new Surface(this.boards, {
      vector: true, label: t("view.variant"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => hit && tip.show(event, hit.after, hit.name, `${t("variant.before")}: ${number(hit.before)}`),
    });
    this.set = after(150, (patch) => state.set(patch));
    this.showSettings();
    if (app.model().generates) this.showForced();
  }

  showSettings() {
    const { app } = this, { t, state } = app, { causal, scale } = state.now, { d_head: width, causal: hides, layered, scales } = app.model(), root = Math.sqrt(width);
    this.settings.replaceChildren(...[
      hides && check(t("variant.causal"), causal, (on) => state.set({ causal: on }), "causal"),
      scales && check(t("variant.root"), scale !== root, (on) => { state.set({ scale: on ? 1 : root }); this.showSettings(); }, "root"),
      scales && slider(t("variant.scale"), { min: -3, max: 3, step: 0.25, name: "scale" }, Math.log2(scale || 1), (v) => String(Number((2 ** v).toPrecision(3))), (v) => this.set({ scale: 2 ** v })),
      layered && el("button", { type: "button", class: "second", "data-do": "find", onclick: () => app.guarded(() => this.findHead()) }, t("variant.find")),
      el("button", { type: "button", class: "plain", "data-do": "reset", onclick: () => { state.set({ causal: true, scale: 1, off: "" }); this.showSettings(); } }, t("variant.reset")),
    ].filter(Boolean));
  }

  /** Below the generated texts: predictions on the same text, position by position. */
  showForced() {
    this.forced.replaceChildren(el("p", { class: "caption forced" }, this.app.t("variant.forced")), el("label", {}, this.most, this.after));
  }

  /** Switch off each head in turn and show the one that the prediction depends on most. */
  async findHead() {
    const { app } = this, { t, source, look } = app;
    this.matters.textContent = t("variant.finding");
    this.heads = await source.heads(look);
    if (app.view !== this) return;
    const all = Object.entries(this.heads.without).flatMap(([kind, layers]) => layers.flatMap((line, layer) => line.map((share, head) => ({ kind, layer, head, share }))));
    const worst = all.reduce((a, b) => (b.share < a.share ? b : a)), { kind, layer, head, share } = worst;
    const words = { n: all.length, head: writerName(t, { ...worst, name: kind }), before: percent(this.heads.before), after: percent(share) };
    this.matters.replaceChildren(t(look.classes ? "variant.matters.class" : "variant.matters", words), " ",
      el("button", { type: "button", class: "second", "data-do": "worst", onclick: () => app.state.set({ kind, layer, off: `${kind}.${layer}.${head}` }) }, t("variant.switch")));
    this.showSwitches();
  }

  /** A switch for each head of a layer, and one for all of them. */
  showSwitches() {
    const { app } = this, { t } = app, { kind } = app.where(), { layers, heads } = app.data.size(kind), off = this.off();
    const held = this.switches.contains(document.activeElement) ? document.activeElement.dataset.heads : null;
    const without = this.heads?.without[kind], lost = (name) => { // the share of the prediction lost without the head
      const [, l, h] = name.split(".").map(Number);
      return without ? Math.min(1, Math.max(0, 1 - without[l][h] / this.heads.before)) : null;
    };
    const button = (names, text, label, share) => el("button", {
      type: "button", ...(typeof share === "number" ? { style: `background:color-mix(in srgb, var(--accent) ${Math.round(8 + 82 * share)}%, transparent)` } : {}), "data-heads": names.join(" "), "aria-pressed": String(names.every((name) => off.includes(name))), "aria-label": label, title: label,
      onclick: () => this.toggle(names),
    }, text);
    this.switches.replaceChildren(el("p", { class: "quiet" }, t("variant.off")), ...Array.from({ length: layers }, (_, l) => {
      const names = Array.from({ length: heads }, (_, h) => `${kind}.${l}.${h}`);
      return el("div", {}, button(names, t("variant.nth", { l: l + 1 }), t("variant.layer", { l: l + 1 })),
        names.map((name, h) => button([name], String(h + 1), t("grid.cell", { l: l + 1, h: h + 1 }), lost(name))));
    }));
    if (held) this.switches.querySelector(`[data-heads="${CSS.escape(held)}"]`)?.focus(); // keep the keyboard focus
  }

  off() { return this.app.state.now.off.split(" ").filter(Boolean); }

  /** Switch these heads off, or on again if all of them are off. */
  toggle(names) {
    const now = this.off(), rest = now.filter((one) => !names.includes(one));
    this.app.state.set({ off: (names.every((name) => now.includes(name)) ? rest : [...rest, ...names]).join(" ") });
  }

  variant() {
    const { causal, scale } = this.app.state.now;
    const off = this.off().map((name) => name.split(".")).map(([kind, l, h]) => [kind, Number(l), Number(h)]);
    return { causal: causal || !this.app.model().causal, scale, off };
  }

  /** A look at the same text, and target if any, under the changed attention. */
  changed() {
    const { app } = this, variant = this.variant(), key = JSON.stringify(variant);
    if (!this.looks.has(key)) {
      const request = app.composer.request(variant);
      delete request.generate;
      if (app.model().source && app.look.target) request.target = app.look.target;
      else if (app.look.text) request.text = app.look.text; // including the continuation that beam search added
      const asked = app.source.look(request).then((look) => new Data(app.source, look));
      asked.catch(() => this.looks.delete(key));
      this.looks.set(key, asked);
    }
    return this.looks.get(key);
  }

  isChanged() {
    const { causal, scale, off } = this.variant();
    return !causal || scale !== 1 || off.length > 0;
  }

  /** Whether a language model's context has room to continue; a beam search's continuation does not count. */
  hasRoom() {
    const { data, state } = this.app, { source, image, max_len: most } = this.app.model();
    return source || image || state.now.beam > 1 || data.size(data.mainKind).rows < most;
  }

  /** The text that the model generates, as trained or with the changes. */
  generate(variant) {
    const { app } = this, key = `written ${JSON.stringify(variant ?? null)}`;
    if (!this.looks.has(key)) {
      const { source, image } = app.model(), { target, ...request } = app.composer.request(variant);
      request.generate = { beam: app.state.now.beam, ...(source || image ? {} : { max_new_tokens: NEW }) };
      const prompt = source || image ? "" : request.text;
      const asked = app.source.look(request).then((look) => source || image ? look.target ?? "" : (look.text ?? "").slice(prompt.length));
      asked.catch(() => this.looks.delete(key));
      this.looks.set(key, asked);
    }
    return this.looks.get(key);
  }

  /** Both texts side by side with new words highlighted, and a line that sums up the change. */
  async showWritten(then, mine) {
    const { app } = this, { t, look, data } = app, isChanged = this.isChanged();
    if (look.classes) { this.happened.textContent = isChanged ? this.classChange(then) : t("variant.change"); return; }
    if (!app.model().generates) { this.happened.textContent = ""; return; }
    const prompt = app.model().source || app.model().image ? "" : look.text;
    const room = this.hasRoom(), again = room && isChanged;
    const [before, after, fits] = await Promise.all([room ? this.generate(null) : null, again ? this.generate(this.variant()) : null, isChanged ? Promise.all([look, then.look].map((one) => app.source.fit(one))) : null]);
    if (mine !== this.asked) return;
    const side = (name, text, other) => el("section", { "data-side": name }, el("h2", {}, t(`variant.${name}`)), el("p", {}, prompt && el("bdi", { class: "quiet" }, prompt), el("bdi", { class: "new" }, ...marked(text, other))));
    this.written.replaceChildren(...(room ? [side("before", before, before), side("after", after ?? before, before)]
      : [el("p", { class: "told full" }, t("variant.full", { n: data.size(data.mainKind).rows }))]));
    this.happened.textContent = isChanged ? [again && this.difference(before, after), fits[0].tokens ? t("variant.fit", { n: fits[0].tokens, a: fits[0].right, b: fits[1].right }) : ""].filter(Boolean).join(" ") : t("variant.change");
  }

  classChange(then) {
    const { t, look } = this.app, [[name, share]] = Object.entries(look.classes), [[now, chance]] = Object.entries(then.look.classes);
    const words = { name, now, a: percent(share), b: percent(then.look.classes[name]), c: percent(chance) };
    return t(name === now ? "variant.stays" : "variant.turns", words);
  }

  /** What changed in the text, and the reason where it is certain. */
  difference(before, after) {
    const { t, state } = this.app, cross = this.app.look.kinds.cross, off = this.off();
    const blind = cross && Array.from({ length: cross.layers }, (_, l) => Array.from({ length: cross.heads }, (_, h) => `cross.${l}.${h}`)).flat().every((name) => off.includes(name));
    const why = [blind && t("variant.blind"), !state.now.causal && this.app.model().causal && t("variant.unmasked")].filter(Boolean);
    const a = before.trim().split(/\s+/), b = after.trim().split(/\s+/), kept = common(a, b).size;
    const what = before.trim() === after.trim() ? t("variant.unchanged") : !after.trim() ? t("variant.silent") : t("variant.rewritten", { n: b.length - kept, m: b.length });
    return [what, ...why].join(" ");
  }

  /** The predictions of both: classes, or the next token at the chosen position, by default where it changes most. */
  async predictions(then) {
    const { app } = this, { data, look, state, t } = app, classes = ({ look: { classes } }) => Object.entries(classes).map(([text, probability]) => ({ token: text, text, probability }));
    if (look.classes) return [data, then].map((side) => classes(side).slice(0, CLASSES));
    if (!app.model().generates) return null;
    const labels = await data.labels(data.mainKind, "rows"), alike = labels.length === then.size(then.mainKind).rows;
    const changes = alike ? await app.source.changes(then.look, look) : [0], most = changes.indexOf(largest(changes));
    const position = state.now.position >= 0 && state.now.position < labels.length ? state.now.position : changes[most] > 1e-6 ? most : look.uncertain;
    offer(this.after, labels, position);
    this.most.textContent = changes[most] > 1e-6
      ? t(position === most ? "variant.most" : "variant.moved", { p: percent(changes[position] ?? 0) }) : t("variant.same");
    return Promise.all([data, then].map((side) => side.next({ position: Math.min(position, side.size(side.mainKind).rows - 1), k: TOKENS })));
  }

  async update() {
    const mine = ++this.asked, { app } = this, { data } = app, { kind, layer, head } = app.where();
    this.edited.textContent = this.off().length ? app.t("variant.edited") : "";
    this.showSwitches();
    const then = await this.changed();
    const side = async (from) => {
      const [matrix, rows, cols] = await Promise.all([from.overview(kind, layer, head, CELLS, CELLS), from.labels(kind, "rows"), from.labels(kind, "cols")]);
      return { ...matrix, names: { rows, cols } };
    };
    const [says, , ...sides] = await Promise.all([this.predictions(then), this.showWritten(then, mine), side(data), side(then)]);
    if (mine !== this.asked) return;
    this.shown = { sides, max: Math.max(...sides.map(({ values }) => largest(values))), says };
    this.sheet.redraw();
  }

  layout(width) {
    const stacked = width < 560, gap = 36, wide = stacked ? width : (width - gap) / 2;
    if (!this.shown) return { stacked, gap, wide, height: 320 };
    const { sides, says } = this.shown, rows = Math.max(...sides.map((side) => side.rows)), cols = Math.max(...sides.map((side) => side.cols));
    const named = Math.max(rows, cols) <= LABELLED, longest = (axis) => named ? Math.max(...sides.map(({ names }) => longestName(names[axis]))) : 0;
    const left = named ? Math.min(84, longest("rows") + 12) : 0, over = longest("cols");
    const cell = Math.min(34, (wide - left - 0.62 * over) / cols, 420 / rows), labelled = named && cell >= 10;
    const above = labelled ? 0.72 * over + 22 : 8, bars = says ? 24 + STEP * Math.max(...says.map((side) => side.length)) : 0;
    const block = 26 + bars + above + Math.max(cell * rows, 40) + 24;
    return { stacked, gap, wide, left, cell, labelled, above, bars, block, height: stacked ? 2 * block : block };
  }

  draw(pen) {
    if (!this.shown) return;
    const at = this.layout(pen.width), { t } = this.app, { sides, says } = this.shown;
    sides.forEach((matrix, side) => {
      const x = at.stacked ? 0 : side * (at.wide + at.gap), y = at.stacked ? side * at.block : 0;
      pen.text(t(side ? "variant.after" : "variant.before"), x, y + 12, { size: 14, weight: 600 });
      if (says) this.bars(pen, says[side], says, x, y + 30, at.wide);
      this.matrix(pen, matrix, sides[0], x + at.left, y + 26 + at.bars + at.above, at);
    });
  }

  matrix(pen, matrix, before, x, y, { cell, left, labelled }) {
    const { theme, line, quiet, ink } = pen.colours, { max } = this.shown, { names: { rows, cols } } = matrix, wide = cell * matrix.cols, tall = cell * matrix.rows;
    pen.matrix(x, y, wide, tall, { ...matrix, colour: (v) => heat(scaled(v, max, this.app.state.now.log), theme) });
    pen.rect(x - 0.5, y - 0.5, wide + 1, tall + 1, { stroke: line });
    const size = nameSize(cell, 12), style = (label) => ({ size, fill: label.special ? quiet : ink });
    for (let r = 0; labelled && r < matrix.rows; r++) {
      pen.text(fitted(shown(rows[r]), left - 10, pen.font(size)), x - 8, y + (r + 0.5) * cell, { ...style(rows[r]), align: "right" });
    }
    for (let c = 0; labelled && c < matrix.cols; c++) columnName(pen, cols[c], x + (c + 0.5) * cell, y, cell, style(cols[c]));
    if (matrix.values.length > 2500 || matrix.values.length !== before.values.length) return;
    matrix.values.forEach((value, i) => {
      const r = Math.floor(i / matrix.cols), c = i % matrix.cols;
      pen.hit(x + c * cell, y + r * cell, cell, cell, { after: value, before: before.values[i], name: `${shown(rows[r])} → ${shown(cols[c])}` });
    });
  }

  bars(pen, list, both, x, y, wide) {
    const { accent, wash, ink } = pen.colours, left = 92, room = wide - left - 64;
    list.forEach((one, i) => {
      const at = y + i * STEP, was = both[0].find((other) => other.token === one.token)?.probability ?? 0;
      pen.text(fitted(shown(one.text), left - 12, pen.font(13)), x + left - 10, at + 12, { size: 13, align: "right" });
      pen.rect(x + left, at + 3, room, 18, { fill: wash, radius: 4 });
      pen.rect(x + left, at + 3, Math.max(2, room * one.probability), 18, { fill: accent, radius: 4 });
      pen.text(percent(one.probability), x + wide, at + 12, { size: 12, align: "right", fill: ink });
      pen.hit(x, at, wide, 26, { after: one.probability, before: was, name: shown(one.text) });
    });
  }

  rows() {
    const { sides: [a, b] } = this.shown, { rows, cols } = a.names;
    return [["row", "column", "before", "after"], ...Array.from(a.values, (v, i) => [tokenText(rows[Math.floor(i / a.cols)]), tokenText(cols[i % a.cols]), v, b.values[i]])];
  }
  close() { this.sheet.close(); }
}

/** The indices in the second list of a longest common subsequence. */
function common(a, b) {
  const length = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const found = new Set();
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { found.add(j); i++; j++; } else if (length[i + 1][j] >= length[i][j + 1]) i++;
    else j++;
  }
  return found;
}

/** A text with the words marked that are not in its longest common subsequence with the other. */
function marked(text, other) {
  if (!text.trim()) return [" ∅"];
  const words = text.match(/\s*\S+/g), kept = common(other.trim().split(/\s+/), words.map((word) => word.trim()));
  return words.map((word, i) => kept.has(i) ? word : el("mark", {}, word));
}

export default {
  id: "variant", panel: false, controls: ["kind", "layer", "head", "log"],
  fits: (app) => !app.source.offline && Boolean(app.model()),
  open: (host, app) => new Variant(host, app),
};
