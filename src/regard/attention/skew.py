"""Diagonals as columns: reading a table of distances as a tile of (query, key) pairs, cheaply.

A quantity that depends on j - i alone has R + C - 1 values in a tile of R × C. Row i of the tile is a stretch of those
values that starts one place earlier than the row above it: the same memory with another stride.
"""

from __future__ import annotations

import torch
from torch import Tensor


def toeplitz(values: Tensor, n_rows: int) -> Tensor:
    """(..., R + C - 1) values of distance → (..., R, C) with out[i, j] = values[j - i + R - 1]."""
    n_cols = values.shape[-1] - n_rows + 1
    if n_cols > n_rows:  # flip would lay out a wide tile by columns, and whatever adds it would crawl
        return skew(values[..., None, :].expand(*values.shape[:-1], n_rows, values.shape[-1]))
    windows = values.unfold(-1, n_cols, 1)  # (..., R, C): window w starts at w; row i wants the one at R - 1 - i
    return windows.flip(-2)


def toeplitz_backward(d_tile: Tensor) -> Tensor:
    """The transpose of ``toeplitz``: sums of a tile (..., R, C) along its diagonals, (..., R + C - 1)."""
    return unskew(d_tile).sum(-2)


def skew(by_distance: Tensor) -> Tensor:
    """(..., R, R + C - 1) → (..., R, C) with out[i, j] = in[i, j - i + R - 1] (Transformer-XL, appendix B). A view."""
    by_distance = by_distance.contiguous()
    rows, width = by_distance.shape[-2:]
    if rows == 1:
        return by_distance
    # Row i + 1 starts width - 1 numbers after row i: drop the first R - 1 and read on in rows one shorter.
    shorter = by_distance.flatten(-2)[..., rows - 1 : rows * width - 1].unflatten(-1, (rows, width - 1))
    return shorter[..., : width - rows + 1]


def unskew(tile: Tensor) -> Tensor:
    """The transpose of ``skew``: (..., R, C) laid into (..., R, R + C - 1), zeros elsewhere."""
    *lead, rows, cols = tile.shape
    out = torch.zeros(*lead, rows, rows + cols - 1, dtype=tile.dtype, device=tile.device)
    skew(out).copy_(tile)
    return out
