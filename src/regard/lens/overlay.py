"""Attention over an image: one small picture for each word, or one for all patches, bright where it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..foundation.plotting import use_fonts_for
from .heatmap import INK, QUIET, save
from .labels import Label
from .show import Chosen, check_picture

_ACROSS = 6
_MOST = 60
_DARK, _THICK = (0.04, 0.07, 0.13), 0.82
_FINE = 840  # dots of the veil each way: many numbers of patches divide it


def draw(what: Chosen, file: Path, title: str | None = None) -> None:
    """Write the picture: rows of the view, each over the image."""
    check_picture(file)
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
        save(_figure(np.asarray(image.convert("RGB")), panels, cols, fonts, heading), file)


def _panels(what: Chosen, rows: list[Label]) -> list[tuple[Label, Tensor]]:
    weights = torch.cat([part for _, part in what.portions()]).float().cpu()
    return list(zip(rows, weights, strict=True))


def _figure(
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
