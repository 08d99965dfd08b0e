// The beam search as a tree, from left to right: the best hypothesis in colour, dropped ones in grey.
import { count, el, number, shown } from "../dom.js";
import { fitted, textWidth } from "../pen.js";
import { Player } from "../player.js";
import { Surface } from "../surface.js";
import { tip } from "../tip.js";

const STEP = 27;
const SIZE = 14;
const WIDEST = 130;
const SCORE = 92; // room for the score after the last token

const rank = (node) => (node.best ? 2 : node.kept ? 1 : 0);

/** Positions of the nodes: x by depth, with columns as wide as their longest tokens; y by leaf. */
export function arranged(nodes, font) {
  const below = new Map(nodes.map((node) => [node.id, []])), by = new Map(nodes.map((node) => [node.id, node]));
  for (const node of nodes) below.get(node.parent)?.push(node);
  const wide = [], places = new Map();
  let line = 0;
  const place = (node, depth) => {
    const own = Math.min(WIDEST, textWidth(shown(node.label), font));
    wide[depth] = Math.max(wide[depth] ?? 0, (node.parent === null ? 0 : own) + 30);
    const ys = below.get(node.id).sort((a, b) => rank(b) - rank(a) || b.score - a.score).map((child) => place(child, depth + 1));
    const y = ys.length ? ys[0] : line++ * STEP + STEP;
    const until = Math.max(depth, ...below.get(node.id).map((child) => places.get(child.id).until)); // the last step that continues it
    places.set(node.id, { depth, y, own, leaf: !ys.length, until });
    return y;
  };
  place(nodes[0], 0);
  const starts = wide.reduce((xs, w) => [...xs, xs.at(-1) + w], [8]);
  for (const at of places.values()) at.x = starts[at.depth];
  return { places, by, width: starts.at(-1) + SCORE, height: (line + 1) * STEP, depth: wide.length - 1 };
}

class Beams {
  constructor(host, app) {
    Object.assign(this, { app, nodes: null, asked: 0, depth: null });
    const { t } = app;
    this.watch = el("button", { type: "button", class: "second", "data-do": "write", onclick: () => this.player.start(this.tree.depth, this.tree.depth) }, t("align.write"));
    this.player = new Player(t, { onStep: (depth) => this.grow(depth), onEnd: () => this.grow(null) });
    this.place = el("div", { style: "width:100%" });
    this.scroll = el("div", { class: "scroll", tabindex: "0", "aria-label": t("view.beams") }, this.place);
    this.note = el("p", { class: "caption" });
    host.append(el("div", { class: "row" }, el("p", { class: "caption" }, t("beams.caption")), this.watch, this.player.node), this.note, this.scroll);
    this.sheet = new Surface(this.place, {
      vector: true, label: t("view.beams"), draw: (pen) => this.draw(pen), height: () => this.tree?.height ?? 200,
      hover: (hit, event) => hit && this.tell(hit, event),
    });
  }

  async update() {
    const mine = ++this.asked, { app } = this, { nodes, left_out: leftOut } = await app.tokens.beams();
    if (mine !== this.asked) return;
    this.nodes = app.state.now.discarded ? nodes : nodes.filter((node) => node.kept);
    this.note.textContent = leftOut ? app.t("beams.left.out", { n: count(leftOut) }) : "";
    this.tree = arranged(this.nodes, `400 ${SIZE}px ${getComputedStyle(document.body).fontFamily}`);
    if (this.depth !== null) { this.player.stop(); this.grow(null); }
    this.place.style.width = `${Math.max(this.scroll.clientWidth, this.tree.width)}px`;
    this.sheet.redraw();
  }

  /** Show the tree after `depth` steps of the search; null: all of it, with the best hypothesis. */
  grow(depth) {
    this.depth = depth;
    this.watch.hidden = depth !== null;
    this.sheet.redraw();
  }

  /** How a node is drawn: best, kept or lost; during the replay, "best" marks the beams of the current step. */
  standing(node) {
    if (this.depth === null) return node.best ? "best" : node.kept ? "kept" : "lost";
    const { depth, until } = this.tree.places.get(node.id);
    if (depth === this.depth) return "best";
    return until >= this.depth || node.ended || node.final !== undefined ? "kept" : "lost";
  }

  /** Show the text up to a node, and its scores. */
  tell(node, event) {
    const { t } = this.app, texts = [];
    for (let at = node; at.parent !== null; at = this.tree.by.get(at.parent)) texts.unshift(shown(at.label));
    const final = node.final === undefined ? "" : `${t("beams.final")}: ${number(node.final)}`;
    const end = node.kept ? "" : node.ended ? t("beams.ended") : this.tree.places.get(node.id).leaf ? t("beams.given.up") : "";
    tip.show(event, node.score, texts.join(" "), t("beams.score"), final, end);
  }

  draw(pen) {
    if (!this.nodes) return;
    const { places } = this.tree, { accent, ink, quiet, line } = pen.colours;
    const drawn = this.depth === null ? this.nodes : this.nodes.filter((node) => places.get(node.id).depth <= this.depth);
    for (const node of [...drawn].sort((a, b) => rank(a) - rank(b))) { // the best path is drawn on top
      const at = places.get(node.id), from = places.get(node.parent), as = this.standing(node);
      if (!from) { pen.rect(at.x, at.y - 3, 6, 6, { fill: accent, radius: 3 }); continue; }
      const x = from.depth === 0 ? from.x + 8 : from.x + from.own + 7, half = (at.x - 6 - x) / 2;
      pen.path([x, from.y, x + half, from.y, at.x - 6 - half, at.y, at.x - 6, at.y],
        { stroke: { best: accent, kept: quiet, lost: line }[as], width: as === "best" ? 2 : 1.2, opacity: as === "kept" ? 0.6 : 1 });
    }
    for (const node of drawn.slice(1)) {
      const at = places.get(node.id), as = this.standing(node), fill = { best: accent, kept: ink, lost: quiet }[as];
      pen.text(fitted(shown(node.label), WIDEST, pen.font(SIZE)), at.x, at.y, { size: SIZE, weight: as === "best" ? 600 : 400, fill });
      const score = { size: 12, fill: as === "best" ? accent : quiet };
      if (this.depth !== null) { if (at.depth === this.depth) pen.text(node.score.toFixed(2).replace("-", "−"), at.x + at.own + 12, at.y, { ...score, size: 11 }); }
      else if (node.final !== undefined) pen.text(number(node.score), at.x + at.own + 12, at.y, score);
      else if (at.leaf) pen.text(node.score.toFixed(2).replace("-", "−"), at.x + at.own + 12, at.y, { ...score, size: 11 });
      pen.hit(at.x - 6, at.y - STEP / 2, at.own + (at.leaf ? SCORE - 4 : 14), STEP, node);
    }
  }

  rows() {
    const cells = (n) => [String(n.id), String(n.parent ?? ""), n.text, n.score, String(n.best), String(n.kept), n.final ?? ""];
    return [["id", "parent", "text", "log probability", "best", "kept", "by length"], ...this.nodes.map(cells)];
  }

  close() { this.player.stop(); this.sheet.close(); }
}

export default {
  id: "beams", panel: false, controls: ["discarded"],
  fits: ({ look, source }) => !source.offline && Boolean(look.beams),
  open: (host, app) => new Beams(host, app),
};
