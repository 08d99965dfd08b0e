"""The formula, step by step. Every other backend is compared with this one.

Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V        (Vaswani et al. 2017, eq. 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .frame import ALL, Frame, Span
from .mechanisms import Dot, by_group, by_head
from .score_matrix import AttentionCall


class Steps(NamedTuple):
    """Everything between q, k, v and the output, in the order it is computed."""

    scores: Tensor  # (B, H, T, S) q · k, or what the mechanism calls a score
    scaled: Tensor  # × 1/√d_k; where the mechanism has no scale, the scores
    biased: Tensor  # + position bias
    masked: Tensor  # -inf where the mask says no (0 for linear kernels)
    weights: Tensor  # rows sum to 1; a row without keys is 0
    output: Tensor  # (B, H, T, D) weights @ v


def compute_steps(call: AttentionCall) -> Steps:
    """All steps of an attention, without dropout."""
    scaled, biased, masked, weights = _weights(call)
    scores = scaled
    if isinstance(call.mechanism, Dot) and call.mechanism.kind == "dot":
        exact = torch.promote_types(call.q.dtype, torch.float32)
        scores = Dot(scale=1.0).tile(call.q.to(exact), call.k.to(exact))
    return Steps(scores, scaled, biased, masked, weights, apply_weights(weights, call.v))


def _weights(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled, biased and masked scores, and the weights they become."""
    exact = torch.promote_types(call.q.dtype, torch.float32)  # products of large heads overflow float16
    (own, of_bias), q, k = call.operands(), call.q.to(exact), call.k.to(exact)
    scaled = call.mechanism.tile(q, k, own)
    biased = scaled
    if call.bias is not None:
        biased = scaled + call.bias.tile(ALL, ALL, call.frame, of_bias, q, k)
    allowed = call.allowed()
    masked = biased if allowed is None else biased.masked_fill(~allowed, call.hidden_score)
    return scaled, biased, masked, normalise(masked, call.mechanism.normaliser).to(call.v.dtype)


def reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and weights (before dropout), O(T · S) memory."""
    weights = _weights(call)[-1]
    if call.dropout == 0:
        return apply_weights(weights, call.v), weights
    seed = draw_seed(call.q.device) if call.seed is None else call.seed
    dropped_out = weights * dropout_tile(call.dropout, seed, ALL, ALL, call.frame) / (1 - call.dropout)
    return apply_weights(dropped_out, call.v), weights


def normalise(scores: Tensor, normaliser: str) -> Tensor:
    """Scores → weights whose rows sum to 1; a fully masked row is 0 with gradient 0."""
    positive = scores
    if normaliser == "softmax":
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
        largest = exact.detach().amax(-1, keepdim=True)
        positive = torch.exp(exact - torch.where(largest == float("-inf"), 0, largest))
    total = positive.sum(-1, keepdim=True)
    return (positive / torch.where(total == 0, 1, total)).to(scores.dtype)


def apply_weights(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, H, T, S) @ v (B, G, S, D) → (B, H, T, D)."""
    return by_head(by_group(weights, v.shape[1]) @ v, weights.shape[1])


_MASK = (1 << 31) - 1


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash whose products stay inside int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x6C8E9CF5) & _MASK
    return x ^ (x >> 16)


def dropout_tile(rate: float, seed: Tensor, rows: Span, cols: Span, frame: Frame) -> Tensor:
    """Which weights of a tile dropout keeps, (B, H, R, C) booleans; a function of (seed, b, h, row, col)."""
    at = frame.site(rows, cols)
    row_key = _mix(_mix(_mix((seed & _MASK) + at.b) + at.h) + at.row)  # (B, H, R, 1)
    col_key = _mix(at.col + 0x3C6EF372)
    return _mix(row_key ^ col_key) >= int(rate * (_MASK + 1))


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator, so that ``torch.manual_seed`` applies."""
    return torch.randint(0, _MASK, (), device=device)
