"""Transformer-XL attention (Dai et al. 2019, §3.3) as torch operators, in memory that does not grow with T · S.

    s_ij = scale · ((q_i + u) · k_j + (q_i + v) · r_{j-i})

The kernels are in ``xl_kernels``. The backward pass handles a chunk of queries at a time, which bounds the memory for
their weights and for dS by distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foundation.autograd import first_derivative_only
from ..foundation.device import TRITON_INTERPRETED
from . import xl_kernels as kernels
from .flash_ops import Options, document_ranges, padded_width, phases_over_keys, phases_over_rows, rows_contiguous

_MOST_BYTES = 384 << 20  # size limit of a chunk's weights, and of its dS
_LEAST_ROWS, _MOST_ROWS = (16, 32) if TRITON_INTERPRETED else (512, 2048)

# (warps, stages) of a kernel in half precision with heads of at most 64; tuned on an H200.
_LAUNCH = {"forward": (4, 3), "rows": (4, 2), "keys": (4, 3), "distances": (4, 3)}


class _Chunk(NamedTuple):
    rows: slice
    keys: slice  # the keys visible to at least one of the rows
    options: Options

    def of(self, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunk's part of queries, keys and values, or of their gradients."""
        return q_u[:, :, self.rows], q_v[:, :, self.rows], k[:, :, self.keys], v[:, :, self.keys]


def _block_size(q: Tensor, v: Tensor) -> int:
    """Queries and keys per tile."""
    if TRITON_INTERPRETED:
        return 16
    width = max(q.shape[3], v.shape[3])
    if q.element_size() == 2:
        return 64 if width <= 128 else 32
    return 32 if width <= 64 else 16


def _launch_options(kernel: str, q: Tensor, v: Tensor) -> dict[str, int]:
    small = q.element_size() == 2 and max(q.shape[3], v.shape[3]) <= 64
    warps, stages = _LAUNCH[kernel] if small else (4, 1)
    return {"num_warps": warps, "num_stages": stages}


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _bytes_per_row(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()


def _head_parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Query heads and the key heads they share, in the fewest parts that allow chunks of _LEAST_ROWS rows."""
    rep, n_groups, least = q.shape[1] // k.shape[1], k.shape[1], _LEAST_ROWS * _bytes_per_row(q, k)
    parts = next(n for n in range(1, n_groups + 1) if n_groups % n == 0 and (least <= n * _MOST_BYTES or n == n_groups))
    size = n_groups // parts
    for g in range(0, n_groups, size):
        yield slice(g * rep, (g + size) * rep), slice(g, g + size)


def _rows_per_chunk(q: Tensor, k: Tensor, block: int) -> int:
    return max(min(_MOST_BYTES // _bytes_per_row(q, k), _MOST_ROWS, _round_up(q.shape[2], block)) // block, 1) * block


def _chunks(q: Tensor, k: Tensor, o: Options, block: int) -> Iterator[_Chunk]:
    """Split the queries into chunks of ``_rows_per_chunk``."""
    n_rows, n_keys, size = q.shape[2], k.shape[2], _rows_per_chunk(q, k, block)
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        first = 0 if o.left < 0 else max(0, start + o.offset - o.left) // block * block
        last = n_keys if o.right < 0 else min(n_keys, stop + o.offset + o.right)
        if last <= first:
            continue
        piece = replace(
            o, offset=start + o.offset - first, first_row=start, first_key=first,
            lengths=None if o.lengths is None else (o.lengths - first).clamp(min=0),
            q_docs=None if o.q_docs is None else o.q_docs[:, start:stop].contiguous(),
            k_docs=None if o.k_docs is None else o.k_docs[:, first:last].contiguous(),
        )  # fmt: skip
        yield _Chunk(slice(start, stop), slice(first, last), piece)


def _flags(o: Options) -> dict[str, bool]:
    return {"LENGTHS": o.lengths is not None, "DOCS": o.q_docs is not None, "LEFT": o.left >= 0, "RIGHT": o.right >= 0}


def _ranges(own: Tensor | None, other: Tensor | None, block: int) -> Tensor | None:
    return None if own is None or other is None else document_ranges(own, other, block, block)


def _masks(o: Options, q: Tensor, ranges: Tensor | None) -> tuple[Tensor, ...]:
    """The tensor arguments of masks and dropout; q is a placeholder for those that are None."""
    return tuple(q if x is None else x for x in (o.lengths, o.q_docs, o.k_docs, ranges, o.seed))


@torch.library.custom_op("regard::xl_forward", mutates_args=())
def xl_forward(
    q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor, lengths: Tensor | None, q_docs: Tensor | None,
    k_docs: Tensor | None, seed: Tensor | None, offset: int, left: int, right: int, scale: float, dropout: float,
    low: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, DV) and lse (B, H, T); r (H, distances, D) begins at distance ``low``."""
    o = Options(scale, offset, left, right, lengths, q_docs, k_docs, seed=seed, dropout=dropout)
    return _forward(q_u, q_v, k, v, r, o, low)


def _forward(q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor, o: Options, low: int) -> tuple[Tensor, Tensor]:
    q_u, q_v, k, v, r = (*(rows_contiguous(x) for x in (q_u, q_v, k, v)), r.contiguous())
    (n_batch, n_heads, n_rows, d), n_keys, dv, block = q_u.shape, k.shape[2], v.shape[3], _block_size(q_u, v)
    out = q_u.new_empty(n_batch, n_heads, n_rows, dv)
    lse = torch.empty(q_u.shape[:3], dtype=torch.float32, device=q_u.device)
    first, last = phases_over_keys(o, n_keys, block)
    kernels.forward[(n_batch * n_heads, -(-n_rows // block))](
        q_u, q_v, k, v, r, out, lse, *_masks(o, q_u, _ranges(o.q_docs, o.k_docs, block)), n_rows, n_keys, r.shape[1],
        low, o.offset, o.left, o.right, o.scale, *o.dropout_numbers(), *q_u.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *out.stride()[:3], N_HEADS=n_heads, REP=n_heads // k.shape[1], D=d, DV=dv, **_flags(o),
        DROPOUT=o.dropout > 0, FIRST=first, LAST=last, BLOCK=block, BLOCK_D=padded_width(d), BLOCK_V=padded_width(dv),
        **_launch_options("forward", q_u, v)
    )  # fmt: skip
    return out, lse


@xl_forward.register_fake
def _(q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q_u.new_empty(*q_u.shape[:3], v.shape[3]), torch.empty(q_u.shape[:3], dtype=torch.float32, device=q_u.device)


@torch.library.custom_op("regard::xl_backward", mutates_args=())
def xl_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor,
    lengths: Tensor | None, q_docs: Tensor | None, k_docs: Tensor | None, seed: Tensor | None, offset: int, left: int,
    right: int, scale: float, dropout: float, low: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q + u, q + v, k, v and r."""
    o = Options(scale, offset, left, right, lengths, q_docs, k_docs, seed=seed, dropout=dropout)
    return _gradients(d_out, out, lse, q_u, q_v, k, v, r, o, low)


def _gradients(
    d_out: Tensor, out: Tensor, lse: Tensor, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor, o: Options,
    low: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q_u, q_v, k, v, d_out, r = (*(rows_contiguous(x) for x in (q_u, q_v, k, v, d_out)), r.contiguous())
    d_qu, d_qv = torch.zeros_like(q_u), torch.zeros_like(q_u)
    d_k, d_v, d_r = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v, r))
    block, head_parts = _block_size(q_u, v), list(_head_parts(q_u, k))
    some = q_u[:, head_parts[0][0]]
    n_lines = some.shape[0] * some.shape[1] * _rows_per_chunk(some, k, block)
    weights, turned = (q_u.new_empty(n_lines * (_round_up(k.shape[2], block) + n)) for n in (0, block))
    for heads, groups in head_parts:
        parts = q_u[:, heads], q_v[:, heads], k[:, groups], v[:, groups]
        grads = d_qu[:, heads], d_qv[:, heads], d_k[:, groups], d_v[:, groups]
        for chunk in _chunks(parts[0], k, o, block):
            of_out = (x[:, heads, chunk.rows] for x in (out, lse, d_out))
            piece = replace(chunk.options, first_head=heads.start)
            buffers = weights, turned, d_r[heads]
            _chunk_gradients(chunk.of(*parts), r[heads], tuple(of_out), piece, low, block, chunk.of(*grads), buffers)
    return d_qu, d_qv, d_k.to(k.dtype), d_v.to(v.dtype), d_r.to(r.dtype)


def _chunk_gradients(
    inputs: tuple[Tensor, ...], r: Tensor, of_out: tuple[Tensor, ...], o: Options, low: int, block: int,
    grads: tuple[Tensor, ...], buffers: tuple[Tensor, ...]
) -> None:  # fmt: skip
    """Write the gradients of a chunk's q + u and q + v, and add its part of those of k, v and r.

    inputs, grads  q + u, q + v, k, v of the chunk and their gradients
    of_out         output, lse and gradient of the output
    buffers        for the weights and for dS by distance, and the gradient of r
    """
    (q_u, q_v, k, v), (d_qu, d_qv, d_k, d_v), (out, lse, d_out), (weights, turned, d_r) = inputs, grads, of_out, buffers
    (n_batch, n_heads, n_rows, d), (n_groups, n_keys), dv = q_u.shape, k.shape[1:3], v.shape[3]
    lse, ranges = lse.contiguous(), _ranges(o.q_docs, o.k_docs, block)
    row_dot, width, height = torch.empty_like(lse), _round_up(n_rows, block), _round_up(n_keys, block)
    w_h, x_h = height * width, (height + block) * width  # numbers per head of ``weights`` and ``turned``
    flags = {**_flags(o), "BLOCK": block, "BLOCK_D": padded_width(d), "D": d}
    sizes, places = (n_rows, n_keys, r.shape[1], low), (o.offset, o.left, o.right, o.scale)
    dropout = (*o.dropout_numbers(), o.first_row, o.first_key, o.first_head)
    first, last = phases_over_keys(o, n_keys, block)
    kernels.backward_rows[(n_batch * n_heads, width // block)](
        q_u, q_v, k, v, r, out, lse, d_out, row_dot, d_qu, d_qv, weights, turned, *_masks(o, q_u, ranges), *sizes,
        *places, *dropout, *q_u.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *d_out.stride()[:3],
        *d_qu.stride()[:3], w_h, x_h, width, **flags, N_HEADS=n_heads, REP=n_heads // n_groups, DV=dv,
        BLOCK_V=padded_width(dv), DROPOUT=o.dropout > 0, FIRST=first, LAST=last, **_launch_options("rows", q_u, v)
    )  # fmt: skip
    first, last = phases_over_rows(o, n_rows, n_keys, block, block)
    kernels.backward_keys[(n_batch * n_groups, -(-n_keys // block))](
        q_u, v, d_out, row_dot, d_k, d_v, weights, *_masks(o, q_u, _ranges(o.k_docs, o.q_docs, block)), n_rows, n_keys,
        *places, *dropout, *q_u.stride()[:3], *v.stride()[:3], *d_out.stride()[:3], *d_k.stride()[:3],
        *d_v.stride()[:3], w_h, width, **flags, N_GROUPS=n_groups, REP=n_heads // n_groups, DV=dv,
        BLOCK_V=padded_width(dv), DROPOUT=o.dropout > 0, FIRST=first, LAST=last, **_launch_options("keys", q_u, v)
    )  # fmt: skip
    lengths, _, _, of_blocks, _ = _masks(o, q_u, ranges)
    kernels.backward_distances[((width + height) // block, n_heads)](
        q_v, d_r, turned, lengths, of_blocks, n_batch, *sizes, *places, *q_v.stride()[:3], x_h, width, **flags,
        **_launch_options("distances", q_u, v)
    )  # fmt: skip


@xl_backward.register_fake
def _(d_out: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q_u, q_v, k, v, r = rest[:5]
    return (
        torch.empty_like(q_u), torch.empty_like(q_v), k.new_empty(k.shape), v.new_empty(v.shape), r.new_empty(r.shape)
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.mark_non_differentiable(output[1])
    ctx.numbers = inputs[9:]


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Any, ...]:
    return *xl_backward(d_out, *ctx.saved_tensors, *ctx.numbers), *(None,) * 10


xl_forward.register_autograd(_backward, setup_context=_setup)


class _XL(torch.autograd.Function):
    """``xl_forward`` for eager code, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, o: Options, low: int, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
        out, lse = _forward(q_u, q_v, k, v, r, o, low)
        ctx.save_for_backward(out, lse, q_u, q_v, k, v, r)
        ctx.options, ctx.low = o, low
        return out

    @staticmethod
    @first_derivative_only("Transformer-XL's kernel")
    def backward(ctx: Any, d_out: Tensor) -> Any:
        out, lse, q_u, q_v, k, v, r = ctx.saved_tensors
        return None, None, *_gradients(d_out, out, lse, q_u, q_v, k, v, r, ctx.options, ctx.low)


def xl_attention(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, v_bias: Tensor, low: int, o: Options) -> Tensor:
    """Attention with u and v_bias (H, D) and r (H, distances from ``low``, D); differentiable in all tensors."""
    q_u, q_v = q + u[:, None], q + v_bias[:, None]
    if not torch.compiler.is_compiling():
        out: Tensor = _XL.apply(o, low, q_u, q_v, k, v, r)
        return out
    masks = o.lengths, o.q_docs, o.k_docs, o.seed
    out, _ = xl_forward(q_u, q_v, k, v, r, *masks, o.offset, o.left, o.right, o.scale, o.dropout, low)
    return out
