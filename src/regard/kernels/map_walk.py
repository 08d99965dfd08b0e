# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for statistics of an attention map, in one pass and without storing a weight.

``row_walk`` walks over the keys of BLOCK queries with a running maximum m, Z = Σ e^(s-m) and P = Σ e^(s-m) (s - m),
which give lse = m + log Z and the entropy log Z - P / Z; it also keeps the largest scores of each row.
``column_walk`` computes x A for a few rows x, ``cell_walk`` the sum or maximum of A in the cells of a grid, both from
known lse. Scores are those of ``flash_attention``. ``attention.score_matrix.TileWalk`` is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..foundation.device import H200_SHARED_MEMORY, shared_memory
from .attention_tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    STRIP_ROWS,
    key_phases,
    row_phases,
    score_tile,
    strip_width,
    visible_end,
    visible_tile,
)
from .flash_ops import (
    PLAN_BLOCK,
    Options,
    dense_strides,
    flags,
    make_strip,
    numbers,
    padded_width,
    plan_strides,
    tensors,
)

Args = tuple[Any, ...]
BLOCK = PLAN_BLOCK
PRECISION = "tf32x3"  # as exact as "ieee" here, and six times as fast on an H200
WARPS, STAGES = 4, 2
_VARYING = ["first_block", "threshold", "first_row", "first_key", "first_head"]


@triton.jit
def _head_pointers(
    q, k, strip, dense, slopes, b, h, reach, q_b, q_h, k_b, k_h, dense_b, dense_h, REP: tl.constexpr,
    SLOPE: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Pointers to a head's queries, keys and biases, and its slope."""
    b64, h64, slope, strip_at = b.to(tl.int64), h.to(tl.int64), 0.0, strip
    if SLOPE:
        slope = tl.load(slopes + h).to(tl.float32)
    if TABLE:
        strip_at = strip + h64 * STRIP_ROWS * strip_width(reach)
    return (
        q + b64 * q_b + h64 * q_h,
        k + b64 * k_b + (h64 // REP) * k_h,
        strip_at,
        dense + b64 * dense_b + h64 * dense_h,
        slope,
    )


@triton.jit
def _scores(
    queries, k_at, t, j, m0, n0, tile_bits, key_end, k_s, q_docs, k_docs, slope, strip_at, dense_at, n_rows, n_keys,
    offset, left, right, reach, scale, cap, dense_t, dense_j, D: tl.constexpr, DOCS: tl.constexpr,
    PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, SLOPE: tl.constexpr,
    TABLE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The scores of a tile in units of ln 2, -inf at masked pairs."""
    e = tl.arange(0, BLOCK_D)
    inside = (j < n_keys)[None, :]
    keys = tl.load(k_at + j[None, :].to(tl.int64) * k_s + e[:, None], mask=inside & (e < D)[:, None], other=0.0)
    dots = tl.dot(queries, keys, input_precision=PRECISION)
    scores, _ = score_tile(
        dots, t[:, None], j[None, :], m0, n0, offset, scale, cap, slope, strip_at, reach, 0.0, dense_at,
        dense_t, dense_j, (t < n_rows)[:, None] & inside, CAP, SLOPE, TABLE, DENSE, True
    )  # fmt: skip
    seen = visible_tile(
        t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs, k_docs, tile_bits, m0, n0, LEFT, RIGHT,
        DOCS, PLAN, BLOCK
    )  # fmt: skip
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=_VARYING)
def row_walk(
    q, k, lse, entropy, best, top_keys, lengths, q_docs, k_docs, ranges, plan, bits, slopes, strip, dense, seed, n_rows,
    n_keys, offset, left, right, reach, scale, cap, threshold, keep_factor, first_row, first_key, first_head, q_b, q_h,
    q_t, k_b, k_h, k_s, dense_b, dense_h, dense_t, dense_j, plan_b, plan_h, plan_width, first_block,
    N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr,
    PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, SLOPE: tl.constexpr,
    TABLE: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries): lse, entropy, and with KEEP > 0 the KEEP largest scores and their keys."""
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block = first_block + tl.num_programs(1) - 1 - tl.program_id(1)
    m0 = block * BLOCK
    t, e = m0 + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q_at, k_at, strip_at, dense_at, slope = _head_pointers(
        q, k, strip, dense, slopes, b, h, reach, q_b, q_h, k_b, k_h, dense_b, dense_h, REP, SLOPE, TABLE
    )
    rows = (t < n_rows)[:, None]
    queries = tl.load(q_at + t[:, None].to(tl.int64) * q_t + e[None, :], mask=rows & (e < D)[None, :], other=0.0)
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, _, _, _, _, hi = key_phases(m0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK)
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
        lo, hi = 0, tl.load(plan_at)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    slots: tl.constexpr = KEEP if KEEP > 0 else 1
    kept = tl.full([BLOCK, slots], float("-inf"), tl.float32)
    kept_at = tl.full([BLOCK, slots], -1, tl.int32)
    for at in range(lo, hi):
        n0, tile_bits = at * BLOCK, bits
        if PLAN:
            n0 = tl.load(plan_at + 2 * at + 1) * BLOCK
            tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK * BLOCK // 32)
        j = n0 + tl.arange(0, BLOCK)
        scores = _scores(
            queries, k_at, t, j, m0, n0, tile_bits, key_end, k_s, q_docs + b.to(tl.int64) * n_rows,
            k_docs + b.to(tl.int64) * n_keys, slope, strip_at, dense_at, n_rows, n_keys, offset, left, right, reach,
            scale, cap, dense_t, dense_j, D, DOCS, PLAN, LEFT, RIGHT, CAP, SLOPE, TABLE, DENSE, PRECISION,
            BLOCK, BLOCK_D
        )  # fmt: skip
        largest = tl.max(scores, 1)
        higher = tl.maximum(top, largest)
        above = scores - higher[:, None]
        weights = tl.exp2(above)
        rescale = tl.exp2(top - higher)
        product = (product + total * (top - higher)) * rescale + tl.sum(tl.where(weights > 0, weights * above, 0.0), 1)
        total = total * rescale + tl.sum(weights, 1)
        top = higher
        if KEEP:  # one score per row and iteration; after the first blocks few scores are among the largest
            smallest = tl.min(kept, 1)
            while tl.max((largest > smallest).to(tl.int32), 0) > 0:
                column, slot, enters = tl.argmax(scores, 1), tl.argmin(kept, 1), (largest > smallest)[:, None]
                into = enters & (tl.arange(0, slots)[None, :] == slot[:, None])
                kept = tl.where(into, largest[:, None], kept)
                kept_at = tl.where(into, (n0 + column)[:, None], kept_at)
                scores = tl.where(enters & (tl.arange(0, BLOCK)[None, :] == column[:, None]), float("-inf"), scores)
                largest, smallest = tl.max(scores, 1), tl.min(kept, 1)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    line_at = tl.program_id(0).to(tl.int64) * n_rows + t
    tl.store(lse + line_at, tl.where(is_empty, float("inf"), (top + tl.log2(total)) * LN_2), mask=t < n_rows)
    tl.store(entropy + line_at, tl.maximum((tl.log2(total) - product / total) * LN_2, 0.0), mask=t < n_rows)
    if KEEP:
        to = line_at[:, None] * KEEP + tl.arange(0, slots)[None, :]
        tl.store(best + to, kept * LN_2, mask=rows)
        tl.store(top_keys + to, kept_at, mask=rows)


@triton.jit(do_not_specialize=_VARYING)
def column_walk(
    q, k, lse, x, out, lengths, q_docs, k_docs, ranges, plan, bits, slopes, strip, dense, seed, n_rows, n_keys, offset,
    left, right, reach, scale, cap, threshold, keep_factor, first_row, first_key, first_head, q_b, q_h, q_t, k_b, k_h,
    k_s, dense_b, dense_h, dense_t, dense_j, plan_b, plan_h, plan_width, x_b, x_h, x_n, x_t, n_carried,
    N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr,
    PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, SLOPE: tl.constexpr,
    TABLE: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, CARRIED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of keys, CARRIED rows of x): out = x A, (B, H, N, S)."""
    b, h, block = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS, tl.program_id(1)
    n0 = block * BLOCK
    j, e = n0 + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    n = tl.program_id(2) * CARRIED + tl.arange(0, CARRIED)
    q_at, k_at, strip_at, dense_at, slope = _head_pointers(
        q, k, strip, dense, slopes, b, h, reach, q_b, q_h, k_b, k_h, dense_b, dense_h, REP, SLOPE, TABLE
    )
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, _, _, _, hi = row_phases(n0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK)
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
        lo, hi = 0, tl.load(plan_at)
    x_at = x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + n[:, None].to(tl.int64) * x_n
    carried = tl.zeros([CARRIED, BLOCK], tl.float32)
    for at in range(lo, hi):
        m0, tile_bits = at * BLOCK, bits
        if PLAN:
            m0 = tl.load(plan_at + 2 * at + 1) * BLOCK
            tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK * BLOCK // 32)
        t = m0 + tl.arange(0, BLOCK)
        rows = (t < n_rows)[:, None]
        queries = tl.load(q_at + t[:, None].to(tl.int64) * q_t + e[None, :], mask=rows & (e < D)[None, :], other=0.0)
        scores = _scores(
            queries, k_at, t, j, m0, n0, tile_bits, key_end, k_s, q_docs + b.to(tl.int64) * n_rows,
            k_docs + b.to(tl.int64) * n_keys, slope, strip_at, dense_at, n_rows, n_keys, offset, left, right, reach,
            scale, cap, dense_t, dense_j, D, DOCS, PLAN, LEFT, RIGHT, CAP, SLOPE, TABLE, DENSE, PRECISION,
            BLOCK, BLOCK_D
        )  # fmt: skip
        norm = tl.load(lse + tl.program_id(0).to(tl.int64) * n_rows + t, mask=t < n_rows, other=float("inf")) * LOG2_E
        weights = tl.exp2(scores - norm[:, None])
        mask = (n < n_carried)[:, None] & (t < n_rows)[None, :]
        x_tile = tl.load(x_at + t[None, :].to(tl.int64) * x_t, mask=mask, other=0.0)
        carried = tl.dot(x_tile, weights, carried, input_precision=PRECISION)
    to = out + (tl.program_id(0).to(tl.int64) * n_carried + n[:, None]) * n_keys + j[None, :]
    tl.store(to, carried, mask=(n < n_carried)[:, None] & (j < n_keys)[None, :])


@triton.jit
def _cell_of(i, size, larger):
    """The cell of ``torch.tensor_split`` that contains i: the first ``larger`` cells have size + 1, the others size."""
    border = larger * (size + 1)
    return tl.where(i < border, i // (size + 1), larger + (i - border) // size)


@triton.jit
def _cell_start(cell, size, larger):
    """The first index of a cell."""
    return cell * size + tl.minimum(cell, larger)


@triton.jit(do_not_specialize=_VARYING)
def cell_walk(
    q, k, lse, out, lengths, q_docs, k_docs, ranges, plan, bits, slopes, strip, dense, seed, n_rows, n_keys, offset,
    left, right, reach, scale, cap, threshold, keep_factor, first_row, first_key, first_head, q_b, q_h, q_t, k_b, k_h,
    k_s, dense_b, dense_h, dense_t, dense_j, plan_b, plan_h, plan_width, n_tall, n_wide, tall, tall_larger,
    wide, wide_larger, N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
    SLOPE: tl.constexpr, TABLE: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    MAX: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries, column of cells): add to out (B, H, n_tall, n_wide), or take the MAX.

    A block of queries overlaps at most CELLS cells of a column.
    """
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block, c = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    m0, from_key, to_key = block * BLOCK, _cell_start(c, wide, wide_larger), _cell_start(c + 1, wide, wide_larger)
    t, e = m0 + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q_at, k_at, strip_at, dense_at, slope = _head_pointers(
        q, k, strip, dense, slopes, b, h, reach, q_b, q_h, k_b, k_h, dense_b, dense_h, REP, SLOPE, TABLE
    )
    rows = (t < n_rows)[:, None]
    queries = tl.load(q_at + t[:, None].to(tl.int64) * q_t + e[None, :], mask=rows & (e < D)[None, :], other=0.0)
    norm = tl.load(lse + tl.program_id(0).to(tl.int64) * n_rows + t, mask=t < n_rows, other=float("inf")) * LOG2_E
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, _, _, _, _, hi = key_phases(m0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK)
    lo, hi = tl.maximum(lo, from_key // BLOCK), tl.minimum(hi, (to_key + BLOCK - 1) // BLOCK)
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
        lo, hi = 0, tl.load(plan_at)
    reduced = tl.zeros([BLOCK, BLOCK], tl.float32)  # reduced over rows and columns only at the end
    for at in range(lo, hi):
        n0, tile_bits = at * BLOCK, bits
        if PLAN:
            n0 = tl.load(plan_at + 2 * at + 1) * BLOCK
            tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK * BLOCK // 32)
        if (n0 < to_key) & (n0 + BLOCK > from_key):
            j = n0 + tl.arange(0, BLOCK)
            scores = _scores(
                queries, k_at, t, j, m0, n0, tile_bits, key_end, k_s, q_docs + b.to(tl.int64) * n_rows,
                k_docs + b.to(tl.int64) * n_keys, slope, strip_at, dense_at, n_rows, n_keys, offset, left, right, reach,
                scale, cap, dense_t, dense_j, D, DOCS, PLAN, LEFT, RIGHT, CAP, SLOPE, TABLE, DENSE, PRECISION,
                BLOCK, BLOCK_D
            )  # fmt: skip
            weights = tl.exp2(scores - norm[:, None])
            weights = tl.where(((j >= from_key) & (j < to_key))[None, :], weights, 0.0)
            reduced = tl.maximum(reduced, weights) if MAX else reduced + weights
    if lo < hi:
        by_row = tl.max(reduced, 1) if MAX else tl.sum(reduced, 1)
        line = _cell_of(t, tall, tall_larger)
        for i in tl.static_range(CELLS):
            a = tl.min(line, 0) + i
            of_cell = tl.where(line == a, by_row, 0.0)
            to = out + (tl.program_id(0).to(tl.int64) * n_tall + a) * n_wide + c
            if MAX:
                tl.atomic_max(to, tl.max(of_cell, 0), mask=a < n_tall, sem="relaxed")
            else:
                tl.atomic_add(to, tl.sum(of_cell, 0), mask=a < n_tall, sem="relaxed")


# ---- launches


def _launch(
    kernel: Any, grid: tuple[int, ...], q: Tensor, k: Tensor, o: Options, results: Args, extra: Args, **constants: Any
) -> None:
    plan = o.column_plan if kernel is column_walk else o.row_plan
    warps, stages = (WARPS, STAGES) if q.shape[3] <= 128 else (8, 1)
    stages = stages if shared_memory(q.device) >= H200_SHARED_MEMORY else 1
    kernel[grid](
        q, k, *results, *tensors(o, q, None, plan, make_strip(o)), *numbers(o, q.shape[2], k.shape[2]), *q.stride()[:3],
        *k.stride()[:3], *dense_strides(o.dense), *plan_strides(plan), *extra, N_HEADS=q.shape[1],
        REP=q.shape[1] // k.shape[1], D=q.shape[3], **flags(o), PRECISION=PRECISION, **constants, BLOCK=BLOCK,
        BLOCK_D=padded_width(q.shape[3]), num_warps=warps, num_stages=stages
    )  # fmt: skip


def row_statistics(q: Tensor, k: Tensor, o: Options, rows: slice, keep: int = 0) -> tuple[Tensor, ...]:
    """lse and entropy (B, H, R) of some rows; with ``keep`` also their largest scores in descending order and the keys.

    Scores and keys are (B, H, R, keep); if fewer keys are visible, the remaining ones are -1.
    """
    q, k = q.contiguous(), k.contiguous()
    first, last = rows.start // BLOCK, -(-rows.stop // BLOCK)
    slots = max(2, 1 << (keep - 1).bit_length()) if keep else 0
    lse, entropy = q.new_empty(2, *q.shape[:3])
    best = q.new_empty(*q.shape[:3], slots) if keep else lse
    top_keys = torch.empty(best.shape, dtype=torch.int32, device=q.device) if keep else lse
    grid = (q.shape[0] * q.shape[1], last - first)
    _launch(row_walk, grid, q, k, o, (lse, entropy, best, top_keys), (first,), KEEP=slots)
    if not keep:
        return lse[:, :, rows], entropy[:, :, rows]
    best, order = best[:, :, rows].sort(dim=-1, descending=True)
    top_keys = top_keys[:, :, rows].gather(-1, order).long()
    return lse[:, :, rows], entropy[:, :, rows], best[..., :keep], top_keys[..., :keep]


def push_columns(q: Tensor, k: Tensor, lse: Tensor, x: Tensor, o: Options) -> Tensor:
    """x A for x (B, H, N, T) → (B, H, N, S)."""
    q, k, lse = q.contiguous(), k.contiguous(), lse.contiguous()
    out = q.new_empty(*x.shape[:3], k.shape[2])
    carried = 16 if x.shape[2] <= 16 or shared_memory(q.device) < H200_SHARED_MEMORY else 64
    grid = (q.shape[0] * q.shape[1], -(-k.shape[2] // BLOCK), -(-x.shape[2] // carried))
    extra = (*x.stride(), x.shape[2])
    _launch(column_walk, grid, q, k, o, (lse, x, out), extra, CARRIED=carried)
    return out


def pool_cells(q: Tensor, k: Tensor, lse: Tensor, o: Options, h: int, w: int, largest: bool) -> Tensor:
    """The sum or the largest of the weights in each of h × w cells, (B, H, h, w)."""
    q, k, lse = q.contiguous(), k.contiguous(), lse.contiguous()
    out = q.new_zeros(*q.shape[:2], h, w)
    grid = (q.shape[0] * q.shape[1], -(-q.shape[2] // BLOCK), w)
    size, larger = divmod(q.shape[2], h)
    cells = 1 if size % BLOCK == 0 and not larger else 2 + (BLOCK - 2) // size
    extra = (h, w, size, larger, *divmod(k.shape[2], w))
    _launch(cell_walk, grid, q, k, o, (lse, out), extra, MAX=largest, CELLS=cells)
    return out
