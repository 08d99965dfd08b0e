// One drawing interface with two backends: a canvas (screen, PNG) and SVG (file, screen).
import { css } from "./colour.js";

/** A text for SVG; control characters, which tokens of bytes may be, are not allowed in XML. */
const escape = (text) => text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "\ufffd")
  .replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const round = (x) => Math.round(x * 100) / 100;
const measuring = document.createElement("canvas").getContext("2d");

/** Truncate a text to a width with an ellipsis; grapheme clusters such as emoji are never split. */
export function fitted(text, width, font) {
  measuring.font = font;
  if (measuring.measureText(text).width <= width) return text;
  const letters = [...new Intl.Segmenter().segment(text)].map((s) => s.segment);
  while (letters.length > 1 && measuring.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}

export function textWidth(text, font) {
  measuring.font = font;
  return measuring.measureText(text).width;
}

function pixels(values, rows, cols, colour) {
  const canvas = document.createElement("canvas");
  canvas.width = cols;
  canvas.height = rows;
  const image = new ImageData(cols, rows);
  for (let i = 0; i < rows * cols; i++) {
    const [r, g, b] = colour(values[i]);
    image.data.set([r, g, b, 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

class Pen {
  constructor(width, height, colours) {
    Object.assign(this, { width, height, colours, hits: [] });
  }
  font(size, weight = 400) { return `${weight} ${size}px ${this.colours.font}`; }
  /** Register a rectangle that reacts to the pointer. */
  hit(x, y, w, h, payload) { this.hits.push({ x, y, w, h, payload }); }
}

export class CanvasPen extends Pen {
  constructor(context, width, height, colours) {
    super(width, height, colours);
    this.c = context;
  }
  rect(x, y, w, h, { fill, stroke, width = 1, radius = 0, opacity = 1 }) {
    const c = this.c;
    c.globalAlpha = opacity;
    c.beginPath();
    c.roundRect(x, y, Math.max(0, w), Math.max(0, h), radius);
    if (fill) { c.fillStyle = fill; c.fill(); }
    if (stroke) { c.strokeStyle = stroke; c.lineWidth = width; c.stroke(); }
    c.globalAlpha = 1;
  }
  path(points, { stroke, width = 1, opacity = 1 }) {
    const c = this.c, [x, y, ...rest] = points;
    c.globalAlpha = opacity;
    c.strokeStyle = stroke;
    c.lineWidth = width;
    c.lineCap = "round";
    c.beginPath();
    c.moveTo(x, y);
    if (rest.length === 6) c.bezierCurveTo(...rest);
    else for (let i = 0; i < rest.length; i += 2) c.lineTo(rest[i], rest[i + 1]);
    c.stroke();
    c.globalAlpha = 1;
  }
  text(text, x, y, { size = 13, weight, align = "left", fill = this.colours.ink, turn = 0 } = {}) {
    const c = this.c;
    c.save();
    c.translate(x, y);
    c.rotate((turn * Math.PI) / 180);
    c.font = this.font(size, weight);
    c.fillStyle = fill;
    c.textAlign = align;
    c.textBaseline = "middle";
    c.fillText(text, 0, 0);
    c.restore();
  }
  matrix(x, y, w, h, { values, rows, cols, colour }) {
    this.c.imageSmoothingEnabled = rows > 2 * h || cols > 2 * w;
    this.c.drawImage(pixels(values, rows, cols, colour), x, y, w, h);
  }
  image(picture, x, y, w, h) {
    this.c.imageSmoothingEnabled = w < picture.naturalWidth;
    this.c.drawImage(picture, x, y, w, h);
  }
  clip(x, y, w, h, work) {
    this.c.save();
    this.c.beginPath();
    this.c.rect(x, y, w, h);
    this.c.clip();
    work();
    this.c.restore();
  }
}

export class SvgPen extends Pen {
  constructor(width, height, colours) {
    super(width, height, colours);
    this.parts = [];
    this.clips = 0;
  }
  rect(x, y, w, h, { fill = "none", stroke, width = 1, radius = 0, opacity = 1 }) {
    const line = stroke ? ` stroke="${stroke}" stroke-width="${width}"` : "";
    const size = `x="${round(x)}" y="${round(y)}" width="${round(Math.max(0, w))}" height="${round(Math.max(0, h))}"`;
    this.parts.push(`<rect ${size} rx="${radius}" fill="${fill}"${line}${opacity === 1 ? "" : ` opacity="${round(opacity)}"`}/>`);
  }
  path(points, { stroke, width = 1, opacity = 1 }) {
    const [x, y, ...rest] = points.map(round);
    const d = `M${x} ${y}${rest.length === 6 ? "C" : "L"}${rest.join(" ")}`;
    this.parts.push(`<path d="${d}" fill="none" stroke="${stroke}" stroke-width="${round(width)}" stroke-linecap="round" opacity="${round(opacity)}"/>`);
  }
  text(text, x, y, { size = 13, weight = 400, align = "left", fill = this.colours.ink, turn = 0 } = {}) {
    const anchor = { left: "start", right: "end", center: "middle" }[align];
    const where = `transform="translate(${round(x)} ${round(y)})${turn ? ` rotate(${turn})` : ""}"`;
    this.parts.push(`<text ${where} dy=".35em" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" fill="${fill}">${escape(text)}</text>`);
  }
  matrix(x, y, w, h, { values, rows, cols, colour }) {
    if (rows * cols > 4096) {
      const data = pixels(values, rows, cols, colour).toDataURL();
      this.parts.push(`<image x="${x}" y="${y}" width="${w}" height="${h}" preserveAspectRatio="none" image-rendering="pixelated" href="${data}"/>`);
      return;
    }
    const tall = h / rows, wide = w / cols;
    for (let i = 0; i < rows * cols; i++) {
      const at = [x + (i % cols) * wide, y + Math.floor(i / cols) * tall];
      this.rect(...at, wide + 0.05, tall + 0.05, { fill: css(colour(values[i])) });
    }
  }
  image(picture, x, y, w, h) {
    const canvas = document.createElement("canvas");
    canvas.width = picture.naturalWidth;
    canvas.height = picture.naturalHeight;
    canvas.getContext("2d").drawImage(picture, 0, 0);
    this.parts.push(`<image x="${x}" y="${y}" width="${w}" height="${h}" preserveAspectRatio="none" href="${canvas.toDataURL()}"/>`);
  }
  clip(x, y, w, h, work) {
    const id = `clip${this.clips++}`;
    this.parts.push(`<clipPath id="${id}"><rect x="${x}" y="${y}" width="${w}" height="${h}"/></clipPath><g clip-path="url(#${id})">`);
    work();
    this.parts.push("</g>");
  }
  toString(background) {
    const back = background ? `<rect width="100%" height="100%" fill="${background}"/>` : "";
    const size = `width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}"`;
    const font = `font-family="${escape(this.colours.font)}" font-variant="tabular-nums"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} ${font}>${back}${this.parts.join("")}</svg>`;
  }
}
