"""The caches of all layers as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .cache import Cache
from .growing import CrossCache


class ModelCache:
    """The caches of a model: ``layers[i]`` for self-attention, ``cross[i]`` for attention to an encoder's output."""

    def __init__(self, layers: Iterable[Cache], cross: Iterable[CrossCache] = ()) -> None:
        self.layers, self.cross = tuple(layers), tuple(cross)
        if not self.layers:
            raise ValueError("layers=() is empty; a model's cache holds one cache for each layer")
        if self.cross and len(self.cross) != len(self.layers):
            raise ValueError(f"cross has {len(self.cross)} caches but layers has {len(self.layers)}")

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Cache:
        return self.layers[layer]

    def __iter__(self) -> Iterator[Cache]:
        return iter(self.layers)

    @property
    def lengths(self) -> Tensor:
        return self.layers[0].lengths

    @property
    def length(self) -> int:
        return self.layers[0].length

    def next_positions(self, n_tokens: int, device: torch.device | str | None = None) -> Tensor:
        return self.layers[0].next_positions(n_tokens, device)

    def reset(self) -> None:
        for cache in (*self.layers, *self.cross):
            cache.reset()

    def reorder(self, beam_index: Tensor) -> None:
        for cache in (*self.layers, *self.cross):
            cache.reorder(beam_index)

    def truncate(self, length: int | Tensor) -> None:
        for cache in self.layers:  # all or none
            cache.check_truncate(length)
        for cache in self.layers:
            cache.truncate(length)

    def memory(self) -> int:
        return sum(cache.memory() for cache in (*self.layers, *self.cross))
