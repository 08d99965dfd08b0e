"""What benchmarks share: time and peak memory of a piece of work, growth with length, and tables as plain text."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..training.reporter import peak_memory_mib

# ------------------------------------------------------------------------------------- time and memory


@dataclass(frozen=True)
class Measurement:
    """The best time of several runs, and how far the first one raised the resident memory above what was there."""

    seconds: float
    peak_bytes: int
    runs: int


def measure(work: Callable[[], object], *, enough_s: float, most_runs: int = 20) -> Measurement:
    """Run ``work`` until ``enough_s`` seconds are spent.

    Memory means something in a fresh process only: what a process has freed but kept hides the next peak.
    """
    before, peak, times = peak_resident_bytes(), 0, list[float]()
    while not times or (sum(times) < enough_s and len(times) < most_runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        # Later runs would count again what the allocator has not yet taken back from the first.
        peak = peak or peak_resident_bytes()
    return Measurement(min(times), max(0, peak - before), len(times))


def peak_resident_bytes() -> int:
    """The most memory this process has held so far; 0 where the system does not say."""
    return int(2**20 * (peak_memory_mib("cpu") or 0.0))


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class LiveBytes(TorchDispatchMode):
    """Bytes of all living tensors, counted while it is entered; ``known`` tensors are there from the start.

    What ``torch.cuda.max_memory_allocated`` says of a GPU, on any device, meta included.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, Any] = {}
        for x in known:
            self._add(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._add(x)
        return result

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def remove(_: Any) -> None:
            self.now -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, remove)


SavedTensor = tuple[tuple[int, ...], str, int]  # shape, dtype and bytes of a tensor that autograd saves


def saved_bytes(run: Callable[[], Any], known: Iterable[Tensor]) -> tuple[int, list[SavedTensor]]:
    """What autograd saves of a forward pass, beside ``known`` tensors: its bytes, and every tensor."""
    skip = {x.untyped_storage()._cdata for x in known}
    saved: dict[int, SavedTensor] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in skip and storage._cdata not in saved:
            saved[storage._cdata] = (tuple(x.shape), str(x.dtype).removeprefix("torch."), storage.nbytes())
            alive.append(x.detach())  # so that no later storage takes its place

    def unpack(_: None) -> Tensor:
        raise RuntimeError("this pass was only measured; there is no way back through it")

    # Nothing is given back to the graph: an output that it held would hold the graph in turn, for ever.
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run()
    return sum(size for *_, size in saved.values()), list(saved.values())


# ------------------------------------------------------------------------------------- growth


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


def crossing_length(lengths: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float | None:
    """The length from which ``first`` stays below ``second``, between two measured lengths by the straight line
    through their logarithms; None where it does not end below."""
    gaps = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    if not gaps or gaps[-1] >= 0:
        return None
    above = [n for n, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return lengths[0]
    n = above[-1]
    share = gaps[n] / (gaps[n] - gaps[n + 1])
    return math.exp(math.log(lengths[n]) + share * math.log(lengths[n + 1] / lengths[n]))


# ------------------------------------------------------------------------------------- tables


def align_columns(rows: Sequence[Sequence[str]], n_left: int = 1) -> list[str]:
    """A line a row: the first ``n_left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(n) if i < n_left else text.rjust(n) for i, (text, n) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under each other, the first one as the head."""
    head, *lines = align_columns(rows)
    return "\n".join([head, "─" * len(head), *lines])
