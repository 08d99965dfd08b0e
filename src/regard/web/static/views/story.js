// The story: one token's path through the model, stage by stage, with the actual numbers.
import { css, heat, palette, signed } from "../colour.js";
import { el, offer, percent, shown } from "../dom.js";
import { CanvasPen, SvgPen, fitted } from "../pen.js";
import { drawMap, layout } from "../story_map.js";
import { Surface } from "../surface.js";
import { explained } from "../terms.js";
import { tip } from "../tip.js";

const STAGES = ["tokens", "vectors", "qkv", "scores", "softmax", "mix", "heads", "layer", "layers", "end"];
const TERMS = {
  tokens: ["token"], vectors: ["embedding", "position"], qkv: ["query"], scores: ["score", "root", "mask"], softmax: ["softmax"], mix: ["value"],
  heads: ["head"], layer: ["residual", "norm", "ff"], layers: ["layer"], end: ["logit"],
};
const TOUR = 6; // seconds per stage: one minute in total
const ROW = 30;
const PICTURE = 240; // the largest width of the image
const labelRoom = (width) => Math.min(170, width * 0.3); // to the left of bars
const brief = (value) => value === null || value === undefined ? "−∞" : value.toFixed(2).replace("-", "−");
/** q · k times its factor, plus the bias of the position if there is one, is the score. */
const equation = ({ dot, score }, factor) => {
  const bias = score - dot * factor, plus = Math.abs(bias) < 0.005 ? "" : ` ${bias < 0 ? "−" : "+"} ${brief(Math.abs(bias))}`;
  return `${brief(dot)} × ${brief(factor)}${plus} = ${brief(score)}`;
};
/** The approximate width of a text: Hangul and Chinese characters are wider than letters. */
const letterWidths = (text, letter, wide) => [...text].reduce((sum, c) => sum + (c > "\u2e80" ? wide : letter), 0);

class Story {
  constructor(host, app) {
    Object.assign(this, { app, told: null, asked: 0, now: "tokens", surfaces: new Map() });
    const { t, state } = app;
    this.row = el("select", { class: "field", "data-axis": "row", "aria-label": t("story.row"), onchange: () => state.set({ row: Number(this.row.value), col: -1 }) });
    this.play = el("button", { type: "button", class: "second", "data-do": "tour", "aria-pressed": "false", onclick: () => this.tour() }, t("story.tour"));
    this.intro = el("p", { class: "lead" });
    this.map = el("div", { class: "map" });
    this.stages = el("ol", { class: "stages" });
    host.append(this.intro, el("div", { class: "row" }, el("label", {}, el("span", { class: "quiet" }, `${t("story.row")} `), this.row), this.play), el("div", { class: "story" }, this.map, this.stages));
    this.mapSheet = new Surface(this.map, { vector: true, label: t("story.map"), height: (w) => layout(app.model(), w).height, draw: (pen) => this.told && drawMap(pen, { model: app.model(), look: app.look, t, now: this.now, told: app.where().kind }),
      press: (hit) => hit && this.scrollTo(hit.stage) });
    this.picture = new Image();
    this.picture.addEventListener("load", () => ["tokens", "softmax"].forEach((stage) => this.surfaces.get(stage)?.redraw()));
    if (app.look.image) this.picture.src = app.source.imageUrl(app.look);
    this.sheet = { svg: () => this.svg(), png: () => this.png(), close: () => {} };
    this.seen = new IntersectionObserver((entries) => {
      const found = entries.filter((entry) => entry.isIntersecting).at(-1);
      if (found) { this.now = found.target.dataset.stage; this.mapSheet.redraw(); }
    }, { rootMargin: "-45% 0px -45% 0px" });
  }

  async update() {
    const mine = ++this.asked, { app } = this, { data, look, state, t } = app, { kind, layer, head } = app.where(), one = Math.max(0, head);
    const { rows } = data.size(kind), least = kind === "encoder" ? 0 : look.uncertain ?? rows - 1;
    const row = state.now.row >= 0 && state.now.row < rows ? state.now.row : least;
    const [told, rowLabels, colLabels, read] = await Promise.all([data.story(kind, layer, one, row), data.labels(kind, "rows"), data.labels(kind, "cols"), data.labels(kind === "cross" ? data.mainKind : kind, "rows")]);
    if (mine !== this.asked) return;
    this.told = { ...told, kind, layer, one, row, rowLabels, colLabels, read }; // a row of cross-attention is labelled with the token it predicts
    offer(this.row, read, row);
    this.intro.textContent = t(look.classes ? "story.intro.class" : !app.model().generates ? "story.intro.at" : look.image ? "story.intro.image" : app.model().source ? "story.intro.source" : "story.intro", { token: shown(read[row]), l: layer + 1, h: one + 1, word: shown(told.predictions[0].text) });
    this.build();
    this.mapSheet.redraw();
  }

  /** A card for each stage: the explanation, the numbers, the terms, and a link to the view that shows more. */
  build() {
    for (const surface of this.surfaces.values()) surface.close();
    this.seen.disconnect();
    this.surfaces.clear();
    const { t } = this.app, cards = STAGES.map((stage, i) => {
      const place = el("div"), drawing = this.drawings()[stage], open = this.opens()[stage];
      const card = el("li", { "data-stage": stage }, el("h3", {}, el("span", { class: "nth" }, String(i + 1)), this.title(stage)), el("p", {}, this.words(stage)), place,
        el("div", { class: "terms" }, TERMS[stage].map((term) => explained(this.app, term)),
          el("button", { type: "button", class: "plain open", "data-open": open.view, onclick: () => this.app.go(open.view, open.values) }, `${t("story.open", { view: t(`view.${open.view}`) })} →`)));
      this.surfaces.set(stage, new Surface(place, { vector: true, label: this.title(stage), ...drawing,
        hover: (hit, event) => hit && tip.show(event, hit.value, hit.name) }));
      this.seen.observe(card);
      return card;
    });
    this.stages.replaceChildren(...cards);
    for (const surface of this.surfaces.values()) surface.paint(); // at once: without its drawings the page would be shorter for a moment
  }

  title(stage) {
    const { look, t } = this.app, form = { tokens: look.image ? "patches" : "tokens", end: this.app.model().generates ? "end" : "box.class" }[stage] ?? stage;
    return t(`story.${form}`);
  }

  opens() {
    const { kind, layer, one, row, head } = this.told, heaviest = head.keys.reduce((a, b) => (b.weight > a.weight ? b : a)).index, { look } = this.app, model = this.app.model();
    const at = { kind, layer, head: one, row }, first = look.image ? "image" : "cross" in look.kinds ? "align" : "sentence";
    const last = look.classes || !model.generates ? { view: "contributions", values: {} } : { view: "next", values: { position: this.told.position } };
    const into = { view: "contributions", values: { position: this.told.position, token: -1 } };
    const offered = (opened) => (this.app.views().some((view) => view.id === opened.view) ? opened : { view: first, values: at });
    return { tokens: { view: first, values: at }, vectors: offered(into), qkv: { view: "walk", values: { ...at, col: heaviest } }, scores: { view: "walk", values: { ...at, col: heaviest } },
      softmax: { view: "heatmap", values: { ...at, col: heaviest } }, mix: { view: "walk", values: { ...at, col: heaviest } }, heads: { view: "grid", values: { kind } }, layer: offered(into), layers: offered(into), end: offered(last) };
  }

  /** The text of a stage, with its numbers. */
  words(stage) {
    const { app, told } = this, { t, look } = app, { embedding, head, block: parts, kind, layer, one, row, read, colLabels, rowLabels, predictions } = told;
    const heaviest = head.keys.reduce((a, b) => (b.weight > a.weight ? b : a)), token = shown(read[row]), n = read.length, key = shown(colLabels[heaviest.index]);
    const values = {
      tokens: { n: (kind === "cross" ? colLabels : read).filter((label) => label.box || !look.image).length, m: n }, vectors: { token, width: embedding.width }, qkv: { token, l: layer + 1, h: one + 1, width: head.width },
      scores: { token, key, dot: brief(heaviest.dot), score: brief(heaviest.score) }, softmax: { key, p: percent(heaviest.weight) }, mix: { p: percent(heaviest.weight), key },
      heads: { n: head.heads.length }, layer: parts, layers: { n: told.layers.length - 1 }, end: { word: shown(predictions[0].text), p: percent(predictions[0].probability), token: shown(read[told.position] ?? rowLabels[row]) },
    }[stage];
    const form = { tokens: look.image ? (kind === "cross" ? ".image" : ".patches") : kind === "cross" ? ".source" : "", vectors: this.embeddingForm(embedding),
      qkv: kind === "cross" ? ".cross" : "", scores: head.factor !== null && Math.abs(heaviest.dot / Math.sqrt(head.width) - heaviest.score) < 0.005 ? "" : ".other", softmax: { linear: ".linear", sigmoid: ".sigmoid" }[head.normaliser] ?? "", layer: parts.neurons === undefined ? ".experts" : told.norm_place === "post" ? ".post" : "", end: look.classes ? ".class" : app.model().generates ? "" : ".at" }[stage] ?? "";
    const says = t(`story.${stage}${form}.says`, values);
    const more = { vectors: embedding.width > embedding.sum.length && t("story.cut"), qkv: app.where().head < 0 && t("walk.onehead", { h: one + 1 }) }[stage];
    return more ? `${says} ${more}` : says;
  }

  embeddingForm({ parts, normed }) {
    if (!Object.keys(parts).length) return ".patches";
    if (!("position" in parts)) return ".rope";
    return "segment" in parts && normed ? ".segment" : "";
  }

  drawings() {
    const { told, app } = this, { t } = app, { head, embedding, block: parts, colLabels, read, row, predictions, layers } = told, name = (key) => shown(colLabels[key.index]);
    const strips = (lists) => this.strips(lists), keys = head.keys, heaviest = keys.reduce((a, b) => (b.weight > a.weight ? b : a));
    const label = { token: t("part.token"), position: t("part.position"), segment: t("part.segment") };
    const added = Object.entries(embedding.parts), entries = added.length > 1 || embedding.normed ? added : []; // a single part equals the sum
    return {
      tokens: this.chips(),
      vectors: strips([...entries.map(([part, values], i) => [`${i ? "+ " : ""}${label[part]}`, values]), [entries.length ? `${embedding.normed ? "→" : "="} ${shown(read[row])}` : shown(read[row]), embedding.sum]]),
      qkv: strips([[`q  ${shown(read[row])}`, head.q], [`k  ${name(heaviest)}`, heaviest.k], [`v  ${name(heaviest)}`, heaviest.v]]),
      scores: this.bars(keys.map((key) => ({ text: name(key), value: key.score, said: key.score === null ? t("story.masked") : head.factor === null ? brief(key.score) : equation(key, head.factor) })), true),
      softmax: this.overPicture(this.bars([...keys.map((key) => ({ text: name(key), value: key.weight, said: percent(key.weight) })), ...(head.others ? [{ text: t("story.others", { n: head.others }), value: head.rest, said: percent(head.rest), quiet: true }] : []),
        ...(head.sink === null || head.sink === undefined ? [] : [{ text: t("story.sink"), value: head.sink, said: percent(head.sink), quiet: true }])])),
      mix: strips(this.mixed(name)),
      heads: this.joined(),
      layer: strips([[t("story.before"), parts.before], [t("story.wrote"), parts.attention], [t("story.between"), parts.between], [`+ ${t("term.cross")}`, parts.cross], [t("story.ff"), parts.ff], [t("story.after"), parts.after]].filter(([, values]) => values)),
      layers: this.bars(layers.map((one) => ({ text: one.layer < 0 ? t("story.input") : t("variant.nth", { l: one.layer + 1 }), value: one.probability, said: `${shown(one.text)}  ${percent(one.probability)}` }))),
      end: this.bars(predictions.map((one) => ({ text: shown(one.text), value: one.probability, said: percent(one.probability) }))),
    };
  }

  /** The largest weighted values, all others, and their sum: the output of the head. */
  mixed(name) {
    const { head: { keys, output, others } } = this.told, { t } = this.app, most = keys.filter((key) => key.weight > 0.005).sort((a, b) => b.weight - a.weight).slice(0, 4);
    const rest = output.map((value, n) => most.reduce((left, key) => left - key.weight * key.v[n], value)), isAll = keys.filter((key) => key.weight > 0).length + others === most.length;
    return [...most.map((key, i) => [`${i ? "+ " : ""}${key.weight.toFixed(2)} × v ${name(key)}`, key.v.map((v) => v * key.weight)]),
      ...(isAll ? [] : [[`+ ${t("walk.rest")}`, rest]]), [t("story.mixed"), output]];
  }

  /** Tokens as chips, of the source and of the written text; the followed one in colour. */
  chips() {
    const { kind, colLabels, read, row } = this.told, { t, look } = this.app, lines = kind === "cross" ? [[look.image ? t("story.box.image") : t("source"), colLabels, -1], [t("story.box.decoder"), read, row]] : [["", read, row]];
    const place = (width) => {
      const out = [];
      let y = 0;
      for (const [title, all, at] of lines) {
        let labels = all;
        if (title) { out.push({ title, y: y + 10 }); y += 24; }
        if (labels.some((label) => label.box)) {
          const [, tall] = this.pictureSize(width);
          out.push({ labels, at, y, picture: true });
          y += tall + 12;
          labels = labels.filter((label) => !label.box); // the class token
        }
        let x = 0;
        const from = Math.max(0, Math.min(at < 0 ? 0 : at - 20, labels.length - 60)), some = labels.slice(from, from + 60);
        some.forEach((label, i) => {
          const text = shown(label), wide = Math.min(150, 22 + letterWidths(text, 8.2, 14));
          if (x + wide > width && x) { x = 0; y += 36; }
          out.push({ text, x, y, wide, on: from + i === at, special: label.special });
          x += wide + 6;
        });
        y += 46;
      }
      return { out, height: y };
    };
    return {
      height: (width) => place(width).height,
      draw: (pen) => place(pen.width).out.forEach((one) => {
        const { accent, paper, line, ink, quiet } = pen.colours;
        if (one.picture) { this.drawPicture(pen, 0, one.y, one.labels, (label, i) => (i === one.at ? { stroke: accent, width: 3 } : null)); return; }
        if (one.title) { pen.text(one.title, 0, one.y, { size: 12, fill: quiet }); return; }
        pen.rect(one.x, one.y, one.wide, 30, { fill: one.on ? accent : "none", stroke: one.on ? accent : line, radius: 8 });
        pen.text(fitted(one.text, one.wide - 10, pen.font(14)), one.x + one.wide / 2, one.y + 15, { size: 14, align: "center", fill: one.on ? paper : one.special ? quiet : ink });
      }),
    };
  }

  pictureSize(width) {
    const { naturalWidth, naturalHeight } = this.picture, wide = Math.min(0.7 * width, PICTURE);
    return [wide, naturalWidth ? (wide * naturalHeight) / naturalWidth : wide];
  }

  /** The image cut into its patches; ``style`` returns how a patch is painted over, null for not at all. */
  drawPicture(pen, x, y, labels, style) {
    const [wide, tall] = this.pictureSize(pen.width), { paper } = pen.colours;
    if (this.picture.complete && this.picture.naturalWidth) pen.image(this.picture, x, y, wide, tall);
    labels.forEach((label, i) => {
      if (!label.box) return;
      const [x0, y0, x1, y1] = label.box, box = [x + x0 * wide, y + y0 * tall, (x1 - x0) * wide, (y1 - y0) * tall], painted = style(label, i);
      if (painted?.fill) pen.rect(...box, painted);
      pen.rect(...box, { stroke: paper, width: Math.min(3, box[2] / 8) });
      if (painted?.stroke) pen.rect(...box, painted);
      pen.hit(...box, painted?.value === undefined ? { value: shown(label) } : { value: painted.value, name: shown(label) });
    });
  }

  /** A drawing of weights, and below it the patches of the image with these weights. */
  overPicture(drawing) {
    const { colLabels, head } = this.told, weights = new Map(head.keys.map((key) => [key.index, key.weight])), most = Math.max(...weights.values());
    if (!colLabels.some((label) => label.box)) return drawing;
    return {
      height: (width) => drawing.height(width) + this.pictureSize(width)[1] + 16,
      draw: (pen) => {
        drawing.draw(pen);
        this.drawPicture(pen, labelRoom(pen.width), drawing.height(pen.width) + 12, colLabels, (label, i) => {
          const value = weights.get(i), share = (value ?? 0) / most;
          return { fill: css(heat(share, pen.colours.theme)), opacity: 0.15 + 0.6 * share, value };
        });
      },
    };
  }

  /** Vectors as strips of colours: accent for positive, slate for negative. */
  strips(lists) {
    return {
      height: (width) => lists.length * (width < 460 ? 50 : 34),
      draw: (pen) => {
        const small = pen.width < 460, left = small ? 0 : 170, step = small ? 50 : 34, max = Math.max(...lists.flatMap(([, values]) => values.map(Math.abs)), 1e-9);
        lists.forEach(([name, values], i) => {
          const y = i * step + (small ? 20 : 2), wide = (pen.width - left) / values.length;
          pen.text(fitted(name, small ? pen.width : left - 14, pen.font(13)), small ? 0 : left - 12, small ? y - 10 : y + 13, { size: 13, align: small ? "left" : "right", fill: pen.colours.ink });
          values.forEach((value, n) => {
            pen.rect(left + n * wide, y, wide - (wide > 5 ? 1 : 0), 26, { fill: css(signed(value, max, pen.colours.theme)), radius: wide > 6 ? 2 : 0 });
            pen.hit(left + n * wide, y, wide, 26, { value, name: `${name} [${n}]` });
          });
        });
      },
    };
  }

  /** One bar per key or word with its number; scores may be negative. */
  bars(list, isSigned = false) {
    return {
      height: () => list.length * ROW + 4,
      draw: (pen) => {
        const { accent, ink, quiet, wash, line } = pen.colours, left = labelRoom(pen.width), right = Math.min(240, 0.6 * pen.width, Math.max(...list.map(({ said }) => letterWidths(said, 7.4, 13))) + 12), room = pen.width - left - right;
        const values = list.map(({ value }) => value ?? 0), low = isSigned ? Math.min(0, ...values) : 0, high = isSigned ? Math.max(0.01, ...values) : 1, zero = left + (-low / (high - low)) * room;
        list.forEach((one, i) => {
          const y = i * ROW, size = (Math.abs(one.value ?? 0) / (high - low)) * room;
          pen.text(fitted(one.text, left - 14, pen.font(14)), left - 12, y + ROW / 2, { size: 14, align: "right", fill: one.quiet || one.value === null ? quiet : ink });
          if (!isSigned) pen.rect(left, y + 7, room, ROW - 14, { fill: wash, radius: 4 });
          if (one.value !== null) pen.rect(one.value < 0 ? zero - size : zero, y + 7, Math.max(2, size), ROW - 14, { fill: one.value < 0 || one.quiet ? quiet : accent, radius: 4 });
          pen.text(fitted(one.said, right - 8, pen.font(13)), pen.width, y + ROW / 2, { size: 13, align: "right", fill: one.value === null ? quiet : ink });
          pen.hit(0, y, pen.width, ROW, { value: one.value ?? one.said, name: one.text });
        });
        if (isSigned) pen.path([zero, 2, zero, list.length * ROW], { stroke: line });
      },
    };
  }

  /** The outputs of all heads side by side: the input of W_o. */
  joined() {
    const { head: { heads }, one, block: { attention } } = this.told, { t } = this.app;
    return {
      height: () => 120,
      draw: (pen) => {
        const gap = 4, wide = (pen.width - gap * (heads.length - 1)) / heads.length, { quiet, accent, theme } = pen.colours, max = Math.max(...heads.flat().map(Math.abs), 1e-9), top = Math.max(...(attention ?? [0]).map(Math.abs), 1e-9);
        heads.forEach((values, h) => {
          const x = h * (wide + gap), cell = wide / values.length;
          if (wide > 16) pen.text(String(h + 1), x + wide / 2, 8, { size: 11, align: "center", fill: h === one ? accent : quiet });
          values.forEach((value, n) => { pen.rect(x + n * cell, 18, cell, 26, { fill: css(signed(value, max, theme)) }); pen.hit(x + n * cell, 18, cell, 26, { value, name: `${t("head")} ${h + 1} [${n}]` }); });
          if (h === one) pen.rect(x, 18, wide, 26, { stroke: accent, width: 2, radius: 2 });
          pen.path([x + wide / 2, 46, x + wide / 2, 60, pen.width / 2, 62, pen.width / 2, 76], { stroke: quiet, opacity: 0.4 });
        });
        pen.text("W_o", pen.width / 2 + 10, 70, { size: 11, fill: quiet });
        (attention ?? []).forEach((value, n, all) => { const cell = pen.width / all.length; pen.rect(n * cell, 80, cell - (cell > 5 ? 1 : 0), 26, { fill: css(signed(value, top, theme)) }); pen.hit(n * cell, 80, cell, 26, { value, name: `${t("story.wrote")} [${n}]` }); });
      },
    };
  }

  scrollTo(stage) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.stages.querySelector(`[data-stage="${stage}"]`)?.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "center" });
  }

  /** Start or pause the one-minute tour from the first stage to the last. */
  tour() {
    const stop = () => { clearInterval(this.timer); this.timer = 0; };
    if (this.timer) stop();
    else {
      let nth = Math.max(0, STAGES.indexOf(this.now));
      const step = () => { if (nth >= STAGES.length) { stop(); this.showTour(); } else this.scrollTo(STAGES[nth++]); };
      if (nth === STAGES.length - 1) nth = 0;
      step();
      this.timer = setInterval(step, TOUR * 1000);
    }
    this.showTour();
  }

  showTour() {
    this.play.textContent = this.app.t(this.timer ? "story.pause" : "story.tour");
    this.play.setAttribute("aria-pressed", String(Boolean(this.timer)));
  }

  /** Titles and drawings of all stages, stacked for the exported picture. */
  paper(width) {
    let y = 0;
    return STAGES.map((stage, i) => {
      const { draw, heightOf } = this.surfaces.get(stage), at = { title: `${i + 1}  ${this.title(stage)}`, y, draw, height: Math.ceil(heightOf(width)) };
      y += at.height + 62;
      return at;
    });
  }

  svg() {
    const width = 820, colours = palette(), parts = this.paper(width), last = parts.at(-1), inner = parts.map(({ title, y, draw, height }) => {
      const pen = new SvgPen(width, height + 40, colours), drawing = new SvgPen(width, height, colours);
      pen.text(title, 0, 14, { size: 16, weight: 600 });
      draw(drawing);
      return `<g transform="translate(20 ${y + 20})">${pen.parts.join("")}<g transform="translate(0 34)">${drawing.parts.join("")}</g></g>`;
    });
    const whole = new SvgPen(width + 40, last.y + last.height + 80, colours);
    whole.parts.push(...inner);
    return whole.toString(colours.paper);
  }

  async png() {
    const width = 820, colours = palette(), parts = this.paper(width), last = parts.at(-1), canvas = document.createElement("canvas");
    Object.assign(canvas, { width: 2 * (width + 40), height: 2 * (last.y + last.height + 80) });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, canvas.width, canvas.height);
    for (const { title, y, draw, height } of parts) {
      context.save();
      context.translate(20, y + 20);
      const pen = new CanvasPen(context, width, height, colours);
      pen.text(title, 0, 14, { size: 16, weight: 600 });
      context.translate(0, 34);
      draw(pen);
      context.restore();
    }
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  rows() {
    const { head, layers, predictions, colLabels, embedding, block } = this.told, out = [["stage", "name", "value"]];
    const vector = (stage, name, values) => values.forEach((value, i) => out.push([stage, `${name}[${i}]`, value]));
    for (const [name, values] of [...Object.entries(embedding.parts), ["sum", embedding.sum]]) vector("vectors", name, values);
    vector("qkv", "q", head.q);
    for (const key of head.keys) out.push(["scores", colLabels[key.index].text, key.score ?? -Infinity], ["softmax", colLabels[key.index].text, key.weight]);
    vector("mix", "output", head.output);
    for (const name of ["before", "attention", "between", "cross", "ff", "after"]) if (block[name]) vector("layer", name, block[name]);
    for (const one of layers) out.push(["layers", `${one.layer} ${one.text}`, one.probability]);
    return [...out, ...predictions.map((one) => ["end", one.text, one.probability])];
  }

  close() {
    clearInterval(this.timer);
    this.seen.disconnect();
    this.mapSheet.close();
    for (const surface of this.surfaces.values()) surface.close();
  }
}

export default {
  id: "story", panel: false, controls: ["kind", "layer", "head"],
  fits: (app) => !app.source.offline && Boolean(app.model()?.layered) && !app.model().state_space,
  open: (host, app) => new Story(host, app),
};
