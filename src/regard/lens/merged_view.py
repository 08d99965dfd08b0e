"""A merged view of a look: sub-words joined to words, bytes to characters, special tokens hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..attention.attention_map import Pick, as_span
from ..attention.frame import ALL
from ..foundation.checks import check_positive
from ..foundation.language import localise
from .labels import Label, join_labels

if TYPE_CHECKING:
    from .look import Look

WEIGHTS_AT_ONCE = 1 << 22  # weights in memory at a time when a whole map is traversed


class Looks(NamedTuple):
    """The keys that one row attends to most; ``print(looks)`` writes a sentence."""

    row: Label
    at: list[tuple[Label, float]]

    def __str__(self) -> str:
        targets = ", ".join(f"{label.text!r} {weight:.3f}" for label, weight in self.at) or "nothing"
        return f"{self.row.text!r} {localise('looks at')} {targets}"


class MergedView:
    """A look with some rows and columns joined: rows of joined tokens are averaged, columns summed.

    plain  join nothing: every token is a row and a column of its own
    """

    def __init__(self, look: Look, kind: str, words: bool = False, specials: bool = True, plain: bool = False) -> None:
        self.look, self.kind, self.is_plain = look, kind, plain
        self.rows, self.cols = look.rows(kind=kind), look.cols(kind=kind)
        self._hidden: list[int] = []
        if not plain:
            n_tokens = len(self.cols)
            self.rows, self.cols = join_labels(self.rows, words, specials), join_labels(self.cols, words, specials)
            present = {token for label in self.cols for token in range(*label.span)}
            self._hidden = [token for token in range(n_tokens) if token not in present]

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of layers, heads, rows and columns."""
        sizes = {"layers": self.look.layers(kind=self.kind), "heads": self.look.heads(kind=self.kind)}
        return {**sizes, "n_rows": len(self.rows), "n_cols": len(self.cols)}

    @property
    def facts(self) -> dict[str, int | bool]:
        """The sizes, and whether a row adds up to 1, for a page."""
        return {**self.sizes, "normalised": self.look.map(kind=self.kind, layer=0).is_normalised}

    def weights(self, *, layer: int = -1, head: int | None = None, rows: Pick = ALL, cols: Pick = ALL) -> Tensor:
        """The weights (R, C) of merged rows and columns; 0 in a row that attends to hidden columns only.

        Where columns are hidden, the others are scaled up to the sum of the whole row; weights that may be negative are
        not.
        """
        if self.is_plain:
            return self._token_weights(layer, head, rows, cols)
        picked_rows, picked_cols = _pick_labels(self.rows, rows, "rows"), _pick_labels(self.cols, cols, "cols")
        if not picked_rows or not picked_cols:
            return self._token_weights(layer, head, 0, 0).new_zeros(len(picked_rows), len(picked_cols))
        row_tokens, row_of = _token_owners(picked_rows)
        col_tokens, col_of = _token_owners(picked_cols)
        tile = self._token_weights(layer, head, row_tokens, col_tokens)
        summed = tile.new_zeros(len(tile), len(picked_cols)).index_add_(1, col_of.to(tile.device), tile)
        out = _average_rows(summed, row_of)
        attention = self.look.map(layer=layer, kind=self.kind)
        if not self._hidden or attention.is_signed:
            return out
        hidden = _average_rows(self._token_weights(layer, head, row_tokens, self._hidden).sum(1, keepdim=True), row_of)
        total = torch.ones_like(hidden)
        if not attention.is_normalised:
            total = _average_rows(self._token_weights(layer, head, row_tokens, ALL).sum(1, keepdim=True), row_of)
        left = total - hidden
        return torch.where(left > 1e-6, out * total / left.clamp(min=1e-6), 0.0)  # 1e-6: the rounding error of 1 - 1

    def _token_weights(self, layer: int, head: int | None, rows: Pick, cols: Pick) -> Tensor:
        return self.look.weights(layer=layer, head=head, kind=self.kind, rows=rows, cols=cols)

    def pooled(
        self,
        *,
        layer: int = -1,
        head: int | None = None,
        h: int = 64,
        w: int = 64,
        reduce: str = "mean",
        rows: slice = ALL,
        cols: slice = ALL,
    ) -> Tensor:
        """An overview of at most (h, w) cells, as ``Look.pooled``, of the merged rows and columns or slices of them."""
        if self.is_plain and rows == cols == ALL:
            return self.look.pooled(layer=layer, head=head, kind=self.kind, h=h, w=w, reduce=reduce)
        row_numbers, n_cols = torch.arange(len(self.rows))[rows], len(self.cols[cols])
        h, w = min(h, len(row_numbers)), min(w, n_cols)
        if reduce not in ("mean", "max"):
            raise ValueError(f"reduce={reduce!r} is neither 'mean' nor 'max'")
        col_cells = torch.arange(n_cols).tensor_split(w)
        cell_of = torch.cat([torch.full((len(cell),), n) for n, cell in enumerate(col_cells)])
        size, cells, how = max(1, WEIGHTS_AT_ONCE // n_cols), [], "mean" if reduce == "mean" else "amax"
        for row_cell in row_numbers.tensor_split(h):
            parts = []
            for part in row_cell.split(size):
                weights = self.weights(layer=layer, head=head, rows=part, cols=cols)
                index = cell_of.to(weights.device).expand(weights.shape)
                zeros = weights.new_zeros(len(part), w)
                parts.append(zeros.scatter_reduce(1, index, weights, how, include_self=False))
            block = torch.cat(parts)
            cells.append(block.mean(0) if reduce == "mean" else block.amax(0))
        return torch.stack(cells)

    def overviews(self, *, layer: int, h: int, w: int) -> Tensor:
        """Overviews of every head of a layer, (H, h, w)."""
        if self.is_plain:
            attention = self.look.map(layer=layer, kind=self.kind)
            return attention.pooled(min(h, attention.shape[2]), min(w, attention.shape[3]))[0]
        heads = range(self.look.heads(kind=self.kind))
        return torch.stack([self.pooled(layer=layer, head=head, h=h, w=w) for head in heads])

    def top(self, k: int = 3, *, layer: int = -1, head: int | None = None, rows: Pick = ALL) -> list[Looks]:
        """For each row, the k labels of the largest weights; fewer if it attends to fewer."""
        check_positive(k=k)
        span = as_span(rows, len(self.rows), "rows", torch.device("cpu"))
        picked = list(range(span.start, span.stop)) if isinstance(span, slice) else span.tolist()
        size = max(1, WEIGHTS_AT_ONCE // max(1, len(self.cols)))
        out: list[Looks] = []
        for start in range(0, len(picked), size):
            part = picked[start : start + size]
            best = self.weights(layer=layer, head=head, rows=part).topk(min(k, len(self.cols)))
            for row, values, indices in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
                at = [(self.cols[j], weight) for j, weight in zip(indices, values, strict=True) if weight > 0]
                out.append(Looks(self.rows[row], at))
        return out


def _average_rows(x: Tensor, row_of: Tensor) -> Tensor:
    """Rows of x (tokens, C) averaged over the tokens of each label, (labels, C)."""
    row_of = row_of.to(x.device)
    counts = row_of.bincount().to(x.dtype)
    return x.new_zeros(len(counts), x.shape[1]).index_add_(0, row_of, x) / counts[:, None]


def _pick_labels(labels: list[Label], pick: Pick, name: str) -> list[Label]:
    span = as_span(pick, len(labels), name, torch.device("cpu"))
    return labels[span] if isinstance(span, slice) else [labels[n] for n in span.tolist()]


def _token_owners(labels: Sequence[Label]) -> tuple[list[int], Tensor]:
    tokens = [token for label in labels for token in range(*label.span)]
    return tokens, torch.tensor([n for n, label in enumerate(labels) for _ in range(*label.span)])
