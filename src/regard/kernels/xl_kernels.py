# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of Transformer-XL attention, forward and backward, which compute the position scores tile by tile.

    s_ij = scale · (qu_i · k_j + qv_i · r_{j-i})          qu = q + u,  qv = q + v

A tile of BLOCK queries and BLOCK keys has 2 · BLOCK - 1 distances, which lie in two adjacent blocks of BLOCK distances.
The product of its queries with one block, P[a, c] = qv_a · r_{d + c}, serves two tiles: query a meets distance d + c at
key a + c of the tile at distance d or, if a + c ≥ BLOCK, at key a + c - BLOCK of the next tile. Thus a walk over the
keys needs one product per tile, of which it keeps the previous one: it joins the halves of both (``join_halves``) and
rotates row a by a (``turn``). In the backward pass dS is rotated back and its halves are joined to dS', indexed by
query and distance, from which follow dqv = scale · dS' r and dr = scale · dS'ᵀ qv.

Backward, one chunk of queries at a time: ``backward_rows`` (dqu and dqv) stores the weights and dS', both transposed;
``backward_keys`` (dk and dv) reads the weights, ``backward_distances`` (dr) reads dS'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    keep_tile,
    key_phases,
    phase_of,
    row_phases,
    visible_end,
    visible_tile,
)

# Triton must not compile another kernel when one of these becomes divisible by 16.
_VARYING = ["threshold", "first_row", "first_key", "first_head", "low", "n_distances", "offset"]


@triton.jit
def pack(x, BLOCK: tl.constexpr):
    """A tile of half precision with pairs of columns as one 32-bit number, which halves the cost of ``turn``."""
    packed = x
    if tl.constexpr(x.dtype.primitive_bitwidth) == 16:
        low, high = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), [BLOCK, BLOCK // 2, 2]))
        packed = low.to(tl.int32) | (high.to(tl.int32) << 16)
    return packed


@triton.jit
def unpack(packed, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of ``pack``, for tiles of this dtype."""
    x = packed
    if packed.shape[1] < BLOCK:
        low, high = (packed & 0xFFFF).to(tl.uint16), ((packed >> 16) & 0xFFFF).to(tl.uint16)
        x = tl.reshape(tl.join(low, high), [BLOCK, BLOCK]).to(dtype, bitcast=True)
    return x


@triton.jit
def turn(x, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Row a of a packed tile rotated by a to the right, so that column b comes from b - a; BACK: to the left."""
    a, b = tl.arange(0, BLOCK)[:, None], tl.arange(0, x.shape[1])[None, :]
    if x.shape[1] < BLOCK:
        pair = b + a // 2 if BACK else b - a // 2
        even = tl.gather(x, pair & (BLOCK // 2 - 1), 1)
        other = tl.gather(x, (pair + 1 if BACK else pair - 1) & (BLOCK // 2 - 1), 1)
        odd = ((even >> 16) & 0xFFFF) | (other << 16) if BACK else (even << 16) | ((other >> 16) & 0xFFFF)
        turned = tl.where(a % 2 == 1, odd, even)
    else:
        turned = tl.gather(x, (b + a if BACK else b - a) & (BLOCK - 1), 1)
    return turned


@triton.jit
def join_halves(x, y, BLOCK: tl.constexpr):
    """A packed tile with x where the sum of row and column is below BLOCK, else y."""
    a, b = tl.arange(0, BLOCK)[:, None], tl.arange(0, x.shape[1])[None, :]
    if x.shape[1] < BLOCK:
        of_x = tl.where(a + 2 * b + 1 < BLOCK, -1, tl.where(a + 2 * b < BLOCK, 0xFFFF, 0))
        joined = (x & of_x) | (y & ~of_x)
    else:
        joined = tl.where(a + b < BLOCK, x, y)
    return joined


@triton.jit
def _load_rows(x, row, n_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a matrix with D columns; zeros outside."""
    e = tl.arange(0, BLOCK_D)
    inside = ((row >= 0) & (row < n_rows))[:, None] & (e < D)[None, :]
    return tl.load(x + row[:, None].to(tl.int64) * stride + e[None, :], mask=inside, other=0.0)


@triton.jit
def _position_scores(of_v, r, row, n_distances, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """qv · r for the distances of BLOCK rows of r from ``row`` on, packed."""
    near = _load_rows(r, row + tl.arange(0, BLOCK), n_distances, D, D, BLOCK_D)
    return pack(tl.dot(of_v, tl.trans(near), input_precision="ieee").to(near.dtype), BLOCK)


@triton.jit
def _block_range(
    ranges, lengths, b, block, n_blocks, n_rows, n_keys, offset, left, right, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The end of the keys of text b, and the blocks of keys that a block of queries walks over, as phases."""
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, edge_1, edge_2, _, _, hi = key_phases(
        block * BLOCK, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK
    )
    if DOCS:
        lo = tl.maximum(lo, tl.load(ranges + (b * n_blocks + block) * 2))
        hi = tl.minimum(hi, tl.load(ranges + (b * n_blocks + block) * 2 + 1))
    return key_end, lo, edge_1, edge_2, hi


@triton.jit(do_not_specialize=_VARYING)
def forward(
    q_u, q_v, k, v, r, out, lse, lengths, q_docs, k_docs, ranges, seed, n_rows, n_keys, n_distances, low, offset, left,
    right, scale, threshold, keep_factor, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t,
    N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): output and lse = log Σ exp(s), +inf for an empty row."""
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    m0, b64, h64, g64 = block * BLOCK, b.to(tl.int64), h.to(tl.int64), (h // REP).to(tl.int64)
    a, f = tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    t = m0 + a
    k_at, v_at, r_at = k + b64 * k_b + g64 * k_h, v + b64 * v_b + g64 * v_h, r + h64 * n_distances * D
    of_u = _load_rows(q_u + b64 * q_b + h64 * q_h, t, n_rows, q_t, D, BLOCK_D)
    of_v = _load_rows(q_v + b64 * q_b + h64 * q_h, t, n_rows, q_t, D, BLOCK_D)
    key_end, lo, edge_1, edge_2, hi = _block_range(
        ranges, lengths, b, block, tl.num_programs(1), n_rows, n_keys, offset, left, right, LENGTHS, DOCS, LEFT, RIGHT,
        BLOCK
    )  # fmt: skip
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    first = -m0 - offset - low  # row of r for the distance between key 0 and query m0
    before = _position_scores(of_v, r_at, first + (lo - 1) * BLOCK, n_distances, D, BLOCK, BLOCK_D)
    for PHASE in tl.static_range(FIRST, LAST):
        start, stop = phase_of(lo, edge_1, edge_2, hi, hi, hi, PHASE, DOCS)
        for at in tl.range(start, stop):
            j = at * BLOCK + a
            keys = _load_rows(k_at, j, n_keys, k_s, D, BLOCK_D)
            products = _position_scores(of_v, r_at, first + at * BLOCK, n_distances, D, BLOCK, BLOCK_D)
            positions = unpack(turn(join_halves(products, before, BLOCK), False, BLOCK), keys.dtype, BLOCK)
            before = products
            scores = tl.dot(of_u, tl.trans(keys), input_precision="ieee")
            scores = (scores + positions.to(tl.float32)) * (scale * LOG2_E)
            if PHASE % 2 == 0:
                seen = visible_tile(
                    t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                    k_docs + b64 * n_keys, ranges, 0, 0, LEFT, RIGHT, DOCS, False, BLOCK
                )  # fmt: skip
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(weights, 1)
            if DROPOUT:
                kept = keep_tile(seed, b, h, t[:, None], j[None, :], threshold)
                weights = tl.where(kept, weights * keep_factor, 0.0)
            values = _load_rows(v_at, j, n_keys, v_s, DV, BLOCK_V)
            mixed = tl.dot(weights.to(values.dtype), values, mixed * rescale[:, None], input_precision="ieee")
            top = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    o_at = out + b64 * o_b + h64 * o_h + t[:, None].to(tl.int64) * o_t + f[None, :]
    tl.store(o_at, mixed.to(out.dtype.element_ty), mask=(t < n_rows)[:, None] & (f < DV)[None, :])
    norm = tl.where(is_empty, float("inf"), (top + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2)
    tl.store(lse + tl.program_id(0).to(tl.int64) * n_rows + t, norm, mask=t < n_rows)


@triton.jit(do_not_specialize=_VARYING)
def backward_rows(
    q_u, q_v, k, v, r, out, lse, d_out, row_dot, d_qu, d_qv, weights_t, turned_t, lengths, q_docs, k_docs, ranges, seed,
    n_rows, n_keys, n_distances, low, offset, left, right, scale, threshold, keep_factor, first_row, first_key,
    first_head, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, w_h, x_h,
    width, N_HEADS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LENGTHS: tl.constexpr,
    DOCS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · H + h, block of queries from the last): rowsum(O ∘ dO), dqu = scale · dS K and dqv = scale · dS' r.

    Stores the weights as (B · H, keys, rows), and dS' as (B · H, blocks of distances, BLOCK, rows): the block of the
    distances between a block of queries and block n of the keys is number n + 1.
    """
    b, h = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    m0, b64, h64, g64, line = block * BLOCK, b.to(tl.int64), h.to(tl.int64), (h // REP).to(tl.int64), tl.program_id(0)
    a, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    t = m0 + a
    k_at, v_at, r_at = k + b64 * k_b + g64 * k_h, v + b64 * v_b + g64 * v_h, r + h64 * n_distances * D
    of_u = _load_rows(q_u + b64 * q_b + h64 * q_h, t, n_rows, q_t, D, BLOCK_D)
    of_v = _load_rows(q_v + b64 * q_b + h64 * q_h, t, n_rows, q_t, D, BLOCK_D)
    grads = _load_rows(d_out + b64 * g_b + h64 * g_h, t, n_rows, g_t, DV, BLOCK_V)
    outputs = _load_rows(out + b64 * o_b + h64 * o_h, t, n_rows, o_t, DV, BLOCK_V)
    dots_o = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    line_at = line.to(tl.int64) * n_rows + t
    tl.store(row_dot + line_at, dots_o, mask=t < n_rows)
    norm = tl.load(lse + line_at, mask=t < n_rows, other=float("inf")) * LOG2_E
    key_end, lo, edge_1, edge_2, hi = _block_range(
        ranges, lengths, b, block, tl.num_programs(1), n_rows, n_keys, offset, left, right, LENGTHS, DOCS, LEFT, RIGHT,
        BLOCK
    )  # fmt: skip
    w_at = weights_t + line.to(tl.int64) * w_h + t[:, None]
    x_at = turned_t + line.to(tl.int64) * x_h + t[:, None]
    of_queries, of_positions = tl.zeros([BLOCK, BLOCK_D], tl.float32), tl.zeros([BLOCK, BLOCK_D], tl.float32)
    first = -m0 - offset - low  # row of r for the distance between key 0 and query m0
    before = _position_scores(of_v, r_at, first + (lo - 1) * BLOCK, n_distances, D, BLOCK, BLOCK_D)
    d_before = tl.zeros_like(before)
    for PHASE in tl.static_range(FIRST, LAST):
        start, stop = phase_of(lo, edge_1, edge_2, hi, hi, hi, PHASE, DOCS)
        for at in tl.range(start, stop):
            j = at * BLOCK + a
            keys = _load_rows(k_at, j, n_keys, k_s, D, BLOCK_D)
            values = _load_rows(v_at, j, n_keys, v_s, DV, BLOCK_V)
            products = _position_scores(of_v, r_at, first + at * BLOCK, n_distances, D, BLOCK, BLOCK_D)
            positions = unpack(turn(join_halves(products, before, BLOCK), False, BLOCK), keys.dtype, BLOCK)
            before = products
            scores = tl.dot(of_u, tl.trans(keys), input_precision="ieee")
            scores = (scores + positions.to(tl.float32)) * (scale * LOG2_E)
            weights = tl.exp2(scores - norm[:, None])
            if PHASE % 2 == 0:
                seen = visible_tile(
                    t[:, None], j[None, :], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                    k_docs + b64 * n_keys, ranges, 0, 0, LEFT, RIGHT, DOCS, False, BLOCK
                )  # fmt: skip
                weights = tl.where(seen, weights, 0.0)
            tl.store(w_at + j[None, :].to(tl.int64) * width, weights.to(weights_t.dtype.element_ty))
            d_weights = tl.dot(grads, tl.trans(values), input_precision="ieee")
            if DROPOUT:
                kept = keep_tile(seed, b, first_head + h, (first_row + t)[:, None], (first_key + j)[None, :], threshold)
                d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
            d_scores = (weights * (d_weights - dots_o[:, None])).to(keys.dtype)
            of_queries = tl.dot(d_scores, keys, of_queries, input_precision="ieee")
            d_turned = turn(pack(d_scores, BLOCK), True, BLOCK)
            d_block = unpack(join_halves(d_before, d_turned, BLOCK), keys.dtype, BLOCK)
            d_before = d_turned
            tl.store(x_at + j[None, :].to(tl.int64) * width, d_block)
            near = _load_rows(r_at, first + at * BLOCK - BLOCK + a, n_distances, D, D, BLOCK_D)
            of_positions = tl.dot(d_block, near, of_positions, input_precision="ieee")
    if hi > lo:  # the last block of distances, of which only its own tile has a part
        d_block = unpack(join_halves(d_before, tl.zeros_like(d_before), BLOCK), of_u.dtype, BLOCK)
        tl.store(x_at + (hi * BLOCK + a)[None, :].to(tl.int64) * width, d_block)
        near = _load_rows(r_at, first + (hi - 1) * BLOCK + a, n_distances, D, D, BLOCK_D)
        of_positions = tl.dot(d_block, near, of_positions, input_precision="ieee")
    to = b64 * dq_b + h64 * dq_h + t[:, None].to(tl.int64) * dq_t + e[None, :]
    inside = (t < n_rows)[:, None] & (e < D)[None, :]
    tl.store(d_qu + to, (of_queries * scale).to(d_qu.dtype.element_ty), mask=inside)
    tl.store(d_qv + to, (of_positions * scale).to(d_qv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def backward_keys(
    q_u, v, d_out, row_dot, d_k, d_v, weights_t, lengths, q_docs, k_docs, ranges, seed, n_rows, n_keys, offset, left,
    right, scale, threshold, keep_factor, first_row, first_key, first_head, q_b, q_h, q_t, v_b, v_h, v_s, g_b, g_h, g_t,
    dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, w_h, width, N_GROUPS: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr
):  # fmt: skip
    """Program (b · G + g, block of keys): add scale · dSᵀ qu to dk and Aᵀ dO to dv, over the heads that share the keys.

    Tiles are transposed, (keys, queries); the weights are those of ``backward_rows``.
    """
    b, g, block = tl.program_id(0) // N_GROUPS, tl.program_id(0) % N_GROUPS, tl.program_id(1)
    n0, b64, g64, a = block * BLOCK, b.to(tl.int64), g.to(tl.int64), tl.arange(0, BLOCK)
    j, e, f = n0 + a, tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    values = _load_rows(v + b64 * v_b + g64 * v_h, j, n_keys, v_s, DV, BLOCK_V)
    key_end = visible_end(lengths, b, n_keys, LENGTHS)
    lo, edge_1, edge_2, edge_3, hi = row_phases(
        n0, offset, left, right, 0, n_rows, key_end, LEFT, RIGHT, False, BLOCK, BLOCK
    )
    if DOCS:
        lo = tl.maximum(lo, tl.load(ranges + (b * tl.num_programs(1) + block) * 2))
        hi = tl.minimum(hi, tl.load(ranges + (b * tl.num_programs(1) + block) * 2 + 1))
    d_keys = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    d_values = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for rep in range(REP):
        h = g * REP + rep
        h64, line = h.to(tl.int64), b64 * N_GROUPS * REP + h
        q_at, g_at = q_u + b64 * q_b + h64 * q_h, d_out + b64 * g_b + h64 * g_h
        w_at = weights_t + line * w_h + j[:, None].to(tl.int64) * width + a[None, :]
        for PHASE in tl.static_range(FIRST, LAST):
            start, stop = phase_of(lo, edge_1, edge_2, edge_3, hi, hi, PHASE, DOCS)
            for at in tl.range(start, stop):
                t = at * BLOCK + a
                weights = tl.load(w_at + at * BLOCK)
                if PHASE % 2 == 1:  # tiles without a visible pair may not have been written
                    seen = visible_tile(
                        t[None, :], j[:, None], offset, left, right, n_rows, key_end, q_docs + b64 * n_rows,
                        k_docs + b64 * n_keys, ranges, 0, 0, LEFT, RIGHT, DOCS, False, BLOCK
                    )  # fmt: skip
                    weights = tl.where(seen, weights, 0.0)
                queries = _load_rows(q_at, t, n_rows, q_t, D, BLOCK_D)
                grads = _load_rows(g_at, t, n_rows, g_t, DV, BLOCK_V)
                dots_o = tl.load(row_dot + line * n_rows + t, mask=t < n_rows, other=0.0)
                d_weights = tl.dot(values, tl.trans(grads), input_precision="ieee")
                applied, weights = weights, weights.to(tl.float32)
                if DROPOUT:
                    kept = keep_tile(
                        seed, b, first_head + h, (first_row + t)[None, :], (first_key + j)[:, None], threshold
                    )
                    applied = tl.where(kept, weights * keep_factor, 0.0)
                    d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
                d_values = tl.dot(applied.to(grads.dtype), grads, d_values, input_precision="ieee")
                d_scores = weights * (d_weights - dots_o[None, :])
                d_keys = tl.dot(d_scores.to(queries.dtype), queries, d_keys, input_precision="ieee")
    inside = (j < n_keys)[:, None]
    k_to = d_k + b64 * dk_b + g64 * dk_h + j[:, None].to(tl.int64) * dk_s + e[None, :]
    v_to = d_v + b64 * dv_b + g64 * dv_h + j[:, None].to(tl.int64) * dv_s + f[None, :]
    of_k, of_v = inside & (e < D)[None, :], inside & (f < DV)[None, :]
    tl.store(k_to, tl.load(k_to, mask=of_k, other=0.0) + d_keys * scale, mask=of_k)
    tl.store(v_to, tl.load(v_to, mask=of_v, other=0.0) + d_values, mask=of_v)


@triton.jit(do_not_specialize=_VARYING)
def backward_distances(
    q_v, d_r, turned_t, lengths, ranges, n_batch, n_rows, n_keys, n_distances, low, offset, left, right, scale, q_b,
    q_h, q_t, x_h, width, D: tl.constexpr, LENGTHS: tl.constexpr, DOCS: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (block of distances from the smallest, h): add scale · dS'ᵀ qv to dr, over all texts and queries."""
    h, n_blocks, n_key_blocks = tl.program_id(1), (n_rows + BLOCK - 1) // BLOCK, (n_keys + BLOCK - 1) // BLOCK
    h64, a, e = h.to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    between = tl.program_id(0) - n_blocks  # from the number of the block of queries to that of the block of keys
    start, stop = tl.maximum(0, -1 - between), tl.minimum(n_blocks, n_key_blocks - between)
    if RIGHT:
        stop = tl.where(between * BLOCK - offset > right, start, stop)
    if LEFT:
        stop = tl.where((between + 1) * BLOCK - offset <= -left, start, stop)
    summed = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for b in range(n_batch):
        b64 = tl.cast(b, tl.int64)
        q_at = q_v + b64 * q_b + h64 * q_h
        x_at = turned_t + (b64 * tl.num_programs(1) + h64) * x_h
        for block in tl.range(start, stop):
            _, lo, _, _, hi = _block_range(
                ranges, lengths, b, block, n_blocks, n_rows, n_keys, offset, left, right, LENGTHS, DOCS, LEFT, RIGHT,
                BLOCK
            )  # fmt: skip
            n, t = block + between, block * BLOCK + a
            written = (n + 1 >= lo) & (n < hi) & (lo < hi)
            tile = x_at + ((n + 1) * BLOCK + a)[:, None].to(tl.int64) * width + t[None, :]
            d_block = tl.load(tile, mask=(t[None, :] < width) & written, other=0.0)
            queries = _load_rows(q_at, t, n_rows, q_t, D, BLOCK_D)
            summed = tl.dot(d_block, queries, summed, input_precision="ieee")
    row = between * BLOCK - offset - low + a
    to = d_r + (h64 * n_distances + row[:, None]) * D + e[None, :]
    inside = ((row >= 0) & (row < n_distances))[:, None] & (e < D)[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0) + summed * scale, mask=inside)
