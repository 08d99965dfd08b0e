// Mixture of experts: the text in the colours of its experts, and how often each is chosen.
import { css, hue, inkOn } from "../colour.js";
import { el, number, percent, shown } from "../dom.js";
import { fitted, textWidth } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const STEP = 36; // height of a line of tokens
const SIZE = 15;
const WIDEST = 180; // maximum width of a token
const LEGEND = 26;

class ExpertColours {
  constructor(host, app) {
    Object.assign(this, { app, shown: null, asked: 0, over: -1 });
    host.append(el("p", { class: "caption" }, app.t("experts.caption")), this.place = el("div"));
    this.sheet = new Surface(this.place, {
      vector: true, label: app.t("view.experts"), draw: (pen) => this.draw(pen), height: () => this.height(),
      hover: (hit, event) => this.hover(hit, event), leave: () => { this.over = -1; this.sheet.redraw(); },
    });
  }

  async update() {
    const mine = ++this.asked, { data, look } = this.app, { kind: given, layer } = this.app.where();
    const kind = given === "cross" && "self" in look.kinds ? "self" : given;
    const routing = await data.experts(kind, layer);
    if (mine !== this.asked) return;
    this.shown = routing;
    this.sheet.redraw();
  }

  /** The position of each token when the text is wrapped to this width. */
  places(width, font) {
    let x = 0, line = 0;
    return this.shown.experts.map((_, i) => {
      const text = fitted(shown(this.shown.tokens[i]), WIDEST, font), wide = textWidth(text, font) + 16;
      if (x + wide > width && x > 0) { x = 0; line += 1; }
      const place = { text, x, y: line * STEP, wide };
      x += wide + 6;
      return place;
    });
  }

  height() {
    if (!this.shown) return 6 * STEP;
    const places = this.places(this.place.clientWidth || 600, `${SIZE}px sans-serif`);
    return (places.at(-1)?.y ?? 0) + 2 * STEP + LEGEND * this.shown.load.length;
  }

  hover(hit, event) {
    this.over = hit?.expert ?? -1;
    if (hit) tip.show(event, hit.value, ...hit.lines);
    this.sheet.redraw();
  }

  draw(pen) {
    if (!this.shown) return;
    const { t } = this.app, { experts, weights, load, tokens } = this.shown, { ink, wash, theme } = pen.colours;
    const places = this.places(pen.width, pen.font(SIZE)), colour = (e) => hue(e, load.length, theme);
    const opacity = (e) => this.over < 0 || this.over === e ? 1 : 0.25;
    places.forEach(({ text, x, y, wide }, i) => {
      const [first] = experts[i], lines = experts[i].map((e, n) => `${t("experts.one", { n: e + 1 })}: ${number(weights[i][n])}`);
      pen.rect(x, y + 4, wide, STEP - 8, { fill: css(colour(first)), radius: 6, opacity: opacity(first) });
      pen.text(text, x + 8, y + STEP / 2, { size: SIZE, fill: inkOn(colour(first)) });
      pen.hit(x, y, wide, STEP, { expert: first, value: weights[i][0], lines: [shown(tokens[i]), ...lines] });
    });
    const top = (places.at(-1)?.y ?? 0) + 1.6 * STEP, most = Math.max(...load), left = 110, wide = Math.min(420, pen.width - left - 70);
    load.forEach((share, e) => {
      const y = top + e * LEGEND;
      pen.text(t("experts.one", { n: e + 1 }), 0, y + LEGEND / 2, { size: 13, fill: ink });
      pen.rect(left, y + 5, wide, LEGEND - 10, { fill: wash, radius: 4 });
      pen.rect(left, y + 5, (wide * share) / most, LEGEND - 10, { fill: css(colour(e)), radius: 4, opacity: opacity(e) });
      pen.text(percent(share), left + wide + 62, y + LEGEND / 2, { size: 13, align: "right", fill: ink });
      pen.hit(0, y, pen.width, LEGEND, { expert: e, value: share, lines: [t("experts.share", { n: e + 1 })] });
    });
  }

  rows() {
    const { tokens, experts, weights } = this.shown;
    return [["token", "expert", "weight"], ...experts.flatMap((own, i) => own.map((e, n) => [tokens[i].text, e, weights[i][n]]))];
  }

  close() { this.sheet.close(); }
}

export default {
  id: "experts", panel: false, controls: ["kind", "layer"],
  fits: (app) => !app.source.offline && Boolean(app.model()?.experts),
  open: (host, app) => new ExpertColours(host, app),
};
