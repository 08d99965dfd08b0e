"""A feed-forward network whose passes between the matrix products are single kernels, for training in bf16 and fp8.

The kernel of the activation's slope also sums the gradient of the bias, which would otherwise be read once more. With
fp8 the kernels write their rows in eight bits too, as the next product needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.autograd import first_derivative_only
from .feedforward import ACTIVATIONS, FeedForward
from .fp8_linear import E4M3, gains_from_fp8, gradient_product, product, scale_rows
from .row_operators import KINDS, WIDEST, activated_rows, gradient_rows


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
        ctx.kind, ctx.fp8, ctx.biased = kind, fp8, b_in is not None
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
        d_biases = (d_b_in.bfloat16(), d_b_out.bfloat16()) if ctx.biased else (None, None)
        return d_x, d_hidden.T @ x, d_biases[0], d_out.T @ neurons, d_biases[1], None, None


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


def fuse_feedforwards(module: nn.Module, fp8: bool) -> None:
    """Replace every plain feed-forward network below ``module`` that is trained whole by a FusedFeedForward."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) is FeedForward and _can_be_fused(child):
                eight = fp8 and gains_from_fp8(child.w_in) and gains_from_fp8(child.w_out)
                setattr(part, name, FusedFeedForward(child, eight))


def _can_be_fused(plain: FeedForward) -> bool:
    linear = all(type(part) is nn.Linear for part in plain.children() if not isinstance(part, nn.Dropout))
    trained = all(p.requires_grad for p in plain.parameters())
    fits = plain.activation in KINDS and plain.d_ff <= WIDEST and not plain.fp32_output
    return linear and trained and fits and plain.dropout.p == 0
