# mypy: disable-error-code="no-untyped-def"
"""Passes over rows between matrix products, in one kernel each: activation, its slope, rows in fp8, sums of columns.

A row in fp8 is divided by its largest number, which is known only at its end; compiled torch operations therefore read
a wide row twice and compute the activation twice. Here a program holds a whole row. A kernel that runs over gradients
also sums them over rows: the gradient of a bias. ``training.fused_layers`` has the same in torch operations.

GPUs before Ada have no e4m3: for them Triton compiles no kernel with an argument of that type, even if it is not used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..foundation.device import TRITON_INTERPRETED

_PROGRAMS = 4 if TRITON_INTERPRETED else 8  # per multiprocessor, of kernels that sum over rows


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    else:  # silu
        return x * tl.sigmoid(x)


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """The derivative of ``_activate``."""
    if KIND == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu2":
        return 2 * tl.maximum(x, 0.0)
    elif KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1 - s)
    else:
        s = tl.sigmoid(x)
        return s + x * s * (1 - s)


@triton.jit
def _store_fp8(x, scaled, scales, row, at, inside):
    """Store a row x in e4m3, and the number by which it must be multiplied again."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(scaled + at, (x * (1 / scale)).to(tl.float8e4nv), mask=inside)


@triton.jit
def _activated_rows(hidden, out, scaled, scales, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): its activation in bf16 and in fp8."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * width + columns, columns < width
    x = _activate(tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + at, x.to(tl.bfloat16), mask=inside)
    _store_fp8(x, scaled, scales, row, at, inside)


@triton.jit
def _gradient_rows(
    gradient, factors, hidden, out, scaled, scales, sums, n_rows, width,
    KIND: tl.constexpr, FACTORS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program n of N, for rows n, n + N, …: gradients times factor and slope, in bf16 and fp8, and their sum.

    With KIND "none" there is no activation, and the rows are not written in bf16 again.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        x = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if FACTORS:
            x *= tl.load(factors + row)
        if KIND != "none":
            x *= _slope(tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32), KIND)
            tl.store(out + at, x.to(tl.bfloat16), mask=inside)
        if FP8:
            _store_fp8(x, scaled, scales, row, at, inside)
        total += x
    tl.store(sums + tl.program_id(0) * width + columns, total, mask=inside)


@triton.jit
def _joined_rows(
    first, second, third, out, scaled, scales, sums, n_rows, width_1, width_2, width_3,
    FP8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program n of N, for rows n, n + N, …: three rows side by side, in bf16 and fp8, and their sum."""
    columns = tl.arange(0, BLOCK)
    in_1, in_2 = columns < width_1, (columns >= width_1) & (columns < width_1 + width_2)
    in_3 = (columns >= width_1 + width_2) & (columns < width_1 + width_2 + width_3)
    inside = columns < width_1 + width_2 + width_3
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        long = tl.cast(row, tl.int64)
        at = long * (width_1 + width_2 + width_3) + columns
        a = tl.load(first + long * width_1 + columns, mask=in_1, other=0.0)
        b = tl.load(second + long * width_2 + (columns - width_1), mask=in_2, other=0.0)
        c = tl.load(third + long * width_3 + (columns - width_1 - width_2), mask=in_3, other=0.0)
        half = a + b + c  # two of the three are 0
        tl.store(out + at, half, mask=inside)
        x = half.to(tl.float32)
        if FP8:
            _store_fp8(x, scaled, scales, row, at, inside)
        total += x
    tl.store(sums + tl.program_id(0) * (width_1 + width_2 + width_3) + columns, total, mask=inside)


def activated_rows(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The activation of bf16 rows (rows, n): in bf16, in e4m3, and the scale (rows, 1) of each row in e4m3."""
    n_rows, width = hidden.shape
    out, scaled = torch.empty_like(hidden), torch.empty_like(hidden, dtype=torch.float8_e4m3fn)
    scales = torch.empty(n_rows, 1, dtype=torch.float32, device=hidden.device)
    if n_rows:
        block = triton.next_power_of_2(width)
        _activated_rows[(n_rows,)](hidden, out, scaled, scales, width, KIND=kind, BLOCK=block, num_warps=_warps(block))
    return out, scaled, scales


def gradient_rows(
    gradient: Tensor, factors: Tensor | None, hidden: Tensor | None, kind: str, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient behind an activation from the bf16 one in front of it, with the sum over rows (n,) in fp32.

    Returns it in bf16 (rows, n), in e4m3 with the scale (rows, 1) of each row, and the sum. ``factors`` (rows, 1)
    multiply the rows first. Without ``hidden``, the input of the activation, there is none, and the first result is
    empty; without ``fp8`` the second and third are.
    """
    n_rows, width = gradient.shape
    new = gradient.new_empty
    out = new(gradient.shape if hidden is not None else 0)
    scaled = new(gradient.shape if fp8 else 0, dtype=torch.float8_e4m3fn)
    scales = new((n_rows, 1) if fp8 else 0, dtype=torch.float32)
    n_programs = max(1, min(n_rows, _PROGRAMS * _multiprocessors(gradient.device)))
    sums, block = new((n_programs, width), dtype=torch.float32), triton.next_power_of_2(width)
    _gradient_rows[(n_programs,)](
        gradient, gradient if factors is None else factors, gradient if hidden is None else hidden, out,
        scaled if fp8 else out, scales, sums, n_rows, width, KIND="none" if hidden is None else kind,
        FACTORS=factors is not None, FP8=fp8, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out, scaled, scales, sums.sum(0)


def joined_rows(parts: list[Tensor], fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two or three bf16 matrices (rows, n) side by side: in bf16, in e4m3 with the scale (rows, 1) of each row, and
    the sum over rows in fp32. Without ``fp8`` the second and third are empty."""
    n_rows, widths, new = len(parts[0]), [part.shape[1] for part in parts], parts[0].new_empty
    width = sum(widths)
    out, scaled = new((n_rows, width)), new((n_rows, width) if fp8 else 0, dtype=torch.float8_e4m3fn)
    scales = new((n_rows, 1) if fp8 else 0, dtype=torch.float32)
    n_programs = max(1, min(n_rows, _PROGRAMS * _multiprocessors(out.device)))
    sums, block = new((n_programs, width), dtype=torch.float32), triton.next_power_of_2(width)
    three = parts if len(parts) == 3 else [*parts, out]
    _joined_rows[(n_programs,)](
        *three, out, scaled if fp8 else out, scales, sums, n_rows, *widths, *[0] * (3 - len(parts)), FP8=fp8,
        BLOCK=block, num_warps=max(1, _warps(block) // 2),
    )  # fmt: skip
    return out, scaled, scales, sums.sum(0)


def _warps(block: int) -> int:
    """Eight numbers for each thread, so that bf16 and fp8 numbers are distributed alike; measured fastest."""
    return max(1, min(16, block // 256))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
