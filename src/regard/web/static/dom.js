// Helpers: create elements, format numbers and tokens, build controls.
import { speaker } from "./i18n.js";

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value; // a style attribute would violate the content security policy
    else if (key in node && typeof value !== "string") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A weight with six decimals, or in scientific notation if it is tiny. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === Infinity || value === "inf") return "∞";
  if (value === -Infinity || value === "-inf") return "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && size < 1e-4 ? value.toExponential(3) : value.toFixed(size >= 1000 ? 2 : size >= 10 ? 4 : 6);
  return text.replace("-", "−");
}

export const brief = (value) => {
  if (!Number.isFinite(value)) return number(value);
  const size = Math.abs(value);
  return (size !== 0 && size < 0.005 ? value.toExponential(0) : value.toFixed(2)).replace("-", "−");
};

/** Two or three digits, so that a sum can be followed by eye; tooltips and files have all digits. */
export function rounded(value) {
  if (!Number.isFinite(value)) return number(value);
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.0005 || size >= 1e4) ? value.toExponential(1) : value.toFixed(size < 1 ? 3 : size < 100 ? 2 : 0);
  return text.replace("e+", "e").replaceAll("-", "−");
}

/** A probability in percent. */
export function percent(share) {
  if (!(share > 0)) return "0%";
  if (share < 1e-4) return "<0.01%";
  if (share < 1 && share > 0.9995) return ">99.9%";
  return `${Number((100 * share).toFixed(share < 0.01 ? 2 : 1))}%`;
}

export const count = (n) => n.toLocaleString("en-US").replaceAll(",", "\u202f");

const UNSEEN = { "": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "⏎" };

/** A token as the page shows it; image patches count from 1. */
export function shown(label) {
  const patch = label.box && /^patch (\d+),(\d+)$/.exec(label.text);
  if (!patch) return tokenText(label);
  return speaker(document.documentElement.lang)("patch", { row: Number(patch[1]) + 1, col: Number(patch[2]) + 1 });
}

/** A token as plain text; one of only whitespace is shown by symbols. */
export function tokenText(label) {
  const text = typeof label === "string" ? label : label.text;
  if (text.trim() !== "") return text.replace(/\s+/g, " ").trim();
  return [...text].slice(0, 4).map((c) => UNSEEN[c] ?? "␣").join("") || UNSEEN[""];
}

/** Replace the children of a node; the control that had the keyboard focus keeps it. */
export function refill(node, children) {
  const held = node.contains(document.activeElement) && document.activeElement.closest("[aria-label]")?.getAttribute("aria-label");
  node.replaceChildren(...children);
  const found = held && node.querySelector(`[aria-label="${CSS.escape(held)}"]`);
  if (found) (found.querySelector("[aria-checked=true]") ?? found).focus();
}

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

/** A handler for a row of buttons: the arrow keys choose the neighbours of the one that has the focus. */
export function chooseNeighbour(event) {
  const buttons = [...event.currentTarget.children], to = buttons.indexOf(event.target) + (STEPS[event.key] ?? 0);
  if (!(event.key in STEPS)) return;
  event.preventDefault();
  buttons.at(to % buttons.length).focus();
  buttons.at(to % buttons.length).click();
}

/** Buttons of which one is chosen. */
export function segmented(name, options, value, onPick) {
  return el("div", { class: "segmented", role: "radiogroup", "aria-label": name, onkeydown: chooseNeighbour },
    options.map(([id, text]) => el("button", {
      type: "button", role: "radio", "aria-checked": String(id === value), "data-value": String(id),
      onclick: () => onPick(id),
    }, text)));
}

export function slider(name, props, value, show, onPick) {
  const out = el("output", {}, show(value));
  const input = el("input", { type: "range", "aria-label": name, ...props });
  input.value = String(value);
  input.addEventListener("input", () => { out.textContent = show(Number(input.value)); onPick(Number(input.value)); });
  return el("label", { class: "slider" }, el("span", {}, name), input, out);
}

export function stepper(name, text, back, on) {
  const step = (sign, go) => el("button", { type: "button", "aria-label": `${name} ${sign}`, onclick: go }, sign);
  return el("div", { class: "stepper" }, el("span", { class: "name" }, name), step("‹", back),
    el("output", {}, text), step("›", on));
}

export function check(name, value, onPick, id) {
  const box = el("input", { type: "checkbox", name: id, onchange: () => onPick(box.checked) });
  box.checked = value;
  return el("label", { class: "check" }, box, el("span", {}, name));
}

/** The height from the top of a node to the bottom of the first screen. */
export const screenBelow = (node) => innerHeight - node.getBoundingClientRect().top - scrollY;

export function after(ms, work) {
  let timer = 0;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => work(...args), ms); };
}

/** Fill a select with the tokens near one position: thousands of options would be unusable. */
export function offer(select, labels, at, near = 300) {
  const from = Math.max(0, at - near);
  select.replaceChildren(...labels.slice(from, at + near).map((label, i) =>
    el("option", { value: String(from + i), selected: from + i === at }, `${from + i + 1}  ${shown(label)}`)));
}
