# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of a decode step's attention: one query a row over the keys of its text, or of an encoder's output.

On Hopper and later a kernel starts while the one before it still runs (programmatic dependent launch): it loads what no
kernel writes, such as weights, and then waits for the other to end (``wait_for_previous``). Every kernel of a decode
step waits, so that whatever came before the other has ended too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2_E = 1.4426950408889634


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options with which a kernel starts before the previous one ends; none where the device cannot."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """Let the next kernel start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """From here on what earlier kernels wrote can be read, and written again."""
    if EARLY:
        gdc_wait()


@triton.jit
def _merge(top, total, mixed, scores, values, seen):
    """One tile more in the running softmax of each line: its maximum, sum of weights, and weighted values."""
    scores = tl.where(seen, scores, -1e30)
    higher = tl.maximum(top, scores)
    before = tl.exp2(top - higher)
    weights = tl.where(seen, tl.exp2(scores - higher), 0.0)
    return higher, total * before + weights, mixed * before[:, None] + weights[:, None] * values


@triton.jit
def _attend(
    q, k_new, v_new, k_held, v_held, lengths, origin, bias, out, scale, q_b, q_h, k_b, k_g, v_b, v_g, held_b, held_g,
    held_s, origin_b, bias_h, REP: tl.constexpr, D: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (b, h): store the new key and value in slot lengths[b] and attend to slots 0 … lengths[b].

    ``scale`` includes log₂ e, for exp2.
    """
    launch_next(EARLY)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = h // REP
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    wait_for_previous(EARLY)
    length = tl.load(lengths + b).to(tl.int32)
    query = tl.load(q + b * q_b + h * q_h + d, mask=inside, other=0.0).to(tl.float32) * scale
    key = tl.load(k_new + b * k_b + g * k_g + d, mask=inside, other=0.0)
    value = tl.load(v_new + b * v_b + g * v_g + d, mask=inside, other=0.0)
    own_at = b * held_b + g * held_g + length.to(tl.int64) * held_s + d
    if h % REP == 0:
        tl.store(k_held + own_at, key, mask=inside)
        tl.store(v_held + own_at, value, mask=inside)
    # Each line of the tile has its own running softmax, merged at the end: no synchronisation in the loop.
    s = tl.arange(0, BLOCK_S)
    top = tl.full([BLOCK_S], -1e30, tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    mixed = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_S):
        seen = start + s < length
        row = tl.load(origin + b * origin_b + start + s, mask=seen, other=0) if HAS_ORIGIN else b
        at = row * held_b + g * held_g + (start + s) * held_s
        both = seen[:, None] & inside[None, :]
        keys = tl.load(k_held + at[:, None] + d[None, :], mask=both, other=0.0).to(tl.float32)
        values = tl.load(v_held + at[:, None] + d[None, :], mask=both, other=0.0).to(tl.float32)
        scores = tl.sum(keys * query[None, :], 1)
        if HAS_BIAS:
            back = tl.load(bias + h * bias_h + length - (start + s), mask=seen, other=0.0)
            scores += back.to(tl.float32) * 1.4426950408889634
        top, total, mixed = _merge(top, total, mixed, scores, values, seen)
    own = tl.sum(query * key.to(tl.float32), 0)
    if HAS_BIAS:
        own += tl.load(bias + h * bias_h).to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(tl.max(top, 0), own)
    share, own = tl.exp2(top - highest), tl.exp2(own - highest)
    result = tl.sum(mixed * share[:, None], 0) + own * value.to(tl.float32)
    result = result / (tl.sum(total * share, 0) + own)
    tl.store(out + (b * tl.num_programs(1) + h) * D + d, result.to(out.dtype.element_ty), mask=inside)


def attention_tile(n_programs: int) -> tuple[int, int]:
    """Keys in a tile and warps: few programs need larger tiles to saturate the memory."""
    return (512, 8) if n_programs < 264 else (64, 8)


@torch.library.custom_op("regard::attend_one", mutates_args=("k_held", "v_held"))
def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_held: Tensor,
    v_held: Tensor,
    lengths: Tensor,
    scale: float,
    origin: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """q (R, H, D) over k_held and v_held (R, G, S, D) up to lengths, where k and v (R, G, D) go in → (R, H · D).

    origin  (R, S): the row that holds each position of a row's past; None: the row itself
    bias    (H, S): what is added to the score of a key so many positions back
    """
    rows, n_heads, width = q.shape
    out = torch.empty(rows, n_heads * width, dtype=q.dtype, device=q.device)
    block, warps = attention_tile(rows * n_heads)
    _attend[(rows, n_heads)](
        q, k, v, k_held, v_held, lengths, lengths if origin is None else origin, q if bias is None else bias, out,
        scale * _LOG2_E, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_held.stride(0), k_held.stride(1), k_held.stride(2), 0 if origin is None else origin.stride(0),
        0 if bias is None else bias.stride(0), REP=n_heads // k.shape[1], D=width, HAS_ORIGIN=origin is not None,
        HAS_BIAS=bias is not None, BLOCK_S=block, BLOCK_D=triton.next_power_of_2(width), num_warps=warps,
        **overlap(q.device)
    )  # fmt: skip
    return out


@attend_one.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_held: Tensor,
    v_held: Tensor,
    lengths: Tensor,
    scale: float,
    origin: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@triton.jit
def _attend_memory(
    q, k_held, v_held, source, lengths, out, scale, q_b, q_h, held_b, held_g, held_s, REP: tl.constexpr,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (b, h): attend to slots 0 … lengths[source[b]] − 1 of source[b]."""
    launch_next(EARLY)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    inside = d < D
    wait_for_previous(EARLY)
    row = tl.load(source + b)
    length = tl.load(lengths + row).to(tl.int32)
    query = tl.load(q + b * q_b + h * q_h + d, mask=inside, other=0.0).to(tl.float32) * scale
    at = row * held_b + (h // REP) * held_g
    top = tl.full([BLOCK_S], -1e30, tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    mixed = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_S):
        seen = start + s < length
        both = seen[:, None] & inside[None, :]
        tile = at + (start + s)[:, None] * held_s + d[None, :]
        keys = tl.load(k_held + tile, mask=both, other=0.0).to(tl.float32)
        values = tl.load(v_held + tile, mask=both, other=0.0).to(tl.float32)
        top, total, mixed = _merge(top, total, mixed, tl.sum(keys * query[None, :], 1), values, seen)
    share = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(mixed * share[:, None], 0) / tl.maximum(tl.sum(total * share, 0), 1e-30)
    tl.store(out + (b * tl.num_programs(1) + h) * D + d, result.to(out.dtype.element_ty), mask=inside)


def attend_memory(q: Tensor, k: Tensor, v: Tensor, source: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """q (R, H, D) over an encoder's k and v (B, G, S, D), those of source (R,) up to lengths (B,) → (R, H · D)."""
    rows, n_heads, width = q.shape
    out = torch.empty(rows, n_heads * width, dtype=q.dtype, device=q.device)
    block = min(64, triton.next_power_of_2(k.shape[2]))
    _attend_memory[(rows, n_heads)](
        q, k, v, source, lengths, out, scale * _LOG2_E, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        k.stride(2), REP=n_heads // k.shape[1], D=width, BLOCK_S=block, BLOCK_D=triton.next_power_of_2(width),
        num_warps=4, **overlap(q.device)
    )  # fmt: skip
    return out
