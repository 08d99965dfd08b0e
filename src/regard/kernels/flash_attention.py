# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of flash attention, forward and backward: exact softmax attention in O(T) memory.

Forward (Dao et al. 2022, algorithm 1): each program handles BLOCK_M queries of one head and walks over the blocks of
keys with a running maximum and sum per row. Backward (algorithm 4): one kernel is parallel over queries (dQ and the
gradients of biases), one over keys (dK, dV). ``attention.tiled`` is the same algorithm in plain torch.

    s = cap · tanh(scale · q kᵀ / cap) + bias      bias = -slope |d| + table[clip(d, ±reach)] + dense,   d = j - i
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    STRIP_ROWS,
    keep_tile,
    key_phases,
    load_tile,
    phase_of,
    row_phases,
    score_tile,
    strip_width,
    visible_end,
    visible_tile,
)

# Triton must not compile another kernel when one of these becomes divisible by 16.
_VARYING = ["threshold", "first_row", "first_key", "first_head"]


@triton.jit(do_not_specialize=_VARYING)
def forward(
    q, k, v, out, lse, lengths, q_docs, k_docs, ranges, plan, bits, slopes, strip, dense, seed, n_rows, n_keys, offset,
    left, right, reach, scale, cap, threshold, keep_factor, first_row, first_key, first_head, q_b, q_h, q_t, k_b, k_h,
    k_s, v_b, v_h, v_s, o_b, o_h, o_t, dense_b, dense_h, dense_t, dense_j, plan_b, plan_h, plan_width,
    N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
    SLOPE: tl.constexpr, TABLE: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): output and lse = log Σ exp(s), +inf for an empty row."""
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    m0, b64, g = block * BLOCK_M, b.to(tl.int64), h // REP
    t = m0 + tl.arange(0, BLOCK_M)
    e, f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_at = q + b64 * q_b + h.to(tl.int64) * q_h + t[:, None].to(tl.int64) * q_t + e[None, :]
    k_at = k + b64 * k_b + g.to(tl.int64) * k_h + e[:, None]
    v_at = v + b64 * v_b + g.to(tl.int64) * v_h + f[None, :]
    queries = tl.load(q_at, mask=(t < n_rows)[:, None] & (e < D)[None, :], other=0.0)
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    slope, far_left, far_right, strip_at, dense_at = 0.0, 0.0, 0.0, strip, dense
    if SLOPE:
        slope = tl.load(slopes + h).to(tl.float32)
    if TABLE:
        width = strip_width(reach)
        strip_at = strip + h.to(tl.int64) * STRIP_ROWS * width
        far_left, far_right = tl.load(strip_at), tl.load(strip_at + width - 1)
    if DENSE:
        dense_at = dense + b64 * dense_b + h.to(tl.int64) * dense_h
    lo, edge_1, edge_2, edge_3, edge_4, hi = key_phases(
        m0, offset, left, right, reach, n_rows, key_end, LEFT, RIGHT, TABLE, BLOCK_M, BLOCK_N
    )
    if DOCS:
        lo = tl.maximum(lo, tl.load(ranges + (b * tl.num_programs(1) + block) * 2))
        hi = tl.minimum(hi, tl.load(ranges + (b * tl.num_programs(1) + block) * 2 + 1))
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
        lo, hi = 0, tl.load(plan_at)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for PHASE in tl.static_range(FIRST, LAST):
        start, stop = phase_of(lo, edge_1, edge_2, edge_3, edge_4, hi, PHASE, DOCS or PLAN)
        far = far_left if PHASE == 1 else far_right
        for at in tl.range(start, stop):
            n0, tile_bits = at * BLOCK_N, bits
            if PLAN:
                n0 = tl.load(plan_at + 2 * at + 1) * BLOCK_N
                tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK_M * BLOCK_N // 32)
            j = n0 + tl.arange(0, BLOCK_N)
            check: tl.constexpr = PHASE % 2 == 0
            keys = load_tile(
                k_at + j[None, :].to(tl.int64) * k_s, (j < n_keys)[None, :] & (e < D)[:, None], check or D != BLOCK_D
            )
            dots = tl.dot(queries, keys, input_precision="ieee")
            inside = (t < n_rows)[:, None]  # depends on j only if necessary: a mask along a row prevents wide loads
            if check:
                inside = inside & (j < n_keys)[None, :]
            scores, _ = score_tile(
                dots, t[:, None], j[None, :], m0, n0, offset, scale, cap, slope, strip_at, reach, far, dense_at,
                dense_t, dense_j, inside, CAP, SLOPE, TABLE, DENSE, check
            )  # fmt: skip
            if check:
                seen = visible_tile(
                    t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                    k_docs + b64 * n_keys, tile_bits, m0, n0, LEFT, RIGHT, DOCS, PLAN, BLOCK_N
                )  # fmt: skip
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(weights, 1)
            if DROPOUT:
                kept = keep_tile(seed, b, first_head + h, (first_row + t)[:, None], (first_key + j)[None, :], threshold)
                weights = tl.where(kept, weights * keep_factor, 0.0)
            values = load_tile(
                v_at + j[:, None].to(tl.int64) * v_s, (j < n_keys)[:, None] & (f < DV)[None, :], check or DV != BLOCK_V
            )
            mixed = tl.dot(weights.to(values.dtype), values, mixed * rescale[:, None], input_precision="ieee")
            top = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    o_at = out + b64 * o_b + h.to(tl.int64) * o_h + t[:, None].to(tl.int64) * o_t + f[None, :]
    tl.store(o_at, mixed.to(out.dtype.element_ty), mask=(t < n_rows)[:, None] & (f < DV)[None, :])
    norm = tl.where(is_empty, float("inf"), (top + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2)
    tl.store(lse + tl.program_id(0).to(tl.int64) * n_rows + t, norm, mask=t < n_rows)


@triton.jit(do_not_specialize=_VARYING)
def backward_queries(
    q, k, v, out, lse, d_out, row_dot, d_q, d_dense, band, d_far, lengths, q_docs, k_docs, ranges, plan, bits, slopes,
    strip, dense, seed, n_rows, n_keys, offset, left, right, reach, scale, cap, threshold, keep_factor, first_row,
    first_key, first_head, band_width, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, g_b, g_h, g_t, dq_b,
    dq_h, dq_t, dense_b, dense_h, dense_t, dense_j, dd_b, dd_h, dd_t, dd_j, plan_b, plan_h, plan_width,
    N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
    SLOPE: tl.constexpr, TABLE: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, D_TABLE: tl.constexpr,
    D_DENSE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): rowsum(O ∘ dO), dQ = scale · dS K, and dS of the biases.

    D_TABLE: dS within the table's reach is stored in ``band`` by distance, the rest is summed per row in ``d_far``.
    D_DENSE: 1 stores dS; 2 adds it atomically, for a dense bias that heads or batch share.
    """
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    m0, b64, g, h64 = block * BLOCK_M, b.to(tl.int64), h // REP, h.to(tl.int64)
    t = m0 + tl.arange(0, BLOCK_M)
    e, f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    t64, rows, rows_f = t[:, None].to(tl.int64), (t < n_rows)[:, None], (t < n_rows)[:, None] & (f < DV)[None, :]
    k_at = k + b64 * k_b + g.to(tl.int64) * k_h + e[:, None]
    v_at = v + b64 * v_b + g.to(tl.int64) * v_h + f[:, None]
    queries = tl.load(q + b64 * q_b + h64 * q_h + t64 * q_t + e[None, :], mask=rows & (e < D)[None, :], other=0.0)
    grads = tl.load(d_out + b64 * g_b + h64 * g_h + t64 * g_t + f[None, :], mask=rows_f, other=0.0)
    outputs = tl.load(out + b64 * o_b + h64 * o_h + t64 * o_t + f[None, :], mask=rows_f, other=0.0)
    dots_o = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    line_at = tl.program_id(0).to(tl.int64) * n_rows + t
    tl.store(row_dot + line_at, dots_o, mask=t < n_rows)
    norm = tl.load(lse + line_at, mask=t < n_rows, other=float("inf")) * LOG2_E
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    slope, far_left, far_right, strip_at, dense_at, d_dense_at = 0.0, 0.0, 0.0, strip, dense, d_dense
    if SLOPE:
        slope = tl.load(slopes + h).to(tl.float32)
    if TABLE:
        width = strip_width(reach)
        strip_at = strip + h.to(tl.int64) * STRIP_ROWS * width
        far_left, far_right = tl.load(strip_at), tl.load(strip_at + width - 1)
    if DENSE:
        dense_at = dense + b64 * dense_b + h64 * dense_h
    if D_DENSE:
        d_dense_at = d_dense + b64 * dd_b + h64 * dd_h
    lo, edge_1, edge_2, edge_3, edge_4, hi = key_phases(
        m0, offset, left, right, reach, n_rows, key_end, LEFT, RIGHT, TABLE, BLOCK_M, BLOCK_N
    )
    if DOCS:
        lo = tl.maximum(lo, tl.load(ranges + (b * tl.num_programs(1) + block) * 2))
        hi = tl.minimum(hi, tl.load(ranges + (b * tl.num_programs(1) + block) * 2 + 1))
    plan_at = plan
    if PLAN:
        plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
        lo, hi = 0, tl.load(plan_at)
    d_queries = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    left_sum, right_sum = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for PHASE in tl.static_range(FIRST, LAST):
        start, stop = phase_of(lo, edge_1, edge_2, edge_3, edge_4, hi, PHASE, DOCS or PLAN)
        far = far_left if PHASE == 1 else far_right
        for at in tl.range(start, stop):
            n0, tile_bits = at * BLOCK_N, bits
            if PLAN:
                n0 = tl.load(plan_at + 2 * at + 1) * BLOCK_N
                tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK_M * BLOCK_N // 32)
            j = n0 + tl.arange(0, BLOCK_N)
            check: tl.constexpr = PHASE % 2 == 0
            keys = load_tile(
                k_at + j[None, :].to(tl.int64) * k_s, (j < n_keys)[None, :] & (e < D)[:, None], check or D != BLOCK_D
            )
            values = load_tile(
                v_at + j[None, :].to(tl.int64) * v_s, (j < n_keys)[None, :] & (f < DV)[:, None], check or DV != BLOCK_V
            )
            dots = tl.dot(queries, keys, input_precision="ieee")
            inside = rows
            if check:
                inside = rows & (j < n_keys)[None, :]
            scores, slack = score_tile(
                dots, t[:, None], j[None, :], m0, n0, offset, scale, cap, slope, strip_at, reach, far, dense_at,
                dense_t, dense_j, inside, CAP, SLOPE, TABLE, DENSE, check
            )  # fmt: skip
            weights = tl.exp2(scores - norm[:, None])
            d_weights = tl.dot(grads, values, input_precision="ieee")
            if DROPOUT:
                kept = keep_tile(seed, b, first_head + h, (first_row + t)[:, None], (first_key + j)[None, :], threshold)
                d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
            d_scores, seen = weights * (d_weights - dots_o[:, None]), rows
            if check:
                seen = visible_tile(
                    t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                    k_docs + b64 * n_keys, tile_bits, m0, n0, LEFT, RIGHT, DOCS, PLAN, BLOCK_N
                )  # fmt: skip
                d_scores = tl.where(seen, d_scores, 0.0)
            if D_TABLE:
                if check:
                    distance = j[None, :] - t[:, None] - offset
                    column = distance + reach - 1
                    near = (column >= 0) & (column < band_width) & rows
                    tl.store(band + line_at[:, None] * band_width + column, d_scores, mask=near)
                    left_sum += tl.sum(tl.where(distance <= -reach, d_scores, 0.0), 1)
                    right_sum += tl.sum(tl.where(distance >= reach, d_scores, 0.0), 1)
                elif PHASE == 1:
                    left_sum += tl.sum(d_scores, 1)
                else:
                    right_sum += tl.sum(d_scores, 1)
            if D_DENSE:
                at_dense = d_dense_at + t64 * dd_t + j[None, :] * dd_j
                written = rows
                if check:
                    written = seen
                if D_DENSE == 1:
                    tl.store(at_dense, d_scores.to(d_dense.dtype.element_ty), mask=written)
                else:
                    tl.atomic_add(at_dense, d_scores, mask=written, sem="relaxed")
            if CAP:
                d_scores = d_scores * slack
            d_queries = tl.dot(d_scores.to(keys.dtype), tl.trans(keys), d_queries, input_precision="ieee")
    at_q = d_q + b64 * dq_b + h64 * dq_h + t64 * dq_t + e[None, :]
    tl.store(at_q, (d_queries * scale).to(d_q.dtype.element_ty), mask=rows & (e < D)[None, :])
    if D_TABLE:
        tl.store(d_far + line_at * 2, left_sum, mask=t < n_rows)
        tl.store(d_far + line_at * 2 + 1, right_sum, mask=t < n_rows)


@triton.jit(do_not_specialize=_VARYING)
def backward_keys(
    q, k, v, lse, d_out, row_dot, d_k, d_v, lengths, q_docs, k_docs, ranges, plan, bits, slopes, strip, dense, seed,
    n_rows, n_keys, offset, left, right, reach, scale, cap, threshold, keep_factor, first_row, first_key, first_head,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, dense_b, dense_h,
    dense_t, dense_j, plan_b, plan_h, plan_width, N_GROUPS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr, PLAN: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, CAP: tl.constexpr, SLOPE: tl.constexpr, TABLE: tl.constexpr, DENSE: tl.constexpr,
    DROPOUT: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · G + g, block of keys): dK = scale · dSᵀ Q and dV = Aᵀ dO, over the query heads that share the keys.

    Tiles are transposed, (keys, queries).
    """
    b, g, block = tl.program_id(0) // N_GROUPS, tl.program_id(0) % N_GROUPS, tl.program_id(1)
    n0, b64, g64 = block * BLOCK_N, b.to(tl.int64), g.to(tl.int64)
    j = n0 + tl.arange(0, BLOCK_N)
    e, f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    j64, inside_keys = j[:, None].to(tl.int64), (j < n_keys)[:, None]
    of_d, of_v = inside_keys & (e < D)[None, :], inside_keys & (f < DV)[None, :]
    keys = tl.load(k + b64 * k_b + g64 * k_h + j64 * k_s + e[None, :], mask=of_d, other=0.0)
    values = tl.load(v + b64 * v_b + g64 * v_h + j64 * v_s + f[None, :], mask=of_v, other=0.0)
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, edge_1, edge_2, edge_3, hi = row_phases(
        n0, offset, left, right, reach, n_rows, key_end, LEFT, RIGHT, TABLE, BLOCK_M, BLOCK_N
    )
    if DOCS:
        lo = tl.maximum(lo, tl.load(ranges + (b * tl.num_programs(1) + block) * 2))
        hi = tl.minimum(hi, tl.load(ranges + (b * tl.num_programs(1) + block) * 2 + 1))
    d_keys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_values = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for r in range(REP):
        h = g * REP + r
        h64 = h.to(tl.int64)
        q_at = q + b64 * q_b + h64 * q_h + e[:, None]
        g_at = d_out + b64 * g_b + h64 * g_h + f[None, :]
        line_at = (b64 * N_GROUPS * REP + h) * n_rows
        slope, far_left, far_right, strip_at, dense_at, plan_at = 0.0, 0.0, 0.0, strip, dense, plan
        if SLOPE:
            slope = tl.load(slopes + h).to(tl.float32)
        if TABLE:
            width = strip_width(reach)
            strip_at = strip + h.to(tl.int64) * STRIP_ROWS * width
            far_left, far_right = tl.load(strip_at), tl.load(strip_at + width - 1)
        if DENSE:
            dense_at = dense + b64 * dense_b + h64 * dense_h
        if PLAN:
            plan_at = plan + (b * plan_b + h * plan_h + block).to(tl.int64) * plan_width
            lo, hi = 0, tl.load(plan_at)
        for PHASE in tl.static_range(FIRST, LAST):
            start, stop = phase_of(lo, edge_1, edge_2, edge_3, hi, hi, PHASE, DOCS or PLAN)
            far = far_right if PHASE == 0 else far_left
            for at in tl.range(start, stop):
                m0, tile_bits = at * BLOCK_M, bits
                if PLAN:
                    m0 = tl.load(plan_at + 2 * at + 1) * BLOCK_M
                    tile_bits = bits + tl.load(plan_at + 2 * at + 2).to(tl.int64) * (BLOCK_M * BLOCK_N // 32)
                t = m0 + tl.arange(0, BLOCK_M)
                check: tl.constexpr = PHASE % 2 == 1
                rows = t < n_rows
                queries = load_tile(
                    q_at + t[None, :].to(tl.int64) * q_t, rows[None, :] & (e < D)[:, None], check or D != BLOCK_D
                )
                grads = load_tile(
                    g_at + t[:, None].to(tl.int64) * g_t, rows[:, None] & (f < DV)[None, :], check or DV != BLOCK_V
                )
                norm = tl.load(lse + line_at + t, mask=rows, other=float("inf")) * LOG2_E
                dots_o = tl.load(row_dot + line_at + t, mask=rows, other=0.0)
                dots = tl.dot(keys, queries, input_precision="ieee")
                inside = rows[None, :]
                if check:
                    inside = inside & (j < n_keys)[:, None]
                scores, slack = score_tile(
                    dots, t[None, :], j[:, None], m0, n0, offset, scale, cap, slope, strip_at, reach, far, dense_at,
                    dense_t, dense_j, inside, CAP, SLOPE, TABLE, DENSE, check
                )  # fmt: skip
                weights = tl.exp2(scores - norm[None, :])
                if check:
                    seen = visible_tile(
                        t[None, :], j[:, None], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                        k_docs + b64 * n_keys, tile_bits, m0, n0, LEFT, RIGHT, DOCS, PLAN, BLOCK_N
                    )  # fmt: skip
                    weights = tl.where(seen, weights, 0.0)
                d_weights = tl.dot(values, tl.trans(grads), input_precision="ieee")
                applied = weights
                if DROPOUT:
                    kept = keep_tile(
                        seed, b, first_head + h, (first_row + t)[None, :], (first_key + j)[:, None], threshold
                    )
                    applied = tl.where(kept, weights * keep_factor, 0.0)
                    d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
                d_values = tl.dot(applied.to(grads.dtype), grads, d_values, input_precision="ieee")
                d_scores = weights * (d_weights - dots_o[None, :])
                if CAP:
                    d_scores = d_scores * slack
                d_keys = tl.dot(d_scores.to(queries.dtype), tl.trans(queries), d_keys, input_precision="ieee")
    k_to = d_k + b64 * dk_b + g64 * dk_h + j64 * dk_s + e[None, :]
    v_to = d_v + b64 * dv_b + g64 * dv_h + j64 * dv_s + f[None, :]
    tl.store(k_to, (d_keys * scale).to(d_k.dtype.element_ty), mask=of_d)
    tl.store(v_to, d_values.to(d_v.dtype.element_ty), mask=of_v)
