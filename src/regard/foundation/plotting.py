"""The style of plots: colours, panels, and fonts that cover the characters of their texts."""

from __future__ import annotations

import functools
import logging
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, SOFT, FAINT = "#222222", "#555555", "#E4E4E4"
"""Colours of titles, of labels and of the grid."""

_DEFAULT = "DejaVu Sans"
# Tried in this order, before all other installed fonts.
_KNOWN = (
    *("Noto Sans CJK KR", "Noto Sans KR", "Noto Sans CJK JP", "Noto Sans CJK SC", "NanumGothic", "Nanum Gothic"),
    *("Malgun Gothic", "Apple SD Gothic Neo", "AppleGothic", "UnDotum", "Baekmuk Gulim", "Source Han Sans K"),
    *("Noto Emoji", "Segoe UI Symbol", "Apple Symbols", "Symbola", "Noto Sans Symbols2"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS"),
)


def new_figure(width: float, height: float, *, dpi: int = 150) -> Any:
    """A white matplotlib figure, sizes in inches, that needs no display and changes no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style_panel(panel: Any, grid: str = "both") -> None:
    """The style of panels with axes: a faint grid behind the data, a line at the bottom, and no other frame."""
    panel.grid(color=FAINT, linewidth=0.7, axis=grid)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", colors=SOFT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#999999")


def spread_heights(heights: list[float], gap: float) -> list[float]:
    """Move ascending heights at least ``gap`` apart, as little as possible, and within 0 … 1 if they fit.

    Neighbours that are too close form a group around their mean; groups that then overlap are merged.
    """
    groups: list[list[float]] = []  # [middle, number of members]
    for height in heights:
        groups.append([height, 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            middle, count = groups.pop()
            below, below_count = groups[-1]
            total = count + below_count
            groups[-1] = [(middle * count + below * below_count) / total, total]
    placed = [middle + gap * (n - (count - 1) / 2) for middle, count in groups for n in range(int(count))]
    top = len(placed) - 1  # labels above the panel move down, then labels below it move up
    lowered = [min(height, 1 - gap * (top - n)) for n, height in enumerate(placed)]
    return [max(height, gap * n) for n, height in enumerate(lowered)]


def fonts_for(text: str) -> tuple[list[str], str]:
    """Fonts that together cover the characters of a text, and the characters that no font has."""
    missing = {x for x in text if not x.isspace() and unicodedata.category(x) not in ("Mn", "Cf", "Cc")}
    fonts = [_DEFAULT]
    missing -= _characters(_DEFAULT)
    for name in _candidates() if missing else ():
        covered = missing & _characters(name)
        if covered:
            fonts.append(name)
            missing -= covered
        if not missing:
            break
    return fonts, "".join(sorted(missing))


@functools.cache
def _candidates() -> tuple[str, ...]:
    from matplotlib import font_manager

    manager = font_manager.fontManager
    known_files = {font.fname for font in manager.ttflist}
    for file in set(font_manager.findSystemFonts()) - known_files:  # installed since matplotlib built its cache
        try:
            manager.addfont(file)
        except (RuntimeError, OSError, ValueError):  # a format that matplotlib cannot read
            continue
    installed = {font.name for font in manager.ttflist}
    known = [name for name in _KNOWN if name in installed]
    return (*known, *sorted(installed - {*known, _DEFAULT}))


@functools.cache
def _characters(name: str) -> frozenset[str]:
    """The characters of an installed font."""
    from matplotlib import font_manager

    try:
        file = font_manager.findfont(font_manager.FontProperties(family=name), fallback_to_default=False)
        return frozenset(map(chr, font_manager.get_font(file).get_charmap()))
    except (ValueError, OSError, RuntimeError):
        return frozenset()


@contextmanager
def use_fonts_for(texts: Iterable[str], file: Path) -> Iterator[list[str]]:
    """A context with the fonts for these texts; warns once about characters that no font has, which become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        fonts, missing = fonts_for("".join(texts))
        yield fonts
    if missing:
        shown = missing[:8] + ("…" if len(missing) > 8 else "")
        asian = any("\u1100" <= x <= "\u11ff" or "\u2e80" <= x <= "\ud7ff" for x in missing)
        hint = "; fonts-noto-cjk has Korean, Chinese and Japanese" if asian else ""
        warnings.warn(f"{file}: no installed font has {shown}, drawn as boxes{hint}", UserWarning, stacklevel=2)
