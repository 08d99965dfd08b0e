"""4-bit weights: NormalFloat with double quantisation, for the frozen part of QLoRA (Dettmers et al. 2023).

W ≈ s ⊙ c[q],   with 16 levels c, equally likely for a normal variable, and one scale s per 64 weights
s ≈ m + t ⊙ r / 127,   with r int8, one t per 256 scales, and m the mean of all scales

This takes 4.13 bits per weight. The forward pass dequantises the weights and frees them; the backward pass dequantises
them again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64  # weights per scale
SCALES = 256  # scales per step
# Appendix E of the paper.
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class NF4Weight(nn.Module):
    """A frozen 4-bit matrix: ``codes``, two per byte, int8 ``scale_codes``, float32 ``scale_steps``, ``scale_mean``."""

    codes: Tensor
    scale_codes: Tensor
    scale_steps: Tensor
    scale_mean: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = (weight.shape[0], weight.shape[1])
        for name, x in zip(("codes", "scale_codes", "scale_steps", "scale_mean"), quantise_nf4(weight), strict=True):
            self.register_buffer(name, x)

    def dequantise(self) -> Tensor:
        buffers = (self.codes, self.scale_codes, self.scale_steps, self.scale_mean)
        return dequantise_nf4(*buffers, self.shape, torch.float32)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, in autocast's dtype if autocast is on."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        buffers = (self.codes, self.scale_codes, self.scale_steps, self.scale_mean)
        out: Tensor = _Product.apply(x, *buffers, self.shape)
        return out if bias is None else out + bias.to(out.dtype)


class NF4Linear(nn.Module):
    """y = x Wᵀ + b with a frozen 4-bit W.   (…, in) → (…, out)"""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.frozen, self.bias = NF4Weight(linear.weight), linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen.product(x, self.bias)

    def plain(self) -> nn.Linear:
        """A Linear with the dequantised weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = nn.Parameter(self.frozen.dequantise()), self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, nf4"


@torch.no_grad()
def quantise_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (uint8, two weights each), scales (int8), and the steps and mean of the scales (float32)."""
    flat = weight.detach().float().flatten()
    flat = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1)
    mean = scale.mean()
    padded = F.pad(scale - mean, (0, -scale.numel() % SCALES)).view(-1, SCALES)
    steps = padded.abs().amax(1) / 127
    scale_codes = (padded / steps.clamp(min=1e-30)[:, None]).round().to(torch.int8).flatten()[: scale.numel()]
    # Quantise the weights with the rounded scales, which dequantisation will use.
    scale = _scales(scale_codes, steps, mean)
    levels = torch.tensor(_LEVELS, device=flat.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(flat / scale.clamp(min=1e-30)[:, None], middles).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scale_codes, steps, mean


def dequantise_nf4(
    codes: Tensor, scale_codes: Tensor, steps: Tensor, mean: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weights (out, in)."""
    levels = torch.tensor(_LEVELS, device=codes.device)
    both = torch.stack([codes >> 4, codes & 15], dim=1).view(-1, BLOCK)
    values = levels[both.int()] * _scales(scale_codes, steps, mean)[:, None]
    return values.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


def _scales(codes: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    """The scale of each block; clamped, because rounding could make a scale negative."""
    return (mean + codes * steps.repeat_interleave(SCALES)[: codes.numel()]).clamp(min=0)


class _Product(torch.autograd.Function):
    """x Wᵀ that saves the 4-bit codes for backward, not the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale_codes: Tensor, steps: Tensor, mean: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(codes, scale_codes, steps, mean)
        ctx.shape = shape
        return F.linear(x, dequantise_nf4(codes, scale_codes, steps, mean, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_output,), (codes, scale_codes, steps, mean) = d_outputs, ctx.saved_tensors
        weight = dequantise_nf4(codes, scale_codes, steps, mean, ctx.shape, d_output.dtype)
        return d_output @ weight, *[None] * 5
