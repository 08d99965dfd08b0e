"""Biases of the distance alone, b_h(j - i): ALiBi and T5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from ..frame import Frame, Span, as_range
from ..scores import Operands
from ..skew import toeplitz, toeplitz_backward
from .bias import Bias


class RelativeBias(Bias):
    """A bias b_h(j - i) of the distance alone. Subclasses write ``at``."""

    n_heads: int
    n_operands = 1

    def at(self, distance: Tensor) -> Tensor:
        """Values (H, …) for whole distances (…): key position - query position."""
        raise NotImplementedError  # a relative bias is this function

    def operands(self, frame: Frame) -> Operands:
        low, high = frame.reach()
        return (self.at(torch.arange(low, high + 1, device=frame.device))[frame.heads],)  # (H, distances)

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        (by_distance,) = operands
        stretch = self._stretch(rows, cols, frame)
        if stretch is not None:
            start, stop, n_rows = stretch
            values = by_distance[:, start:stop]
            if _is_level(values):
                n_heads, n_cols = len(values), stop - start - n_rows + 1
                return values[None, :, :1, None].expand(1, n_heads, n_rows, n_cols)
            return toeplitz(values, n_rows)[None]  # (1, H, R, C)
        at = frame.site(rows, cols)
        distance = (at.j - at.i)[:, 0]  # (B or 1, R, C)
        return by_distance[:, distance - frame.reach()[0]].transpose(0, 1)  # (B or 1, H, R, C)

    def _stretch(self, rows: Span, cols: Span, frame: Frame) -> tuple[int, int, int] | None:
        """Where the R + C - 1 distances of a tile stand among all distances, when they run on without gap."""
        row_range, col_range = as_range(rows, frame.n_queries), as_range(cols, frame.n_keys)
        if frame.steady is None or row_range is None or col_range is None:
            return None
        n_rows, n_cols = row_range[1] - row_range[0], col_range[1] - col_range[0]
        start = col_range[0] + frame.n_queries - row_range[1]
        return start, start + n_rows + n_cols - 1, n_rows

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
        stretch = self._stretch(rows, cols, frame)
        if stretch is None:
            return super().tile_backward(rows, cols, frame, operands, q, k, d_tile, d_operands)
        d_operands[0][:, stretch[0] : stretch[1]] += toeplitz_backward(d_tile.sum(0))
        return None

    def check(self, frame: Frame) -> None:
        if self.n_heads != frame.n_heads:
            raise ValueError(f"bias {type(self).__name__} has n_heads={self.n_heads}, the queries have {frame.n_heads}")


def _is_level(values: Tensor) -> bool:
    """Whether a tile is one value a head, as T5's are far from the diagonal: then nothing has to be laid out.

    Asked only where the answer is free: on a CPU, outside of a graph.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or values.device.type != "cpu":
        return False
    return bool((values == values[:, :1]).all())


class Alibi(RelativeBias):
    """Attention with linear biases (Press et al. 2022): b_h(d) = -m_h |d|, m_h = 2^(-8h/H). Nothing to train."""

    slopes: Tensor

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.register_buffer("slopes", torch.tensor(alibi_slopes(n_heads)), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # Computed anew, so that neither .to_empty() after a stay on meta nor .half().float() changes them.
        self.slopes = torch.tensor(alibi_slopes(self.n_heads), dtype=self.slopes.dtype, device=self.slopes.device)
        return self

    def at(self, distance: Tensor) -> Tensor:
        return -self.slopes.view(-1, *[1] * distance.dim()) * distance.abs()


def alibi_slopes(n_heads: int) -> list[float]:
    """The paper's slopes; for a head count between powers of two, every second slope of the next power fills up."""
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / below) for h in range(n_heads - below)]


class T5Bias(RelativeBias):
    """T5's learned bias (Raffel et al. 2020, §2.1): b_h(d) = w[bucket(d), h].

    Near distances have a bucket each, farther ones share buckets that grow logarithmically up to ``max_distance``.
    """

    def __init__(self, n_heads: int, n_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        least = 4 if bidirectional else 2
        if n_buckets < least or n_buckets % 2:
            raise ValueError(f"n_buckets={n_buckets} must be even and at least {least}")
        if max_distance <= n_buckets // least:
            raise ValueError(f"max_distance={max_distance} must exceed the {n_buckets // least} exact buckets")
        self.n_heads, self.n_buckets, self.max_distance = n_heads, n_buckets, max_distance
        self.bidirectional = bidirectional
        self.w = nn.Parameter(torch.empty(n_buckets, n_heads))
        nn.init.normal_(self.w, std=0.02)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (key position - query position)."""
        n, start = self.n_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            n //= 2
            start = (distance > 0).long() * n
            back = distance.abs()
        else:
            back = (-distance).clamp(min=0)
        exact = n // 2
        ratio = torch.log(back.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (n - exact)).long()).clamp(max=n - 1)
        return start + torch.where(back < exact, back, far)

    def at(self, distance: Tensor) -> Tensor:
        return self.w[self.bucket(distance)].movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"{self.n_heads}, n_buckets={self.n_buckets}, max_distance={self.max_distance}"
