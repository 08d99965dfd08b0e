"""``Mask``: a predicate over positions, combined with ``&``, ``|`` and ``~``; and ``BlockPlan``, the blocks to compute.

A mask is one function ``allows(site)`` of broadcast (b, h, i, j), True = may attend. The dense matrix, tiles and
FlexAttention's ``mask_mod`` are derived from it; the block plan from ``bounds``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .frame import ALL, Frame, Site, Span, split_span

EMPTY, PARTIAL, FULL = 0, 1, 2
Bounds = tuple[Tensor, Tensor]
"""(some, every), broadcastable to the grid of blocks: without ``some`` a block is empty, with ``every`` it is full."""


class Box(NamedTuple):
    """The range of positions in each block of a grid: i_min and i_max are (rows, 1), j_min and j_max (1, cols)."""

    i_min: Tensor
    i_max: Tensor
    j_min: Tensor
    j_max: Tensor
    block: tuple[int, int]  # queries and keys in a block
    frame: Frame


class Mask:
    """Base class of all masks. Subclasses define ``allows``, and ``bounds`` if they can prove blocks empty or full."""

    def allows(self, at: Site) -> Tensor:
        raise NotImplementedError

    def bounds(self, box: Box) -> Bounds:
        """Which blocks are known to be empty or full; by default none."""
        shape = torch.broadcast_shapes(box.i_min.shape, box.j_min.shape)
        return torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)

    def tile(self, rows: Span, cols: Span, frame: Frame) -> Tensor:
        """The mask for some rows and columns, booleans broadcastable to (B, H, R, C)."""
        at = frame.site(rows, cols)
        allowed = self.allows(at)
        return allowed & (at.j >= 0) if frame.may_have_gaps else allowed

    def dense(self, n_queries: int, n_keys: int | None = None, n_batch: int = 1, n_heads: int = 1) -> Tensor:
        """The whole matrix (B, H, T, S) in the default frame."""
        n_keys = n_queries if n_keys is None else n_keys
        frame = Frame.aligned(n_batch, n_heads, n_queries, n_keys)
        return self.for_length(n_keys).tile(ALL, ALL, frame).expand(n_batch, n_heads, n_queries, n_keys)

    def check(self, frame: Frame) -> None:
        """Raise if a tensor stored in the mask does not fit this frame."""

    def for_length(self, length: int) -> Mask:
        """The mask for a sequence of this length; most masks do not depend on it."""
        return self._with_parts(Mask, lambda part: part.for_length(length))

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on another device."""
        return self._with_parts(Mask | Tensor, lambda part: part.to(device))

    def _with_parts(self, kind: Any, change: Callable[[Any], Any]) -> Mask:
        """The same mask with ``change`` applied to its fields of this kind."""
        if not is_dataclass(self):
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(x) for name, x in values.items() if isinstance(x, kind)}
        return replace(self, **changed) if changed else self

    def __and__(self, other: object) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: object) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    a: Mask
    b: Mask

    def check(self, frame: Frame) -> None:
        self.a.check(frame)
        self.b.check(frame)


class And(_Pair):
    def allows(self, at: Site) -> Tensor:
        return self.a.allows(at) & self.b.allows(at)

    def bounds(self, box: Box) -> Bounds:
        (some_a, every_a), (some_b, every_b) = self.a.bounds(box), self.b.bounds(box)
        return some_a & some_b, every_a & every_b


class Or(_Pair):
    def allows(self, at: Site) -> Tensor:
        return self.a.allows(at) | self.b.allows(at)

    def bounds(self, box: Box) -> Bounds:
        (some_a, every_a), (some_b, every_b) = self.a.bounds(box), self.b.bounds(box)
        return some_a | some_b, every_a | every_b


@dataclass(frozen=True, eq=False)
class Not(Mask):
    a: Mask

    def allows(self, at: Site) -> Tensor:
        return ~self.a.allows(at)

    def bounds(self, box: Box) -> Bounds:
        some, every = self.a.bounds(box)
        return ~every, ~some

    def check(self, frame: Frame) -> None:
        self.a.check(frame)


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Which blocks of queries × keys are empty, full or partial, over the whole batch and all heads."""

    kinds: Tensor  # (query blocks, key blocks) of EMPTY, PARTIAL, FULL
    block: tuple[int, int]  # queries and keys in a block
    shape: tuple[int, int]  # (T, S)

    @property
    def density(self) -> float:
        """The fraction of blocks that must be computed."""
        return float((self.kinds != EMPTY).float().mean())

    def rows(self) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        """For each block of queries, its non-empty blocks of keys and whether each needs the mask."""
        (n_queries, n_keys), (height, width) = self.shape, self.block
        columns = split_span(slice(0, n_keys), width)
        for rows, kinds in zip(split_span(slice(0, n_queries), height), self.kinds.tolist(), strict=True):
            yield rows, [(cols, kind == PARTIAL) for cols, kind in zip(columns, kinds, strict=True) if kind != EMPTY]


def plan(mask: Mask | None, frame: Frame, block: tuple[int, int]) -> BlockPlan:
    """The block plan of a mask in a frame, from the range of positions in each block, in O((T/block)²)."""
    i_min, i_max = block_range(frame.q_pos, block[0])
    j_min, j_max = block_range(frame.k_pos, block[1])
    box = Box(i_min[:, None], i_max[:, None], j_min[None], j_max[None], block, frame)
    some = every = torch.ones(len(i_min), len(j_min), dtype=torch.bool)
    if mask is not None:
        some, every = mask.bounds(box)
    if frame.may_have_gaps:
        some, every = some & (box.j_max >= 0), every & (box.j_min >= 0)
    kinds = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
    return BlockPlan(kinds.expand(len(i_min), len(j_min)), block, (frame.n_queries, frame.n_keys))


def block_range(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value in each block of the last axis, over the batch, on the CPU."""
    chunks = x.detach().cpu().reshape(-1, x.shape[-1]).split(size, dim=-1)
    return torch.stack([c.min() for c in chunks]), torch.stack([c.max() for c in chunks])


def check_stored(name: str, x: Tensor, frame: Frame, axes: str, sizes: tuple[int, ...], fits: bool) -> None:
    """Raise unless the tensor stored in a mask fits the frame and is on its device."""
    if not fits:
        raise ValueError(f"mask {name} of shape {tuple(x.shape)} does not fit ({axes}) = {sizes}")
    if x.device != frame.device:
        move = f"mask.to({str(frame.device)!r}) moves it"
        raise ValueError(f"mask {name} is on {x.device} but q is on {frame.device}; {move}")
