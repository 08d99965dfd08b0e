"""``Frame``: the positions and documents of queries and keys.

Masks and biases are functions of *positions*, not of tensor indices, so one definition serves full forward passes,
cached decoding, ring caches whose slots are out of order, and packed documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Span = slice | Tensor  # some rows or columns: a slice without step, or a 1-D tensor of indices
ALL = slice(None)
HEADS_SHAPE = "(batch, heads, length, width)"


def check_heads(q: Tensor, k: Tensor, v: Tensor, same_width: bool = True) -> None:
    """Raise unless q (B, H, T, D), k and v (B, G, S, D) can attend."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {HEADS_SHAPE}, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if 0 in x.shape:
            axis = ("batch", "heads", "length", "width")[x.shape.index(0)]
            raise ValueError(f"{name} is empty: {axis} is 0 in shape {tuple(x.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {x.dtype}; give them one dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}; put them on one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q has batch size {q.shape[0]} but {name} has {x.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads but v has {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has length {k.shape[2]} but v has {v.shape[2]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} key heads")
    if same_width and q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head width {q.shape[3]} but k has {k.shape[3]}")


class Site(NamedTuple):
    """The (query, key) pairs of one tile, as tensors that broadcast to (B, H, R, C)."""

    b: Tensor  # (B, 1, 1, 1) batch index
    h: Tensor  # (1, H, 1, 1) head index
    i: Tensor  # (B or 1, 1, R, 1) position of the query
    j: Tensor  # (B or 1, 1, 1, C) position of the key; negative for an empty slot
    row: Tensor  # (1, 1, R, 1) index of the query in its tensor
    col: Tensor  # (1, 1, 1, C) index of the key in its tensor
    q_doc: Tensor | None  # same shape as i: the query's document id, if documents are packed
    k_doc: Tensor | None  # same shape as j: the key's document id


@dataclass(frozen=True, eq=False)
class Frame:
    """Positions (and document ids) of T queries and S keys, for batch size B and H query heads."""

    n_batch: int
    n_heads: int
    q_pos: Tensor  # (T,) or (B, T)
    k_pos: Tensor  # (S,) or (B, S); -1 for unwritten cache slots and for padding
    q_doc: Tensor | None = None  # (T,) or (B, T)
    k_doc: Tensor | None = None  # (S,) or (B, S)
    steady: tuple[int, int] | None = None  # first query and key position, if both are consecutive in all rows
    limit: int | None = None  # upper bound of |key - query position|, empty slots (-1) included; avoids a device sync
    first_batch: int = 0  # offsets in the larger frame that this one is a ``part`` of
    first_head: int = 0

    @property
    def n_queries(self) -> int:
        return self.q_pos.shape[-1]

    @property
    def n_keys(self) -> int:
        return self.k_pos.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.q_pos.device

    @classmethod
    def aligned(
        cls,
        n_batch: int,
        n_heads: int,
        n_queries: int,
        n_keys: int,
        device: torch.device | str = "cpu",
        *,
        q_start: int | None = None,
        k_start: int = 0,
    ) -> Frame:
        """Consecutive keys from k_start and queries from q_start; by default the last query is at the last key."""
        q_start = k_start + n_keys - n_queries if q_start is None else q_start
        q_pos = torch.arange(n_queries, device=device) + q_start
        k_pos = torch.arange(n_keys, device=device) + k_start
        return cls(n_batch, n_heads, q_pos, k_pos, steady=(q_start, k_start))

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Frame:
        """The default frame for heads q (B, H, T, D) and k (B, G, S, D)."""
        return cls.aligned(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raise unless the frame has the sizes and device of q and k."""
        expected = (self.n_batch, self.n_heads, self.n_queries, self.n_keys)
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if expected != sizes:
            raise ValueError(f"frame is for (batch, heads, queries, keys) = {expected}, but q and k have {sizes}")
        if self.device != q.device:
            raise ValueError(f"q is on {q.device} but frame is on {self.device}; put them on one device")

    def with_documents(self, q_doc: Tensor, k_doc: Tensor | None = None) -> Frame:
        return replace(self, q_doc=q_doc, k_doc=q_doc if k_doc is None else k_doc)

    def reach(self) -> tuple[int, int]:
        """Bounds on the distance, key position - query position."""
        if self.steady is not None:
            q0, k0 = self.steady
            return k0 - (q0 + self.n_queries - 1), k0 + self.n_keys - 1 - q0
        if self.limit is not None:
            return -self.limit, self.limit
        return int(self.k_pos.min() - self.q_pos.max()), int(self.k_pos.max() - self.q_pos.min())

    def site(self, rows: Span | None = None, cols: Span | None = None) -> Site:
        """The coordinates of a tile, by default of the whole matrix."""
        # The default is not ALL because torch 2.11 cannot trace a slice as a default argument.
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        device = self.device
        row = torch.arange(self.n_queries, device=device)[rows]
        col = torch.arange(self.n_keys, device=device)[cols]
        return Site(
            b=(torch.arange(self.n_batch, device=device) + self.first_batch).view(-1, 1, 1, 1),
            h=(torch.arange(self.n_heads, device=device) + self.first_head).view(1, -1, 1, 1),
            i=_as_rows(self.q_pos, rows),
            j=_as_cols(self.k_pos, cols),
            row=row.view(1, 1, -1, 1),
            col=col.view(1, 1, 1, -1),
            q_doc=None if self.q_doc is None else _as_rows(self.q_doc, rows),
            k_doc=None if self.k_doc is None else _as_cols(self.k_doc, cols),
        )

    def site_at(self, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Site:
        """The coordinates of individual (query, key) pairs by index, for FlexAttention's mask_mod and score_mod."""
        if self.steady is not None:
            i, j = row + self.steady[0], col + self.steady[1]
        else:
            i, j = _lookup(self.q_pos, b, row), _lookup(self.k_pos, b, col)
        q_doc = None if self.q_doc is None else _lookup(self.q_doc, b, row)
        k_doc = None if self.k_doc is None else _lookup(self.k_doc, b, col)
        return Site(b, h, i, j, row, col, q_doc, k_doc)

    @property
    def may_have_gaps(self) -> bool:
        """Whether a key slot may be empty (have a negative position)."""
        return self.steady is None or self.steady[1] < 0

    @property
    def heads(self) -> slice:
        """This frame's heads, as an index into per-head tables."""
        return slice(self.first_head, self.first_head + self.n_heads)

    def part(self, batch: range, heads: range) -> Frame:
        """The frame of a range of batch entries and heads."""

        def select_batch(x: Tensor) -> Tensor:
            return x if x.dim() == 1 else x[batch.start : batch.stop]

        return replace(
            self,
            n_batch=len(batch),
            n_heads=len(heads),
            q_pos=select_batch(self.q_pos),
            k_pos=select_batch(self.k_pos),
            q_doc=None if self.q_doc is None else select_batch(self.q_doc),
            k_doc=None if self.k_doc is None else select_batch(self.k_doc),
            first_batch=self.first_batch + batch.start,
            first_head=self.first_head + heads.start,
        )


def _as_rows(x: Tensor, rows: Span) -> Tensor:
    x = x[..., rows]
    return x.view(1, 1, -1, 1) if x.dim() == 1 else x[:, None, :, None]


def _as_cols(x: Tensor, cols: Span) -> Tensor:
    x = x[..., cols]
    return x.view(1, 1, 1, -1) if x.dim() == 1 else x[:, None, None, :]


def _lookup(x: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return x[index] if x.dim() == 1 else x[b, index]


def span_length(span: Span, total: int) -> int:
    return len(range(total)[span]) if isinstance(span, slice) else int(span.shape[0])


def split_span(span: slice, most: int) -> list[slice]:
    return [slice(i, min(i + most, span.stop)) for i in range(span.start, span.stop, most)]


def as_range(span: Span, total: int) -> tuple[int, int] | None:
    """(start, stop) of a contiguous slice; None for other spans."""
    if not isinstance(span, slice) or span.step not in (None, 1):
        return None
    # The same as slice.indices, which torch 2.11 cannot trace.
    start, stop = 0 if span.start is None else span.start, total if span.stop is None else span.stop
    start, stop = start + total if start < 0 else start, stop + total if stop < 0 else stop
    start = min(max(start, 0), total)
    return start, max(min(stop, total), start)
