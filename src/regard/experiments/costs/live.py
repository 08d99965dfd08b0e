"""Bytes of all living tensors, followed operation by operation: works on any device, on meta too.

What ``torch.cuda.max_memory_allocated`` says of a GPU, said of a CPU, or of a model far too large for this machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes", "saved_bytes"]


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; ``known`` tensors are there from the start."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}
        for x in known:
            self._meet(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._meet(x)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)


Saved = tuple[tuple[int, ...], str, int]
"""Shape, dtype and bytes of a tensor that autograd keeps."""


def saved_bytes(run: Callable[[], Any], known: Iterable[Tensor]) -> tuple[int, list[Saved]]:
    """What autograd keeps of a forward pass, beside ``known`` tensors: its bytes, and every tensor."""
    skip = {x.untyped_storage()._cdata for x in known}
    found: dict[int, Saved] = {}
    kept: list[Tensor] = []

    def pack(x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in skip and storage._cdata not in found:
            found[storage._cdata] = (tuple(x.shape), str(x.dtype).removeprefix("torch."), storage.nbytes())
            kept.append(x.detach())  # so that no later storage takes its place

    # Nothing is given back to the graph: an output that it held would hold the graph in turn, for ever.
    with torch.autograd.graph.saved_tensors_hooks(pack, _never):
        run()
    entries = list(found.values())
    return sum(size for *_, size in entries), entries


def _never(_: None) -> Tensor:
    raise RuntimeError("this pass was only looked at; there is no way back through it")
