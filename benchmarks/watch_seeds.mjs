// What docs/learn/watch.md and the page that trains say of their settings, over several seeds, without a browser:
//
//   node benchmarks/watch_seeds.mjs 1 2 3 4 5
//
// For each setting and seed: steps until the mean loss of ten batches is below 0.2 (the page stops at 2,000), the loss
// at the end, the share of unseen words written without a mistake, and the largest share of a head's weight that lies
// on the letter to write.
const { DEFAULTS, Training } = await import(new URL("../src/regard/web/static/watch/training.js", import.meta.url));

const LEARNED = 0.2, LAST_STEP = 2000;
const REPEAT = { task: "repeat", positions: "learned", lr: 0.003 };
const SETTINGS = {
  "as it opens": {}, "learned positions": { positions: "learned" }, "no causal mask": { causal: false }, "no division by √d": { scaled: false },
  "one head": { n_heads: 1 }, "four heads": { n_heads: 4 }, "learning rate 0.1": { lr: 0.1 }, "no positions": { positions: "none" },
  "continue a repetition": { ...REPEAT, n_layers: 2 }, "…, one layer": { ...REPEAT, n_layers: 1 },
};

const seeds = process.argv.slice(2).map(Number);
for (const [name, settings] of Object.entries(SETTINGS)) for (const seed of seeds) {
  const run = new Training({ ...DEFAULTS, ...settings, seed });
  while (run.n_steps < LAST_STEP && !(run.n_steps >= 10 && run.loss < LEARNED)) run.step();
  const { accuracy, patterns } = run.examine(), best = Math.max(...patterns.flat().map(({ source }) => source));
  const steps = run.loss < LEARNED ? `${run.n_steps} steps` : `not in ${LAST_STEP} steps`;
  console.log(`${name}, seed ${seed}: ${steps}, loss ${run.loss.toFixed(2)}, unseen words ${Math.round(100 * accuracy)} %, a head ${best.toFixed(2)}`);
}
