"""Heat maps, and overlays of attention on an image, as PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..foundation.files import atomic_file
from ..foundation.plotting import new_figure, use_fonts_for
from .labels import Label
from .render import HeadSelection, Sheet

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
COLOUR_MAP = "Blues"  # 0 is white; lightness decreases evenly
TEXT_COLOUR, GREY, LINE_COLOUR = "#1d2733", "#6b7684", "#c9d1d9"
_MAX_CELLS = 1024  # rows or columns drawn; a larger map is pooled to an overview
_MAX_LABELS = 72  # per axis; of more labels only every second, third … is drawn
_MAX_WITH_VALUES = 28  # rows or columns up to which cells show their weights


def draw_heatmap(selection: HeadSelection, file: Path, title: str | None = None) -> Path:
    """Write a heat map as PNG, SVG or PDF."""
    _check_suffix(file)
    sheet, look = selection.sheet(_MAX_CELLS, _MAX_CELLS), selection.view.look
    texts = " → ".join(text for text in (look.text, look.target_text) if text)
    subtitle = _shorten(" ".join(texts.split()), 90)
    labels = [label.text for label in (*sheet.rows, *sheet.cols)]
    with use_fonts_for([*labels, title or "", subtitle], file) as fonts:
        _save(_heatmap_figure(sheet, fonts, title or sheet.title[0].upper() + sheet.title[1:], subtitle), file)
    return file


def _check_suffix(file: Path) -> None:
    if file.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"{file} ends in {file.suffix or 'nothing'!r}; a picture ends in {', '.join(IMAGE_SUFFIXES)}")


def _save(figure: Any, file: Path) -> None:
    import matplotlib

    suffix = file.suffix.lower()
    metadata: Any = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)  # for reproducible bytes
    # SVG text is drawn as paths, so that it looks the same without the font; PDFs embed their fonts.
    style: Any = {"svg.fonttype": "path", "pdf.fonttype": 3, "svg.hashsalt": "regard"}
    with atomic_file(file) as out, matplotlib.rc_context(style):
        figure.savefig(out, format=suffix[1:], dpi=200, facecolor="white", metadata=metadata)


def _heatmap_figure(sheet: Sheet, fonts: list[str], title: str, subtitle: str) -> Any:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    n_rows, n_cols = sheet.values.shape
    cell = max(0.006, min(0.46, 9.0 / max(n_rows, n_cols)))
    width, height = max(1.6, n_cols * cell), max(0.4, n_rows * cell)
    label_distance = cell * -(-max(n_rows, n_cols) // _MAX_LABELS)  # inches
    size = max(4.0, min(10.0, label_distance * 72 * 0.6))  # points
    left = _label_width(sheet.rows) * size / 72 * 0.62 + 0.35
    above = _label_width(sheet.cols) * size / 72 * 0.62 + 0.25
    head, right, below = 0.75, 1.0, 0.3
    w, h = max(left + width + right, 4.6), head + above + height + below
    figure = new_figure(w, h)
    axes = figure.add_axes((left / w, below / h, width / w, height / h))
    norm = PowerNorm(0.5 if sheet.crowded else 1.0, 0, sheet.top, clip=True)
    image = axes.imshow(sheet.values.numpy(), cmap=COLOUR_MAP, norm=norm, aspect="auto", interpolation="nearest")
    _draw_labels(axes, sheet, fonts, size)
    if max(n_rows, n_cols) <= _MAX_WITH_VALUES and not sheet.pooled:
        _draw_values(axes, sheet, fonts, cell)
    bar_axes = figure.add_axes(((left + width + 0.18) / w, below / h, 0.1 / w, height / h))
    bar = figure.colorbar(image, cax=bar_axes)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    if sheet.crowded:
        bar_axes.set_title("root scale,\nclipped", fontsize=7, color=GREY, loc="left", pad=6)
    bar_axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
    x, y = 0.25 / w, 1 - 0.3 / h
    figure.text(x, y, title, fontsize=12, weight="bold", color=TEXT_COLOUR, family=fonts, va="center")
    figure.text(x, y - 0.24 / h, subtitle, fontsize=8.5, color=GREY, family=fonts, va="center")
    return figure


def _draw_labels(axes: Any, sheet: Sheet, fonts: list[str], size: float) -> None:
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=size, pad=3)
    for axis, labels, rotation in ((axes.yaxis, sheet.rows, 0), (axes.xaxis, sheet.cols, 90)):
        indices = range(0, len(labels), -(-len(labels) // _MAX_LABELS))
        axis.set_ticks(list(indices), [_shorten(labels[n].text) for n in indices])
        for tick, n in zip(axis.get_ticklabels(), indices, strict=False):
            tick.set(rotation=rotation, family=fonts, color=GREY if labels[n].special else TEXT_COLOUR)
    for spine in axes.spines.values():
        spine.set(color=LINE_COLOUR, linewidth=0.6)


def _draw_values(axes: Any, sheet: Sheet, fonts: list[str], cell: float) -> None:
    size, scale = min(8.0, cell * 72 * 0.26), sheet.scale()
    for y, row in enumerate(sheet.values.tolist()):
        for x, value in enumerate(row):
            if value == 0:  # masked: the cell stays white
                continue
            colour = "white" if scale(value) > 0.55 else TEXT_COLOUR
            number = "1" if value >= 0.995 else f"{value:.2f}"[1:]
            axes.text(x, y, number, ha="center", va="center", fontsize=size, color=colour, family=fonts)


def _label_width(labels: list[Label]) -> int:
    """The width of the longest label in Latin letters; a Hangul syllable is nearly two letters wide."""
    return max(sum(1.7 if ord(x) > 0x10FF else 1 for x in _shorten(label.text)) for label in labels).__ceil__()


def _shorten(text: str, longest: int = 18) -> str:
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")  # matplotlib reads $…$ as a formula


_MAX_PER_ROW, _MAX_PANELS = 6, 60
_SHADE_COLOUR, _SHADE_OPACITY = (0.04, 0.07, 0.13), 0.82
_SHADE_SIZE = 840  # pixels per side, divisible by many numbers of patches


def draw_overlay(selection: HeadSelection, file: Path, title: str | None = None) -> Path:
    """Draw one panel for each row of the view: its weights over the image."""
    _check_suffix(file)
    image, kind = selection.view.look.image, selection.view.kind
    if image is None or not any(label.box for label in selection.col_labels):
        raise ValueError(f"kind={kind!r} does not attend to an image, so there is nothing to draw its weights on")
    panels = list(zip(selection.row_labels, torch.cat(list(selection.portions())).float().cpu(), strict=True))
    if any(label.box for label, _ in panels):  # instead of a panel per patch: the class tokens, and the patches' mean
        mean = Label("all patches, mean"), torch.stack([w for label, w in panels if label.box]).mean(0)
        panels = [*(panel for panel in panels if panel[0].special), mean]
    panels = panels[:_MAX_PANELS]
    heading = title or selection.title[0].upper() + selection.title[1:]
    with use_fonts_for([heading, *(label.text for label, _ in panels)], file) as fonts:
        n_cols = min(_MAX_PER_ROW, max(3, len(panels)))
        n_rows = -(-len(panels) // n_cols)
        side, head, gap = 1.75, 0.55, 0.35  # inches
        panel_height = side * image.height / image.width
        w, h = n_cols * side, head + n_rows * (panel_height + gap)
        figure = new_figure(w, h)
        style = {"fontsize": 12, "weight": "bold", "color": TEXT_COLOUR, "family": fonts, "va": "center"}
        figure.text(0.1 / w, 1 - 0.28 / h, heading, style)
        for n, (label, weights) in enumerate(panels):
            row, col = divmod(n, n_cols)
            bottom = h - head - (row + 1) * (panel_height + gap) + 0.03
            axes = figure.add_axes(((col * side + 0.06) / w, bottom / h, (side - 0.12) / w, (panel_height - 0.06) / h))
            _draw_panel(axes, np.asarray(image.convert("RGB")), weights, selection.col_labels)
            colour = GREY if label.special else TEXT_COLOUR
            axes.set_title(label.text.replace("$", r"\$"), fontsize=10, color=colour, family=fonts, pad=4)
        _save(figure, file)
    return file


def _draw_panel(axes: Any, image: NDArray[np.uint8], weights: Tensor, cols: list[Label]) -> None:
    """Draw the image under a shade that is lighter where a patch has more weight, and frame the heaviest patch."""
    from matplotlib.patches import Rectangle

    axes.imshow(image, extent=(0, 1, 1, 0), aspect="auto")
    boxes = [(label.box, weight) for label, weight in zip(cols, weights.tolist(), strict=True) if label.box]
    top = max(weight for _, weight in boxes) or 1.0
    shade = np.zeros((_SHADE_SIZE, _SHADE_SIZE, 4))
    shade[..., :3] = _SHADE_COLOUR
    shade[..., 3] = _SHADE_OPACITY  # also outside all regions
    for (x0, y0, x1, y1), weight in boxes:
        ys, xs = (slice(round(low * _SHADE_SIZE), round(high * _SHADE_SIZE)) for low, high in ((y0, y1), (x0, x1)))
        shade[ys, xs, 3] = _SHADE_OPACITY * (1 - weight / top)
    axes.imshow(shade, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest")
    (x0, y0, x1, y1), _ = max(boxes, key=lambda pair: pair[1])
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="#1668dc", linewidth=1.6))
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=LINE_COLOUR, linewidth=0.6)
