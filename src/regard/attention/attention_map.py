"""``AttentionMap``: attention weights recomputed exactly from q and k; the T × S matrix is never stored.

A_ij = exp(s_ij - lse_i), lse_i = log Σ_j exp(s_ij). Only lse, one number per row, is kept once it is computed. Entropy,
top-k and pooling walk over the blocks of the matrix with a running maximum, as in FlashAttention.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .attend import prepare
from .biases import Bias
from .frame import ALL, Frame, Span, span_length, split_span
from .map_kernels import MOST_KEPT, MapKernels
from .masks import Mask
from .mechanisms import NORMALISERS, Mechanism
from .score_matrix import INF, ScoreMatrix, TileWalk, p_log_p

Pick = int | slice | Tensor | Sequence[int]  # a selection of rows or columns
P = ParamSpec("P")
R = TypeVar("R")


class Ranked(NamedTuple):
    values: Tensor  # (B, H, R, k), largest first
    indices: Tensor  # (B, H, R, k); -1 where the weight is 0


def _exact_reading(method: Callable[Concatenate[AttentionMap, P], R]) -> Callable[Concatenate[AttentionMap, P], R]:
    """Run a method without gradients and without autocast, which would compute in half precision."""

    @functools.wraps(method)
    def read(self: AttentionMap, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return read


class AttentionMap:
    """Attention weights (B, H, T, S) before dropout, computed on demand; a row without keys is 0.

    q (B, H, T, D) and k (B, G, S, D) go through the mechanism's O(T) part unless ``prepared``. They are not copied, but
    the parameters of bias and mechanism are, so that training does not change the map. Half precision is computed in
    fp32. ``lse`` (B, H, T) are the normalisers, if a kernel has already computed them; ``sinks`` (H,) as in ``attend``.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        *,
        scale: float | None = None,
        mechanism: Mechanism | None = None,
        frame: Frame | None = None,
        prepared: bool = False,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if prepared and mechanism is not None and scale is not None:
            name = mechanism.name
            raise ValueError(f"scale={scale} applies only to the scaled dot product, not to mechanism={name!r}")
        with torch.no_grad():  # the weights do not depend on v; k takes its place
            call = prepare(q, k, k, mask, bias, scale, None if prepared else mechanism, frame, sinks=sinks)
        if prepared and mechanism is not None:
            call = replace(call, mechanism=mechanism)
        self._set_matrix(call, lse)

    @classmethod
    def of(cls, scoring: ScoreMatrix, lse: Tensor | None = None) -> AttentionMap:
        """The map of a ScoreMatrix or AttentionCall, whose q and k are already prepared."""
        result = cls.__new__(cls)
        result._set_matrix(scoring, lse)
        return result

    def _set_matrix(self, scoring: ScoreMatrix, lse: Tensor | None) -> None:
        mechanism = scoring.mechanism
        if mechanism.normaliser not in (*NORMALISERS, "none"):
            known = ", ".join(map(repr, NORMALISERS))
            reason = f"its normaliser is {mechanism.normaliser!r}, which is not one of {known} and 'none'"
            raise ValueError(f"mechanism {mechanism.name!r} has no attention weights: {reason}")
        exact = torch.promote_types(scoring.q.dtype, torch.float32)
        q, k = scoring.q.detach().to(exact), scoring.k.detach().to(exact)
        if mechanism.operands(scoring.frame):  # without operands, tiles do not read the mechanism's parameters
            mechanism = freeze(mechanism)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().to(exact, copy=True)
        frozen = ScoreMatrix(q, k, scoring.mask, freeze(scoring.bias), mechanism, scoring.frame, sinks=sinks)
        if lse is not None and lse.shape != q.shape[:3]:
            sizes = f"(batch, heads, queries) = {tuple(q.shape[:3])}"
            raise ValueError(f"lse of shape {tuple(lse.shape)} does not fit {sizes}")
        with torch.inference_mode(False):  # lse is filled in later, possibly outside of inference mode
            unnormalised = mechanism.normaliser in ("none", "sigmoid")
            initial = 0.0 if unnormalised else float("nan")  # NaN: not computed yet
            lse = q.new_full(q.shape[:3], initial) if lse is None else lse.detach().to(q)
            lse = lse.masked_fill(lse == -INF, INF)  # some kernels return -inf for fully masked rows
        self._set_walk(TileWalk(frozen, lse))

    def _set_walk(self, walk: TileWalk) -> None:
        self._walk = walk
        self._parts: dict[tuple[range, range], AttentionMap] = {}

    @cached_property
    def _kernels(self) -> MapKernels | None:
        return MapKernels.of(self._walk)

    def _compute_lse(self, rows: Span) -> None:
        """Compute lse where these rows lack it, with a kernel if there is one."""
        if self._kernels is not None and isinstance(rows, slice) and self._kernels.takes(rows):
            self._kernels.compute_lse(rows)
        else:
            self._walk.compute_lse(rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        return self._walk.shape

    @property
    def n_combined(self) -> int:
        """The number of heads that ``combined`` returns."""
        return self.shape[1] // self._walk.scoring.mechanism.maps

    @property
    def is_normalised(self) -> bool:
        """Whether the weights of every row with keys sum to 1: not with sinks, sigmoids or state-space models."""
        scoring = self._walk.scoring
        return scoring.mechanism.normaliser in ("softmax", "linear") and scoring.sinks is None

    @property
    def is_signed(self) -> bool:
        """Whether weights may be negative, as in state-space models."""
        return self._walk.scoring.mechanism.normaliser == "none"

    @property
    def dtype(self) -> torch.dtype:
        return self._walk.lse.dtype

    @property
    def device(self) -> torch.device:
        return self._walk.lse.device

    def __repr__(self) -> str:
        return f"AttentionMap(shape={self.shape}, mechanism={self._walk.scoring.mechanism.name!r})"

    # ---- parts of the map

    def head(self, b: int, h: int) -> AttentionMap:
        """The map of one head, (1, 1, T, S)."""
        return self.part(batch=b, heads=h)

    def part(self, batch: int | slice | range = ALL, heads: int | slice | range = ALL) -> AttentionMap:
        """The map of a range of batch entries and heads; a view that shares lse."""
        key = _as_range(batch, self.shape[0], "batch"), _as_range(heads, self.shape[1], "heads")
        if key not in self._parts:
            result = AttentionMap.__new__(AttentionMap)
            result._set_walk(self._walk.part(*key))
            self._parts[key] = result
        return self._parts[key]

    # ---- weights

    @_exact_reading
    def tile(self, rows: Pick = ALL, cols: Pick = ALL) -> Tensor:
        """The weights (B, H, R, C) of some rows and columns."""
        walk, (b, h, n_queries, n_keys) = self._walk, self.shape
        some_rows = as_span(rows, n_queries, "rows", self.device)
        some_cols = as_span(cols, n_keys, "cols", self.device)
        out = walk.lse.new_zeros(b, h, span_length(some_rows, n_queries), span_length(some_cols, n_keys))
        for row_span, here in walk.chunks(some_rows, walk.plan.block[0]):
            self._compute_lse(row_span)
            lse = walk.lse[:, :, row_span, None]
            for col_span, masked, there in walk.visible_columns(row_span, some_cols):
                scores = walk.scores(row_span, col_span, masked)
                weights = walk.weigh_(scores, lse)
                out[:, :, here, there] = weights.mul_(torch.exp(-lse)) if walk.linear else weights
        return out

    def combined(self, rows: Pick = ALL, cols: Pick = ALL) -> Tensor:
        """The weights applied to the values, (B, H / maps, R, C), where a mechanism merges several maps into a head.

        In differential attention they are the difference of two maps and may be negative. For most mechanisms they
        are those of ``tile``.
        """
        return self._walk.scoring.mechanism.combine_weights(self.tile(rows, cols)).detach()

    def row(self, i: int) -> Tensor:
        """The weights of query i, (B, H, S)."""
        return self.tile(i, ALL)[:, :, 0]

    def dense(self) -> Tensor:
        """All weights (B, H, T, S)."""
        return self.tile(ALL, ALL)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """All non-empty blocks as (rows, cols, weights (B, H, R, C))."""
        walk = self._walk
        for rows, seen in walk.stripes():
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._compute_lse(rows)
                tiles = walk.walk(rows, seen)
            while True:  # leave no_grad and autocast before each yield
                with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                    block = next(tiles, None)
                    if block is None:
                        break
                    cols, p, m = block
                    weights = p.mul_(walk.rescale_factor(m, walk.lse[:, :, rows, None]))
                yield rows, cols, weights

    # ---- statistics of the whole matrix in O(T) memory

    @_exact_reading
    def lse(self) -> Tensor:
        """log Σ_j exp(s_ij) of every row, sink included, (B, H, T); for linear kernels log Σ_j s_ij.

        +inf for a fully masked row.
        """
        size = self._walk.plan.block[0] if self._kernels is None else self.shape[2]
        for rows in split_span(slice(0, self.shape[2]), size):
            self._compute_lse(rows)
        return self._walk.lse.clone()

    def sink_shares(self) -> Tensor:
        """The weight of the sink in each row, which is 1 minus the sum of the row: (B, H, T); 0 without sinks."""
        lse, sinks = self.lse(), self._walk.scoring.sinks
        if sinks is None:
            return torch.zeros_like(lse)
        return torch.where(lse == INF, 1.0, torch.exp(sinks[:, None] - lse))

    @_exact_reading
    def top(self, k: int, rows: Pick | None = None) -> Ranked:
        """The k largest weights of each row and their keys, both (B, H, R, k)."""
        walk, (b, h, n_queries, n_keys) = self._walk, self.shape
        if not 1 <= k <= n_keys:
            raise ValueError(f"top k={k} must lie between 1 and the {n_keys} keys")
        some_rows = as_span(ALL if rows is None else rows, n_queries, "rows", self.device)
        if isinstance(some_rows, slice) and k <= MOST_KEPT and self._kernels and self._kernels.takes(some_rows):
            return Ranked(*self._kernels.top(k, some_rows))
        shape = (b, h, span_length(some_rows, n_queries), k)
        values, indices = walk.lse.new_zeros(shape), torch.full(shape, -1, device=self.device)
        height, width = walk.plan.block
        for row_span, here in walk.chunks(some_rows, max(1, height * width // max(width, k))):
            best, keys = values[:, :, here], indices[:, :, here]
            unit = torch.zeros_like(walk.lse[:, :, row_span, None])  # the running maximum that ``best`` is relative to
            for cols, p, m in walk.walk(row_span, walk.visible_blocks(row_span)):
                new, at = p.topk(min(k, p.shape[-1]))
                best, order = torch.cat([best * walk.rescale_factor(unit, m), new], -1).topk(k)
                keys, unit = torch.cat([keys, at + cols.start], -1).gather(-1, order), m
            values[:, :, here] = best * walk.rescale_factor(unit, walk.lse[:, :, row_span, None])
            indices[:, :, here] = keys
        return Ranked(values, indices.masked_fill_(values == 0, -1))

    @_exact_reading
    def entropy(self) -> Tensor:
        """-Σ_j A_ij log A_ij of every row in nats, (B, H, T)."""
        walk = self._walk
        if self.is_signed:
            raise ValueError(f"{self!r} may have negative weights, which have no entropy")
        if self._kernels is not None:
            return self._kernels.entropy(slice(0, self.shape[2]))
        out = torch.zeros_like(walk.lse)
        for rows, blocks in walk.stripes():
            sums = [(p_log_p(p).sum(-1), p.sum(-1), m[..., 0]) for _, p, m in walk.walk(rows, blocks)]
            for plogp, p_sum, m in sums:  # A = p f with f = exp(m - lse), so A log A = f · p log p + p · f log f
                f = walk.rescale_factor(m, walk.lse[:, :, rows])
                out[:, :, rows] -= f * plogp + p_sum * torch.xlogy(f, f)
        return out.clamp_(min=0)

    def column_sums(self) -> Tensor:
        """The attention each key receives, Σ_i A_ij: (B, H, S)."""
        b, h, n_queries, _ = self.shape
        return self.push(self._walk.lse.new_ones(1).expand(b, h, 1, n_queries))[:, :, 0]

    @_exact_reading
    def push(self, x: Tensor, stay: bool = False) -> Tensor:
        """x A for x (B, H, N, T) → (B, H, N, S); ``stay`` (T = S only) gives fully masked queries a self-loop."""
        walk, (b, h, n_queries, n_keys) = self._walk, self.shape
        if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (b, h, n_queries):
            sizes = f"({b}, {h}, any, {n_queries})"
            raise ValueError(f"x of shape {tuple(x.shape)} does not fit (batch, heads, any, queries) = {sizes}")
        if stay and n_queries != n_keys:
            raise ValueError(f"stay=True needs as many keys as queries, got {n_keys} keys and {n_queries} queries")
        if self._kernels is not None and (pushed := self._kernels.push(x)) is not None:
            return pushed + x * (walk.lse == INF)[:, :, None] if stay else pushed
        out = walk.lse.new_zeros(b, h, x.shape[2], n_keys)
        for rows, blocks in walk.stripes():
            carried = x[..., rows].to(out.dtype)
            if not carried.any():
                continue
            self._compute_lse(rows)
            lse = walk.lse[:, :, None, rows]
            for cols, p, m in walk.walk(rows, blocks):
                out[..., cols] += (carried * walk.rescale_factor(m.transpose(-1, -2), lse)) @ p
            if stay:
                out[..., rows] += carried * (lse == INF)
        return out

    @_exact_reading
    def pooled(self, h: int, w: int, reduce: str = "mean") -> Tensor:
        """The map reduced to (B, H, h, w): the mean or max of each cell, cut as by ``torch.tensor_split``."""
        if reduce not in ("mean", "max"):
            raise ValueError(f"reduce={reduce!r} is neither 'mean' nor 'max'")
        n_queries, n_keys = self.shape[2:]
        for name, count, total, axis in (("h", h, n_queries, "queries"), ("w", w, n_keys, "keys")):
            if not 1 <= count <= total:
                raise ValueError(f"pooled {name}={count} must lie between 1 and the {total} {axis}")
        cells = None if self._kernels is None else self._kernels.cells(h, w, reduce == "max")
        out = self._walk_cells(h, w, reduce) if cells is None else cells
        if reduce == "max":
            return out
        return out.div_(_cell_sizes(n_queries, h, out)[:, None] * _cell_sizes(n_keys, w, out))

    def _walk_cells(self, h: int, w: int, reduce: str) -> Tensor:
        """Sum or max of each cell, (B, H, h, w)."""
        walk, (n_batch, n_heads, n_queries, n_keys) = self._walk, self.shape
        height, width = walk.plan.block
        wide = _cells(n_keys, w, width)
        height = min(height, max(1, 4 * height * width // w))  # limits the memory of ``stripe``
        tall = _cells(n_queries, h, height)
        columns, apart = [cols for cols, _ in wide], _unjoinable_starts(wide)
        first = {cols.start: cells.start for cols, cells in wide}
        last = {cols.stop: cells.stop for cols, cells in wide}
        out = walk.lse.new_zeros(n_batch, n_heads, h, w)
        stripe, unit = out.new_zeros(2, n_batch, n_heads, height, w)  # allocated once for all stripes
        for rows, row_cells in tall:
            here = slice(0, rows.stop - rows.start)
            values, units = stripe[:, :, here].zero_(), unit[:, :, here].zero_()
            for cols, p, m in walk.walk(rows, walk.visible_blocks(rows, columns, apart)):
                cells = slice(first[cols.start], last[cols.stop])
                before = values[..., cells].mul_(walk.rescale_factor(units[..., cells], m))
                _accumulate(before, _reduce_cells(p, 3, cells, reduce), reduce)
                units[..., cells] = m
            values.mul_(walk.rescale_factor(units, walk.lse[:, :, rows, None]))
            _accumulate(out[:, :, row_cells], _reduce_cells(values, 2, row_cells, reduce), reduce)
        return out


# ---- arguments


def as_span(pick: Pick, total: int, name: str, device: torch.device) -> Span:
    """A selection as a slice with start and stop, or as non-negative indices."""
    if isinstance(pick, slice):
        start, stop, step = pick.indices(total)
        if step == 1:
            return slice(start, max(start, stop))
        pick = range(start, stop, step)
    if not isinstance(pick, Tensor | Sequence) or (isinstance(pick, Tensor) and pick.dim() == 0):
        index = _in_range(operator.index(pick), total, name)
        return slice(index, index + 1)
    indices = torch.as_tensor(pick if len(pick) else (), dtype=None if len(pick) else torch.long, device=device)
    if indices.dtype == torch.bool:
        indices = indices.nonzero()[:, 0]
    if indices.dim() != 1 or indices.is_floating_point():
        got = f"{indices.dtype} of shape {tuple(indices.shape)}"
        raise ValueError(f"{name} must be integers in one dimension, got {got}")
    if len(indices):
        _in_range(int(indices.min()), total, name)
        _in_range(int(indices.max()), total, name)
    return torch.where(indices < 0, indices + total, indices).long()


def _as_range(pick: int | slice | range, total: int, name: str) -> range:
    if isinstance(pick, int):
        index = _in_range(pick, total, name)
        return range(index, index + 1)
    result = range(total)[pick] if isinstance(pick, slice) else pick
    if result.step != 1 or not 0 <= result.start < result.stop <= total:
        raise ValueError(f"{name}={pick} must be one index or a contiguous range within {total}")
    return result


def _in_range(index: int, total: int, name: str) -> int:
    if not -total <= index < total:
        raise ValueError(f"{name}={index} is out of range for size {total}")
    return index % total


def freeze(part: Any) -> Any:
    """A copy of a bias or mechanism that training does not change: parameters are copied, other tensors shared."""
    if not isinstance(part, nn.Module):
        return part
    memo: dict[int, Any] = {}
    for module in part.modules():
        for weight in module.parameters(recurse=False):
            memo[id(weight)] = nn.Parameter(weight.detach().clone(), requires_grad=False)
        for x in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(x, Tensor):  # DenseBias.values may be part of a graph
                memo[id(x)] = x.detach().clone() if x.requires_grad else x
    return copy.deepcopy(part, memo)


# ---- cells of a pooled map


def _cells(total: int, count: int, most: int) -> list[tuple[slice, slice]]:
    """An axis cut into cells as by ``tensor_split``, in pieces of at most ``most`` as (indices, cells).

    A piece covers several cells of equal size, or a part of one cell.
    """
    size, n_larger = divmod(total, count)
    pieces: list[tuple[slice, slice]] = []
    start = cell = 0
    while cell < count:
        cell_size = size + (cell < n_larger)
        equal_until = n_larger if cell < n_larger else count
        n_cells = min(max(1, most // cell_size), equal_until - cell)
        span = slice(start, start + n_cells * cell_size)
        n_parts = -(-cell_size // most)  # 1 unless a single cell is larger than ``most``
        for piece in split_span(span, -(-n_cells * cell_size // n_parts)):
            pieces.append((piece, slice(cell, cell + n_cells)))
        start, cell = span.stop, cell + n_cells
    return pieces


def _unjoinable_starts(pieces: list[tuple[slice, slice]]) -> set[int]:
    """Starts of pieces that must not be joined to the previous one: inside a cell, or where the cell size changes."""

    def size(piece: tuple[slice, slice]) -> float:
        span, cells = piece
        return (span.stop - span.start) / (cells.stop - cells.start)

    return {b[0].start for a, b in pairwise(pieces) if a[1].stop != b[1].start or size(a) != size(b)}


def _cell_sizes(total: int, count: int, like: Tensor) -> Tensor:
    size, n_larger = divmod(total, count)
    return torch.tensor([size + (cell < n_larger) for cell in range(count)], dtype=like.dtype, device=like.device)


def _reduce_cells(x: Tensor, dim: int, cells: slice, reduce: str) -> Tensor:
    """Sum or max over cells of equal size along an axis."""
    grouped = x.unflatten(dim, (cells.stop - cells.start, -1))
    return grouped.sum(dim + 1) if reduce == "mean" else grouped.amax(dim + 1)


def _accumulate(into: Tensor, values: Tensor, reduce: str) -> None:
    if reduce == "mean":
        into.add_(values)
    else:
        torch.maximum(into, values, out=into)
