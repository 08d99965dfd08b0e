"""A look on paper and on screen: terminal, pictures, tables and pages. Each is drawn by a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..attention.frame import ALL

if TYPE_CHECKING:
    from rich.console import Console

    from .look import Look


class Shown:
    """What of a ``Look`` is for the eye."""

    @property
    def _look(self) -> Look:
        return cast("Look", self)

    def print(
        self,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        *,
        words: bool = False,
        specials: bool = True,
        console: Console | None = None,
    ) -> None:
        """A heat map in the terminal."""
        from . import show

        show.to_terminal(show.chosen(self._look, layer, head, kind, words, specials), console)

    def heatmap(
        self,
        file: str | Path,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        *,
        rows: slice = ALL,
        cols: slice = ALL,
        words: bool = False,
        specials: bool = True,
        title: str | None = None,
    ) -> Path:
        """A heat map as a PNG, SVG or PDF file, by its name: values in the cells where they fit."""
        from . import show

        return show.to_picture(
            show.chosen(self._look, layer, head, kind, words, specials, rows, cols), Path(file), title
        )

    def overlay(
        self,
        file: str | Path,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        *,
        rows: slice = ALL,
        words: bool = False,
        title: str | None = None,
    ) -> Path:
        """The weights laid over the image, a small picture for each word; as a PNG, SVG or PDF file."""
        from . import overlay, show

        kind = "cross" if kind is None and "cross" in self._look.kinds else kind
        overlay.draw(show.chosen(self._look, layer, head, kind, words, not words, rows), Path(file), title)
        return Path(file)

    def csv(
        self,
        file: str | Path,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        *,
        rows: slice = ALL,
        cols: slice = ALL,
        words: bool = False,
        specials: bool = True,
    ) -> Path:
        """The weights as a CSV file, a line for each: kind, layer, head, row, row_text, col, col_text, weight."""
        from . import show

        return show.to_table(show.chosen(self._look, layer, head, kind, words, specials, rows, cols), Path(file))

    def html(self, file: str | Path, **options: Any) -> Path:
        """One self-contained page that needs no network; options are those of ``lens.page.write``."""
        from . import page

        page.write(self._look, Path(file), **options)
        return Path(file)

    def _repr_html_(self) -> str:
        """The page, as a notebook shows it."""
        from html import escape

        from . import page

        return (
            f'<iframe srcdoc="{escape(page.document(self._look))}" style="width:100%;height:680px;border:0"></iframe>'
        )
