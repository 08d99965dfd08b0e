"""The reference backend: the formula, step by step. Tests compare every other backend with it.

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
    """Every intermediate result from q, k and v to the output, in the order of computation."""

    scores: Tensor  # (B, H, T, S) q · k, or the score of the mechanism
    scaled: Tensor  # scores × 1/√d_k; equal to the scores if the mechanism has no scale
    biased: Tensor  # scaled + position bias
    masked: Tensor  # biased, with -inf at masked pairs (0 for linear kernels)
    weights: Tensor  # rows sum to 1 (less with sinks, any sum with sigmoids, 0 without keys)
    output: Tensor  # (B, H, T, D) weights @ v


def compute_steps(call: AttentionCall) -> Steps:
    """All steps of an attention call, without dropout."""
    scaled, biased, masked, weights = _weights(call)
    scores = scaled
    if isinstance(call.mechanism, Dot) and call.mechanism.kind == "dot":
        exact = torch.promote_types(call.q.dtype, torch.float32)
        scores = Dot(scale=1.0).tile(call.q.to(exact), call.k.to(exact))
    return Steps(scores, scaled, biased, masked, weights, apply_weights(weights, call.v))


def _weights(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled, biased and masked scores, and the weights."""
    exact = torch.promote_types(call.q.dtype, torch.float32)  # the dot products of wide heads overflow float16
    q, k = call.q.to(exact), call.k.to(exact)
    mechanism_operands, bias_operands = call.operands()
    scaled = call.mechanism.tile(q, k, mechanism_operands)
    biased = scaled
    if call.bias is not None:
        biased = scaled + call.bias.tile(ALL, ALL, call.frame, bias_operands, q, k)
    allowed = call.allowed()
    masked = biased if allowed is None else biased.masked_fill(~allowed, call.hidden_score)
    return scaled, biased, masked, normalise(masked, call.mechanism.normaliser, call.sinks).to(call.v.dtype)


def reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and weights (before dropout), in O(T · S) memory."""
    weights = _weights(call)[-1]
    if call.dropout == 0:
        return apply_weights(weights, call.v), weights
    seed = draw_seed(call.q.device) if call.seed is None else call.seed
    dropped_out = weights * dropout_tile(call.dropout, seed, ALL, ALL, call.frame) / (1 - call.dropout)
    return apply_weights(dropped_out, call.v), weights


def normalise(scores: Tensor, normaliser: str, sinks: Tensor | None = None) -> Tensor:
    """Weights from scores (B, H, T, S): rows sum to 1, except with "sigmoid", which is elementwise.

    A fully masked row is 0 with gradient 0. Each head's sink (H,) is an additional score in its rows without a key, so
    that the weights of the keys sum to less than 1.
    """
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return normalise(torch.cat([scores, column], -1), normaliser)[..., :-1]
    if normaliser == "sigmoid":
        return torch.sigmoid(scores)
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


_MASK = (1 << 31) - 1  # the low 31 bits


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash whose intermediate products fit in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x6C8E9CF5) & _MASK
    return x ^ (x >> 16)


def dropout_tile(rate: float, seed: Tensor, rows: Span, cols: Span, frame: Frame) -> Tensor:
    """Which weights of a tile dropout keeps, (B, H, R, C) booleans; a function of (seed, b, h, row, col) only."""
    at = frame.site(rows, cols)
    row_key = _mix(_mix(_mix((seed & _MASK) + at.b) + at.h) + at.row)  # (B, H, R, 1)
    col_key = _mix(at.col + 0x3C6EF372)
    return _mix(row_key ^ col_key) >= int(rate * (_MASK + 1))


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator, so that ``torch.manual_seed`` applies."""
    return torch.randint(0, _MASK, (), device=device)
