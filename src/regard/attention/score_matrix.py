"""The score matrix of an attention as a function of (rows, cols), and the block-by-block walk over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from .biases import Bias
from .frame import ALL, Frame, Span, span_length, split_span
from .mask import EMPTY, PARTIAL, BlockPlan, Mask, plan
from .mechanisms import Mechanism, Operands


@dataclass(frozen=True, eq=False)
class ScoreMatrix:
    """Scores of prepared queries against prepared keys, with mask, bias and frame, computed tile by tile."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    mask: Mask | None
    bias: Bias | None
    mechanism: Mechanism
    frame: Frame

    def operands(self) -> tuple[Operands, Operands]:
        """The O(T) tensors that tiles read: the mechanism's and the bias's."""
        return self.mechanism.operands(self.frame), () if self.bias is None else self.bias.operands(self.frame)

    def tile(
        self,
        rows: Span | None = None,
        cols: Span | None = None,
        operands: tuple[Operands, Operands] | None = None,
        masked: bool = True,
    ) -> Tensor:
        """Scores (B, H, R, C) plus bias; masked pairs are -inf (softmax) or 0 (linear kernel)."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        own, of_bias = self.operands() if operands is None else operands
        q, k = select_rows(self.q, rows), select_rows(self.k, cols)
        scores = self.mechanism.tile(q, k, own)
        if self.bias is not None:
            bias = self.bias.tile(rows, cols, self.frame, of_bias, q, k)
            scores = scores + bias if torch.is_grad_enabled() else scores.add_(bias)
        allowed = self.allowed(rows, cols) if masked else None
        return scores if allowed is None else apply_mask(scores, allowed, self.hidden_score)

    @property
    def hidden_score(self) -> float:
        """The score whose weight is 0."""
        return float("-inf") if self.mechanism.normaliser == "softmax" else 0.0

    def allowed(self, rows: Span | None = None, cols: Span | None = None) -> Tensor | None:
        """The mask, broadcastable to (B, H, R, C); None where nothing is masked."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        if self.mask is not None:
            return self.mask.tile(rows, cols, self.frame)
        return self.frame.site(rows, cols).j >= 0 if self.frame.may_have_gaps else None

    def plan(self) -> BlockPlan:
        """The blocks to compute: large ones that fit the CPU cache, or smaller ones where those skip enough work."""
        coarse = plan(self.mask, self.frame, self._block(512, 256))
        partial_share = (coarse.kinds == PARTIAL).sum() / (coarse.kinds != EMPTY).sum().clamp(min=1)
        if partial_share < 1 / 4 or self.frame.n_queries <= 64:
            return coarse
        finer = {self._block(128, 128), self._block(64, 64)} - {coarse.block}
        return min([coarse, *(plan(self.mask, self.frame, block) for block in finer)], key=self._cost)

    def _block(self, height: int, width: int) -> tuple[int, int]:
        """A block of at most this size whose tile, over batch and heads, has at most ``largest_tile`` pairs."""
        while height * width * self._pairs > self.largest_tile and height > 32:
            height, width = (height // 2, width) if height >= width else (height, width // 2)
        return height, width

    def _cost(self, blocks: BlockPlan) -> int:
        """The cost of a plan in scores computed; starting a tile costs about 2¹⁶ of them.

        ``tiled`` joins the blocks of a row to large tiles, except under a bias.
        """
        scores_in_block = blocks.block[0] * blocks.block[1] * self._pairs
        scores_in_rows = [n * scores_in_block for n in (blocks.kinds != EMPTY).sum(1).tolist()]
        largest = scores_in_block if self.bias is not None else self.largest_tile
        n_tiles = sum(-(-n // largest) for n in scores_in_rows)
        return sum(scores_in_rows) + (n_tiles << 16)

    @property
    def largest_tile(self) -> int:
        """Most pairs in a tile; on a GPU at least 2²⁰, or launches would dominate."""
        return max(self.mechanism.largest_tile, 1 << 20) if self.q.is_cuda else self.mechanism.largest_tile

    @property
    def _pairs(self) -> int:
        return self.frame.n_batch * self.frame.n_heads


def select_rows(x: Tensor, span: Span) -> Tensor:
    return x[:, :, span] if isinstance(span, slice) else x.index_select(2, span)  # 3 × faster than x[:, :, span]


def apply_mask(scores: Tensor, allowed: Tensor, nothing: float) -> Tensor:
    """``nothing`` where ``allowed`` is False."""
    if nothing == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return scores.masked_fill(~allowed, nothing)
    # Without a graph, an in-place minimum costs a seventh of masked_fill on a CPU. It keeps a masked NaN.
    ceiling = torch.where(allowed, float("inf"), nothing).to(scores.dtype)
    return torch.minimum(scores, ceiling, out=scores)


def exp_minus_(x: Tensor, m: Tensor) -> Tensor:
    """exp(x - m) in place, as 2^((x - m)·log₂e): on a CPU exp2 takes a third of exp's time."""
    return x.sub_(m).mul_(1 / math.log(2)).exp2_()


@dataclass(frozen=True, eq=False)
class AttentionCall(ScoreMatrix):
    """A ScoreMatrix with values: what a backend computes."""

    v: Tensor  # (B, G, S, D)
    dropout: float = 0.0
    seed: Tensor | None = None  # of the dropout; None: the backend draws one


Block = tuple[slice, bool]  # columns, and whether the mask applies inside them
INF = float("inf")


class TileWalk:
    """A score matrix read block by block, with the normalisers (lse) of the rows computed so far."""

    def __init__(self, scoring: ScoreMatrix, lse: Tensor) -> None:
        self.scoring = scoring
        self.lse = lse  # (B, H, T): NaN where not computed yet, +inf where a row sees nothing
        self.linear = scoring.mechanism.normaliser != "softmax"
        _keep_freed_memory()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, n_queries = self.lse.shape
        return b, h, n_queries, self.scoring.k.shape[2]

    @cached_property
    def plan(self) -> BlockPlan:
        return self.scoring.plan()

    @cached_property
    def kinds(self) -> list[list[int]]:
        return self.plan.kinds.tolist()

    @cached_property
    def operands(self) -> tuple[Operands, Operands]:
        own, of_bias = self.scoring.operands()
        return tuple(x.to(self.lse.dtype) for x in own), tuple(x.to(self.lse.dtype) for x in of_bias)

    def part(self, batch: range, heads: range) -> TileWalk:
        """The walk of some of the batch and heads; its lse is a view of this one's."""
        whole, some, which = self.scoring, slice(batch.start, batch.stop), slice(heads.start, heads.stop)
        shared_by = self.shape[1] // whole.k.shape[1]
        first, last = heads.start // shared_by, (heads.stop - 1) // shared_by
        if first == last or heads.start % shared_by == heads.stop % shared_by == 0:  # inside a group, or whole groups
            k = whole.k[some, first : last + 1]
        else:
            k = whole.k[some, [h // shared_by for h in heads]]
        scoring = replace(whole, q=whole.q[some, which], k=k, frame=whole.frame.part(batch, heads))
        return TileWalk(scoring, self.lse[some, which])

    def scores(self, rows: Span, cols: Span, masked: bool) -> Tensor:
        return self.scoring.tile(rows, cols, self.operands, masked=masked)

    def walk(self, rows: Span, blocks: list[Block]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The blocks of some rows as (cols, p, m) with weights p · exp(m - lse); stores lse at the end.

        p = exp(s - m), m the running maximum (Milakov & Gimelshein 2018); for a linear kernel p = s and m = 0.
        """
        lse = self.lse[:, :, rows, None]
        m = torch.zeros_like(lse)
        if not lse.isnan().any():
            m = m if self.linear else lse.masked_fill(lse == INF, 0)
            for cols, masked in blocks:
                p = self.scores(rows, cols, masked)
                yield cols, p if self.linear else exp_minus_(p, m), m
            return
        top, total = torch.full_like(lse, -INF), torch.zeros_like(lse)
        for cols, masked in blocks:
            p = self.scores(rows, cols, masked)
            if not self.linear:
                new_top = torch.maximum(top, p.amax(-1, keepdim=True))
                m = new_top.masked_fill(new_top == -INF, 0)  # a row that has seen nothing yet
                exp_minus_(p, m)
                total.mul_(torch.exp(top - m))
                top = new_top
            total.add_(p.sum(-1, keepdim=True))
            yield cols, p, m
        self.lse[:, :, rows] = torch.where(total == 0, INF, m + torch.log(total))[..., 0]

    def rescale_factor(self, before: Tensor, after: Tensor) -> Tensor:
        """exp(before - after), the factor between two running maxima; at most 1 for a softmax."""
        change = before - after
        return torch.exp(change if self.linear else change.clamp_(max=0))

    def compute_lse(self, rows: Span) -> None:
        """Compute lse of those of these rows that lack it."""
        unknown = self.lse[:, :, rows].isnan().flatten(0, 1).any(0).nonzero()[:, 0]
        if not len(unknown):
            return
        if isinstance(rows, slice):  # stays a slice: biases read neighbouring rows as diagonals
            rows = slice(rows.start + int(unknown[0]), rows.start + int(unknown[-1]) + 1)
        else:
            rows = rows[unknown]
        for _ in self.walk(rows, self.visible_blocks(rows)):
            pass

    def stripes(self) -> Iterator[tuple[slice, list[Block]]]:
        """The whole matrix: blocks of rows, each with its visible blocks of columns."""
        for rows in split_span(slice(0, self.shape[2]), self.plan.block[0]):
            yield rows, self.visible_blocks(rows)

    def visible_blocks(
        self, rows: Span, columns: Iterable[slice] | None = None, apart: Container[int] = ()
    ) -> list[Block]:
        """Non-empty blocks of columns, the plan's or those given, joined up to ``max_width`` except at ``apart``."""
        columns = split_span(slice(0, self.shape[3]), self.plan.block[1]) if columns is None else columns
        widest = self.max_width(span_length(rows, self.shape[2]))
        joined: list[Block] = []
        for cols in columns:
            kind = self.block_kind(rows, cols)
            if kind == EMPTY:
                continue
            before, before_masked = joined[-1] if joined else (slice(-1, -1), False)
            fits = cols.start == before.stop and cols.start not in apart and cols.stop - before.start <= widest
            if fits and before_masked == (kind == PARTIAL):
                joined[-1] = slice(before.start, cols.stop), before_masked
            else:
                joined.append((cols, kind == PARTIAL))
        return joined

    def visible_columns(self, rows: Span, cols: Span) -> Iterator[tuple[Span, bool, slice]]:
        """Visible columns in pieces, as (piece, whether the mask applies, slice of the result)."""
        width = self.plan.block[1]
        if isinstance(cols, slice):
            for some, masked in self.visible_blocks(rows, split_span(cols, width)):
                yield some, masked, slice(some.start - cols.start, some.stop - cols.start)
        else:
            for piece, there in self.chunks(cols, width):
                yield piece, True, there

    def max_width(self, n_rows: int) -> int:
        """How many columns a block of n_rows may have."""
        width = self.plan.block[1]
        fit = self.scoring.mechanism.largest_tile // (self.shape[0] * self.shape[1] * n_rows)
        return max(width, fit // width * width)

    def block_kind(self, rows: Span, cols: Span) -> int:
        """EMPTY, FULL or PARTIAL, from the blocks of the plan that these rows and columns touch."""
        height, width = self.plan.block
        lines = [self.kinds[a] for a in _blocks_of(rows, height)]
        kinds = {line[b] for b in _blocks_of(cols, width) for line in lines}
        return kinds.pop() if len(kinds) == 1 else PARTIAL

    def chunks(self, span: Span, most: int) -> Iterator[tuple[Span, slice]]:
        """A span in pieces of at most ``most``, each with its slice of the result."""
        bias = self.scoring.bias
        pieces: Iterable[Span]
        if isinstance(span, slice):
            pieces = split_span(span, most)
        elif bias is not None and bias.reads_content:
            # Such a bias computes all distances for scattered rows, but only nearby ones for runs of neighbours.
            pieces = [piece for run in _consecutive_runs(span) for piece in split_span(run, most)]
        else:
            pieces = span.split(most) if len(span) else ()  # no indices would be split into one piece of none
        done = 0
        for piece in pieces:
            n = piece.stop - piece.start if isinstance(piece, slice) else len(piece)
            yield piece, slice(done, done + n)
            done += n


@functools.cache
def _keep_freed_memory() -> None:
    """Keep glibc from returning freed tiles to the system: freeing a 30 MB block raises its mmap threshold."""
    torch.empty(30 << 20, dtype=torch.uint8)


def p_log_p(p: Tensor) -> Tensor:
    """p log p, 0 at 0; three times faster than xlogy."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_().mul_(p)


def _consecutive_runs(indices: Tensor) -> list[slice]:
    """Indices as runs of neighbours, in order."""
    values = indices.tolist()
    starts = [n for n, i in enumerate(values) if n == 0 or i != values[n - 1] + 1]
    return [slice(values[a], values[b - 1] + 1) for a, b in pairwise([*starts, len(values)])]


def _blocks_of(span: Span, size: int) -> Iterable[int]:
    """The blocks of a given size that a span touches."""
    if isinstance(span, slice):
        return range(span.start // size, -(-span.stop // size))
    return (span // size).unique().tolist()
