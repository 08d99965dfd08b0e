"""What heads do, as numbers: how much of a head's attention goes to the token before, to the first, to what follows an
earlier occurrence of the same token … (Clark et al. 2019; Voita et al. 2019; Olsson et al. 2022).

A pattern is a set of (query, key) pairs, and its score the weight on them, Σ_j∈pattern(i) A_ij, averaged over the
queries that could follow it. All scores of all heads come from one walk over the blocks of the map: a block of weights
times the indicators of its pairs is one matrix product. The matrix itself is never formed.
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

_NEAR = 2.0  # tokens away that still are "local"
_NEAR_IN_IMAGE = 1.5  # the eight patches around
NAMES = {
    "previous": "previous token",
    "current": "itself",
    "next": "next token",
    "first": "first token",
    "last": "last token",
    "delimiter": "delimiters",
    "repeated": "same token before",
    "induction": "what followed it before",
}
"""Patterns that a head can be called after; in cross-attention ``current`` is the diagonal."""


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """Scores of heads, each (L, H); NaN where there is nothing the pattern could be about."""

    kind: str
    previous: Tensor  # weight on the key right before the query
    # weight on the query's own place: on the diagonal, stretched where there are more keys than queries
    current: Tensor
    next: Tensor  # weight on the key right behind the query
    local: Tensor  # weight at most 2 tokens away; in an image on the patch and the eight around it
    first: Tensor
    last: Tensor
    delimiter: Tensor  # weight on special tokens and punctuation
    repeated: Tensor  # weight on earlier occurrences of the query's token
    induction: Tensor  # weight on what followed earlier occurrences of the query's token
    entropy: Tensor  # mean over queries, in nats: 0 looks at one key, log n at n alike
    distance: Tensor  # how far away the keys are on average, in tokens, or in patches across an image

    @property
    def scores(self) -> dict[str, Tensor]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}

    def label(self, layer: int, head: int, least: float = 0.4) -> str:
        """The pattern this head follows most, if it puts at least this weight there."""
        values = {name: float(getattr(self, name)[layer, head]) for name in NAMES}
        best = max(values, key=lambda name: -1.0 if math.isnan(values[name]) else values[name])
        if not values[best] >= least:
            return "mixed"
        return "diagonal" if self.kind == "cross" and best == "current" else NAMES[best]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: lists of layers of heads, None for NaN."""
        found: dict[str, Any] = {name: _plain(x) for name, x in self.scores.items()}
        layers, heads = self.entropy.shape
        labels = [[self.label(layer, head) for head in range(heads)] for layer in range(layers)]
        return {"kind": self.kind, **found, "labels": labels}


def _plain(x: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in layer] for layer in x.tolist()]


def patterns(look: Look, *, kind: str | None = None, layers: Sequence[int] | None = None) -> HeadPatterns:
    """The pattern scores of all heads of one kind, of all layers or of some."""
    kind = look._kind(kind)
    rows, cols = look.rows(kind=kind), look.cols(kind=kind)
    square = kind != "cross" and len(rows) == len(cols)
    pairs = Pairs(
        len(rows),
        len(cols),
        tokens=_tokens(rows) if square else None,
        delimiters=torch.tensor([is_delimiter(label) for label in cols]),
        places=look._coordinates(kind) if square else None,
    )
    chosen = range(look.layers(kind=kind)) if layers is None else layers
    found = [map_patterns(look.map(kind=kind, layer=layer), pairs) for layer in chosen]
    return HeadPatterns(kind, **{name: torch.stack([one[name] for one in found]) for name in found[0]})


def _tokens(labels: Sequence[Label]) -> Tensor | None:
    ids = [label.token_id for label in labels]
    return None if None in ids else torch.tensor(ids)


def is_delimiter(label: Label) -> bool:
    """Whether a label only separates: a special token, or punctuation and nothing else."""
    return label.special or (
        label.box is None and bool(label.text) and all(unicodedata.category(letter)[0] in "PZ" for letter in label.text)
    )


class Pairs:
    """Which (query, key) pairs belong to which pattern, block by block.

    tokens  ids of the text that looks at itself; None where two texts, or patches, do
    places  (T, 1), or (T, 2) in an image: where queries and keys stand; None where they stand in different texts
    """

    def __init__(
        self,
        n_queries: int,
        n_keys: int,
        *,
        tokens: Tensor | None = None,
        delimiters: Tensor | None = None,
        places: Tensor | None = None,
    ) -> None:
        self.n_queries, self.n_keys = n_queries, n_keys
        self.tokens, self.places = tokens, places
        self.delimiters = torch.zeros(n_keys, dtype=torch.bool) if delimiters is None else delimiters
        self.names = ["current", "first", "last", *(["delimiter"] if self.delimiters.any() else [])]
        self.names += ["previous", "next", "local", "distance"] if places is not None else []
        self.names += ["repeated", "induction"] if tokens is not None else []

    def of(self, rows: slice, cols: slice) -> Tensor:
        """Indicators (patterns, R, C), 1 where a pair belongs to it; of "distance" the distance."""
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        found = {
            "current": j == (i if self.places is not None else self._diagonal(i)),
            "first": (j == 0).expand(len(i), -1),
            "last": (j == self.n_keys - 1).expand(len(i), -1),
            "delimiter": self.delimiters[None, cols].expand(len(i), -1),
        }
        if self.places is not None:
            far = torch.cdist(self.places[rows], self.places[cols])
            near = far <= (_NEAR_IN_IMAGE if self.places.shape[1] == 2 else _NEAR)
            found |= {"previous": j == i - 1, "next": j == i + 1, "local": near, "distance": far.nan_to_num(0.0)}
        if self.tokens is not None:
            here, before = self.tokens[rows, None], self.tokens.roll(1)[None, cols]  # before key j stands token j - 1
            found["repeated"] = (here == self.tokens[None, cols]) & (j < i)
            found["induction"] = (here == before) & (j >= 1) & (j < i)
        return torch.stack([found[name].to(torch.float32) for name in self.names])

    def _diagonal(self, i: Tensor) -> Tensor:
        return (i * (self.n_keys - 1) / max(self.n_queries - 1, 1)).round().long()

    def could(self, name: str) -> Tensor:
        """Which queries have a key that belongs to the pattern, (T,)."""
        i = torch.arange(self.n_queries)
        if name == "previous":
            return i >= 1
        if name == "next":
            return i < self.n_queries - 1
        if name in ("repeated", "induction"):
            assert self.tokens is not None
            first: dict[int, int] = {}
            places = [(n, first.setdefault(token, n)) for n, token in enumerate(self.tokens.tolist())]
            gap = 1 if name == "repeated" else 2  # the token after must stand before the query too
            return torch.tensor([n - start >= gap for n, start in places])
        return torch.ones(self.n_queries, dtype=torch.bool)


def map_patterns(found: AttentionMap, pairs: Pairs) -> dict[str, Tensor]:
    """The scores of one map's heads, each (H,), by the names of ``HeadPatterns``. Of a batch, the mean of its rows."""
    n_batch, n_heads, n_queries, n_keys = found.shape
    if (n_queries, n_keys) != (pairs.n_queries, pairs.n_keys):
        sizes = f"{pairs.n_queries} queries and {pairs.n_keys} keys, the map {n_queries} and {n_keys}"
        raise ValueError(f"pairs are of {sizes}")
    sums = torch.zeros(len(pairs.names), n_heads, dtype=torch.float64)
    entropy = torch.zeros(n_heads, dtype=torch.float64)
    eligible = torch.stack([pairs.could(name) for name in pairs.names])
    for rows, cols, weights in found.blocks():
        here = pairs.of(rows, cols) * eligible[:, rows, None]
        flat = weights.transpose(0, 1).reshape(n_heads * n_batch, -1)
        part = flat @ here.flatten(1).T.to(flat)  # (H · B, patterns)
        sums += part.unflatten(0, (n_heads, n_batch)).sum(1).T.double().cpu()
        entropy -= p_log_p(weights).sum((0, 2, 3)).double().cpu()
    seen = (found.lse() != math.inf)[:, 0].cpu()  # a row without keys follows no pattern
    answer = {field.name: torch.full((n_heads,), math.nan) for field in fields(HeadPatterns) if field.name != "kind"}
    for n, name in enumerate(pairs.names):
        count = int((eligible[n] & seen).sum())
        if count:
            answer[name] = (sums[n] / count).float()
    if seen.any():
        answer["entropy"] = (entropy / int(seen.sum())).float()
    return answer
