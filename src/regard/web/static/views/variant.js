// What if: no causal mask, another scale, heads switched off; the weights and the next token, before and after.
import { css, heat, scaled } from "../colour.js";
import { Data } from "../data.js";
import { after, check, el, number, offer, shown, slider } from "../dom.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const CELLS = 160;
const WORDS = 6;

class Variant {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, looks: new Map() });
    const { t, state } = app, set = after(150, (patch) => state.set(patch));
    this.switches = el("div");
    this.boards = el("div");
    this.settings = el("div", { class: "row" });
    this.edited = el("p", { class: "caption" });
    host.append(el("p", { class: "caption" }, t("variant.caption")), this.settings, this.switches, this.edited, this.boards);
    this.board = new Surface(this.switches, {
      label: t("variant.off"), draw: (pen) => this.heads(pen), height: () => 44 + app.data.size(app.where().kind).layers * 26,
      press: (hit) => hit && this.toggle(hit), hover: (hit, event) => hit ? tip.show(event, t("grid.cell", hit), t("variant.off")) : tip.hide(), leave: () => tip.hide(),
    });
    this.sheet = new Surface(this.boards, {
      vector: true, label: t("view.variant"), draw: (pen) => this.draw(pen), height: (w) => this.layout(w).height,
      hover: (hit, event) => hit ? tip.show(event, hit.after, hit.name, `${t("variant.before")}: ${number(hit.before)}`) : tip.hide(), leave: () => tip.hide(),
    });
    this.set = set;
    this.showSettings();
  }

  showSettings() {
    const { t, state } = this.app, { causal, scale } = state.now;
    this.after ??= el("select", { class: "field", "aria-label": t("next.after"), onchange: () => state.set({ position: Number(this.after.value) }) });
    const place = this.app.model().generates ? el("label", {}, el("span", { class: "quiet" }, `${t("view.next")}: ${t("next.after")} `), this.after) : "";
    this.settings.replaceChildren(check(t("variant.causal"), causal, (on) => state.set({ causal: on })),
      slider(t("variant.scale"), { min: -3, max: 3, step: 0.25, name: "scale" }, Math.log2(scale || 1), (v) => String(Number((2 ** v).toPrecision(3))), (v) => this.set({ scale: 2 ** v })),
      el("button", { type: "button", class: "plain", "data-do": "reset", onclick: () => { state.set({ causal: true, scale: 1, off: "" }); this.showSettings(); } }, t("variant.reset")), place);
  }

  /** The token after which the next one is asked for. */
  position(labels) {
    const { position } = this.app.state.now;
    return position >= 0 && position < labels.length ? position : labels.length - 1;
  }

  off() { return this.app.state.now.off.split(" ").filter(Boolean); }

  toggle({ l, h }) {
    const { kind } = this.app.where(), name = `${kind}.${l}.${h}`, now = this.off();
    this.app.state.set({ off: (now.includes(name) ? now.filter((one) => one !== name) : [...now, name]).join(" ") });
  }

  variant() {
    const { causal, scale } = this.app.state.now;
    const off = this.off().map((name) => name.split(".")).map(([kind, l, h]) => [kind, Number(l), Number(h)]);
    return { causal, scale, off };
  }

  /** The same text under the changed attention, with the same target where there is one: only the attention differs. */
  changed() {
    const { app } = this, variant = this.variant(), key = JSON.stringify(variant);
    if (!this.looks.has(key)) {
      const request = app.composer.request(variant);
      delete request.generate;
      if (app.model().source && app.look.target) request.target = app.look.target;
      const asked = app.source.look(request).then((look) => new Data(app.source, look));
      asked.catch(() => this.looks.delete(key));
      this.looks.set(key, asked);
    }
    return this.looks.get(key);
  }

  async update() {
    const mine = ++this.asked, { app } = this, { data } = app, { kind, layer, head } = app.where();
    this.edited.textContent = this.off().length ? app.t("variant.edited") : "";
    this.board.redraw();
    const then = await this.changed(), n = Math.min(CELLS, data.size(kind).rows, then.size(kind).rows);
    const next = async (from) => {
      if (!app.model().generates) return null;
      return from.next({ position: this.position(await from.labels("self", "rows")), k: WORDS });
    };
    if (app.model().generates) {
      const labels = await data.labels("self", "rows");
      offer(this.after, labels, this.position(labels));
    }
    const [rows, cols, a, b, nextA, nextB] = await Promise.all([data.labels(kind, "rows"), data.labels(kind, "cols"),
      data.overview(kind, layer, head, CELLS, CELLS), then.overview(kind, layer, head, CELLS, CELLS), next(data), next(then)]);
    if (mine !== this.asked) return;
    const max = [...a.values, ...b.values].reduce((x, y) => Math.max(x, y), 0);
    this.shown = { rows, cols, sides: [a, b], max, next: nextA && [nextA, nextB], n };
    this.sheet.redraw();
  }

  heads(pen) {
    const { kind } = this.app.where(), { layers, heads } = this.app.data.size(kind), off = this.off(), { t } = this.app;
    const wide = Math.min(34, (pen.width - 30) / heads), { accent, ink, line, quiet } = pen.colours;
    pen.text(`${t("variant.off")}: ${off.length ? off.join(", ") : t("variant.none")}`, 0, 12, { size: 13, fill: quiet });
    for (let l = 0; l < layers; l++) {
      pen.text(String(l), 8, 40 + l * 26, { size: 12, fill: quiet, align: "center" });
      for (let h = 0; h < heads; h++) {
        const x = 24 + h * wide, y = 30 + l * 26, gone = off.includes(`${kind}.${l}.${h}`);
        pen.rect(x, y, wide - 4, 20, gone ? { stroke: line, radius: 5 } : { fill: accent, radius: 5, opacity: 0.16 });
        pen.text(String(h), x + wide / 2 - 2, y + 10, { size: 11, align: "center", fill: gone ? quiet : ink });
        if (gone) pen.path([x + 6, y + 10, x + wide - 10, y + 10], { stroke: accent, width: 1.5 });
        pen.hit(x, y, wide, 24, { l, h });
      }
    }
  }

  layout(width) {
    const stacked = width < 560, gap = 36, wide = stacked ? width : (width - gap) / 2;
    if (!this.shown) return { stacked, gap, wide, height: 320 };
    const { sides: [a], next } = this.shown, left = a.cols <= 40 ? 84 : 0;
    const cell = Math.min(34, (wide - left) / a.cols), tall = Math.max(cell * a.rows, 40);
    const block = 34 + tall + (next ? 30 + WORDS * 28 : 0) + 20;
    return { stacked, gap, wide, left, cell, tall, block, height: stacked ? 2 * block : block };
  }

  draw(pen) {
    if (!this.shown) return;
    const at = this.layout(pen.width), { t } = this.app, { sides, next, rows, max } = this.shown;
    sides.forEach((matrix, side) => {
      const x = at.stacked ? 0 : side * (at.wide + at.gap), y = at.stacked ? side * at.block : 0;
      pen.text(t(side ? "variant.after" : "variant.before"), x, y + 12, { size: 14, weight: 600 });
      this.matrix(pen, matrix, sides[0], x + at.left, y + 34, at, max, rows);
      if (next) this.bars(pen, next[side], next, x, y + 34 + at.tall + 24, at.wide);
    });
  }

  matrix(pen, matrix, before, x, y, { cell, left }, max, rows) {
    const { theme, line, quiet, ink } = pen.colours, { cols } = this.shown, wide = cell * matrix.cols, tall = cell * matrix.rows;
    pen.matrix(x, y, wide, tall, { ...matrix, colour: (v) => heat(scaled(v, max, this.app.state.now.log), theme) });
    pen.rect(x - 0.5, y - 0.5, wide + 1, tall + 1, { stroke: line });
    for (let r = 0; left && cell >= 10 && r < matrix.rows; r++) {
      pen.text(fitted(shown(rows[r]), left - 10, pen.font(12)), x - 8, y + (r + 0.5) * cell, { size: 12, align: "right", fill: rows[r].special ? quiet : ink });
    }
    if (matrix.rows * matrix.cols > 2500) return;
    matrix.values.forEach((value, i) => {
      const r = Math.floor(i / matrix.cols), c = i % matrix.cols;
      pen.hit(x + c * cell, y + r * cell, cell, cell, { after: value, before: before.values[i], name: `${shown(rows[r])} → ${shown(cols[c])}` });
    });
  }

  bars(pen, list, both, x, y, wide) {
    const { accent, wash, ink } = pen.colours, left = 92, room = wide - left - 84, top = Math.max(...both.flat().map((one) => one.probability));
    list.forEach((one, i) => {
      const at = y + i * 28, was = both[0].find((other) => other.token === one.token)?.probability ?? 0;
      pen.text(fitted(shown(one.text), left - 12, pen.font(13)), x + left - 10, at + 12, { size: 13, align: "right" });
      pen.rect(x + left, at + 3, room, 18, { fill: wash, radius: 4 });
      pen.rect(x + left, at + 3, Math.max(2, (room * one.probability) / top), 18, { fill: accent, radius: 4 });
      pen.text(number(one.probability), x + wide, at + 12, { size: 12, align: "right", fill: ink });
      pen.hit(x, at, wide, 26, { after: one.probability, before: was, name: shown(one.text) });
    });
  }

  rows() {
    const { sides: [a, b], rows, cols } = this.shown;
    return [["row", "column", "before", "after"], ...Array.from(a.values, (v, i) => [shown(rows[Math.floor(i / a.cols)]), shown(cols[i % a.cols]), v, b.values[i]])];
  }
  close() { this.board.close(); this.sheet.close(); tip.hide(); }
}

export default {
  id: "variant", panel: false, controls: ["kind", "layer", "head", "log"],
  fits: (app) => !app.source.offline && Boolean(app.model()),
  open: (host, app) => new Variant(host, app),
};
