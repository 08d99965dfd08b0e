// Keyboard shortcuts: arrows, / ? Esc m and digits.
import { stepped } from "./controls.js";
import { el } from "./dom.js";

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export function listen(app) {
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return; // it has the keyboard
    const typing = event.target.matches?.("input:not([type=range]):not([type=checkbox]), textarea, select");
    if (event.key === "Escape") {
      event.target.blur?.();
      if (app.look) app.state.set({ row: -1, col: -1 });
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const handled = press(app, event.key, event.target.matches?.("input[type=range], [role=radio], [role=tab]"));
    if (handled) event.preventDefault();
  });
}

function press(app, key, onControl) {
  if (key === "?") return help(app.t), true;
  if (!app.look) return false;
  if (key === "/") {
    const find = document.querySelector(".find");
    find?.focus();
    return Boolean(find);
  }
  if (key === "m") return app.state.set({ head: -1 }), true;
  if (/^[1-9]$/.test(key)) {
    const view = app.views()[Number(key) - 1];
    if (view) app.go(view.id);
    return Boolean(view);
  }
  if (!(key in ARROWS) || onControl) return false;
  const [down, right] = ARROWS[key], { row, col } = app.state.now;
  if (row < 0 && app.source.only) return false;
  if (row < 0) stepped(app, down ? "layer" : "head", down ? down : right);
  else {
    const { rows, cols } = app.data.size(app.where().kind), within = (n, total) => Math.min(total - 1, Math.max(0, n));
    app.state.set({ row: within(row + down, rows), col: right || col >= 0 ? within(Math.max(col, 0) + right, cols) : -1 });
  }
  return true;
}

export function help(t) {
  const keys = [["← → ↑ ↓", "help.arrows"], ["/", "help.slash"], ["Esc", "help.esc"], ["m", "help.mean"], ["1 … 9", "help.digits"], ["?", "help.help"]];
  const dialog = el("dialog", { "aria-label": t("help.title"), onclose: () => dialog.remove() },
    el("strong", {}, t("help.title")),
    el("dl", {}, keys.flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, t(text))])),
    el("button", { class: "primary", type: "button", onclick: () => dialog.close() }, t("close")));
  document.body.append(dialog);
  dialog.showModal();
}
