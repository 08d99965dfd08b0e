"""How fast a run goes, and how much memory it takes."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Mark(NamedTuple):
    """Where the run stood at one moment of its training time."""

    seconds: float
    steps: int
    tokens: int


class Pace:
    """Speed over the latter half of the training time so far, and of that at most the last ``span`` seconds.

    Pauses (evaluating, saving) do not count. The first step never does, and later slow ones (a graph compiled once
    more for another shape) soon leave the window, so that the time left can be believed early in a run.
    """

    def __init__(self, *, span: float = 20.0, fewest: int = 5, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._span, self._fewest = clock, span, fewest
        self._start = clock()
        self._paused = 0.0
        self._pauses: list[float] = []
        self._marks: deque[Mark] = deque()
        self._last = Mark(0.0, 0, 0)

    def wall(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def training(self) -> float:
        """The same without pauses."""
        now = self._clock()
        current = now - self._pauses[0] if self._pauses else 0.0
        return now - self._start - self._paused - current

    def pause(self) -> None:
        """Stop counting; pauses may lie inside pauses."""
        self._pauses.append(self._clock())

    def resume(self) -> None:
        began = self._pauses.pop()
        if not self._pauses:
            self._paused += self._clock() - began

    def tick(self, tokens: int) -> None:
        """One more step, of so many tokens."""
        now = self.training()
        self._last = Mark(now, self._last.steps + 1, self._last.tokens + tokens)
        # Fast steps need no mark each: 400 in a window are plenty.
        if len(self._marks) < self._fewest or now - self._marks[-1].seconds >= self._span / 400:
            self._marks.append(self._last)
        oldest = now - min(self._span, now / 2)
        while len(self._marks) > self._fewest and self._marks[1].seconds <= oldest:
            self._marks.popleft()

    def _per_second(self, what: int) -> float | None:
        if not self._marks or self._last.seconds <= self._marks[0].seconds:
            return None
        return (self._last[what] - self._marks[0][what]) / (self._last.seconds - self._marks[0].seconds)

    @property
    def steps_per_s(self) -> float | None:
        """None until the second step."""
        return self._per_second(1)

    @property
    def tokens_per_s(self) -> float | None:
        return self._per_second(2)


def peak_memory_mib(device: str | None = None) -> float | None:
    """The most memory held so far: tensors on the GPU, or the whole process where it computes on the CPU.

    None where the system does not say. Without ``device``: the GPU where one is in use.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    if device.startswith("cuda") and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if device.startswith("mps") and torch.backends.mps.is_available():
        return torch.mps.driver_allocated_memory() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
