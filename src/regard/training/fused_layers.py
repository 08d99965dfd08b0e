"""Layers whose passes between matrix products are single kernels, for training in bf16 and fp8.

In a feed-forward network, the kernel of the activation's slope also sums the gradient of the bias, which would
otherwise be read once more. Queries, keys and values are views of one product, and attention returns their gradients as
three tensors: a kernel writes these side by side and sums them. With fp8 the kernels write their rows in eight bits as
well, as the next product needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..foundation.autograd import first_derivative_only
from ..layers.feedforward import ACTIVATIONS, FeedForward
from .fp8_linear import E4M3, gains_from_fp8, gradient_product, has_hooks, product, scale_rows
from .row_operators import KINDS, WIDEST, activated_rows, gradient_rows, joined_rows


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        kind: str,
        fp8: bool,
    ) -> Tensor:
        if fp8:
            hidden = product(scale_rows(x, E4M3), scale_rows(w_in, E4M3), b_in)
            neurons, *eight = activated_rows(hidden, kind)
            out = product((eight[0], eight[1]), scale_rows(w_out, E4M3), b_out)
        else:
            hidden = F.linear(x, w_in, b_in)
            neurons = ACTIVATIONS[kind](hidden)
            out = F.linear(neurons, w_out, b_out)
        ctx.save_for_backward(x, hidden, neurons, w_in, w_out)
        ctx.kind, ctx.fp8, ctx.biased = kind, fp8, (b_in is not None, b_out is not None)
        return out

    @staticmethod
    @first_derivative_only("a fused feed-forward network")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, neurons, w_in, w_out = ctx.saved_tensors
        d_out = d_out.contiguous()
        if ctx.fp8:
            _, rows, factors, d_b_out = gradient_rows(d_out, None, None, "none", True)
            d_neurons = gradient_product(rows, w_out)
            d_hidden, rows, scales, d_b_in = gradient_rows(d_neurons, factors, hidden, ctx.kind, True)
            d_x = (gradient_product(rows, w_in) * scales).bfloat16()
        else:
            d_b_out = d_out.sum(0, dtype=torch.float32)
            d_hidden, _, _, d_b_in = gradient_rows(d_out @ w_out, None, hidden, ctx.kind, False)
            d_x = d_hidden @ w_in
        in_has_bias, out_has_bias = ctx.biased
        d_b_in, d_b_out = d_b_in.bfloat16() if in_has_bias else None, d_b_out.bfloat16() if out_has_bias else None
        return d_x, d_hidden.T @ x, d_b_in, d_out.T @ neurons, d_b_out, None, None


class FusedFeedForward(FeedForward):
    """A feed-forward network with the parameters of ``plain``; ``fp8``: its products run in eight bits.

    (…, M) → (…, M) bf16
    """

    def __init__(self, plain: FeedForward, fp8: bool) -> None:
        with torch.device("meta"):  # the weights are replaced
            super().__init__(plain.d_model, plain.d_ff, plain.activation, bias=plain.has_bias)
        self.w_in, self.w_out, self.fp8 = plain.w_in, plain.w_out, fp8

    def forward(self, x: Tensor) -> Tensor:
        b_in, b_out = _in_bf16(self.w_in.bias), _in_bf16(self.w_out.bias)
        w_in, w_out = self.w_in.weight.bfloat16(), self.w_out.weight.bfloat16()
        with torch.autocast(x.device.type, enabled=False):
            rows = x.flatten(0, -2).bfloat16()
            out: Tensor = _FeedForward.apply(rows, w_in, b_in, w_out, b_out, self.activation, self.fp8)
        return out.unflatten(0, x.shape[:-1])


def _in_bf16(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.bfloat16()


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
        with torch.autocast(x.device.type, enabled=False):
            widths = [count * d_head for count in counts]
            rows = x.flatten(0, -2).bfloat16()
            parts = _Heads.apply(rows, self.weight.bfloat16(), _in_bf16(self.bias), widths, self.fp8)
        return [part.unflatten(0, x.shape[:-1]).unflatten(-1, (-1, d_head)).transpose(1, 2) for part in parts]


def fuse_layers(module: nn.Module, fp8: bool) -> None:
    """Replace the layers below ``module`` that are trained whole by fused ones: plain feed-forward networks, and the
    projections to queries, keys and values. Layers with hooks stay as they are."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is FeedForward and _can_be_fused(child):
                eight = fp8 and gains_from_fp8(child.w_in) and gains_from_fp8(child.w_out)
                setattr(part, name, FusedFeedForward(child, eight))
            elif isinstance(part, MultiHeadAttention) and name in ("w_qkv", "w_kv") and _is_trained_linear(child):
                setattr(part, name, HeadsProjection(child, fp8 and gains_from_fp8(child)))  # type: ignore[arg-type]  # linear


def _can_be_fused(plain: FeedForward) -> bool:
    fits = plain.activation in KINDS and plain.d_ff <= WIDEST and not plain.fp32_output and plain.dropout.p == 0
    hooked = has_hooks(plain) or has_hooks(plain.dropout)
    return fits and not hooked and _is_trained_linear(plain.w_in) and _is_trained_linear(plain.w_out)


def _is_trained_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and all(p.requires_grad for p in layer.parameters()) and not has_hooks(layer)
