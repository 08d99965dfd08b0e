"""torch's fused kernels: scaled_dot_product_attention and FlexAttention."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .biases import RelativeBias
from .frame import Frame
from .masks import Causal, Mask
from .mechanisms import Dot
from .score_matrix import AttentionCall

_SHORT = 256  # keys up to which torch's bf16 backward on a CPU is slower than fp32's with two casts (3 × at 64)


def sdpa(call: AttentionCall) -> Tensor:
    """``F.scaled_dot_product_attention``; masks other than causal and biases are passed as a dense tensor."""
    q, k, v = call.q, call.k, call.v
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    cpu_autocast = q.device.type == "cpu" and q.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu")
    if not (cpu_autocast and trains and call.frame.n_keys <= _SHORT):
        return _sdpa(call, q, k, v)
    with torch.autocast("cpu", enabled=False):  # it would cast them down again
        return _sdpa(call, q.float(), k.float(), v.float()).to(q.dtype)


def _sdpa(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert isinstance(call.mechanism, Dot)
    options: dict[str, Any] = {
        "scale": call.mechanism.factor(q.shape[-1]),
        "dropout_p": call.dropout,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if call.bias is None and sees_everything(call.mask, call.frame):
        return F.scaled_dot_product_attention(q, k, v, **options)
    if call.bias is None and is_square_causal(call.mask, call.frame):
        if options["scale"] <= 0:  # torch masks before it scales, and -inf · 0 is NaN
            q, options["scale"] = q * options["scale"], 1.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    allowed, blind = call.allowed(), None
    if allowed is not None:
        # A row of -inf is NaN in some kernels: unmask such rows, then set their output to 0.
        blind = ~allowed.any(-1, keepdim=True)
        allowed = allowed | blind
    attn_mask = allowed
    if call.bias is not None:
        attn_mask = call.bias.dense(call.frame, q, k).to(q.dtype)
        if allowed is not None:
            attn_mask = attn_mask.masked_fill(~allowed, float("-inf"))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    return output if blind is None else output.masked_fill(blind, 0)


def sees_everything(mask: Mask | None, frame: Frame) -> bool:
    """Whether no pair is masked, as far as shapes tell (e.g. a decode step under a causal mask)."""
    if frame.may_have_gaps:
        return False
    if mask is None:
        return True
    assert frame.steady is not None
    return isinstance(mask, Causal) and frame.steady[0] >= frame.steady[1] + frame.n_keys - 1


def is_square_causal(mask: Mask | None, frame: Frame) -> bool:
    """Whether sdpa's ``is_causal`` applies: causal, T = S, first query at the first key."""
    if not isinstance(mask, Causal) or frame.may_have_gaps or frame.steady is None:
        return False
    return frame.steady[0] == frame.steady[1] and frame.n_queries == frame.n_keys


def flex_fits(call: AttentionCall) -> bool:
    """Whether FlexAttention's kernel takes these heads: not float64, width at least 16."""
    return call.q.dtype != torch.float64 and min(call.q.shape[-1], call.v.shape[-1]) >= 16


def flex(call: AttentionCall) -> Tensor:
    """FlexAttention with mask and bias as ``mask_mod`` and ``score_mod``; compiled on CUDA, eager on CPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    assert isinstance(call.mechanism, Dot)
    frame, mask = call.frame, call.mask
    block_mask = None
    if mask is not None or frame.may_have_gaps:

        def mask_mod(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            at = frame.site_at(b, h, row, col)
            present = at.j >= 0
            return present if mask is None else mask.allows(at) & present

        sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
        block_mask = create_block_mask(mask_mod, *sizes, device=call.q.device)
    q, k, v = call.q, call.k, call.v
    if not torch.is_grad_enabled():  # on CPU FlexAttention refuses inputs that require gradients
        q, k, v = q.detach(), k.detach(), v.detach()
    options = {"scale": call.mechanism.factor(q.shape[-1]), "enable_gqa": q.shape[1] != k.shape[1], "return_lse": True}
    kernel = _flex_kernel(q.device.type)
    output, lse = kernel(q, k, v, score_mod=_score_mod(call), block_mask=block_mask, **options)
    return output if block_mask is None else output.masked_fill((lse == float("-inf"))[..., None], 0)


def _score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    bias, frame = call.bias, call.frame
    if bias is None:
        return None
    if isinstance(bias, RelativeBias):
        (by_distance,), low = bias.operands(frame), frame.reach()[0]

        def add_relative_bias(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            at = frame.site_at(b, h, row, col)
            return score + by_distance[h, at.j - at.i - low]

        return add_relative_bias
    values = bias.dense(frame, call.q, call.k).expand(frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
    return lambda score, b, h, row, col: score + values[b, h, row, col]


@functools.cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        compiled = torch.compile(flex_attention, dynamic=False)

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # fused as part of the larger graph
                return flex_attention(*args, **kwargs)
            # Each shape and mask is its own kernel; past torch's default limit of 8 it would run unfused.
            with torch._dynamo.config.patch(recompile_limit=256):
                return compiled(*args, **kwargs)

        return call_compiled

    def call_eager(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # torch warns that this is not fused
            warnings.simplefilter("ignore")
            return flex_attention(*args, **kwargs)

    return call_eager
