"""Normalisation of each vector by its own statistics: LayerNorm, RMSNorm, and ``make_norm`` by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_positive, unknown_name

NORM_KINDS = ("layer", "rms", "none")


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016): y = (x − mean x) / √(var x + eps) · weight + bias.   (…, d) → (…, d)"""

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        check_positive(d=d)
        self.d, self.eps = d, eps
        self.weight = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        with keep_half(self.weight):
            return F.layer_norm(x, (self.d,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich 2019; LLaMA, T5): no mean, no bias.   (…, d) → (…, d)

    y = x / √(mean x² + eps) · (weight + offset).   Gemma has offset 1 and weights around 0.
    """

    def __init__(self, d: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        check_positive(d=d)
        self.d, self.eps, self.offset = d, eps, offset
        self.weight = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.offset == 0.0 and x.dtype == self.weight.dtype:
            with keep_half(self.weight):
                return F.rms_norm(x, (self.d,), self.weight, self.eps)
        # Compute in fp32: rounding weight + offset to bf16 would lose small weights, and the fused kernel needs one
        # dtype, unlike half-precision activations with fp32 weights (autocast). Return the narrower of the two dtypes.
        wide = torch.promote_types(x.dtype, torch.float32)
        narrow = x.dtype if x.dtype.itemsize <= self.weight.dtype.itemsize else self.weight.dtype
        return F.rms_norm(x.to(wide), (self.d,), self.weight.to(wide) + self.offset, self.eps).to(narrow)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, offset={self.offset}"


class LayerScale(nn.Module):
    """y = weight · x with one factor per channel, initially ``value`` (CaiT, Touvron et al. 2021).   (…, d) → (…, d)"""

    def __init__(self, d: int, value: float = 1.0) -> None:
        super().__init__()
        check_positive(d=d)
        self.d, self.value = d, value
        self.weight = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d}, value={self.value}"


class TanhGate(nn.Module):
    """y = tanh(gate) · x with gate initially 0, so that a new branch does not change the model at first (Flamingo)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.gate).to(x.dtype)


def keep_half(weight: Tensor) -> AbstractContextManager[object]:
    """Context for a norm with half-precision weights: disables autocast, which would make its output fp32.

    The kernels accumulate in fp32 either way.
    """
    if weight.dtype in (torch.float32, torch.float64) or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)


def make_norm(kind: str, d: int, eps: float = 1e-5, *, bias: bool = True, offset: float = 0.0) -> nn.Module:
    """The norm of a kind: "layer" (with ``bias``), "rms" (with ``offset``) or "none", the identity."""
    if kind == "layer":
        return LayerNorm(d, eps, bias)
    if kind == "rms":
        return RMSNorm(d, eps, offset)
    if kind == "none":
        return nn.Identity()
    raise unknown_name("norm", kind, NORM_KINDS)
