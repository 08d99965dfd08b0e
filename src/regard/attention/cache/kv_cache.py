"""Key/value caches: the common interface, the growing cache, the cross-attention cache, and the caches of a model.

Each attention layer has its own cache, and uses it as follows:

    k_all, v_all = cache.update(k, v)                      # store the new tokens' keys, return all visible ones
    attend(q, k_all, v_all, frame=cache.frame(n_heads))    # the new tokens' queries attend to them

Keys may be in any slot, slots may be empty (position -1), and rows of a batch may differ in length. Keys are stored
after RoPE. Tensors returned by ``update`` and ``frame`` may be views of the cache, valid until the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...foundation.checks import check_not_negative
from ..frame import HEADS_SHAPE, Frame


class CacheView(NamedTuple):
    """Positions of the tokens of the last update, as queries, and of the keys it returned."""

    n_batch: int
    q_pos: Tensor  # (1 or B, T)
    k_pos: Tensor  # (1 or B, S)
    steady: tuple[int, int] | None = None  # as in Frame
    limit: int | None = None  # as in Frame


class CacheVersion:
    """Identity of a cache's content, replaced by reorder, truncate and reset; an int would cause recompilation."""


class Cache:
    """Base class of all caches.

    The ``positions`` (T,) or (B, T) of new tokens must continue those of the same row without gaps, as the defaults do;
    -1 marks padding, which is neither stored nor visible.
    """

    _view: CacheView | None = None
    version = CacheVersion()

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, G, T, D) of new tokens; return all visible ones (B, G, S, D)."""
        raise NotImplementedError

    def frame(self, n_heads: int, n_queries: int | None = None) -> Frame:
        """The frame of the tokens of the last update (or the last n of them) as queries over the keys it returned."""
        if self._view is None:
            raise ValueError("frame() describes the last update; call update(k, v) first")
        n_batch, q_pos, k_pos, steady, limit = self._view
        n_new = q_pos.shape[-1]
        skipped = 0 if n_queries is None else n_new - n_queries
        if not 0 <= skipped < n_new:
            raise ValueError(f"n_queries={n_queries} must lie between 1 and the {n_new} tokens of the last update")
        if steady is not None:
            steady = (steady[0] + skipped, steady[1])
        q_pos, k_pos = squeeze_rows(q_pos[:, skipped:]), squeeze_rows(k_pos)
        return Frame(n_batch, n_heads, q_pos, k_pos, steady=steady, limit=limit)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens so far, (1,) or (B,), on the cache's device."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The number of tokens so far in the longest row."""
        return int(self.lengths.max())

    def next_positions(self, n_tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of the next n tokens, (T,) or (B, T); RoPE and learned positions need them before the update."""
        lengths = self.lengths if device is None else self.lengths.to(device)
        return squeeze_rows(lengths[:, None] + torch.arange(n_tokens, device=lengths.device))

    def keys(self) -> tuple[Tensor, Tensor]:
        """All keys held (B, G, S, D) and their positions (S,) or (B, S)."""
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def reorder(self, beam_index: Tensor) -> None:
        """Replace row b by row beam_index[b] (beam search)."""
        raise NotImplementedError

    def truncate(self, length: int | Tensor) -> None:
        """Drop the tokens from position ``length`` on, an int or (B,) (rejected drafts in speculative decoding)."""
        raise NotImplementedError

    def check_truncate(self, length: int | Tensor) -> None:
        """Raise if ``truncate`` is impossible; the values of a tensor are not checked."""
        if not isinstance(length, Tensor):
            check_not_negative(length=length)

    def memory(self) -> int:
        """The size of the cache in bytes."""
        raise NotImplementedError


class TensorCache(Cache):
    """Base class of the caches that hold plain tensors, None while they are empty."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._pos: Tensor | None = None  # (1 or B, S) once positions have been given; None means 0 … S - 1
        self._view, self.version = None, CacheVersion()

    @property
    def _n_held(self) -> int:
        return 0 if self._k is None else self._k.shape[2]

    def _position_rows(self, device: torch.device) -> Tensor:
        return torch.arange(self._n_held, device=device)[None] if self._pos is None else self._pos

    @property
    def lengths(self) -> Tensor:
        if self._pos is not None:
            return self._pos.amax(-1) + 1
        return torch.tensor([self._n_held], device=None if self._k is None else self._k.device)

    @property
    def length(self) -> int:
        return self._n_held if self._pos is None else super().length

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """All keys and values (B, G, S, D)."""
        if self._k is None or self._v is None:
            raise ValueError(f"an empty {type(self).__name__} has no keys; call update(k, v) first")
        return self._k, self._v

    def keys(self) -> tuple[Tensor, Tensor]:
        k, _ = self.keys_and_values()
        return k, squeeze_rows(self._position_rows(k.device))

    def reorder(self, beam_index: Tensor) -> None:
        """Replace row b by row beam_index[b]; a longer index enlarges the batch."""
        if self._k is None or self._v is None:
            return
        self._k, self._v = self._k.index_select(0, beam_index), self._v.index_select(0, beam_index)
        if self._pos is not None and self._pos.shape[0] > 1:
            self._pos = self._pos.index_select(0, beam_index)
        self._view, self.version = None, CacheVersion()

    def memory(self) -> int:
        return n_bytes(self._k, self._v, self._pos)


class GrowingCache(TensorCache):
    """Appends new keys and values by concatenation; gradients flow through all of them."""

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_new_keys(k, v, self._k, self._v)
        n_held, n_new = self._n_held, k.shape[2]
        if positions is not None or self._pos is not None:
            new = position_rows(self.next_positions(n_new, k.device) if positions is None else positions, k)
            old = self._position_rows(k.device)
            n_rows = max(new.shape[0], old.shape[0])
            new = new.expand(n_rows, -1)
            self._pos = torch.cat([old.expand(n_rows, -1), new], dim=1)
            self._view = CacheView(k.shape[0], new, self._pos)
        else:
            k_pos = torch.arange(n_held + n_new, device=k.device)[None]
            self._view = CacheView(k.shape[0], k_pos[:, n_held:], k_pos, steady=(n_held, 0))
        self._k = k if self._k is None else torch.cat([self._k, k], dim=2)
        self._v = v if self._v is None else torch.cat([self._v, v], dim=2)
        return self._k, self._v

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        self._view, self.version = None, CacheVersion()
        if self._k is None or self._v is None:
            return
        if self._pos is None and not isinstance(length, Tensor):
            self._k, self._v = self._k[:, :, :length], self._v[:, :, :length]
        else:
            pos = drop_positions_from(self._position_rows(self._k.device), length)
            used = (pos >= 0).any(0)  # columns that at least one row still uses
            self._pos = pos[:, used]
            self._k, self._v = self._k[:, :, used], self._v[:, :, used]
        if self._n_held == 0:
            self.reset()


class CrossCache(TensorCache):
    """Keys and values of an encoder's output: the first update stores them, later updates return them.

    Position -1 marks padding. ``truncate`` changes nothing. On a CPU, ``reorder`` copies nothing if every row continues
    one of the same source, as in beam search.
    """

    def reset(self) -> None:
        super().reset()
        self._sources: Tensor | None = None  # (B,): the row of the first update that each row holds

    def reorder(self, beam_index: Tensor) -> None:
        if self._k is not None and beam_index.device.type == "cpu":
            sources = torch.arange(len(self._k)) if self._sources is None else self._sources
            self._sources = sources.index_select(0, beam_index)
            if torch.equal(self._sources, sources):
                return
        super().reorder(beam_index)

    @property
    def is_filled(self) -> bool:
        return self._k is not None

    def update(
        self, k: Tensor | None = None, v: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.is_filled:
            if k is None or v is None:
                raise ValueError("an empty CrossCache needs k and v of the memory in its first update")
            check_new_keys(k, v)
            self._pos = None if positions is None else position_rows(positions, k)
            self._k, self._v = k, v
        return self.keys_and_values()

    def frame(self, n_heads: int, n_queries: int | None = None) -> Frame:
        k, _ = self.update()
        frame = Frame.aligned(k.shape[0], n_heads, 1 if n_queries is None else n_queries, k.shape[2], k.device)
        return frame if self._pos is None else Frame(k.shape[0], n_heads, frame.q_pos, squeeze_rows(self._pos))

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)


class ModelCache:
    """The caches of a model: ``layers[i]`` for self-attention, ``cross[i]`` for attention to an encoder's output."""

    def __init__(self, layers: Iterable[Cache], cross: Iterable[CrossCache] = ()) -> None:
        self.layers, self.cross = tuple(layers), tuple(cross)
        if not self.layers:
            raise ValueError("layers=() is empty; a model needs one cache per layer")
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
        for cache in self.layers:  # check all before changing any
            cache.check_truncate(length)
        for cache in self.layers:
            cache.truncate(length)

    def memory(self) -> int:
        return sum(cache.memory() for cache in (*self.layers, *self.cross))


def check_new_keys(k: Tensor, v: Tensor, held_k: Tensor | None = None, held_v: Tensor | None = None) -> None:
    """Raise unless k and v fit each other and the stored tensors."""
    for name, x, held in (("k", k, held_k), ("v", v, held_v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {HEADS_SHAPE}, got shape {tuple(x.shape)}")
        if held is None:
            continue
        for label, axis in (("batch size", 0), ("heads", 1), ("head width", 3)):
            if x.shape[axis] != held.shape[axis]:
                raise ValueError(f"{name} has {label} {x.shape[axis]}, but the cache has {label} {held.shape[axis]}")
        if x.dtype != held.dtype:
            raise TypeError(f"{name} is {x.dtype}, but the cache holds {held.dtype}")
        if x.device != held.device:
            raise ValueError(f"{name} is on {x.device}, but the cache is on {held.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has (batch, heads, length) {tuple(k.shape[:3])} but v has {tuple(v.shape[:3])}")
    if k.shape[2] == 0:
        raise ValueError(f"k is empty: length is 0 in shape {tuple(k.shape)}")


def position_rows(positions: Tensor, k: Tensor) -> Tensor:
    """(T,) or (B, T) → (1 or B, T), checked against the shape of k."""
    batch, _, length, _ = k.shape
    if positions.is_floating_point() or positions.shape not in ((length,), (batch, length)):
        got = f"{positions.dtype} of shape {tuple(positions.shape)}"
        raise ValueError(f"positions must be integers of shape ({length},) or ({batch}, {length}), got {got}")
    positions = positions.to(device=k.device, dtype=torch.int64)
    return positions[None] if positions.dim() == 1 else positions


def squeeze_rows(rows: Tensor) -> Tensor:
    """(1, S) → (S,), which keeps masks and biases small; (B, S) is unchanged."""
    return rows[0] if rows.shape[0] == 1 else rows


def drop_positions_from(positions: Tensor, length: int | Tensor) -> Tensor:
    """Positions (1 or B, S) with those from ``length`` on set to -1."""
    end = length[:, None] if isinstance(length, Tensor) and length.dim() == 1 else length
    return torch.where(positions >= end, -1, positions)


def n_bytes(*tensors: Tensor | None) -> int:
    return sum(x.nbytes for x in tensors if x is not None)
