"""Sparse patterns for long inputs: dilated, strided, fixed, blocks, global tokens, random blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..frame import Site
from .basic import Causal, Window
from .mask import Bounds, Box, Mask, at_least_one

MOST_COUNTED = 1 << 22
"""Random blocks that are looked at one by one to plan; beyond, every tile is called partial."""


@dataclass(frozen=True)
class Dilated(Mask):
    size: int
    step: int

    def allows(self, at: Site) -> Tensor:
        back = at.i - at.j
        return (back >= 0) & (back < self.size * self.step) & (back % self.step == 0)

    def bounds(self, box: Box) -> Bounds:
        some, every = Window(self.size * self.step, 0).bounds(box)
        some_step, every_step = _multiple_of(self.step, box.i_min - box.j_max, box.i_max - box.j_min)
        return some & some_step, every & every_step


@dataclass(frozen=True)
class Strided(Mask):
    stride: int
    both_ways: bool = False

    def allows(self, at: Site) -> Tensor:
        back = at.i - at.j
        if self.both_ways:
            return (back.abs() < self.stride) | (back % self.stride == 0)
        return (back >= 0) & ((back < self.stride) | (back % self.stride == 0))

    def bounds(self, box: Box) -> Bounds:
        near_some, near_every = Window(self.stride, self.stride - 1 if self.both_ways else 0).bounds(box)
        step_some, step_every = _multiple_of(self.stride, box.i_min - box.j_max, box.i_max - box.j_min)
        some, every = near_some | step_some, near_every | step_every
        if self.both_ways:
            return some, every
        causal_some, causal_every = Causal().bounds(box)
        return causal_some & some, causal_every & every


def _multiple_of(step: int, low: Tensor, high: Tensor) -> Bounds:
    """Whether some and whether every whole number in [low, high] is a multiple of step."""
    some = torch.div(high, step, rounding_mode="floor") * step >= low
    return some, (low == high) & some if step > 1 else torch.ones_like(some)


@dataclass(frozen=True)
class Fixed(Mask):
    stride: int
    summary: int

    def allows(self, at: Site) -> Tensor:
        same = _block(at.i, self.stride) == _block(at.j, self.stride)
        summary = at.j % self.stride >= self.stride - self.summary
        return (at.j <= at.i) & (same | summary)

    def bounds(self, box: Box) -> Bounds:
        causal_some, causal_every = Causal().bounds(box)
        _, same_every = Blocks(self.stride, 0).bounds(box)
        # The summary columns recur in every stretch of `stride` keys, so no block of keys before the query is empty
        # unless it is shorter than the gap between them; "partial" is then the honest answer.
        return causal_some, causal_every & same_every


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
class RandomBlocks(Mask):
    size: int
    percent: float
    seed: int

    def allows(self, at: Site) -> Tensor:
        return self._chosen(_block(at.i, self.size), _block(at.j, self.size))

    def bounds(self, box: Box) -> Bounds:
        top, bottom = _block(box.i_min, self.size), _block(box.i_max, self.size) + 1
        left, right = _block(box.j_min, self.size), _block(box.j_max, self.size) + 1
        first_row, first_col = int(top.min()), int(left.min())
        rows, cols = torch.arange(first_row, int(bottom.max())), torch.arange(first_col, int(right.max()))
        if len(rows) * len(cols) > MOST_COUNTED:
            return super().bounds(box)
        # How many are open above and left of each corner: any rectangle's own count is then four look-ups.
        counts = F.pad(self._chosen(rows[:, None], cols[None]).long().cumsum(0).cumsum(1), (1, 0, 1, 0))
        top, bottom, left, right = top - first_row, bottom - first_row, left - first_col, right - first_col
        n_open = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left]
        return n_open > 0, n_open == (bottom - top) * (right - left)

    def _chosen(self, i_block: Tensor, j_block: Tensor) -> Tensor:
        """A hash of the block's place, so that any tile can be drawn alone and is the same each time."""
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
        across = self.width // self.side + 2  # more windows than fit in a row: no two share a number
        return _block(row + self.shift, self.side) * across + _block(col + self.shift, self.side)


def _block(position: Tensor, size: int) -> Tensor:
    return torch.div(position, size, rounding_mode="floor")


def dilated(size: int, step: int) -> Mask:
    """Every ``step``-th of the last ``size``·``step`` keys: a window with holes (Longformer §3.1)."""
    at_least_one("size", size)
    at_least_one("step", step)
    return Dilated(size, step)


def strided(stride: int, both_ways: bool = False) -> Mask:
    """The last ``stride`` keys and every ``stride``-th before them (Sparse Transformer, Child et al. 2019, eq. 4).

    ``both_ways``: the same after the query, for encoders.
    """
    at_least_one("stride", stride)
    return Strided(stride, both_ways)


def fixed(stride: int, summary: int = 1) -> Mask:
    """The query's own stretch of ``stride`` keys and the last ``summary`` keys of each (Child et al. 2019, eq. 5)."""
    at_least_one("stride", stride)
    if not 1 <= summary <= stride:
        raise ValueError(f"fixed summary={summary} must lie between 1 and stride={stride}")
    return Fixed(stride, summary)


def blocks(size: int, neighbours: int = 0) -> Mask:
    """Keys of the query's own block and of ``neighbours`` blocks on each side (the local part of BigBird)."""
    at_least_one("size", size)
    if neighbours < 0:
        raise ValueError(f"blocks neighbours={neighbours} must not be negative")
    return Blocks(size, neighbours)


def global_tokens(count: int) -> Mask:
    """The first ``count`` positions see all and are seen by all (Longformer §3.1)."""
    at_least_one("count", count)
    return Globals(count)


def random_blocks(size: int, percent: float, seed: int = 0) -> Mask:
    """Each (query block, key block) is open with probability ``percent`` %, fixed by the seed (BigBird §2)."""
    at_least_one("size", size)
    if not 0 <= percent <= 100:
        raise ValueError(f"random_blocks percent={percent} must lie between 0 and 100")
    return RandomBlocks(size, percent, seed)


def bigbird(size: int, global_count: int, percent: float, seed: int = 0) -> Mask:
    """Neighbouring blocks, global tokens and random blocks together (Zaheer et al. 2020, figure 1)."""
    return blocks(size, neighbours=1) | global_tokens(global_count) | random_blocks(size, percent, seed)


def grid_windows(width: int, side: int, shift: int = 0, n_before: int = 0) -> Mask:
    """Squares of side × side on a grid ``width`` cells wide, moved by ``shift`` (Swin, Liu et al. 2021, §3.2).

    ``n_before`` tokens stand before the grid (a class token) and see and are seen by all.
    """
    at_least_one("width", width)
    at_least_one("side", side)
    return GridWindows(width, side, shift, n_before)
