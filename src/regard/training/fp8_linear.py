"""Linear layers with fp8 matrix products, for training (Micikevicius et al. 2022).

y = x Wᵀ + b and dx = dy W with x, W and dy in e4m3. Every row of x and dy is first divided by its largest number
(dynamic scaling), so that it uses the whole range; the wider range of e5m2, whose mantissa is shorter, is then not
needed. dW = dyᵀ x sums over rows with different scales and is computed in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..foundation.autograd import first_derivative_only
from .row_operators import gradient_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ALIGNMENT = 16  # tensor cores need both widths to be multiples of this
# With widths that add up to less, converting rows takes as long as the product gains: 768 × 768 does not pay off.
_WORTHWHILE = 2048


def scale_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, n) in fp8, and the fp32 scale (rows, 1) by which each row must be multiplied again."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp_min(1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale


def scale_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, n) in e4m3, and the fp32 scale () by which all of it must be multiplied again."""
    scale = x.abs().amax().float().clamp_min(1e-12) / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3).contiguous(), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias in bf16, for a (rows, n) and b (columns, n) from ``scale_rows``. Tensor cores add up with 14 bits."""
    if a[0].is_cuda:
        return torch._scaled_mm(
            a[0], b[0].T, scale_a=a[1], scale_b=b[1].T, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = (a[0].float() * a[1]) @ (b[0].float() * b[1]).T
    return (out if bias is None else out + bias.float()).bfloat16()


def gradient_product(a: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale · a W in bf16 for a gradient a (rows, n) in fp8 and a weight (n, columns) in bf16; without a scale, 1.

    A gradient sums many small terms and a few large ones, so it is accumulated in fp32. That is fast only with one
    scale for a whole matrix; scales of the rows of ``a`` are left to the caller.
    """
    w, w_scale = scale_matrix(weight.T)
    if a.is_cuda:
        a_scale = torch.ones((), device=a.device) if scale is None else scale
        return torch._scaled_mm(a, w.T, a_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=False)
    out = a.float() @ w.float().T * w_scale
    return (out if scale is None else out * scale).bfloat16()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(scale_rows(x, E4M3), scale_rows(weight, E4M3), bias)

    @staticmethod
    @first_derivative_only("an fp8 linear layer")
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        d_output = d_output.contiguous()
        _, rows, scales, d_bias = gradient_rows(d_output, None, None, "none", True)
        d_x = (gradient_product(rows, weight) * scales).bfloat16() if for_x else None
        return d_x, d_output.T @ x if for_weight else None, d_bias.bfloat16() if for_bias else None


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


def gains_from_fp8(linear: nn.Module) -> bool:
    """Whether this is a linear layer that tensor cores compute in eight bits, large enough to be faster for it."""
    if type(linear) is not nn.Linear or has_hooks(linear):
        return False
    widths = linear.in_features, linear.out_features
    return all(width % _ALIGNMENT == 0 for width in widths) and sum(widths) >= _WORTHWHILE


def has_hooks(layer: nn.Module) -> bool:
    """Whether hooks are registered on this layer; a layer that takes its place would not call them."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def use_fp8(module: nn.Module) -> None:
    """Replace every linear layer below ``module`` that gains from it by an Fp8Linear."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if gains_from_fp8(child):
                setattr(part, name, Fp8Linear(child))  # type: ignore[arg-type]  # a linear layer
