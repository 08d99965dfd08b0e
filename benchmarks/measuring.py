"""What benchmarks and tests measure with: memory of living and of saved tensors, and where two curves cross."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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
