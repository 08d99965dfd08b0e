"""The pictures of a sweep: every cell beside the base with its seeds, and how the training loss fell."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..foundation.plotting import INK, SOFT, style_panel
from .sweep_report import TITLES, Report, RowOf, smaller_is_better

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BASE, BETTER, WORSE, SAME = "#000000", "#009E73", "#D55E00", "#7A7A7A"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def draw(report: Report, out: Path) -> None:
    """results.png and curves.png."""
    _results(report, out / "results.png")
    _curves(report, out / "curves.png")


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _results(report: Report, file: Path) -> None:
    metrics = [name for name in report.metrics if name != "perplexity"][:3] or list(report.metrics[:1])
    figure = _figure(3.2 + 4.2 * len(metrics), 1.8 + 0.32 * len(report.rows))
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        style_panel(panel)
        _metric(panel, report, metric)
    labels = [f"({row.cell.group})  {row.cell.name}" if row.cell.group else row.cell.name for row in report.rows]
    panels[0].set_yticks(range(len(labels)), labels, color=INK)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    figure.suptitle(
        f"{report.sweep.name}: {report.seeds_said} (small dots: single runs)",
        x=0.01,
        ha="left",
        fontsize=11.5,
        weight="bold",
        color=INK,
    )
    how = "filled: differs from the base (Dunnett's test, p < 0.05); hollow: not significant with these seeds"
    figure.supxlabel(how, x=0.01, ha="left", fontsize=8.5, color=SOFT)
    figure.savefig(file, facecolor="white")


def _metric(panel: Any, report: Report, metric: str) -> None:
    panel.set_title(_title(metric), loc="left", fontsize=10.5, color=INK)
    base = report.base.estimates.get(metric)
    if base is not None:
        panel.axvline(base.mean, color=BASE, linewidth=0.9, zorder=1)
        if base.se is not None:
            panel.axvspan(base.mean - base.se, base.mean + base.se, color=BASE, alpha=0.08, linewidth=0, zorder=0)
    far = _far(report, metric)
    for place, row in enumerate(report.rows):
        found = row.estimates.get(metric)
        if found is None or row.cell.name in far:
            text = (
                row.state
                if found is None
                else f"{found.mean:.2f}, outside the picture {'→' if far[row.cell.name] else '←'}"
            )
            left = found is not None and not far[row.cell.name]
            panel.text(0.01 if left else 0.99, place, text, transform=panel.get_yaxis_transform(), **_note(left))
            continue
        colour = _colour(row, report, metric)
        panel.plot(found.values, [place] * len(found.values), ".", color=colour, alpha=0.55, markersize=5, zorder=2)
        full = row is report.base or row.differs(metric)
        panel.errorbar(
            [found.mean],
            [place],
            xerr=None if found.se is None else [found.se],
            fmt="o",
            color=colour,
            markerfacecolor=colour if full else "white",
            markersize=7,
            capsize=3,
            zorder=3,
        )


def _note(left: bool) -> dict[str, Any]:
    return {"ha": "left" if left else "right", "va": "center", "fontsize": 8.5, "style": "italic", "color": WORSE}


def _far(report: Report, metric: str) -> dict[str, bool]:
    """Cells so far off that the others would be one dot; True: to the right."""
    means = {row.cell.name: row.estimates[metric].mean for row in report.rows if metric in row.estimates}
    base = report.base.estimates.get(metric)
    if base is None or len(means) < 4:
        return {}
    gaps = sorted(abs(value - base.mean) for value in means.values())
    middle = gaps[len(gaps) // 2]
    most = max(12 * middle, 1e-12)
    return {name: value > base.mean for name, value in means.items() if abs(value - base.mean) > most}


def _colour(row: RowOf, report: Report, metric: str) -> str:
    if row is report.base:
        return BASE
    if not row.differs(metric):
        return SAME
    lower = row.estimates[metric].mean < report.base.estimates[metric].mean
    return BETTER if lower == smaller_is_better(metric) else WORSE


def _title(metric: str) -> str:
    return f"{TITLES.get(metric, metric)} — {'lower' if smaller_is_better(metric) else 'higher'} is better"


def _curves(report: Report, file: Path) -> None:
    """The mean over seeds of the training loss; a run that diverged ends with a cross."""
    figure = _figure(9.5, 5.2)
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


def _mean_curve(row: RowOf) -> list[tuple[float, float]]:
    seen: dict[int, list[float]] = {}
    for run in row.runs.values():
        for step, loss in (run or {}).get("curve", ()):
            if loss is not None and math.isfinite(loss):
                seen.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in sorted(seen.items())]
