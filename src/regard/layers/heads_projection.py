"""A linear layer to the heads of attention whose backward pass joins their gradients in one kernel, for training.

Queries, keys and values are views of one product. Their gradients come from attention as three tensors; the kernel
writes them side by side, sums them for the bias and, with fp8, writes them in eight bits as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.autograd import first_derivative_only
from .fp8_linear import E4M3, gains_from_fp8, gradient_product, product, scale_rows
from .row_operators import joined_rows


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], fp8: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.fp8, ctx.biased = fp8, bias is not None
        out = product(scale_rows(x, E4M3), scale_rows(weight, E4M3), bias) if fp8 else F.linear(x, weight, bias)
        return out.split(widths, dim=-1)

    @staticmethod
    @first_derivative_only("a fused projection to heads")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_output, rows, scales, d_bias = joined_rows([gradient.contiguous() for gradient in gradients], ctx.fp8)
        d_x = (gradient_product(rows, weight) * scales).bfloat16() if ctx.fp8 else d_output @ weight
        return d_x, d_output.T @ x, d_bias.bfloat16() if ctx.biased else None, None, None


class HeadsProjection(nn.Linear):
    """A linear layer sharing the parameters of ``linear``, in bf16; ``fp8``: its products run in eight bits."""

    def __init__(self, linear: nn.Linear, fp8: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.fp8 = linear.weight, linear.bias, fp8

    def heads(self, x: Tensor, counts: tuple[int, ...], d_head: int) -> list[Tensor]:
        """x (B, T, M) → heads (B, count, T, D) for each of two or three counts, as views."""
        bias: Tensor | None = self.bias
        with torch.autocast(x.device.type, enabled=False):
            half = None if bias is None else bias.bfloat16()
            widths = [count * d_head for count in counts]
            rows = x.flatten(0, -2).bfloat16()
            parts = _Heads.apply(rows, self.weight.bfloat16(), half, widths, self.fp8)
        return [part.unflatten(0, x.shape[:-1]).unflatten(-1, (-1, d_head)).transpose(1, 2) for part in parts]


def fuse_projections(attention: nn.Module, fp8: bool) -> None:
    """Replace the layers to queries, keys and values of a MultiHeadAttention by fused ones, if they are trained."""
    for name in ("w_qkv", "w_kv"):
        linear = getattr(attention, name, None)
        if type(linear) is nn.Linear and all(p.requires_grad for p in linear.parameters()):
            setattr(attention, name, HeadsProjection(linear, fp8 and gains_from_fp8(linear)))
