"""Pattern scores of heads: the share of attention on the previous token, the first token, the token after an earlier
occurrence of the same token … (Clark et al. 2019; Voita et al. 2019; Olsson et al. 2022).

A pattern is a set of (query, key) pairs. Its score is the weight on them, Σ_j∈pattern(i) A_ij, averaged over the
queries that have such a key. All scores of all heads are computed in one pass over the blocks of the map, each
multiplied by the 0/1 indicators of its pairs. The matrix itself is never materialised.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..attention.score_matrix import p_log_p
from .labels import Label

if TYPE_CHECKING:
    from .look import Look

_LOCAL_TOKENS = 2.0  # the largest distance that is "local"
_LOCAL_PATCHES = 1.5  # includes the eight neighbours of a patch
NAMES = {  # the patterns of ``HeadPatterns.label``; in cross-attention ``current`` is the diagonal
    "previous": "previous token",
    "current": "itself",
    "next": "next token",
    "first": "first token",
    "last": "last token",
    "delimiter": "delimiters",
    "repeated": "same token before",
    "induction": "what followed it before",
}


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """Scores of heads, each (L, H); NaN where no query has a key of the pattern."""

    kind: str
    previous: Tensor  # weight on the key right before the query
    current: Tensor  # weight on the query itself; in cross-attention on the diagonal of the T × S rectangle
    next: Tensor  # weight on the key right after the query
    local: Tensor  # weight on keys at most 2 tokens away; in an image on the patch and its eight neighbours
    first: Tensor  # weight on the first key
    last: Tensor  # weight on the last key
    delimiter: Tensor  # weight on special tokens and punctuation
    repeated: Tensor  # weight on earlier occurrences of the query's token
    induction: Tensor  # weight on the tokens that followed earlier occurrences of the query's token
    entropy: Tensor  # mean over queries, in nats: 0 for one key, log n for n equal weights; NaN if weights are signed
    distance: Tensor  # mean distance to the keys, in tokens, or in patches of an image

    @property
    def scores(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}

    def label(self, layer: int, head: int, least: float = 0.4) -> str:
        """The name of the pattern with the highest score, or "mixed" if that is below ``least``."""
        values = {name: float(getattr(self, name)[layer, head]) for name in NAMES}
        best = max(values, key=lambda name: -1.0 if math.isnan(values[name]) else values[name])
        if not values[best] >= least:
            return "mixed"
        return "diagonal" if self.kind == "cross" and best == "current" else NAMES[best]

    def to_dict(self) -> dict[str, Any]:
        """Scores as nested lists [layer][head], with None for NaN."""
        scores = {name: nan_to_none(x.tolist()) for name, x in self.scores.items()}
        n_layers, n_heads = self.entropy.shape
        labels = [[self.label(layer, head) for head in range(n_heads)] for layer in range(n_layers)]
        return {"kind": self.kind, **scores, "labels": labels}


def nan_to_none(values: Any) -> Any:
    """Nested lists of numbers with None for NaN, which JSON does not have."""
    if isinstance(values, list):
        return [nan_to_none(value) for value in values]
    return None if math.isnan(values) else values


def patterns(look: Look, *, kind: str | None = None, layers: Sequence[int] | None = None) -> HeadPatterns:
    """The pattern scores of all heads of one kind, in all layers or some of them."""
    kind = look._kind(kind)
    rows, cols = look.rows(kind=kind), look.cols(kind=kind)
    is_square = kind != "cross" and len(rows) == len(cols)
    ids = [label.token_id for label in rows]
    pairs = Pairs(
        len(rows),
        len(cols),
        tokens=torch.tensor(ids) if is_square and None not in ids else None,
        delimiters=torch.tensor([is_delimiter(label) for label in cols]),
        coordinates=look._coordinates(kind) if is_square else None,
    )
    layers = range(look.layers(kind=kind)) if layers is None else layers
    by_layer = [map_patterns(look.map(kind=kind, layer=layer), pairs) for layer in layers]
    return HeadPatterns(kind, **{name: torch.stack([scores[name] for scores in by_layer]) for name in by_layer[0]})


def is_delimiter(label: Label) -> bool:
    """Whether a label is a special token or consists of punctuation."""
    return label.special or (
        label.box is None and bool(label.text) and all(unicodedata.category(letter)[0] in "PZ" for letter in label.text)
    )


class Pairs:
    """Which (query, key) pairs belong to which pattern, block by block.

    tokens       (T,): ids of queries and keys in self-attention over a text
    delimiters   (S,): which keys are special tokens or punctuation
    coordinates  (T, 1), or (T, 2) in an image: positions of queries and keys; None in cross-attention
    """

    def __init__(
        self,
        n_queries: int,
        n_keys: int,
        *,
        tokens: Tensor | None = None,
        delimiters: Tensor | None = None,
        coordinates: Tensor | None = None,
    ) -> None:
        self.n_queries, self.n_keys = n_queries, n_keys
        self.tokens, self.coordinates = tokens, coordinates
        self.delimiters = torch.zeros(n_keys, dtype=torch.bool) if delimiters is None else delimiters
        self.names = ["current", "first", "last", *(["delimiter"] if self.delimiters.any() else [])]
        self.names += ["previous", "next", "local", "distance"] if coordinates is not None else []
        self.names += ["repeated", "induction"] if tokens is not None else []

    def indicators(self, rows: slice, cols: slice) -> Tensor:
        """(patterns, R, C): 1 where a pair belongs to the pattern; for "distance", the distance."""
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        diagonal = (i * (self.n_keys - 1) / max(self.n_queries - 1, 1)).round().long()
        indicators = {
            "current": j == (i if self.coordinates is not None else diagonal),
            "first": (j == 0).expand(len(i), -1),
            "last": (j == self.n_keys - 1).expand(len(i), -1),
            "delimiter": self.delimiters[None, cols].expand(len(i), -1),
        }
        if self.coordinates is not None:
            distance = torch.cdist(self.coordinates[rows], self.coordinates[cols])
            is_local = distance <= (_LOCAL_PATCHES if self.coordinates.shape[1] == 2 else _LOCAL_TOKENS)
            indicators |= {"previous": j == i - 1, "next": j == i + 1}
            indicators |= {"local": is_local, "distance": distance.nan_to_num(0.0)}
        if self.tokens is not None:
            query, before_key = self.tokens[rows, None], self.tokens.roll(1)[None, cols]
            indicators["repeated"] = (query == self.tokens[None, cols]) & (j < i)
            indicators["induction"] = (query == before_key) & (j >= 1) & (j < i)
        return torch.stack([indicators[name].to(torch.float32) for name in self.names])

    def has_key(self, name: str) -> Tensor:
        """Which queries have a key of the pattern, (T,)."""
        i = torch.arange(self.n_queries)
        if name == "previous":
            return i >= 1
        if name == "next":
            return i < self.n_queries - 1
        if name in ("repeated", "induction"):
            assert self.tokens is not None
            first: dict[int, int] = {}
            distances = [n - first.setdefault(token, n) for n, token in enumerate(self.tokens.tolist())]
            least = 1 if name == "repeated" else 2  # the token after the first occurrence must precede the query
            return torch.tensor(distances) >= least
        return torch.ones(self.n_queries, dtype=torch.bool)


def map_patterns(attention: AttentionMap, pairs: Pairs) -> dict[str, Tensor]:
    """The scores (H,) of one map's heads, by the names of ``HeadPatterns``, averaged over the batch."""
    n_batch, n_heads = attention.shape[:2]
    sums = torch.zeros(len(pairs.names), n_heads, dtype=torch.float64)
    entropy = torch.zeros(n_heads, dtype=torch.float64)
    eligible = torch.stack([pairs.has_key(name) for name in pairs.names])
    for rows, cols, weights in attention.blocks():
        indicators = pairs.indicators(rows, cols) * eligible[:, rows, None]
        flat = weights.transpose(0, 1).reshape(n_heads * n_batch, -1)
        part = flat @ indicators.flatten(1).T.to(flat)  # (H · B, patterns)
        sums += part.unflatten(0, (n_heads, n_batch)).sum(1).T.double().cpu()
        entropy -= p_log_p(weights).sum((0, 2, 3)).double().cpu()
    sees_keys = (attention.lse() != math.inf)[:, 0].cpu()  # a row without keys has no pattern
    scores = {field.name: torch.full((n_heads,), math.nan) for field in fields(HeadPatterns) if field.name != "kind"}
    for n, name in enumerate(pairs.names):
        count = int((eligible[n] & sees_keys).sum())
        if count:
            scores[name] = (sums[n] / count).float()
    if sees_keys.any() and not attention.is_signed:
        scores["entropy"] = (entropy / int(sees_keys.sum())).float()
    return scores
