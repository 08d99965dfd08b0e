// Saves what is on the screen as SVG, PNG, CSV or HTML.
import { el } from "./dom.js";

function save(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A cell of CSV; a text that a spreadsheet would evaluate as a formula gets a quote in front. */
const cell = (value) => {
  const text = typeof value === "number" ? String(Math.fround(value)) : String(value ?? "").replace(/^[=+\-@\t\r\n]/, "'$&");
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** Rows of values as CSV with a byte order mark, without which spreadsheets misread Korean. */
export const csvOf = (rows) => `\ufeff${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;

export async function exported(kind, name, app) {
  await app.drawn; // nothing is saved before its numbers are there
  const { view } = app;
  if (kind === "svg") save(`${name}.svg`, view.sheet.svg(), "image/svg+xml");
  if (kind === "png") save(`${name}.png`, await view.sheet.png());
  if (kind === "csv") save(`${name}.csv`, csvOf(await view.rows()), "text/csv");
  if (kind === "html") {
    const { model, text, target, ...state } = app.state.now; // the file contains the text itself
    save(`${name}.html`, await app.source.html(app.data.look, app.where(), { ...state, ...app.where() }), "text/html");
  }
}
