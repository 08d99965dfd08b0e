"""Flash attention as torch operators: ``torch.ops.regard.flash_forward`` and its backward, opaque to torch.compile.

The kernels are in ``flash_attention``; this module chooses tile sizes and assembles the kernels' arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..foundation.autograd import first_derivative_only
from ..foundation.device import H200_SHARED_MEMORY, SMALL_SHARED_MEMORY, TRITON_INTERPRETED, shared_memory
from . import flash_attention as kernels
from .attention_tiles import STRIP_ROWS, table_strip

PLAN_BLOCK = 32 if TRITON_INTERPRETED else 64  # queries and keys per block of a sparse plan


@dataclass(frozen=True)
class Options:
    """The mask, bias and dropout of a kernel call; by default there are none."""

    scale: float
    offset: int  # query t is at key position t + offset
    left: int = -1  # visible keys before the query's own position; -1: all
    right: int = -1  # visible keys after it; -1: all
    lengths: Tensor | None = None  # (B,) keys of each sequence
    q_docs: Tensor | None = None  # (B, T) int32 document ids
    k_docs: Tensor | None = None  # (B, S) int32 document ids; an id that no query has hides a key
    row_plan: Tensor | None = None  # (B or 1, H or 1, blocks of T, 1 + 2n) int32: n, then n × (block of S, tile)
    column_plan: Tensor | None = None  # (B or 1, H or 1, blocks of S, 1 + 2n) int32: n, then n × (block of T, tile)
    bits: Tensor | None = None  # (tiles, block, block / 32) int32: the mask in each tile of the plans
    slopes: Tensor | None = None  # (H,) ALiBi slopes
    table: Tensor | None = None  # (H, 2 · reach + 1) bias for distances -reach … reach; clipped beyond
    dense: Tensor | None = None  # (B or 1, H or 1, T, S) bias, any strides
    seed: Tensor | None = None  # dropout seed
    dropout: float = 0.0
    cap: float = 0.0  # soft cap of the scores; 0: none
    first_row: int = 0  # index of the first row of q in the full sequence, for dropout
    first_key: int = 0  # likewise for keys
    first_head: int = 0  # likewise for heads
    plan: str = ""  # a key of PLANS, which replaces row_plan, column_plan and bits in a compiled graph

    def dropout_numbers(self) -> tuple[int, float]:
        """The threshold below which a weight is dropped, and the factor of the others."""
        return int(self.dropout * (1 << 31)), 1 / (1 - self.dropout) if self.dropout < 1 else 0.0


PLANS: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # row_plan, column_plan and bits by name


def with_plan(o: Options) -> Options:
    """The options with the tensors of their named plan filled in."""
    if not o.plan:
        return o
    rows, columns, bits = PLANS[o.plan]
    return replace(o, row_plan=rows, column_plan=columns, bits=bits)


# (kernel, largest head width) → (BLOCK_M, BLOCK_N, warps, stages) in half precision; tuned on an H200.
TILES: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("forward", 64): (128, 64, 8, 3),
    ("forward", 128): (64, 64, 4, 3),
    ("forward", 256): (128, 64, 8, 2),
    ("queries", 64): (64, 32, 4, 4),
    ("queries", 128): (64, 32, 4, 3),
    ("queries", 256): (128, 64, 8, 1),
    ("keys", 64): (32, 128, 4, 4),
    ("keys", 128): (64, 64, 4, 2),
    ("keys", 256): (32, 64, 8, 2),
}


def tile_sizes(kernel: str, q: Tensor, v: Tensor, o: Options) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages) of a kernel: "forward", "queries" or "keys"."""
    if TRITON_INTERPRETED:
        return 32, 32, 4, 1
    width, memory = max(q.shape[-1], v.shape[-1]), shared_memory(q.device)
    n_bytes = padded_width(width) * q.element_size()  # of a row
    if q.element_size() > 2:
        sizes = 32 if width > 128 else 64, 32, 4, 1 if width > 64 else 2
    else:
        sizes = TILES[kernel, 64 if width <= 64 else 128 if width <= 128 else 256]
    if o.row_plan is not None:
        return PLAN_BLOCK, PLAN_BLOCK, 4, 1 if width > 128 or memory < H200_SHARED_MEMORY else 2
    if memory < SMALL_SHARED_MEMORY and n_bytes > 128:
        block = min(64, 16384 // n_bytes)
        return block, block, 4, 1
    has_edges = o.left >= 0 or o.q_docs is not None or o.table is not None or o.dense is not None
    if (has_edges or memory < H200_SHARED_MEMORY) and width > 128 and q.element_size() == 2:
        # Biases compete with keys and values for shared memory.
        return {"forward": (64, 64, 4, 1), "queries": (64, 32, 4, 1), "keys": (32, 64, 8, 1)}[kernel]
    if has_edges and width <= 64 and q.element_size() == 2:  # masked or biased tiles need more registers
        return (32, 64, 4, 3) if kernel == "keys" and o.table is None else (64, 64, 4, 3)
    return sizes


def padded_width(width: int) -> int:
    """The next power of two, at least 16, as tensor cores require."""
    return max(16, 1 << (width - 1).bit_length())


def dense_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a dense bias (B, H, T, S); a shared batch or head axis has stride 0."""
    if x is None:
        return (0,) * 4
    b, h = (0 if x.shape[axis] == 1 else x.stride(axis) for axis in (0, 1))
    return b, h, x.stride(2), x.stride(3)


def plan_strides(plan: Tensor | None) -> tuple[int, int, int]:
    """Strides of a plan for batch and head, in lines, and the length of a line."""
    if plan is None:
        return 0, 0, 0
    n_batch, n_heads, n_blocks, width = plan.shape
    return n_heads * n_blocks if n_batch > 1 else 0, n_blocks if n_heads > 1 else 0, width


def phases_over_keys(o: Options, n_keys: int, block_n: int) -> tuple[int, int]:
    """The range of phases that a walk over keys needs (``attention_tiles.key_phases``)."""
    if o.row_plan is not None or o.q_docs is not None:
        return 0, 1
    first, even = 1 if o.left < 0 else 0, o.lengths is None and n_keys % block_n == 0
    if o.table is not None and o.right < 0:
        return first, 4 if even else 5
    return first, 2 if even and o.right < 0 and o.table is None else 3


def phases_over_rows(o: Options, n_rows: int, n_keys: int, block_m: int, block_n: int) -> tuple[int, int]:
    """The range of phases that a walk over queries needs (``attention_tiles.row_phases``)."""
    if o.row_plan is not None or o.q_docs is not None:
        return 1, 2
    first = 0 if o.table is not None and o.right < 0 else 1
    if o.table is None and o.right < 0 and o.lengths is None and n_keys % block_n == 0:
        first = 2
    return first, 4 if o.left >= 0 or n_rows % block_m else 3


def flags(o: Options) -> dict[str, bool]:
    return {
        "LENGTHS": o.lengths is not None, "DOCS": o.q_docs is not None, "PLAN": o.row_plan is not None,
        "LEFT": o.left >= 0, "RIGHT": o.right >= 0, "CAP": o.cap != 0, "SLOPE": o.slopes is not None,
        "TABLE": o.table is not None, "DENSE": o.dense is not None, "DROPOUT": o.dropout > 0,
    }  # fmt: skip


def tensors(
    o: Options, q: Tensor, ranges: Tensor | None, plan: Tensor | None, strip: Tensor | None
) -> tuple[Tensor, ...]:
    """The tensor arguments common to all kernels; q is a placeholder for those that are None."""
    arguments = (o.lengths, o.q_docs, o.k_docs, ranges, plan, o.bits, o.slopes, strip, o.dense, o.seed)
    return tuple(q if x is None else x for x in arguments)


def numbers(o: Options, n_rows: int, n_keys: int) -> tuple[float, ...]:
    """The scalar arguments common to all kernels."""
    reach = 0 if o.table is None else o.table.shape[1] // 2
    return (
        n_rows, n_keys, o.offset, o.left, o.right, reach, o.scale, o.cap or 1.0, *o.dropout_numbers(), o.first_row,
        o.first_key, o.first_head
    )  # fmt: skip


def make_strip(o: Options) -> Tensor | None:
    """The table in the layout that tiles read (``attention_tiles.table_strip``), (H, 128, ≈ 2 · reach + 400) fp32."""
    if o.table is None:
        return None
    table, rows = o.table.contiguous(), STRIP_ROWS.value
    n_heads, reach = len(table), table.shape[1] // 2
    width = (reach + 15) // 16 * 32 + 3 * rows + 16
    strip = torch.empty(n_heads, rows, width, dtype=torch.float32, device=table.device)
    table_strip[(rows, n_heads)](table, strip, reach, o.offset, BLOCK=1024, num_warps=4)
    return strip


_ranges: Any = WeakTensorKeyDictionary()  # documents → ranges; every layer of a model needs the same


def document_ranges(own: Tensor, other: Tensor, block: int, other_block: int) -> Tensor:
    """(B, blocks, 2) int32: for each block of ``own``, the range of blocks of ``other`` that may share a document."""
    key = (block, other_block, other.data_ptr(), own._version, other._version, other.shape)
    cached = _ranges.setdefault(own, {})
    if key not in cached:
        low, high = _block_extremes(own, block)
        other_low, other_high = _block_extremes(other, other_block)
        meets = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
        number = torch.arange(meets.shape[2], device=own.device, dtype=torch.int32)
        first = torch.where(meets, number, meets.shape[2]).amin(-1)
        last = torch.where(meets, number + 1, 0).amax(-1)
        cached[key] = torch.stack([first, last], -1).to(torch.int32).contiguous()
    return cached[key]


def _block_extremes(documents: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The smallest and largest document id in each block of (B, T)."""
    n = -(-documents.shape[1] // block) * block
    blocks = documents[:, torch.arange(n, device=documents.device).clamp(max=documents.shape[1] - 1)]
    return blocks.view(len(documents), -1, block).aminmax(dim=-1)


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor, width: int) -> Tensor:
    """An empty (B, H, T, width) with the same memory layout as x, (B, H, T, D) or (B, T, H, D)."""
    b, h, t, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(b, t, h, width).transpose(1, 2)
    return x.new_empty(b, h, t, width)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, DV) and lse (B, H, T)."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    (n_batch, n_heads, n_rows, d), n_keys, dv = q.shape, k.shape[2], v.shape[3]
    block_m, block_n, warps, stages = tile_sizes("forward", q, v, o)
    out = _like(q, dv)
    lse = torch.empty(n_batch, n_heads, n_rows, dtype=torch.float32, device=q.device)
    ranges = None if o.q_docs is None or o.k_docs is None else document_ranges(o.q_docs, o.k_docs, block_m, block_n)
    first, last = phases_over_keys(o, n_keys, block_n)
    strip = make_strip(o)
    kernels.forward[(n_batch * n_heads, -(-n_rows // block_m))](
        q, k, v, out, lse, *tensors(o, q, ranges, o.row_plan, strip), *numbers(o, n_rows, n_keys), *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dense_strides(o.dense), *plan_strides(o.row_plan),
        N_HEADS=n_heads, REP=n_heads // k.shape[1], D=d, DV=dv, **flags(o), FIRST=first, LAST=last, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_D=padded_width(d), BLOCK_V=padded_width(dv),
        num_warps=warps, num_stages=stages
    )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class GradientBuffers:
    """Outputs of the backward kernels."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_dense: Tensor | None = None  # zeros, (B or 1, H or 1, T, S), any strides; fp32 if batch or heads share it
    table: bool = False  # whether to compute the gradient of the table


def launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, o: Options, to: GradientBuffers
) -> Tensor | None:
    """Fill the buffers ``to``; returns the gradient of the table (H, 2 · reach + 1) in fp32 if ``to.table``."""
    q, k, v, d_out = (rows_contiguous(x) for x in (q, k, v, d_out))
    (n_batch, n_heads, n_rows, d), (n_groups, n_keys), dv = q.shape, k.shape[1:3], v.shape[3]
    row_dot, rep, strip = torch.empty_like(lse), n_heads // n_groups, make_strip(o)
    block_m, block_n, warps, stages = tile_sizes("queries", q, v, o)
    ranges = None if o.q_docs is None or o.k_docs is None else document_ranges(o.q_docs, o.k_docs, block_m, block_n)
    first, last = phases_over_keys(o, n_keys, block_n)
    band, d_far = _table_buffers(o, lse) if to.table else (row_dot, row_dot)
    kernels.backward_queries[(n_batch * n_heads, -(-n_rows // block_m))](
        q, k, v, out, lse, d_out, row_dot, to.d_q, q if to.d_dense is None else to.d_dense, band, d_far,
        *tensors(o, q, ranges, o.row_plan, strip), *numbers(o, n_rows, n_keys), band.shape[-1], *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *d_out.stride()[:3], *to.d_q.stride()[:3],
        *dense_strides(o.dense), *dense_strides(to.d_dense), *plan_strides(o.row_plan), N_HEADS=n_heads, REP=rep,
        D=d, DV=dv, **flags(o), D_TABLE=to.table, D_DENSE=_sharing(to.d_dense, q), FIRST=first, LAST=last,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded_width(d), BLOCK_V=padded_width(dv),
        num_warps=warps, num_stages=stages
    )  # fmt: skip
    block_m, block_n, warps, stages = tile_sizes("keys", q, v, o)
    ranges = None if o.q_docs is None or o.k_docs is None else document_ranges(o.k_docs, o.q_docs, block_n, block_m)
    first, last = phases_over_rows(o, n_rows, n_keys, block_m, block_n)
    kernels.backward_keys[(n_batch * n_groups, -(-n_keys // block_n))](
        q, k, v, lse, d_out, row_dot, to.d_k, to.d_v, *tensors(o, q, ranges, o.column_plan, strip),
        *numbers(o, n_rows, n_keys), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
        *to.d_k.stride()[:3], *to.d_v.stride()[:3], *dense_strides(o.dense), *plan_strides(o.column_plan),
        N_GROUPS=n_groups, REP=rep, D=d, DV=dv, **flags(o), FIRST=first, LAST=last, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_D=padded_width(d), BLOCK_V=padded_width(dv),
        num_warps=warps, num_stages=stages
    )  # fmt: skip
    return _table_gradient(o, band, d_far) if to.table else None


def _sharing(d_dense: Tensor | None, q: Tensor) -> int:
    """D_DENSE: 0 without a dense gradient, 1 if each pair has its own entry, 2 if batch or heads share entries."""
    if d_dense is None:
        return 0
    return 1 if d_dense.shape[:2] == q.shape[:2] else 2


def _table_buffers(o: Options, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Buffers for dS by distance within the reach (B, H, T, distances) and its sums beyond, per side (B, H, T, 2)."""
    assert o.table is not None
    reach = o.table.shape[1] // 2
    width = reach + min(reach - 1, o.right) if o.right >= 0 else 2 * reach - 1
    return lse.new_zeros(*lse.shape, max(width, 1)), lse.new_empty(*lse.shape, 2)


def _table_gradient(o: Options, band: Tensor, d_far: Tensor) -> Tensor:
    assert o.table is not None
    d_table = torch.zeros(o.table.shape, dtype=torch.float32, device=o.table.device)
    d_table[:, 1 : 1 + band.shape[-1]] = band.sum((0, 2))
    far = d_far.sum((0, 2))
    d_table[:, 0], d_table[:, -1] = far[:, 0], far[:, 1]
    return d_table


@torch.library.custom_op("regard::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, q_docs: Tensor | None, k_docs: Tensor | None,
    row_plan: Tensor | None, column_plan: Tensor | None, bits: Tensor | None, slopes: Tensor | None,
    table: Tensor | None, dense: Tensor | None, seed: Tensor | None, offset: int, left: int, right: int, scale: float,
    dropout: float, cap: float, plan: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, DV) and lse (B, H, T); the arguments after v are those of ``Options``."""
    o = Options(
        scale, offset, left, right, lengths, q_docs, k_docs, row_plan, column_plan, bits, slopes, table, dense, seed,
        dropout, cap, plan=plan
    )  # fmt: skip
    return launch_forward(q, k, v, with_plan(o))


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _like(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@torch.library.custom_op("regard::flash_backward", mutates_args=())
def flash_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, d_table: bool, d_dense: bool,
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, q_docs: Tensor | None, k_docs: Tensor | None,
    row_plan: Tensor | None, column_plan: Tensor | None, bits: Tensor | None, slopes: Tensor | None,
    table: Tensor | None, dense: Tensor | None, seed: Tensor | None, offset: int, left: int, right: int, scale: float,
    dropout: float, cap: float, plan: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, table and dense; those not needed are empty."""
    o = Options(
        scale, offset, left, right, lengths, q_docs, k_docs, row_plan, column_plan, bits, slopes, table, dense, seed,
        dropout, cap, plan=plan
    )  # fmt: skip
    d_q, d_k, d_v, *of_biases = _all_gradients(d_out, out, lse, d_table, d_dense, q, k, v, with_plan(o))
    of_table, of_dense = (lse.new_empty(0) if x is None else x for x in of_biases)
    return d_q, d_k, d_v, of_table, of_dense


def _all_gradients(
    d_out: Tensor, out: Tensor, lse: Tensor, d_table: bool, d_dense: bool, q: Tensor, k: Tensor, v: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, table and dense; None for those not needed."""
    of_dense = None
    if d_dense:
        assert o.dense is not None
        shared = o.dense.shape[:2] != q.shape[:2]
        of_dense = torch.zeros(o.dense.shape, dtype=torch.float32 if shared else o.dense.dtype, device=q.device)
    to = GradientBuffers(_like(q, q.shape[3]), _like(k, k.shape[3]), _like(v, v.shape[3]), of_dense, d_table)
    of_table = launch_backward(q, k, v, out, lse, d_out, o, to)
    of_table = None if of_table is None or o.table is None else of_table.to(o.table.dtype)
    of_dense = None if of_dense is None or o.dense is None else of_dense.to(o.dense.dtype)
    return to.d_q, to.d_k, to.d_v, of_table, of_dense


@flash_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor, d_table: bool, d_dense: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    table, dense = rest[7], rest[8]
    of_biases = (
        torch.empty(x.shape, dtype=x.dtype, device=q.device) if needed else lse.new_empty(0)
        for x, needed in ((table, d_table), (dense, d_dense))
    )
    return _like(q, q.shape[3]), _like(k, k.shape[3]), _like(v, v.shape[3]), *of_biases


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.save_for_backward(out, lse, *inputs[:13])
    ctx.mark_non_differentiable(lse)
    ctx.numbers = inputs[13:]


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    d_table, d_dense = (tensors[i] is not None and ctx.needs_input_grad[i] for i in (10, 11))
    d_q, d_k, d_v, of_table, of_dense = flash_backward(d_out, out, lse, d_table, d_dense, *tensors, *ctx.numbers)
    of_biases = of_table if d_table else None, of_dense if d_dense else None
    return d_q, d_k, d_v, *(None,) * 7, *of_biases, *(None,) * 8


flash_forward.register_autograd(_backward, setup_context=_setup)


class _Flash(torch.autograd.Function):
    """``flash_forward`` for eager code, without the dispatcher, which costs ten times as much as a launch."""

    @staticmethod
    def forward(
        ctx: Any, o: Options, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, dense: Tensor | None
    ) -> Tensor:
        out, lse = launch_forward(q, k, v, o)
        ctx.save_for_backward(q, k, v, out, lse, table, dense)
        ctx.options = replace(o, table=None, dense=None)
        return out

    @staticmethod
    @first_derivative_only("flash attention")
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out, lse, table, dense = ctx.saved_tensors
        o = replace(ctx.options, table=table, dense=dense)
        d_table, d_dense = ctx.needs_input_grad[4:]
        return None, *_all_gradients(d_out, out, lse, d_table, d_dense, q, k, v, o)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    """Attention of q (B, H, T, D) over k (B, G, S, D), v (B, G, S, DV); differentiable in q, k, v, table and dense."""
    if not torch.compiler.is_compiling():
        out: Tensor = _Flash.apply(o, q, k, v, o.table, o.dense)
        return out
    out, _ = flash_forward(
        q, k, v, o.lengths, o.q_docs, o.k_docs, o.row_plan, o.column_plan, o.bits, o.slopes, o.table, o.dense, o.seed,
        o.offset, o.left, o.right, o.scale, o.dropout, o.cap, o.plan
    )  # fmt: skip
    return out
