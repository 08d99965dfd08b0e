"""Differential attention: a head is the difference of two attention maps, which cancels their common noise.

head = (softmax(q₁ k₁ᵀ / √D) − λ softmax(q₂ k₂ᵀ / √D)) v,      v twice as wide as q and k      (Ye et al. 2024, eq. 1)
λ    = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init,           λ_init = 0.8 − 0.6 exp(−0.3 layer)          (eq. 2)
out  = (1 − λ_init) RMSNorm(head)                                                                          (eq. 3)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..layers.norms import RMSNorm
from .frame import Frame
from .masks import Mask
from .mechanisms import Dot, Prepared


class Differential(nn.Module, Dot):
    """Maps 2p and 2p + 1 form head p, whose values are those of both maps, concatenated.

    The maps are scaled dot products, so every backend can compute them, and W_q, W_k, W_v, W_o and the cache have the
    sizes of plain attention with as many heads as there are maps. λ is one number per layer.
    """

    name = "differential"
    maps = 2

    def __init__(self, d_head: int, layer: int = 0, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.randn(d_head) * 0.1) for _ in range(4)
        )
        self.norm = RMSNorm(2 * d_head, eps=1e-5)

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int, layer: int = 0) -> Differential:
        return cls(d_head, layer, config.attention_scale)

    def compute_lambda(self) -> Tensor:
        """λ, the factor of the second map (eq. 2)."""
        first, second = self.lambda_q1 @ self.lambda_k1, self.lambda_q2 @ self.lambda_k2
        return first.exp() - second.exp() + self.lambda_init

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, frame: Frame) -> Prepared:
        """Give both maps of a head the head's values, (B, G, S, 2 D)."""
        both = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # (B, G / 2, S, 2 D)
        return Prepared(q, k, both.repeat_interleave(2, dim=1), mask, frame)

    def combine(self, sums: Tensor) -> Tensor:
        """Weighted sums (B, H, T, 2 D) of the maps → heads (B, H / 2, T, 2 D)."""
        return self.norm(self.combine_weights(sums)) * (1 - self.lambda_init)

    def combine_weights(self, weights: Tensor) -> Tensor:
        first, second = weights.unflatten(1, (-1, 2)).unbind(2)
        return first - self.compute_lambda().to(weights.dtype) * second
