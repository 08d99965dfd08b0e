# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for a decode step: one token per row through the layers of a Transformer, in few launches.

With small batches a step is limited by launches and memory bandwidth. For a few rows, a sublayer takes two or three
launches: norm + product + activation, attention with its cache, product + residual.
``generation.decode_step`` has the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import (
    PROGRAMS,
    Parts,
    attend_memory,
    attend_memory_in_parts,
    attend_one,
    attend_one_in_parts,
    fetch,
    launch_next,
    merge,
    overlap,
    wait_for_previous,
)

__all__ = ["add_norm", "attend_memory", "attend_memory_in_parts", "attend_one", "attend_one_in_parts", "best_tokens"]
__all__ += ["embed", "linear", "product", "product_in_parts", "product_is_faster", "store_greedy_tokens"]

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "quick_gelu": 5, "relu2": 6}
NORMS = {None: 0, "layer": 1, "rms": 2}
Norm = tuple[str, Tensor, Tensor | None, float]  # ("layer" or "rms", gain, shift, eps)


# ---- products with a few rows


@triton.jit
def _act(y, ACT: tl.constexpr):
    if ACT == 1:
        y = tl.maximum(y, 0.0)
    elif ACT == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACT == 3:
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # tanh u = 2 σ(2u) − 1
    elif ACT == 4:
        y = y * tl.sigmoid(y)
    elif ACT == 5:
        y = y * tl.sigmoid(1.702 * y)
    elif ACT == 6:
        y = tl.maximum(y, 0.0) * tl.maximum(y, 0.0)
    return y


@triton.jit
def _statistics(x, K, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """The mean (0 for rms) and factor that normalise x (K,), K ≤ BLOCK."""
    k = tl.arange(0, BLOCK)
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / K if NORM == 1 else 0.0
    value = tl.where(k < K, value - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(value * value, 0) / K + eps)


@triton.jit
def _merge_parts(
    x, logs, row, start, K: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Values start … start + BLOCK_K of a row: those of the parts x (P, R, K), weighted by 2^logs (P, R, K / WIDTH)."""
    n_heads: tl.constexpr = BLOCK_K // WIDTH
    h, d = start // WIDTH + tl.arange(0, n_heads), tl.arange(0, WIDTH)
    inside = h < K // WIDTH
    top, total = tl.full([n_heads], -1e30, tl.float32), tl.zeros([n_heads], tl.float32)
    mixed = tl.zeros([n_heads, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * tl.num_programs(1) + row) * (K // WIDTH) + h
        weights = tl.load(logs + at, mask=inside, other=0.0)
        values = tl.load(x + at[:, None] * WIDTH + d[None, :], mask=inside[:, None], other=0.0)
        top, total, mixed = merge(top, total, mixed, weights, values.to(tl.float32), inside)
    return tl.reshape(mixed / tl.maximum(total, 1e-30)[:, None], [BLOCK_K])


@triton.jit
def _linear(
    x, logs, weight, bias, residual, gain, shift, res_gain, res_shift, out, N, scale, eps, res_eps, K: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, RES_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_RES_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_RES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (block of outputs, row): res_norm(residual) + act(scale · norm(x) Wᵀ + bias), computed in float32.

    PARTS: x consists of so many parts, which ``_merge_parts`` merges, or 0.
    """
    launch_next(EARLY)
    n, row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    live = n < N
    lines = weight + n[:, None].to(tl.int64) * K
    # Load what no kernel writes while the previous kernel is still running; loads after the wait add their latency.
    tile = tl.load(lines + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
    added = tl.load(bias + n, mask=live, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    gains = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32) if NORM != 0 else 1.0
    shifts = tl.load(shift + k, mask=k < K, other=0.0).to(tl.float32) if HAS_SHIFT else 0.0
    res_gains = tl.load(res_gain + n, mask=live, other=0.0).to(tl.float32) if RES_NORM != 0 else 1.0
    res_shifts = tl.load(res_shift + n, mask=live, other=0.0).to(tl.float32) if HAS_RES_SHIFT else 0.0
    wait_for_previous(EARLY)
    value = tl.load(residual + row * N + n, mask=live, other=0.0).to(tl.float32) if HAS_RESIDUAL else 0.0
    mean, factor = 0.0, 1.0
    if NORM != 0:
        mean, factor = _statistics(x + row * K, K, eps, NORM, BLOCK_ROW)
    summed = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + k < K
        if PARTS > 0:
            part = _merge_parts(x, logs, row, start, K, PARTS, WIDTH, BLOCK_K)
        else:
            part = tl.load(x + row * K + start + k, mask=inside, other=0.0).to(tl.float32)
        if start > 0:
            tile = tl.load(lines + start + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            if NORM != 0:
                gains = tl.load(gain + start + k, mask=inside, other=0.0).to(tl.float32)
            if HAS_SHIFT:
                shifts = tl.load(shift + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM != 0:
            part = tl.where(inside, (part - mean) * factor * gains + shifts, 0.0)
        summed += tile.to(tl.float32) * part[None, :]
    y = _act(tl.sum(summed, 1) * scale + added, ACT)
    if HAS_RESIDUAL:
        if RES_NORM != 0:
            mean, factor = _statistics(residual + row * N, N, res_eps, RES_NORM, BLOCK_RES)
            value = (value - mean) * factor * res_gains + res_shifts
        y += value
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=live)


def linear_tile(n_outputs: int, k: int) -> tuple[int, int, int]:
    """Outputs per program, warps, and the part of K that is loaded at once."""
    if n_outputs > 8192:
        return 16, 8, min(triton.next_power_of_2(k), 1024)
    return 2 if n_outputs <= 1024 else 4, 4, min(triton.next_power_of_2(k), 4096)


def linear(
    x: Tensor | Parts,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    residual_norm: Norm | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual_norm(residual) + activation(scale · norm(x) Wᵀ + bias) for a few rows x (R, K), W (N, K).

    x in parts, as from ``attend_one_in_parts``, must not have a norm.
    """
    x, logs = x if isinstance(x, tuple) else (x, None)
    assert logs is None or norm is None
    (rows, k), n = x.shape[-2:], weight.shape[0]
    kind, gain, shift, eps = (None, x, None, 0.0) if norm is None else norm
    res_kind, res_gain, res_shift, res_eps = (None, x, None, 0.0) if residual_norm is None else residual_norm
    out = torch.empty(rows, n, dtype=x.dtype if dtype is None else dtype, device=x.device)
    block, warps, block_k = linear_tile(n, k)
    _linear[(triton.cdiv(n, block), rows)](
        x, x if logs is None else logs, weight, x if bias is None else bias, x if residual is None else residual, gain,
        x if shift is None else shift, res_gain, x if res_shift is None else res_shift, out, n, scale, eps, res_eps,
        K=k, NORM=NORMS[kind], ACT=ACTIVATIONS[activation], RES_NORM=NORMS[res_kind], HAS_BIAS=bias is not None,
        HAS_SHIFT=shift is not None, HAS_RES_SHIFT=res_shift is not None, HAS_RESIDUAL=residual is not None,
        PARTS=0 if logs is None else len(x), WIDTH=0 if logs is None else k // logs.shape[-1],
        BLOCK_N=block, BLOCK_K=block_k, BLOCK_ROW=triton.next_power_of_2(k),
        BLOCK_RES=1 if res_kind is None else triton.next_power_of_2(n), num_warps=warps, **overlap(x.device)
    )  # fmt: skip
    return out


# ---- products with many rows


@triton.jit
def _product(
    x, weight, bias, out, M, N, out_n, out_m, K: tl.constexpr, PART: tl.constexpr, ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (block of outputs, block of rows, part of K of width PART): act(x Wᵀ + bias), or a part of the sum.

    LINES: cache lines per row of weights to prefetch before the previous kernel ends, or 0. Up to ``out_n`` ≥ N outputs
    are written, so that wide stores need no mask.
    """
    launch_next(EARLY)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    k = part * PART + tl.arange(0, BLOCK_K)
    rows, columns = (m < M)[:, None], (n < N)[None, :]
    x_at, weight_at = x + m[:, None].to(tl.int64) * K + k[None, :], weight + n[None, :].to(tl.int64) * K + k[:, None]
    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if EARLY and LINES > 0:
        line = tl.minimum(tl.arange(0, LINES) * 64, PART - 1)
        fetch(weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + part * PART + line[None, :])
    wait_for_previous(EARLY)
    for start in range(0, PART, BLOCK_K):
        lines = tl.load(x_at + start, mask=rows, other=0.0)
        summed = tl.dot(lines, tl.load(weight_at + start, mask=columns, other=0.0), summed)
    if HAS_BIAS:
        summed += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    summed = _act(summed, ACT)
    at = out + (part * M + m[:, None]).to(tl.int64) * out_m + n[None, :]
    tl.store(at, summed.to(out.dtype.element_ty), mask=rows & (n < out_n)[None, :])


_BLOCK_M = 64  # rows per program of ``product``
_MOST_ROWS = 128  # above this, cuBLAS is faster


def product_is_faster(rows: int, dtype: torch.dtype, widths: set[int]) -> bool:
    """Whether ``product`` is faster than cuBLAS for this many rows of these widths (half precision only)."""
    return dtype.itemsize == 2 and rows <= _MOST_ROWS and all(width % 64 == 0 for width in widths)


def product_tile(n: int, k: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, pipeline stages)."""
    if n > 8192:
        return 128, 64, 4
    return (32, 128, 5) if k % 128 == 0 and not (n <= k <= 1024) else (32, 64, 3)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, out: Tensor, parts: int) -> None:
    (rows, k), n = x.shape, weight.shape[0]
    block_n, block_k, stages = product_tile(n, k)
    _product[(triton.cdiv(n, block_n), triton.cdiv(rows, _BLOCK_M), parts)](
        x, weight, x if bias is None else bias, out, rows, n, out.stride(-2), out.stride(-2), K=k, PART=k // parts,
        ACT=ACTIVATIONS[activation], HAS_BIAS=bias is not None, BLOCK_M=_BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k,
        LINES=triton.next_power_of_2(k // parts // 64) if n <= 8192 else 0, num_warps=4,
        num_stages=stages, **overlap(x.device)
    )  # fmt: skip


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """activation(x Wᵀ + bias) for many rows x (R, K), W (N, K)."""
    # Pad the width (such as 50,257) to a multiple of 64, because aligned rows are written faster.
    out = torch.empty(len(x), -(-len(weight) // 64) * 64, dtype=x.dtype, device=x.device)[:, : len(weight)]
    _launch(x, weight, bias, activation, out, 1)
    return out


def product_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ as partial sums (P, R, N) along K, which ``add_norm`` adds up; few outputs alone would not fill a GPU."""
    (rows, k), n = x.shape, weight.shape[0]
    block_n, block_k, _ = product_tile(n, k)
    blocks = triton.cdiv(n, block_n) * triton.cdiv(rows, _BLOCK_M)
    steps = k // block_k
    parts = max(p for p in range(1, steps + 1) if steps % p == 0 and (p == 1 or p * blocks <= PROGRAMS))
    out = torch.empty(parts, rows, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, None, out, parts)
    return out


# ---- between the products of many rows


@triton.jit
def _add_norm(
    x, y, bias, gain, shift, total, normed, eps, M, K: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SHIFT: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    launch_next(EARLY)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    inside = k < K
    weight = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    value = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            value += tl.load(y + (part * M + row) * K + k, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * K + k, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORM == 1:
        value = tl.where(inside, value - tl.sum(value, 0) / K, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / K + eps) * weight
    if HAS_SHIFT:
        value += tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * K + k, value.to(normed.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + Σ y + bias and its norm, both (R, K), for partial sums y (P, R, K); x and its norm if y is None."""
    (rows, k), (kind, gain, shift, eps) = x.shape, norm
    total, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(k)
    _add_norm[(rows,)](
        x, x if y is None else y, x if bias is None else bias, gain, x if shift is None else shift, total, normed,
        eps, rows, K=k, NORM=NORMS[kind], PARTS=0 if y is None else len(y), HAS_BIAS=bias is not None,
        HAS_SHIFT=shift is not None, BLOCK_K=block, num_warps=4 if block <= 2048 else 8, **overlap(x.device)
    )  # fmt: skip
    return total, normed


# ---- embedding and greedy choice


@triton.jit
def _embed(
    tokens, lengths, table, positions, out, scale, offset, K: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    launch_next(EARLY)
    wait_for_previous(EARLY)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    inside = k < K
    value = tl.load(table + tl.load(tokens + row) * K + k, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_POSITIONS:
        value += tl.load(positions + (tl.load(lengths + row) + offset) * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=inside)


def embed(
    tokens: Tensor, lengths: Tensor, table: Tensor, scale: float, positions: Tensor | None, offset: int = 0
) -> Tensor:
    """Embeddings (R, K) of tokens (R,) at lengths (R,): scale · table[token] + positions[length + offset]."""
    rows, k = len(tokens), table.shape[1]
    out = torch.empty(rows, k, dtype=table.dtype, device=table.device)
    _embed[(rows,)](
        tokens, lengths, table, table if positions is None else positions, out, scale, offset, K=k,
        HAS_POSITIONS=positions is not None, BLOCK_K=triton.next_power_of_2(k), **overlap(table.device)
    )  # fmt: skip
    return out


@triton.jit
def _best_of_part(
    logits, scores, tokens, top, total, V, stride, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, part of the vocabulary): the N highest logits, and the maximum and sum for the softmax."""
    launch_next(EARLY)
    wait_for_previous(EARLY)
    row, part, n_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    v = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    floor = tl.maximum(tl.max(x, 0), -1e30)  # a part may contain only -inf
    at = row * n_parts + part
    tl.store(top + at, floor)
    tl.store(total + at, tl.sum(tl.exp(x - floor), 0))
    for n in tl.static_range(N):
        best, index = tl.max(x, 0, return_indices=True)
        tl.store(scores + at * N + n, best)
        tl.store(tokens + at * N + n, tl.minimum(part * BLOCK + index, V - 1).to(tl.int64))
        x = tl.where(tl.arange(0, BLOCK) == index, -float("inf"), x)


def best_tokens(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """log P and tokens (R, m) of the n best tokens of each part of the vocabulary, by logits (R, V).

    They include the n best tokens overall, in no particular order.
    """
    rows, n_tokens = logits.shape
    block = 2048
    n_parts = triton.cdiv(n_tokens, block)
    top, total = (torch.empty(rows, n_parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    scores = torch.empty(rows, n_parts * n, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, n_parts * n, dtype=torch.int64, device=logits.device)
    _best_of_part[(rows, n_parts)](
        logits, scores, tokens, top, total, n_tokens, logits.stride(0), N=n, BLOCK=block, **overlap(logits.device)
    )
    return scores - (top + total.log()).logsumexp(-1, keepdim=True), tokens


@triton.jit
def _argmax_of_part(
    logits, steps, top, best, at, total, V, stride, end, min_steps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    launch_next(EARLY)
    wait_for_previous(EARLY)
    row, part, n_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    v = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    floor = tl.maximum(tl.max(x, 0), -1e30)  # a part may contain only -inf
    tl.store(top + row * n_parts + part, floor)
    tl.store(total + row * n_parts + part, tl.sum(tl.exp(x - floor), 0))
    if tl.load(steps + row) < min_steps:
        x = tl.where(v == end, -float("inf"), x)
    highest = tl.max(x, 0)
    tl.store(best + row * n_parts + part, highest)
    tl.store(at + row * n_parts + part, tl.min(tl.where(x == highest, v, V), 0))  # the first of equals, like argmax


@triton.jit
def _store_tokens(
    top, best, at, total, tokens, lengths, last, steps, history, log_probs, V, n_parts, n_rows, ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    launch_next(EARLY)
    wait_for_previous(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = part < n_parts
    tops = tl.load(top + row * n_parts + part, mask=inside, other=-1e30)
    highs = tl.load(best + row * n_parts + part, mask=inside, other=-float("inf"))
    firsts = tl.load(at + row * n_parts + part, mask=inside, other=V)
    sums = tl.load(total + row * n_parts + part, mask=inside, other=0.0)
    highest = tl.max(highs, 0)
    token = tl.min(tl.where(highs == highest, firsts, V), 0)
    token = tl.minimum(token, V - 1)  # with NaN logits no token is chosen: keep the index in range
    peak = tl.max(tops, 0)
    log_prob = highest - peak - tl.log(tl.sum(sums * tl.exp(tops - peak), 0))
    step = tl.load(steps + row)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(history + step * n_rows + row, token.to(tl.int64))
    tl.store(log_probs + step * n_rows + row, log_prob)
    tl.store(steps + row, step + 1)
    if ADVANCE:
        tl.store(lengths + row, tl.minimum(tl.load(lengths + row) + 1, tl.load(last + row)))


def store_greedy_tokens(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    last: Tensor,
    steps: Tensor,
    history: Tensor,
    log_probs: Tensor,
    advance: bool,
    eos_id: int | None = None,
    min_steps: int = 0,
) -> None:
    """Write the argmax of logits (R, V) and its log-probability to row ``steps`` of ``history`` and ``log_probs``.

    ``eos_id`` is not chosen in the first ``min_steps`` steps. With ``advance``, ``lengths`` grow by 1, up to ``last``.
    """
    rows, n_tokens = logits.shape
    block = 2048
    n_parts, early = triton.cdiv(n_tokens, block), overlap(logits.device)
    top, best, total = (torch.empty(rows, n_parts, dtype=torch.float32, device=logits.device) for _ in range(3))
    at = torch.empty(rows, n_parts, dtype=torch.int32, device=logits.device)
    end, min_steps = (-1, 0) if eos_id is None else (eos_id, min_steps)
    _argmax_of_part[(rows, n_parts)](
        logits, steps, top, best, at, total, n_tokens, logits.stride(0), end, min_steps, BLOCK=block, **early
    )
    _store_tokens[(rows,)](
        top, best, at, total, tokens, lengths, last, steps, history, log_probs, n_tokens, n_parts, rows,
        ADVANCE=advance, BLOCK=triton.next_power_of_2(n_parts), num_warps=1, **early
    )  # fmt: skip
