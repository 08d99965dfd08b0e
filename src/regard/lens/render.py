"""The weights of one head as a matrix to draw (pooled if too large), as CSV, and as a heat map in the terminal."""

from __future__ import annotations

import csv
import io
import itertools
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from ..attention.frame import ALL
from ..foundation.files import atomic_file
from ..foundation.language import localise
from .labels import Label
from .merged_view import MergedView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from .look import Look


@dataclass(frozen=True, eq=False)
class Sheet:
    """A matrix to draw."""

    values: Tensor  # (R, C), on the CPU
    rows: list[Label]
    cols: list[Label]
    title: str
    pooled: bool = False  # whether a cell is the mean of several weights

    @property
    def crowded(self) -> bool:
        """Whether the cells are too many to read individually."""
        return max(self.values.shape) > 48

    @property
    def top(self) -> float:
        """The weight drawn in full colour: the maximum, or in a crowded sheet the 99.5th percentile.

        The first rows of a long text have large weights on few tokens; against those, all others would look empty.
        """
        weights = self.values[self.values > 0]
        if not len(weights):
            return 1.0
        return float(weights.sort().values[int(0.995 * (len(weights) - 1))] if self.crowded else weights.max())

    def scale(self) -> Callable[[float], float]:
        """A function from a weight to its colour, 0 … 1; on a square-root scale in a crowded sheet."""
        top, power = self.top, 0.5 if self.crowded else 1.0
        return lambda value: min(1.0, value / top) ** power


@dataclass(frozen=True)
class HeadSelection:
    """One head of one layer, with the rows and columns to show."""

    view: MergedView
    layer: int
    head: int | None
    rows: slice
    cols: slice

    @property
    def title(self) -> str:
        """A title with layers and heads counted from 1."""
        kind, head = self.view.kind, "mean of heads"
        if self.head is not None:
            head = f"head {self.head + 1} of {self.view.look.heads(kind=kind)}"
        return f"{kind} attention, layer {self.layer + 1} of {self.view.look.layers(kind=kind)}, {head}"

    @property
    def row_labels(self) -> list[Label]:
        return self.view.rows[self.rows]

    @property
    def col_labels(self) -> list[Label]:
        return self.view.cols[self.cols]

    def sheet(self, max_rows: int, max_cols: int) -> Sheet:
        """All weights, or an overview of at most this many rows and columns."""
        rows, cols = self.row_labels, self.col_labels
        if not rows or not cols:
            raise ValueError("nothing is left to show: all rows or all columns are special tokens, or none is selected")
        h, w = min(len(rows), max_rows), min(len(cols), max_cols)
        if (h, w) == (len(rows), len(cols)):
            return Sheet(torch.cat(list(self.portions())).float().cpu(), rows, cols, self.title)
        values = self.view.pooled(layer=self.layer, head=self.head, h=h, w=w, rows=self.rows, cols=self.cols)
        rows, cols = _cell_labels(rows, h), _cell_labels(cols, w)
        return Sheet(values.float().cpu(), rows, cols, self.title, True)

    def portions(self, max_weights: int = 1 << 21) -> Iterator[Tensor]:
        """The weights in chunks of rows, each of at most ``max_weights`` or one row."""
        numbers = torch.arange(len(self.view.rows))[self.rows]
        for rows in numbers.split(max(1, max_weights // max(1, len(self.col_labels)))) if len(numbers) else ():
            yield self.view.weights(layer=self.layer, head=self.head, rows=rows, cols=self.cols)


class HeadOptions(TypedDict, total=False):
    """The keyword arguments of ``select_head``."""

    layer: int  # default -1, the last; negative values count from the end
    head: int | None  # default None: the mean of all heads
    kind: str | None
    words: bool  # join sub-words to words
    specials: bool  # show special tokens (default True)
    rows: slice
    cols: slice


def select_head(
    look: Look,
    layer: int = -1,
    head: int | None = None,
    kind: str | None = None,
    words: bool = False,
    specials: bool = True,
    rows: slice = ALL,
    cols: slice = ALL,
) -> HeadSelection:
    """Check the arguments and resolve negative indices."""
    for name, span in (("rows", rows), ("cols", cols)):
        if span.step not in (None, 1):
            raise ValueError(f"{name}={span} must be contiguous: a slice with step 1")
    kind = look._kind(kind)
    layer, head = look._layer(kind, layer), None if head is None else look._head(kind, head)
    view = MergedView(look, kind, words, specials, plain=specials and not words)
    return HeadSelection(view, layer, head, rows, cols)


def _cell_labels(labels: list[Label], count: int) -> list[Label]:
    """Labels of an overview: the number of each cell's first token."""
    if count == len(labels):
        return labels
    size, larger = divmod(len(labels), count)  # the first cells are one larger
    return [Label(f"{labels[n * size + min(n, larger)].span[0]:,}") for n in range(count)]


HEADER = ("kind", "layer", "head", "row", "row_text", "col", "col_text", "weight")


def write_csv(selection: HeadSelection, file: Path) -> Path:
    """Write the weights with nine digits, enough to restore a float32; ``row`` and ``col`` index the view."""
    view, head = selection.view, "mean" if selection.head is None else selection.head
    rows, cols = list(enumerate(view.rows))[selection.rows], list(enumerate(view.cols))[selection.cols]
    weights = itertools.chain.from_iterable(part.tolist() for part in selection.portions(1 << 16))
    with atomic_file(file) as binary:
        out = io.TextIOWrapper(binary, encoding="utf-8", newline="")
        lines = csv.writer(out)
        lines.writerow(HEADER)
        for (i, row), values in zip(rows, weights, strict=True):
            for (j, col), value in zip(cols, values, strict=True):
                lines.writerow((view.kind, selection.layer, head, i, row.text, j, col.text, f"{value:.9g}"))
        out.detach()  # flushes; atomic_file syncs and closes the binary file
    return file


# matplotlib's viridis in ten steps: perceptually uniform and colour-blind safe
_COLOURS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_SHADES = " ·░▒▓█"  # for terminals without colour
_MAX_ROWS = 64
_LABEL_WIDTH, _LABEL_HEIGHT = 16, 10
_VALUE_WIDTH = 4  # minimum width of a cell that shows its weight, ".37"


def print_heatmap(selection: HeadSelection, console: Console | None = None) -> None:
    """Print a heat map that fits the width of the terminal."""
    from rich.cells import cell_len
    from rich.console import Console as RichConsole
    from rich.text import Text

    console = RichConsole() if console is None else console
    names = [f"{len(selection.view.rows):,}"]  # an overview numbers its rows
    if len(selection.row_labels) <= _MAX_ROWS:
        names = [_shorten(label.text, _LABEL_WIDTH) for label in selection.row_labels]
    margin = max((cell_len(name) for name in names), default=0) + 1
    n_columns = max(8, console.width - margin)
    sheet = selection.sheet(_MAX_ROWS, n_columns // 2)
    widest = max(cell_len(label.text) for label in sheet.cols) + 1
    width = max(2, min(n_columns // len(sheet.cols), max(_VALUE_WIDTH, min(widest, 8))))
    has_colour, scale = console.color_system is not None, sheet.scale()
    console.print(Text(localise(sheet.title), style="bold"))
    for line in _header(sheet.cols, width, widest):
        console.print(Text(" " * margin + line), no_wrap=True, overflow="crop")
    for label, values in zip(sheet.rows, sheet.values.tolist(), strict=True):
        name = _shorten(label.text, _LABEL_WIDTH)
        row = Text(" " * (margin - 1 - cell_len(name)) + name + " ")
        for value in values:
            _append_cell(row, value, scale(value), width, has_colour)
        console.print(row, no_wrap=True, overflow="crop")
    console.print(_legend(sheet, margin, has_colour), no_wrap=True, overflow="crop")
    if sheet.pooled:
        note = localise("each block is the mean of several weights")
        console.print(Text(" " * margin + note, style="italic"))


def _append_cell(line: Text, value: float, share: float, width: int, has_colour: bool) -> None:
    """Append one cell; a weight of 0 (masked) gets no colour."""
    style = ""
    text = (weight_text(value) if width >= _VALUE_WIDTH and value > 0 else "").center(width)
    if has_colour and value != 0:
        red, green, blue = colour_of(share)
        is_bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 120
        style = f"{'#101010' if is_bright else '#f0f0f0'} on rgb({red},{green},{blue})"
    elif value != 0 and width < _VALUE_WIDTH:
        text = _SHADES[1 + min(len(_SHADES) - 2, int(share * (len(_SHADES) - 1)))] * width
    line.append(text, style)


def colour_of(share: float) -> tuple[int, int, int]:
    """The colour (red, green, blue) of a value 0 … 1."""
    position = min(1.0, max(0.0, share)) * (len(_COLOURS) - 1)
    low = min(int(position), len(_COLOURS) - 2)
    a, b = (bytes.fromhex(_COLOURS[n]) for n in (low, low + 1))
    red, green, blue = (round(x + (y - x) * (position - low)) for x, y in zip(a, b, strict=True))
    return red, green, blue


def weight_text(value: float) -> str:
    """A weight in three characters: .37, 1.0, .00."""
    return "1.0" if value >= 0.995 else f"{value:.2f}"[1:]


def _header(cols: list[Label], width: int, widest: int) -> list[str]:
    """The lines above the columns: labels side by side if all fit, otherwise written vertically."""
    if widest <= width:
        return ["".join(_centre(label.text, width) for label in cols)]
    columns = [_letters(label.text) for label in cols]
    height = min(_LABEL_HEIGHT, max(len(letters) for letters in columns))
    columns = [[*letters[: height - 1], "…"] if len(letters) > height else letters for letters in columns]
    columns = [[""] * (height - len(letters)) + letters for letters in columns]
    return ["".join(_centre(letter, width) for letter in line) for line in zip(*columns, strict=True)]


def _letters(text: str) -> list[str]:
    """Displayed characters: combining marks and joined emoji stay with the preceding letter."""
    letters: list[str] = []
    for x in text:
        joins = unicodedata.combining(x) or x in "\u200d\ufe0f" or (letters and letters[-1].endswith("\u200d"))
        if letters and joins:
            letters[-1] += x
        else:
            letters.append(x)
    return letters


def _legend(sheet: Sheet, margin: int, has_colour: bool) -> Text:
    from rich.text import Text

    line = Text(" " * margin + "0 ")
    for n in range(20):
        red, green, blue = colour_of(n / 19)
        shade = _SHADES[1 + n * (len(_SHADES) - 2) // 19]
        line.append(" " if has_colour else shade, style=f"on rgb({red},{green},{blue})" if has_colour else "")
    line.append(f" {'≥ ' if sheet.crowded else ''}{sheet.top:.3g}")
    return line


def _shorten(text: str, width: int) -> str:
    """Cut a text to ``width`` terminal cells, ending in … if it was longer."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _centre(text: str, width: int) -> str:
    from rich.cells import cell_len

    left = (width - cell_len(text)) // 2
    return " " * left + text + " " * (width - cell_len(text) - left)
