"""How every picture looks: colours, panels, and fonts that have every letter of its texts."""

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

_FIRST = "DejaVu Sans"
# Tried in this order; any other installed font that has the letters will do after them.
_KNOWN = (
    *("Noto Sans CJK KR", "Noto Sans KR", "Noto Sans CJK JP", "Noto Sans CJK SC", "NanumGothic", "Nanum Gothic"),
    *("Malgun Gothic", "Apple SD Gothic Neo", "AppleGothic", "UnDotum", "Baekmuk Gulim", "Source Han Sans K"),
    *("Noto Emoji", "Segoe UI Symbol", "Apple Symbols", "Symbola", "Noto Sans Symbols2"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS"),
)


def new_figure(width: float, height: float, *, dpi: int = 150) -> Any:
    """A white matplotlib figure (inches) that draws without a display and touches no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style_panel(panel: Any, grid: str = "both") -> None:
    """The look of every panel with axes: a faint grid behind the data, one line below it, nothing else."""
    panel.grid(color=FAINT, linewidth=0.7, axis=grid)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", colors=SOFT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#999999")


def fonts_for(text: str) -> tuple[list[str], str]:
    """Fonts that together have every letter of a text, and the letters that none has."""
    missing = {x for x in text if not x.isspace() and unicodedata.category(x) not in ("Mn", "Cf", "Cc")}
    found = [_FIRST]
    missing -= _letters(_FIRST)
    for name in _candidates() if missing else ():
        has = missing & _letters(name)
        if has:
            found.append(name)
            missing -= has
        if not missing:
            break
    return found, "".join(sorted(missing))


@functools.cache
def _candidates() -> tuple[str, ...]:
    from matplotlib import font_manager

    manager = font_manager.fontManager
    known_files = {font.fname for font in manager.ttflist}
    for file in set(font_manager.findSystemFonts()) - known_files:  # installed since matplotlib last looked
        try:
            manager.addfont(file)
        except (RuntimeError, OSError, ValueError):  # not every file is a font it can read
            continue
    installed = {font.name for font in manager.ttflist}
    known = [name for name in _KNOWN if name in installed]
    return (*known, *sorted(installed - {*known, _FIRST}))


@functools.cache
def _letters(name: str) -> frozenset[str]:
    """The letters of an installed font."""
    from matplotlib import font_manager

    try:
        file = font_manager.findfont(font_manager.FontProperties(family=name), fallback_to_default=False)
        return frozenset(map(chr, font_manager.get_font(file).get_charmap()))
    except (ValueError, OSError, RuntimeError):
        return frozenset()


@contextmanager
def use_fonts_for(texts: Iterable[str], file: Path) -> Iterator[list[str]]:
    """The fonts for some texts; letters that no font has become boxes, and one sentence says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        found, missing = fonts_for("".join(texts))
        yield found
    if missing:
        shown = missing[:8] + ("…" if len(missing) > 8 else "")
        asian = any("\u1100" <= x <= "\u11ff" or "\u2e80" <= x <= "\ud7ff" for x in missing)
        hint = "; fonts-noto-cjk has Korean, Chinese and Japanese" if asian else ""
        warnings.warn(f"{file}: no installed font has {shown}, drawn as boxes{hint}", UserWarning, stacklevel=2)
