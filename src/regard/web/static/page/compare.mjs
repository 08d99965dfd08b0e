// The page's side of the export certificate: traces given inputs and sends the results to be compared with the Python model.
// In a browser compare.html imports it; with Node.js: node compare.mjs http://127.0.0.1:8000/ FOLDER
import { AttentionMap } from "./attention_map.js";
import { PageModel } from "./model.js";

/** float32 as base64. */
function packed(values) {
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  let letters = "";
  for (let i = 0; i < bytes.length; i += 8192) letters += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(letters);
}

/** The weights of some rows of every head and layer, by kind. */
function weights(model, { activations }, rows) {
  const out = {};
  for (const [kind, layers] of Object.entries(model.page.attention)) {
    out[kind] = packed(layers.flatMap((site) => {
      const map = new AttentionMap(site, activations[`${site.site}.q`].data, activations[`${site.site}.k`].data);
      return Array.from({ length: site.heads }, (_, head) => rows[kind].map((row) => [...map.row(head, row)])).flat(2);
    }));
  }
  return out;
}

async function compared(model, one) {
  const image = one.image && { ...one.image, data: Uint8Array.from(atob(one.image.data), (letter) => letter.charCodeAt(0)) };
  const started = performance.now();
  const trace = await model.trace({ ...one, image }), { source, target, generated, logits } = trace;
  const seconds = (performance.now() - started) / 1000;
  return {
    source: source?.ids ?? null, target: target?.ids ?? null, text: trace.target_text ?? trace.text, seconds,
    hypotheses: generated?.hypotheses ?? null, logits: packed(logits.data.subarray(0, one.logits)),
    weights: weights(model, trace, one.rows),
  };
}

export async function compare(base, modules = base) {
  const send = (body) => fetch(new URL("compare/result", base), { method: "POST", body: JSON.stringify(body) });
  try {
    const started = performance.now(), model = await PageModel.open(base, () => {}, modules);
    const opened = (performance.now() - started) / 1000, cases = await (await fetch(new URL("compare/cases.json", base))).json();
    const probes = cases.probes.map((text) => ({ source: model.source?.encode(text), target: model.target?.encode(text) }));
    const results = [];
    for (const one of cases.inputs) results.push(await compared(model, one));
    await send({ opened, probes, results });
  } catch (error) {
    await send({ error: `${error.message ?? error}`, stack: `${error.stack}` });
  }
}

if (globalThis.process?.argv?.[1]?.endsWith("compare.mjs")) {
  await compare(process.argv[2], new URL(`file://${process.argv[3]}/`).href);
  process.exit(0);
}
