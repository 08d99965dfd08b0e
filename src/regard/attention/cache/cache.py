"""Keys and values already computed, and where each of them stands.

One object for each attention layer; a layer that is given one calls

    k_all, v_all = cache.update(k, v)                      # the new tokens' keys go in, all that can be seen comes out
    attend(q, k_all, v_all, frame=cache.frame(n_heads))    # the new tokens' queries over them

Because masks and biases are functions of positions, it does not matter in which slot a key lies, whether slots are
empty (position -1) or out of order, or that the rows of a batch are of different length. Keys are held as they came:
under RoPE already turned, so nothing is turned twice.

What ``update`` returns and the frame that goes with it may share the cache's memory: both hold until the next update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import HEADS
from ..frame import Frame


class View(NamedTuple):
    """Where the tokens of the last update stand as queries, and the keys that it returned."""

    n_batch: int
    q_pos: Tensor  # (1 or B, T)
    k_pos: Tensor  # (1 or B, S)
    steady: tuple[int, int] | None = None
    limit: int | None = None


class Edition:
    """What a cache holds, by identity: the same while tokens only arrive, a new one once anything held is changed.

    An object and no number, because a compiled graph can pass it on without being compiled for its value.
    """


class Cache:
    """Base of all caches. ``positions`` may be left out wherever new tokens simply follow those already seen.

    Given as (T,) or (B, T), they come after those held in the same row, in order and without gap; -1 marks padding,
    which is neither kept nor seen (what such a query returns means nothing).
    """

    _view: View | None = None
    edition = Edition()  # reorder, truncate and reset put another in its place

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take in keys and values (B, G, T, D) of new tokens; return all that can be attended to, (B, G, S, D)."""
        raise NotImplementedError  # what is kept and where is what makes a cache

    def frame(self, n_heads: int, n_queries: int | None = None) -> Frame:
        """Where the (last n) tokens of the last update stand as queries, over the keys that it returned."""
        if self._view is None:
            raise ValueError("frame() places the tokens of the last update, so update(k, v) has to come first")
        n_batch, q_pos, k_pos, steady, limit = self._view
        n_new = q_pos.shape[-1]
        n_queries = n_new if n_queries is None else n_queries
        if not 1 <= n_queries <= n_new:
            raise ValueError(f"n_queries={n_queries} must lie between 1 and the {n_new} tokens of the last update")
        skipped = n_new - n_queries
        if steady is not None:
            steady = (steady[0] + skipped, steady[1])
        return Frame(n_batch, n_heads, flat(q_pos[:, skipped:]), flat(k_pos), steady=steady, limit=limit)

    @property
    def lengths(self) -> Tensor:
        """Tokens seen, (1,) or one number a row, as a tensor: nothing is read back from a device."""
        raise NotImplementedError  # each cache counts in its own way

    @property
    def length(self) -> int:
        """Tokens seen, in the longest row."""
        return int(self.lengths.max())

    def next_positions(self, n_tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Where the next n tokens stand, (T,) or (B, T): what RoPE and learned positions ask before the update."""
        lengths = self.lengths if device is None else self.lengths.to(device)
        return flat(lengths[:, None] + torch.arange(n_tokens, device=lengths.device))

    def keys(self) -> tuple[Tensor, Tensor]:
        """All keys still here (B, G, S, D) and their positions (S,) or (B, S), for those who want to look."""
        raise NotImplementedError  # each cache lays its keys out in its own way

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError  # each cache empties what it holds

    def reorder(self, beam_index: Tensor) -> None:
        """Row b goes on from what was row beam_index[b] (beam search)."""
        raise NotImplementedError  # each cache gathers what it holds

    def truncate(self, length: int | Tensor) -> None:
        """Take back the tokens from position ``length`` on, one number or (B,) (drafts that speculation rejects)."""
        raise NotImplementedError  # each cache drops what it holds

    def check_truncate(self, length: int | Tensor) -> None:
        """Raise where ``truncate`` cannot do that; a tensor's values are not read back just for this."""
        if not isinstance(length, Tensor) and length < 0:
            raise ValueError(f"length={length} must not be negative")

    def memory(self) -> int:
        """Bytes held."""
        raise NotImplementedError  # each cache counts what it holds


def check_new(k: Tensor, v: Tensor, held_k: Tensor | None = None, held_v: Tensor | None = None) -> None:
    """Raise unless k and v belong together and to what is held."""
    for name, x, held in (("k", k, held_k), ("v", v, held_v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {HEADS}, got shape {tuple(x.shape)}")
        if held is None:
            continue
        for what, axis in (("batch size", 0), ("heads", 1), ("head width", 3)):
            if x.shape[axis] != held.shape[axis]:
                raise ValueError(f"{name} has {what} {x.shape[axis]}, but the cache holds {what} {held.shape[axis]}")
        if x.dtype != held.dtype:
            raise TypeError(f"{name} is {x.dtype}, but the cache holds {held.dtype}")
        if x.device != held.device:
            raise ValueError(f"{name} is on {x.device}, but the cache is on {held.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has (batch, heads, length) {tuple(k.shape[:3])} but v has {tuple(v.shape[:3])}")
    if k.shape[2] == 0:
        raise ValueError(f"k has length 0 in shape {tuple(k.shape)}; there is nothing to keep")


def as_rows(positions: Tensor, k: Tensor) -> Tensor:
    """(T,) or (B, T) → (1 or B, T), checked against the tokens they belong to."""
    batch, _, length, _ = k.shape
    if positions.is_floating_point() or positions.shape not in ((length,), (batch, length)):
        got = f"{positions.dtype} of shape {tuple(positions.shape)}"
        raise ValueError(f"positions must be whole numbers of shape ({length},) or ({batch}, {length}), got {got}")
    positions = positions.to(device=k.device, dtype=torch.int64)
    return positions[None] if positions.dim() == 1 else positions


def flat(rows: Tensor) -> Tensor:
    """(1, S) → (S,): one row for all of the batch keeps masks and biases small."""
    return rows[0] if rows.shape[0] == 1 else rows


def take_back(positions: Tensor, length: int | Tensor) -> Tensor:
    """Positions (1 or B, S) from ``length`` on become -1."""
    end = length[:, None] if isinstance(length, Tensor) and length.dim() == 1 else length
    return torch.where(positions >= end, -1, positions)


def n_bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)
