# mypy: disable-error-code="no-untyped-def"
"""Cross-entropy and its slope in one pass: a row of bf16 logits is read, and overwritten by softmax(z) - y.

A program takes one row z: lse = log Σ exp z, the loss lse - z_y, then the slope in the place of z. The row's second
reading comes from the cache. ``training.loss`` makes logits and gradients around it, and has the same in plain torch.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LIFT = 32768.0  # of slopes in e5m2: what is at most 1 then uses its whole range
_BLOCK, _WARPS = (128, 4) if INTERPRETED else (2048, 4)


@triton.jit
def _loss_and_slope(
    logits, targets, losses, eighths, width, n_classes, smoothing, cap, ignore,
    SMOOTHS: tl.constexpr, CAPS: tl.constexpr, SLOPE: tl.constexpr, EIGHTHS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row): its loss and, in the place of its logits (rows, width), the slope; beyond n_classes is padding."""
    row = tl.program_id(0).to(tl.int64)
    at, columns = logits + row * width, tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if SLOPE:
            for start in range(0, width, BLOCK):
                nothing, inside = tl.zeros([BLOCK], tl.float32), start + columns < width
                tl.store(at + start + columns, nothing.to(tl.bfloat16), mask=inside)
                if EIGHTHS:
                    tl.store(eighths + row * width + start + columns, nothing.to(tl.float8e5), mask=inside)
        return
    wanted = tl.load(at + target).to(tl.float32)
    if CAPS:
        wanted = cap * (2 * tl.sigmoid(2 * wanted / cap) - 1)
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
    loss = lse - (1 - smoothing) * wanted
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
            if CAPS:  # the slope of cap · tanh(z / cap)
                slope *= 1 - (z / cap) * (z / cap)
            slope = tl.where(inside, slope, 0.0)
            tl.store(at + start + columns, slope.to(tl.bfloat16), mask=start + columns < width)
            if EIGHTHS:
                small = (slope * 32768.0).to(tl.float8e5)
                tl.store(eighths + row * width + start + columns, small, mask=start + columns < width)


def loss_and_slope(
    logits: Tensor,
    targets: Tensor,
    n_classes: int,
    ignore: int,
    smoothing: float,
    cap: float | None,
    slope: bool,
    eighths: Tensor | None = None,
) -> Tensor:
    """The loss of each row (rows,), 0 where the target is ``ignore``; bf16 ``logits`` (rows, width) become their slope.

    Columns from ``n_classes`` on are padding. ``cap``: of logits cap · tanh(logit / cap). ``eighths`` (rows, width)
    e5m2 takes the slope times LIFT as well.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _loss_and_slope[(len(logits),)](
            logits, targets, losses, losses if eighths is None else eighths, logits.shape[1], n_classes, smoothing,
            0.0 if cap is None else cap, ignore, SMOOTHS=smoothing > 0, CAPS=cap is not None, SLOPE=slope,
            EIGHTHS=eighths is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return losses
