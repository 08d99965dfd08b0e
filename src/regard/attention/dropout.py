"""Dropout on attention weights that can be drawn tile by tile: a hash of (seed, b, h, i, j), not a random stream."""

from __future__ import annotations

import torch
from torch import Tensor

from .frame import Frame, Span

_MASK = (1 << 31) - 1


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (multiply and shift, twice); products stay inside int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x6C8E9CF5) & _MASK
    return x ^ (x >> 16)


def keep_tile(rate: float, seed: Tensor, rows: Span, cols: Span, frame: Frame) -> Tensor:
    """Which weights of a tile survive, (B, H, R, C) booleans: each with probability 1 - rate, independently."""
    at = frame.site(rows, cols)
    row_key = _mix(_mix(_mix((seed & _MASK) + at.b) + at.h) + at.row)  # (B, H, R, 1): the costly mixing is O(T)
    col_key = _mix(at.col + 0x3C6EF372)
    return _mix(row_key ^ col_key) >= int(rate * (_MASK + 1))


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's own generator, so that ``torch.manual_seed`` governs dropout here as everywhere."""
    return torch.randint(0, _MASK, (), device=device)
