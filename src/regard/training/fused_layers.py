"""Layers that replace a model's own while it trains in bf16 and fp8, with single kernels between matrix products.

In a feed-forward network, the kernel of the activation's slope also sums the gradient of the bias, which would
otherwise be read once more. Queries, keys and values are views of one product, and attention returns their gradients as
three tensors: a kernel writes these side by side and sums them. On a GPU these passes over rows are kernels of
``kernels.scaled_rows``; elsewhere, and as their reference, they are torch operations.

With fp8 (Micikevicius et al. 2022), y = x Wᵀ + b and dx = dy W with x, W and dy in e4m3. Every row of x and dy is first
divided by its largest number (dynamic scaling), so that it uses the whole range; the wider range of e5m2, whose
mantissa is shorter, is then not needed. dW = dyᵀ x sums over rows with different scales and is computed in bf16. The
kernels write their rows in eight bits as well, as the next product needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..foundation.autograd import first_derivative_only
from ..foundation.device import HAS_TRITON, TRITON_INTERPRETED
from ..layers.feedforward import ACTIVATIONS, FeedForward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu")  # activations whose slope a kernel computes
WIDEST = 16384  # numbers of a row that a kernel holds in registers
_ALIGNMENT = 16  # tensor cores need both widths to be multiples of this
# With widths that add up to less, converting rows takes as long as the product gains: 768 × 768 does not pay off.
_WORTHWHILE = 2048

# ------------------------------------------------------------------------------------- passes over rows


def has_kernel(x: Tensor) -> bool:
    """Whether a kernel runs over rows of x (rows, n)."""
    return HAS_TRITON and (x.is_cuda or TRITON_INTERPRETED) and x.dtype == torch.bfloat16 and x.shape[-1] <= WIDEST


@torch.library.custom_op("regard::activated_rows", mutates_args=())
def activated_rows(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """An activation of rows (rows, n): in bf16, in e4m3, and the scale (rows, 1) of each row in e4m3."""
    if has_kernel(hidden):
        from ..kernels import scaled_rows

        return scaled_rows.activated_rows(hidden, kind)
    out = ACTIVATIONS[kind](hidden.float())
    return out.bfloat16(), *scale_rows(out)


@activated_rows.register_fake
def _(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    new = hidden.new_empty
    return new(hidden.shape), new(hidden.shape, dtype=E4M3), new((len(hidden), 1), dtype=torch.float32)


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
    return half, *(scale_rows(out) if fp8 else (empty(0, dtype=E4M3), empty(0))), out.sum(0)


@gradient_rows.register_fake
def _(
    gradient: Tensor, factors: Tensor | None, hidden: Tensor | None, kind: str, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, (n_rows, width) = gradient.new_empty, gradient.shape
    out = new((0,) if hidden is None else (n_rows, width), dtype=torch.bfloat16)
    scaled = new((n_rows, width) if fp8 else (0,), dtype=E4M3)
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
    scaled, scales = scale_rows(out.float()) if fp8 else (out.new_empty(0, dtype=E4M3), out.new_empty(0).float())
    return out, scaled, scales, out.sum(0, dtype=torch.float32)


@joined_rows.register_fake
def _(parts: list[Tensor], fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, n_rows, width = parts[0].new_empty, parts[0].shape[0], sum(part.shape[1] for part in parts)
    scaled = new((n_rows, width) if fp8 else (0,), dtype=E4M3)
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


# ------------------------------------------------------------------------------------- products in eight bits


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, n) in e4m3, and the fp32 scale (rows, 1) by which each row must be multiplied again."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3).contiguous(), scale


def scale_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, n) in e4m3, and the fp32 scale () by which all of it must be multiplied again."""
    scale = x.abs().amax().float().clamp_min(1e-12) / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3).contiguous(), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias in bf16, for a (rows, n) and b (columns, n) from ``scale_rows``. Tensor cores add up with 14 bits."""
    if a[0].is_cuda:
        return torch._scaled_mm(
            a[0], b[0].T, scale_a=a[1], scale_b=b[1].T, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = (a[0].float() * a[1]) @ (b[0].float() * b[1]).T
    return (out if bias is None else out + bias.float()).bfloat16()


def gradient_product(a: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale · a W in bf16 for a gradient a (rows, n) in fp8 and a weight (n, columns) in bf16; without a scale, 1.

    A gradient sums many small terms and a few large ones, so it is accumulated in fp32. That is fast only with one
    scale for a whole matrix; scales of the rows of ``a`` are left to the caller.
    """
    w, w_scale = scale_matrix(weight.T)
    if a.is_cuda:
        a_scale = torch.ones((), device=a.device) if scale is None else scale
        return torch._scaled_mm(a, w.T, a_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=False)
    out = a.float() @ w.float().T * w_scale
    return (out if scale is None else out * scale).bfloat16()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(scale_rows(x), scale_rows(weight), bias)

    @staticmethod
    @first_derivative_only("an fp8 linear layer")
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        d_output = d_output.contiguous()
        _, rows, scales, d_bias = gradient_rows(d_output, None, None, "none", True)
        d_x = (gradient_product(rows, weight) * scales).bfloat16() if for_x else None
        return d_x, d_output.T @ x if for_weight else None, d_bias.bfloat16() if for_bias else None


class Fp8Linear(nn.Linear):
    """A linear layer with fp8 products, sharing the parameters of ``linear``.   (…, in) → (…, out) bf16"""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Linear.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), _in_bf16(self.bias))
        return out.unflatten(0, x.shape[:-1])


def gains_from_fp8(linear: nn.Module) -> bool:
    """Whether this is a linear layer that tensor cores compute in eight bits, large enough to be faster for it."""
    if type(linear) is not nn.Linear or has_hooks(linear):
        return False
    widths = linear.in_features, linear.out_features
    return all(width % _ALIGNMENT == 0 for width in widths) and sum(widths) >= _WORTHWHILE


def has_hooks(layer: nn.Module) -> bool:
    """Whether hooks are registered on this layer; a layer that takes its place would not call them."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def use_fp8(module: nn.Module) -> None:
    """Replace every linear layer below ``module`` that gains from it by an Fp8Linear."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if gains_from_fp8(child):
                setattr(part, name, Fp8Linear(child))  # type: ignore[arg-type]  # a linear layer


# ------------------------------------------------------------------------------------- fused layers


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
            hidden = product(scale_rows(x), scale_rows(w_in), b_in)
            neurons, *eight = activated_rows(hidden, kind)
            out = product((eight[0], eight[1]), scale_rows(w_out), b_out)
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
        out = product(scale_rows(x), scale_rows(weight), bias) if fp8 else F.linear(x, weight, bias)
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
