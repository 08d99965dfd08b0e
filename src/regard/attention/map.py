"""``AttentionMap``: every attention weight, exactly, from q and k alone; the matrix itself is never stored.

A_ij = exp(s_ij - lse_i), lse_i = log Σ_j exp(s_ij). The scores answer tile by tile, so one number a row (lse, computed
when first needed and remembered) is all that is missing. Whatever is asked of the whole matrix (entropy, ranking,
overview) is one walk over its blocks with a running maximum, as in FlashAttention; blocks the mask empties are skipped.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .backends import prepare
from .biases import Bias
from .call import Scoring
from .frame import ALL, Frame, Span, span_length
from .masks import BlockPlan, Mask
from .masks.plan import EMPTY, PARTIAL
from .scores import Mechanism, Operands

Pick = int | slice | Tensor | Sequence[int]
"""Some rows, columns or heads: one index, a slice, or several indices."""
Block = tuple[slice, bool]
"""A block of columns, and whether the mask has to be applied inside it."""
Part = TypeVar("Part", Bias | None, Mechanism)


class Ranked(NamedTuple):
    values: Tensor  # (B, H, R, k), largest first
    indices: Tensor  # (B, H, R, k); -1, with value 0, where a query sees fewer than k keys


class AttentionMap:
    """The weights (B, H, T, S) of an attention as they were when the map was made, before dropout.

    q (B, H, T, D) and k (B, G, S, D) go through the mechanism's O(T) half unless they are ``prepared``. They are not
    copied: overwriting their memory overwrites the map. Parameters of bias and mechanism are, so training does not
    change it. ``lse`` (B, H, T) spares the normalisers where a kernel already knows them.
    Half-precision inputs are read in fp32, and so are the weights. A row without keys is 0.
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
    ) -> None:
        if prepared and mechanism is not None and scale is not None:
            raise ValueError(
                f"scale={scale} goes with the scaled dot product; mechanism={mechanism.name!r} has its own"
            )
        with torch.no_grad():  # weights do not need values: k stands in for them
            made = prepare(q, k, k, mask, bias, scale, None if prepared else mechanism, frame)
        self._take(replace(made, mechanism=mechanism) if prepared and mechanism is not None else made, lse)

    @classmethod
    def of(cls, scoring: Scoring, lse: Tensor | None = None) -> AttentionMap:
        """The map of a Scoring or a Call, whose q and k are prepared already."""
        made = cls.__new__(cls)
        made._take(scoring, lse)
        return made

    def _take(self, scoring: Scoring, lse: Tensor | None) -> None:
        mechanism = scoring.mechanism
        if mechanism.normaliser not in ("softmax", "linear"):
            raise ValueError(
                f"mechanism {mechanism.name!r} has no attention weights: its normaliser is {mechanism.normaliser!r}, "
                "not 'softmax' or 'linear'"
            )
        exact = torch.float32 if scoring.q.dtype in (torch.float16, torch.bfloat16) else scoring.q.dtype
        q, k = scoring.q.detach().to(exact), scoring.k.detach().to(exact)
        self._set(
            Scoring(q, k, scoring.mask, _frozen(scoring.bias), _frozen(mechanism), scoring.frame),
            q.new_full(q.shape[:3], float("nan")) if lse is None else _known(lse, q),
        )

    def _set(self, scoring: Scoring, lse: Tensor) -> None:
        self._scoring = scoring
        self._lse = lse  # (B, H, T): NaN where not yet known, +inf where a row sees nothing; parts of a map share it
        self._parts: dict[tuple[range, range], AttentionMap] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        q = self._scoring.q
        return q.shape[0], q.shape[1], q.shape[2], self._scoring.k.shape[2]

    def __repr__(self) -> str:
        return f"AttentionMap(shape={self.shape}, mechanism={self._scoring.mechanism.name!r})"

    # ---- fewer heads

    def head(self, b: int, h: int) -> AttentionMap:
        """The map of one head, (1, 1, T, S)."""
        return self.part(batch=b, heads=h)

    def part(self, batch: int | slice | range = ALL, heads: int | slice | range = ALL) -> AttentionMap:
        """The map of some of the batch and some of the heads: a view, which shares the normalisers both ways."""
        key = _as_range(batch, self.shape[0], "batch"), _as_range(heads, self.shape[1], "heads")
        if key not in self._parts:
            some_batch, some_heads = key
            of_batch, of_heads = slice(some_batch.start, some_batch.stop), slice(some_heads.start, some_heads.stop)
            s = self._scoring
            made = AttentionMap.__new__(AttentionMap)
            made._set(
                replace(
                    s,
                    q=s.q[of_batch, of_heads],
                    k=_key_heads(s.k[of_batch], some_heads, self.shape[1]),
                    frame=s.frame.part(some_batch, some_heads),
                ),
                self._lse[of_batch, of_heads],
            )
            self._parts[key] = made
        return self._parts[key]

    # ---- the weights themselves

    @torch.no_grad()
    def tile(self, rows: Pick = ALL, cols: Pick = ALL) -> Tensor:
        """The weights (B, H, R, C) of some rows and columns."""
        b, h, n_queries, n_keys = self.shape
        rows, cols = (
            _as_span(rows, n_queries, "rows", self._lse.device),
            _as_span(cols, n_keys, "cols", self._lse.device),
        )
        out = self._scoring.q.new_zeros(b, h, span_length(rows, n_queries), span_length(cols, n_keys))
        for some_rows, here in self._chunks(rows, self._plan.block[0]):
            self._normalise(some_rows)
            lse = self._lse[:, :, some_rows, None]
            for some_cols, there in self._chunks(cols, self._width(here.stop - here.start)):
                kind = self._kind(some_rows, some_cols)
                if kind != EMPTY:
                    scores = self._scores(some_rows, some_cols, masked=kind == PARTIAL)
                    # A row that sees nothing has lse = +inf, so that it becomes 0 either way.
                    weights = scores.mul_(torch.exp(-lse)) if self._is_linear else scores.sub_(lse).exp_()
                    out[:, :, here, there] = weights
        return out

    def row(self, i: int) -> Tensor:
        """Where query i looks: (B, H, S)."""
        return self.tile(i, ALL)[:, :, 0]

    def dense(self) -> Tensor:
        """All of it, (B, H, T, S): the tile of everything, and the only answer here that is not O(T)."""
        return self.tile(ALL, ALL)

    # ---- what can be said about all of it in O(T) memory

    @torch.no_grad()
    def top(self, k: int, rows: Pick | None = None) -> Ranked:
        """The k largest weights of each row and the keys they belong to, both (B, H, R, k)."""
        b, h, n_queries, n_keys = self.shape
        if not 1 <= k <= n_keys:
            raise ValueError(f"top k={k} must lie between 1 and the {n_keys} keys")
        rows = _as_span(ALL if rows is None else rows, n_queries, "rows", self._lse.device)
        shape = (b, h, span_length(rows, n_queries), k)
        values = self._scoring.q.new_zeros(shape)
        indices = torch.full(shape, -1, device=values.device)
        height, width = self._plan.block
        for some, here in self._chunks(rows, max(1, height * width // max(width, k))):
            best, where, unit = values[:, :, here], indices[:, :, here], None
            for cols, p, m in self._walk(some, self._blocks(some)):
                if unit is not None:
                    best = best * torch.exp((unit - m).clamp(max=0))  # so far in units of exp(unit), now of exp(m)
                unit = m
                new, at = p.topk(min(k, p.shape[-1]))
                best, order = torch.cat([best, new], -1).topk(k)
                where = torch.cat([where, at + cols.start], -1).gather(-1, order)
            if unit is not None:
                values[:, :, here] = best * torch.exp(unit - self._lse[:, :, some, None])
                indices[:, :, here] = where
        return Ranked(values, indices.masked_fill_(values == 0, -1))

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """-Σ_j A_ij log A_ij of every row in nats, (B, H, T): 0 for one key, log n for n keys alike."""
        out = torch.zeros_like(self._lse)
        for rows, blocks in self._stripes():
            sums = [(torch.xlogy(p, p).sum(-1), p.sum(-1), m[..., 0]) for _, p, m in self._walk(rows, blocks)]
            for p_log_p, p_sum, m in sums:  # A = p f with f = exp(m - lse), so A log A = f · p log p + p · f log f
                f = torch.exp(m - self._lse[:, :, rows])
                out[:, :, rows] -= f * p_log_p + p_sum * torch.xlogy(f, f)
        return out.clamp_(min=0)

    def column_sums(self) -> Tensor:
        """How much attention each key receives, Σ_i A_ij: (B, H, S)."""
        b, h, n_queries, _ = self.shape
        return self.push(self._scoring.q.new_ones(1, 1, 1, 1).expand(b, h, 1, n_queries))[:, :, 0]

    @torch.no_grad()
    def push(self, x: Tensor, stay: bool = False) -> Tensor:
        """x A: what stands on the queries, (B, H, N, T), carried along the weights to the keys, (B, H, N, S).

        What stands on a query that sees nothing is lost; with ``stay`` it remains where it is (T = S only).
        """
        b, h, n_queries, n_keys = self.shape
        if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (b, h, n_queries):
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not fit (batch, heads, any, queries) = {(b, h, ..., n_queries)}"
            )
        if stay and n_queries != n_keys:
            raise ValueError(f"stay=True needs as many keys as queries, got {n_keys} keys and {n_queries} queries")
        out = self._scoring.q.new_zeros(b, h, x.shape[2], n_keys)
        for rows, blocks in self._stripes():
            carried = x[..., rows].to(out.dtype)
            if not carried.any():  # what starts at few queries costs only those
                continue
            self._normalise(rows)
            lse = self._lse[:, :, None, rows]
            for cols, p, m in self._walk(rows, blocks):
                out[..., cols] += (carried * torch.exp(m.transpose(-1, -2) - lse)) @ p
            if stay:
                out[..., rows] += carried * (lse == float("inf"))
        return out

    @torch.no_grad()
    def pooled(self, h: int, w: int, reduce: str = "mean") -> Tensor:
        """An overview (B, H, h, w): the mean or the largest weight in each cell of the whole matrix.

        Cells are as ``torch.tensor_split`` cuts T queries into h and S keys into w.
        """
        if reduce not in ("mean", "max"):
            raise ValueError(f"reduce={reduce!r} is neither 'mean' nor 'max'")
        n_batch, n_heads, n_queries, n_keys = self.shape
        height, width = self._plan.block
        height = min(height, max(1, 4 * height * width // w))  # a stripe of the answer is held beside the tiles
        tall, wide = _cells(n_queries, h, height, "h", "queries"), _cells(n_keys, w, width, "w", "keys")
        cells_of = {cols.start: cells for cols, cells in wide}
        out = self._scoring.q.new_zeros(n_batch, n_heads, h, w)
        stripe, unit = out.new_zeros(2, n_batch, n_heads, height, w)  # once: small pieces between tiles would split memory
        for rows, row_cells in tall:
            here = slice(0, rows.stop - rows.start)
            pooled, units = stripe[:, :, here].zero_(), unit[:, :, here].zero_()
            for cols, p, m in self._walk(rows, self._blocks(rows, [cols for cols, _ in wide])):
                cells = cells_of[cols.start]
                before = pooled[..., cells].mul_(torch.exp((units[..., cells] - m).clamp_(max=0)))
                _collect(before, _reduced(p, 3, cells, reduce), reduce)
                units[..., cells] = m
            pooled.mul_(torch.exp(units.sub_(self._lse[:, :, rows, None])))
            _collect(out[:, :, row_cells], _reduced(pooled, 2, row_cells, reduce), reduce)
        return out if reduce == "max" else out.div_(_sizes(n_queries, h, out)[:, None] * _sizes(n_keys, w, out))

    # ---- walking the blocks

    @property
    def _is_linear(self) -> bool:
        return self._scoring.mechanism.normaliser == "linear"

    @cached_property
    def _plan(self) -> BlockPlan:
        return self._scoring.plan()

    @cached_property
    def _kinds(self) -> list[list[int]]:
        kinds: list[list[int]] = self._plan.kinds.tolist()
        return kinds

    @cached_property
    def _operands(self) -> tuple[Operands, Operands]:
        own, of_bias = self._scoring.operands()
        dtype = self._scoring.q.dtype
        return tuple(x.to(dtype) for x in own), tuple(x.to(dtype) for x in of_bias)

    def _scores(self, rows: Span, cols: Span, masked: bool) -> Tensor:
        return self._scoring.tile(rows, cols, self._operands, masked=masked)

    def _walk(self, rows: Span, blocks: list[Block]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """All blocks of some rows in one pass as (cols, p, m), with A = p · exp(m - lse); lse is known at the end.

        p = exp(s - m), m the largest score so far (Milakov & Gimelshein 2018); for a linear kernel p = s and m = 0.
        """
        lse = self._lse[:, :, rows, None]
        known = not lse.isnan().any()
        top = torch.full_like(lse, 0.0 if self._is_linear else float("-inf"))
        m, total = torch.zeros_like(top), torch.zeros_like(top)
        if known and not self._is_linear:
            m = lse.masked_fill(lse == float("inf"), 0)
        for cols, masked in blocks:
            p = self._scores(rows, cols, masked)
            if not known and not self._is_linear:
                new_top = torch.maximum(top, p.amax(-1, keepdim=True))
                m = new_top.masked_fill(new_top == float("-inf"), 0)  # a row that has seen nothing yet
                total.mul_(torch.exp(top - m))
                top = new_top
            if not self._is_linear:
                p.sub_(m).exp_()
            if not known:
                total.add_(p.sum(-1, keepdim=True))
            yield cols, p, m
        if not known:
            lse = torch.where(total == 0, float("inf"), m + torch.log(total))
            self._lse[:, :, rows] = lse[..., 0]

    def _normalise(self, rows: Span) -> None:
        """Make sure that lse of these rows is known."""
        unknown = self._lse[:, :, rows].isnan().flatten(0, 1).any(0).nonzero()[:, 0]
        if not len(unknown):
            return
        if isinstance(rows, slice):  # keep it a slice: biases read contiguous rows as diagonals
            first, last = int(unknown[0]), int(unknown[-1])
            rows = slice(rows.start + first, rows.start + last + 1)
        else:
            rows = rows[unknown]
        for _ in self._walk(rows, self._blocks(rows)):
            pass

    def _stripes(self) -> Iterator[tuple[slice, list[Block]]]:
        """The whole matrix: blocks of rows, and the blocks of columns each of them sees."""
        for rows, _ in self._chunks(slice(0, self.shape[2]), self._plan.block[0]):
            assert isinstance(rows, slice)
            yield rows, self._blocks(rows)

    def _blocks(self, rows: Span, columns: Iterable[slice] | None = None) -> list[Block]:
        """Those of some blocks of columns that these rows see at all; by default the plan's, joined while it pays."""
        if columns is not None:
            kinds = ((cols, self._kind(rows, cols)) for cols in columns)
            return [(cols, kind == PARTIAL) for cols, kind in kinds if kind != EMPTY]
        widest = self._width(span_length(rows, self.shape[2]))
        found: list[Block] = []
        for cols, masked in self._blocks(rows, _cut(slice(0, self.shape[3]), self._plan.block[1])):
            before, before_masked = found[-1] if found else (slice(0, 0), not masked)
            if masked == before_masked and cols.start == before.stop and cols.stop - before.start <= widest:
                found[-1] = slice(before.start, cols.stop), masked
            else:
                found.append((cols, masked))
        return found

    def _width(self, n_rows: int) -> int:
        """How many columns a block of so many rows may have: the fewer rows, the more."""
        height, width = self._plan.block
        return width * max(1, height // n_rows)

    def _kind(self, rows: Span, cols: Span) -> int:
        """EMPTY, FULL or PARTIAL for any rows and columns, from the blocks of the plan that they touch."""
        height, width = self._plan.block
        lines = [self._kinds[a] for a in _touched(rows, height)]
        kinds = {line[b] for b in _touched(cols, width) for line in lines}
        return kinds.pop() if len(kinds) == 1 else PARTIAL

    def _chunks(self, span: Span, most: int) -> Iterator[tuple[Span, slice]]:
        """A span in pieces of at most so many, and the place of each piece in the answer."""
        bias = self._scoring.bias
        pieces: Iterable[Span]
        if isinstance(span, slice):
            pieces = _cut(span, most)
        elif bias is not None and bias.reads_content:
            # Such a bias reads scattered rows through all distances there are; runs of neighbours stay small.
            pieces = [piece for run in _runs(span) for piece in _cut(run, most)]
        else:
            pieces = span.split(most)
        done = 0
        for piece in pieces:
            n = piece.stop - piece.start if isinstance(piece, slice) else len(piece)
            yield piece, slice(done, done + n)
            done += n


# ---- what was asked for, checked


def _as_span(pick: Pick, total: int, name: str, device: torch.device) -> Span:
    """A pick as a slice with both ends given or as indices from 0 to total - 1."""
    if isinstance(pick, slice):
        start, stop, step = pick.indices(total)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.arange(total, device=device)[torch.tensor(range(total)[pick], dtype=torch.long, device=device)]
    if not isinstance(pick, Tensor | Sequence):
        index = _in_range(operator.index(pick), total, name)
        return slice(index, index + 1)
    indices = torch.as_tensor(pick, device=device)
    if indices.dtype == torch.bool:
        indices = indices.nonzero()[:, 0]
    if indices.dim() != 1 or indices.is_floating_point():
        raise ValueError(f"{name} must be whole numbers in one dimension, got {indices.dtype} {tuple(indices.shape)}")
    if len(indices):
        _in_range(int(indices.min()), total, name)
        _in_range(int(indices.max()), total, name)
    return torch.where(indices < 0, indices + total, indices).long()


def _in_range(index: int, total: int, name: str) -> int:
    if not -total <= index < total:
        raise ValueError(f"{name}: index {index} is outside a map that has {total} of them")
    return index % total


def _as_range(pick: int | slice | range, total: int, name: str) -> range:
    if isinstance(pick, int):
        index = _in_range(pick, total, name)
        return range(index, index + 1)
    some = range(total)[pick] if isinstance(pick, slice) else pick
    if some.step != 1 or not 0 <= some.start < some.stop <= total:
        raise ValueError(f"{name}={pick} must be some neighbours out of {total}")
    return some


def _known(lse: Tensor, q: Tensor) -> Tensor:
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse of shape {tuple(lse.shape)} does not fit (batch, heads, queries) = {tuple(q.shape[:3])}")
    lse = lse.detach().to(q)
    return lse.masked_fill(lse == float("-inf"), float("inf"))  # some kernels mark rows that see nothing this way


def _frozen(part: Part) -> Part:
    """A bias or mechanism that training no longer changes: its parameters copied, its other tensors shared."""
    if not isinstance(part, nn.Module):
        return part
    own: dict[int, object] = {}
    for module in part.modules():
        for x in module.parameters(recurse=False):
            own[id(x)] = nn.Parameter(x.detach().clone(), requires_grad=False)
        for x in [*module.buffers(recurse=False), *(y for y in vars(module).values() if isinstance(y, Tensor))]:
            own[id(x)] = x.detach().clone() if x.requires_grad else x
    return copy.deepcopy(part, own)


def _key_heads(k: Tensor, heads: range, n_heads: int) -> Tensor:
    """The key heads (B, G', S, D) that some query heads share, still grouped where whole groups are taken."""
    shared_by = n_heads // k.shape[1]
    first, last = heads.start // shared_by, (heads.stop - 1) // shared_by
    if first == last or heads.start % shared_by == heads.stop % shared_by == 0:
        return k[:, first : last + 1]
    return k[:, [h // shared_by for h in heads]]


# ---- cutting an axis


def _cut(span: slice, most: int) -> list[slice]:
    return [slice(i, min(i + most, span.stop)) for i in range(span.start, span.stop, most)]


def _runs(indices: Tensor) -> list[slice]:
    """Indices as runs of neighbours, in order."""
    ends = [*((indices.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(indices)]
    values, starts = indices.tolist(), [0, *ends[:-1]]
    return [slice(values[a], values[a] + b - a) for a, b in zip(starts, ends, strict=True) if b > a]


def _touched(span: Span, size: int) -> Iterable[int]:
    """The blocks of a given size in which a span lies."""
    if isinstance(span, slice):
        return range(span.start // size, -(-span.stop // size))
    touched: list[int] = (span // size).unique().tolist()
    return touched


def _cells(total: int, count: int, most: int, name: str, of: str) -> list[tuple[slice, slice]]:
    """An axis cut into cells like ``tensor_split``, as (places, cells): several cells of one size, or a part of one."""
    if not 1 <= count <= total:
        raise ValueError(f"pooled {name}={count} must lie between 1 and the {total} {of}")
    size, larger = divmod(total, count)
    found, start, cell = [], 0, 0
    while cell < count:
        here = size + (cell < larger)
        together = min(max(1, most // here), (larger if cell < larger else count) - cell)
        places = slice(start, start + together * here)
        parts = -(-here // most)  # 1 unless a single cell is too large for a block
        found += [(piece, slice(cell, cell + together)) for piece in _cut(places, -(-together * here // parts))]
        start, cell = places.stop, cell + together
    return found


def _sizes(total: int, count: int, like: Tensor) -> Tensor:
    size, larger = divmod(total, count)
    return torch.tensor([size + (cell < larger) for cell in range(count)], dtype=like.dtype, device=like.device)


def _reduced(x: Tensor, dim: int, cells: slice, reduce: str) -> Tensor:
    """Equal cells along an axis, each to its sum or its largest value."""
    grouped = x.unflatten(dim, (cells.stop - cells.start, -1))
    return grouped.sum(dim + 1) if reduce == "mean" else grouped.amax(dim + 1)


def _collect(into: Tensor, values: Tensor, reduce: str) -> None:
    if reduce == "mean":
        into.add_(values)
    else:
        torch.maximum(into, values, out=into)
