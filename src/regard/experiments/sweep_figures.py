"""Figures of sweeps: cells next to the base, learning curves, quality against cost, loss against length, saturation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..foundation.plotting import INK, SOFT, new_figure, spread_heights, style_panel
from .sweep_cell import EXTRAPOLATION_METRICS, FACTORS
from .sweep_report import TITLES, CellSummary, SweepReport, smaller_is_better

if TYPE_CHECKING:
    from .ablations import Scaling
    from .bench_attention import AttentionBench
    from .extended_reports import ExtrapolationReport, MechanismReport

# Okabe and Ito's palette, distinguishable with any kind of colour vision.
BASE, BETTER, WORSE, SAME = "#000000", "#009E73", "#D55E00", "#7A7A7A"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def _constrained_figure(width: float, height: float) -> Any:
    figure = new_figure(width, height, dpi=130)
    figure.set_layout_engine("constrained")
    return figure


def draw_results(report: SweepReport, file: Path) -> None:
    """Every cell next to the base, with a panel for each of up to three metrics."""
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
    title = f"{TITLES.get(metric, metric)} — {'lower' if smaller_is_better(metric) else 'higher'} is better"
    panel.set_title(title, loc="left", fontsize=10.5, color=INK)
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
        colour = BASE if row is report.base else SAME
        if base is not None and row.differs(metric):
            colour = BETTER if (x.mean < base.mean) == smaller_is_better(metric) else WORSE
        panel.plot(x.values, [height] * len(x.values), ".", color=colour, alpha=0.55, markersize=5, zorder=2)
        fill = colour if row is report.base or row.differs(metric) else "white"
        error = None if x.se is None else [x.se]
        style = {"fmt": "o", "markersize": 7, "capsize": 3, "zorder": 3}
        panel.errorbar([x.mean], [height], xerr=error, color=colour, markerfacecolor=fill, **style)


def _outliers(report: SweepReport, metric: str) -> dict[str, bool]:
    """Cells so far from the base that the others would shrink to a dot; True if to the right."""
    means = {row.cell.name: row.estimates[metric].mean for row in report.rows if metric in row.estimates}
    base = report.base.estimates.get(metric)
    if base is None or len(means) < 4:
        return {}
    gaps = sorted(abs(value - base.mean) for value in means.values())
    limit = max(12 * gaps[len(gaps) // 2], 1e-12)
    return {name: value > base.mean for name, value in means.items() if abs(value - base.mean) > limit}


def draw_curves(report: SweepReport, file: Path) -> None:
    """The training loss, averaged over seeds; a cell with diverged runs ends with a cross."""
    figure = _constrained_figure(9.5, 5.2)
    panel = figure.subplots()
    style_panel(panel)
    for index, row in enumerate(report.rows):
        points = _mean_curve(row)
        if not points:
            continue
        colour = BASE if index == 0 else LINES[(index - 1) % len(LINES)]
        dash = "-" if index == 0 else DASHES[(index - 1) // len(LINES) % len(DASHES)]
        style = {"linestyle": dash, "linewidth": 2.2 if index == 0 else 1.5, "label": row.cell.name}
        panel.plot(*zip(*points, strict=True), color=colour, **style)
        if row.n_diverged:
            panel.plot(*points[-1], "x", color=colour, markersize=9, markeredgewidth=2.2)
    if base := _mean_curve(report.base):  # a curve that starts far above would flatten all others
        panel.set_ylim(top=1.15 * max(loss for _, loss in base))
    panel.set_xlabel("step", color=INK)
    panel.set_title("Training loss, mean over seeds (× diverged)", loc="left", fontsize=11, color=INK)
    if panel.lines:
        panel.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, facecolor="white")


def _mean_curve(row: CellSummary) -> list[tuple[float, float]]:
    losses: dict[int, list[float]] = {}
    for run in row.runs.values():
        for step, loss in (run or {}).get("curve", ()):
            if loss is not None and math.isfinite(loss):
                losses.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in sorted(losses.items())]


# Colour, marker and label by the field that a cell changes.
KINDS: dict[str, tuple[str, str, str]] = {
    "mixer": ("#0072B2", "o", "another mechanism"),
    "window": ("#009E73", "s", "a sparse pattern"),
    "sparsity": ("#009E73", "s", "a sparse pattern"),
    "positions": ("#D55E00", "D", "another position scheme"),
}


def _marker_style(row: CellSummary, report: MechanismReport) -> tuple[str, str, str]:
    if row is report.base:
        return BASE, "*", "the base: dot product, sinusoids"
    changed = (word.partition("=")[0].removeprefix("model.") for word in row.cell.words)
    return next((KINDS[name] for name in changed if name in KINDS), (SOFT, "o", "other"))


def draw_tradeoff(report: MechanismReport, file: Path) -> None:
    """Held-out loss against the time and the memory of a step."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    metric = report.sweep.metrics[0]
    rows = {row.cell.name: row for row in report.rows if row.cell.name in report.costs and metric in row.estimates}
    styles = {name: _marker_style(row, report) for name, row in rows.items()}
    colours = {name: colour for name, (colour, _, _) in styles.items()}
    figure = new_figure(14, 6.4, dpi=130)
    figure.subplots_adjust(left=0.055, right=0.88, top=0.84, bottom=0.15, wspace=0.42)
    panels = figure.subplots(1, 2)
    for panel, key, title in ((panels[0], "ms", "milliseconds a step"), (panels[1], "mib", "MiB of a step")):
        style_panel(panel)
        panel.set_xscale("log")
        points = {name: (report.costs[name][key], row.estimates[metric].mean) for name, row in rows.items()}
        for name, row in rows.items():
            error, (colour, marker, _) = row.estimates[metric].se, styles[name]
            panel.errorbar(*points[name], yerr=error, fmt=marker, color=colour, markersize=8, capsize=2)
        panel.set_xlabel(title, color=INK)
        panel.set_ylabel("held-out loss, lower is better", color=INK)
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        _label_right(panel, points, colours, 8.5)
    where = {"cuda": "a GPU", "cpu": "one processor core"}.get(str(report.to_dict()["step_device"]), "")
    seeds = "1 seed" if len(report.sweep.seeds) == 1 else f"mean of {len(report.sweep.seeds)} seeds"
    caption = f"{seeds}, {report.sweep.recipe}; a step is forward and backward of one batch on {where}"
    _title_figure(figure, 0.055, "What each mechanism learns, and what it costs", caption)
    entries = {label: {"color": colour, "marker": marker} for colour, marker, label in styles.values()}
    _legend(figure, entries, linestyle="", markersize=8)
    figure.savefig(file, facecolor="white")


def _title_figure(figure: Any, left: float, title: str, caption: str) -> None:
    figure.text(left, 0.945, title, fontsize=15, weight="bold", color=INK)
    figure.text(left, 0.9, caption, fontsize=10, color=SOFT)


def _legend(figure: Any, entries: dict[str, dict[str, Any]], **style: Any) -> None:
    """A legend below the panels, with a line or marker for each label."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **(style | own)) for label, own in entries.items()]
    layout = {"loc": "lower left", "bbox_to_anchor": (0.045, 0.0), "ncols": 4, "frameon": False}
    figure.legend(handles=handles, fontsize=9.5, labelcolor=SOFT, handlelength=3.2, **layout)


_Points = dict[str, tuple[float, float]]


def _label_right(
    panel: Any, points: _Points, colours: dict[str, str], size: float, more: dict[str, str] | None = None
) -> None:
    """Label points to the right of the panel without overlap, with a line to each; ``more`` is a second column."""
    panel.autoscale_view()  # limits are otherwise computed only when the figure is drawn
    to_axes = panel.transData + panel.transAxes.inverted()
    ends = {name: to_axes.transform(points[name]) for name in sorted(points, key=lambda name: points[name][1])}
    gap = size * 2.0 / panel.get_window_extent().height * panel.figure.dpi / 100
    heights = spread_heights([y for _, y in ends.values()], gap)
    for (name, (x, y)), height in zip(ends.items(), heights, strict=True):
        line = {"linewidth": 0.7, "alpha": 0.55, "clip_on": False, "zorder": 2}
        panel.plot([x + 0.012, 1, 1.035], [y, height, height], transform=panel.transAxes, color=colours[name], **line)
        for left, text in ((1.045, name), (1.2, (more or {}).get(name, ""))):
            panel.text(left, height, text, transform=panel.transAxes, color=colours[name], fontsize=size, va="center")


def draw_lengths(report: ExtrapolationReport, file: Path) -> None:
    """Loss against length, a line for each position scheme; one that cannot extrapolate ends with a cross."""
    figure = new_figure(10, 5.8, dpi=130)
    figure.subplots_adjust(left=0.075, right=0.8, top=0.84, bottom=0.12)
    panel = figure.subplots()
    style_panel(panel)
    panel.set_xscale("log", base=2)
    sizes = [factor * report.length for factor in FACTORS]
    ends: dict[str, tuple[float, float]] = {}
    colours: dict[str, str] = {}
    for index, row in enumerate(row for row in report.rows if EXTRAPOLATION_METRICS[0] in row.estimates):
        name = str(report.sweep.config(row.cell).model.positions)
        known = [(x, metric) for x, metric in zip(sizes, EXTRAPOLATION_METRICS, strict=True) if metric in row.estimates]
        xs, ys = [x for x, _ in known], [row.estimates[metric].mean for _, metric in known]
        errors = [row.estimates[metric].se or 0.0 for _, metric in known]
        colour = colours[name] = LINES[index % len(LINES)]
        style = {"linestyle": DASHES[index // len(LINES) % len(DASHES)], "linewidth": 2, "marker": "o", "markersize": 5}
        panel.errorbar(xs, ys, yerr=errors, color=colour, capsize=3, **style)
        if len(known) == len(sizes):
            ends[name] = xs[-1], ys[-1]
            continue
        panel.plot(xs[-1], ys[-1], "x", color=colour, markersize=12, markeredgewidth=2.4)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
        label: dict[str, Any] = {"xytext": (9, 4), "textcoords": "offset points", "fontsize": 9, "zorder": 5}
        panel.annotate(f"{name}: cannot go on", (xs[-1], ys[-1]), color=colour, bbox=box, **label)
    panel.axvline(sizes[0], color="#999999", linewidth=0.9)
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.05)
    panel.minorticks_off()
    panel.set_xlabel("length of the pieces the text is read in", color=INK)
    panel.set_ylabel("held-out loss, lower is better", color=INK)
    _label_right(panel, ends, colours, 9.5)
    caption = f"trained at {report.length} (the line), asked at up to {sizes[-1]:,}: the same held-out text, cut longer"
    _title_figure(figure, 0.075, "Beyond the length of training", caption)
    figure.savefig(file, facecolor="white")


def draw_scaling(result: Scaling, file: Path) -> None:
    """The gradient that passes the softmax, and the sharpness of attention, against d_k."""
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

# Okabe and Ito's palette. Line style and marker show the family; a label at its end names each line.
BENCH_COLOURS = {
    **{"reference": "#000000", "sdpa": "#0072B2", "tiled": "#D55E00", "tiled+t5": "#E69F00", "additive": "#7A7A7A"},
    "sinks": "#009E73",
    **{"window": "#009E73", "strided": "#56B4E9", "bigbird": "#CC79A7"},
    **{"linear": "#0072B2", "performer": "#D55E00", "linformer": "#009E73", "fourier": "#7A7A7A"},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact", {"linestyle": "-", "marker": "o"}),
    "sparse": ("sparse, exact on what it looks at", {"linestyle": (0, (4, 1.6)), "marker": "s"}),
    "approximate": ("other mixing, nearly linear", {"linestyle": (0, (1, 1.3)), "marker": "D"}),
    "own": ("yours", {"linestyle": "-.", "marker": "*"}),
}


def draw_attention_bench(bench: AttentionBench, file: Path) -> None:
    """Time and peak memory against sequence length."""
    figure = new_figure(14, 6.6)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.885, top=0.83, bottom=0.135, wspace=0.42)
    _draw_bench_panel(panels[0], bench, "seconds", 1e-3, "Time of one run, milliseconds")
    _draw_bench_panel(panels[1], bench, "peak_bytes", 2**20, "Peak memory above the inputs, MiB")
    _title_figure(figure, 0.05, "What attention costs as the sequence grows", bench.headline)
    present = {contender.family for contender in bench.contenders}
    entries = {label: style for family, (label, style) in FAMILIES.items() if family in present}
    _legend(figure, entries, color=SOFT, markersize=5)
    if any(cell.skipped for cell in bench.cells):
        why = "A line ends where the next length would need too much memory or time."
        figure.text(0.985, 0.026, why, fontsize=9.5, color=SOFT, ha="right")
    figure.savefig(file, facecolor="white")


def _draw_bench_panel(panel: Any, bench: AttentionBench, quantity: str, unit: float, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    panel.set_xlabel("sequence length T", fontsize=10, color=INK)
    look = {"linewidth": 2.0, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 3}
    ends: dict[str, tuple[float, float]] = {}
    colours = {contender.name: BENCH_COLOURS.get(contender.name, INK) for contender in bench.contenders}
    for contender in bench.contenders:
        series = zip(*bench.series(contender.name, quantity), strict=True)
        points = [(length, value / unit) for length, value in series if value > 0]
        if points:
            style = look | FAMILIES[contender.family][1]
            panel.plot(*zip(*points, strict=True), color=colours[contender.name], solid_capstyle="round", **style)
            ends[contender.name] = points[-1]
    panel.set_xlim(bench.lengths[0] / 1.12, bench.lengths[-1] * 1.12)
    panel.xaxis.set_major_locator(FixedLocator(bench.lengths))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
    style_panel(panel)
    powers = {name: bench.exponent(name, quantity) for name in ends}
    growth = {name: f"$T^{{\\,{power:.2f}}}$" for name, power in powers.items() if power is not None}
    _label_right(panel, ends, colours, 9.5, growth)
