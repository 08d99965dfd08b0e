# mypy: disable-error-code="no-untyped-def"
"""Code shared by the attention kernels: the scores, mask and dropout of a tile, and the blocks that a walk visits.

Row t is at key position t + offset and may attend to keys t + offset - left … t + offset + right that are before
``key_end``, in its own document, and in a tile of the sparse plan. A walk has phases, so that the mask is evaluated
only in "edge" blocks: a "clear" block is fully visible and, with a table, beyond its reach, where the bias is constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..foundation.device import TRITON_INTERPRETED

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The initial running maximum m; finite, so that a fully masked row gives exp2(-inf - m) = 0 and not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
# The largest block of queries or keys with a table.
STRIP_ROWS: tl.constexpr = tl.constexpr(32 if TRITON_INTERPRETED else 128)


@triton.jit
def tanh(x):
    """1 - 2 / (1 + e^2x), which saturates without overflow."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _mix(x):
    """``attention.reference._mix`` in 32 bits, of which the low 31 are kept."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x6C8E9CF5) & 0x7FFFFFFF
    return x ^ (x >> 16)


@triton.jit
def keep_tile(seed, b, h, t, j, threshold):
    """Which weights dropout keeps: ``attention.reference.dropout_tile`` for rows t and columns j."""
    start = (tl.load(seed) & 0x7FFFFFFF).to(tl.uint32)
    head = _mix(_mix(start + b.to(tl.uint32)) + h.to(tl.uint32))
    return _mix(_mix(head + t.to(tl.uint32)) ^ _mix(j.to(tl.uint32) + 0x3C6EF372)) >= threshold.to(tl.uint32)


@triton.jit
def load_tile(at, mask, CHECK: tl.constexpr):
    if CHECK:
        return tl.load(at, mask=mask, other=0.0)
    return tl.load(at)


@triton.jit
def visible_tile(
    t, j, offset, left, right, n_rows, key_end, q_docs, k_docs, bits, m0, n0, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DOCS: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Which rows t may attend to which keys j, for t and j that broadcast to a tile."""
    seen = (j < key_end) & (t < n_rows)
    if LEFT:
        seen = seen & (j >= t + offset - left)
    if RIGHT:
        seen = seen & (j <= t + offset + right)
    if DOCS:
        of_q, of_k = tl.load(q_docs + t, mask=t < n_rows, other=-1), tl.load(k_docs + j, mask=j < key_end, other=-2)
        seen = seen & (of_q == of_k)
    if BITS:
        words = tl.load(bits + (t - m0) * (BLOCK_N // 32) + (j - n0) // 32)
        seen = seen & (((words >> ((j - n0) % 32)) & 1) != 0)
    return seen


@triton.jit
def visible_end(lengths, b, n_keys, LENGTHS: tl.constexpr):
    """The end of the keys of text b."""
    end = n_keys
    if LENGTHS:
        end = tl.minimum(n_keys, tl.load(lengths + b).to(tl.int32))
    return end


@triton.jit
def phase_of(a, b, c, d, e, f, PHASE: tl.constexpr, WHOLE: tl.constexpr):
    """Start and end of a phase of a walk, given the borders of five phases; with WHOLE the walk is one phase."""
    start, stop = a, f
    if not WHOLE:
        if PHASE == 0:
            stop = b
        elif PHASE == 1:
            start, stop = b, c
        elif PHASE == 2:
            start, stop = c, d
        elif PHASE == 3:
            start, stop = d, e
        else:
            start = e
    return start, stop


@triton.jit
def strip_width(reach):
    return (reach + 15) // 16 * 32 + 3 * STRIP_ROWS + 16


@triton.jit
def table_strip(table, strip, reach, offset, BLOCK: tl.constexpr):
    """Program (row a, h): strip[h, a, x] = table[h, clip(x - a - start, ±reach)] in units of ln 2.

    Any tile of the bias is a rectangle of the strip, so that kernels can load it like a matrix. The strip begins
    ``start`` = reach + STRIP_ROWS before the key block at the position of the query block. The remainders of offset and
    reach modulo 16 are built into the strip, so that rectangles begin at aligned addresses.
    """
    a, h, width = tl.program_id(0), tl.program_id(1), strip_width(reach)
    start = (reach + 15) // 16 * 16 + STRIP_ROWS + (offset - (offset >> 4) * 16)
    for x0 in range(0, width, BLOCK):
        x = x0 + tl.arange(0, BLOCK)
        distance = tl.minimum(tl.maximum(x - a - start, -reach), reach)
        value = tl.load(table + h * (2 * reach + 1) + reach + distance).to(tl.float32) * LOG2_E
        tl.store(strip + (h * STRIP_ROWS + a).to(tl.int64) * width + x, value, mask=x < width)


@triton.jit
def score_tile(
    dots, t, j, m0, n0, offset, scale, cap, slope, strip, reach, far, dense, dense_t, dense_j, inside,
    CAP: tl.constexpr, SLOPE: tl.constexpr, TABLE: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr
):  # fmt: skip
    """The scores in units of ln 2 (for exp2), and the derivative of the soft cap."""
    slack = 1.0
    if CAP:
        ratio = tanh(dots * (scale / cap))
        scores, slack = ratio * (cap * LOG2_E), 1.0 - ratio * ratio
    else:
        scores = dots * (scale * LOG2_E)
    if SLOPE:
        scores -= tl.abs(j.to(tl.float32) - (t + offset).to(tl.float32)) * (slope * LOG2_E)
    if TABLE:
        if NEAR:  # the strip has a rectangle for any two blocks; all that are out of reach share one
            start = (reach + 15) // 16 * 16 + STRIP_ROWS
            between = tl.maximum(n0 - m0 - (offset >> 4) * 16, -start)
            between = tl.multiple_of(tl.minimum(between, start + 16), 16)
            scores += tl.load(strip + (t - m0) * strip_width(reach) + (between + start) + (j - n0))
        else:
            scores += far
    if DENSE:
        at = dense + t.to(tl.int64) * dense_t + j * dense_j
        scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    return scores, slack


@triton.jit
def key_phases(
    m0, offset, left, right, reach, n_rows, key_end, LEFT: tl.constexpr, RIGHT: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The phases of a walk over keys, as block numbers lo ≤ a ≤ b ≤ c ≤ d ≤ hi.

    Edge from lo, clear from a, edge from b, clear beyond the table's reach from c, edge from d.
    """
    first, last = m0 + offset, tl.minimum(m0 + BLOCK_M, n_rows) - 1 + offset
    lo, hi, clear = 0, key_end, key_end
    if RIGHT:
        hi = tl.minimum(hi, last + right + 1)
        clear = tl.minimum(clear, first + right + 1)
    if TABLE:
        clear = tl.minimum(clear, first - reach + 1)
    hi = (tl.maximum(hi, 0) + BLOCK_N - 1) // BLOCK_N
    a = 0
    if LEFT:
        lo = tl.maximum(first - left, 0) // BLOCK_N
        a = (tl.maximum(last - left, 0) + BLOCK_N - 1) // BLOCK_N
    a = tl.minimum(tl.maximum(a, lo), hi)
    b = tl.maximum(tl.minimum(tl.maximum(clear, 0) // BLOCK_N, hi), a)
    c, d = hi, hi
    if TABLE and not RIGHT:
        c = tl.minimum(tl.maximum((tl.maximum(last + reach, 0) + BLOCK_N - 1) // BLOCK_N, b), hi)
        d = tl.maximum(tl.minimum(key_end // BLOCK_N, hi), c)
    return lo, a, b, c, d, hi


@triton.jit
def row_phases(
    n0, offset, left, right, reach, n_rows, key_end, LEFT: tl.constexpr, RIGHT: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The phases of a walk over queries, as block numbers lo ≤ c ≤ a ≤ b ≤ hi.

    Clear beyond the table's reach from lo, edge from c, clear from a, edge from b.
    """
    end = n0 + BLOCK_N
    lo, a, c = 0, 0, 0
    hi, b = n_rows, n_rows
    if LEFT:
        hi = tl.minimum(hi, tl.minimum(end, key_end) - offset + left)
        b = tl.minimum(b, n0 - offset + left + 1)
    if RIGHT:
        lo = tl.maximum(n0 - right - offset, 0) // BLOCK_M
        a = tl.maximum(end - 1 - right - offset, 0)
    if TABLE:
        a = tl.maximum(a, end - 1 + reach - offset)
        if not RIGHT:
            c = tl.maximum(n0 - reach - offset + 1, 0) // BLOCK_M
    hi = (tl.maximum(hi, 0) + BLOCK_M - 1) // BLOCK_M
    hi = tl.where(n0 < key_end, hi, 0)
    a = (a + BLOCK_M - 1) // BLOCK_M
    a = tl.minimum(tl.maximum(a, lo), hi)
    b = tl.maximum(tl.minimum(tl.maximum(b, 0) // BLOCK_M, hi), a)
    a = tl.where(end > key_end, hi, a)
    b = tl.where(end > key_end, hi, b)
    c = tl.where(end > key_end, lo, tl.minimum(tl.maximum(c, lo), a))
    return lo, c, a, b, hi
