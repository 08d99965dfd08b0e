// Trains in a worker, so that the page stays responsive: receives {do: "start" | "play" | "pause" | "step"}, posts the results.
import { Training } from "./training.js";

const LAST_STEP = 2000; // training stops here
const SLICE = 80; // milliseconds of training between two messages
const EXAMINED = 20; // steps between two evaluations on unseen texts
let training = null, playing = false, told = 0, examined = null, timer = 0;

function tell() {
  if (!examined || examined.step !== training.n_steps && (!playing || training.n_steps - examined.step >= EXAMINED)) {
    examined = { step: training.n_steps, ...training.examine() };
  }
  const { accuracy, patterns } = examined;
  const losses = training.losses.slice(told);
  told = training.n_steps;
  postMessage({ step: told, losses, loss: training.loss, size: training.model.size, accuracy, patterns, playing, ended: training.n_steps >= LAST_STEP, ...training.look() });
}

function run() {
  if (!playing) return;
  const end = performance.now() + SLICE;
  do training.step(); while (performance.now() < end && training.n_steps < LAST_STEP);
  playing = training.n_steps < LAST_STEP;
  tell();
  later();
}

/** Train on after the pending messages; one timer, however often a run is started anew. */
function later() {
  clearTimeout(timer);
  timer = setTimeout(run);
}

const ORDERS = {
  start({ settings }) { training = new Training(settings); [told, examined, playing] = [0, null, false]; },
  play() { if (!playing && training.n_steps < LAST_STEP) { playing = true; later(); } },
  pause() { playing = false; },
  step() { playing = false; training.step(); },
};

addEventListener("message", ({ data }) => {
  ORDERS[data.do](data);
  tell();
});
