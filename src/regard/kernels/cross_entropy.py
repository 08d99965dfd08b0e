# mypy: disable-error-code="no-untyped-def"
"""Linear + cross-entropy with its gradients: logits are written once by a product, then read and overwritten once.

One Triton kernel takes a row of bf16 logits z, computes lse = log Σ exp z and the loss, and puts the slope
softmax(z) - y in the place of z; two more products make the gradients of states and weight from it.
``training.loss`` has the same in plain torch.

A product whose output has 50,257 columns is not aligned, and cuBLAS then falls back to kernels of an old architecture.
Here the weight is padded to a multiple of 128 rows for the length of a step; padded columns have no probability.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ALIGNMENT = 128  # of the vocabulary
_SHARE_OF_MEMORY = 16  # logits take at most this part of a GPU's memory; beyond that rows go in chunks
_BLOCK, _WARPS = (128, 4) if INTERPRETED else (8192, 8)


@triton.jit
def _loss_and_slope(
    logits, targets, losses, width, n_classes, smoothing, cap, ignore,
    SMOOTHS: tl.constexpr, CAPS: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row): its loss and, in the place of its logits (rows, width), the slope; beyond n_classes is padding."""
    row = tl.program_id(0).to(tl.int64)
    at, columns = logits + row * width, tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if SLOPE:
            for start in range(0, width, BLOCK):
                tl.store(at + start + columns, tl.zeros([BLOCK], tl.bfloat16), mask=start + columns < width)
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


def loss_and_slope(
    logits: Tensor, targets: Tensor, n_classes: int, ignore: int, smoothing: float, cap: float | None, slope: bool
) -> Tensor:
    """The loss of each row (rows,), 0 where the target is ``ignore``; bf16 ``logits`` (rows, width) become their slope.

    Columns from ``n_classes`` on are padding. ``cap``: of logits cap · tanh(logit / cap).
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _loss_and_slope[(len(logits),)](
            logits, targets, losses, logits.shape[1], n_classes, smoothing, 0.0 if cap is None else cap, ignore,
            SMOOTHS=smoothing > 0, CAPS=cap is not None, SLOPE=slope, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return losses


def linear_cross_entropy_and_slopes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore: int,
    smoothing: float,
    cap: float | None,
    chunk: int | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the loss (fp32), and its gradients in hidden (rows, M), weight (V, M) and bias (V,), in bf16.

    Those that nobody ``needs`` have no numbers. ``chunk`` rows at a time, else as many as fit into memory well.
    """
    n_rows, n_classes = len(hidden), len(weight)
    padding = -n_classes % _ALIGNMENT
    w = F.pad(weight.bfloat16(), (0, 0, 0, padding)) if padding else weight.bfloat16()
    b = None if bias is None else F.pad(bias.bfloat16(), (0, padding))
    for_hidden, for_weight, for_bias = needs
    size = _most_rows(hidden.device, len(w)) if chunk is None else chunk
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if for_hidden else 0, dtype=torch.bfloat16)
    # Sums over several chunks are kept in fp32.
    wide = torch.float32 if n_rows > size else torch.bfloat16
    d_weight = hidden.new_zeros(w.shape if for_weight else 0, dtype=wide)
    d_bias = hidden.new_zeros(len(w) if for_bias else 0, dtype=torch.float32)
    for start in range(0, n_rows, size):
        x, y = hidden[start : start + size].bfloat16(), targets[start : start + size]
        logits = F.linear(x, w, b)
        total += loss_and_slope(logits, y, n_classes, ignore, smoothing, cap, any(needs)).sum()
        if for_bias:
            d_bias += logits.sum(0, dtype=torch.float32)
        if for_hidden:
            torch.mm(logits, w, out=d_hidden[start : start + size])
        if for_weight and n_rows <= size:
            torch.mm(logits.T, x, out=d_weight)
        elif for_weight:
            d_weight += logits.T @ x
    return total, d_hidden, d_weight[:n_classes].bfloat16(), d_bias[:n_classes].bfloat16()


def _most_rows(device: torch.device, width: int) -> int:
    if device.type != "cuda":
        return 1024
    return max(1024, torch.cuda.get_device_properties(device).total_memory // (_SHARE_OF_MEMORY * 2 * width))
