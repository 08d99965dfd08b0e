// The sentences about a run, what to expect and what has happened, as keys of words.js with their values.
import { percent } from "../dom.js";

const GUESS = Math.log(26); // the loss of a uniform guess

/** The key of the sentence for these settings; the first that applies wins. */
export function expectation({ task, causal, positions, lr, scaled, n_layers, n_heads }) {
  const found = [
    [!causal, "mask"],
    [positions === "none", "positions"],
    [lr >= 0.1, "fast"],
    [lr <= 0.001, "slow"],
    [!scaled, "unscaled"],
    [task === "repeat" && n_layers === 1, "repeat.shallow"],
    [task === "repeat" && positions === "sinusoidal", "repeat.waves"],
    [task === "repeat", "repeat"],
    [positions === "learned", "learned"],
    [n_heads === 1, "one"],
    [n_heads > 2, "many"],
  ].find(([applies]) => applies);
  return `watch.expect.${found?.[1] ?? "default"}`;
}

/** Sentences as [key, values]: the progress, the head with the right pattern, and the previous run at this step or at its last. */
export function whatHappened({ step, loss, accuracy, patterns }, { causal }, previous) {
  if (!step) return [["watch.saw.start", {}]];
  const state = loss < 0.5 && !causal && accuracy < 0.9 ? "cheated" : accuracy >= 0.9 ? "learned" : loss > 0.8 * GUESS ? "guessing" : "learning";
  const out = [[`watch.saw.${state}`, { n: step, loss: loss.toFixed(3), accuracy: percent(accuracy) }]];
  const best = patterns.flatMap((heads, l) => heads.map(({ source }, h) => ({ l: l + 1, h: h + 1, source }))).reduce((a, b) => (b.source > a.source ? b : a));
  if (best.source >= 0.35) out.push(["watch.saw.head", { ...best, w: percent(best.source) }]);
  if (previous) {
    const n = Math.min(step, previous.length);
    out.push([`watch.saw.${n < step ? "ended" : "before"}`, { n, loss: meanBefore(previous, n).toFixed(3) }]);
  }
  return out;
}

/** The mean loss of the ten steps up to this one. */
function meanBefore(losses, step) {
  const last = losses.slice(Math.max(0, step - 10), step);
  return last.reduce((sum, loss) => sum + loss, 0) / last.length;
}
