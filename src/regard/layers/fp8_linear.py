"""Linear layers with fp8 matrix products, for training (Micikevicius et al. 2022).

y = x Wᵀ + b and dx = dy W with x, W and dy in e4m3. Every row is first divided by its largest number (dynamic scaling),
so that it uses the whole range; the wider range of e5m2, whose mantissa is shorter, is then not needed. dW = dyᵀ x sums
over rows with different scales and is computed in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..foundation.autograd import first_derivative_only

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ALIGNMENT = 16  # tensor cores need both widths to be multiples of this


def scale_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, n) in fp8, and the fp32 scale (rows, 1) by which each row must be multiplied again."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp_min(1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale


def product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None = None, gradient: bool = False
) -> Tensor:
    """a bᵀ + bias in bf16, for a (rows, n) and b (columns, n) from ``scale_rows``.

    Tensor cores accumulate with 14 bits. A ``gradient``, which sums many small terms and a few large ones, is
    accumulated in fp32 instead; this is fast only without scales, so these are applied afterwards.
    """
    if a[0].is_cuda and gradient:
        one = torch.ones((), device=a[0].device)
        out = torch._scaled_mm(a[0], b[0].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
        return (out * a[1] * b[1].T).bfloat16()
    if a[0].is_cuda:
        return torch._scaled_mm(
            a[0], b[0].T, scale_a=a[1], scale_b=b[1].T, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
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
    @first_derivative_only("an fp8 linear layer")
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = product(scale_rows(d_output, E4M3), scale_rows(weight.T, E4M3), gradient=True)
        return d_x, d_output.T @ x, d_output.sum(0) if ctx.has_bias else None


class Fp8Linear(nn.Linear):
    """A linear layer with fp8 products, sharing the parameters of ``linear``.   (…, in) → (…, out) bf16"""

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
    """Replace every linear layer below ``module`` by an Fp8Linear if tensor cores support its widths."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Linear and child.in_features % _ALIGNMENT == child.out_features % _ALIGNMENT == 0:
                setattr(part, name, Fp8Linear(child))
