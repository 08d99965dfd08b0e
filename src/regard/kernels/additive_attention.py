# mypy: disable-error-code="no-untyped-def"
"""Additive attention (Bahdanau et al. 2015, eq. 6) in Triton, forward and backward in O(T) memory.

    s_ij = w · tanh(q_i + k_j)        q, k: the projected heads W_q q and W_k k, (B, H, T, E); w (H, E)

    dq_i = Σ_j dS_ij w (1 - tanh²)    dk_j = Σ_i dS_ij w (1 - tanh²)    dw = Σ_ij dS_ij tanh

A tile of queries × keys is summed over E one hidden unit at a time, so that no tensor of size T · S · E exists; q and k
are read transposed, (B, H, E, T). The speed is limited by tanh, of which each term takes one forward and two backward.
``attention.mechanisms.Additive`` is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..foundation.device import TRITON_INTERPRETED
from .attention_tiles import LN_2, LOG2_E, LOWEST, keep_tile, key_phases, tanh, visible_end, visible_tile
from .flash_ops import Options, padded_width, plan_strides, with_plan

_BLOCK, _WARPS = (32, 4) if TRITON_INTERPRETED else (64, 4)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """FAST: the hardware instruction, whose relative error of 2⁻¹¹ is below that of half precision."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tanh(x)
    return y


@triton.jit
def _score_tile(q_at, k_at, w_at, t, j, n_rows, n_keys, E: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """w · tanh(q_t + k_j) for BLOCK queries and keys, from (E, T) and (E, S)."""
    scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    for e in range(E):
        of_q = tl.load(q_at + e * n_rows + t, mask=t < n_rows, other=0.0).to(tl.float32)
        of_k = tl.load(k_at + e * n_keys + j, mask=j < n_keys, other=0.0).to(tl.float32)
        scores += tl.load(w_at + e).to(tl.float32) * _tanh(of_q[:, None] + of_k[None, :], FAST)
    return scores


@triton.jit
def _forward(
    q, k, v, w, out, lse, lengths, q_docs, k_docs, plan, bits, seed, n_rows, n_keys, offset, left, right, threshold,
    keep_factor, plan_b, plan_h, plan_width, v_b, v_h, v_s, N_HEADS: tl.constexpr, REP: tl.constexpr, E: tl.constexpr,
    DV: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): output and lse."""
    head, block = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, m0 = head // N_HEADS, head % N_HEADS, block * BLOCK
    t, f = m0 + tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, _, _, _, _, hi = key_phases(m0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK)
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block) * plan_width
        lo, hi = 0, tl.load(plan_at)
    q_at, k_at, w_at = q + head * E * n_rows, k + head * E * n_keys, w + h * E
    v_at = v + b * v_b + (h // REP) * v_h + f[None, :]
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for at in range(lo, hi):
        n0, tile_bits = at * BLOCK, bits
        if PLAN:
            n0 = tl.load(plan_at + 2 * at + 1) * BLOCK
            tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK * BLOCK // 32)
        j = n0 + tl.arange(0, BLOCK)
        scores = _score_tile(q_at, k_at, w_at, t, j, n_rows, n_keys, E, FAST, BLOCK) * LOG2_E
        seen = visible_tile(
            t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b * n_rows, k_docs + b * n_keys,
            tile_bits, m0, n0, LEFT, RIGHT, DOCS, PLAN, BLOCK
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(top - higher)
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(keep_tile(seed, b, h, t[:, None], j[None, :], threshold), weights * keep_factor, 0.0)
        mask = (j < n_keys)[:, None] & (f < DV)[None, :]
        values = tl.load(v_at + j[:, None].to(tl.int64) * v_s, mask=mask, other=0.0)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * rescale[:, None], input_precision="ieee")
        top = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    o_at = out + (head * n_rows + t[:, None]) * DV + f[None, :]
    tl.store(o_at, mixed.to(out.dtype.element_ty), mask=(t < n_rows)[:, None] & (f < DV)[None, :])
    norm = tl.where(is_empty, float("inf"), (top + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2)
    tl.store(lse + head * n_rows + t, norm, mask=t < n_rows)


@triton.jit
def _backward(
    q, k, v, w, lse, row_dot, d_out, d_q, d_k, d_v, d_w, lengths, q_docs, k_docs, plan, bits, seed, n_rows, n_keys,
    offset, left, right, threshold, keep_factor, plan_b, plan_h, plan_width, v_b, v_h, v_s, g_b, g_h, g_t,
    N_HEADS: tl.constexpr, REP: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): all gradients, added to fp32 buffers.

    d_q and d_w are (B, H, E, T), d_k (B, H, E, S), d_v (B, G, S, DV).
    """
    head, block = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, m0 = head // N_HEADS, head % N_HEADS, block * BLOCK
    t, f = m0 + tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    rows, of_v = t < n_rows, (f < DV)[None, :]
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, _, _, _, _, hi = key_phases(m0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK)
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block) * plan_width
        lo, hi = 0, tl.load(plan_at)
    q_at, k_at, w_at = q + head * E * n_rows, k + head * E * n_keys, w + h * E
    dq_at, dw_at, dk_at = d_q + head * E * n_rows + t, d_w + head * E * n_rows + t, d_k + head * E * n_keys
    v_at = v + b * v_b + (h // REP) * v_h + f[None, :]
    dv_at = d_v + (b * (N_HEADS // REP) + h // REP) * n_keys * DV + f[None, :]
    g_at = d_out + b * g_b + h * g_h + t[:, None].to(tl.int64) * g_t + f[None, :]
    grads = tl.load(g_at, mask=rows[:, None] & of_v, other=0.0)
    norm = tl.load(lse + head * n_rows + t, mask=rows, other=float("inf")) * LOG2_E
    dots_o = tl.load(row_dot + head * n_rows + t, mask=rows, other=0.0)
    for at in range(lo, hi):
        n0, tile_bits = at * BLOCK, bits
        if PLAN:
            n0 = tl.load(plan_at + 2 * at + 1) * BLOCK
            tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK * BLOCK // 32)
        j = n0 + tl.arange(0, BLOCK)
        in_keys = (j < n_keys)[:, None] & of_v
        values = tl.load(v_at + j[:, None].to(tl.int64) * v_s, mask=in_keys, other=0.0)
        scores = _score_tile(q_at, k_at, w_at, t, j, n_rows, n_keys, E, FAST, BLOCK) * LOG2_E
        seen = visible_tile(
            t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b * n_rows, k_docs + b * n_keys,
            tile_bits, m0, n0, LEFT, RIGHT, DOCS, PLAN, BLOCK
        )  # fmt: skip
        weights = tl.where(seen, tl.exp2(scores - norm[:, None]), 0.0)
        d_weights = tl.dot(grads, tl.trans(values), input_precision="ieee")
        applied = weights
        if DROPOUT:
            kept = keep_tile(seed, b, h, t[:, None], j[None, :], threshold)
            applied = tl.where(kept, weights * keep_factor, 0.0)
            d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
        d_scores = weights * (d_weights - dots_o[:, None])
        d_values = tl.dot(tl.trans(applied.to(grads.dtype)), grads, input_precision="ieee")
        tl.atomic_add(dv_at + j[:, None].to(tl.int64) * DV, d_values, mask=in_keys, sem="relaxed")
        for e in range(E):
            at_q, at_k = e * n_rows, e * n_keys
            of_q = tl.load(q_at + at_q + t, mask=rows, other=0.0).to(tl.float32)
            of_k = tl.load(k_at + at_k + j, mask=j < n_keys, other=0.0).to(tl.float32)
            weight = tl.load(w_at + e).to(tl.float32)
            hidden = _tanh(of_q[:, None] + of_k[None, :], FAST)
            shared = d_scores * hidden
            d_hidden = d_scores - shared * hidden
            tl.atomic_add(dw_at + at_q, tl.sum(shared, 1), mask=rows, sem="relaxed")
            tl.atomic_add(dq_at + at_q, tl.sum(d_hidden, 1) * weight, mask=rows, sem="relaxed")
            tl.atomic_add(dk_at + at_k + j, tl.sum(d_hidden, 0) * weight, mask=j < n_keys, sem="relaxed")


def _shared_arguments(q: Tensor, k: Tensor, o: Options) -> tuple[Any, ...]:
    tensors = (q if x is None else x for x in (o.lengths, o.q_docs, o.k_docs, o.row_plan, o.bits, o.seed))
    sizes = q.shape[2], k.shape[2], o.offset, o.left, o.right
    return *tensors, *sizes, *o.dropout_numbers(), *plan_strides(o.row_plan)


def _flags(q: Tensor, v: Tensor, o: Options) -> dict[str, Any]:
    return {
        "N_HEADS": q.shape[1], "REP": q.shape[1] // v.shape[1], "E": q.shape[3], "DV": v.shape[3],
        "LENGTHS": o.lengths is not None, "DOCS": o.q_docs is not None, "PLAN": o.row_plan is not None,
        "LEFT": o.left >= 0, "RIGHT": o.right >= 0,
        "DROPOUT": o.dropout > 0, "FAST": q.element_size() == 2 and not TRITON_INTERPRETED, "BLOCK": _BLOCK,
        "BLOCK_V": padded_width(v.shape[3]), "num_warps": _WARPS,
    }  # fmt: skip


@torch.library.custom_op("regard::additive_forward", mutates_args=())
def additive_forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, lengths: Tensor | None, q_docs: Tensor | None, k_docs: Tensor | None,
    row_plan: Tensor | None, bits: Tensor | None, seed: Tensor | None, offset: int, left: int, right: int,
    dropout: float, plan: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, DV) and lse (B, H, T)."""
    masks = (lengths, q_docs, k_docs, row_plan, None, bits)
    o = with_plan(Options(1.0, offset, left, right, *masks, seed=seed, dropout=dropout, plan=plan))
    v = v if v.stride(-1) == 1 else v.contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _forward[(q.shape[0] * q.shape[1], -(-q.shape[2] // _BLOCK))](
        q.mT.contiguous(), k.mT.contiguous(), v, w.contiguous(), out, lse, *_shared_arguments(q, k, o), *v.stride()[:3],
        **_flags(q, v, o)
    )  # fmt: skip
    return out, lse


@additive_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@torch.library.custom_op("regard::additive_backward", mutates_args=())
def additive_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, lengths: Tensor | None,
    q_docs: Tensor | None, k_docs: Tensor | None, row_plan: Tensor | None, bits: Tensor | None, seed: Tensor | None,
    offset: int, left: int, right: int, dropout: float, plan: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and w."""
    masks = (lengths, q_docs, k_docs, row_plan, None, bits)
    o = with_plan(Options(1.0, offset, left, right, *masks, seed=seed, dropout=dropout, plan=plan))
    v, d_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (v, d_out))
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q.mT, k.mT, v))
    d_w, row_dot = torch.zeros_like(d_q), (out.float() * d_out).sum(-1)
    _backward[(q.shape[0] * q.shape[1], -(-q.shape[2] // _BLOCK))](
        q.mT.contiguous(), k.mT.contiguous(), v, w.contiguous(), lse, row_dot, d_out, d_q, d_k, d_v, d_w,
        *_shared_arguments(q, k, o), *v.stride()[:3], *d_out.stride()[:3], **_flags(q, v, o)
    )  # fmt: skip
    return d_q.mT.to(q.dtype), d_k.mT.to(k.dtype), d_v.to(v.dtype), d_w.sum((0, 3)).to(w.dtype)


@additive_backward.register_fake
def _(d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, *rest: Any) -> Any:
    # The kernel's d_q and d_k are transposed views of (B, H, E, T).
    return q.mT.contiguous().mT, k.mT.contiguous().mT, torch.empty_like(v).contiguous(), torch.empty_like(w)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:10])
    ctx.mark_non_differentiable(output[1])
    ctx.numbers = inputs[10:]


def _backward_of_op(ctx: Any, d_out: Tensor, _: Any) -> tuple[Any, ...]:
    return *additive_backward(d_out, *ctx.saved_tensors, *ctx.numbers), *(None,) * 11


additive_forward.register_autograd(_backward_of_op, setup_context=_setup)


def additive_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, o: Options) -> Tensor:
    """Attention with scores w · tanh(q + k) for q (B, H, T, E), k (B, H, S, E), v (B, G, S, DV); o may have no bias."""
    masks = o.lengths, o.q_docs, o.k_docs, o.row_plan, o.bits, o.seed
    out, _ = additive_forward(q, k, v, w, *masks, o.offset, o.left, o.right, o.dropout, o.plan)
    return out
