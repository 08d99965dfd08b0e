"""Heat maps as PNG, SVG or PDF: labels as people read them, values in the cells where they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..foundation.plotting import use_fonts_for
from .labels import Label
from .render import HeadSelection, Sheet, check_image_suffix

MAP = "Blues"  # white is nothing, and the darker the more: lightness falls evenly
INK, QUIET = "#1d2733", "#6b7684"
_MOST_CELLS = 1024  # rows or columns drawn; more become an overview
_MOST_LABELS = 72  # more than these are thinned out
_WITH_VALUES = 28  # rows and columns up to which values are written


def draw_heatmap(what: HeadSelection, file: Path, title: str | None = None) -> Path:
    """Write a heat map as PNG, SVG or PDF."""
    check_image_suffix(file)
    sheet = what.sheet(_MOST_CELLS, _MOST_CELLS)
    said = _subtitle(what)
    labels = [label.text for label in (*sheet.rows, *sheet.cols)]
    with use_fonts_for([*labels, title or "", said], file) as fonts:
        figure = _heatmap_figure(sheet, fonts, title or sheet.title[0].upper() + sheet.title[1:], said)
        save(figure, file)
    return file


def save(figure: Any, file: Path) -> None:
    import matplotlib

    # Text of an SVG is drawn as paths, so that it looks the same without the font; PDFs carry their fonts.
    with matplotlib.rc_context({"svg.fonttype": "path", "pdf.fonttype": 3, "svg.hashsalt": "regard"}):
        made: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        metadata = made.get(file.suffix.lower())
        figure.savefig(file, format=file.suffix[1:].lower(), dpi=200, facecolor="white", metadata=metadata)


def _heatmap_figure(sheet: Sheet, fonts: list[str], title: str, said: str) -> Any:
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


def _subtitle(what: HeadSelection) -> str:
    look = what.look
    text = " → ".join(x for x in (look.text, look.target_text) if x)
    text = " ".join(text.split())
    return (text if len(text) <= 90 else text[:89] + "…").replace("$", r"\$")


_ACROSS = 6
_MOST = 60
_DARK, _THICK = (0.04, 0.07, 0.13), 0.82
_FINE = 840  # dots of the veil each way: many numbers of patches divide it


def draw_overlay(what: HeadSelection, file: Path, title: str | None = None) -> Path:
    """Write the picture: rows of the view, each over the image."""
    check_image_suffix(file)
    image = what.look.image
    if image is None or not any(label.box for label in what.col_labels):
        raise ValueError(f"kind={what.kind!r} does not look at an image: there is nothing to lay its weights over")
    rows, cols = what.row_labels, what.col_labels
    panels = _panels(what, rows)
    if what.kind == "encoder":  # patches look at patches: shown are who sums up the image, and the patches together
        together = Label("all patches, mean"), torch.stack([w for label, w in panels if label.box]).mean(0)
        panels = [*(panel for panel in panels if panel[0].special), together]
    panels = panels[:_MOST]
    heading = title or what.title[0].upper() + what.title[1:]
    with use_fonts_for([heading, *(label.text for label, _ in panels)], file) as fonts:
        save(_overlay_figure(np.asarray(image.convert("RGB")), panels, cols, fonts, heading), file)
    return file


def _panels(what: HeadSelection, rows: list[Label]) -> list[tuple[Label, Tensor]]:
    weights = torch.cat([part for _, part in what.portions()]).float().cpu()
    return list(zip(rows, weights, strict=True))


def _overlay_figure(
    image: NDArray[np.uint8], panels: list[tuple[Label, Tensor]], cols: list[Label], fonts: list[str], heading: str
) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(_ACROSS, max(3, len(panels)))
    down = -(-len(panels) // across)
    side, head = 1.75, 0.55
    tall = side * image.shape[0] / image.shape[1]
    figure = Figure(figsize=(across * side, head + down * (tall + 0.35)), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.1 / (across * side),
        1 - 0.28 / figure.get_figheight(),
        heading,
        fontsize=12,
        weight="bold",
        color=INK,
        family=fonts,
        va="center",
    )
    for n, (label, weights) in enumerate(panels):
        y, x = divmod(n, across)
        bottom = figure.get_figheight() - head - (y + 1) * (tall + 0.35)
        box = (x * side + 0.06, bottom + 0.03, side - 0.12, tall - 0.06)
        w, h = figure.get_size_inches()
        axes = figure.add_axes((box[0] / w, box[1] / h, box[2] / w, box[3] / h))
        _panel(axes, image, weights, cols)
        said = label.text.replace("$", r"\$")
        axes.set_title(said, fontsize=10, color=QUIET if label.special else INK, family=fonts, pad=4)
    return figure


def _panel(axes: Any, image: NDArray[np.uint8], weights: Tensor, cols: list[Label]) -> None:
    """The image under a veil, the thinner the more a patch is looked at; the heaviest in a frame."""
    from matplotlib.patches import Rectangle

    axes.imshow(image, extent=(0, 1, 1, 0), aspect="auto")
    places = [(label.box, weight) for label, weight in zip(cols, weights.tolist(), strict=True) if label.box]
    top = max(weight for _, weight in places) or 1.0
    veil = np.zeros((_FINE, _FINE, 4))
    veil[..., :3] = _DARK
    veil[..., 3] = _THICK  # what no region covers is not looked at
    for (x0, y0, x1, y1), weight in places:
        down, across = (slice(round(low * _FINE), round(high * _FINE)) for low, high in ((y0, y1), (x0, x1)))
        veil[down, across, 3] = _THICK * (1 - weight / top)
    axes.imshow(veil, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest")
    (x0, y0, x1, y1), _ = max(places, key=lambda place: place[1])
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="#1668dc", linewidth=1.6))
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color="#c9d1d9", linewidth=0.6)
