"""The pictures of the shoot-out: quality against time and memory, and loss against length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..foundation.plotting import INK, SOFT, style_panel
from .extrapolation import FACTORS, METRICS, Lengths
from .shootout import Shot
from .sweep_figure import BASE, DASHES, LINES
from .sweep_report import RowOf

# By what a cell changes, in Okabe and Ito's colours and with markers of their own.
KINDS: dict[str, tuple[str, str, str]] = {
    "mixer": ("#0072B2", "o", "another mechanism"),
    "window": ("#009E73", "s", "a sparse pattern"),
    "sparsity": ("#009E73", "s", "a sparse pattern"),
    "positions": ("#D55E00", "D", "another position scheme"),
}


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _style(row: RowOf, found: Shot) -> tuple[str, str, str]:
    if row is found.base:
        return BASE, "*", "the base: dot product, sinusoids"
    changed = (word.partition("=")[0].removeprefix("model.") for word in row.cell.words)
    return next((KINDS[name] for name in changed if name in KINDS), (SOFT, "o", "other"))


def _beside(panel: Any, points: dict[str, tuple[float, float]], colour: Callable[[str], str], size: float) -> None:
    """Names in a column right of the panel, each at its height or as near as the others let it, with a line to it."""
    low, high = panel.get_ylim()
    step = size * 1.95 / panel.get_window_extent().height * (high - low)
    order = sorted(points, key=lambda name: points[name][1])
    heights: list[float] = []
    for name in order:  # from below, none nearer than a line to the one before
        heights.append(max(points[name][1], heights[-1] + step if heights else low))
    ceiling = high
    for index in reversed(range(len(heights))):  # what was pushed out at the top pushes back
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - step
    for name, height in zip(order, heights, strict=True):
        line = {"arrowstyle": "-", "color": colour(name), "linewidth": 0.6, "alpha": 0.45, "shrinkA": 1, "shrinkB": 4}
        panel.annotate(
            name,
            xy=points[name],
            xytext=(1.03, height),
            textcoords=("axes fraction", "data"),
            fontsize=size,
            color=colour(name),
            va="center",
            annotation_clip=False,
            arrowprops=line,
        )


def draw_tradeoff(found: Shot, file: Path) -> None:
    """Held-out loss against the time and the memory of a step."""
    rows = [row for row in found.rows if row.cell.name in found.costs and found.sweep.metrics[0] in row.estimates]
    figure = _figure(14, 6.4)
    figure.subplots_adjust(left=0.055, right=0.88, top=0.84, bottom=0.15, wspace=0.42)
    panels = figure.subplots(1, 2)
    metric = found.sweep.metrics[0]
    losses = {row.cell.name: row.estimates[metric].mean for row in rows}
    styles = {row.cell.name: _style(row, found) for row in rows}
    for panel, key, title in ((panels[0], "ms", "milliseconds a step"), (panels[1], "mib", "MiB of a step")):
        style_panel(panel)
        panel.set_xscale("log")
        for row in rows:
            colour, marker, _ = styles[row.cell.name]
            x, y, se = found.costs[row.cell.name][key], losses[row.cell.name], row.estimates[metric].se
            panel.errorbar(
                [x], [y], yerr=None if se is None else [se], fmt=marker, color=colour, markersize=8, capsize=2
            )
        panel.set_xlabel(title, color=INK)
        panel.set_ylabel("held-out loss, lower is better", color=INK)
        low, high = panel.get_ylim()
        panel.set_ylim(low, high + 0.02 * (high - low))
        _plain_numbers(panel)
        points = {name: (found.costs[name][key], loss) for name, loss in losses.items()}
        _beside(panel, points, lambda name: styles[name][0], 8.5)
    where = {"cuda": "a GPU", "cpu": "one processor core"}.get(str(found.document()["step_device"]), "")
    figure.text(0.055, 0.945, "What each mechanism learns, and what it costs", fontsize=15, weight="bold", color=INK)
    seeds = "1 seed" if len(found.sweep.seeds) == 1 else f"mean of {len(found.sweep.seeds)} seeds"
    said = f"{seeds}, {found.sweep.recipe}; a step is forward and backward of one batch on {where}"
    figure.text(0.055, 0.9, said, fontsize=10, color=SOFT)
    _legend(figure, styles)
    figure.savefig(file, facecolor="white")


def _legend(figure: Any, styles: dict[str, tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D

    kinds = {label: (colour, marker) for colour, marker, label in styles.values()}
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=8, label=label)
        for label, (colour, marker) in kinds.items()
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.045, 0.0), ncols=4, frameon=False, fontsize=9.5)


def _plain_numbers(panel: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def draw_lengths(found: Lengths, file: Path) -> None:
    """Loss against length, a line for every position scheme; one that cannot go on ends with a cross."""
    figure = _figure(10, 5.8)
    figure.subplots_adjust(left=0.075, right=0.8, top=0.84, bottom=0.12)
    panel = figure.subplots()
    style_panel(panel)
    panel.set_xscale("log", base=2)
    sizes = [factor * found.length for factor in FACTORS]
    ends: dict[str, tuple[float, float]] = {}
    colours: dict[str, str] = {}
    for place, row in enumerate(row for row in found.rows if METRICS[0] in row.estimates):
        name = str(found.sweep.config(row.cell).model.positions)
        points = [
            (size, row.estimates[metric])
            for size, metric in zip(sizes, METRICS, strict=True)
            if metric in row.estimates
        ]
        colours[name] = LINES[place % len(LINES)]
        xs, ys = [x for x, _ in points], [y.mean for _, y in points]
        spread = [y.se or 0.0 for _, y in points]
        panel.errorbar(
            xs,
            ys,
            yerr=spread,
            color=colours[name],
            linestyle=DASHES[place // len(LINES) % len(DASHES)],
            marker="o",
            markersize=5,
            linewidth=2,
            capsize=3,
        )
        if len(points) < len(sizes):
            panel.plot(xs[-1], ys[-1], "x", color=colours[name], markersize=12, markeredgewidth=2.4)
            panel.annotate(
                f"{name}: cannot go on",
                (xs[-1], ys[-1]),
                xytext=(9, 4),
                textcoords="offset points",
                color=colours[name],
                fontsize=9,
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
            )
        else:
            ends[name] = xs[-1], ys[-1]
    panel.axvline(sizes[0], color="#999999", linewidth=0.9)
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.05)
    panel.minorticks_off()
    panel.set_xlabel("length of the pieces the text is read in", color=INK)
    panel.set_ylabel("held-out loss, lower is better", color=INK)
    _beside(panel, ends, lambda name: colours[name], 9.5)
    figure.text(0.075, 0.94, "Beyond the length of training", fontsize=15, weight="bold", color=INK)
    said = f"trained at {found.length} (the line), asked at up to {sizes[-1]:,}: the same held-out text, cut longer"
    figure.text(0.075, 0.89, said, fontsize=10, color=SOFT)
    figure.savefig(file, facecolor="white")
