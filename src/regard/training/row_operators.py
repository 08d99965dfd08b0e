"""Passes over rows between matrix products as torch operators, opaque to torch.compile.

On a GPU each is one kernel of ``kernels.scaled_rows``; elsewhere, and as its reference, it is torch operations.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ..layers.feedforward import ACTIVATIONS

WIDEST = 16384  # numbers of a row that a kernel holds in registers
_E4M3 = torch.float8_e4m3fn
_HAS_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_kernel(x: Tensor) -> bool:
    """Whether a kernel runs over rows of x (rows, n)."""
    return _HAS_TRITON and (x.is_cuda or _INTERPRETED) and x.dtype == torch.bfloat16 and x.shape[-1] <= WIDEST


@torch.library.custom_op("regard::activated_rows", mutates_args=())
def activated_rows(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """An activation of rows (rows, n): in bf16, in e4m3, and the scale (rows, 1) of each row in e4m3."""
    if has_kernel(hidden):
        from ..kernels import scaled_rows

        return scaled_rows.activated_rows(hidden, kind)
    out = ACTIVATIONS[kind](hidden.float())
    return out.bfloat16(), *_in_fp8(out)


@activated_rows.register_fake
def _(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    new = hidden.new_empty
    return new(hidden.shape), new(hidden.shape, dtype=_E4M3), new((len(hidden), 1), dtype=torch.float32)


@torch.library.custom_op("regard::gradient_rows", mutates_args=())
def gradient_rows(
    gradient: Tensor, factors: Tensor | None, hidden: Tensor | None, kind: str, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient behind an activation from the bf16 one in front of it (rows, n), and its sum over rows (n,) in fp32.

    Returns it in bf16, in e4m3 with the scale (rows, 1) of each row, and the sum. ``factors`` (rows, 1) multiply the
    rows first. Without ``hidden``, the input of the activation, there is none, and the first result is empty; without
    ``fp8`` the second and third are.
    """
    if has_kernel(gradient):
        from ..kernels import scaled_rows

        return scaled_rows.gradient_rows(gradient, factors, hidden, kind, fp8)
    out = gradient.float() if factors is None else gradient.float() * factors
    out = out if hidden is None else out * slope(hidden.float(), kind)
    empty = out.new_empty
    half = empty(0, dtype=torch.bfloat16) if hidden is None else out.bfloat16()
    return half, *(_in_fp8(out) if fp8 else (empty(0, dtype=_E4M3), empty(0))), out.sum(0)


@gradient_rows.register_fake
def _(
    gradient: Tensor, factors: Tensor | None, hidden: Tensor | None, kind: str, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, (n_rows, width) = gradient.new_empty, gradient.shape
    out = new((0,) if hidden is None else (n_rows, width), dtype=torch.bfloat16)
    scaled = new((n_rows, width) if fp8 else (0,), dtype=_E4M3)
    scales = new((n_rows, 1) if fp8 else (0,), dtype=torch.float32)
    return out, scaled, scales, new((width,), dtype=torch.float32)


@torch.library.custom_op("regard::joined_rows", mutates_args=())
def joined_rows(parts: list[Tensor], fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two or three bf16 matrices (rows, n) side by side: in bf16, in e4m3 with the scale (rows, 1) of each row, and
    the sum over rows in fp32. Without ``fp8`` the second and third are empty."""
    if has_kernel(parts[0]) and sum(part.shape[1] for part in parts) <= WIDEST:
        from ..kernels import scaled_rows

        return scaled_rows.joined_rows(parts, fp8)
    out = torch.cat(parts, -1)
    scaled, scales = _in_fp8(out.float()) if fp8 else (out.new_empty(0, dtype=_E4M3), out.new_empty(0).float())
    return out, scaled, scales, out.sum(0, dtype=torch.float32)


@joined_rows.register_fake
def _(parts: list[Tensor], fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, n_rows, width = parts[0].new_empty, parts[0].shape[0], sum(part.shape[1] for part in parts)
    scaled = new((n_rows, width) if fp8 else (0,), dtype=_E4M3)
    scales = new((n_rows, 1) if fp8 else (0,), dtype=torch.float32)
    return new((n_rows, width)), scaled, scales, new((width,), dtype=torch.float32)


def slope(x: Tensor, kind: str) -> Tensor:
    """The derivative of an activation in ``KINDS``."""
    match kind:
        case "relu":
            return (x > 0).to(x.dtype)
        case "relu2":
            return 2 * x.clamp_min(0)
        case "gelu":
            return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
        case "gelu_tanh":
            s = torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
            return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    factor = 1.702 if kind == "quick_gelu" else 1.0  # or silu
    s = torch.sigmoid(factor * x)
    return s + factor * x * s * (1 - s)


KINDS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu")


def _in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(_E4M3).max
    return (x / scale).to(_E4M3), scale
