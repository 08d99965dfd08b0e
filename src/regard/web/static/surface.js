// The drawing area of a view; handles its size and pointer events. `hover` may show the tooltip, which goes with the pointer.
// draw(pen) receives a pen of the current size; the same function draws the exported SVG and PNG.
import { palette } from "./colour.js";
import { el } from "./dom.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { tip } from "./tip.js";

export class Surface {
  constructor(host, { draw, height, vector = false, hover, press, leave, label }) {
    Object.assign(this, { host, draw, heightOf: height, vector });
    this.node = vector ? el("div", { class: "sheet" }) : el("canvas", { class: "sheet" });
    this.node.setAttribute("role", "img");
    if (label) this.node.setAttribute("aria-label", label);
    host.append(this.node);
    this.hits = [];
    this.node.addEventListener("pointermove", (event) => { tip.hide(); hover?.(this.under(event), event, this.place(event)); });
    this.node.addEventListener("pointerleave", () => { tip.hide(); leave?.(); });
    this.node.addEventListener("click", (event) => press?.(this.under(event), event, this.place(event)));
    this.watcher = new ResizeObserver(() => this.redraw());
    this.watcher.observe(host);
  }

  place(event) {
    const box = this.node.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  under(event) {
    const { x, y } = this.place(event);
    const found = this.hits.findLast((h) => x >= h.x && x < h.x + h.w && y >= h.y && y < h.y + h.h);
    return found?.payload;
  }

  size() {
    const width = Math.max(200, Math.floor(this.host.clientWidth));
    return { width, height: Math.ceil(this.heightOf(width)) };
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const { width, height } = this.size();
    if (this.vector) {
      const pen = new SvgPen(width, height, palette());
      this.draw(pen);
      this.node.innerHTML = pen.toString();
      this.hits = pen.hits;
      return;
    }
    const dense = Math.min(devicePixelRatio || 1, 3, Math.sqrt(3e7 / (width * height)));
    const wide = Math.round(width * dense), tall = Math.round(height * dense);
    if (this.node.width !== wide || this.node.height !== tall) Object.assign(this.node, { width: wide, height: tall });
    this.node.style.height = `${height}px`;
    const context = this.node.getContext("2d");
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, height);
    const pen = new CanvasPen(context, width, height, palette());
    this.draw(pen);
    this.hits = pen.hits;
  }

  svg() {
    const { width, height } = this.size(), colours = palette();
    const pen = new SvgPen(width, height, colours);
    this.draw(pen);
    return pen.toString(colours.paper);
  }

  async png() {
    const { width, height } = this.size(), canvas = document.createElement("canvas"), colours = palette();
    const dense = Math.min(2, Math.sqrt(3e7 / (width * height)));
    Object.assign(canvas, { width: width * dense, height: height * dense });
    const context = canvas.getContext("2d");
    context.scale(dense, dense);
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    this.draw(new CanvasPen(context, width, height, colours));
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  close() {
    tip.hide();
    this.watcher.disconnect();
    cancelAnimationFrame(this.frame);
    this.node.remove();
  }
}
