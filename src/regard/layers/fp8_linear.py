"""Linear layers whose products are computed in eight bits, for training (Micikevicius et al. 2022).

y = x Wᵀ + b with x and W in e4m3, and dx = dy W with dy in e5m2, whose range is wider. Every row is divided by its own
largest number first (dynamic scaling), so that it uses the whole range. dW = dyᵀ x sums over rows of different scales;
it is computed in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..foundation.autograd import first_derivative_only

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ALIGNMENT = 16  # of both widths, which the matrix units ask for


def scale_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, n) in eight bits, and the factor (rows, 1) fp32 that each row is to be multiplied with again."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp_min(1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale


def product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None = None, gradient: bool = False
) -> Tensor:
    """a bᵀ + bias in bf16 of what ``scale_rows`` made of a (rows, n) and b (columns, n).

    The matrix units' own sums keep 14 bits. Of a ``gradient``, where many small terms meet few large ones, sums are
    therefore moved to fp32 on the way.
    """
    if a[0].is_cuda:
        return torch._scaled_mm(
            a[0], b[0].T, scale_a=a[1], scale_b=b[1].T, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=not gradient
        )
    out = (a[0].float() * a[1]) @ (b[0].float() * b[1]).T
    return (out if bias is None else out + bias.float()).bfloat16()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(scale_rows(x, E4M3), scale_rows(weight, E4M3), bias)

    @staticmethod
    @first_derivative_only("a linear layer in eight bits")
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = product(scale_rows(slope, E5M2), scale_rows(weight.T, E4M3), gradient=True)
        return d_x, slope.T @ x, slope.sum(0) if ctx.has_bias else None


class Fp8Linear(nn.Linear):
    """The linear layer it is made from, with the same parameters.   (…, in) → (…, out) bf16"""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        with torch.autocast(x.device.type, enabled=False):
            half = None if bias is None else bias.bfloat16()
            out: Tensor = _Linear.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), half)
        return out.unflatten(0, x.shape[:-1])


def use_fp8(module: nn.Module) -> None:
    """Let every linear layer below ``module`` whose widths the matrix units take compute in eight bits."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Linear and child.in_features % _ALIGNMENT == child.out_features % _ALIGNMENT == 0:
                setattr(part, name, Fp8Linear(child))
