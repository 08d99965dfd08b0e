// The beam search as a tree, from left to right; the text that won is drawn in colour.
import { el, number, shown } from "../dom.js";
import { fitted, textWidth } from "../pen.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const STEP = 30;
const SIZE = 14;

/** Nodes with x (by depth, each column as wide as its longest token) and y (leaves under each other). */
export function arranged(nodes, font) {
  const below = new Map(nodes.map((node) => [node.id, []])), by = new Map(nodes.map((node) => [node.id, node]));
  let root = null;
  for (const node of nodes) {
    if (node.parent === null || node.parent === undefined) root = node;
    else below.get(node.parent).push(node);
  }
  const wide = [], places = new Map();
  let line = 0;
  const place = (node, depth) => {
    wide[depth] = Math.max(wide[depth] ?? 0, Math.min(120, textWidth(shown(node.text), font)) + 34);
    const children = below.get(node.id).sort((a, b) => b.best - a.best || b.score - a.score);
    const ys = children.map((child) => place(child, depth + 1));
    const y = ys.length ? ys[0] : line++ * STEP + STEP;
    places.set(node.id, { depth, y, own: Math.min(120, textWidth(shown(node.text), font)) });
    return y;
  };
  place(root, 0);
  const starts = wide.reduce((xs, w) => [...xs, xs.at(-1) + w], [8]);
  for (const at of places.values()) Object.assign(at, { x: starts[at.depth], w: wide[at.depth] - 22 });
  return { places, by, width: starts.at(-1) + 20, height: (line + 1) * STEP };
}

class Beams {
  constructor(host, app) {
    Object.assign(this, { app, nodes: null, asked: 0 });
    const { t } = app;
    this.place = el("div", { style: "width:100%" });
    this.scroll = el("div", { style: "overflow-x:auto", tabindex: "0", "aria-label": t("view.beams") }, this.place);
    host.append(el("p", { class: "caption" }, t("beams.caption")), this.scroll);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.beams"), draw: (pen) => this.draw(pen), height: () => this.tree?.height ?? 200,
      hover: (hit, event) => hit ? tip.show(event, hit.score, this.path(hit), t("beams.score")) : tip.hide(), leave: () => tip.hide(),
    });
  }

  async update() {
    const mine = ++this.asked, { nodes } = await this.app.data.beams();
    if (mine !== this.asked) return;
    this.nodes = nodes;
    this.tree = arranged(nodes, `400 ${SIZE}px ${getComputedStyle(document.body).fontFamily}`);
    this.place.style.width = `${Math.max(this.scroll.clientWidth, this.tree.width + 80)}px`;
    this.sheet.redraw();
  }

  /** The text up to a node. */
  path(node) {
    const texts = [];
    for (let at = node; at; at = this.tree.by.get(at.parent)) texts.unshift(at.text);
    return texts.join("");
  }

  draw(pen) {
    if (!this.nodes) return;
    const { places } = this.tree, { accent, ink, quiet, line } = pen.colours;
    for (const node of this.nodes) {
      const at = places.get(node.id), from = places.get(node.parent);
      if (!from) { pen.rect(at.x, at.y - 3, 6, 6, { fill: accent, radius: 3 }); continue; }
      const x = from.depth === 0 ? from.x + 8 : from.x + from.own + 8, half = (at.x - 6 - x) / 2;
      pen.path([x, from.y, x + half, from.y, at.x - 6 - half, at.y, at.x - 6, at.y], { stroke: node.best ? accent : line, width: node.best ? 2 : 1.3 });
    }
    for (const node of this.nodes) {
      const at = places.get(node.id);
      if (!places.has(node.parent)) continue;
      pen.text(fitted(shown(node.text), at.w, pen.font(SIZE)), at.x, at.y, { size: SIZE, weight: node.best ? 600 : 400, fill: node.best ? accent : ink });
      if (node.final !== undefined) pen.text(number(node.score), at.x + at.own + 14, at.y, { size: 12, fill: quiet });
      pen.hit(at.x - 6, at.y - STEP / 2, at.w + 16, STEP, node);
    }
  }

  rows() { return [["id", "parent", "text", "log probability", "best"], ...this.nodes.map((n) => [String(n.id), String(n.parent ?? ""), n.text, n.score, String(n.best)])]; }

  close() { this.sheet.close(); tip.hide(); }
}

export default {
  id: "beams", panel: false, controls: [],
  fits: ({ look, source }) => !source.offline && Boolean(look.beams),
  open: (host, app) => new Beams(host, app),
};
