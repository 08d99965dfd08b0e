"""The picture of ``regard bench attention``: time and memory against length, both axes logarithmic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..foundation.plotting import INK, style_panel
from .contenders import Contender

if TYPE_CHECKING:
    from .bench_attention import Bench

# Okabe and Ito's colours, which stay apart for every kind of colour vision; the line style says the family, the marker
# and a label at the end of each line say the rest.
COLOURS = {
    "reference": "#000000",
    "sdpa": "#0072B2",
    "tiled": "#D55E00",
    "tiled+t5": "#E69F00",
    "additive": "#7A7A7A",
    "window": "#009E73",
    "strided": "#56B4E9",
    "bigbird": "#CC79A7",
    "linear": "#0072B2",
    "performer": "#D55E00",
    "linformer": "#009E73",
    "fourier": "#7A7A7A",
}
STYLES = {"exact": "-", "sparse": (0, (4, 1.6)), "approximate": (0, (1, 1.3)), "own": "-."}
MARKERS = {"exact": "o", "sparse": "s", "approximate": "D", "own": "*"}


def draw(found: Bench, file: Path) -> None:
    """Write the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.885, top=0.83, bottom=0.135, wspace=0.42)
    for panel, what, unit, title in (
        (panels[0], "seconds", 1e-3, "Time of one run, milliseconds"),
        (panels[1], "peak_bytes", 2**20, "Peak memory above the inputs, MiB"),
    ):
        _panel(panel, found, what, unit, title)
    figure.text(0.05, 0.945, "What attention costs as the sequence grows", fontsize=16, weight="bold", color=INK)
    figure.text(0.05, 0.905, found.headline, fontsize=10, color="#555555")
    _families(figure, {contender.family for contender in found.contenders})
    if any(cell.skipped for cell in found.cells):
        why = "A line ends where the next length would need too much memory or time."
        figure.text(0.985, 0.026, why, fontsize=9.5, color="#555555", ha="right")
    figure.savefig(file, facecolor="white")


def _panel(panel: Any, found: Bench, what: str, unit: float, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    panel.set_xlabel("sequence length T", fontsize=10, color=INK)
    ends: list[tuple[Contender, float, float]] = []
    for contender in found.contenders:
        lengths, values = found.series(contender.name, what)
        points = [(length, value / unit) for length, value in zip(lengths, values, strict=True) if value > 0]
        if points:
            panel.plot(*zip(*points, strict=True), **_line(contender))
            ends.append((contender, *points[-1]))
    longest, shortest = found.lengths[-1], found.lengths[0]
    panel.set_xlim(shortest / 1.12, longest * 1.12)
    panel.xaxis.set_major_locator(FixedLocator(found.lengths))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    style_panel(panel)
    _label(panel, found, what, ends)


def _line(contender: Contender) -> dict[str, Any]:
    return {
        "color": COLOURS.get(contender.name, INK),
        "linestyle": STYLES[contender.family],
        "linewidth": 2.0,
        "marker": MARKERS[contender.family],
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "solid_capstyle": "round",
        "zorder": 3,
    }


def _label(panel: Any, found: Bench, what: str, ends: list[tuple[Contender, float, float]]) -> None:
    """Name and exponent of every line, right of the panel, in the order of the lines and never over each other."""
    low, high = (math.log10(y) for y in panel.get_ylim())
    x_low, x_high = (math.log2(x) for x in panel.get_xlim())
    ends = sorted(ends, key=lambda end: end[2])
    wanted = [(math.log10(y) - low) / (high - low) for _, _, y in ends]
    for (contender, x, y), height in zip(ends, spread(wanted, 0.049), strict=True):
        at = ((math.log2(x) - x_low) / (x_high - x_low), (math.log10(y) - low) / (high - low))
        colour = COLOURS.get(contender.name, INK)
        panel.plot(
            [at[0] + 0.012, 1.0, 1.035],
            [at[1], height, height],
            transform=panel.transAxes,
            color=colour,
            linewidth=0.7,
            alpha=0.55,
            clip_on=False,
            zorder=2,
        )
        power = found.exponent(contender.name, what)
        growth = "" if power is None else f"$T^{{\\,{power:.2f}}}$"
        for place, text in ((1.045, contender.name), (1.2, growth)):
            panel.text(place, height, text, transform=panel.transAxes, color=colour, fontsize=9.5, va="center")


def spread(wanted: list[float], gap: float) -> list[float]:
    """Heights at least ``gap`` apart and close to those wanted (ascending), within 0 … 1 where they fit.

    Neighbours that come too close form a group around their common middle; groups that then meet become one.
    """
    groups: list[list[float]] = []  # [middle, number of members]
    for height in wanted:
        groups.append([height, 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            middle, count = groups.pop()
            below, below_count = groups[-1]
            total = count + below_count
            groups[-1] = [(middle * count + below * below_count) / total, total]
    placed = [middle + gap * (n - (count - 1) / 2) for middle, count in groups for n in range(int(count))]
    for n in range(len(placed)):  # what stands above the panel moves down, then what stands below it up
        placed[-1 - n] = min(placed[-1 - n], 1 - gap * n)
    for n in range(len(placed)):
        placed[n] = max(placed[n], gap * n)
    return placed


def _families(figure: Any, present: set[str]) -> None:
    from matplotlib.lines import Line2D

    names = {
        "exact": "exact",
        "sparse": "sparse, exact on what it looks at",
        "approximate": "other mixing, nearly linear",
        "own": "yours",
    }
    handles = [
        Line2D([], [], color="#555555", linestyle=STYLES[family], marker=MARKERS[family], markersize=5, label=label)
        for family, label in names.items()
        if family in present
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.042, 0.0),
        ncols=3,
        frameon=False,
        fontsize=9.5,
        labelcolor="#555555",
        handlelength=3.2,
    )
