"""Common parts of the benchmarks: time and peak memory of a function, growth with length, plain-text tables."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..foundation.language import localise
from ..training.console_display import text_width
from ..training.reporter import peak_memory_mib


class Measurement(NamedTuple):
    """The best time of several runs, and the rise of peak resident memory in the first run."""

    seconds: float
    peak_bytes: int
    runs: int


def measure(work: Callable[[], object], *, enough_s: float, least_runs: int = 1, most_runs: int = 20) -> Measurement:
    """Run ``work`` repeatedly for ``enough_s`` seconds, at least ``least_runs`` and at most ``most_runs`` times.

    The memory is meaningful only in a fresh process: memory that the allocator has kept would hide a later peak.
    """
    before, peak, times = _peak_resident_bytes(), 0, list[float]()
    while len(times) < least_runs or (sum(times) < enough_s and len(times) < most_runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        # After the first run only: later ones would include memory that the allocator has not yet reclaimed.
        peak = peak or _peak_resident_bytes()
    return Measurement(min(times), max(0, peak - before), len(times))


def _peak_resident_bytes() -> int:
    """The peak resident memory of this process so far; 0 if the system does not report it."""
    return int(2**20 * (peak_memory_mib("cpu") or 0.0))


def available_memory() -> int:
    """Bytes available without swapping; half of the physical memory if the system does not report it."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def fit_exponent(lengths: Sequence[float], values: Sequence[float], longest: int = 3) -> float | None:
    """p of value ≈ c · lengthᵖ: the least-squares slope of log value over log length, at the ``longest`` lengths.

    Short lengths are left out because constant costs dominate there. None with fewer than two different lengths.
    """
    points = sorted((t, v) for t, v in zip(lengths, values, strict=True) if t > 0 and v > 0)[-longest:]
    x, y = [math.log(t) for t, _ in points], [math.log(v) for _, v in points]
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else None


def align_columns(rows: Sequence[Sequence[str]], n_left: int = 1) -> list[str]:
    """One line per row, in the reader's language; the first ``n_left`` columns flush left, the others flush right."""
    cells = [[localise(text) for text in row] for row in rows]
    widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padding = [" " * (width - text_width(text)) for text, width in zip(row, widths, strict=True)]
        columns = enumerate(zip(row, padding, strict=True))
        lines.append("  ".join(text + spaces if i < n_left else spaces + text for i, (text, spaces) in columns))
    return lines


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A table as text; the first row is its header."""
    head, *lines = align_columns(rows)
    return "\n".join([head, "─" * text_width(head), *lines])
