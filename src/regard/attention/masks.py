"""The masks: causal, window, prefix, document, padding, dense, and sparse patterns for long inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..foundation.checks import check_positive
from .frame import Frame, Site
from .mask import BlockPlan, Bounds, Box, Mask, block_range, check_stored, plan

# fmt: off
__all__ = [
    "BlockPlan", "Mask", "bigbird", "blocks", "causal", "dilated", "document", "end_blocks", "everything", "fixed",
    "from_dense", "global_tokens", "grid_windows", "packed", "padding", "plan", "prefix", "random_blocks", "strided",
    "valid_keys", "window",
]
# fmt: on


@dataclass(frozen=True)
class Everything(Mask):
    def allows(self, at: Site) -> Tensor:
        return (at.i >= at.i) & (at.j >= at.j)  # True everywhere, in the shape of the tile

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
        return box.j_min < self.length, box.j_max < self.length


@dataclass(frozen=True)
class Document(Mask):
    def allows(self, at: Site) -> Tensor:
        assert at.q_doc is not None and at.k_doc is not None
        return at.q_doc == at.k_doc

    def bounds(self, box: Box) -> Bounds:
        assert box.frame.q_doc is not None and box.frame.k_doc is not None
        return _document_bounds(box.frame.q_doc, box.frame.k_doc, box.block)

    def check(self, frame: Frame) -> None:
        if frame.q_doc is None or frame.k_doc is None:
            raise ValueError("mask document() needs a frame with document ids: frame.with_documents(...)")


def _document_bounds(q_doc: Tensor, k_doc: Tensor, block: tuple[int, int]) -> Bounds:
    q_low, q_high = (x[:, None] for x in block_range(q_doc, block[0]))
    k_low, k_high = block_range(k_doc, block[1])
    one_document = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return (q_low <= k_high) & (k_low <= q_high), one_document


class Padding(Mask):
    """A mask that depends on the key only."""


@dataclass(frozen=True, eq=False)
class Lengths(Padding):
    lengths: Tensor  # (B,)

    def allows(self, at: Site) -> Tensor:
        return at.j < self.lengths[at.b]

    def bounds(self, box: Box) -> Bounds:
        return box.j_min < self.lengths.amax().cpu(), box.j_max < self.lengths.amin().cpu()

    def check(self, frame: Frame) -> None:
        if self.lengths.shape[0] != frame.n_batch:
            n_lengths = self.lengths.shape[0]
            raise ValueError(f"mask padding(lengths) has {n_lengths} lengths, but the batch size is {frame.n_batch}")
        check_stored("padding(lengths)", self.lengths, frame, "batch", (frame.n_batch,), fits=True)


@dataclass(frozen=True, eq=False)
class ValidKeys(Padding):
    valid: Tensor  # (B, S) bool

    def allows(self, at: Site) -> Tensor:
        return self.valid[at.b, at.col]

    def bounds(self, box: Box) -> Bounds:
        low, high = block_range(self.valid.long(), box.block[1])
        return (high > 0)[None], (low > 0)[None]

    def check(self, frame: Frame) -> None:
        sizes = (frame.n_batch, frame.n_keys)
        check_stored("valid_keys(...)", self.valid, frame, "batch, keys", sizes, tuple(self.valid.shape) == sizes)


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    documents: Tensor  # (B, T) integers

    def allows(self, at: Site) -> Tensor:
        return self.documents[at.b, at.row] == self.documents[at.b, at.col]

    def bounds(self, box: Box) -> Bounds:
        return _document_bounds(self.documents, self.documents, box.block)

    def check(self, frame: Frame) -> None:
        sizes = (frame.n_batch, frame.n_queries, frame.n_keys)
        fits = tuple(self.documents.shape) == sizes[:2] and frame.n_queries == frame.n_keys
        check_stored("packed(...)", self.documents, frame, "batch, queries, keys", sizes, fits)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    allowed: Tensor  # (B or 1, H or 1, T, S) bool

    def allows(self, at: Site) -> Tensor:
        b = at.b if self.allowed.shape[0] > 1 else torch.zeros_like(at.b)
        h = at.h if self.allowed.shape[1] > 1 else torch.zeros_like(at.h)
        return self.allowed[b, h, at.row, at.col]

    def bounds(self, box: Box) -> Bounds:
        heads = self.allowed.flatten(0, 1)
        some = F.max_pool2d(heads.any(0)[None].float(), box.block, ceil_mode=True)[0]
        every = -F.max_pool2d(-heads.all(0)[None].float(), box.block, ceil_mode=True)[0]
        return some.bool().cpu(), every.bool().cpu()

    def check(self, frame: Frame) -> None:
        sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
        shape = tuple(self.allowed.shape)
        fits = shape[2:] == sizes[2:] and shape[0] in (1, sizes[0]) and shape[1] in (1, sizes[1])
        check_stored("from_dense(...)", self.allowed, frame, "batch, heads, queries, keys", sizes, fits)


def everything() -> Mask:
    """Full attention."""
    return Everything()


def causal() -> Mask:
    """j ≤ i: no query attends to a later key (Vaswani et al. 2017, §3.2.3)."""
    return Causal()


def window(size: int, ahead: int = 0) -> Mask:
    """The last ``size`` keys up to the query's own position and ``ahead`` keys after it (Longformer, Mistral)."""
    check_positive(size=size)
    if ahead < 0:
        raise ValueError(f"window ahead={ahead} must not be negative")
    return Window(size, ahead)


def prefix(length: int) -> Mask:
    """The first ``length`` keys; ``causal() | prefix(n)`` is the prefix language model of T5 §3.2.1."""
    check_positive(length=length)
    return Prefix(length)


def document() -> Mask:
    """Keys of the query's own document, by the frame's document ids."""
    return Document()


def packed(documents: Tensor) -> Mask:
    """Keys of the query's own document, given the document id of each token (B, T); self-attention only."""
    if documents.dim() != 2 or documents.is_floating_point():
        got = f"{documents.dtype} of shape {tuple(documents.shape)}"
        raise ValueError(f"packed documents must be integers of shape (B, T), got {got}")
    return Packed(documents)


def padding(lengths: Tensor) -> Mask:
    """Keys 0 … lengths[b] - 1 of sequence b; the rest is padding."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        got = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise ValueError(f"padding lengths must be integers of shape (B,), got {got}")
    return Lengths(lengths)


def valid_keys(valid: Tensor) -> Mask:
    """Keys where ``valid`` (B, S) is True; the rest is padding."""
    if valid.dim() != 2 or valid.dtype != torch.bool:
        raise ValueError(f"valid_keys needs booleans of shape (B, S), got {valid.dtype} of shape {tuple(valid.shape)}")
    return ValidKeys(valid)


def from_dense(allowed: Tensor) -> Mask:
    """A boolean mask (T, S), (B, T, S) or (B or 1, H or 1, T, S), True = may attend."""
    if allowed.dtype != torch.bool:
        raise ValueError(f"from_dense needs booleans (True = may attend), got {allowed.dtype}")
    if not 2 <= allowed.dim() <= 4:
        raise ValueError(f"from_dense needs 2 to 4 dimensions, got shape {tuple(allowed.shape)}")
    if allowed.dim() == 2:
        allowed = allowed[None, None]
    return Dense(allowed[:, None] if allowed.dim() == 3 else allowed)


MAX_COUNTED_BLOCKS = 1 << 22  # random blocks evaluated for a plan; beyond this, every block counts as partial


@dataclass(frozen=True)
class Multiples(Mask):
    """Keys whose distance to the query is a multiple of ``step``."""

    step: int

    def allows(self, at: Site) -> Tensor:
        return (at.i - at.j) % self.step == 0

    def bounds(self, box: Box) -> Bounds:
        low, high = box.i_min - box.j_max, box.i_max - box.j_min
        some = torch.div(high, self.step, rounding_mode="floor") * self.step >= low
        return some, (low == high) & some if self.step > 1 else torch.ones_like(some)


@dataclass(frozen=True)
class Summary(Mask):
    """The last ``count`` of every ``stride`` keys."""

    stride: int
    count: int

    def allows(self, at: Site) -> Tensor:
        return (at.j % self.stride >= self.stride - self.count) & (at.i >= at.i)  # in the shape of the tile


@dataclass(frozen=True)
class Blocks(Mask):
    size: int
    neighbours: int

    def allows(self, at: Site) -> Tensor:
        return (_block(at.i, self.size) - _block(at.j, self.size)).abs() <= self.neighbours

    def bounds(self, box: Box) -> Bounds:
        i_low, i_high = _block(box.i_min, self.size), _block(box.i_max, self.size)
        j_low, j_high = _block(box.j_min, self.size), _block(box.j_max, self.size)
        far = torch.maximum(i_high - j_low, j_high - i_low)
        near = torch.maximum(i_low - j_high, j_low - i_high)
        return near <= self.neighbours, far <= self.neighbours


@dataclass(frozen=True)
class Globals(Mask):
    count: int

    def allows(self, at: Site) -> Tensor:
        return (at.i < self.count) | (at.j < self.count)

    def bounds(self, box: Box) -> Bounds:
        some = (box.i_min < self.count) | (box.j_min < self.count)
        return some, (box.i_max < self.count) | (box.j_max < self.count)


@dataclass(frozen=True)
class EndBlocks(Mask):
    """Neighbouring blocks, the first and the last block. ``length`` is None until ``for_length`` sets it."""

    size: int
    whole: int
    length: int | None = None

    def for_length(self, length: int) -> Mask:
        return EndBlocks(self.size, self.whole, length)

    def allows(self, at: Site) -> Tensor:
        assert self.length is not None
        i, j, last = _block(at.i, self.size), _block(at.j, self.size), (self.length - 1) // self.size
        ends = (i == 0) | (j == 0) | (i == last) | (j == last)
        # A tensor comparison, so that a graph traced with a symbolic length is not specialised to one.
        is_short = torch.full((), self.length, device=at.i.device) <= self.whole
        return ends | ((i - j).abs() <= 1) | is_short

    def bounds(self, box: Box) -> Bounds:
        some, every = Blocks(self.size, 1).bounds(box)
        assert self.length is not None
        first_end, last_start = self.size, (self.length - 1) // self.size * self.size
        some = some | (box.i_min < first_end) | (box.j_min < first_end)
        some = some | (box.i_max >= last_start) | (box.j_max >= last_start)
        every = every | (box.i_max < first_end) | (box.j_max < first_end)
        every = every | (box.i_min >= last_start) | (box.j_min >= last_start)
        return (some, every) if self.length > self.whole else (torch.ones_like(some), torch.ones_like(every))

    def check(self, frame: Frame) -> None:
        if self.length is None:
            raise ValueError("mask end_blocks(...) needs the sequence length: mask.for_length(length)")


@dataclass(frozen=True)
class RandomBlocks(Mask):
    size: int
    percent: float
    seed: int

    def allows(self, at: Site) -> Tensor:
        return self._is_open(_block(at.i, self.size), _block(at.j, self.size))

    def bounds(self, box: Box) -> Bounds:
        top, bottom = _block(box.i_min, self.size), _block(box.i_max, self.size) + 1
        left, right = _block(box.j_min, self.size), _block(box.j_max, self.size) + 1
        first_row, first_col = int(top.min()), int(left.min())
        rows, cols = torch.arange(first_row, int(bottom.max())), torch.arange(first_col, int(right.max()))
        if len(rows) * len(cols) > MAX_COUNTED_BLOCKS:
            return super().bounds(box)
        # A summed-area table gives the number of open blocks in any rectangle from four entries.
        counts = F.pad(self._is_open(rows[:, None], cols[None]).long().cumsum(0).cumsum(1), (1, 0, 1, 0))
        top, bottom, left, right = top - first_row, bottom - first_row, left - first_col, right - first_col
        n_open = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left]
        return n_open > 0, n_open == (bottom - top) * (right - left)

    def _is_open(self, i_block: Tensor, j_block: Tensor) -> Tensor:
        """A hash of the block's indices, so that the mask does not depend on how it is tiled."""
        x = (i_block * 0x9E3779B1 + j_block * 0x85EBCA6B + self.seed * 0xC2B2AE35) & 0x7FFFFFFF
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        x = ((x ^ (x >> 12)) * 0x297A2D39) & 0x7FFFFFFF
        x = x ^ (x >> 15)
        return x % 10_000 < round(self.percent * 100)


@dataclass(frozen=True)
class GridWindows(Mask):
    width: int
    side: int
    shift: int
    n_before: int

    def allows(self, at: Site) -> Tensor:
        same = self._window(at.i) == self._window(at.j)
        return same | (at.i < self.n_before) | (at.j < self.n_before)

    def _window(self, position: Tensor) -> Tensor:
        cell = position - self.n_before
        row, col = _block(cell, self.width), cell % self.width
        across = self.width // self.side + 2  # more than the windows in a row, so that their numbers are distinct
        return _block(row + self.shift, self.side) * across + _block(col + self.shift, self.side)


def _block(position: Tensor, size: int) -> Tensor:
    return torch.div(position, size, rounding_mode="floor")


def dilated(size: int, step: int) -> Mask:
    """Every ``step``-th of the last ``size`` · ``step`` keys (Longformer, §3.1)."""
    check_positive(size=size, step=step)
    return Window(size * step, 0) & Multiples(step)


def strided(stride: int, both_ways: bool = False) -> Mask:
    """The last ``stride`` keys and every ``stride``-th key before them (Child et al. 2019, eq. 4), or on both sides."""
    check_positive(stride=stride)
    if both_ways:
        return Window(stride, stride - 1) | Multiples(stride)
    return Causal() & (Window(stride, 0) | Multiples(stride))


def fixed(stride: int, summary: int = 1) -> Mask:
    """The query's block of ``stride`` keys and the last ``summary`` keys of every block (Child et al. 2019, eq. 5)."""
    check_positive(stride=stride)
    if not 1 <= summary <= stride:
        raise ValueError(f"fixed summary={summary} must lie between 1 and stride={stride}")
    return Causal() & (Blocks(stride, 0) | Summary(stride, summary))


def blocks(size: int, neighbours: int = 0) -> Mask:
    """Keys of the query's own block and of ``neighbours`` blocks on each side (the local part of BigBird)."""
    check_positive(size=size)
    if neighbours < 0:
        raise ValueError(f"blocks neighbours={neighbours} must not be negative")
    return Blocks(size, neighbours)


def global_tokens(count: int) -> Mask:
    """The first ``count`` positions attend to all positions, and all attend to them (Longformer, §3.1)."""
    check_positive(count=count)
    return Globals(count)


def random_blocks(size: int, percent: float, seed: int = 0) -> Mask:
    """Each (query block, key block) is visible with probability ``percent`` %, fixed by the seed (BigBird, §2)."""
    check_positive(size=size)
    if not 0 <= percent <= 100:
        raise ValueError(f"random_blocks percent={percent} must lie between 0 and 100")
    return RandomBlocks(size, percent, seed)


def end_blocks(size: int, whole: int = 0) -> Mask:
    """Neighbouring blocks, with the first and the last block global (BigBird without random blocks).

    Sequences of up to ``whole`` tokens get full attention.
    """
    check_positive(size=size)
    return EndBlocks(size, whole)


def bigbird(size: int, global_count: int, percent: float, seed: int = 0) -> Mask:
    """Neighbouring blocks, global tokens and random blocks (Zaheer et al. 2020, figure 1)."""
    return blocks(size, neighbours=1) | global_tokens(global_count) | random_blocks(size, percent, seed)


def grid_windows(width: int, side: int, shift: int = 0, n_before: int = 0) -> Mask:
    """Windows of side × side cells on a grid ``width`` cells wide, moved by ``shift`` (Swin, Liu et al. 2021, §3.2).

    The ``n_before`` tokens before the grid (such as a class token) are global.
    """
    check_positive(width=width, side=side)
    return GridWindows(width, side, shift, n_before)
