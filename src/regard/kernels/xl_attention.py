# mypy: disable-error-code="no-untyped-def"
"""Transformer-XL attention (Dai et al. 2019, §3.3) on the flash kernels, in memory that does not grow with T · S.

    s_ij = scale · ((q_i + u) · k_j + (q_i + v) · r_{j-i})

The second product depends on query and distance. For a chunk of queries it is one matrix product (q + v) rᵀ, indexed by
query and distance; with each row shifted by one more, it is indexed by query and key (the paper's appendix B), and the
flash kernels read it as a dense bias. In the backward pass they write dS with the same layout, so that dr and its part
of dq are two more products.

Shifts by one would make every load unaligned. Therefore row t = 8g + c is multiplied by r already shifted by c, and the
remaining shift of 8g keeps rows aligned: a batch of 8 · H products, each over the rows with equal c. Chunks bound the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..foundation.autograd import first_derivative_only
from .attention_tiles import INTERPRETED
from .flash_ops import GradientBuffers, Options, launch_backward, launch_forward, padded_width

_MOST_BYTES = 384 << 20  # size limit of a chunk's products; the backward pass has two such matrices
_LEAST_ROWS, _MOST_ROWS = (16, 32) if INTERPRETED else (512, 1024)
_FRONT, _BACK = 32, 48  # zeros before and after r, so that shifted and padded reads stay in bounds


@triton.jit
def _shift(
    r, out, n_distances, n_out, D: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Program (block of z, c, h): out[h, c, z] = r[h, z + 8 - c - FRONT], 0 outside."""
    z, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    c, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x = z + 8 - c - FRONT
    inside = ((x >= 0) & (x < n_distances))[:, None] & (d < D)[None, :]
    rows = tl.load(r + (h * n_distances + x)[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.store(
        out + ((h * 8 + c) * n_out + z)[:, None] * D + d[None, :], rows, mask=(z < n_out)[:, None] & (d < D)[None, :]
    )


@triton.jit
def _clear(products, n_groups, width, last, BLOCK: tl.constexpr):
    """Program (row (c, b, g) of a head, h): write zeros to the columns before key 0 and from ``last`` + c on."""
    row, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = products + (h * tl.num_programs(0) + row) * width
    first, y = 8 * (n_groups - row % n_groups), tl.arange(0, BLOCK)
    for start in range(0, first, BLOCK):
        tl.store(at + start + y, tl.zeros([BLOCK], products.dtype.element_ty), mask=start + y < first)
    c = row // (tl.num_programs(0) // 8)
    for start in range(last + c, width, BLOCK):
        tl.store(at + start + y, tl.zeros([BLOCK], products.dtype.element_ty), mask=start + y < width)


class _Chunk(NamedTuple):
    rows: slice
    keys: slice  # the keys visible to at least one of the rows
    first: int  # index in the shifted r of column 0 of the products
    width: int  # number of columns of the products
    options: Options

    @property
    def n_groups(self) -> int:
        """The number of groups of eight rows; even, for alignment."""
        return -(-(self.rows.stop - self.rows.start) // 16) * 2

    def of(self, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunk's part of queries, keys and values, or of their gradients."""
        return q_u[:, :, self.rows], q_v[:, :, self.rows], k[:, :, self.keys], v[:, :, self.keys]

    def by_key(self, products: Tensor, n_batch: int) -> Tensor:
        """(8 · H, B · groups, width) → a view (B, H, groups, 8, keys), where key j is column j - 8g + 8 · groups."""
        steps, n = products.shape[2], self.n_groups
        of_batch, of_shift, n_heads = n * steps, n_batch * n * steps, len(products) // 8
        shape = (n_batch, n_heads, n, 8, self.keys.stop - self.keys.start)
        return products.as_strided(shape, (of_batch, 8 * of_shift, steps - 8, of_shift, 1), 8 * n)

    def gather_rows(self, x: Tensor) -> Tensor:
        """(B, H, C, D) → (8 · H, B · groups, D), with the rows of equal t mod 8 together."""
        b, h, _, d = x.shape
        missing = 8 * self.n_groups - x.shape[2]
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(2, (self.n_groups, 8)).permute(1, 3, 0, 2, 4).reshape(8 * h, b * self.n_groups, d)

    def scatter_rows(self, x: Tensor, to: Tensor) -> None:
        """The inverse of ``gather_rows``, into ``to``."""
        b, h, _, d = to.shape
        by_group, n_rows = x.view(h, 8, b, self.n_groups, d).permute(2, 0, 3, 1, 4), self.rows.stop - self.rows.start
        if n_rows == 8 * self.n_groups:
            to.unflatten(2, (self.n_groups, 8)).copy_(by_group)
        else:
            to.copy_(by_group.flatten(2, 3)[:, :, :n_rows])


def _bytes_per_row(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * (k.shape[2] + _MOST_ROWS) * q.element_size()


def _head_parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Query heads and the key heads they share, in the fewest parts that allow chunks of _LEAST_ROWS rows."""
    rep, n_groups, least = q.shape[1] // k.shape[1], k.shape[1], _LEAST_ROWS * _bytes_per_row(q, k)
    parts = next(n for n in range(1, n_groups + 1) if n_groups % n == 0 and (least <= n * _MOST_BYTES or n == n_groups))
    size = n_groups // parts
    for g in range(0, n_groups, size):
        yield slice(g * rep, (g + size) * rep), slice(g, g + size)


def _chunks(q: Tensor, k: Tensor, o: Options, low: int) -> Iterator[_Chunk]:
    """Split the queries into chunks whose products stay small."""
    n_rows, n_keys = q.shape[2], k.shape[2]
    size = max(min(_MOST_BYTES // _bytes_per_row(q, k) // 128 * 128, _MOST_ROWS), min(128, _MOST_ROWS))
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        first = 0 if o.left < 0 else max(0, start + o.offset - o.left) // 16 * 16
        last = n_keys if o.right < 0 else min(n_keys, stop + o.offset + o.right)
        if last <= first:
            continue
        piece = replace(
            o, offset=start + o.offset - first, first_row=start, first_key=first,
            lengths=None if o.lengths is None else (o.lengths - first).clamp(min=0),
            q_docs=None if o.q_docs is None else o.q_docs[:, start:stop].contiguous(),
            k_docs=None if o.k_docs is None else o.k_docs[:, first:last].contiguous(),
        )  # fmt: skip
        padded = -(-(stop - start) // 16) * 16
        last_column = padded + (last - first - 1 if o.right < 0 else min(last - first - 1, piece.offset + o.right + 7))
        width = -(-(last_column + 9) // 16) * 16 + 8  # an odd multiple of 8, so that rows shifted by 8 stay aligned
        yield _Chunk(slice(start, stop), slice(first, last), _FRONT - 8 - piece.offset - padded - low, width, piece)


def _shift_rows(r: Tensor) -> Tensor:
    """(H, distances, D) → (H, 8, distances + …, D) with out[h, c, z] = r[h, z + 8 - c - _FRONT], 0 outside."""
    (h, n, d), r = r.shape, r.contiguous()
    out = r.new_empty(h, 8, n + _FRONT + _BACK - 8, d)
    grid = (-(-out.shape[2] // 64), 8, h)
    _shift[grid](r, out, n, out.shape[2], D=d, FRONT=_FRONT, BLOCK=64, BLOCK_D=padded_width(d), num_warps=4)
    return out


def _near(chunk: _Chunk, shifted: Tensor) -> Tensor:
    """The part of the shifted r that a chunk needs, (8 · H, width, D)."""
    return shifted[:, :, chunk.first : chunk.first + chunk.width].flatten(0, 1)


def _position_scores(chunk: _Chunk, rows: Tensor, near: Tensor, scale: float) -> Tensor:
    """scale · (q + v) rᵀ of a chunk, (8 · H, B · groups, width)."""
    scores = rows.new_empty(len(rows), rows.shape[1], chunk.width)
    return torch.baddbmm(scores, rows, near.mT, beta=0, alpha=scale, out=scores)


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
    out = q_u.new_zeros(*q_u.shape[:3], v.shape[3])
    lse = torch.full(q_u.shape[:3], float("inf"), dtype=torch.float32, device=q_u.device)
    for heads, groups in _head_parts(q_u, k):
        shifted = _shift_rows(r[heads])
        parts = q_u[:, heads], q_v[:, heads], k[:, groups], v[:, groups]
        for chunk in _chunks(parts[0], k, o, low):
            of_u, of_v, of_k, of_values = chunk.of(*parts)
            products = _position_scores(chunk, chunk.gather_rows(of_v), _near(chunk, shifted), o.scale)
            piece = replace(chunk.options, dense=chunk.by_key(products, len(q_u)), first_head=heads.start)
            _, lse[:, heads, chunk.rows] = launch_forward(of_u, of_k, of_values, piece, out[:, heads, chunk.rows])
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
    d_qu, d_qv = torch.zeros_like(q_u), torch.zeros_like(q_v)
    d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    d_r = torch.zeros(r.shape[0], r.shape[1] + _FRONT + _BACK, r.shape[2], dtype=torch.float32, device=r.device)
    for heads, groups in _head_parts(q_u, k):
        shifted = _shift_rows(r[heads])
        parts = q_u[:, heads], q_v[:, heads], k[:, groups], v[:, groups]
        grads = d_qu[:, heads], d_qv[:, heads], d_k[:, groups], d_v[:, groups]
        for chunk in _chunks(parts[0], k, o, low):
            of_u, of_v, of_k, of_values = chunk.of(*parts)
            to_u, to_v, to_k, to_values = chunk.of(*grads)
            near, of_rows = _near(chunk, shifted), chunk.gather_rows(of_v)
            products = _position_scores(chunk, of_rows, near, o.scale)
            d_products = _unwritten_zero(chunk, products, o)
            launch_backward(
                of_u, of_k, of_values, out[:, heads, chunk.rows], lse[:, heads, chunk.rows].contiguous(),
                d_out[:, heads, chunk.rows],
                replace(chunk.options, dense=chunk.by_key(products, len(q_u)), first_head=heads.start),
                GradientBuffers(to_u, to_k, to_values, d_dense=chunk.by_key(d_products, len(q_u)), add=True)
            )  # fmt: skip
            chunk.scatter_rows(torch.baddbmm(of_rows, d_products, near, beta=0, alpha=o.scale), to_v)
            d_near = torch.bmm(d_products.mT, of_rows)  # (8 · H, width, D): column y of shift c is distance y - c
            n, (width, d) = chunk.width - 7, d_near.shape[1:]
            by_distance = d_near.as_strided((len(shifted), 8, n, d), (8 * width * d, width * d + d, d, 1))
            total = by_distance.sum(1, dtype=torch.float32)
            d_r[heads, chunk.first + 8 : chunk.first + 8 + n].add_(total, alpha=o.scale)
    d_r = d_r[:, _FRONT : _FRONT + r.shape[1]].to(r.dtype).contiguous()
    return d_qu, d_qv, d_k.to(k.dtype), d_v.to(v.dtype), d_r


def _unwritten_zero(chunk: _Chunk, products: Tensor, o: Options) -> Tensor:
    """A buffer for dS that is zero wherever the kernel does not write."""
    only_causal = o.left < 0 and o.right == 0 and o.lengths is None and o.q_docs is None
    if not only_causal or 8 * chunk.n_groups > chunk.rows.stop - chunk.rows.start:
        return torch.zeros_like(products)
    out, last = torch.empty_like(products), chunk.options.offset + 8 * chunk.n_groups + 1
    n_rows = 8 * products.shape[1]
    _clear[(n_rows, len(products) // 8)](out, chunk.n_groups, chunk.width, last, BLOCK=256, num_warps=1)
    return out


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
