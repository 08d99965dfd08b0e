"""One attention to be computed, and the tiles of its score matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .biases import Bias
from .frame import ALL, Frame, Span
from .masks import Mask
from .masks.plan import EMPTY, PARTIAL, BlockPlan, plan
from .scores import Mechanism, Operands


@dataclass(frozen=True, eq=False)
class Scoring:
    """The score matrix of queries against keys as a function of (rows, cols): prepared q and k, mask, bias, frame.

    The dense matrix is the tile of everything. Whoever needs less asks for less: the tiled kernel, the attention map.
    """

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    mask: Mask | None
    bias: Bias | None
    mechanism: Mechanism
    frame: Frame

    def operands(self) -> tuple[Operands, Operands]:
        """The O(T) tensors behind the tiles: the mechanism's and the bias's."""
        return self.mechanism.operands(self.frame), () if self.bias is None else self.bias.operands(self.frame)

    def tile(
        self,
        rows: Span | None = None,
        cols: Span | None = None,
        operands: tuple[Operands, Operands] | None = None,
        masked: bool = True,
    ) -> Tensor:
        """Scores (B, H, R, C), bias added; where the mask says no: -inf before a softmax, 0 in a linear kernel."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        own, of_bias = self.operands() if operands is None else operands
        q, k = take(self.q, rows), take(self.k, cols)
        scores = self.mechanism.tile(q, k, own)
        if self.bias is not None:
            bias = self.bias.tile(rows, cols, self.frame, of_bias, q, k)
            # A tile is fresh memory: where no graph wants the step before, a second one would only cost.
            scores = scores + bias if torch.is_grad_enabled() else scores.add_(bias)
        allowed = self.allowed(rows, cols) if masked else None
        return scores if allowed is None else hide(scores, allowed, self.nothing)

    @property
    def nothing(self) -> float:
        """The score that becomes weight 0."""
        return float("-inf") if self.mechanism.normaliser == "softmax" else 0.0

    def allowed(self, rows: Span | None = None, cols: Span | None = None) -> Tensor | None:
        """Who may look, broadcastable to (B, H, R, C); None where everyone may."""
        rows, cols = ALL if rows is None else rows, ALL if cols is None else cols
        if self.mask is not None:
            return self.mask.tile(rows, cols, self.frame)
        return self.frame.site(rows, cols).j >= 0 if self.frame.may_have_gaps else None

    def plan(self) -> BlockPlan:
        """The blocks to compute: large ones that still fit the cache, or smaller ones where those skip enough work."""
        coarse = plan(self.mask, self.frame, self._block(512, 256))
        # Only a partial block can be cut into pieces of which some are empty.
        to_gain = (coarse.kinds == PARTIAL).sum() / (coarse.kinds != EMPTY).sum().clamp(min=1)
        if to_gain < 1 / 4 or self.frame.n_queries <= 64:
            return coarse
        finer = {self._block(128, 128), self._block(64, 64)} - {coarse.block}
        return min([coarse, *(plan(self.mask, self.frame, block) for block in finer)], key=self._cost)

    def _block(self, height: int, width: int) -> tuple[int, int]:
        """A block of at most this size whose tile, over batch and heads, is no larger than the mechanism wants."""
        while height * width * self._pairs > self.largest_tile and height > 32:
            height, width = (height // 2, width) if height >= width else (height, width // 2)
        return height, width

    def _cost(self, blocks: BlockPlan) -> int:
        """What following a plan costs, in scores computed; starting a tile costs about as much as 2¹⁶ of them.

        ``tiled`` joins the blocks of a row to large tiles, except under a bias, which is read fastest block by block.
        """
        scores_in_block = blocks.block[0] * blocks.block[1] * self._pairs
        scores_in_rows = [n * scores_in_block for n in (blocks.kinds != EMPTY).sum(1).tolist()]
        largest = scores_in_block if self.bias is not None else self.largest_tile
        n_tiles = sum(-(-n // largest) for n in scores_in_rows)
        return sum(scores_in_rows) + (n_tiles << 16)

    @property
    def largest_tile(self) -> int:
        """Pairs in a tile. What fits a processor's cache would leave a GPU waiting for the next one to start."""
        return max(self.mechanism.largest_tile, 1 << 20) if self.q.is_cuda else self.mechanism.largest_tile

    @property
    def _pairs(self) -> int:
        return self.frame.n_batch * self.frame.n_heads


def take(x: Tensor, span: Span) -> Tensor:
    """Some rows of heads (B, H, T, D)."""
    return x[:, :, span] if isinstance(span, slice) else x.index_select(2, span)  # a third of the time of x[:, :, span]


def hide(scores: Tensor, allowed: Tensor, nothing: float) -> Tensor:
    """``nothing`` where looking is not allowed."""
    if nothing == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return scores.masked_fill(~allowed, nothing)
    # No graph to keep intact: a minimum, in place, is vectorised and costs a seventh of masked_fill on a CPU. A NaN
    # stays one even where it is hidden; the reference hides it.
    ceiling = torch.where(allowed, float("inf"), nothing).to(scores.dtype)
    return torch.minimum(scores, ceiling, out=scores)


def exp_minus_(x: Tensor, m: Tensor) -> Tensor:
    """exp(x - m) in place, as 2 to the (x - m)·log₂e; the difference first, or large scores would lose their digits.

    On a CPU exp2 takes a third of exp's time, and a tenth where its argument is far below 0.
    """
    return x.sub_(m).mul_(1 / math.log(2)).exp2_()


@dataclass(frozen=True, eq=False)
class Call(Scoring):
    """A Scoring with values: what a backend turns into an output (B, H, T, D)."""

    v: Tensor  # (B, G, S, D)
    dropout: float = 0.0
    seed: Tensor | None = None  # of the dropout, where it is given; else whoever drops draws its own
