"""Heat maps as PNG, SVG or PDF: labels as people read them, values in the cells where they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..foundation.plotting import use_fonts_for
from .labels import Label
from .show import Chosen, Sheet

MAP = "Blues"  # white is nothing, and the darker the more: lightness falls evenly
INK, QUIET = "#1d2733", "#6b7684"
_MOST_CELLS = 1024  # rows or columns drawn; more become an overview
_MOST_LABELS = 72  # more than these are thinned out
_WITH_VALUES = 28  # rows and columns up to which values are written


def draw(what: Chosen, file: Path, title: str | None = None) -> None:
    """Write the picture."""
    sheet = what.sheet(_MOST_CELLS, _MOST_CELLS)
    said = _subtitle(what)
    labels = [label.text for label in (*sheet.rows, *sheet.cols)]
    with use_fonts_for([*labels, title or "", said], file) as fonts:
        figure = _figure(sheet, fonts, title or sheet.title[0].upper() + sheet.title[1:], said)
        save(figure, file)


def save(figure: Any, file: Path) -> None:
    import matplotlib

    # Text of an SVG is drawn as paths, so that it looks the same without the font; PDFs carry their fonts.
    with matplotlib.rc_context({"svg.fonttype": "path", "pdf.fonttype": 3, "svg.hashsalt": "regard"}):
        made: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        metadata = made.get(file.suffix.lower())
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=200, facecolor="white", metadata=metadata)


def _figure(sheet: Sheet, fonts: list[str], title: str, said: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_rows, n_cols = sheet.values.shape
    cell = max(0.006, min(0.46, 9.0 / max(n_rows, n_cols)))
    width, height = max(1.6, n_cols * cell), max(0.4, n_rows * cell)
    size = _letter_size(cell * -(-max(n_rows, n_cols) // _MOST_LABELS))
    left = _longest(sheet.rows) * size / 72 * 0.62 + 0.35
    above = _longest(sheet.cols) * size / 72 * 0.62 + 0.25
    head, right, below = 0.75, 1.0, 0.3
    whole = max(left + width + right, 4.6), head + above + height + below
    figure = Figure(figsize=whole, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / whole[0], below / whole[1], width / whole[0], height / whole[1]))
    norm = PowerNorm(0.5 if sheet.crowded else 1.0, 0, sheet.top, clip=True)
    image = axes.imshow(sheet.values.numpy(), cmap=MAP, norm=norm, aspect="auto", interpolation="nearest")
    _ticks(axes, sheet, fonts, size)
    if max(n_rows, n_cols) <= _WITH_VALUES and not sheet.pooled:
        _values(axes, sheet, fonts, cell)
    bar = figure.add_axes(((left + width + 0.18) / whole[0], below / whole[1], 0.1 / whole[0], height / whole[1]))
    _scale(figure, image, bar, sheet.crowded)
    x, y = 0.25 / whole[0], 1 - 0.3 / whole[1]
    figure.text(x, y, title, fontsize=12, weight="bold", color=INK, family=fonts, va="center")
    figure.text(x, y - 0.24 / whole[1], said, fontsize=8.5, color=QUIET, family=fonts, va="center")
    return figure


def _ticks(axes: Any, sheet: Sheet, fonts: list[str], size: float) -> None:
    for axis, labels in ((axes.yaxis, sheet.rows), (axes.xaxis, sheet.cols)):
        step = -(-len(labels) // _MOST_LABELS)
        places = list(range(0, len(labels), step))
        axis.set_ticks(places, [_clipped(labels[n].text) for n in places])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=size, labelcolor=INK, pad=3)
    for label in axes.get_xticklabels():
        label.set(rotation=90, family=fonts)
    for label in axes.get_yticklabels():
        label.set(family=fonts)
    for name, labels in (("y", sheet.rows), ("x", sheet.cols)):  # what is no text stands back
        step = -(-len(labels) // _MOST_LABELS)
        for tick, n in zip(getattr(axes, f"get_{name}ticklabels")(), range(0, len(labels), step), strict=False):
            tick.set_color(QUIET if labels[n].special else INK)
    for spine in axes.spines.values():
        spine.set(color="#c9d1d9", linewidth=0.6)


def _values(axes: Any, sheet: Sheet, fonts: list[str], cell: float) -> None:
    size, shares = min(8.0, cell * 72 * 0.26), sheet.scale()
    for y, row in enumerate(sheet.values.tolist()):
        for x, value in enumerate(row):
            if value == 0:  # hidden by a mask: the white cell says it
                continue
            colour = "white" if shares(value) > 0.55 else INK
            said = "1" if value >= 0.995 else f"{value:.2f}"[1:]
            axes.text(x, y, said, ha="center", va="center", fontsize=size, color=colour, family=fonts)


def _scale(figure: Any, image: Any, axes: Any, crowded: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    bar = figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    if crowded:
        axes.set_title("root scale,\nclipped", fontsize=7, color=QUIET, loc="left", pad=6)
    axes.tick_params(length=0, labelsize=8, labelcolor=QUIET)


def _letter_size(room: float) -> float:
    """Points, for labels so many inches apart."""
    return max(4.0, min(10.0, room * 72 * 0.6))


def _longest(labels: list[Label]) -> int:
    """In Latin letters; a Hangul syllable is nearly two of them wide."""
    return max(sum(1.7 if ord(x) > 0x10FF else 1 for x in _clipped(label.text)) for label in labels).__ceil__()


def _clipped(text: str, most: int = 18) -> str:
    # matplotlib would take $…$ for a formula.
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def _subtitle(what: Chosen) -> str:
    look = what.look
    text = " → ".join(x for x in (look.text, look.target_text) if x)
    text = " ".join(text.split())
    return (text if len(text) <= 90 else text[:89] + "…").replace("$", r"\$")
