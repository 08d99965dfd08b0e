"""Transformer-XL's relative attention as a bias that reads the content (Dai et al. 2019, §3.3).

s_ij = q·k + q·r + u·k + v·r with r = W_r R(i - j): the first term is the mechanism's, the other three are here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..frame import Frame, Span, as_range
from ..scores import Operands, by_group, by_head
from ..skew import skew, unskew
from .bias import Bias


class XLRelative(Bias):
    """scale · ((q + v) · r_{i-j} + u · k), for all heads; r is a sinusoid of the distance, projected by W_r.

    In a tile of R × C there are R + C - 1 distances: (q + v) · r is one small product whose diagonals are the tile.
    """

    reads_content = True
    n_operands = 3

    def __init__(self, n_heads: int, d_head: int, d_model: int | None = None, scale: float | None = None) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_head
        self.d_model = n_heads * d_head if d_model is None else d_model
        self.scale = 1.0 / math.sqrt(d_head) if scale is None else scale
        self.w_r = nn.Parameter(torch.empty(n_heads * d_head, self.d_model))
        self.u = nn.Parameter(torch.zeros(n_heads, d_head))
        self.v = nn.Parameter(torch.zeros(n_heads, d_head))
        nn.init.xavier_uniform_(self.w_r)

    def encodings(self, distance: Tensor) -> Tensor:
        """Sinusoids of i - j, sines then cosines (the paper's R)."""
        rate = torch.exp(torch.arange(0, self.d_model, 2, device=distance.device) * (-math.log(10000.0) / self.d_model))
        angle = -distance[:, None].to(rate.dtype) * rate
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : self.d_model]

    def operands(self, frame: Frame) -> Operands:
        low, high = frame.reach()
        table = self.encodings(torch.arange(low, high + 1, device=frame.device)).to(self.w_r.dtype)
        r = (table @ self.w_r.T).unflatten(-1, (self.n_heads, self.d_head)).transpose(0, 1)  # (H, distances, D)
        return r[frame.heads], self.u[frame.heads], self.v[frame.heads]

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        r, u, v = operands
        if q.shape[-1] != self.d_head:
            raise ValueError(f"bias XLRelative has d_head={self.d_head}, q has head width {q.shape[-1]}")
        by_distance = (q + v[:, None]) @ self._near(r, rows, cols, frame).transpose(-1, -2)  # (B, H, R, distances)
        place = self._place(rows, cols, frame)
        if place is None:
            at = frame.site(rows, cols)
            index = (at.j - at.i - frame.reach()[0]).expand(by_distance.shape[0], by_distance.shape[1], -1, -1)
            position = by_distance.gather(-1, index)
        else:
            position = skew(by_distance)
        return (position + self._content(u, k, q.shape[1])) * self.scale

    def _content(self, u: Tensor, k: Tensor, n_heads: int) -> Tensor:
        """u · k for every key, (B, H, 1, C); grouped key heads are shared."""
        shared = by_group(u[None, :, None, :], k.shape[1])  # (1, G, H/G, D)
        return by_head(shared @ k.transpose(-1, -2), n_heads)

    def _place(self, rows: Span, cols: Span, frame: Frame) -> tuple[int, int] | None:
        row_range, col_range = as_range(rows, frame.n_queries), as_range(cols, frame.n_keys)
        if frame.steady is None or row_range is None or col_range is None:
            return None
        start = col_range[0] + frame.n_queries - row_range[1]
        return start, start + row_range[1] - row_range[0] + col_range[1] - col_range[0] - 1

    def _near(self, r: Tensor, rows: Span, cols: Span, frame: Frame) -> Tensor:
        place = self._place(rows, cols, frame)
        return r if place is None else r[:, place[0] : place[1]]

    def tile_backward(
        self,
        rows: Span,
        cols: Span,
        frame: Frame,
        operands: Operands,
        q: Tensor,
        k: Tensor,
        d_tile: Tensor,
        d_operands: list[Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        place = self._place(rows, cols, frame)
        if place is None:
            return super().tile_backward(rows, cols, frame, operands, q, k, d_tile, d_operands)
        (r, u, v), (d_r, d_u, d_v) = operands, d_operands
        d_tile = d_tile * self.scale
        d_position = unskew(d_tile)  # (B, H, R, R + C - 1)
        d_q = d_position @ r[:, place[0] : place[1]]
        d_r[:, place[0] : place[1]] += (d_position.transpose(-1, -2) @ (q + v[:, None])).sum(0)
        d_v += d_q.sum((0, 2))
        d_content = by_group(d_tile.sum(2, keepdim=True), k.shape[1])  # (B, G, H/G, C)
        d_u += by_head(d_content @ k, q.shape[1]).sum((0, 2))
        d_k = d_content.transpose(-1, -2) @ by_group(u[None, :, None, :], k.shape[1])
        return d_q, d_k

    def check(self, frame: Frame) -> None:
        if self.n_heads != frame.n_heads:
            raise ValueError(f"bias XLRelative has n_heads={self.n_heads}, the queries have {frame.n_heads}")
