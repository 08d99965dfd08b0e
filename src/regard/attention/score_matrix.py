"""The score matrix of an attention call as a function of (rows, cols), and the block-by-block walk over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
    sinks: Tensor | None = field(default=None, kw_only=True)  # (H,) additional logits in each row's softmax

    def operands(self) -> tuple[Operands, Operands]:
        """The O(T) tensors that tiles read: the mechanism's, then the bias's."""
        return self.mechanism.operands(self.frame), () if self.bias is None else self.bias.operands(self.frame)

    def tile(
        self,
        rows: Span | None = None,
        cols: Span | None = None,
        operands: tuple[Operands, Operands] | None = None,
        masked: bool = True,
    ) -> Tensor:
        """Scores (B, H, R, C) plus bias; masked pairs are -inf (softmax, sigmoid) or 0 (linear kernel)."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        mechanism_operands, bias_operands = self.operands() if operands is None else operands
        q, k = select_rows(self.q, rows), select_rows(self.k, cols)
        scores = self.mechanism.tile(q, k, mechanism_operands)
        if self.bias is not None:
            bias = self.bias.tile(rows, cols, self.frame, bias_operands, q, k)
            scores = scores + bias if torch.is_grad_enabled() else scores.add_(bias)
        allowed = self.allowed(rows, cols) if masked else None
        return scores if allowed is None else apply_mask(scores, allowed, self.hidden_score)

    @property
    def hidden_score(self) -> float:
        """The score of a masked pair, whose weight is 0."""
        return float("-inf") if self.mechanism.normaliser in ("softmax", "sigmoid") else 0.0

    def allowed(self, rows: Span | None = None, cols: Span | None = None) -> Tensor | None:
        """The mask, broadcastable to (B, H, R, C); None if nothing is masked."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        if self.mask is not None:
            return self.mask.tile(rows, cols, self.frame)
        return self.frame.site(rows, cols).j >= 0 if self.frame.may_have_gaps else None

    def plan(self) -> BlockPlan:
        """The blocks to compute: large ones that fit the CPU cache, or smaller ones if those skip enough work."""
        coarse = plan(self.mask, self.frame, self._block(512, 256))
        partial_share = (coarse.kinds == PARTIAL).sum() / (coarse.kinds != EMPTY).sum().clamp(min=1)
        if partial_share < 1 / 4 or self.frame.n_queries <= 64:
            return coarse
        finer = {self._block(128, 128), self._block(64, 64)} - {coarse.block}
        return min([coarse, *(plan(self.mask, self.frame, block) for block in finer)], key=self._cost)

    def _block(self, height: int, width: int) -> tuple[int, int]:
        """The largest block up to this size whose tile, over batch and heads, has at most ``largest_tile`` pairs."""
        while height * width * self._pairs > self.largest_tile and height > 32:
            height, width = (height // 2, width) if height >= width else (height, width // 2)
        return height, width

    def _cost(self, blocks: BlockPlan) -> int:
        """The cost of a plan, in scores computed; starting a tile costs as much as about 2¹⁶ scores.

        ``tiled`` merges the blocks of a row into large tiles, except with a bias.
        """
        scores_in_block = blocks.block[0] * blocks.block[1] * self._pairs
        scores_in_rows = [n * scores_in_block for n in (blocks.kinds != EMPTY).sum(1).tolist()]
        largest = scores_in_block if self.bias is not None else self.largest_tile
        n_tiles = sum(-(-n // largest) for n in scores_in_rows)
        return sum(scores_in_rows) + (n_tiles << 16)

    @property
    def largest_tile(self) -> int:
        """The most pairs in a tile; on a GPU at least 2²⁰, or kernel launches would dominate."""
        return max(self.mechanism.largest_tile, 1 << 20) if self.q.is_cuda else self.mechanism.largest_tile

    @property
    def _pairs(self) -> int:
        return self.frame.n_batch * self.frame.n_heads


def _first_scores(scoring: ScoreMatrix) -> Tensor:
    """The mechanism's scores of the first query and two keys in at least fp32, (B, H, 1, 2)."""
    exact = torch.promote_types(scoring.q.dtype, torch.float32)
    operands = tuple(x.to(exact) for x in scoring.mechanism.operands(scoring.frame))
    return scoring.mechanism.tile(scoring.q[:, :, :1].to(exact), scoring.k[:, :, :2].to(exact), operands)


def select_rows(x: Tensor, span: Span) -> Tensor:
    return x[:, :, span] if isinstance(span, slice) else x.index_select(2, span)  # 3 × faster than x[:, :, span]


def apply_mask(scores: Tensor, allowed: Tensor, hidden_score: float) -> Tensor:
    """Set scores to ``hidden_score`` where ``allowed`` is False; in place if no graph is recorded."""
    if hidden_score == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return scores.masked_fill(~allowed, hidden_score)
    # An in-place minimum takes a seventh of the time of masked_fill on a CPU. It keeps a masked NaN.
    ceiling = torch.where(allowed, float("inf"), hidden_score).to(scores.dtype)
    return torch.minimum(scores, ceiling, out=scores)


def exp_minus_(x: Tensor, m: Tensor) -> Tensor:
    """exp(x - m) in place, as 2^((x - m) · log₂e): on a CPU exp2 takes a third of the time of exp."""
    return x.sub_(m).mul_(1 / math.log(2)).exp2_()


def add_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """log(e^lse + e^sink) for lse (B, H, R, 1) and one sink per head (H,); lse itself without sinks."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])


@dataclass(frozen=True, eq=False)
class AttentionCall(ScoreMatrix):
    """A ScoreMatrix with values and dropout: the input of a backend."""

    v: Tensor  # (B, G, S, D)
    dropout: float = 0.0
    seed: Tensor | None = None  # dropout seed; the backend draws one if None


Block = tuple[slice, bool]  # columns, and whether the mask hides some of their pairs
INF = float("inf")


class TileWalk:
    """Reads a score matrix block by block, and keeps the normalisers (lse) of the rows computed so far."""

    def __init__(self, scoring: ScoreMatrix, lse: Tensor) -> None:
        self.scoring = scoring
        self.lse = lse  # (B, H, T): NaN where not computed yet, +inf for a fully masked row
        self.linear = scoring.mechanism.normaliser != "softmax"  # no exponential, hence no running maximum
        self.sigmoid = scoring.mechanism.normaliser == "sigmoid"
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
        mechanism_operands, bias_operands = self.scoring.operands()
        dtype = self.lse.dtype
        return tuple(x.to(dtype) for x in mechanism_operands), tuple(x.to(dtype) for x in bias_operands)

    def part(self, batch: range, heads: range) -> TileWalk:
        """The walk over a range of batch entries and heads; its lse is a view of this one's."""
        whole, b, h = self.scoring, slice(batch.start, batch.stop), slice(heads.start, heads.stop)
        group = self.shape[1] // whole.k.shape[1]  # query heads per key head
        first, last = heads.start // group, (heads.stop - 1) // group
        if first == last or heads.start % group == heads.stop % group == 0:  # inside one group, or whole groups
            k = whole.k[b, first : last + 1]
        else:
            k = whole.k[b, [head // group for head in heads]]
        sinks = None if whole.sinks is None else whole.sinks[h]
        scoring = replace(whole, q=whole.q[b, h], k=k, frame=whole.frame.part(batch, heads), sinks=sinks)
        if len(heads) < self.shape[1]:
            own, all_heads = _first_scores(scoring), _first_scores(whole)[b, h]
            rounding = 1000 * torch.finfo(own.dtype).eps * all_heads.abs().max()
            if (own - all_heads).abs().max() > rounding:
                name = f"{type(whole.mechanism).__name__}.tile"
                raise ValueError(f"{name} mixes heads, so it cannot score one head alone; mix them in queries and keys")
        return TileWalk(scoring, self.lse[b, h])

    def scores(self, rows: Span, cols: Span, masked: bool) -> Tensor:
        return self.scoring.tile(rows, cols, self.operands, masked=masked)

    def walk(self, rows: Span, blocks: list[Block]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the blocks of some rows as (cols, p, m), with weights p · exp(m - lse); store lse at the end.

        p = exp(s - m) with the running maximum m (Milakov & Gimelshein 2018). For a linear kernel p = s and m = 0; for
        a sigmoid p = σ(s), m = 0 and lse = 0.
        """
        lse = self.lse[:, :, rows, None]
        m = torch.zeros_like(lse)
        if not lse.isnan().any():
            m = m if self.linear else lse.masked_fill(lse == INF, 0)
            for cols, masked in blocks:
                yield cols, self.weigh_(self.scores(rows, cols, masked), m), m
            return
        top, total = torch.full_like(lse, -INF), torch.zeros_like(lse)
        for cols, masked in blocks:
            p = self.scores(rows, cols, masked)
            if not self.linear:
                new_top = torch.maximum(top, p.amax(-1, keepdim=True))
                m = new_top.masked_fill(new_top == -INF, 0)  # 0 while a row is fully masked
                exp_minus_(p, m)
                total.mul_(torch.exp(top - m))
                top = new_top
            total.add_(p.sum(-1, keepdim=True))
            yield cols, p, m
        lse = add_sinks(m + torch.log(total), self.scoring.sinks)
        self.lse[:, :, rows] = torch.where(total == 0, INF, lse)[..., 0]

    def weigh_(self, scores: Tensor, m: Tensor) -> Tensor:
        """Turn scores into weights · exp(lse - m), in place."""
        if self.sigmoid:
            return scores.sigmoid_()
        return scores if self.linear else exp_minus_(scores, m)

    def rescale_factor(self, before: Tensor, after: Tensor) -> Tensor:
        """exp(before - after), the factor from one running maximum to the next; at most 1 for a softmax."""
        change = before - after
        return torch.exp(change if self.linear else change.clamp_(max=0))

    def compute_lse(self, rows: Span) -> None:
        """Compute lse where these rows lack it."""
        unknown = self.lse[:, :, rows].isnan().flatten(0, 1).any(0).nonzero()[:, 0]
        if not len(unknown):
            return
        if isinstance(rows, slice):  # keep it a slice: biases read adjacent rows along diagonals
            rows = slice(rows.start + int(unknown[0]), rows.start + int(unknown[-1]) + 1)
        else:
            rows = rows[unknown]
        for _ in self.walk(rows, self.visible_blocks(rows)):
            pass

    def stripes(self) -> Iterator[tuple[slice, list[Block]]]:
        """The whole matrix as blocks of rows, each with its non-empty blocks of columns."""
        for rows in split_span(slice(0, self.shape[2]), self.plan.block[0]):
            yield rows, self.visible_blocks(rows)

    def visible_blocks(
        self, rows: Span, columns: Iterable[slice] | None = None, apart: Container[int] = ()
    ) -> list[Block]:
        """The non-empty blocks of ``columns`` (default: the plan's), joined up to ``max_width`` except at ``apart``."""
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
        """The visible columns in pieces, as (piece, whether the mask applies, slice of the result)."""
        width = self.plan.block[1]
        if isinstance(cols, slice):
            for block, masked in self.visible_blocks(rows, split_span(cols, width)):
                yield block, masked, slice(block.start - cols.start, block.stop - cols.start)
        else:
            for piece, result in self.chunks(cols, width):
                yield piece, True, result

    def max_width(self, n_rows: int) -> int:
        """The most columns in a block of n_rows."""
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
            # Such a bias computes all distances for scattered rows, but only those of the tile for consecutive ones.
            pieces = [piece for run in _consecutive_runs(span) for piece in split_span(run, most)]
        else:
            pieces = span.split(most) if len(span) else ()  # split() of an empty tensor yields one empty piece
        done = 0
        for piece in pieces:
            n = piece.stop - piece.start if isinstance(piece, slice) else len(piece)
            yield piece, slice(done, done + n)
            done += n


@functools.cache
def _keep_freed_memory() -> None:
    """Stop glibc from returning freed tiles to the system: freeing a 30 MB block raises its mmap threshold."""
    torch.empty(30 << 20, dtype=torch.uint8)


def p_log_p(p: Tensor) -> Tensor:
    """p log p, and 0 at p = 0; three times as fast as xlogy."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_().mul_(p)


def _consecutive_runs(indices: Tensor) -> list[slice]:
    """Indices as slices of consecutive values, in order."""
    values = indices.tolist()
    starts = [n for n, i in enumerate(values) if n == 0 or i != values[n - 1] + 1]
    return [slice(values[a], values[b - 1] + 1) for a, b in pairwise([*starts, len(values)])]


def _blocks_of(span: Span, size: int) -> Iterable[int]:
    """The blocks of the given size that a span overlaps."""
    if isinstance(span, slice):
        return range(span.start // size, -(-span.stop // size))
    return (span // size).unique().tolist()
