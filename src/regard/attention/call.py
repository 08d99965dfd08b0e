"""One attention to be computed, and the tiles of its score matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .biases import Bias
from .frame import ALL, Frame, Span
from .masks import Mask
from .masks.plan import BlockPlan, plan
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
        self, rows: Span = ALL, cols: Span = ALL, operands: tuple[Operands, Operands] | None = None, masked: bool = True
    ) -> Tensor:
        """Scores (B, H, R, C), bias added; where the mask says no: -inf before a softmax, 0 in a linear kernel."""
        own, of_bias = self.operands() if operands is None else operands
        q, k = self.q[:, :, rows], self.k[:, :, cols]
        scores = self.mechanism.tile(q, k, own)
        if self.bias is not None:
            bias = self.bias.tile(rows, cols, self.frame, of_bias, q, k)
            # A tile is fresh memory: where no graph wants the step before, a second one would only cost.
            scores = scores + bias if torch.is_grad_enabled() else scores.add_(bias)
        allowed = self.allowed(rows, cols) if masked else None
        if allowed is None:
            return scores
        fill = scores.masked_fill if torch.is_grad_enabled() else scores.masked_fill_
        return fill(~allowed, self.nothing)

    @property
    def nothing(self) -> float:
        """The score that becomes weight 0."""
        return float("-inf") if self.mechanism.normaliser == "softmax" else 0.0

    def allowed(self, rows: Span = ALL, cols: Span = ALL) -> Tensor | None:
        """Who may look, broadcastable to (B, H, R, C); None where everyone may."""
        if self.mask is not None:
            return self.mask.tile(rows, cols, self.frame)
        return self.frame.site(rows, cols).j >= 0 if self.frame.may_have_gaps else None

    def plan(self) -> BlockPlan:
        """The blocks to compute, of a size that keeps a tile in the cache."""
        pairs = self.frame.n_batch * self.frame.n_heads
        height, width = 512, 256
        while height * width * pairs > self.mechanism.largest_tile and height > 32:
            height, width = (height // 2, width) if height >= width else (height, width // 2)
        return plan(self.mask, self.frame, (height, width))


@dataclass(frozen=True, eq=False)
class Call(Scoring):
    """A Scoring with values: what a backend turns into an output (B, H, T, D)."""

    v: Tensor  # (B, G, S, D)
    dropout: float = 0.0
    seed: Tensor | None = None  # of the dropout; set whenever dropout > 0

    def with_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return Call(
            q, k, self.mask, self.bias, self.mechanism, self.frame, v, self.dropout, self.seed
        )
