"""Losses. Targets equal to ``IGNORE`` count for nothing: padding, and what a masked language model was not asked."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over targets of -Σ_c y_c log p_c, y smoothed (Szegedy et al. 2016; Vaswani et al. 2017, §5.4).

    y = (1 - smoothing) · one-hot + smoothing / classes. A sum, not a mean: whoever averages knows over how many.
    """
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    chunk: int = 1024,
) -> Tensor:
    """``cross_entropy(hidden @ weightᵀ + bias, targets)`` in chunks of rows: the logits are never held whole.

    hidden (…, M), weight (V, M). A vocabulary of 50,000 at 65,536 tokens would be 13 GB of fp32 logits, and as much
    again for their gradient; here it is chunk × V.
    """
    rows = hidden.flatten(0, -2)
    zero = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return _LinearCrossEntropy.apply(rows, weight, zero, targets.flatten(), smoothing, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient of each chunk is made beside its loss: softmax(z) - y, once, and the chunk's logits can go."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float, chunk: int
    ) -> Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        d_bias = torch.zeros_like(bias, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            x, y = hidden[part], targets[part]
            logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype)).float()
            log_p = torch.log_softmax(logits, dim=-1)
            counted = y != IGNORE
            index = torch.where(counted, y, 0)[:, None]
            loss = -(1 - smoothing) * log_p.gather(-1, index)[:, 0] - smoothing * log_p.mean(-1)
            total += torch.where(counted, loss, 0).sum()
            d_logits = log_p.exp_().sub_(smoothing / logits.shape[-1])
            d_logits.scatter_add_(-1, index, torch.full_like(index, -(1 - smoothing), dtype=d_logits.dtype))
            d_logits.mul_(counted[:, None])
            d_bias += d_logits.sum(0)
            d_logits = d_logits.to(x.dtype)
            d_hidden[part] = d_logits @ weight.to(x.dtype)
            d_weight += d_logits.T @ x
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype), d_bias.to(bias.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> Any:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        return d_hidden * d_total, d_weight * d_total, d_bias * d_total, None, None, None
