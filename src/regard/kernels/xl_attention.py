"""Transformer-XL attention (Dai et al. 2019, §3.3) on the flash kernels, in memory that does not grow with T · S.

    s_ij = scale · ((q_i + u) · k_j + (q_i + v) · r_{j-i})

The second product depends on query and distance. For a chunk of C queries it is one matrix product, (q + v) rᵀ, of shape
(C, distances); the same memory read with rows one number shorter is its tile (C, S) by key (the paper's appendix B), which
the flash kernels take as a dense bias. Backward they write dS the same way, so that dr and its part of dq are two products
with the matrix of distances. Chunks keep it within ``_MOST_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .flash_ops import INTERPRETED, Gradients, Options, launch_backward, launch_forward

_MOST_BYTES = 1 << 29
_MOST_ROWS = 32 if INTERPRETED else 1024
_PAD = 8  # distances are padded to a multiple, for aligned products


class _Chunk(NamedTuple):
    rows: slice
    keys: slice  # those that some row may see
    distances: slice  # of r
    options: Options

    @property
    def n_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def by_key(self, by_distance: Tensor) -> Tensor:
        """(H, B, C, distances) → the view (B, H, C, keys): entry (t, j) stands at distance j - t + C - 1 of row t."""
        h, b, c, w = by_distance.shape
        shape = (b, h, c, self.keys.stop - self.keys.start)
        return by_distance.as_strided(shape, (c * w, b * c * w, w - 1, 1), by_distance.storage_offset() + c - 1)


def _chunks(q: Tensor, k: Tensor, o: Options, low: int) -> Iterator[_Chunk]:
    """Pieces of the queries whose matrix of distances stays small."""
    (b, h, n_rows, _), n_keys = q.shape, k.shape[2]
    per_row = b * h * (n_keys + _MOST_ROWS) * q.element_size()
    size = max(min(_MOST_BYTES // per_row // 128 * 128, _MOST_ROWS), min(128, _MOST_ROWS))
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        first = 0 if o.left < 0 else max(0, start + o.offset - o.left)
        last = n_keys if o.right < 0 else min(n_keys, stop + o.offset + o.right)
        offset = start + o.offset - first
        nearest = -(stop - 1 - start + offset)  # smallest distance
        farthest = last - first - 1 - offset if o.right < 0 else min(o.right, last - first - 1 - offset)
        if last <= first or farthest < nearest:
            continue
        width = -(-(farthest - nearest + 1) // _PAD) * _PAD
        piece = replace(
            o, offset=offset, first_row=start, first_key=first,
            lengths=None if o.lengths is None else (o.lengths - first).clamp(min=0),
            q_docs=None if o.q_docs is None else o.q_docs[:, start:stop].contiguous(),
            k_docs=None if o.k_docs is None else o.k_docs[:, first:last].contiguous(),
        )  # fmt: skip
        yield _Chunk(slice(start, stop), slice(first, last), slice(nearest - low, nearest - low + width), piece)


def _by_head(x: Tensor) -> Tensor:
    """(B, H, C, D) → (H, B · C, D)."""
    b, h, c, d = x.shape
    return x.transpose(0, 1).reshape(h, b * c, d)


def _position_scores(chunk: _Chunk, q_v: Tensor, r: Tensor, scale: float) -> Tensor:
    """scale · (q + v) rᵀ of a chunk, (H, B, C, distances)."""
    rows, near = _by_head(q_v[:, :, chunk.rows]), r[:, chunk.distances]
    scores = rows.new_empty(len(rows), rows.shape[1], near.shape[1])
    torch.baddbmm(scores, rows, near.mT, beta=0, alpha=scale, out=scores)
    return scores.view(len(rows), q_v.shape[0], chunk.n_rows, near.shape[1])


def _pad_distances(r: Tensor) -> Tensor:
    return F.pad(r, (0, 0, 0, _PAD))


@torch.library.custom_op("regard::xl_forward", mutates_args=())
def xl_forward(
    q_u: Tensor, q_v: Tensor, k: Tensor, v: Tensor, r: Tensor, lengths: Tensor | None, q_docs: Tensor | None,
    k_docs: Tensor | None, seed: Tensor | None, offset: int, left: int, right: int, scale: float, dropout: float,
    low: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, DV) and lse (B, H, T); r (H, distances, D) begins at distance ``low``."""
    o = Options(scale, offset, left, right, lengths, q_docs, k_docs, seed=seed, dropout=dropout)
    out = q_u.new_zeros(*q_u.shape[:3], v.shape[3])
    lse = torch.full(q_u.shape[:3], float("inf"), dtype=torch.float32, device=q_u.device)
    r = _pad_distances(r)
    for chunk in _chunks(q_u, k, o, low):
        rows, keys = chunk.rows, chunk.keys
        dense = chunk.by_key(_position_scores(chunk, q_v, r, scale))
        piece = replace(chunk.options, dense=dense)
        part = launch_forward(q_u[:, :, rows], k[:, :, keys], v[:, :, keys], piece)
        out[:, :, rows], lse[:, :, rows] = part
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
    d_qu, d_qv = torch.zeros_like(q_u), torch.zeros_like(q_v)
    d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    padded = _pad_distances(r)
    d_r = torch.zeros(padded.shape, dtype=torch.float32, device=r.device)
    for chunk in _chunks(q_u, k, o, low):
        rows, keys = chunk.rows, chunk.keys
        by_distance = _position_scores(chunk, q_v, padded, scale)
        d_by_distance = torch.empty_like(by_distance)
        # What the kernel does not write: before the first key, and, under other masks, anywhere.
        partly = o.left < 0 and lengths is None and q_docs is None and o.right == 0
        (d_by_distance[..., : chunk.n_rows] if partly else d_by_distance).zero_()
        d_by_distance[..., by_distance.shape[-1] - _PAD :].zero_()
        heads = d_qu[:, :, rows], d_k[:, :, keys], d_v[:, :, keys]
        launch_backward(
            q_u[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous(),
            d_out[:, :, rows], replace(chunk.options, dense=chunk.by_key(by_distance)),
            Gradients(*heads, d_dense=chunk.by_key(d_by_distance), add=True)
        )  # fmt: skip
        d_position = d_by_distance.flatten(1, 2)  # (H, B · C, distances)
        near = padded[:, chunk.distances]
        d_rows = torch.bmm(d_position, near).mul_(scale)
        d_qv[:, :, rows] = d_rows.view(len(d_rows), -1, chunk.n_rows, d_rows.shape[-1]).transpose(0, 1)
        d_near = torch.bmm(d_position.mT, _by_head(q_v[:, :, rows]))
        d_r[:, chunk.distances].add_(d_near, alpha=scale)
    return d_qu, d_qv, d_k.to(k.dtype), d_v.to(v.dtype), d_r[:, : r.shape[1]].to(r.dtype).contiguous()


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


def xl_attention(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, v_bias: Tensor, low: int, o: Options) -> Tensor:
    """Attention with u, v_bias (H, D) and r (H, distances from ``low``, D); differentiable in all of them."""
    q_u, q_v = q + u[:, None], q + v_bias[:, None]
    masks = o.lengths, o.q_docs, o.k_docs, o.seed
    out, _ = xl_forward(q_u, q_v, k, v, r, *masks, o.offset, o.left, o.right, o.scale, o.dropout, low)
    return out
