// The next token: the likeliest candidates, before and after temperature, top-k and top-p.
import { after, el, number, offer, percent, shown, slider } from "../dom.js";
import { fitted } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const BARS = 16;
const FEWEST = 3;
const LIKELY = 0.01; // anything less likely is in the tail
const STEP = 32;

class Next {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, whole: false });
    const { t, state } = app, { temperature, topk, topp } = state.now, set = after(60, (patch) => state.set(patch));
    this.after = el("select", { class: "field", "aria-label": t("next.after"), onchange: () => state.set({ position: Number(this.after.value) }) });
    this.tail = el("button", { type: "button", class: "plain", "data-do": "tail", hidden: true, onclick: () => { this.whole = !this.whole; this.show(); } });
    host.append(el("p", { class: "caption" }, t("next.caption")), el("div", { class: "row sliders" },
      el("label", {}, el("span", { class: "quiet" }, `${t("next.after")} `), this.after),
      slider(t("next.temperature"), { min: 0.05, max: 3, step: 0.05, name: "temperature" }, temperature, (v) => v.toFixed(2), (v) => set({ temperature: v })),
      slider(t("next.topk"), { min: 0, max: 50, step: 1, name: "topk" }, topk, (v) => v ? String(v) : t("next.all"), (v) => set({ topk: v })),
      slider(t("next.topp"), { min: 0.05, max: 1, step: 0.01, name: "topp" }, topp, (v) => v.toFixed(2), (v) => set({ topp: v }))),
    this.place = el("div"), this.tail);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.next"), draw: (pen) => this.draw(pen), height: () => 20 + STEP * (this.shown ? this.bars().length : 6),
      hover: (hit, event) => hit && tip.show(event, hit.now, shown(hit.text), `${t("next.plain")}: ${number(hit.plain)}`),
    });
  }

  async update() {
    const mine = ++this.asked, { data, state, look } = this.app;
    const labels = await data.labels(data.mainKind, "rows"), { temperature, topk, topp } = state.now;
    const position = state.now.position >= 0 && state.now.position < labels.length ? state.now.position : look.uncertain;
    const changes = { temperature, ...(topk ? { top_k: topk } : {}), ...(topp < 1 ? { top_p: topp } : {}) };
    const [plain, now] = await Promise.all([data.next({ position, k: BARS }), data.next({ position, k: 200, ...changes })]);
    if (mine !== this.asked) return;
    const chance = new Map(now.map((one) => [one.token, one.probability]));
    this.shown = plain.map((one) => ({ ...one, now: chance.get(one.token) ?? 0 }));
    offer(this.after, labels, position);
    this.show();
  }

  /** The tokens that are likely before or after the sliders; all of them if the tail is open. */
  bars() {
    const last = this.shown.findLastIndex((one) => Math.max(one.now, one.probability) >= LIKELY);
    return this.whole ? this.shown : this.shown.slice(0, Math.max(FEWEST, last + 1));
  }

  show() {
    const { t } = this.app, n = this.bars().length, shares = this.shown.slice(0, n).reduce((sum, one) => sum + one.now, 0);
    this.tail.hidden = !this.whole && n === this.shown.length;
    this.tail.textContent = this.whole ? t("next.fewer") : t("next.tail", { n: this.shown.length - n, p: percent(Math.max(0, 1 - shares)) });
    this.sheet.redraw();
  }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { accent, quiet, line, ink } = pen.colours, left = Math.min(170, pen.width * 0.3), right = 86;
    const bars = this.bars(), wide = pen.width - left - right, top = Math.max(...bars.map((one) => Math.max(one.now, one.probability)), 1e-9);
    bars.forEach((one, i) => {
      const y = 10 + i * STEP, cut = one.now === 0;
      pen.text(fitted(shown(one.text), left - 16, pen.font(15)), left - 12, y + STEP / 2, { size: 15, align: "right", fill: cut ? quiet : ink });
      pen.rect(left, y + 7, Math.max(cut ? 0 : 2, (wide * one.now) / top), STEP - 14, { fill: accent, radius: 4 });
      const mark = left + (wide * one.probability) / top; // the probability without the sliders
      pen.path([mark, y + 4, mark, y + STEP - 4], { stroke: ink, width: 1.5, opacity: 0.6 });
      pen.text(cut ? t("next.cut") : percent(one.now), pen.width, y + STEP / 2, { size: 13, align: "right", fill: cut ? quiet : ink });
      pen.hit(0, y, pen.width, STEP, { text: one.text, now: one.now, plain: one.probability });
    });
    pen.path([left, 8, left, 12 + STEP * bars.length], { stroke: line });
  }

  rows() { return [["token", "text", "probability", "changed"], ...this.shown.map((one) => [String(one.token), one.text, one.probability, one.now])]; }

  close() { this.sheet.close(); }
}

export default {
  id: "next", panel: false, controls: [],
  fits: (app) => !app.source.offline && Boolean(app.model()?.generates),
  open: (host, app) => new Next(host, app),
};
