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

_SHORT = 256  # up to this many keys, torch's bf16 backward on a CPU is slower than casting to fp32 (3 × at 64 keys)


def sdpa(call: AttentionCall) -> Tensor:
    """``F.scaled_dot_product_attention``; masks other than causal and biases are passed as a dense tensor."""
    q, k, v = call.q, call.k, call.v
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    cpu_autocast = q.device.type == "cpu" and q.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu")
    if not (cpu_autocast and trains and call.frame.n_keys <= _SHORT):
        return _sdpa(call, q, k, v)
    with torch.autocast("cpu", enabled=False):  # autocast would cast them back to bf16
        return _sdpa(call, q.float(), k.float(), v.float()).to(q.dtype)


def _sdpa(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert isinstance(call.mechanism, Dot)
    options: dict[str, Any] = {
        "scale": call.mechanism.factor(q.shape[-1]),
        "dropout_p": call.dropout,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if v.shape[-1] > q.shape[-1]:  # torch's fused kernels need heads of equal width; zeros do not change the scores
        q, k = (F.pad(x, (0, v.shape[-1] - x.shape[-1])) for x in (q, k))
    if call.sinks is not None:
        return _sdpa_with_sinks(call, q * options.pop("scale"), k, v, **options)
    if call.bias is None and sees_everything(call.mask, call.frame):
        return F.scaled_dot_product_attention(q, k, v, **options)
    if call.bias is None and is_square_causal(call.mask, call.frame):
        if options["scale"] <= 0:  # torch masks before scaling, and -inf · 0 is NaN
            q, options["scale"] = q * options["scale"], 1.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    allowed, is_empty = call.allowed(), None
    if allowed is not None:
        # A fully masked row is NaN in some kernels: unmask such rows, then set their output to 0.
        is_empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | is_empty
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=_combine_mask_and_bias(call, allowed, q, k), **options)
    return output if is_empty is None else output.masked_fill(is_empty, 0)


def _combine_mask_and_bias(call: AttentionCall, allowed: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Mask and bias as a single ``attn_mask``: booleans, or floats with -inf at masked pairs."""
    if call.bias is None:
        return allowed
    bias = call.bias.dense(call.frame, q, k).to(q.dtype)
    return bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))


def _sdpa_with_sinks(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Sinks as an additional first key with value 0, whose score is its head's sink; q is already scaled.

    The score comes from one additional dimension: the sink in q, 1 in that key and 0 in all others. With one additional
    query before the first, a causal mask remains sdpa's ``is_causal``.
    """
    assert call.sinks is not None
    causal = call.bias is None and is_square_causal(call.mask, call.frame)
    mask = None
    if not causal and (call.bias is not None or not sees_everything(call.mask, call.frame)):
        mask = _combine_mask_and_bias(call, call.allowed(), q, k)
        assert mask is not None
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    sinks = call.sinks.to(q.dtype).clamp(min=torch.finfo(q.dtype).min)  # -inf times the 0 of the other keys is NaN
    sinks = sinks[:, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, sinks], -1), (0, 0, int(causal), 0))
    sink_key = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.shape[-1], 0))
    k, v = torch.cat([sink_key, F.pad(k, (0, 1))], dim=2), F.pad(v, (0, 0, 1, 0))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=1.0, **options)
    return output[:, :, 1:] if causal else output


def sees_everything(mask: Mask | None, frame: Frame) -> bool:
    """Whether the shapes alone show that no pair is masked (e.g. a decode step under a causal mask)."""
    if frame.may_have_gaps:
        return False
    if mask is None:
        return True
    assert frame.steady is not None
    return isinstance(mask, Causal) and frame.steady[0] >= frame.steady[1] + frame.n_keys - 1


def is_square_causal(mask: Mask | None, frame: Frame) -> bool:
    """Whether sdpa's ``is_causal`` applies: a causal mask, T = S, and the first query at the first key."""
    if not isinstance(mask, Causal) or frame.may_have_gaps or frame.steady is None:
        return False
    return frame.steady[0] == frame.steady[1] and frame.n_queries == frame.n_keys


def flex_fits(call: AttentionCall) -> bool:
    """Whether FlexAttention's kernel supports these heads: not float64, width at least 16."""
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
    if not torch.is_grad_enabled():  # on CPU FlexAttention rejects inputs that require gradients
        q, k, v = q.detach(), k.detach(), v.detach()
    options = {"scale": call.mechanism.factor(q.shape[-1]), "enable_gqa": q.shape[1] != k.shape[1], "return_lse": True}
    kernel = _flex_kernel(q.device.type)
    output, lse = kernel(q, k, v, score_mod=_score_mod(call), block_mask=block_mask, **options)
    if call.sinks is not None:  # Σ exp(s) / (Σ exp(s) + exp(sink)) = σ(lse - sink)
        output = output * torch.sigmoid(lse - call.sinks[:, None].to(lse.dtype))[..., None].to(output.dtype)
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
            if torch.compiler.is_compiling():  # the enclosing graph compiles it
                return flex_attention(*args, **kwargs)
            # Each shape and mask compiles a kernel; beyond torch's default limit of 8 it would run unfused.
            with torch._dynamo.config.patch(recompile_limit=256):
                return compiled(*args, **kwargs)

        return call_compiled

    def call_eager(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # torch warns that this is not fused
            warnings.simplefilter("ignore")
            return flex_attention(*args, **kwargs)

    return call_eager
