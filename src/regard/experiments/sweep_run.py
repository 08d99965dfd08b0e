"""The runs of a sweep, several at once: what is done stays done, what is in flight can be stopped and goes on later."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RegardError
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import to_json
from .sweep import FINAL, RESULT_FILE, Cell, Sweep, fingerprint, folder_of, prune, read_result

_PATIENCE_S = 30.0
"""How long a run that was asked to save and leave may take for it."""


@dataclass(frozen=True)
class Job:
    """One run that is still to be done."""

    cell: Cell
    seed: int
    order: dict[str, Any]
    """The arguments of ``run_cell``."""

    @property
    def name(self) -> str:
        return f"{self.cell.name}, seed {self.seed}"


def run_all(
    sweep: Sweep,
    out: Path,
    *,
    jobs: int | None,
    minutes: float | None,
    max_seconds: float | None,
    keep: bool,
    progress: Callable[[str], None] | None,
) -> None:
    """All that is not done yet; seeds go round by round, so that a sweep cut short has seen every cell."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    say = progress or (lambda line: None)
    out.mkdir(parents=True, exist_ok=True)
    with file_lock(out, "is being swept by another process"):
        sweep.write(out)
        waiting, n_done = _waiting(sweep, out, keep)
        n_all = len(waiting) + n_done
        if n_done:
            say(f"{n_done} of {n_all} runs are done already")
        if waiting:
            _Pool(out, min(jobs or default_jobs(), len(waiting)), n_done, n_all, minutes, max_seconds, say).run(waiting)


def default_jobs() -> int:
    """A run computes with one thread, so as many as there are cores; on a GPU, which they share, four."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores) if torch.cuda.is_available() else cores


def _waiting(sweep: Sweep, out: Path, keep: bool) -> tuple[list[Job], int]:
    waiting, n_done = [], 0
    for seed in sweep.seeds:
        for cell in sweep.rows:
            config = sweep.config(cell, seed)
            mark, known = fingerprint(config), read_result(out, cell.name, seed)
            folder = folder_of(out, cell.name, seed)
            if known is not None and known["status"] in FINAL:
                if known.get("fingerprint") != mark:
                    raise RegardError(f"{folder} was run with other settings; --out names another directory")
                if known.get("keep") is False:  # killed just then, a run may have left its weights
                    prune(folder)
                n_done += 1
                continue
            order = {
                **{"folder": str(folder), "shared": str(out / "shared"), "config": config.model_dump(mode="json")},
                **{"fingerprint": mark, "tests": dict(sweep.tests), "measures": list(sweep.measures), "keep": keep},
            }
            waiting.append(Job(cell, seed, order))
    return waiting, n_done


class _Slot:
    """A process that forks for every run it is given (``sweep_cell.serve``), in a group of its own: Ctrl-C reaches
    the sweep alone, which then asks the runs to save."""

    def __init__(self) -> None:
        start = f"import sys; sys.path[:] = {sys.path!r}; from regard.experiments.sweep_cell import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0 if os.name == "posix" else None,
            # Asking NVML whether there is a GPU leaves CUDA untouched, which a process that forks must.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.asks, self.answers = self.process.stdin, self.process.stdout
        self.job: Job | None = None
        self.began, self.ready, self.heard = 0.0, False, b""

    def begin(self, job: Job) -> None:
        self.job, self.began = job, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # then its answer is missing too
            self.asks.write(json.dumps(job.order).encode() + b"\n")
            self.asks.flush()

    def lines(self) -> list[str]:
        """What it has said since, called when there is something; nothing whole may be there yet. "" is its end.

        Past Python's buffer: a line that waits in there is none that select would know of.
        """
        more = os.read(self.answers.fileno(), 1 << 16)
        *whole, self.heard = (self.heard + more).split(b"\n")
        return [line.decode() for line in whole] + ([] if more else [""])

    def signal(self, number: int) -> None:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        else:
            self.process.kill()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.asks.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
            self.process.wait()
        self.answers.close()


class _Pool:
    """So many slots, and what happens in them."""

    def __init__(
        self,
        out: Path,
        jobs: int,
        n_done: int,
        n_all: int,
        minutes: float | None,
        max_seconds: float | None,
        say: Callable[[str], None],
    ) -> None:
        self.n_before = n_done
        self.out, self.n_done, self.n_all, self.max_seconds, self.say = out, n_done, n_all, max_seconds, say
        self.began, self.longest = time.monotonic(), 0.0
        self.until = None if minutes is None else self.began + 60 * minutes
        self.jobs, self.slots, self.seen = jobs, list[_Slot](), selectors.DefaultSelector()
        self.waiting, self.stopping = list[Job](), False

    def run(self, waiting: list[Job]) -> None:
        from ..training.signals import Interrupted, Signals

        self.waiting = waiting
        with Signals() as signals:
            try:
                self._open(0 if self._time_is_up() else self.jobs)
                while (waiting or self._busy) and not signals.asked and not self._time_is_up():
                    for slot in self.slots:
                        if slot.job is None and waiting and self._fits():
                            slot.begin(waiting.pop(0))
                    if not self._busy:
                        break
                    self._listen(0.25)
                    self._end_those_too_slow()
                left, before = len(waiting) + len(self._busy), self.n_done
                self._stop()
                left -= self.n_done - before  # what was done while it was asked to stop
            finally:
                for slot in self.slots:
                    slot.close()
                self.seen.close()
        if signals.asked:
            raise Interrupted(
                f"stopped with {left} of {self.n_all} runs to do; starting it again goes on", signals.asked
            )
        if left:
            self.say(f"time is up with {left} of {self.n_all} runs to do; starting it again goes on")

    @property
    def _busy(self) -> list[_Slot]:
        return [slot for slot in self.slots if slot.job is not None]

    def _open(self, n: int) -> None:
        for _ in range(n):
            slot = _Slot()
            self.slots.append(slot)
            self.seen.register(slot.answers, selectors.EVENT_READ, slot)

    def _time_is_up(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _fits(self) -> bool:
        """Whether a run begun now is likely to be done in time."""
        return self.until is None or time.monotonic() + self.longest < self.until

    def _listen(self, seconds: float) -> None:
        for key, _ in self.seen.select(seconds):
            slot: _Slot = key.data
            for answer in slot.lines():
                self._answered(slot, answer)

    def _answered(self, slot: _Slot, answer: str) -> None:
        """A line of a process, or "" when it has ended."""
        if not slot.ready and not answer and not self.stopping:
            raise RegardError("a process for the runs could not be started")
        if not slot.ready and answer:  # that everything is imported: the clock of its run starts now
            slot.ready, slot.began = True, time.monotonic()
            return
        job, slot.job = slot.job, None
        if not answer:
            self._replace(slot, job)
        elif job is not None:
            self._ended(job, int(answer), time.monotonic() - slot.began)

    def _replace(self, slot: _Slot, job: Job | None) -> None:
        """The whole process is gone: another one takes its place. One that does not fork leaves after every run, and
        has then not begun the next one."""
        self.seen.unregister(slot.answers)
        self.slots.remove(slot)
        slot.close()
        if job is not None and slot.process.returncode == 0:
            self.waiting.insert(0, job)
        elif job is not None:
            self._ended(job, slot.process.returncode, 0.0)
        if self.waiting and not self.stopping:
            self._open(1)

    def _ended(self, job: Job, code: int, seconds: float) -> None:
        found = read_result(self.out, job.cell.name, job.seed)
        folder = folder_of(self.out, job.cell.name, job.seed)
        if code == 0 and found is not None:
            self.n_done += 1
            self.longest = max(self.longest, seconds)
            self.say(f"[{self.n_done}/{self.n_all}] {job.name}: {_said(found)}, {found['seconds']:.0f} s{self._left()}")
        elif code != 130:  # killed for memory, by hand, or by a fault of its own
            self._failed(job, f"its process ended with exit status {code}; {folder / 'log.txt'} may say why")

    def _failed(self, job: Job, why: str) -> None:
        folder = folder_of(self.out, job.cell.name, job.seed)
        folder.mkdir(parents=True, exist_ok=True)
        found = {"fingerprint": job.order["fingerprint"], "status": "failed", "message": why, "metrics": {}}
        write_atomic(folder / RESULT_FILE, to_json(found))
        self.say(f"{job.name}: failed: {why}")

    def _left(self) -> str:
        """A guess, from how it went so far."""
        spent, done = time.monotonic() - self.began, max(1, self.n_done - self.n_before)
        left = self.n_all - self.n_done
        return f"; about {spent / done * left / 60:.1f} min left" if left > 0 else ""

    def _end_those_too_slow(self) -> None:
        most = math.inf if self.max_seconds is None else self.max_seconds
        for slot in self._busy:
            if slot.ready and slot.job is not None and time.monotonic() - slot.began > most:
                job, slot.job = slot.job, None
                slot.signal(signal.SIGKILL)
                self._replace(slot, None)
                self._failed(job, f"it took longer than max_seconds={most:g}")

    def _stop(self) -> None:
        """Ask what is in flight to save and leave."""
        self.stopping = True
        for slot in self.slots:
            if not slot.ready:  # still importing: nothing to save
                slot.job = None
                slot.signal(signal.SIGKILL)
        for slot in self._busy:
            slot.signal(signal.SIGINT)
        until = time.monotonic() + _PATIENCE_S
        while self._busy and time.monotonic() < until:
            self._listen(0.25)
        for slot in self._busy:
            slot.job = None
            slot.signal(signal.SIGKILL)


def _said(found: dict[str, Any]) -> str:
    if found["status"] != "done":
        return f"{found['status']}: {found.get('message', '')}"
    wanted = [name for name in ("valid_loss", "bleu", "accuracy", "test_bleu") if name in found["metrics"]]
    return ", ".join(f"{name} {found['metrics'][name]:.4g}" for name in wanted if found["metrics"][name] is not None)
