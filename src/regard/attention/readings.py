"""Attention interpreted as a kernel smoother, as retrieval and as a random walk; attention rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_map import AttentionMap, Pick, as_span
from .frame import Frame
from .masks import Mask
from .mechanisms import Dot
from .reference import apply_weights, normalise
from .score_matrix import ScoreMatrix

Weights = Tensor | AttentionMap  # (B, H, T, T) with rows that sum to 1
KERNELS = ("exp", "gaussian")


# ---- a kernel smoother


def smoother(
    q: Tensor, k: Tensor, v: Tensor, bandwidth: float | None = None, *, kernel: str = "exp", mask: Mask | None = None
) -> Tensor:
    """Kernel regression (Nadaraya 1964, Watson 1964): the value at q_i from points k_j with values v_j.

        ŷ(q_i) = Σ_j K(q_i, k_j) v_j / Σ_j K(q_i, k_j)

    "exp": K = exp(q·k / b²), which is scaled dot-product attention, b² = √D by default (Tsai et al. 2019, eq. 2).
    "gaussian": K = exp(-|q - k|² / 2b²), which equals "exp" when all keys have the same norm.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
    if bandwidth is not None and bandwidth <= 0:
        raise ValueError(f"bandwidth={bandwidth} must be positive")
    squared = math.sqrt(q.shape[-1]) if bandwidth is None else bandwidth**2
    scoring = ScoreMatrix(q, k, mask, None, Dot(1 / squared), Frame.of(q, k))
    log_kernel = scoring.tile()  # (B, H, T, S), -inf at masked pairs
    if kernel == "gaussian":
        group = q.shape[1] // k.shape[1]
        k_norm = k.square().sum(-1).repeat_interleave(group, dim=1)[:, :, None]  # |k|², (B, H, 1, S)
        q_norm = q.square().sum(-1, keepdim=True)  # |q|², (B, H, T, 1)
        log_kernel = log_kernel - (q_norm + k_norm) / (2 * squared)
    return apply_weights(normalise(log_kernel, "softmax"), v)


# ---- a retrieval


def retrieve(
    source: AttentionMap | tuple[Tensor, Tensor], query: int, k: int = 5, *, batch: int = 0, head: int | None = None
) -> list[tuple[int, float]]:
    """The k keys with the largest weights as (index, weight), best first, for one head or the mean over all heads.

    Masked keys are omitted, so there may be fewer than k.
    """
    attention_map = source if isinstance(source, AttentionMap) else AttentionMap(*source)
    attention_map = attention_map.part(batch=batch) if head is None else attention_map.head(batch, head)
    if not 1 <= k <= attention_map.shape[3]:
        raise ValueError(f"retrieve k={k} must lie between 1 and the {attention_map.shape[3]} keys")
    best = attention_map.row(query).mean((0, 1)).topk(k)
    ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(index, weight) for index, weight in ranked if weight > 0]


# ---- a walk on a graph


def walk(weights: Weights, steps: int, start: int | Tensor | None = None) -> Tensor:
    """p₀ A^steps: the distribution (B, H, T) after ``steps`` of a random walk with transition probabilities A_ij.

    ``start`` is a token or a distribution (…, T); None gives the matrix A^steps. A fully masked token has a self-loop.
    """
    if steps < 0:
        raise ValueError(f"walk steps={steps} must not be negative")
    graph = _transition_matrix(weights)
    *lead, _, n = graph.shape
    if isinstance(start, Tensor):
        if start.dim() == 0 or start.shape[-1] != n:
            raise ValueError(f"start of shape {tuple(start.shape)} is not a distribution over {n} tokens")
        distribution = start.to(graph.device, graph.dtype)[..., None, :]
    else:
        distribution = _one_hot_rows(slice(None) if start is None else start, graph, "start")
    distribution = distribution.expand(*lead, *distribution.shape[-2:])
    for _ in range(steps):
        distribution = _step(graph, distribution)
    return distribution if start is None else distribution[..., 0, :]


def stationary(weights: Weights, tolerance: float = 1e-6, max_steps: int = 10_000) -> Tensor:
    """The stationary distribution p = p A, (B, H, T), as in PageRank; with a causal mask it is all at token 0.

    Iterates p ← (p + p A) / 2 from the uniform distribution, which has the same fixed points and does not oscillate.
    """
    graph = _transition_matrix(weights)
    *lead, _, n = graph.shape
    distribution = torch.full((*lead, 1, n), 1 / n, dtype=graph.dtype, device=graph.device)
    moved = math.inf
    for _ in range(max_steps):
        next_distribution = (distribution + _step(graph, distribution)) / 2
        moved, distribution = float((next_distribution - distribution).abs().sum(-1).max()), next_distribution
        if moved <= tolerance:
            return distribution[..., 0, :] / distribution[..., 0, :].sum(-1, keepdim=True)
    raise RuntimeError(f"stationary still changes by {moved:.2g} > tolerance={tolerance} after max_steps={max_steps}")


def rollout(layers: Sequence[Weights], residual: float = 0.5) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020, §3), (B, T, T): how much of each input token is in each output token.

        Â_l = residual · I + (1 - residual) · mean_h A_l,h        rollout = Â_L … Â_2 Â_1

    The rows of Â_l are divided by their sums, which differ from 1 with sinks and sigmoids. ``layers`` run from first to
    last. ``flow_to`` computes selected rows in O(T) memory.
    """
    graphs = _check_layers(layers, residual)
    identity = _one_hot_rows(slice(None), graphs[0], "rows")
    through = identity.expand(graphs[0].shape[0], -1, -1)  # (B, T, T)
    for graph in graphs:
        mixed = residual * identity + (1 - residual) * _mean_of_heads(graph)
        through = mixed / mixed.sum(-1, keepdim=True) @ through
    return through


def flow_to(layers: Sequence[Weights], rows: Pick, residual: float = 0.5) -> Tensor:
    """Selected rows of the rollout, (B, R, T), as e_i Â_L … Â_2 Â_1 from the left; O(T) memory for attention maps."""
    graphs = _check_layers(layers, residual)
    flow = _one_hot_rows(rows, graphs[-1], "rows").expand(graphs[-1].shape[0], -1, -1)  # (B, R, T)
    for graph in reversed(graphs):
        flow = flow / (residual + (1 - residual) * _row_sums(graph).mean(1))[:, None]
        through = _step(graph, flow[:, None].expand(-1, graph.shape[1], -1, -1))  # (B, H, R, T)
        flow = residual * flow + (1 - residual) * through.mean(1)
    return flow


def _step(graph: Weights, distribution: Tensor) -> Tensor:
    """p A for distributions p (…, N, T)."""
    return graph.push(distribution, stay=True) if isinstance(graph, AttentionMap) else distribution @ graph


def _transition_matrix(weights: Weights) -> Weights:
    """Square weights whose rows sum to 1; a fully masked token gets a self-loop."""
    total = _row_sums(graph := _square_graph(weights))
    off = (total - 1).abs()
    if off.max() > 0.02:  # allows for half precision
        worst = float(total.flatten()[off.argmax()])
        raise ValueError(f"rows of weights must sum to 1, or to 0 if fully masked; one sums to {worst:.3g}")
    return graph


def _square_graph(weights: Weights) -> Weights:
    """Square weights; a fully masked token gets a self-loop."""
    if len(weights.shape) < 2 or weights.shape[-1] != weights.shape[-2]:
        raise ValueError(f"weights of shape {tuple(weights.shape)} are not square; a walk needs T × T")
    return _add_self_loops(weights) if isinstance(weights, Tensor) else weights


def _row_sums(graph: Weights) -> Tensor:
    """(…, T); 1 for a fully masked token, which has a self-loop."""
    if isinstance(graph, Tensor):
        return graph.sum(-1)
    total = torch.ones(graph.shape[:3], dtype=graph.dtype, device=graph.device)
    if not graph.is_normalised:
        total = (graph.lse() == math.inf).to(total)
        for rows, _, weights in graph.blocks():
            total[:, :, rows] += weights.sum(-1)
    return total


def _add_self_loops(weights: Tensor) -> Tensor:
    return weights + torch.diag_embed((weights.sum(-1) == 0).to(weights.dtype))


def _check_layers(layers: Sequence[Weights], residual: float) -> list[Weights]:
    if not layers:
        raise ValueError("layers is empty; a rollout needs at least one")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual={residual} must lie in [0, 1]")
    for n, layer in enumerate(layers):
        if len(layer.shape) != 4:
            raise ValueError(f"layers[{n}] must have 4 dimensions (B, H, T, T), got shape {tuple(layer.shape)}")
        sizes, first = ((x.shape[0], x.shape[-1]) for x in (layer, layers[0]))
        if sizes != first:
            raise ValueError(f"layers[{n}] has (batch, length) = {sizes}, but layers[0] has {first}")
        if bool((layer < 0).any()) if isinstance(layer, Tensor) else layer.is_signed:
            raise ValueError(f"layers[{n}] may have negative weights, which are not shares of tokens")
    return [_square_graph(layer) for layer in layers]


def _mean_of_heads(graph: Weights) -> Tensor:
    """(B, T, T); a map is read one head at a time, so that fewer T × T matrices are in memory."""
    if isinstance(graph, Tensor):
        return graph.mean(1)
    n_batch, n_heads, n, _ = graph.shape
    total = torch.zeros(n_batch, n, n, dtype=graph.dtype, device=graph.device)
    for h in range(n_heads):
        total += _add_self_loops(graph.part(heads=h).dense())[:, 0]
    return total / n_heads


def _one_hot_rows(tokens: Pick, graph: Weights, name: str) -> Tensor:
    """One-hot rows (R, T) of the selected tokens."""
    n = graph.shape[-1]
    every = torch.arange(n, device=graph.device)
    selected = every[as_span(tokens, n, name, every.device)]
    return (selected[:, None] == every).to(graph.dtype)
