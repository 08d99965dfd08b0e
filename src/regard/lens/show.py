"""What is shown by terminal, picture and table alike: the weights of a view, or where they are too many, means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.frame import ALL
from .labels import Label
from .view import View

if TYPE_CHECKING:
    from rich.console import Console

    from .look import Look

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, eq=False)
class Sheet:
    """A matrix to be drawn. ``pooled`` says that a cell is the mean of several weights."""

    values: Tensor  # (R, C), on the CPU
    rows: list[Label]
    cols: list[Label]
    title: str
    pooled: bool = False

    @property
    def crowded(self) -> bool:
        """Whether there are too many cells to read one by one."""
        return max(self.values.shape) > 48

    @property
    def top(self) -> float:
        """The weight that gets the full colour: the largest, or of many that which all but a few stay below.

        The first rows of a long text look at few tokens, and would leave all others in the dark.
        """
        seen = self.values[self.values > 0]
        if not len(seen):
            return 1.0
        return float(seen.sort().values[int(0.995 * (len(seen) - 1))] if self.crowded else seen.max())

    def scale(self) -> Callable[[float], float]:
        """How much of the full colour a weight gets; of many by its root, so that small ones can be told apart."""
        top, power = self.top, 0.5 if self.crowded else 1.0
        return lambda value: min(1.0, value / top) ** power


@dataclass(frozen=True)
class Chosen:
    """One head of one layer, seen in one way."""

    look: Look
    layer: int
    head: int | None
    kind: str
    view: View
    rows: slice
    cols: slice

    @property
    def title(self) -> str:
        head = "mean of heads" if self.head is None else f"head {self.head}"
        return f"{self.kind} attention, layer {self.layer}, {head}"

    @property
    def row_labels(self) -> list[Label]:
        return self.view.rows[self.rows]

    @property
    def col_labels(self) -> list[Label]:
        return self.view.cols[self.cols]

    def sheet(self, most_rows: int, most_cols: int) -> Sheet:
        """All of it, or an overview with no more rows and columns than these."""
        rows, cols = self.row_labels, self.col_labels
        if not rows or not cols:
            raise ValueError("nothing is left to show: every row or column is a special token, or none was chosen")
        h, w = min(len(rows), most_rows), min(len(cols), most_cols)
        if (h, w) == (len(rows), len(cols)):
            values = torch.cat([part for _, part in self.portions()])
            return Sheet(values.float().cpu(), rows, cols, self.title)
        if self.view._plain and (len(rows), len(cols)) == self.look.map(self.kind, self.layer).shape[2:]:
            values = self.look.pooled(self.kind, self.layer, self.head, h, w)
        else:
            values = self._means(h, w)
        return Sheet(values.float().cpu(), _counted(self.rows, rows, h), _counted(self.cols, cols, w), self.title, True)

    def portions(self, most: int = 1 << 21) -> Iterator[tuple[int, Tensor]]:
        """The weights some rows at a time, with the number of the first."""
        span = range(len(self.view.rows))[self.rows]
        size = max(1, most // max(1, len(self.col_labels)))
        for n in range(0, len(span), size):
            part = span[n : n + size]
            yield n, self.view.weights(self.layer, self.head, slice(part.start, part.stop), self.cols)

    def _means(self, h: int, w: int) -> Tensor:
        """The overview of a merged view, or of a part."""
        n_rows = len(self.row_labels)
        sums, counts = torch.zeros(h, w), torch.zeros(h, 1)
        # Rows as ``tensor_split`` deals them out, the larger cells first.
        size, larger = divmod(n_rows, h)
        cell_of = torch.arange(h).repeat_interleave(torch.tensor([size + (n < larger) for n in range(h)]))
        for start, part in self.portions():
            means = F.adaptive_avg_pool1d(part.float().cpu()[None], w)[0]
            cells = cell_of[start : start + len(part)]
            sums.index_add_(0, cells, means)
            counts.index_add_(0, cells, torch.ones(len(part), 1))
        return sums / counts


def chosen(
    look: Look,
    layer: int = -1,
    head: int | None = None,
    kind: str | None = None,
    words: bool = False,
    specials: bool = True,
    rows: slice = ALL,
    cols: slice = ALL,
) -> Chosen:
    """What was asked for, checked."""
    for name, span in (("rows", rows), ("cols", cols)):
        if span.step not in (None, 1):
            raise ValueError(f"{name}={span} must be neighbours: a slice with step 1")
    kind = look._kind(kind)
    layer = look._layer(kind, layer)
    head = None if head is None else look._head(kind, head)
    view = look.merged(kind, words=words, specials=specials) if words or not specials else View.plain(look, kind)
    return Chosen(look, layer, head, kind, view, rows, cols)


def to_terminal(what: Chosen, console: Console | None) -> None:
    from . import terminal

    terminal.draw(what, console)


def to_picture(what: Chosen, file: Path, title: str | None) -> Path:
    """PNG, SVG or PDF."""
    check_picture(file)
    from . import heatmap

    heatmap.draw(what, file, title)
    return file


def to_table(what: Chosen, file: Path) -> Path:
    from . import table

    table.write(what, file)
    return file


def check_picture(file: Path) -> None:
    if file.suffix.lower() not in PICTURES:
        raise ValueError(f"{file} ends in {file.suffix or 'nothing'!r}; a picture ends in {', '.join(PICTURES)}")


def _counted(span: slice, labels: list[Label], count: int) -> list[Label]:
    """Cells of an overview are called by the number of the first in them: one token of many would say nothing."""
    if count == len(labels):
        return labels
    size, larger = divmod(len(labels), count)
    first = labels[0].span[0] if span == ALL else (span.start or 0)
    return [Label(f"{first + n * size + min(n, larger):,}") for n in range(count)]
