// A diagram of the architecture beside the story, with the part of the current stage highlighted.
import { fitted } from "./pen.js";

const BOX = 34;
const GAP = 14;

/** The boxes of a stack from bottom to top: [text key, stage of the story, whether it belongs to the repeated layer]. */
function boxes(model, stack) {
  const head = stack === "encoder" && (model.source || (model.image && model.generates)) ? [] : [["end", "end", false]];
  const cross = stack === "decoder" && (model.source || model.image);
  return [
    ["input", "tokens", false], ["embed", "vectors", false], [stack === "decoder" ? "masked" : "self", cross ? null : "qkv", true],
    ...(cross ? [["cross", "qkv", true]] : []), ["ff", "layer", true], ...head,
  ];
}

/** The layout; encoder and decoder stand side by side if the model has both. */
export function layout(model, width) {
  const both = model.source || (model.image && model.generates), stacks = both ? ["encoder", "decoder"] : [model.generates ? "decoder" : "encoder"];
  const wide = Math.min(190, (width - (both ? 38 : 60)) / stacks.length), tallest = Math.max(...stacks.map((stack) => boxes(model, stack).length));
  return { stacks, wide, gap: both ? 26 : 0, height: tallest * (BOX + GAP) + 10 };
}

/** Draw the diagram; `now` is the current stage, `told` the story's kind of attention. */
export function drawMap(pen, { model, look, t, now, told }) {
  const { stacks, wide, gap, height } = layout(model, pen.width), { accent, ink, quiet, line, wash } = pen.colours, places = {};
  stacks.forEach((stack, s) => {
    const x = 6 + s * (wide + gap), list = boxes(model, stack), layers = look.kinds[stack === "encoder" ? "encoder" : "self"]?.layers ?? 0;
    let top = Infinity, bottom = -Infinity;
    list.forEach(([key, stage, repeated], i) => {
      const y = height - 4 - (i + 1) * (BOX + GAP) + GAP - (key === "end" ? 8 : 0);
      if (repeated) { top = Math.min(top, y); bottom = Math.max(bottom, y + BOX); }
      places[`${stack}.${key}`] = { x, y };
      if (i) pen.path([x + wide / 2, y + BOX, x + wide / 2, y + BOX + GAP + (key === "end" ? 8 : 0)], { stroke: quiet });
    });
    pen.rect(x - 5, top - 6, wide + 10, bottom - top + 12, { stroke: line, radius: 10 });
    pen.text(t("story.times", { n: layers }), x + 2, top - 13, { size: 11, fill: quiet });
    list.forEach(([key, stage]) => {
      const { x: left, y } = places[`${stack}.${key}`], own = (stack === "encoder") === (told === "encoder") || key === "input" || key === "end" || (told === "self" && key === "masked");
      const isAttention = ["self", "masked", "cross"].includes(key), here = { self: ["self", "masked"], encoder: ["self"], cross: ["cross"] }[told];
      const inStage = isAttention ? ["qkv", "scores", "softmax", "mix", "heads"].includes(now) && here.includes(key) && own : stage === now && own;
      pen.rect(left, y, wide, BOX, { fill: inStage ? accent : wash, stroke: inStage ? accent : line, radius: 8 });
      const name = key === "input" ? t(model.image && stack === stacks[0] ? "story.box.image" : `story.box.${stacks.length > 1 ? stack : "text"}`) : t(`story.box.${key === "end" ? (model.generates ? "next" : "class") : key}`);
      pen.text(fitted(name, wide - 10, pen.font(12)), left + wide / 2, y + BOX / 2, { size: 12, align: "center", fill: inStage ? pen.colours.paper : ink });
      const goes = isAttention ? (here.includes(key) && own ? "qkv" : null) : stage;
      if (goes) pen.hit(left, y, wide, BOX, { stage: goes });
    });
  });
  const from = places["encoder.ff"], to = places["decoder.cross"];
  if (from && to) pen.path([from.x + wide / 2, from.y - 6, from.x + wide / 2, from.y - 40, to.x - 13, to.y + BOX / 2, to.x, to.y + BOX / 2], { stroke: accent, width: 1.5 });
}
