"""What benchmarks share: time and peak memory of a piece of work, growth with length, and tables as plain text."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..foundation.language import localise
from ..training.console_display import text_width
from ..training.reporter import peak_memory_mib


class Measurement(NamedTuple):
    """The best time of several runs, and how far the first one raised the resident memory above what was there."""

    seconds: float
    peak_bytes: int
    runs: int


def measure(work: Callable[[], object], *, enough_s: float, least_runs: int = 1, most_runs: int = 20) -> Measurement:
    """Run ``work`` until ``enough_s`` seconds are spent.

    Memory means something in a fresh process only: what a process has freed but kept hides the next peak.
    """
    before, peak, times = _peak_resident_bytes(), 0, list[float]()
    while len(times) < least_runs or (sum(times) < enough_s and len(times) < most_runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        # Later runs would count again what the allocator has not yet taken back from the first.
        peak = peak or _peak_resident_bytes()
    return Measurement(min(times), max(0, peak - before), len(times))


def _peak_resident_bytes() -> int:
    """The most memory this process has held so far; 0 where the system does not say."""
    return int(2**20 * (peak_memory_mib("cpu") or 0.0))


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def fit_exponent(lengths: Sequence[float], values: Sequence[float], longest: int = 3) -> float | None:
    """p of value ≈ c · lengthᵖ: the slope of log value over log length, by least squares, at the ``longest`` lengths.

    At short lengths the constant costs show, not the law. None where fewer than two different lengths are left.
    """
    points = sorted((t, v) for t, v in zip(lengths, values, strict=True) if t > 0 and v > 0)[-longest:]
    x, y = [math.log(t) for t, _ in points], [math.log(v) for _, v in points]
    if len(set(x)) < 2:
        return None
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def align_columns(rows: Sequence[Sequence[str]], n_left: int = 1) -> list[str]:
    """A line a row, in the reader's language: the first ``n_left`` columns flush left, the others flush right."""
    cells = [[localise(text) for text in row] for row in rows]
    widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
    spaces = [[" " * (n - text_width(text)) for text, n in zip(row, widths, strict=True)] for row in cells]
    return [
        "  ".join(text + room if i < n_left else room + text for i, (text, room) in enumerate(zip(*row, strict=True)))
        for row in zip(cells, spaces, strict=True)
    ]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under each other, the first one as the head."""
    head, *lines = align_columns(rows)
    return "\n".join([head, "─" * text_width(head), *lines])
