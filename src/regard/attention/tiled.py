"""FlashAttention's algorithm in plain torch: exact attention in O(T) memory, any mask, any bias, forward and backward.

Forward (Dao et al. 2022, algorithm 1): compute the scores block by block with a running maximum m and sum z per row,
rescale the accumulated output when m grows, and save the output and lse = m + log z. Backward (algorithm 4): recompute
each block's weights as exp(s - lse) and apply the analytic gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import gradients
from .frame import ALL, Span
from .mechanisms import Operands, by_group, by_head
from .reference import apply_weights, draw_seed, dropout_tile, normalise
from .score_matrix import AttentionCall, exp_minus_, select_rows


def tiled(call: AttentionCall) -> Tensor:
    """The output (B, H, T, D) of softmax or sigmoid attention."""
    return tiled_with_lse(call)[0]


def tiled_with_lse(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and lse (B, H, T); lse is +inf for a fully masked row, and 0 for sigmoids, which are not normalised."""
    if call.dropout > 0 and call.seed is None:  # forward and backward need the same seed
        call = replace(call, seed=draw_seed(call.q.device))
    own, bias_operands = call.operands()
    output, lse = _Tiled.apply(call, len(own), call.q, call.k, call.v, call.sinks, *own, *bias_operands)
    return output, lse


class _Tiled(torch.autograd.Function):
    """The first ``n_own`` operands are the mechanism's own; the rest are the bias's."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        n_own: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *operands: Tensor,
    ) -> Any:
        exact = torch.promote_types(q.dtype, torch.float32)
        call = replace(call, q=q.to(exact), k=k.to(exact), v=v.to(exact))
        parts = tuple(x.to(exact) for x in operands)
        output, lse = _forward(call, (parts[:n_own], parts[n_own:]))
        # Only save_for_backward holds q, k and v, so that checkpointing and offloading can free them.
        none = q.new_empty(0)
        ctx.call, ctx.n_own = replace(call, q=none, k=none, v=none, sinks=None), n_own
        ctx.save_for_backward(q, k, v, output, lse, sinks, *operands)
        ctx.mark_non_differentiable(lse)
        return output.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, _: Tensor) -> Any:
        q, k, v, output, lse, sinks, *operands = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            return None, None, *_differentiable_backward(ctx, (q, k, v, sinks, *operands), d_output)
        exact = torch.promote_types(q.dtype, torch.float32)
        call = replace(ctx.call, q=q.to(exact), k=k.to(exact), v=v.to(exact), sinks=sinks)
        parts = tuple(x.to(exact) for x in operands)
        grads = _backward(call, (parts[: ctx.n_own], parts[ctx.n_own :]), output, lse, d_output.to(exact))
        inputs = (q, k, v, sinks, *operands)
        cast = [None if x is None or g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
        return None, None, *cast


def _differentiable_backward(ctx: Any, inputs: tuple[Any, ...], d_output: Tensor) -> list[Tensor | None]:
    """The same gradients from the reference formula, in O(T · S) memory, as a graph for second derivatives."""
    needed = ctx.needs_input_grad[2:]
    exact: list[Any] = [None if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    q, k, v, sinks, *parts = exact
    call = replace(ctx.call, q=q, k=k, v=v)
    scores = call.tile(operands=(tuple(parts[: ctx.n_own]), tuple(parts[ctx.n_own :])))
    weights = normalise(scores, call.mechanism.normaliser, sinks)
    if call.dropout > 0:
        weights = weights * _dropout_scale(call, ALL, ALL)
    output = apply_weights(weights, v).to(d_output.dtype)
    wrt = [x for x, need in zip(inputs, needed, strict=True) if need]
    grads = iter(torch.autograd.grad(output, wrt, d_output, create_graph=True, allow_unused=True))
    return [next(grads) if need else None for need in needed]


def _forward(call: AttentionCall, operands: tuple[Operands, Operands]) -> tuple[Tensor, Tensor]:
    q, v = call.q, call.v
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], float("inf"))
    sigmoid = call.mechanism.normaliser == "sigmoid"
    for rows, blocks in call.plan().rows():
        if not blocks:
            continue
        n_rows = rows.stop - rows.start
        top = q.new_full((*q.shape[:2], n_rows, 1), float("-inf"))
        total = torch.zeros_like(top)
        if call.sinks is not None:  # the sink is the first score of each row, with value vector 0
            top, total = top.maximum(call.sinks.to(top.dtype)[:, None, None]), torch.ones_like(top)
        weighted_sum = q.new_zeros(*q.shape[:2], n_rows, v.shape[-1])
        for cols, partial in _joined_tiles(call, rows, blocks):
            scores = call.tile(rows, cols, operands, masked=partial)
            if sigmoid:
                weights = _apply_dropout_(call, scores.sigmoid_(), rows, cols)
                weighted_sum.add_(apply_weights(weights, select_rows(v, cols)))
                continue
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = torch.where(new_top == float("-inf"), 0, new_top)  # 0 while a row is fully masked
            weights = exp_minus_(scores, shift)
            rescale = torch.exp(top - shift)
            total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
            weights = _apply_dropout_(call, weights, rows, cols)
            weighted_sum.mul_(rescale).add_(apply_weights(weights, select_rows(v, cols)))
            top = new_top
        if sigmoid:
            output[:, :, rows], lse[:, :, rows] = weighted_sum, 0.0
            continue
        seen = top > float("-inf")
        output[:, :, rows] = weighted_sum / torch.where(seen, total, 1)
        lse[:, :, rows] = torch.where(seen, top + torch.log(total), float("inf"))[..., 0]
    return output, lse


def _backward(
    call: AttentionCall, operands: tuple[Operands, Operands], output: Tensor, lse: Tensor, d_output: Tensor
) -> list[Tensor | None]:
    """Gradients of q, k, v, the sinks and the operands."""
    q, k, v = call.q, call.k, call.v
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_own = [torch.zeros_like(x) for x in operands[0]]
    d_bias = [torch.zeros_like(x) for x in operands[1]]
    row_dot = gradients.row_dot(output, d_output)
    groups, n_heads = v.shape[1], q.shape[1]
    sigmoid = call.mechanism.normaliser == "sigmoid"
    for rows, blocks in call.plan().rows():
        q_rows, d_rows = q[:, :, rows], by_group(d_output[:, :, rows], groups)
        for cols, partial in _joined_tiles(call, rows, blocks):
            k_cols, v_cols = select_rows(k, cols), select_rows(v, cols)
            scores = call.tile(rows, cols, operands, masked=partial)
            weights = scores.sigmoid_() if sigmoid else exp_minus_(scores, lse[:, :, rows, None])
            d_weights = by_head(gradients.d_weights(d_rows, v_cols), n_heads)
            dropped_out = weights
            if call.dropout > 0:
                scale = _dropout_scale(call, rows, cols)
                dropped_out, d_weights = weights * scale, d_weights * scale
            _add_columns(d_v, cols, gradients.d_values(by_group(dropped_out, groups), d_rows))
            if sigmoid:
                d_scores = gradients.d_sigmoid(weights, d_weights)
            else:
                d_scores = d_weights.sub_(row_dot[:, :, rows]).mul_(weights)  # gradients.d_scores, in place
            d_q_tile, d_k_tile, d_operands = call.mechanism.tile_backward(q_rows, k_cols, operands[0], d_scores)
            d_q[:, :, rows] += d_q_tile
            _add_columns(d_k, cols, d_k_tile)
            for running, grad in zip(d_own, d_operands, strict=True):
                running += grad
            if call.bias is not None:
                d_heads = call.bias.tile_backward(rows, cols, call.frame, operands[1], q_rows, k_cols, d_scores, d_bias)
                if d_heads is not None:
                    d_q[:, :, rows] += d_heads[0]
                    _add_columns(d_k, cols, d_heads[1])
    d_sinks = None if call.sinks is None else gradients.d_sinks(call.sinks, lse, row_dot)
    return [d_q, d_k, d_v, d_sinks, *d_own, *d_bias]


def _joined_tiles(call: AttentionCall, rows: slice, blocks: list[tuple[slice, bool]]) -> Iterator[tuple[Span, bool]]:
    """The blocks of one stripe of rows merged into larger tiles, each with whether it needs the mask."""
    if call.bias is not None:  # biases are read along diagonals, which is slow for wide or gathered tiles
        yield from blocks
        return
    widest = call.largest_tile // ((rows.stop - rows.start) * call.q.shape[0] * call.q.shape[1])
    keys = torch.arange(call.k.shape[2], device=call.k.device)
    parts: list[slice] = []
    masked = False
    for cols, partial in blocks:
        if parts and sum(part.stop - part.start for part in parts) + cols.stop - cols.start > widest:
            yield _joined_span(parts, keys), masked
            parts, masked = [], False
        parts.append(cols)
        masked |= partial
    if parts:
        yield _joined_span(parts, keys), masked


def _joined_span(parts: list[slice], keys: Tensor) -> Span:
    """Adjacent blocks as one slice, scattered ones as indices."""
    start, stop = parts[0].start, parts[-1].stop
    if stop - start == sum(part.stop - part.start for part in parts):
        return slice(start, stop)
    return torch.cat([keys[part] for part in parts])


def _add_columns(total: Tensor, cols: Span, part: Tensor) -> None:
    """total[:, :, cols] += part."""
    if isinstance(cols, slice):
        total[:, :, cols] += part
    else:
        total.index_add_(2, cols, part)


def _apply_dropout_(call: AttentionCall, weights: Tensor, rows: Span, cols: Span) -> Tensor:
    """Apply dropout to the weights of a tile, in place."""
    return weights.mul_(_dropout_scale(call, rows, cols)) if call.dropout > 0 else weights


def _dropout_scale(call: AttentionCall, rows: Span, cols: Span) -> Tensor:
    assert call.seed is not None
    return dropout_tile(call.dropout, call.seed, rows, cols, call.frame).to(call.q.dtype) / (1 - call.dropout)
