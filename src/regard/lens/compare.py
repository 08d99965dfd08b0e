"""Compare the heads of two looks: of two models, two checkpoints or two layers.

The distance of two rows is their Jensen–Shannon divergence in bits, from 0 (equal) to 1 (no key in common), as in
Clark et al. 2019 (§6):

    JS(p, q) = ½ KL(p ‖ m) + ½ KL(q ‖ m),   m = ½ (p + q)

It is a sum over keys, computed block by block: neither matrix is ever materialised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..attention.frame import split_span

if TYPE_CHECKING:
    from .look import Look

_BLOCK_SIDE = 256  # rows and columns of a block
_WEIGHTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class LookComparison:
    """Distances (pairs, H) between the heads of two looks, for each pair of layers."""

    kind: str
    layers: list[tuple[int, int]]
    divergence: Tensor  # Jensen–Shannon, in bits, averaged over rows
    largest: Tensor  # the largest absolute difference of two weights

    def to_dict(self) -> dict[str, Any]:
        numbers = {"divergence": self.divergence.tolist(), "largest": self.largest.tolist()}
        return {"kind": self.kind, "layers": [list(pair) for pair in self.layers], **numbers}

    def to_text(self) -> str:
        """The divergences, a line for each pair of layers."""
        lines = [f"{self.kind} attention: Jensen–Shannon divergence in bits, 0 the same, 1 nothing in common"]
        lines.append("layer  " + "  ".join(f"head {h:<2}" for h in range(1, self.divergence.shape[1] + 1)))
        for (one, two), row in zip(self.layers, self.divergence.tolist(), strict=True):
            name = str(one + 1) if one == two else f"{one + 1}/{two + 1}"
            lines.append(f"{name:>5}  " + "  ".join(f"{value:7.4f}" for value in row))
        return "\n".join(lines)


def compare(
    a: Look, b: Look, *, kind: str | None = None, layers: Sequence[tuple[int, int]] | None = None
) -> LookComparison:
    """Compare head h of look a with head h of look b, layer by layer or in the given pairs of layers (of a, of b)."""
    kind = a._kind(kind)
    if layers is None:
        n_layers, n_others = a.layers(kind=kind), b.layers(kind=kind)
        if n_layers != n_others:
            raise ValueError(f"a has {n_layers} {kind} layers and b has {n_others}; give layers=, the pairs to compare")
        layers = [(layer, layer) for layer in range(n_layers)]
    pairs = [(a._layer(kind, one), b._layer(b._kind(kind), other)) for one, other in layers]
    results = [compare_maps(a.map(kind=kind, layer=one), b.map(kind=kind, layer=other)) for one, other in pairs]
    return LookComparison(kind, pairs, *(torch.stack(numbers) for numbers in zip(*results, strict=True)))


def compare_maps(a: AttentionMap, b: AttentionMap) -> tuple[Tensor, Tensor]:
    """The Jensen–Shannon divergence in bits, averaged over rows, and the largest difference of weights, (H,) each."""
    _check_maps(a, b, same_heads=True)
    total, largest = torch.zeros(a.shape[1], dtype=torch.float64), torch.zeros(a.shape[1])
    for p, q in _blocks(a, b):
        total += _divergence(p, q)
        largest = torch.maximum(largest, (p - q).abs().amax((0, 2, 3)).float().cpu())
    return _bits_per_row(total, a, b), largest


def head_distances(a: AttentionMap, b: AttentionMap) -> Tensor:
    """Jensen–Shannon divergence in bits of every head of a and every head of b, (H_a, H_b).

    For two models, whose heads have no common order.
    """
    _check_maps(a, b, same_heads=False)
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for p, q in _blocks(a, b):
        for head in range(p.shape[1]):
            total[head] += _divergence(p[:, head : head + 1], q)
    return _bits_per_row(total, a, b)


def compare_predictions(a: Look, b: Look) -> Tensor:
    """The total variation distance of the predictions at each position, ½ Σ |p - q|, 0 … 1, (T,)."""
    n = len(a.hidden())
    if n != len(b.hidden()):
        raise ValueError(f"the looks have {n} and {len(b.hidden())} positions; both must be of the same tokens")
    spans = split_span(slice(0, n), max(1, _WEIGHTS_AT_ONCE // a.model.config.output_vocab_size))
    return torch.cat([(a.logits(x).softmax(-1) - b.logits(x).softmax(-1)).abs().sum(-1) / 2 for x in spans])


def _check_maps(a: AttentionMap, b: AttentionMap, same_heads: bool) -> None:
    if a.is_signed or b.is_signed:
        raise ValueError("the maps may have negative weights, which have no Jensen–Shannon divergence")
    sizes = [(one.shape[0], *((one.shape[1],) if same_heads else ()), *one.shape[2:]) for one in (a, b)]
    if sizes[0] != sizes[1]:
        names = "batch, heads, rows and columns" if same_heads else "batch, rows and columns"
        raise ValueError(f"the maps differ in {names}: {sizes[0]} and {sizes[1]}; both must be of the same tokens")


def _bits_per_row(nats: Tensor, a: AttentionMap, b: AttentionMap) -> Tensor:
    """The mean over the rows that have keys in both maps; a row without keys is not a distribution."""
    has_keys = (a.lse()[:, 0] != math.inf).cpu() & (b.lse()[:, 0] != math.inf).cpu()
    return (nats / (max(int(has_keys.sum()), 1) * math.log(2))).clamp(0, 1).float()


def _blocks(a: AttentionMap, b: AttentionMap) -> Iterator[tuple[Tensor, Tensor]]:
    """The blocks (B, H, R, C) of both maps, in pairs."""
    n_batch, _, n_queries, n_keys = a.shape
    pairs = n_batch * max(a.shape[1], b.shape[1])
    width = min(n_keys, max(_BLOCK_SIDE, _WEIGHTS_AT_ONCE // (pairs * _BLOCK_SIDE)))
    height = max(1, _WEIGHTS_AT_ONCE // (pairs * width))
    for rows in split_span(slice(0, n_queries), height):
        for cols in split_span(slice(0, n_keys), width):
            p, q = a.tile(rows, cols), b.tile(rows, cols).to(a.device)
            yield p, q.to(p.dtype)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """The sum of a block's terms ½ (p log p + q log q) - m log m in nats, for each head."""
    m = (p + q) / 2
    terms = (torch.xlogy(p, p) + torch.xlogy(q, q)) / 2 - torch.xlogy(m, m)
    return terms.sum((0, 2, 3)).double().cpu()
