# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for the attention of a decode step: one query per row, over the row's own keys or an encoder's output.

There are two variants: by lines, where each line of a tile of keys has its own running softmax, exact in float32; and
by tiles, for half precision on tensor cores, where the heads and beams that share keys are rows of one product.

One program per head leaves most of the GPU idle if there are few heads. Then the keys of a head are split over several
programs, and each stores its result with the logarithm of its sum of weights; ``decoding.linear`` merges them.

On Hopper and later, a kernel starts while the previous one is still running (programmatic dependent launch): it loads
data that no kernel writes, such as weights, and then waits for the previous one to end (``wait_for_previous``). Every
kernel of a decode step waits, so that all earlier kernels have ended as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..foundation.device import shared_memory

_LOG2_E = 1.4426950408889634
PROGRAMS = 132  # programs that fill a GPU: the multiprocessors of an H200
MOST_PARTS = 8  # programs among which the keys of a head are split
PART_KEYS = 512  # fewest keys for which a head gets one more program

Parts = tuple[Tensor, Tensor]  # results (P, R, H · D) and log₂ of their weights (P, R, H)


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options that let a kernel start before the previous one ends, if the device supports it."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    early = is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """Allow the next kernel to start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until the outputs of earlier kernels can be read and overwritten."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Prefetch the cache lines at these pointers into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fetch_keys(k_held, v_held, lengths, b, at, part, held_s, D: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Prefetch a head's keys and values while the previous kernel is still running: each STEP, BLOCK of them.

    The length may still be that of the previous token, which is good enough here.
    """
    length = tl.load(lengths + b, cache_modifier=".cg").to(tl.int32)
    for start in range(part * BLOCK, length, STEP):
        slot = tl.minimum(start + tl.arange(0, BLOCK), length)
        for d in tl.static_range(0, D, 64):
            fetch(k_held + at + slot * held_s + d)
            fetch(v_held + at + slot * held_s + d)


@triton.jit
def merge(top, total, mixed, scores, values, seen):
    """Add values to the running softmax of each line: its maximum, sum of weights, and weighted sum of values."""
    scores = tl.where(seen, scores, -1e30)
    higher = tl.maximum(top, scores)
    before = tl.exp2(top - higher)
    weights = tl.where(seen, tl.exp2(scores - higher), 0.0)
    return higher, total * before + weights, mixed * before[:, None] + weights[:, None] * values


@triton.jit
def _attend_by_lines(
    q, k_new, v_new, k_held, v_held, lengths, origin, bias, out, logs, scale, q_b, q_h, k_b, k_g, v_b, v_g, held_b,
    held_g, held_s, origin_b, bias_h, n_heads, REP: tl.constexpr, D: tl.constexpr, HAS_ORIGIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, FETCH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Program (b, h, part): store the new key and value in slot lengths[b] and attend to slots 0 … lengths[b].

    A part is every PARTS-th tile of keys; the first has the new key too. ``scale`` includes log₂ e, for exp2.
    """
    launch_next(EARLY)
    b, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g = h // REP
    if FETCH:
        _fetch_keys(k_held, v_held, lengths, b, b * held_b + g * held_g, part, held_s, D, PARTS * BLOCK_S, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    wait_for_previous(EARLY)
    length = tl.load(lengths + b).to(tl.int32)
    query = tl.load(q + b * q_b + h * q_h + d, mask=inside, other=0.0).to(tl.float32) * scale
    key = tl.load(k_new + b * k_b + g * k_g + d, mask=inside, other=0.0)
    value = tl.load(v_new + b * v_b + g * v_g + d, mask=inside, other=0.0)
    own_at = b * held_b + g * held_g + length.to(tl.int64) * held_s + d
    if h % REP == 0 and part == 0:
        tl.store(k_held + own_at, key, mask=inside)
        tl.store(v_held + own_at, value, mask=inside)
    # Each line of the tile has its own running softmax, merged at the end, so that the loop needs no synchronisation.
    s = tl.arange(0, BLOCK_S)
    top = tl.full([BLOCK_S], -1e30, tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    mixed = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(part * BLOCK_S, length, PARTS * BLOCK_S):
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
        top, total, mixed = merge(top, total, mixed, scores, values, seen)
    own = tl.sum(query * key.to(tl.float32), 0)
    if HAS_BIAS:
        own += tl.load(bias + h * bias_h).to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(tl.max(top, 0), own)
    share, own = tl.exp2(top - highest), tl.where(part == 0, tl.exp2(own - highest), 0.0)
    result = tl.sum(mixed * share[:, None], 0) + own * value.to(tl.float32)
    weight = tl.maximum(tl.sum(total * share, 0) + own, 1e-30)
    at = (part * tl.num_programs(0) + b) * n_heads + h
    tl.store(out + at * D + d, (result / weight).to(out.dtype.element_ty), mask=inside)
    if PARTS > 1:
        tl.store(logs + at, highest + tl.log2(weight))


@triton.jit
def _add_tile(top, total, mixed, query, keys, values, bias, seen, scale):
    """Add a tile of keys (D, S) and values (S, D) to the running softmax of queries (Q, D).

    ``scale`` and ``bias`` include log₂ e, for exp2.
    """
    scores = tl.dot(query, keys, input_precision="ieee") * scale + bias
    scores = tl.where(seen[None, :], scores, -1e30)
    higher = tl.maximum(top, tl.max(scores, 1))
    before, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
    mixed = mixed * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total * before + tl.sum(weights, 1), mixed


@triton.jit
def _attend_by_tiles(
    q, k_new, v_new, k_held, v_held, lengths, origin, bias, out, logs, scale, q_b, q_h, k_b, k_g, v_b, v_g, held_b,
    held_g, held_s, origin_b, bias_h, n_heads, REP: tl.constexpr, D: tl.constexpr, HAS_ORIGIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, FETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (b, g, part): as by lines, for the REP heads that share the keys."""
    launch_next(EARLY)
    b, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if FETCH:
        _fetch_keys(k_held, v_held, lengths, b, b * held_b + g * held_g, part, held_s, D, PARTS * BLOCK_S, BLOCK_S)
    d, s, rep = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_Q)
    inside, head = d < D, g * REP + rep
    lines = (rep < REP)[:, None] & inside[None, :]
    wait_for_previous(EARLY)
    length = tl.load(lengths + b).to(tl.int32)
    query = tl.load(q + b * q_b + head[:, None] * q_h + d[None, :], mask=lines, other=0.0)
    key = tl.load(k_new + b * k_b + g * k_g + d, mask=inside, other=0.0)
    value = tl.load(v_new + b * v_b + g * v_g + d, mask=inside, other=0.0)
    top = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(part * BLOCK_S, length, PARTS * BLOCK_S):
        seen = start + s < length
        row = tl.load(origin + b * origin_b + start + s, mask=seen, other=0) if HAS_ORIGIN else b
        at = row * held_b + g * held_g + (start + s) * held_s
        keys = tl.load(k_held + at[None, :] + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        values = tl.load(v_held + at[:, None] + d[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        added = 0.0
        if HAS_BIAS:
            back = bias + head[:, None] * bias_h + length - (start + s)[None, :]
            added = tl.load(back, mask=(rep < REP)[:, None] & seen[None, :], other=0.0).to(tl.float32)
            added = added * 1.4426950408889634
        top, total, mixed = _add_tile(top, total, mixed, query, keys, values, added, seen, scale)
    own = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    if HAS_BIAS:
        own += tl.load(bias + head * bias_h, mask=rep < REP, other=0.0).to(tl.float32) * 1.4426950408889634
    higher = tl.maximum(top, own)
    before, own = tl.exp2(top - higher), tl.where(part == 0, tl.exp2(own - higher), 0.0)
    result = mixed * before[:, None] + own[:, None] * value.to(tl.float32)[None, :]
    weight = tl.maximum(total * before + own, 1e-30)
    at = (part * tl.num_programs(0) + b) * n_heads + head
    tl.store(out + at[:, None] * D + d[None, :], (result / weight[:, None]).to(out.dtype.element_ty), mask=lines)
    if PARTS > 1:
        tl.store(logs + at, higher + tl.log2(weight), mask=rep < REP)
    if part == 0:
        own_at = b * held_b + g * held_g + length.to(tl.int64) * held_s + d
        tl.store(k_held + own_at, key, mask=inside)
        tl.store(v_held + own_at, value, mask=inside)


@triton.jit
def _attend_memory_by_lines(
    q, k_held, v_held, lengths, out, logs, scale, q_b, q_h, held_b, held_g, held_s, n_rows, n_heads,
    COPIES: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (b, h, part): attend to slots 0 … lengths[b // COPIES] − 1 of source b // COPIES."""
    launch_next(EARLY)
    b, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    inside = d < D
    wait_for_previous(EARLY)
    row = b // COPIES
    length = tl.load(lengths + row).to(tl.int32)
    query = tl.load(q + b * q_b + h * q_h + d, mask=inside, other=0.0).to(tl.float32) * scale
    at = row * held_b + (h // REP) * held_g
    top = tl.full([BLOCK_S], -1e30, tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    mixed = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(part * BLOCK_S, length, PARTS * BLOCK_S):
        seen = start + s < length
        both = seen[:, None] & inside[None, :]
        tile = at + (start + s)[:, None] * held_s + d[None, :]
        keys = tl.load(k_held + tile, mask=both, other=0.0).to(tl.float32)
        values = tl.load(v_held + tile, mask=both, other=0.0).to(tl.float32)
        top, total, mixed = merge(top, total, mixed, tl.sum(keys * query[None, :], 1), values, seen)
    highest = tl.max(top, 0)
    share = tl.exp2(top - highest)
    weight = tl.maximum(tl.sum(total * share, 0), 1e-30)
    result = tl.sum(mixed * share[:, None], 0) / weight
    at = (part * n_rows + b) * n_heads + h
    tl.store(out + at * D + d, result.to(out.dtype.element_ty), mask=inside)
    if PARTS > 1:
        tl.store(logs + at, highest + tl.log2(weight))


@triton.jit
def _attend_memory_by_tiles(
    q, k_held, v_held, lengths, out, logs, scale, q_b, q_h, held_b, held_g, held_s, n_rows, n_heads,
    COPIES: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (source, g, part): its COPIES rows of REP heads each attend to slots 0 … lengths[source] − 1."""
    launch_next(EARLY)
    source, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    d, s, each = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_Q)
    inside, row, head = d < D, source * COPIES + each // REP, g * REP + each % REP
    lines = (each < COPIES * REP)[:, None] & inside[None, :]
    wait_for_previous(EARLY)
    length = tl.load(lengths + source).to(tl.int32)
    query = tl.load(q + row[:, None] * q_b + head[:, None] * q_h + d[None, :], mask=lines, other=0.0)
    top = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(part * BLOCK_S, length, PARTS * BLOCK_S):
        seen = start + s < length
        at = source * held_b + g * held_g + (start + s) * held_s
        keys = tl.load(k_held + at[None, :] + d[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        values = tl.load(v_held + at[:, None] + d[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        top, total, mixed = _add_tile(top, total, mixed, query, keys, values, 0.0, seen, scale)
    weight = tl.maximum(total, 1e-30)
    at = (part * n_rows + row) * n_heads + head
    result = (mixed / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=lines)
    if PARTS > 1:
        tl.store(logs + at, top + tl.log2(weight), mask=each < COPIES * REP)


def attention_tile(n_programs: int, width: int) -> tuple[int, int]:
    """Keys per tile and warps of self-attention by lines; few programs need larger tiles to saturate the memory.

    A tile is held in registers, so wide heads have fewer keys per tile.
    """
    return (512 * 64 // max(64, triton.next_power_of_2(width)), 8) if n_programs < PROGRAMS else (32, 4)


def attention_parts(n_programs: int, width: int, n_slots: int) -> int:
    """The parts of the keys of a head; one if the heads fill the GPU, or if ``linear`` cannot merge parts so wide."""
    if width != triton.next_power_of_2(width):
        return 1
    return max(1, min(MOST_PARTS, PROGRAMS // n_programs, triton.cdiv(n_slots, PART_KEYS)))


def dot_tile(n_programs: int, n_queries: int, width: int, memory: int) -> tuple[int, int, int]:
    """Keys per tile, warps and pipeline stages of the kernels by tiles of ``n_queries``, in so much shared memory."""
    keys, warps = (64, 2) if n_programs >= PROGRAMS else (128, 4)
    while keys > 16 and 2 * width * (2 * 2 * keys + n_queries) > 3 * memory // 4:  # two stages of keys and values
        keys //= 2
    return keys, warps, 3


def uses_tensor_cores(x: Tensor) -> bool:
    """Whether attention is computed by tiles: only in half precision, since tensor cores would round float32."""
    return x.element_size() == 2


def goes_by_tiles(q: Tensor, n_groups: int) -> bool:
    """Whether self-attention is computed by tiles: not if few heads, each with its own keys, leave the GPU idle."""
    few = len(q) * n_groups < PROGRAMS and q.shape[1] == n_groups
    return uses_tensor_cores(q) and not few


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
    """Store k and v (R, G, D) in k_held and v_held (R, G, S, D) at lengths; q (R, H, D) attends to them → (R, H · D).

    origin  (R, S): for each past position of a row, the row that holds its keys; None: the row itself
    bias    (H, S): the bias of a key by its distance from the query
    """
    return _launch(q, k, v, k_held, v_held, lengths, scale, origin, bias, 1)[0][0]


def attend_one_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_held: Tensor,
    v_held: Tensor,
    lengths: Tensor,
    scale: float,
    origin: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | Parts:
    """``attend_one``, its result in parts that ``linear`` merges, if few heads alone would leave the GPU idle."""
    n_programs = len(q) * (k if goes_by_tiles(q, k.shape[1]) else q).shape[1]
    parts = attention_parts(n_programs, q.shape[2], k_held.shape[2])
    values, logs = _launch(q, k, v, k_held, v_held, lengths, scale, origin, bias, parts)
    return values[0] if parts == 1 else (values, logs)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_held: Tensor,
    v_held: Tensor,
    lengths: Tensor,
    scale: float,
    origin: Tensor | None,
    bias: Tensor | None,
    parts: int,
) -> Parts:
    (rows, n_heads, width), n_groups = q.shape, k.shape[1]
    out = torch.empty(parts, rows, n_heads * width, dtype=q.dtype, device=q.device)
    logs = torch.empty(parts, rows, n_heads, dtype=torch.float32, device=q.device) if parts > 1 else out
    inputs = (
        *(q, k, v, k_held, v_held, lengths, lengths if origin is None else origin, q if bias is None else bias, out),
        *(logs, scale * _LOG2_E, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_held.stride()[:3]),
        *(0 if origin is None else origin.stride(0), 0 if bias is None else bias.stride(0), n_heads),
    )
    options = {"REP": n_heads // n_groups, "D": width, "HAS_ORIGIN": origin is not None, "HAS_BIAS": bias is not None}
    options |= {"PARTS": parts, **overlap(q.device)}
    by_tiles = goes_by_tiles(q, n_groups)
    few = rows * (n_groups if by_tiles else n_heads) < PROGRAMS
    options["FETCH"] = options["EARLY"] and few and origin is None
    if by_tiles:
        queries, block_d = _query_rows(n_heads // n_groups), max(16, triton.next_power_of_2(width))
        block, warps, stages = dot_tile(rows * n_groups * parts, queries, block_d, shared_memory(q.device))
        _attend_by_tiles[(rows, n_groups, parts)](
            *inputs, **options, BLOCK_Q=queries, BLOCK_S=block, BLOCK_D=block_d, num_warps=warps, num_stages=stages
        )
    else:
        block, warps = attention_tile(rows * n_heads, width)
        _attend_by_lines[(rows, n_heads, parts)](
            *inputs, **options, BLOCK_S=block, BLOCK_D=triton.next_power_of_2(width), num_warps=warps
        )
    return out, logs


def _query_rows(n: int) -> int:
    """The rows of a tile for n queries; tensor cores need at least 16."""
    return max(16, triton.next_power_of_2(n))


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


def attend_memory(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """q (R, H, D) over an encoder's k and v (B, G, S, D) of lengths (B,), with R / B rows per source → (R, H · D)."""
    return _launch_memory(q, k, v, lengths, scale, 1)[0][0]


def attend_memory_in_parts(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor | Parts:
    """``attend_memory``, its result in parts that ``linear`` merges, if few heads alone would leave the GPU idle."""
    n_programs = len(k) * k.shape[1] if uses_tensor_cores(q) else len(q) * q.shape[1]
    parts = attention_parts(n_programs, q.shape[2], k.shape[2])
    values, logs = _launch_memory(q, k, v, lengths, scale, parts)
    return values[0] if parts == 1 else (values, logs)


def _launch_memory(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, parts: int) -> Parts:
    (rows, n_heads, width), (n_sources, n_groups) = q.shape, k.shape[:2]
    out = torch.empty(parts, rows, n_heads * width, dtype=q.dtype, device=q.device)
    logs = torch.empty(parts, rows, n_heads, dtype=torch.float32, device=q.device) if parts > 1 else out
    copies, rep = rows // n_sources, n_heads // n_groups
    inputs = (q, k, v, lengths, out, logs, scale * _LOG2_E, *q.stride()[:2], *k.stride()[:3], rows, n_heads)
    options = {"COPIES": copies, "REP": rep, "D": width, "PARTS": parts, **overlap(q.device)}
    if uses_tensor_cores(q):
        queries, block_d = _query_rows(copies * rep), max(16, triton.next_power_of_2(width))
        block, warps, stages = dot_tile(n_sources * n_groups * parts, queries, block_d, shared_memory(q.device))
        _attend_memory_by_tiles[(n_sources, n_groups, parts)](
            *inputs, **options, BLOCK_Q=queries, BLOCK_S=block, BLOCK_D=block_d, num_warps=warps, num_stages=stages
        )
    else:
        block = min(64, triton.next_power_of_2(k.shape[2]))
        _attend_memory_by_lines[(rows, n_heads, parts)](
            *inputs, **options, BLOCK_S=block, BLOCK_D=triton.next_power_of_2(width), num_warps=4
        )
    return out, logs
