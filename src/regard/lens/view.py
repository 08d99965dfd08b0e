"""A merged view: sub-words to words, bytes to characters, special tokens out of sight, over the same exact weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..attention.attention_map import Pick, as_span
from ..attention.frame import ALL
from .labels import Label, joined

if TYPE_CHECKING:
    from .look import Look


_MOST_AT_ONCE = 1 << 22  # weights held at a time by what goes over all of them


class Looks(NamedTuple):
    """Where one token looks: ``print(looks)`` says it in words."""

    row: Label
    at: list[tuple[Label, float]]

    def __str__(self) -> str:
        there = ", ".join(f"{label.text!r} {weight:.3f}" for label, weight in self.at) or "nothing"
        return f"{self.row.text!r} looks at {there}"


class View:
    """Rows and columns of a look, some of them joined: a word looks as its tokens do on average, and is looked at
    as much as all of them together.
    """

    def __init__(self, look: Look, kind: str, words: bool, specials: bool) -> None:
        self.look, self.kind = look, kind
        self.rows = joined(look.rows(kind), words, specials)
        self.cols = joined(look.cols(kind), words, specials)
        self._hidden = _gaps(self.cols, len(look.cols(kind)))
        self._plain = False

    @classmethod
    def plain(cls, look: Look, kind: str) -> View:
        """Every token for itself."""
        made = cls.__new__(cls)
        made.look, made.kind, made.rows, made.cols = look, kind, look.rows(kind), look.cols(kind)
        made._hidden, made._plain = [], True
        return made

    def weights(self, layer: int, head: int | None = None, rows: Pick = ALL, cols: Pick = ALL) -> Tensor:
        """The weights (R, C) of some words on some words. Of a row that sees hidden columns alone nothing is left."""
        if self._plain:
            return self.look.weights(layer, head, rows, cols, self.kind)
        picked_rows, picked_cols = _picked(self.rows, rows, "rows"), _picked(self.cols, cols, "cols")
        if not picked_rows or not picked_cols:
            return self.look.weights(layer, head, 0, 0, self.kind).new_zeros(len(picked_rows), len(picked_cols))
        row_tokens, row_of = _spread(picked_rows)
        col_tokens, col_of = _spread(picked_cols)
        found = self.look.weights(layer, head, row_tokens, col_tokens, self.kind)
        summed = found.new_zeros(len(found), len(picked_cols)).index_add_(1, col_of.to(found.device), found)
        out = self._averaged(summed, row_of)
        if not self._hidden:
            return out
        lost = self.look.weights(layer, head, row_tokens, self._hidden, self.kind).sum(1, keepdim=True)
        left = 1 - self._averaged(lost, row_of)
        # What is left after 1 - 1 is rounding, not attention.
        return torch.where(left > 1e-6, out / left.clamp(min=1e-6), 0.0)

    def pooled(self, layer: int, head: int | None = None, h: int = 64, w: int = 64, reduce: str = "mean") -> Tensor:
        """An overview (h, w), or as many as there are rows or columns: as ``Look.pooled``, of what is shown here."""
        if self._plain:
            return self.look.pooled(self.kind, layer, head, h, w, reduce)
        h, w = min(h, len(self.rows)), min(w, len(self.cols))
        how = {"mean": "mean", "max": "amax"}[reduce]
        block_of = torch.cat([torch.full((len(part),), n) for n, part in enumerate(_cut(len(self.cols), w))])
        size, found = max(1, _MOST_AT_ONCE // len(self.cols)), []
        for rows in _cut(len(self.rows), h):
            parts = []
            for part in rows.split(size):
                weights = self.weights(layer, head, part)
                there = block_of.to(weights.device).expand(weights.shape)
                parts.append(weights.new_zeros(len(part), w).scatter_reduce(1, there, weights, how, include_self=False))
            block = torch.cat(parts)
            found.append(block.mean(0) if reduce == "mean" else block.amax(0))
        return torch.stack(found)

    def overviews(self, layer: int, h: int, w: int) -> Tensor:
        """Every head of a layer, small: (H, h, w)."""
        if self._plain:
            found = self.look.map(self.kind, layer)
            return found.pooled(min(h, found.shape[2]), min(w, found.shape[3]))[0]
        return torch.stack([self.pooled(layer, head, h, w) for head in range(self.look.heads(self.kind))])

    def top(self, k: int = 3, layer: int = -1, head: int | None = None, rows: Pick = ALL) -> list[Looks]:
        """For each row the k labels it looks at most, with their weights; fewer where fewer are seen."""
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        span = as_span(rows, len(self.rows), "rows", torch.device("cpu"))
        picked = list(range(span.start, span.stop)) if isinstance(span, slice) else span.tolist()
        size = max(1, _MOST_AT_ONCE // max(1, len(self.cols)))
        answer: list[Looks] = []
        for start in range(0, len(picked), size):
            part = picked[start : start + size]
            best = self.weights(layer, head, part).topk(min(k, len(self.cols)))
            for row, values, where in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
                at = [(self.cols[j], weight) for j, weight in zip(where, values, strict=True) if weight > 0]
                answer.append(Looks(self.rows[row], at))
        return answer

    def _averaged(self, x: Tensor, row_of: Tensor) -> Tensor:
        row_of = row_of.to(x.device)
        counts = row_of.bincount().to(x.dtype)
        return x.new_zeros(len(counts), x.shape[1]).index_add_(0, row_of, x) / counts[:, None]


def _cut(total: int, n: int) -> tuple[Tensor, ...]:
    """The numbers below ``total`` in n parts: the first are one longer where they cannot be alike."""
    return torch.arange(total).tensor_split(n)


def _picked(labels: list[Label], pick: Pick, name: str) -> list[Label]:
    span = as_span(pick, len(labels), name, torch.device("cpu"))
    return labels[span] if isinstance(span, slice) else [labels[n] for n in span.tolist()]


def _spread(labels: Sequence[Label]) -> tuple[list[int], Tensor]:
    """The tokens of some labels, and for each of them which label it belongs to."""
    tokens = [token for label in labels for token in range(*label.span)]
    return tokens, torch.tensor([n for n, label in enumerate(labels) for _ in range(*label.span)])


def _gaps(labels: Sequence[Label], total: int) -> list[int]:
    """Tokens that no label stands for."""
    there = {token for label in labels for token in range(*label.span)}
    return [token for token in range(total) if token not in there]
