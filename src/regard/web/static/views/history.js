// When each head learned its pattern: the scores at the checkpoints of the run, and the loss below.
import { count, el, refill, segmented } from "../dom.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";
import { writerName } from "../writers.js";

const TALL = 280;
const LOSS = 130;

class History {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0 });
    const { t } = app;
    this.choice = el("div", { class: "row" });
    this.says = el("p", { class: "told", "aria-live": "polite" });
    this.place = el("div", { style: "max-width:980px" });
    host.append(el("p", { class: "caption" }, t("history.caption")), this.choice, this.says, this.place);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.history"), draw: (pen) => this.draw(pen), height: () => this.shown ? TALL + (this.hasLoss() ? LOSS + 40 : 0) : 240,
      hover: (hit, event) => hit && tip.show(event, hit.value, hit.name, `${t("history.step")} ${count(hit.step)}`),
      press: (hit) => hit?.head !== undefined && app.go("heatmap", { layer: hit.layer, head: hit.head }),
    });
  }

  async update() {
    const mine = ++this.asked, { app } = this, { t, state, data } = app, { kind } = app.where();
    if (!this.shown || this.shown.kind !== kind) this.says.textContent = t("history.busy");
    const found = await data.history(kind), known = Object.keys(found.scores).filter((name) => found.scores[name].flat(2).some((value) => value !== null));
    if (mine !== this.asked) return;
    const most = known.reduce((a, b) => (found.births[b].length > (found.births[a]?.length ?? -1) ? b : a), known[0]);
    const name = known.includes(state.now.pattern) ? state.now.pattern : known.includes("induction") && found.births.induction.length ? "induction" : most;
    this.shown = { ...found, name, known };
    refill(this.choice, [segmented(t("view.patterns"), known.map((one) => [one, t(`pattern.${one}`)]), name, (pattern) => state.set({ pattern }))]);
    const [first, ...others] = [...found.births[name]].sort((a, b) => a.step - b.step), pattern = t(`pattern.${name}`);
    this.says.textContent = !first ? t("history.none", { pattern })
      : t(others.length ? "history.born.more" : "history.born", { pattern, head: writerName(t, { ...first, name: kind }), step: count(first.step), n: others.length }) + (first.step === found.steps[0] ? ` ${t("history.kept")}` : "");
    this.sheet.redraw();
  }

  hasLoss() { return this.shown.loss.some((value) => value !== null); }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { steps, scores, births, name, kind } = this.shown, { accent, ink, quiet, line } = pen.colours, left = 44, right = pen.width < 560 ? 74 : 150, room = pen.width - left - right;
    const low = steps[0], x = (step) => left + ((step - low) / (steps.at(-1) - low || 1)) * room, y = (value) => 12 + (1 - value) * (TALL - 50);
    for (const tick of [0, 0.5, 1]) {
      pen.path([left, y(tick), left + room, y(tick)], { stroke: line });
      pen.text(String(tick), left - 8, y(tick), { size: 11, align: "right", fill: quiet });
    }
    const born = new Map(births[name].map((one) => [`${one.layer}.${one.head}`, one.step])), names = [];
    const heads = scores[name][0].flatMap((line, layer) => line.map((_, head) => ({ layer, head })));
    for (const { layer, head } of heads.sort((a, b) => born.has(`${a.layer}.${a.head}`) - born.has(`${b.layer}.${b.head}`))) {
      const values = scores[name].map((at) => at[layer][head]), on = born.has(`${layer}.${head}`), called = writerName(t, { name: kind, layer, head });
      const points = values.flatMap((value, i) => value === null ? [] : [x(steps[i]), y(value)]);
      if (points.length > 2) for (let i = 0; i + 3 < points.length; i += 2) pen.path(points.slice(i, i + 4), { stroke: on ? accent : quiet, width: on ? 2.4 : 1, opacity: on ? 1 : 0.35 });
      values.forEach((value, i) => { if (value !== null) { if (on) pen.rect(x(steps[i]) - 3, y(value) - 3, 6, 6, { fill: accent, radius: 3 }); pen.hit(x(steps[i]) - 7, y(value) - 7, 14, 14, { value, name: called, step: steps[i], layer, head }); } });
      if (on && points.length) names.push({ called, layer, head, value: values.at(-1), y: points.at(-1) });
    }
    let free = 0;
    for (const one of names.sort((a, b) => a.y - b.y)) { // keep labels apart
      free = Math.max(one.y, free);
      pen.text(pen.width < 560 ? `${one.layer + 1}·${one.head + 1}` : one.called, left + room + 12, free, { size: 12, fill: ink });
      pen.hit(left + room + 6, free - 8, right - 6, 16, { value: one.value, name: one.called, step: steps.at(-1), layer: one.layer, head: one.head });
      free += 16;
    }
    const few = steps.filter((_, i) => i % Math.ceil(steps.length / (pen.width < 560 ? 3 : 7)) === 0);
    for (const step of few) pen.text(count(step), x(step), TALL - 22, { size: 11, align: "center", fill: quiet });
    pen.text(t("history.step"), left + room + 12, TALL - 22, { size: 11, fill: quiet });
    if (this.hasLoss()) this.losses(pen, x, left, room);
  }

  losses(pen, x, left, room) {
    const { t } = this.app, { steps, loss, repeat_loss: repeat } = this.shown, { accent, ink, quiet, line } = pen.colours, top = TALL + 18, tall = LOSS - 20;
    const max = Math.max(...loss, ...repeat.filter((value) => value !== null), 1e-9), y = (value) => top + (1 - value / max) * tall;
    pen.path([left, top + tall, left + room, top + tall], { stroke: line });
    for (const [label, at] of [[max.toFixed(1), top], ["0", top + tall]]) pen.text(label, left - 8, at, { size: 11, align: "right", fill: quiet });
    for (const [values, stroke, name] of [[loss, ink, t("history.loss")], [repeat, accent, t("history.repeat")]]) {
      for (let i = 0; i + 1 < steps.length; i++) if (values[i] !== null && values[i + 1] !== null) pen.path([x(steps[i]), y(values[i]), x(steps[i + 1]), y(values[i + 1])], { stroke, width: 2 });
      values.forEach((value, i) => value !== null && pen.hit(x(steps[i]) - 7, y(value) - 7, 14, 14, { value, name, step: steps[i] }));
    }
    pen.text(t("history.loss"), left, TALL + 2, { size: 12, fill: ink });
    pen.text(t("history.repeat"), left + 170, TALL + 2, { size: 12, fill: accent });
  }

  rows() {
    if (!this.shown) return [];
    const { steps, scores, loss, repeat_loss: repeat } = this.shown, out = [["step", "pattern", "layer", "head", "value"]];
    for (const [name, all] of Object.entries(scores)) all.forEach((at, s) => at.forEach((line, l) => line.forEach((value, h) => out.push([String(steps[s]), name, String(l), String(h), value ?? ""]))));
    steps.forEach((step, s) => out.push([String(step), "loss", "", "", loss[s] ?? ""], [String(step), "repeat loss", "", "", repeat[s] ?? ""]));
    return out;
  }

  close() { this.sheet.close(); }
}

export default {
  id: "history", panel: false, controls: ["kind"],
  fits: (app) => !app.source.offline && Boolean(app.model()?.history),
  open: (host, app) => new History(host, app),
};
