"""The masks every Transformer needs: causal, window, prefix, document, padding and any dense matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..frame import Frame, Site
from .mask import Bounds, Box, Mask, at_least_one, block_range, same_device


@dataclass(frozen=True)
class Everything(Mask):
    def allows(self, at: Site) -> Tensor:
        return (at.i >= at.i) & (at.j >= at.j)

    def bounds(self, box: Box) -> Bounds:
        yes = (box.i_min <= box.i_max) & (box.j_min <= box.j_max)
        return yes, yes


@dataclass(frozen=True)
class Causal(Mask):
    def allows(self, at: Site) -> Tensor:
        return at.j <= at.i

    def bounds(self, box: Box) -> Bounds:
        return box.j_min <= box.i_max, box.j_max <= box.i_min


@dataclass(frozen=True)
class Window(Mask):
    size: int
    ahead: int

    def allows(self, at: Site) -> Tensor:
        return (at.j > at.i - self.size) & (at.j <= at.i + self.ahead)

    def bounds(self, box: Box) -> Bounds:
        some = (box.j_max > box.i_min - self.size) & (box.j_min <= box.i_max + self.ahead)
        every = (box.j_min > box.i_max - self.size) & (box.j_max <= box.i_min + self.ahead)
        return some, every


@dataclass(frozen=True)
class Prefix(Mask):
    length: int

    def allows(self, at: Site) -> Tensor:
        return (at.j < self.length) & (at.i >= at.i)

    def bounds(self, box: Box) -> Bounds:
        rows = box.i_min <= box.i_max  # all True: gives the answer its shape
        return (box.j_min < self.length) & rows, (box.j_max < self.length) & rows


@dataclass(frozen=True)
class Document(Mask):
    def allows(self, at: Site) -> Tensor:
        assert at.q_doc is not None and at.k_doc is not None
        return at.q_doc == at.k_doc

    def bounds(self, box: Box) -> Bounds:
        frame, (rows, cols) = box.frame, box.block
        assert frame.q_doc is not None and frame.k_doc is not None
        q_low, q_high = block_range(frame.q_doc, rows)
        k_low, k_high = block_range(frame.k_doc, cols)
        q_low, q_high, k_low, k_high = q_low[:, None], q_high[:, None], k_low[None], k_high[None]
        return (q_low <= k_high) & (k_low <= q_high), (q_low == q_high) & (k_low == k_high) & (q_low == k_low)

    def check(self, frame: Frame) -> None:
        if frame.q_doc is None or frame.k_doc is None:
            raise ValueError("mask document() needs a frame that knows its documents: frame.with_documents(...)")


class Padding(Mask):
    """Masks that depend on the key alone: what is padding is so for every query."""


@dataclass(frozen=True, eq=False)
class Lengths(Padding):
    lengths: Tensor  # (B,)

    def allows(self, at: Site) -> Tensor:
        return at.j < self.lengths[at.b]

    def bounds(self, box: Box) -> Bounds:
        shortest, longest = self.lengths.amin().cpu(), self.lengths.amax().cpu()
        rows = box.i_min <= box.i_max
        return (box.j_min < longest) & rows, (box.j_max < shortest) & rows

    def check(self, frame: Frame) -> None:
        if self.lengths.shape[0] != frame.n_batch:
            raise ValueError(f"mask padding(lengths) has {self.lengths.shape[0]} lengths, the batch is {frame.n_batch}")
        same_device("padding(lengths)", self.lengths, frame)

    def to(self, device: torch.device | str) -> Mask:
        return Lengths(self.lengths.to(device))


@dataclass(frozen=True, eq=False)
class Keep(Padding):
    keep: Tensor  # (B, S) bool

    def allows(self, at: Site) -> Tensor:
        return self.keep[at.b, at.col]

    def bounds(self, box: Box) -> Bounds:
        low, high = block_range(self.keep.long(), box.block[1])
        rows = box.i_min <= box.i_max
        return (high > 0)[None] & rows, (low > 0)[None] & rows

    def check(self, frame: Frame) -> None:
        if tuple(self.keep.shape) != (frame.n_batch, frame.n_keys):
            sizes = (frame.n_batch, frame.n_keys)
            raise ValueError(f"mask keep(...) of shape {tuple(self.keep.shape)} does not fit (batch, keys) = {sizes}")
        same_device("keep(...)", self.keep, frame)

    def to(self, device: torch.device | str) -> Mask:
        return Keep(self.keep.to(device))


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    documents: Tensor  # (B, T) whole numbers

    def allows(self, at: Site) -> Tensor:
        return self.documents[at.b, at.row] == self.documents[at.b, at.col]

    def bounds(self, box: Box) -> Bounds:
        q_low, q_high = (x[:, None] for x in block_range(self.documents, box.block[0]))
        k_low, k_high = block_range(self.documents, box.block[1])
        one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return (k_low <= q_high) & (q_low <= k_high), one

    def check(self, frame: Frame) -> None:
        sizes = (frame.n_batch, frame.n_queries, frame.n_keys)
        if tuple(self.documents.shape) != sizes[:2] or frame.n_queries != frame.n_keys:
            shape = tuple(self.documents.shape)
            raise ValueError(f"mask packed(...) of shape {shape} does not fit (batch, queries, keys) = {sizes}")
        same_device("packed(...)", self.documents, frame)

    def to(self, device: torch.device | str) -> Mask:
        return Packed(self.documents.to(device))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    allowed: Tensor  # (B or 1, H or 1, T, S) bool

    def allows(self, at: Site) -> Tensor:
        b = at.b if self.allowed.shape[0] > 1 else torch.zeros_like(at.b)
        h = at.h if self.allowed.shape[1] > 1 else torch.zeros_like(at.h)
        return self.allowed[b, h, at.row, at.col]

    def bounds(self, box: Box) -> Bounds:
        any_head = self.allowed.flatten(0, 1).any(0)
        every_head = self.allowed.flatten(0, 1).all(0)
        return _reduce_blocks(any_head, box.block, True).cpu(), _reduce_blocks(every_head, box.block, False).cpu()

    def check(self, frame: Frame) -> None:
        sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
        given = tuple(self.allowed.shape)
        fits = given[2:] == sizes[2:] and all(g in (1, n) for g, n in zip(given[:2], sizes[:2], strict=True))
        if not fits:
            wanted = f"(batch, heads, queries, keys) = {sizes}"
            raise ValueError(f"mask from_dense(...) of shape {given} does not fit {wanted}")
        same_device("from_dense(...)", self.allowed, frame)

    def to(self, device: torch.device | str) -> Mask:
        return Dense(self.allowed.to(device))


def _reduce_blocks(x: Tensor, block: tuple[int, int], some: bool) -> Tensor:
    rows, cols = (torch.arange(0, n, size) for n, size in zip(x.shape, block, strict=True))
    out = torch.empty(len(rows), len(cols), dtype=torch.bool)
    for a, row in enumerate(rows.tolist()):
        for b, col in enumerate(cols.tolist()):
            part = x[row : row + block[0], col : col + block[1]]
            out[a, b] = part.any() if some else part.all()
    return out


def everything() -> Mask:
    """Everyone sees everyone: the encoder's full attention."""
    return Everything()


def causal() -> Mask:
    """j ≤ i: no query sees a later key (Vaswani et al. 2017, §3.2.3)."""
    return Causal()


def window(size: int, ahead: int = 0) -> Mask:
    """The ``size`` most recent keys, the query's own included, and ``ahead`` keys after it (Longformer, Mistral)."""
    at_least_one("size", size)
    if ahead < 0:
        raise ValueError(f"window ahead={ahead} must not be negative")
    return Window(size, ahead)


def prefix(length: int) -> Mask:
    """The first ``length`` keys; ``causal() | prefix(n)`` is the prefix language model of T5 §3.2.1."""
    at_least_one("length", length)
    return Prefix(length)


def document() -> Mask:
    """Only keys of the query's own document, where several are packed into one row."""
    return Document()


def packed(documents: Tensor) -> Mask:
    """Only keys of the query's own document, its number given for each token: (B, T), queries and keys the same."""
    if documents.dim() != 2 or documents.is_floating_point():
        got = f"{documents.dtype} of shape {tuple(documents.shape)}"
        raise ValueError(f"packed documents must be whole numbers of shape (B, T), got {got}")
    return Packed(documents)


def padding(lengths: Tensor) -> Mask:
    """Keys 0 … lengths[b]-1 of each sequence; what follows is padding."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        got = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise ValueError(f"padding lengths must be whole numbers of shape (B,), got {got}")
    return Lengths(lengths)


def keep(real: Tensor) -> Mask:
    """Keys that are no padding, wherever the padding stands: (B, S) booleans, True = a real token."""
    if real.dim() != 2 or real.dtype != torch.bool:
        raise ValueError(f"keep wants booleans of shape (B, S), got {real.dtype} of shape {tuple(real.shape)}")
    return Keep(real)


def from_dense(allowed: Tensor) -> Mask:
    """Any boolean matrix: (T, S), (B, T, S) or (B or 1, H or 1, T, S). True = may look."""
    if allowed.dtype != torch.bool:
        raise ValueError(f"from_dense wants booleans (True = may look), got {allowed.dtype}")
    if not 2 <= allowed.dim() <= 4:
        raise ValueError(f"from_dense wants 2 to 4 dimensions, got shape {tuple(allowed.shape)}")
    if allowed.dim() == 2:
        allowed = allowed[None, None]
    return Dense(allowed[:, None] if allowed.dim() == 3 else allowed)
