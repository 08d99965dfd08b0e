"""A heat map in the terminal: blocks of colour, 24 bits where the terminal has them, wide letters counted as wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .labels import Label
from .show import Chosen, Sheet

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# matplotlib's viridis in ten steps: even to the eye from dark to light, and for every kind of colour vision.
_COLOURS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_SHADES = " ·░▒▓█"  # where there is no colour
_MOST_ROWS = 64
_WIDEST_LABEL, _TALLEST_LABEL = 16, 10
_WITH_VALUES = 4  # cells this wide hold ".37"


def draw(what: Chosen, console: Console | None = None) -> None:
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
