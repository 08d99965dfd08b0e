// Playback controls for a sequence of steps: play, pause, one step, skip to the end.
import { el } from "./dom.js";

const PACE = 600; // milliseconds per step

export class Player {
  /** `onStep(n)` shows the first n steps; `onEnd()` is called when all have been shown. */
  constructor(t, { onStep, onEnd, pace = PACE }) {
    Object.assign(this, { t, onStep, onEnd, pace, at: 0, ready: 0, total: null, timer: 0 });
    const button = (name, press) => el("button", { type: "button", class: "second", "data-do": name, onclick: press }, t(`player.${name}`));
    this.toggle = button("play", () => (this.timer ? this.pause() : this.play()));
    this.place = el("output", { class: "quiet" });
    this.node = el("span", { class: "player", hidden: true }, this.toggle, button("step", () => { this.pause(); this.step(); }), button("end", () => this.finish()), this.place);
  }

  /** Play from the first step. More steps may follow: `arrive` updates how many there are so far. */
  start(ready = 0, total = null) {
    Object.assign(this, { at: 0, ready, total });
    this.node.hidden = false;
    this.onStep(0);
    this.play();
  }

  arrive(ready) { this.ready = ready; this.show(); }

  /** Declare that no more steps will follow. */
  complete(total = this.ready) {
    Object.assign(this, { ready: total, total });
    this.show();
    if (this.at >= total) this.stop(true);
  }

  play() {
    clearInterval(this.timer);
    this.timer = setInterval(() => this.step(), this.pace);
    this.show();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.show();
  }

  step() {
    if (this.at >= this.ready) return;
    this.at += 1;
    this.onStep(this.at);
    this.show();
    if (this.at === this.total) this.stop(true);
  }

  /** Skip to the last available step. */
  finish() {
    this.at = this.ready;
    this.onStep(this.at);
    this.show();
    if (this.at === this.total) this.stop(true);
  }

  stop(atEnd = false) {
    const isRunning = !this.node.hidden;
    this.pause();
    this.node.hidden = true;
    if (atEnd && isRunning) this.onEnd();
  }

  show() {
    const name = this.timer ? "pause" : "play";
    Object.assign(this.toggle.dataset, { do: name });
    this.toggle.textContent = this.t(`player.${name}`);
    this.place.textContent = this.total === null ? String(this.at) : `${this.at} / ${this.total}`;
  }
}
