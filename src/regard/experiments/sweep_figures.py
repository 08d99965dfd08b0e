"""Figures of sweeps: cells beside the base, learning curves, quality against cost, loss against length, saturation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..foundation.plotting import INK, SOFT, new_figure, style_panel
from .sweep_cell import EXTRAPOLATION_METRICS, FACTORS
from .sweep_report import TITLES, CellSummary, SweepReport, smaller_is_better

if TYPE_CHECKING:
    from .ablations import Scaling
    from .bench_attention import AttentionBench, Contender
    from .shootout import ExtrapolationReport, ShootoutReport

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BASE, BETTER, WORSE, SAME = "#000000", "#009E73", "#D55E00", "#7A7A7A"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def draw_sweep(report: SweepReport, out: Path) -> None:
    """results.png and curves.png."""
    _draw_results(report, out / "results.png")
    _draw_curves(report, out / "curves.png")


def _constrained_figure(width: float, height: float) -> Any:
    figure = new_figure(width, height, dpi=130)
    figure.set_layout_engine("constrained")
    return figure


def _draw_results(report: SweepReport, file: Path) -> None:
    metrics = [name for name in report.metrics if name != "perplexity"][:3] or list(report.metrics[:1])
    figure = _constrained_figure(3.2 + 4.2 * len(metrics), 1.8 + 0.32 * len(report.rows))
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        style_panel(panel)
        _draw_metric(panel, report, metric)
    labels = [f"({row.cell.group})  {row.cell.name}" if row.cell.group else row.cell.name for row in report.rows]
    panels[0].set_yticks(range(len(labels)), labels, color=INK)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    title = f"{report.sweep.name}: {report.seeds_text} (small dots: single runs)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, weight="bold", color=INK)
    how = "filled: differs from the base (Dunnett's test, p < 0.05); hollow: not significant with these seeds"
    figure.supxlabel(how, x=0.01, ha="left", fontsize=8.5, color=SOFT)
    figure.savefig(file, facecolor="white")


def _draw_metric(panel: Any, report: SweepReport, metric: str) -> None:
    panel.set_title(_title(metric), loc="left", fontsize=10.5, color=INK)
    base = report.base.estimates.get(metric)
    if base is not None:
        panel.axvline(base.mean, color=BASE, linewidth=0.9, zorder=1)
        if base.se is not None:
            panel.axvspan(base.mean - base.se, base.mean + base.se, color=BASE, alpha=0.08, linewidth=0, zorder=0)
    outliers = _outliers(report, metric)
    for height, row in enumerate(report.rows):
        x = row.estimates.get(metric)
        if x is None or row.cell.name in outliers:
            left, text = False, row.state
            if x is not None:
                left = not outliers[row.cell.name]
                text = f"{x.mean:.2f}, outside the picture {'←' if left else '→'}"
            style = {"ha": "left" if left else "right", "va": "center", "fontsize": 8.5, "style": "italic"}
            transform = panel.get_yaxis_transform()
            panel.text(0.01 if left else 0.99, height, text, transform=transform, color=WORSE, **style)
            continue
        colour = _colour(row, report, metric)
        panel.plot(x.values, [height] * len(x.values), ".", color=colour, alpha=0.55, markersize=5, zorder=2)
        fill = colour if row is report.base or row.differs(metric) else "white"
        error = None if x.se is None else [x.se]
        style = {"fmt": "o", "markersize": 7, "capsize": 3, "zorder": 3}
        panel.errorbar([x.mean], [height], xerr=error, color=colour, markerfacecolor=fill, **style)


def _outliers(report: SweepReport, metric: str) -> dict[str, bool]:
    """Cells so outliers off that the others would be one dot; True: to the right."""
    means = {row.cell.name: row.estimates[metric].mean for row in report.rows if metric in row.estimates}
    base = report.base.estimates.get(metric)
    if base is None or len(means) < 4:
        return {}
    gaps = sorted(abs(value - base.mean) for value in means.values())
    middle = gaps[len(gaps) // 2]
    most = max(12 * middle, 1e-12)
    return {name: value > base.mean for name, value in means.items() if abs(value - base.mean) > most}


def _colour(row: CellSummary, report: SweepReport, metric: str) -> str:
    if row is report.base:
        return BASE
    if not row.differs(metric):
        return SAME
    lower = row.estimates[metric].mean < report.base.estimates[metric].mean
    return BETTER if lower == smaller_is_better(metric) else WORSE


def _title(metric: str) -> str:
    return f"{TITLES.get(metric, metric)} — {'lower' if smaller_is_better(metric) else 'higher'} is better"


def _draw_curves(report: SweepReport, file: Path) -> None:
    """The mean over seeds of the training loss; a run that diverged ends with a cross."""
    figure = _constrained_figure(9.5, 5.2)
    panel = figure.subplots()
    style_panel(panel)
    for place, row in enumerate(report.rows):
        points = _mean_curve(row)
        if not points:
            continue
        colour = BASE if place == 0 else LINES[(place - 1) % len(LINES)]
        dash = "-" if place == 0 else DASHES[(place - 1) // len(LINES) % len(DASHES)]
        panel.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle=dash,
            linewidth=2.2 if place == 0 else 1.5,
            label=row.cell.name,
        )
        if row.n_diverged:
            panel.plot(*points[-1], "x", color=colour, markersize=9, markeredgewidth=2.2)
    if base := _mean_curve(report.base):  # what starts far above it would flatten all the others
        panel.set_ylim(top=1.15 * max(loss for _, loss in base))
    panel.set_xlabel("step", color=INK)
    panel.set_title("Training loss, mean over seeds (× diverged)", loc="left", fontsize=11, color=INK)
    if panel.lines:
        panel.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, facecolor="white")


def _mean_curve(row: CellSummary) -> list[tuple[float, float]]:
    seen: dict[int, list[float]] = {}
    for run in row.runs.values():
        for step, loss in (run or {}).get("curve", ()):
            if loss is not None and math.isfinite(loss):
                seen.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in sorted(seen.items())]


# By what a cell changes, in Okabe and Ito's colours and with markers of their own.
KINDS: dict[str, tuple[str, str, str]] = {
    "mixer": ("#0072B2", "o", "another mechanism"),
    "window": ("#009E73", "s", "a sparse pattern"),
    "sparsity": ("#009E73", "s", "a sparse pattern"),
    "positions": ("#D55E00", "D", "another position scheme"),
}


def _marker_style(row: CellSummary, report: ShootoutReport) -> tuple[str, str, str]:
    if row is report.base:
        return BASE, "*", "the base: dot product, sinusoids"
    changed = (word.partition("=")[0].removeprefix("model.") for word in row.cell.words)
    return next((KINDS[name] for name in changed if name in KINDS), (SOFT, "o", "other"))


def _label_beside(
    panel: Any, points: dict[str, tuple[float, float]], colour: Callable[[str], str], size: float
) -> None:
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


def draw_tradeoff(report: ShootoutReport, file: Path) -> None:
    """Held-out loss against the time and the memory of a step."""
    rows = [row for row in report.rows if row.cell.name in report.costs and report.sweep.metrics[0] in row.estimates]
    figure = new_figure(14, 6.4, dpi=130)
    figure.subplots_adjust(left=0.055, right=0.88, top=0.84, bottom=0.15, wspace=0.42)
    panels = figure.subplots(1, 2)
    metric = report.sweep.metrics[0]
    losses = {row.cell.name: row.estimates[metric].mean for row in rows}
    styles = {row.cell.name: _marker_style(row, report) for row in rows}
    for panel, key, title in ((panels[0], "ms", "milliseconds a step"), (panels[1], "mib", "MiB of a step")):
        style_panel(panel)
        panel.set_xscale("log")
        for row in rows:
            colour, marker, _ = styles[row.cell.name]
            x, y, se = report.costs[row.cell.name][key], losses[row.cell.name], row.estimates[metric].se
            panel.errorbar(
                [x], [y], yerr=None if se is None else [se], fmt=marker, color=colour, markersize=8, capsize=2
            )
        panel.set_xlabel(title, color=INK)
        panel.set_ylabel("held-out loss, lower is better", color=INK)
        low, high = panel.get_ylim()
        panel.set_ylim(low, high + 0.02 * (high - low))
        _use_plain_numbers(panel)
        points = {name: (report.costs[name][key], loss) for name, loss in losses.items()}
        _label_beside(panel, points, lambda name: styles[name][0], 8.5)
    where = {"cuda": "a GPU", "cpu": "one processor core"}.get(str(report.to_dict()["step_device"]), "")
    figure.text(0.055, 0.945, "What each mechanism learns, and what it costs", fontsize=15, weight="bold", color=INK)
    seeds = "1 seed" if len(report.sweep.seeds) == 1 else f"mean of {len(report.sweep.seeds)} seeds"
    caption = f"{seeds}, {report.sweep.recipe}; a step is forward and backward of one batch on {where}"
    figure.text(0.055, 0.9, caption, fontsize=10, color=SOFT)
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


def _use_plain_numbers(panel: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def draw_lengths(report: ExtrapolationReport, file: Path) -> None:
    """Loss against length, a line for every position scheme; one that cannot go on ends with a cross."""
    figure = new_figure(10, 5.8, dpi=130)
    figure.subplots_adjust(left=0.075, right=0.8, top=0.84, bottom=0.12)
    panel = figure.subplots()
    style_panel(panel)
    panel.set_xscale("log", base=2)
    sizes = [factor * report.length for factor in FACTORS]
    ends: dict[str, tuple[float, float]] = {}
    colours: dict[str, str] = {}
    for place, row in enumerate(row for row in report.rows if EXTRAPOLATION_METRICS[0] in row.estimates):
        name = str(report.sweep.config(row.cell).model.positions)
        points = [
            (size, row.estimates[metric])
            for size, metric in zip(sizes, EXTRAPOLATION_METRICS, strict=True)
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
    _label_beside(panel, ends, lambda name: colours[name], 9.5)
    figure.text(0.075, 0.94, "Beyond the length of training", fontsize=15, weight="bold", color=INK)
    caption = f"trained at {report.length} (the line), asked at up to {sizes[-1]:,}: the same held-out text, cut longer"
    figure.text(0.075, 0.89, caption, fontsize=10, color=SOFT)
    figure.savefig(file, facecolor="white")


def draw_scaling(result: Scaling, file: Path) -> None:
    """How much gradient passes the softmax, and how sharp attention is, against d_k."""
    figure = _constrained_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    widths = [scaled.d_k for scaled, _ in result.pairs()]
    for n, (name, colour) in enumerate((("with 1/√d_k", BETTER), ("without", WORSE))):
        points = [pair[n] for pair in result.pairs()]
        left.plot(widths, [x.passed for x in points], "o-", color=colour, label=f"{name}: mean")
        left.plot(widths, [max(x.passed_median, 1e-12) for x in points], ".:", color=colour, label=f"{name}: median")
        known = [(x.d_k, x.predicted) for x in points if x.predicted is not None]
        if known:
            left.plot(*zip(*known, strict=True), "--", color=INK, linewidth=1, alpha=0.8)
        right.plot(widths, [x.largest for x in points], "o-", color=colour, label=f"{name}: mean of the largest weight")
        share = f"{name}: share of queries over 0.99"
        right.plot(widths, [x.saturated for x in points], ".:", color=colour, label=share)
    left.plot([], [], "--", color=INK, linewidth=1, label="predicted mean")
    left.set_yscale("log")
    left.set_ylim(1e-5, 1)
    left.set_title("Gradient that passes the softmax, ‖diag(p) − ppᵀ‖", loc="left", fontsize=11, color=INK)
    right.set_title("How sharp attention is", loc="left", fontsize=11, color=INK)
    for panel in (left, right):
        style_panel(panel)
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, [str(d) for d in widths])
        panel.set_xlabel("d_k", color=INK)
        panel.legend(frameon=False, fontsize=8.5)
    figure.savefig(file, facecolor="white")


# ------------------------------------------------------------------------------------- attention against length

# Okabe and Ito's colours, which stay apart for every kind of colour vision; the line style says the family, the marker
# and a label at the end of each line say the rest.
BENCH_COLOURS = {
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
FAMILY_DASHES = {"exact": "-", "sparse": (0, (4, 1.6)), "approximate": (0, (1, 1.3)), "own": "-."}
FAMILY_MARKERS = {"exact": "o", "sparse": "s", "approximate": "D", "own": "*"}


def draw_attention_bench(bench: AttentionBench, file: Path) -> None:
    """Write the PNG."""
    figure = new_figure(14, 6.6)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.885, top=0.83, bottom=0.135, wspace=0.42)
    for panel, what, unit, title in (
        (panels[0], "seconds", 1e-3, "Time of one run, milliseconds"),
        (panels[1], "peak_bytes", 2**20, "Peak memory above the inputs, MiB"),
    ):
        _draw_bench_panel(panel, bench, what, unit, title)
    figure.text(0.05, 0.945, "What attention costs as the sequence grows", fontsize=16, weight="bold", color=INK)
    figure.text(0.05, 0.905, bench.headline, fontsize=10, color="#555555")
    _family_legend(figure, {contender.family for contender in bench.contenders})
    if any(cell.skipped for cell in bench.cells):
        why = "A line ends where the next length would need too much memory or time."
        figure.text(0.985, 0.026, why, fontsize=9.5, color="#555555", ha="right")
    figure.savefig(file, facecolor="white")


def _draw_bench_panel(panel: Any, bench: AttentionBench, what: str, unit: float, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    panel.set_xlabel("sequence length T", fontsize=10, color=INK)
    ends: list[tuple[Contender, float, float]] = []
    for contender in bench.contenders:
        lengths, values = bench.series(contender.name, what)
        points = [(length, value / unit) for length, value in zip(lengths, values, strict=True) if value > 0]
        if points:
            panel.plot(*zip(*points, strict=True), **_bench_line(contender))
            ends.append((contender, *points[-1]))
    longest, shortest = bench.lengths[-1], bench.lengths[0]
    panel.set_xlim(shortest / 1.12, longest * 1.12)
    panel.xaxis.set_major_locator(FixedLocator(bench.lengths))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    style_panel(panel)
    _label_lines(panel, bench, what, ends)


def _bench_line(contender: Contender) -> dict[str, Any]:
    return {
        "color": BENCH_COLOURS.get(contender.name, INK),
        "linestyle": FAMILY_DASHES[contender.family],
        "linewidth": 2.0,
        "marker": FAMILY_MARKERS[contender.family],
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "solid_capstyle": "round",
        "zorder": 3,
    }


def _label_lines(panel: Any, bench: AttentionBench, what: str, ends: list[tuple[Contender, float, float]]) -> None:
    """Name and exponent of every line, right of the panel, in the order of the lines and never over each other."""
    low, high = (math.log10(y) for y in panel.get_ylim())
    x_low, x_high = (math.log2(x) for x in panel.get_xlim())
    ends = sorted(ends, key=lambda end: end[2])
    wanted = [(math.log10(y) - low) / (high - low) for _, _, y in ends]
    for (contender, x, y), height in zip(ends, spread_heights(wanted, 0.049), strict=True):
        at = ((math.log2(x) - x_low) / (x_high - x_low), (math.log10(y) - low) / (high - low))
        colour = BENCH_COLOURS.get(contender.name, INK)
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
        power = bench.exponent(contender.name, what)
        growth = "" if power is None else f"$T^{{\\,{power:.2f}}}$"
        for place, text in ((1.045, contender.name), (1.2, growth)):
            panel.text(place, height, text, transform=panel.transAxes, color=colour, fontsize=9.5, va="center")


def spread_heights(wanted: list[float], gap: float) -> list[float]:
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


def _family_legend(figure: Any, present: set[str]) -> None:
    from matplotlib.lines import Line2D

    names = {
        "exact": "exact",
        "sparse": "sparse, exact on what it looks at",
        "approximate": "other mixing, nearly linear",
        "own": "yours",
    }
    handles = [
        Line2D(
            [],
            [],
            color="#555555",
            linestyle=FAMILY_DASHES[family],
            marker=FAMILY_MARKERS[family],
            markersize=5,
            label=label,
        )
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
