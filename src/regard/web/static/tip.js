// The tooltip at the pointer: the item under it and its exact value.
import { el, number } from "./dom.js";

const box = el("div", { class: "tip", role: "status", hidden: true });

export const tip = {
  show(event, value, ...lines) {
    const shownValue = typeof value === "number" ? number(value) : value;
    box.replaceChildren(el("div", { class: "num" }, shownValue),
      ...lines.filter(Boolean).map((line) => el("div", { class: "of" }, el("bdi", {}, line))));
    if (!box.isConnected) document.body.append(box);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
    const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() { box.hidden = true; },
};
