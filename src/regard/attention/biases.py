"""Biases added to the scores: dense, ALiBi, T5, Swin, BigBird, Transformer-XL.

A bias computes its O(T) tensors once under autograd (``operands``: values by distance, projected encodings), and
``tile`` reads from them. Backends that recompute tiles pass each tile's gradient to ``tile_backward``, so a bias can be
trained without a T × S matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from .frame import ALL, Frame, Span, as_range
from .mechanisms import Operands, by_group, by_head, tile_gradients

# fmt: off
__all__ = [
    "Alibi", "Bias", "DenseBias", "FirstBlockBias", "RelativeBias", "Sum", "T5Bias", "WindowBias", "XLRelative",
    "alibi_slopes",
]
# fmt: on


class Bias(nn.Module):
    """Base class of all biases."""

    reads_content: bool = False  # whether ``tile`` reads q and k
    n_operands: int = 0  # the number of tensors that ``operands`` returns

    def operands(self, frame: Frame) -> Operands:
        """The O(T) tensors that ``tile`` reads, differentiable in the parameters."""
        return ()

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        """The bias for some rows and columns, broadcastable to (B, H, R, C); q is (B, H, R, D) and k (B, G, C, D)."""
        raise NotImplementedError

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
        """Add the gradients of the operands to ``d_operands``; return those of q and k if the bias reads them.

        Along diagonals if the tile has consecutive distances and the bias depends on them; otherwise by autograd.
        """
        if (distances := self._tile_distances(rows, cols, frame)) is not None:
            return self._diagonals_backward(distances, operands, q, k, d_tile, d_operands)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, *operands)]
            tile = self.tile(rows, cols, frame, tuple(inputs[2:]), inputs[0], inputs[1])
            if not tile.requires_grad:
                return None
            grads = tile_gradients(self, tile.expand_as(d_tile), inputs, d_tile)
        for total, grad in zip(d_operands, grads[2:], strict=True):
            total += grad
        return (grads[0], grads[1]) if self.reads_content else None

    def _tile_distances(self, rows: Span, cols: Span, frame: Frame) -> slice | None:
        """The R + C - 1 distances of a tile as a slice of all distances; None if the bias does not read them so."""
        return None

    def _diagonals_backward(
        self, distances: slice, operands: Operands, q: Tensor, k: Tensor, d_tile: Tensor, d_operands: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """``tile_backward`` for a tile with consecutive distances."""
        raise NotImplementedError

    def dense(self, frame: Frame, q: Tensor, k: Tensor) -> Tensor:
        """The whole bias, broadcastable to (B, H, T, S)."""
        return self.tile(ALL, ALL, frame, self.operands(frame), q, k)

    def check(self, frame: Frame) -> None:
        """Raise if the bias does not fit this frame."""

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())


class FirstBlockBias(Bias):
    """log(1 + r) on the keys of the first block, for the queries of all blocks except the first and the last.

    Adding log(1 + r) to a score counts its key 1 + r times in the softmax. Outside of training, Hugging Face's BigBird
    (Zaheer et al. 2020) has r repeats of the first block in place of r random blocks; this reproduces it. Sequences of
    up to 5 + 2 r blocks have no such bias.
    """

    def __init__(self, size: int, repeats: int) -> None:
        super().__init__()
        self.size, self.repeats = size, repeats

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        at, length = frame.site(rows, cols), frame.n_keys
        block = torch.div(at.i, self.size, rounding_mode="floor")
        is_between = (block > 0) & (block < (length - 1) // self.size)
        # A tensor comparison, so that a graph traced with a symbolic length is not specialised to one.
        is_long = torch.full((), length, device=at.i.device) > (5 + 2 * self.repeats) * self.size
        return (is_between & (at.j < self.size) & is_long).to(q.dtype) * math.log1p(self.repeats)


class DenseBias(Bias):
    """A tensor added to the scores: (T, S), (H, T, S) or (B or 1, H or 1, T, S)."""

    n_operands = 1

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if not 2 <= values.dim() <= 4 or not values.is_floating_point():
            got = f"{values.dtype} of shape {tuple(values.shape)}"
            raise ValueError(f"DenseBias needs a floating-point tensor of 2 to 4 dimensions, got {got}")
        self.values = values  # not a Parameter: gradients must flow back into the graph that computed it

    def operands(self, frame: Frame) -> Operands:
        values = self.values[(None,) * (4 - self.values.dim())]
        batch = slice(frame.first_batch, frame.first_batch + frame.n_batch) if values.shape[0] > 1 else ALL
        return (values[batch, frame.heads if values.shape[1] > 1 else ALL],)

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        return operands[0][:, :, rows][..., cols]

    def check(self, frame: Frame) -> None:
        shape = (1,) * (4 - self.values.dim()) + tuple(self.values.shape)
        sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
        if shape[2:] != sizes[2:] or shape[0] not in (1, sizes[0]) or shape[1] not in (1, sizes[1]):
            raise ValueError(f"bias of shape {shape} does not fit (batch, heads, queries, keys) = {sizes}")
        if self.values.device != frame.device:
            raise ValueError(f"bias is on {self.values.device} but q is on {frame.device}; put them on one device")

    @property
    def trainable(self) -> bool:
        return self.values.requires_grad


class Sum(Bias):
    """The sum of several biases."""

    def __init__(self, first: Bias, *others: Bias) -> None:
        super().__init__()
        parts = (first, *others)
        self.parts = nn.ModuleList(parts)
        self.reads_content = any(part.reads_content for part in parts)
        self.n_operands = sum(part.n_operands for part in parts)

    @property
    def _parts(self) -> list[Bias]:
        return [part for part in self.parts if isinstance(part, Bias)]

    @property
    def trainable(self) -> bool:
        return any(part.trainable for part in self._parts)

    def operands(self, frame: Frame) -> Operands:
        return tuple(x for part in self._parts for x in part.operands(frame))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        tiles = []
        for part in self._parts:
            own, operands = operands[: part.n_operands], operands[part.n_operands :]
            tiles.append(part.tile(rows, cols, frame, own, q, k))
        return functools.reduce(torch.add, tiles)

    def check(self, frame: Frame) -> None:
        for part in self._parts:
            part.check(frame)


def _check_heads(bias: Bias, n_heads: int, frame: Frame) -> None:
    if n_heads != frame.n_heads:
        raise ValueError(f"bias {type(bias).__name__} has n_heads={n_heads}, but q has {frame.n_heads} heads")


def toeplitz(values: Tensor, n_rows: int) -> Tensor:
    """Values by distance (..., R + C - 1) → (..., R, C) with out[i, j] = values[j - i + R - 1]."""
    n_cols = values.shape[-1] - n_rows + 1
    if n_cols > n_rows:  # flip would lay out a wide tile column by column, which is slow to add
        return skew(values[..., None, :].expand(*values.shape[:-1], n_rows, values.shape[-1]))
    return values.unfold(-1, n_cols, 1).flip(-2)  # row i is the window that starts at R - 1 - i


def toeplitz_backward(d_tile: Tensor) -> Tensor:
    """The transpose of ``toeplitz``: sums of a tile (..., R, C) along its diagonals, (..., R + C - 1)."""
    return unskew(d_tile).sum(-2)


def skew(by_distance: Tensor) -> Tensor:
    """(..., R, R + C - 1) → a view (..., R, C) with out[i, j] = in[i, j - i + R - 1] (Transformer-XL, appendix B)."""
    by_distance = by_distance.contiguous()
    rows, width = by_distance.shape[-2:]
    if rows == 1:
        return by_distance
    # Drop the first R - 1 numbers and reshape to rows of width - 1: each row then starts one distance further left.
    shorter = by_distance.flatten(-2)[..., rows - 1 : rows * width - 1].unflatten(-1, (rows, width - 1))
    return shorter[..., : width - rows + 1]


def unskew(tile: Tensor) -> Tensor:
    """The transpose of ``skew``: (..., R, C) → (..., R, R + C - 1), zeros elsewhere."""
    *lead, rows, cols = tile.shape
    out = torch.zeros(*lead, rows, rows + cols - 1, dtype=tile.dtype, device=tile.device)
    skew(out).copy_(tile)
    return out


class DistanceBias(Bias):
    """A bias whose operands have one row per head and distance (key position - query position)."""

    n_heads: int

    def check(self, frame: Frame) -> None:
        _check_heads(self, self.n_heads, frame)

    def _tile_distances(self, rows: Span, cols: Span, frame: Frame) -> slice | None:
        row_range, col_range = as_range(rows, frame.n_queries), as_range(cols, frame.n_keys)
        if frame.steady is None or row_range is None or col_range is None:
            return None
        start = col_range[0] + frame.n_queries - row_range[1]
        return slice(start, start + row_range[1] - row_range[0] + col_range[1] - col_range[0] - 1)


class RelativeBias(DistanceBias):
    """A bias b_h(j - i) that depends on the distance only. Subclasses define ``at``."""

    n_operands = 1

    def at(self, distance: Tensor) -> Tensor:
        """Values (H, …) for integer distances (…), key position - query position."""
        raise NotImplementedError

    def operands(self, frame: Frame) -> Operands:
        low, high = frame.reach()
        return (self.at(torch.arange(low, high + 1, device=frame.device))[frame.heads],)  # (H, distances)

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        (by_distance,) = operands
        distances, row_range = self._tile_distances(rows, cols, frame), as_range(rows, frame.n_queries)
        if distances is not None and row_range is not None:
            values, n_rows = by_distance[:, distances], row_range[1] - row_range[0]
            if _is_constant(values):
                return values[None, :, :1, None].expand(1, len(values), n_rows, values.shape[1] - n_rows + 1)
            return toeplitz(values, n_rows)[None]  # (1, H, R, C)
        at = frame.site(rows, cols)
        distance = (at.j - at.i)[:, 0]  # (B or 1, R, C)
        return by_distance[:, distance - frame.reach()[0]].transpose(0, 1)  # (B or 1, H, R, C)

    def _diagonals_backward(
        self, distances: slice, operands: Operands, q: Tensor, k: Tensor, d_tile: Tensor, d_operands: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        d_operands[0][:, distances] += toeplitz_backward(d_tile.sum(0))
        return None


def _is_constant(values: Tensor) -> bool:
    """Whether a tile has one value per head, as T5's do far from the diagonal; tested only on CPU without gradients."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or values.device.type != "cpu":
        return False
    return bool((values == values[:, :1]).all())


class Alibi(RelativeBias):
    """Attention with linear biases (Press et al. 2022): b_h(d) = -m_h |d|, m_h = 2^(-8h/H). No parameters."""

    slopes: Tensor

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.register_buffer("slopes", torch.tensor(alibi_slopes(n_heads)), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # Recompute the slopes, which .to_empty() and .half().float() would change.
        self.slopes = torch.tensor(alibi_slopes(self.n_heads), dtype=self.slopes.dtype, device=self.slopes.device)
        return self

    def at(self, distance: Tensor) -> Tensor:
        return -self.slopes.view(-1, *[1] * distance.dim()) * distance.abs()


def alibi_slopes(n_heads: int) -> list[float]:
    """The paper's slopes; if n_heads is not a power of two, the rest are every second slope of the next power."""
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / below) for h in range(n_heads - below)]


class T5Bias(RelativeBias):
    """T5's learned bias (Raffel et al. 2020, §2.1): b_h(d) = w[bucket(d), h].

    Each small distance has its own bucket; larger ones share buckets that grow logarithmically up to ``max_distance``.
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
            size = distance.abs()
        else:
            size = (-distance).clamp(min=0)
        exact = n // 2
        ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (n - exact)).long()).clamp(max=n - 1)
        return start + torch.where(size < exact, size, far)

    def at(self, distance: Tensor) -> Tensor:
        return self.w[self.bucket(distance)].movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"{self.n_heads}, n_buckets={self.n_buckets}, max_distance={self.max_distance}"


class WindowBias(Bias):
    """Swin's learned bias (Liu et al. 2021, eq. 4): b_h = w[offset in rows and columns from key to query, h].

    Positions number the cells of a grid ``width`` cells wide, row by row; a window has ``side`` × ``side`` cells.
    """

    n_operands = 1

    def __init__(self, n_heads: int, width: int, side: int) -> None:
        super().__init__()
        self.n_heads, self.width, self.side = n_heads, width, side
        self.w = nn.Parameter(torch.empty((2 * side - 1) ** 2, n_heads))
        nn.init.normal_(self.w, std=0.02)

    def operands(self, frame: Frame) -> Operands:
        return (self.w.T[frame.heads],)  # (H, offsets)

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        at, reach = frame.site(rows, cols), self.side - 1
        down = torch.div(at.i, self.width, rounding_mode="floor") - torch.div(at.j, self.width, rounding_mode="floor")
        right = at.i % self.width - at.j % self.width
        near = (down.abs() <= reach) & (right.abs() <= reach)  # other pairs are in different windows, hence masked
        index = torch.where(near, (down + reach) * (2 * reach + 1) + right + reach, 0)[:, 0]  # (B or 1, R, C)
        return operands[0][:, index].transpose(0, 1)  # (B or 1, H, R, C)

    def check(self, frame: Frame) -> None:
        _check_heads(self, self.n_heads, frame)

    def extra_repr(self) -> str:
        return f"{self.n_heads}, width={self.width}, side={self.side}"


class XLRelative(DistanceBias):
    """Transformer-XL (Dai et al. 2019, §3.3): scale · ((q + v) · r_{i-j} + u · k), r_{i-j} = W_r sinusoid(i - j).

    An R × C tile has R + C - 1 distances: (q + v) · r is one small matrix product, from which ``skew`` reads the tile.
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
        """Sinusoids of i - j (the paper's R), sines first, then cosines."""
        rate = torch.exp(torch.arange(0, self.d_model, 2, device=distance.device) * (-math.log(10000.0) / self.d_model))
        angle = -distance[:, None].to(rate.dtype) * rate
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : self.d_model]

    def at(self, distance: Tensor) -> Tensor:
        """r (H, distances, D) for distances (key position - query position)."""
        r = self.encodings(distance).to(self.w_r.dtype) @ self.w_r.T
        return r.unflatten(-1, (self.n_heads, self.d_head)).transpose(0, 1)

    def operands(self, frame: Frame) -> Operands:
        low, high = frame.reach()
        r = self.at(torch.arange(low, high + 1, device=frame.device))
        return r[frame.heads], self.u[frame.heads], self.v[frame.heads]

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        r, u, v = (x.to(q.dtype) for x in operands)
        if q.shape[-1] != self.d_head:
            raise ValueError(f"bias XLRelative has d_head={self.d_head}, but q has head width {q.shape[-1]}")
        distances = self._tile_distances(rows, cols, frame)
        nearby = r if distances is None else r[:, distances]
        by_distance = (q + v[:, None]) @ nearby.transpose(-1, -2)  # (B, H, R, distances)
        if distances is None:
            at = frame.site(rows, cols)
            index = (at.j - at.i - frame.reach()[0]).expand(by_distance.shape[0], by_distance.shape[1], -1, -1)
            position = by_distance.gather(-1, index)
        else:
            position = skew(by_distance)
        u = by_group(u[None, :, None, :], k.shape[1])  # (1, G, H/G, D)
        content = by_head(u @ k.transpose(-1, -2), q.shape[1])  # (B, H, 1, C)
        return (position + content) * self.scale

    def _diagonals_backward(
        self, distances: slice, operands: Operands, q: Tensor, k: Tensor, d_tile: Tensor, d_operands: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        (r, u, v), (d_r, d_u, d_v) = operands, d_operands
        d_tile = d_tile * self.scale
        d_position = unskew(d_tile)  # (B, H, R, R + C - 1)
        d_q = d_position @ r[:, distances]
        d_r[:, distances] += (d_position.transpose(-1, -2) @ (q + v[:, None])).sum(0)
        d_v += d_q.sum((0, 2))
        d_content = by_group(d_tile.sum(2, keepdim=True), k.shape[1])  # (B, G, H/G, C)
        d_u += by_head(d_content @ k, q.shape[1]).sum((0, 2))
        d_k = d_content.transpose(-1, -2) @ by_group(u[None, :, None, :], k.shape[1])
        return d_q, d_k
