"""Transformer-XL attention (Dai et al. 2019, §3.3) on the flash kernels, in memory that does not grow with T · S.

    s_ij = scale · ((q_i + u) · k_j + (q_i + v) · r_{j-i})

The second product depends on query and distance. For a chunk of queries it is one matrix product, (q + v) rᵀ, by query
and distance; read with each row shifted by one it is a matrix by query and key (the paper's appendix B), which the
flash kernels take as a dense bias. Backward they write dS in the same places, so that dr and its part of dq are two
products.

Shifts by one would make every load unaligned. So row t = 8g + c is multiplied with r shifted by c already, and the rest
of its shift, 8g, keeps rows aligned: a batch of 8 · H products, of the rows with equal c. Chunks bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .flash_ops import INTERPRETED, Gradients, Options, launch_backward, launch_forward

_MOST_BYTES = 1 << 28
_MOST_ROWS = 32 if INTERPRETED else 1024
_FRONT, _BACK = 32, 48  # zeros around r, so that shifted and padded reads stay inside


class _Chunk(NamedTuple):
    rows: slice
    keys: slice  # those that some row may see
    first: int  # column 0 of the products stands at this place of the shifted r
    width: int  # columns of the products
    options: Options

    @property
    def n_groups(self) -> int:
        """Groups of eight rows; an even number, for alignment."""
        return -(-(self.rows.stop - self.rows.start) // 16) * 2

    def by_key(self, products: Tensor, n_batch: int) -> Tensor:
        """(8 · H, B · groups, width) → the view (B, H, groups, 8, keys): key j stands in column j - 8g + 8 · groups."""
        steps, n = products.shape[2], self.n_groups
        of_batch, of_shift, n_heads = n * steps, n_batch * n * steps, len(products) // 8
        shape = (n_batch, n_heads, n, 8, self.keys.stop - self.keys.start)
        return products.as_strided(shape, (of_batch, 8 * of_shift, steps - 8, of_shift, 1), 8 * n)

    def gather_rows(self, x: Tensor) -> Tensor:
        """(B, H, T, D) → the rows of the chunk as (8 · H, B · groups, D), those with equal t mod 8 together."""
        b, h, _, d = x.shape
        x = x[:, :, self.rows]
        missing = 8 * self.n_groups - x.shape[2]
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(2, (self.n_groups, 8)).permute(1, 3, 0, 2, 4).reshape(8 * h, b * self.n_groups, d)

    def scatter_rows(self, x: Tensor, to: Tensor) -> None:
        """The inverse of ``gather_rows``, into the rows of ``to``."""
        b, h, _, d = to.shape
        by_group, n_rows = x.view(h, 8, b, self.n_groups, d).permute(2, 0, 3, 1, 4), self.rows.stop - self.rows.start
        if n_rows == 8 * self.n_groups:
            to[:, :, self.rows].unflatten(2, (self.n_groups, 8)).copy_(by_group)
        else:
            to[:, :, self.rows] = by_group.flatten(2, 3)[:, :, :n_rows]


def _chunks(q: Tensor, k: Tensor, o: Options, low: int) -> Iterator[_Chunk]:
    """Pieces of the queries whose matrix of distances stays small."""
    (b, h, n_rows, _), n_keys = q.shape, k.shape[2]
    per_row = b * h * (n_keys + _MOST_ROWS) * q.element_size()
    size = max(min(_MOST_BYTES // per_row // 128 * 128, _MOST_ROWS), min(128, _MOST_ROWS))
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
        width = -(-(last_column + 9) // 16) * 16 + 8  # an odd number of eights: rows shifted by 8 stay aligned
        yield _Chunk(slice(start, stop), slice(first, last), _FRONT - 8 - piece.offset - padded - low, width, piece)


def _shifted(r: Tensor) -> Tensor:
    """(H, distances, D) → (H, 8, distances + …, D) with out[h, c, z] = r[h, z + 8 - c - _FRONT], 0 outside."""
    padded = F.pad(r, (0, 0, _FRONT, _BACK))
    h, n, d = padded.shape
    return padded.as_strided((h, 8, n - 8, d), (n * d, d, d, 1), d).flip(1)  # one copy; c counts backwards before it


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
    shifted = _shifted(r)
    for chunk in _chunks(q_u, k, o, low):
        rows, keys = chunk.rows, chunk.keys
        products = _position_scores(chunk, chunk.gather_rows(q_v), _near(chunk, shifted), o.scale)
        piece = replace(chunk.options, dense=chunk.by_key(products, len(q_u)))
        part = launch_forward(q_u[:, :, rows], k[:, :, keys], v[:, :, keys], piece, out[:, :, rows])
        lse[:, :, rows] = part[1]
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
    shifted = _shifted(r)
    d_r = torch.zeros(r.shape[0], r.shape[1] + _FRONT + _BACK, r.shape[2], dtype=torch.float32, device=r.device)
    for chunk in _chunks(q_u, k, o, low):
        rows, keys, near = chunk.rows, chunk.keys, _near(chunk, shifted)
        of_rows = chunk.gather_rows(q_v)
        products = _position_scores(chunk, of_rows, near, o.scale)
        d_products = _unwritten_zero(chunk, products, o)
        launch_backward(
            q_u[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous(),
            d_out[:, :, rows], replace(chunk.options, dense=chunk.by_key(products, len(q_u))),
            Gradients(
                d_qu[:, :, rows], d_k[:, :, keys], d_v[:, :, keys], d_dense=chunk.by_key(d_products, len(q_u)), add=True
            )
        )  # fmt: skip
        chunk.scatter_rows(torch.baddbmm(of_rows, d_products, near, beta=0, alpha=o.scale), d_qv)
        d_near = torch.bmm(d_products.mT, of_rows)  # (8 · H, width, D): column y of shift c is the distance y - c
        n, (width, d) = chunk.width - 7, d_near.shape[1:]
        by_distance = d_near.as_strided((len(r), 8, n, d), (8 * width * d, width * d + d, d, 1))
        d_r[:, chunk.first + 8 : chunk.first + 8 + n].add_(by_distance.sum(1, dtype=torch.float32), alpha=o.scale)
    d_r = d_r[:, _FRONT : _FRONT + r.shape[1]].to(r.dtype).contiguous()
    return d_qu, d_qv, d_k.to(k.dtype), d_v.to(v.dtype), d_r


def _unwritten_zero(chunk: _Chunk, products: Tensor, o: Options) -> Tensor:
    """A buffer for dS, zero where the kernel writes nothing."""
    only_causal = o.left < 0 and o.right == 0 and o.lengths is None and o.q_docs is None
    if not only_causal or 8 * chunk.n_groups > chunk.rows.stop - chunk.rows.start:
        return torch.zeros_like(products)
    made = torch.empty_like(products)
    made[..., : 8 * chunk.n_groups + 8].zero_()  # before the first key
    made[..., chunk.width - 40 :].zero_()  # after the query's own
    return made


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
    """``xl_forward`` without the dispatcher, for eager code."""

    @staticmethod
    def forward(ctx: Any, o: Options, low: int, q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
        out, lse = _forward(q_u, q_v, k, v, r, o, low)
        ctx.save_for_backward(out, lse, q_u, q_v, k, v, r)
        ctx.options, ctx.low = o, low
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        out, lse, q_u, q_v, k, v, r = ctx.saved_tensors
        return None, None, *_gradients(d_out, out, lse, q_u, q_v, k, v, r, ctx.options, ctx.low)


def xl_attention(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, v_bias: Tensor, low: int, o: Options) -> Tensor:
    """Attention with u, v_bias (H, D) and r (H, distances from ``low``, D); differentiable in all of them."""
    q_u, q_v = q + u[:, None], q + v_bias[:, None]
    if not torch.compiler.is_compiling():
        out: Tensor = _XL.apply(o, low, q_u, q_v, k, v, r)
        return out
    masks = o.lengths, o.q_docs, o.k_docs, o.seed
    out, _ = xl_forward(q_u, q_v, k, v, r, *masks, o.offset, o.left, o.right, o.scale, o.dropout, low)
    return out
