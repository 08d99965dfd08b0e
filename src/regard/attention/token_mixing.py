"""Linformer (low-rank keys and values) and FNet (Fourier mixing), neither of which can be causal.

``approximation_error`` compares an approximation with softmax attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .attend import attend
from .frame import Frame
from .linear_attention import visible_keys
from .masks import Mask, Padding
from .mechanisms import Dot, Mechanism, Prepared


class Linformer(nn.Module, Dot):
    """Linformer (Wang et al. 2020, eq. 7): softmax(scale · Q (E K)ᵀ) (F V), with learned E, F of rank × length.

    Queries attend to ``rank`` summaries of the keys, in O(T · rank); the attention map has T × rank weights.
    """

    name = "linformer"
    kind = "summary"

    def __init__(self, length: int, rank: int, n_heads: int | None = None, scale: float | None = None) -> None:
        """With ``n_heads``, each key head has its own E and F; otherwise all share one pair."""
        super().__init__()
        if not 1 <= rank <= length:
            raise ValueError(f"rank={rank} must lie between 1 and length={length}")
        self.length, self.rank, self.n_heads, self.scale = length, rank, n_heads, scale
        shape = (rank, length) if n_heads is None else (n_heads, rank, length)
        self.e = nn.Parameter(torch.empty(shape))
        self.f = nn.Parameter(torch.empty(shape))
        for weight in (self.e, self.f):
            nn.init.normal_(weight, std=1 / math.sqrt(length))  # summaries then have the variance of the keys

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Linformer:
        rank = min(config.mixing.size_of(config.mixer_size), config.max_len)
        return cls(config.max_len, rank, scale=config.attention_scale)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, frame: Frame) -> Prepared:
        if mask is not None and not isinstance(mask, Padding):
            name = type(mask).__name__
            raise ValueError(f"mechanism 'linformer' summarises the keys; its mask can only be padding, got {name}")
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q has head width {q.shape[-1]} but k has {k.shape[-1]}")
        if self.n_heads not in (None, k.shape[1]):
            raise ValueError(f"Linformer has n_heads={self.n_heads}, but k has {k.shape[1]} heads")
        visible = visible_keys(mask, frame)
        if visible is not None:
            k, v = k.masked_fill(~visible, 0), v.masked_fill(~visible, 0)
        q, k, v = self.queries(q), self._columns(self.e, frame) @ k, self._columns(self.f, frame) @ v
        return Prepared(q, k, v, None, Frame.of(q, k))

    def _columns(self, weight: Tensor, frame: Frame) -> Tensor:
        """The columns of E or F at the positions of the keys, (B or 1, G or 1, rank, S)."""
        weight = weight if weight.dim() == 3 else weight[None]
        if frame.steady is not None and frame.steady[1] >= 0:
            start = frame.steady[1]
            self._check_length(start + frame.n_keys)
            return weight[None, :, :, start : start + frame.n_keys]
        if frame.limit is None or frame.limit >= self.length:
            self._check_length(int(frame.k_pos.max()) + 1)
        columns = weight[:, :, frame.k_pos.clamp(min=0)]  # keys of empty slots are 0, so any column will do
        return columns.permute(2, 0, 1, 3) if frame.k_pos.dim() == 2 else columns[None]

    def _check_length(self, needed: int) -> None:
        if needed > self.length:
            raise ValueError(f"Linformer has length={self.length}, but the keys need {needed}")

    def extra_repr(self) -> str:
        return f"length={self.length}, rank={self.rank}, n_heads={self.n_heads}, scale={self.scale}"


class Fourier(nn.Module):
    """FNet's mixing layer (Lee-Thorp et al. 2022, eq. 1): y = Re(FFT_seq(FFT_hidden(x))), without parameters.

    It replaces attention in a block: there are no queries, keys or attention weights. Padding is mixed in as well.
    """

    name = "fourier"

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Fourier:
        return cls()

    def forward(self, x: Tensor) -> Tensor:
        return fourier_mix(x)


def fourier_mix(x: Tensor) -> Tensor:
    """Re(FFT_seq(FFT_hidden(x))) of x (B, T, M): y_{t,m} = Re Σ_{s,n} x_{s,n} e^{-2πi (ts/T + mn/M)}."""
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x must have 3 non-empty dimensions (batch, length, width), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    exact = x.to(torch.promote_types(x.dtype, torch.float32))  # each output is a sum of T · M numbers
    return torch.fft.fft2(exact, dim=(1, 2)).real.to(x.dtype)


@torch.no_grad()
def approximation_error(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> float:
    """‖approximation - exact‖ / ‖exact‖ (Frobenius) of the outputs; exact is softmax attention with the same scale."""
    exact = attend(q, k, v, mask=mask, scale=getattr(mechanism, "scale", None)).output
    approximate = attend(q, k, v, mask=mask, mechanism=mechanism).output
    return float((approximate - exact).norm() / exact.norm())
