"""What is shown by terminal, picture and table alike: the weights of a view, or where they are too many, means."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.frame import ALL
from .labels import Label
from .merged_view import MergedView

if TYPE_CHECKING:
    from rich.console import Console

    from .look import Look

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


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
class HeadSelection:
    """One head of one layer, seen in one way."""

    look: Look
    layer: int
    head: int | None
    kind: str
    view: MergedView
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
        if self.view.is_plain and (len(rows), len(cols)) == self.look.map(kind=self.kind, layer=self.layer).shape[2:]:
            values = self.look.pooled(kind=self.kind, layer=self.layer, head=self.head, h=h, w=w)
        else:
            values = self._means(h, w)
        return Sheet(
            values.float().cpu(), _cell_labels(self.rows, rows, h), _cell_labels(self.cols, cols, w), self.title, True
        )

    def portions(self, most: int = 1 << 21) -> Iterator[tuple[int, Tensor]]:
        """The weights some rows at a time, with the number of the first."""
        span = range(len(self.view.rows))[self.rows]
        size = max(1, most // max(1, len(self.col_labels)))
        for n in range(0, len(span), size):
            part = span[n : n + size]
            rows = slice(part.start, part.stop)
            yield n, self.view.weights(layer=self.layer, head=self.head, rows=rows, cols=self.cols)

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
    """What was asked for, checked."""
    for name, span in (("rows", rows), ("cols", cols)):
        if span.step not in (None, 1):
            raise ValueError(f"{name}={span} must be neighbours: a slice with step 1")
    kind = look._kind(kind)
    layer = look._layer(kind, layer)
    head = None if head is None else look._head(kind, head)
    is_merged = words or not specials
    view = look.merged(kind=kind, words=words, specials=specials) if is_merged else MergedView.plain(look, kind)
    return HeadSelection(look, layer, head, kind, view, rows, cols)


def check_image_suffix(file: Path) -> None:
    if file.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"{file} ends in {file.suffix or 'nothing'!r}; a picture ends in {', '.join(IMAGE_SUFFIXES)}")


def _cell_labels(span: slice, labels: list[Label], count: int) -> list[Label]:
    """Cells of an overview are called by the number of the first in them: one token of many would say nothing."""
    if count == len(labels):
        return labels
    size, larger = divmod(len(labels), count)
    first = labels[0].span[0] if span == ALL else (span.start or 0)
    return [Label(f"{first + n * size + min(n, larger):,}") for n in range(count)]


HEADER = ("kind", "layer", "head", "row", "row_text", "col", "col_text", "weight")


def csv_lines(what: HeadSelection) -> Iterator[str]:
    """The file, some rows at a time. ``row`` and ``col`` count what is shown; nine digits give a float32 back."""
    held = io.StringIO(newline="")
    out = csv.writer(held, lineterminator="\r\n")
    out.writerow(HEADER)
    first = len(range(len(what.view.rows))[: what.rows.start or 0])
    left = range(len(what.view.cols))[what.cols].start if what.col_labels else 0
    head = "mean" if what.head is None else what.head
    rows, cols = what.row_labels, what.col_labels
    for start, part in what.portions(1 << 16):
        for n, values in enumerate(part.tolist(), start):
            for m, value in enumerate(values):
                texts = (first + n, rows[n].text, left + m, cols[m].text)
                out.writerow((what.kind, what.layer, head, *texts, f"{value:.9g}"))
        yield held.getvalue()
        held.seek(0)
        held.truncate()
    if held.tell():
        yield held.getvalue()


def write_csv(what: HeadSelection, file: Path) -> Path:
    with file.open("w", encoding="utf-8", newline="") as out:
        out.writelines(csv_lines(what))
    return file


if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# matplotlib's viridis in ten steps: even to the eye from dark to light, and for every kind of colour vision.
_COLOURS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_SHADES = " ·░▒▓█"  # where there is no colour
_MOST_ROWS = 64
_WIDEST_LABEL, _TALLEST_LABEL = 16, 10
_WITH_VALUES = 4  # cells this wide hold ".37"


def print_heatmap(what: HeadSelection, console: Console | None = None) -> None:
    """Print it, as wide as the terminal is."""
    from rich.cells import cell_len
    from rich.console import Console as NewConsole
    from rich.text import Text

    console = NewConsole() if console is None else console
    many = f"{len(what.view.rows):,}"  # an overview counts its rows
    names = [_cut(x.text, _WIDEST_LABEL) for x in what.row_labels] if len(what.row_labels) <= _MOST_ROWS else [many]
    margin = max((cell_len(name) for name in names), default=0) + 1
    room = max(8, console.width - margin)
    sheet = what.sheet(_MOST_ROWS, room // 2)
    widest = max(cell_len(label.text) for label in sheet.cols) + 1
    width = max(2, min(room // len(sheet.cols), max(_WITH_VALUES, min(widest, 8))))
    colour, shares = console.color_system is not None, sheet.scale()
    console.print(Text(sheet.title, style="bold"))
    for line in _header(sheet.cols, width, widest):
        console.print(Text(" " * margin + line), no_wrap=True, overflow="crop")
    for label, values in zip(sheet.rows, sheet.values.tolist(), strict=True):
        row = Text(_right(_cut(label.text, _WIDEST_LABEL), margin - 1) + " ")
        for value in values:
            _cell(row, value, shares(value), width, colour)
        console.print(row, no_wrap=True, overflow="crop")
    console.print(_legend(sheet, margin, colour), no_wrap=True, overflow="crop")
    if sheet.pooled:
        console.print(Text(" " * margin + "each block is the mean of several weights", style="italic"))


def _cell(line: Text, value: float, share: float, width: int, colour: bool) -> None:
    """One block. What may not be seen at all stays without colour."""
    said = short(value) if width >= _WITH_VALUES and value > 0 else ""
    if not colour:
        shade = _SHADES[0 if value == 0 else 1 + min(len(_SHADES) - 2, int(share * (len(_SHADES) - 1)))]
        line.append(said.center(width) if width >= _WITH_VALUES else shade * width)
        return
    if value == 0:
        line.append(" " * width)
        return
    red, green, blue = ramp(share)
    bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 120
    ink = "#101010" if bright else "#f0f0f0"
    line.append(said.center(width), style=f"{ink} on rgb({red},{green},{blue})")


def ramp(share: float) -> tuple[int, int, int]:
    """The colour of a share of the largest weight."""
    place = min(1.0, max(0.0, share)) * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    a, b = (bytes.fromhex(_COLOURS[n]) for n in (low, low + 1))
    red, green, blue = (round(x + (y - x) * (place - low)) for x, y in zip(a, b, strict=True))
    return red, green, blue


def short(value: float) -> str:
    """A weight in three letters: .37, 1.0, .00."""
    return "1.0" if value >= 0.995 else f"{value:.2f}"[1:]


def _header(cols: list[Label], width: int, widest: int) -> list[str]:
    """Labels above the columns: side by side where all fit, else from top to bottom, letter by letter."""
    from rich.cells import cell_len

    if widest <= width:
        return ["".join(_centred(label.text, width) for label in cols)]
    letters = [_letters(label.text) for label in cols]
    height = min(_TALLEST_LABEL, max(len(some) for some in letters))
    columns = [[*some[: height - 1], "…"] if len(some) > height else some for some in letters]
    columns = [[""] * (height - len(some)) + some for some in columns]
    lines = []
    for n in range(height):
        parts = (column[n] for column in columns)
        lines.append(
            "".join((" " * ((width - cell_len(x)) // 2) + x).ljust(width - cell_len(x) + len(x)) for x in parts)
        )
    return lines


def _letters(text: str) -> list[str]:
    """What one sees as letters: marks stay with the letter they stand on."""
    import unicodedata

    found: list[str] = []
    for x in text:
        joins = unicodedata.combining(x) or x in "\u200d\ufe0f" or (found and found[-1].endswith("\u200d"))
        if found and joins:
            found[-1] += x
        else:
            found.append(x)
    return found


def _legend(sheet: Sheet, margin: int, colour: bool) -> Text:
    from rich.text import Text

    line = Text(" " * margin + "0 ")
    for n in range(20):
        red, green, blue = ramp(n / 19)
        shade = _SHADES[1 + n * (len(_SHADES) - 2) // 19]
        line.append(" " if colour else shade, style=f"on rgb({red},{green},{blue})" if colour else "")
    line.append(f" {'≥ ' if sheet.crowded else ''}{sheet.top:.3g}")
    return line


def _cut(text: str, width: int) -> str:
    """No wider than that, with … where something is missing."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _right(text: str, width: int) -> str:
    from rich.cells import cell_len

    return " " * max(0, width - cell_len(text)) + text


def _centred(text: str, width: int) -> str:
    from rich.cells import cell_len

    left = (width - cell_len(text)) // 2
    return " " * left + text + " " * (width - cell_len(text) - left)
