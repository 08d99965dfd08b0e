# mypy: disable-error-code="no-untyped-def"
"""Cross-entropy and its gradient in one kernel: each row of bf16 logits z is overwritten by its slope, softmax(z) - y.

A program handles one row: lse = log Σ exp z, the loss lse - z_y, then the slope in place of z. The second read of the
row comes from the cache. ``training.loss`` computes logits and parameter gradients around it, and has a version in
plain torch.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LIFT = 32768.0  # factor of slopes in e5m2, so that numbers of at most 1 use its whole range
_BLOCK, _WARPS = (128, 4) if INTERPRETED else (2048, 4)


@triton.jit
def _loss_and_slope(
    logits, targets, losses, fp8_slope, width, n_classes, smoothing, cap, ignore,
    SMOOTHS: tl.constexpr, CAPS: tl.constexpr, SLOPE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row): its loss and, in place of its logits (rows, width), the slope; columns ≥ n_classes are padding."""
    row = tl.program_id(0).to(tl.int64)
    at, columns = logits + row * width, tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if SLOPE:
            for start in range(0, width, BLOCK):
                nothing, inside = tl.zeros([BLOCK], tl.float32), start + columns < width
                tl.store(at + start + columns, nothing.to(tl.bfloat16), mask=inside)
                if FP8:
                    tl.store(fp8_slope + row * width + start + columns, nothing.to(tl.float8e5), mask=inside)
        return
    target_logit = tl.load(at + target).to(tl.float32)
    if CAPS:
        target_logit = cap * (2 * tl.sigmoid(2 * target_logit / cap) - 1)
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_classes, BLOCK):
        inside = start + columns < n_classes
        z = tl.load(at + start + columns, mask=inside, other=-1e30).to(tl.float32)
        if CAPS:
            z = tl.where(inside, cap * (2 * tl.sigmoid(2 * z / cap) - 1), -1e30)
        if SMOOTHS:
            summed += tl.where(inside, z, 0.0)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp2((top - higher) * 1.4426950408889634) + tl.exp2((z - higher) * 1.4426950408889634)
        top = higher
    lse = top + tl.log(tl.sum(total, 0))
    loss = lse - (1 - smoothing) * target_logit
    if SMOOTHS:
        loss -= smoothing * tl.sum(summed, 0) / n_classes
    tl.store(losses + row, loss)
    if SLOPE:
        for start in range(0, width, BLOCK):
            inside = start + columns < n_classes
            z = tl.load(at + start + columns, mask=inside, other=-1e30).to(tl.float32)
            if CAPS:
                z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)
            slope = tl.exp2((z - lse) * 1.4426950408889634) - smoothing / n_classes
            slope -= tl.where(start + columns == target, 1 - smoothing, 0.0)
            if CAPS:  # the derivative of cap · tanh(z / cap)
                slope *= 1 - (z / cap) * (z / cap)
            slope = tl.where(inside, slope, 0.0)
            tl.store(at + start + columns, slope.to(tl.bfloat16), mask=start + columns < width)
            if FP8:
                small = (slope * 32768.0).to(tl.float8e5)
                tl.store(fp8_slope + row * width + start + columns, small, mask=start + columns < width)


def loss_and_slope(
    logits: Tensor,
    targets: Tensor,
    n_classes: int,
    ignore: int,
    smoothing: float,
    cap: float | None,
    slope: bool,
    fp8_slope: Tensor | None = None,
) -> Tensor:
    """The loss of each row (rows,), 0 where the target is ``ignore``; with ``slope``, bf16 ``logits`` are overwritten.

    Columns of the logits (rows, width) from ``n_classes`` on are padding. With ``cap`` the loss is that of
    cap · tanh(logits / cap). The slope times LIFT is also written to ``fp8_slope`` (rows, width), in e5m2, if given.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _loss_and_slope[(len(logits),)](
            logits, targets, losses, losses if fp8_slope is None else fp8_slope, logits.shape[1], n_classes, smoothing,
            0.0 if cap is None else cap, ignore, SMOOTHS=smoothing > 0, CAPS=cap is not None, SLOPE=slope,
            FP8=fp8_slope is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return losses
