"""metrics.jsonl and curves.png of a run. A failure to write them never stops a run."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..foundation.files import write_atomic
from ..foundation.jsonio import to_jsonable
from ..foundation.plotting import INK, SOFT, fonts_for, new_figure, spread_heights, style_panel
from .console_display import format_count, format_duration
from .loggers import Note

TIMINGS = ("seconds", "train_seconds", "tokens_per_s", "mfu", "memory_mib")
# The Okabe-Ito palette, which is safe for colour-blind readers.
TRAIN, VALID, RATE = "#0072B2", "#D55E00", "#7A7A7A"
METRICS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NOT_METRICS = {"step", "loss", "valid_loss", "tokens", "seconds", "train_seconds", "tokens_per_s", "memory_mib"}
EXPERT_LOAD = ("expert_load_max", "expert_load_min")  # load of the experts used most and least, in training lines
WANTED = ("bleu", "cider", "exact", "accuracy", "chrf", "f1", "perplexity")  # drawn first, in this order
_NAMES = {
    **{"bleu": "BLEU", "bleu4": "BLEU-4", "chrf": "chrF", "cider": "CIDEr", "f1": "F1"},
    **{"expert load max": "most", "expert load min": "least"},
}
# Markers of a curve with few evaluations.
DOTS: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
Points = tuple[list[float], list[float]]


class MetricsFile:
    """One JSON object per line, written to disk unbuffered.

    Opening it to continue after ``start_step`` drops the lines of later steps and a line torn by a crash. Each line is
    one write; if the disk takes only part of it, the file is truncated to the lines before.
    """

    def __init__(self, path: Path, start_step: int, note: Note) -> None:
        self.path, self._note, self._failed = path, note, False
        self.last: dict[str, Any] = {}
        self._last_step: list[dict[str, Any]] = []  # the records of the last step, without timings
        path.parent.mkdir(parents=True, exist_ok=True)
        content, kept = path.read_bytes() if path.exists() else b"", b""
        for line in content.splitlines(keepends=True) if start_step > 0 else []:
            record = read_line(line)
            if record is not None and record["step"] <= start_step and line.endswith(b"\n"):
                kept += line
                self._remember(record)
        if kept != content:
            write_atomic(path, kept)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; NaN and infinity become null. A record already written before a crash is not repeated."""
        record = to_jsonable(record)
        if record["step"] == self.last.get("step") and without_timings(record) in self._last_step:
            return
        self._remember(record)
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                self._file.truncate(end)
                raise OSError("the line did not fit")
        except OSError as failure:
            if not self._failed:
                self._note(f"{self.path.name} cannot be written: {failure.strerror or failure}")
            self._failed = True

    def _remember(self, record: dict[str, Any]) -> None:
        if record["step"] != self.last.get("step"):
            self._last_step = []
        self._last_step.append(without_timings(record))
        self.last = record

    def close(self) -> None:
        self._file.close()


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that are reproducible."""
    return {name: value for name, value in record.items() if name not in TIMINGS}


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether a record is of an evaluation and not of training."""
    return "loss_mean" not in record


def read_line(line: bytes | str) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if the line is torn or not a record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def draw_curves(metrics_jsonl: Path, png: Path) -> None:
    """Draw the records written so far; without any, no file is written."""
    with open(metrics_jsonl, encoding="utf-8", errors="replace") as lines:
        records = [record for line in lines if (record := read_line(line)) is not None]
    if not records:
        return
    figure = new_figure(12, 5.6)
    load = [name for name in EXPERT_LOAD if any(_is_number(record.get(name)) for record in records)]
    groups = _groups([record for record in records if is_evaluation(record)])[: 1 if load else 2]
    groups += [load] if load else []
    heights = [1.0] * len(groups) + [0.62 if groups else 1.0]
    margins = {"left": 0.05, "right": 0.88, "top": 0.80, "bottom": 0.10, "wspace": 0.46, "hspace": 0.6}
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(1.45, 1), height_ratios=heights, **margins)
    last_step = max(record["step"] for record in records)
    _draw_loss(_panel(figure, grid[:, 0], "Loss", last_step), records)
    for row, group in enumerate(groups):
        title = "Load of experts, 1 is even" if group == load else " and ".join(map(_name, group))
        _draw_metrics(_panel(figure, grid[row, 1], title, last_step), records, group, evaluation=group != load)
    _draw_rate(_panel(figure, grid[-1, 1], "Learning rate", last_step), _points(records, "lr", evaluation=False))
    _draw_title(figure, metrics_jsonl, records)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor="white")
    write_atomic(png, picture.getvalue())


def _points(records: Iterable[dict[str, Any]], name: str, *, evaluation: bool) -> Points:
    """Steps and values of a metric. If a step was evaluated twice, the last one counts: it used all the data."""
    values = {r["step"]: r[name] for r in records if is_evaluation(r) == evaluation and _is_number(r.get(name))}
    return list(values), list(values.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _groups(evaluations: list[dict[str, Any]]) -> list[list[str]]:
    """Metrics by panel: those on one scale (percentages, or fractions up to 1) share one; at most two panels."""
    names = [name for record in evaluations for name, value in record.items() if _is_number(value)]
    names = [name for name in dict.fromkeys(names) if name not in NOT_METRICS]
    names.sort(key=lambda name: next((n for n, wanted in enumerate(WANTED) if wanted in name.lower()), len(WANTED)))
    by_scale: dict[str, list[str]] = {}
    for name in names:
        largest = max(abs(r[name]) for r in evaluations if _is_number(r.get(name)))
        scale = "percent" if _percent(name) else "share" if largest <= 1 else name
        by_scale.setdefault(scale, []).append(name)
    return [group[: len(METRICS)] for group in by_scale.values()][:2]


def _percent(name: str) -> bool:
    return any(word in name.lower() for word in ("bleu", "chrf"))


def _panel(figure: Any, cell: Any, title: str, last_step: int) -> Any:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panel = figure.add_subplot(cell)
    panel.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    panel.set_xlim(0, max(1, last_step) * 1.02)
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    style_panel(panel)
    return panel


def _draw_loss(panel: Any, records: list[dict[str, Any]]) -> None:
    """The loss of single steps in a faint line, their mean in a strong one, and validation with its best point."""
    each, mean = (_points(records, name, evaluation=False) for name in ("loss", "loss_mean"))
    valid = _points(records, "valid_loss", evaluation=True)
    if not each[0] and not valid[0]:
        panel.text(0.5, 0.5, "no values yet", transform=panel.transAxes, ha="center", color=SOFT)
        return
    panel.plot(*each, color=TRAIN, linewidth=0.8, alpha=0.28, zorder=2)
    panel.plot(*mean, color=TRAIN, linewidth=1.9, solid_capstyle="round", solid_joinstyle="round", zorder=3)
    panel.plot(*valid, color=VALID, linewidth=1.9, zorder=4, **(DOTS if len(valid[0]) <= 40 else {}))
    _loss_scale(panel, mean[1] + valid[1] or each[1])
    ends = [(mean, "training", TRAIN), (valid, "validation", VALID)]
    _labels(panel, [(x[-1], y[-1], f"{name} {y[-1]:.4g}", colour) for (x, y), name, colour in ends if x])
    panel.set_xlabel("step", fontsize=9.5, color=SOFT)
    if len(valid[1]) > 1:
        best, x = min(zip(valid[1], valid[0], strict=True))
        panel.plot([x], [best], marker="o", markersize=9, markerfacecolor="none", markeredgecolor=VALID, zorder=5)
        if x < 0.9 * panel.get_xlim()[1]:  # at the end of the curve, its label shows the value
            offset: dict[str, Any] = {"xytext": (0, 14), "textcoords": "offset points", "ha": "center"}
            panel.annotate(f"best {best:.4f}", (x, best), fontsize=9, color=VALID, **offset)


def _loss_scale(panel: Any, values: list[float]) -> None:
    """A logarithmic axis if the loss fell far, so that its end is as readable as its beginning."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(values), max(values)
    if low > 0 and high / low > 4:
        panel.set_yscale("log")
        panel.set_ylim(low / (high / low) ** 0.08, high * (high / low) ** 0.06)
        ticks = {10: (1, 1.5, 2, 3, 4, 5, 7), 30: (1, 2, 5), 1e3: (1, 3), math.inf: (1,)}  # by the ratio of the ends
        subs = next(subs for ratio, subs in ticks.items() if high / low < ratio)
        panel.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = (high - low) or abs(high) or 1.0
        panel.set_ylim(low - 0.10 * room, high + 0.06 * room)


def _draw_metrics(panel: Any, records: list[dict[str, Any]], group: list[str], evaluation: bool = True) -> None:
    ends: list[tuple[float, float, str, str]] = []
    for name, colour in zip(group, METRICS, strict=False):
        steps, values = _points(records, name, evaluation=evaluation)
        panel.plot(steps, values, color=colour, linewidth=1.9, zorder=3, **(DOTS if len(steps) <= 40 else {}))
        label = f"{_name(name)} " if len(group) > 1 else ""
        ends.append((steps[-1], values[-1], f"{label}{values[-1]:.4g}", colour))
    first = _points(records, group[0], evaluation=evaluation)[1]
    if len(group) == 1 and max(first) > 1 and not _percent(group[0]):  # such as perplexity, which falls like the loss
        _loss_scale(panel, first)
    low, high = panel.get_ylim()
    if panel.get_yscale() == "linear":
        panel.set_ylim(low - 0.04 * (high - low), high + 0.06 * (high - low))
    _labels(panel, ends)


def _draw_rate(panel: Any, rate: Points) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panel.fill_between(*rate, color=RATE, alpha=0.16, linewidth=0)
    panel.plot(*rate, color=RATE, linewidth=1.6)
    panel.set_ylim(0, max(rate[1], default=1.0) * 1.08 or 1.0)
    panel.yaxis.set_major_locator(MaxNLocator(3))
    panel.set_xlabel("step", fontsize=9.5, color=SOFT)

    def short(value: float, _: Any) -> str:
        """0.0004 as 4e-4."""
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{value:.3g}" if value == 0 or value >= 0.01 else f"{float(mantissa):g}e{int(power)}"

    panel.yaxis.set_major_formatter(FuncFormatter(short))


def _labels(panel: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Write the label of each curve to the right of its end, without overlaps."""
    gap = 13 / (panel.get_position().height * panel.figure.get_figheight() * 72)  # 13 points
    to_axes = panel.transData + panel.transAxes.inverted()
    by_height = sorted((to_axes.transform((x, y))[1], text, colour) for x, y, text, colour in ends)
    heights = spread_heights([height for height, _, _ in by_height], gap)
    for height, (_, text, colour) in zip(heights, by_height, strict=True):
        panel.text(1.015, height, text, transform=panel.transAxes, fontsize=9.5, color=colour, va="center")


def _draw_title(figure: Any, file: Path, records: list[dict[str, Any]]) -> None:
    last = records[-1]
    facts = [f"step {last['step']:,}"]
    valid = [r for r in records if _is_number(r.get("valid_loss"))]
    if valid:
        best = min(valid, key=lambda r: r["valid_loss"])
        facts.append(f"validation loss {best['valid_loss']:.4f} at step {best['step']:,}")
    if last.get("tokens"):
        facts.append(f"{format_count(last['tokens'])} tokens")
    if last.get("seconds"):
        facts.append(format_duration(last["seconds"]))
    name = file.resolve().parent.name.replace("$", "")  # matplotlib reads $ as the start of a formula
    fonts, missing = fonts_for(name)
    title = "Training" if missing or not name else name
    figure.text(0.05, 0.925, title, fontsize=15, weight="bold", color=INK, family=fonts)
    figure.text(0.05, 0.878, "  ·  ".join(facts), fontsize=10, color=SOFT)


def _name(metric: str) -> str:
    """valid_exact_match → Exact match; BLEU, chrF and CIDEr as their authors write them."""
    words = metric.removeprefix("valid_").replace("_", " ")
    return _NAMES.get(words.lower(), words[:1].upper() + words[1:])
