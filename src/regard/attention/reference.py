"""The formula, step by step. Every other backend is compared with this one.

Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V        (Vaswani et al. 2017, eq. 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call
from .dropout import draw_seed, keep_tile
from .frame import ALL
from .scores import Dot, by_group, by_head


class Steps(NamedTuple):
    """Everything between q, k, v and the output, in the order it is computed."""

    scores: Tensor  # (B, H, T, S) q · k, or what the mechanism calls a score
    scaled: Tensor  # × 1/√d_k; where the mechanism has no scale, the scores
    biased: Tensor  # + position bias
    masked: Tensor  # -inf where the mask says no (0 for linear kernels)
    weights: Tensor  # rows sum to 1; a row without keys is 0
    output: Tensor  # (B, H, T, D) weights @ v


def steps(call: Call) -> Steps:
    """All steps of an attention, dropout left out: it acts on the weights only while training."""
    scaled, biased, masked, weights = _weights(call)
    scores = scaled
    if isinstance(call.mechanism, Dot) and call.mechanism.kind == "dot":
        scores = Dot(scale=1.0).tile(_exact(call.q), _exact(call.k))
    return Steps(scores, scaled, biased, masked, weights, weigh(weights, call.v))


def _weights(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled, biased and masked scores, and the weights they become."""
    (own, of_bias), q, k = call.operands(), _exact(call.q), _exact(call.k)
    scaled = call.mechanism.tile(q, k, own)
    biased = scaled
    if call.bias is not None:
        biased = scaled + call.bias.tile(ALL, ALL, call.frame, of_bias, q, k)
    allowed = call.allowed()
    masked = biased if allowed is None else biased.masked_fill(~allowed, call.nothing)
    return scaled, biased, masked, normalise(masked, call.mechanism.normaliser).to(call.v.dtype)


def _exact(x: Tensor) -> Tensor:
    """Scores of half-precision heads are fp32: in float16 a product of large heads is infinite."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def reference(call: Call) -> tuple[Tensor, Tensor]:
    """Output and weights (before dropout), O(T · S) memory."""
    weights = _weights(call)[-1]  # what came before need not outlive it
    if call.dropout == 0:
        return weigh(weights, call.v), weights
    seed = draw_seed(call.q.device) if call.seed is None else call.seed
    kept = weights * keep_tile(call.dropout, seed, ALL, ALL, call.frame) / (1 - call.dropout)
    return weigh(kept, call.v), weights


def normalise(scores: Tensor, normaliser: str) -> Tensor:
    """Rows of scores to weights that sum to 1; a row in which nothing may be seen becomes 0, with gradient 0."""
    positive = safe_exp(scores)[0] if normaliser == "softmax" else scores
    total = positive.sum(-1, keepdim=True)
    return (positive / torch.where(total == 0, 1, total)).to(scores.dtype)


def safe_exp(scores: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scores - m) and m, the largest of each row; m is 0 where all are -inf, so that nothing becomes NaN."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    largest = scores.detach().amax(-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0, largest)
    return torch.exp(scores - largest), largest


def weigh(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, H, T, S) @ v (B, G, S, D), each value head shared by its group of query heads."""
    return by_head(by_group(weights, v.shape[1]) @ v, weights.shape[1])
