# mypy: disable-error-code="no-untyped-def"
"""Cross-entropy and its gradient in one kernel: each row of bf16 logits z is overwritten by its slope, softmax(z) - y.

A program handles one row: lse = log Σ exp z, the loss lse - z_y, then the slope in place of z. Part of the second read
of the row comes from the cache. ``training.loss`` computes logits and parameter gradients around it, and has a version
in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..foundation.device import TRITON_INTERPRETED

LIFT = 32768.0  # factor of slopes in e5m2, so that numbers of at most 1 use its whole range
# Measured fastest on an H200.
_STACK, _BLOCK, _LANES, _WARPS = (2, 64, 32, 4) if TRITON_INTERPRETED else (2, 2048, 2048, 8)


@triton.jit
def _softly_capped(z, cap, CAPS: tl.constexpr):
    if CAPS:
        z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)
    return z


@triton.jit
def _bits_of_e5m2(x):
    """The bits of x in e5m2: those of fp16 without the lower eight, rounded to even. Triton's own cast is slower."""
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    return ((bits + 127 + ((bits >> 8) & 1)) >> 8).to(tl.uint8)


@triton.jit
def _loss_and_slope(
    logits, targets, losses, fp8_slope, width, n_classes, smoothing, cap, ignore,
    SMOOTHS: tl.constexpr, CAPS: tl.constexpr, SLOPE: tl.constexpr, FP8: tl.constexpr,
    STACK: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Program (row): its loss and, in place of its logits (rows, width), the slope; columns ≥ n_classes are padding.

    A tile is STACK blocks. Each of the BLOCK lanes has a running maximum and sum of its own, so that no lane waits for
    another within the loop. Loads are limited by ``width``: ``n_classes`` is odd in many vocabularies, and a limit that
    is not a multiple of eight makes a GPU load the numbers one by one. Stores have other indices than the tile: with
    the same, stores of one byte would spread a lane over threads.
    """
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    columns = tl.arange(0, STACK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    lanes = tl.arange(0, LANES)
    target = tl.load(targets + row)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if SLOPE:
            for start in range(0, width, LANES):
                index = start + lanes
                nothing = tl.zeros([LANES], tl.float32)
                tl.store(at + index, nothing.to(tl.bfloat16), mask=index < width)
                if FP8:
                    tl.store(fp8_slope + row * width + index, nothing.to(tl.uint8), mask=index < width)
        return
    target_logit = _softly_capped(tl.load(at + target).to(tl.float32), cap, CAPS)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, STACK * BLOCK):
        z = tl.load(at + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        z = tl.where(start + columns < n_classes, _softly_capped(z, cap, CAPS), float("-inf"))
        if SMOOTHS:
            summed += tl.sum(tl.where(start + columns < n_classes, z, 0.0), 0)
        higher = tl.maximum(top, tl.max(z, 0))
        total *= tl.exp2((top - higher) * 1.4426950408889634)
        total += tl.sum(tl.exp2((z - higher[None, :]) * 1.4426950408889634), 0)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp2((top - highest) * 1.4426950408889634), 0))
    loss = lse - (1 - smoothing) * target_logit
    if SMOOTHS:
        loss -= smoothing * tl.sum(summed, 0) / n_classes
    tl.store(losses + row, loss)
    if SLOPE:
        n_tiles = tl.cdiv(width, LANES)
        for tile in tl.range(0, n_tiles, loop_unroll_factor=2):  # backwards: the end is still in the cache
            index = (n_tiles - 1 - tile) * LANES + lanes
            inside = index < width
            z = _softly_capped(tl.load(at + index, mask=inside, other=0.0).to(tl.float32), cap, CAPS)
            slope = tl.exp2((z - lse) * 1.4426950408889634) - smoothing / n_classes
            slope -= tl.where(index == target, 1 - smoothing, 0.0)
            if CAPS:  # the derivative of cap · tanh(z / cap)
                slope *= 1 - (z / cap) * (z / cap)
            slope = tl.where(index < n_classes, slope, 0.0)
            tl.store(at + index, slope.to(tl.bfloat16), mask=inside)
            if FP8:
                tl.store(fp8_slope + row * width + index, _bits_of_e5m2(slope * 32768.0), mask=inside)


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
            logits, targets, losses, losses if fp8_slope is None else fp8_slope.view(torch.uint8), logits.shape[1],
            n_classes, smoothing, 0.0 if cap is None else cap, ignore, SMOOTHS=smoothing > 0, CAPS=cap is not None,
            SLOPE=slope, FP8=fp8_slope is not None, STACK=_STACK, BLOCK=_BLOCK, LANES=_LANES, num_warps=_WARPS,
        )  # fmt: skip
    return losses
