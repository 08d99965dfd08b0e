"""The results of a sweep as a table like table 3 of the paper: the base first, then only what each cell changes."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.overrides import format_value
from ..foundation.checks import did_you_mean
from ..foundation.files import write_atomic
from ..training.console_display import text_width
from .benchmarking import align_columns
from .significance import Estimate, compare, estimate
from .sweep_spec import Cell, Sweep, read_result, settings

LEVEL = 0.05  # significance level of all tests of one metric together
_LARGEST_METRIC = 1e150  # the square of a larger number overflows, so it does not count as a result
TITLES = {
    "train_loss": "loss (train)",
    "valid_loss": "loss (valid)",
    "perplexity": "PPL (valid)",
    "bleu": "BLEU (valid)",
    "test_bleu": "BLEU (test)",
    "loss_token_by_token": "loss token by token",
}
_FACTS = ("parameters", "seconds", "memory_mib")
_SMALLER_IS_BETTER = (
    *("loss", "nll", "perplexity", "ppl", "bits", "bpb", "error", "errors", "mse", "rmse", "mae", "cer", "wer", "ter"),
    *("seconds", "time", "latency", "ms", "memory", "mib", "bytes", "flops", "parameters"),
)
# The paper's symbols for fields; other columns have the field's own name.
_SYMBOLS = {
    **{"model.n_layers": "N", "model.d_model": "d_model", "model.d_ff": "d_ff", "model.n_heads": "h"},
    **{"d_k": "d_k", "model.dropout": "P_drop", "train.label_smoothing": "ε_ls", "train.steps": "steps"},
}


def smaller_is_better(metric: str) -> bool:
    """Judged by the words in the metric's name: test_loss, loss_4x, cer, memory_mib."""
    return not set(_SMALLER_IS_BETTER).isdisjoint(re.split(r"[^a-z]+", metric.lower()))


@dataclass(frozen=True)
class CellSummary:
    """One cell and the results of its seeds."""

    cell: Cell
    changed: dict[str, str]  # the columns that differ from the base, with their texts; for the base, all columns
    runs: dict[int, dict[str, Any] | None]
    estimates: dict[str, Estimate]  # by metric, over the finished seeds
    p: dict[str, float] = field(default_factory=dict)  # p-values against the base, corrected for the number of cells
    apart: list[str] = field(default_factory=list)  # metrics tested separately because their seeds spread so widely

    def _count(self, status: str | None) -> int:
        return sum((None if x is None else x["status"]) == status for x in self.runs.values())

    results = property(lambda self: [x for x in self.runs.values() if x is not None])
    n_done = property(lambda self: self._count("done"))
    n_diverged = property(lambda self: self._count("diverged"))
    n_failed = property(lambda self: self._count("failed"))
    n_missing = property(lambda self: self._count(None))

    def mean_of(self, name: str) -> float | None:
        """The mean of parameters, seconds, memory_mib or train_loss over the runs that have it."""
        values = [x[name] for x in self.results if x.get(name) is not None]
        return sum(values) / len(values) if values else None

    def differs(self, metric: str) -> bool:
        return self.p.get(metric, 1.0) < LEVEL

    @property
    def state(self) -> str:
        """The number of seeds without a result, and why; "" if all have one."""
        parts = [(self.n_diverged, "diverged"), (self.n_failed, "failed"), (self.n_missing, "not run yet")]
        n = len(self.runs)
        return ", ".join(status if count == n else f"{count} of {n} {status}" for count, status in parts if count)

    def to_dict(self) -> dict[str, Any]:
        metrics = {}
        for name, x in self.estimates.items():
            metrics[name] = {"mean": x.mean, "se": x.se, "values": list(x.values), "p": self.p.get(name)}
        return {
            **{"name": self.cell.name, "group": self.cell.group, "words": list(self.cell.words)},
            "changed": self.changed,
            **{name: getattr(self, f"n_{name}") for name in ("done", "diverged", "failed", "missing")},
            "metrics": metrics,
            **{name: self.mean_of(name) for name in (*_FACTS, "train_loss")},
            "messages": sorted({x["message"] for x in self.results if x.get("message")}),
        }


@dataclass(frozen=True)
class SweepReport:
    """The results of a sweep, as text, Markdown, CSV and a dict."""

    sweep: Sweep
    out: Path
    columns: tuple[str, ...]
    rows: tuple[CellSummary, ...]  # the base first

    @property
    def base(self) -> CellSummary:
        return self.rows[0]

    def __getitem__(self, name: str) -> CellSummary:
        for row in self.rows:
            if row.cell.name == name:
                return row
        raise KeyError(f"{name!r} is not one of {', '.join(row.cell.name for row in self.rows)}")

    @property
    def finished(self) -> bool:
        return not any(row.n_missing or row.n_failed for row in self.rows)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The sweep's metrics that at least one run has."""
        return tuple(name for name in self.sweep.metrics if any(name in row.estimates for row in self.rows))

    @property
    def has_figures(self) -> bool:
        """Whether there is a result to draw."""
        return bool(self.metrics) and any(row.n_done for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.sweep.name,
            "out": str(self.out),
            "finished": self.finished,
            "recipe": self.sweep.recipe,
            "base_words": list(self.sweep.base_words),
            "seeds": list(self.sweep.seeds),
            "metrics": list(self.metrics),
            "level": LEVEL,
            "test": "Dunnett's",
            "cells": [row.to_dict() for row in self.rows],
            "said": self.conclusions(),
        }

    def csv(self) -> str:
        measured = [part for name in self.metrics for part in (name, f"{name}_se", f"{name}_p")]
        lines: list[list[Any]] = [["cell", "group", *self.columns, *measured, *_FACTS, "seeds", "diverged"]]
        for row in self.rows:
            numbers: list[Any] = []
            for name in self.metrics:
                x = row.estimates.get(name)
                numbers += ["", "", ""] if x is None else [x.mean, x.se, row.p.get(name)]
            fields = [row.changed.get(name, self.base.changed[name]) for name in self.columns]
            facts = [row.mean_of(name) for name in _FACTS]
            lines.append([row.cell.name, row.cell.group, *fields, *numbers, *facts, row.n_done, row.n_diverged])
        return _format_csv(lines)

    def runs_csv(self) -> str:
        runs = [(row.cell.name, seed, x) for row in self.rows for seed, x in row.runs.items() if x is not None]
        names = sorted({name for _, _, x in runs for name, value in x["metrics"].items() if isinstance(value, float)})
        facts = ("train_loss", "reached", *_FACTS)
        lines: list[list[Any]] = [["cell", "seed", "status", *names, *facts]]
        for cell, seed, x in runs:
            metrics = [x["metrics"].get(name) for name in names]
            lines.append([cell, seed, x["status"], *metrics, *(x.get(name) for name in facts)])
        return _format_csv(lines)

    def _lines(self) -> list[list[str]]:
        head = ["", "", *(_SYMBOLS.get(name, name.rpartition(".")[2]) for name in self.columns)]
        head += [TITLES.get(name, name) for name in self.metrics] + ["params", "time"]
        lines, group = [head], ""
        for row in self.rows:
            letter = f"({row.cell.group})" if row.cell.group and row.cell.group != group else ""
            group = row.cell.group
            fields = [row.changed.get(name, "") for name in self.columns]
            number, seconds = row.mean_of("parameters"), row.mean_of("seconds")
            size = "" if number is None else _format_parameters(number)
            facts = [size, "" if seconds is None else f"{seconds:.0f} s"]
            lines.append([letter, row.cell.name, *fields, *(self._number(row, name) for name in self.metrics), *facts])
        return lines

    def _number(self, row: CellSummary, name: str) -> str:
        x = row.estimates.get(name)
        if x is None:
            return row.state or "–"
        digits = 2 if abs(x.mean) >= 5 else 3
        spread = "" if x.se is None else f" ± {x.se:.{digits}f}"
        return f"{x.mean:.{digits}f}{spread}{' *' if row.differs(name) else '  '}"

    def to_text(self) -> str:
        texts = [line.rstrip() for line in align_columns(self._lines(), n_left=2)]
        rule = "─" * max(map(text_width, texts))
        files = f"{self.out}/table.md{', results.png' if self.has_figures else ''}"
        return "\n".join([texts[0], rule, texts[1], rule, *texts[2:], "", *self.conclusions(), files])

    def markdown(self) -> str:
        lines = self._lines()
        rows = [" | ".join(text.strip().replace("|", "\\|") for text in line) for line in lines]
        align = "|".join(["---"] * 2 + ["---:"] * (len(lines[0]) - 2))
        words = " ".join(self.sweep.base_words)
        base = f"Base: recipe `{self.sweep.recipe}`" + (f" with `{words}`." if words else ".")
        table = "\n".join([f"| {rows[0]} |", f"|{align}|", *(f"| {row} |" for row in rows[1:])])
        conclusions = "\n".join(f"- {line}" for line in self.conclusions())
        blocks = (f"# {self.sweep.name}", self.sweep.about, base, table, f"{conclusions}\n")
        return "\n\n".join(blocks).replace("\n\n\n", "\n")

    @property
    def seeds_text(self) -> str:
        """The number of seeds that the means are taken over."""
        counts = {row.n_done for row in self.rows if row.n_done}
        if not counts:
            return "no run is finished"
        n, most = min(counts), max(counts)
        if most < 2:
            return "one seed: no standard error, nothing is tested"
        return f"mean ± standard error over {n if n == most else f'{n} to {most}'} seeds"

    def conclusions(self) -> list[str]:
        """The results of the tests, and caveats: failed, missing or differing runs."""
        lines = [self.seeds_text]
        for name in self.metrics:
            if name != "perplexity" or "valid_loss" not in self.metrics:  # perplexity is exp(loss)
                lines += self._verdict(name)
        for row in self.rows:
            if row.n_diverged or row.n_failed:
                first = next(x for x in row.results if x["status"] != "done")
                lines.append(f"{row.cell.name}: {row.state}; {first.get('message', '')}")
        if n_missing := sum(row.n_missing for row in self.rows):
            lines.append(f"{n_missing} runs are not done yet")
        runs = [x for row in self.rows for x in row.results]
        if len({x["data_sha256"] for x in runs if x.get("data_sha256")}) > 1:
            lines.append("not all runs saw the same data")
        orders = {seed: x.get("order") for seed, x in self.base.runs.items() if x is not None}
        others: list[str] = []  # cells whose overrides change the batches
        for row in self.rows[1:]:
            pairs = [(x.get("order"), orders.get(seed)) for seed, x in row.runs.items() if x is not None]
            others += [row.cell.name] if any(own and base not in (None, own) for own, base in pairs) else []
        if others:
            lines.append(f"other batches than the base: {', '.join(others)}")
        lines += missing_answers(self.sweep, runs)
        for row in self.rows:  # sample outputs of each cell's first run, if a measure provides them
            for x in next((run["samples"] for run in row.results if run.get("samples")), ()):
                lines.append(f"{row.cell.name} writes {x['output']!r} for {x['source']!r}: {x['target']!r}")
        return lines

    def _verdict(self, name: str) -> list[str]:
        tested = [row for row in self.rows[1:] if name in row.p]
        if not tested:
            return []
        sign, base = 1 if smaller_is_better(name) else -1, self.base.estimates[name].mean
        groups: dict[str, list[str]] = {"better": [], "worse": [], "not significant": []}
        for row in tested:
            gap = sign * (row.estimates[name].mean - base)
            if not row.differs(name):
                groups["not significant"].append(row.cell.name)
            elif gap:
                groups["better" if gap < 0 else "worse"].append(row.cell.name)
        wide = [row.cell.name for row in tested if name in row.apart]
        how = f"Dunnett's test of {len(tested)} cells" if len(tested) > 1 else "t-test"
        if len(wide) == len(tested):
            how = f"Welch's t-test, {len(tested)} cells, as the base's seeds spread far more than theirs"
        elif wide:
            how += f"; by Welch's, as its seeds spread far more: {', '.join(wide)}"
        verdict = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items() if names)
        return [f"{TITLES.get(name, name)} against {self.base.cell.name} (* p < {LEVEL:g}, {how}): {verdict}"]


def _format_parameters(n: float) -> str:
    return f"{n:,.0f}" if n < 1e5 else f"{n / 1e6:.{1 if n >= 1e7 else 2}f} M"


def _format_csv(lines: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


# ------------------------------------------------------------------------------------- from a directory


def write_report(out: str | Path, sweep: Sweep | None = None) -> SweepReport:
    """The report of a sweep's directory, which is also written there: table.md, table.csv, runs.csv and figures."""
    from .sweep_figures import draw_curves, draw_results

    out = Path(out)
    report = _read_report(sweep or Sweep.read(out), out)
    for name, text in (("table.md", report.markdown), ("table.csv", report.csv), ("runs.csv", report.runs_csv)):
        write_atomic(out / name, text().encode())
    if report.has_figures:
        draw_results(report, out / "results.png")
        draw_curves(report, out / "curves.png")
    return report


def _read_report(sweep: Sweep, out: Path) -> SweepReport:
    """Read the results and compare each cell with the base, unless some of its seeds diverged."""
    columns, changed = _columns({cell.name: sweep.config(cell) for cell in sweep.rows}, sweep.base_name)
    rows = []
    for cell in sweep.rows:
        runs = {seed: read_result(out, cell.name, seed) for seed in sweep.seeds}
        row = CellSummary(cell, changed[cell.name], runs, {})
        done = [x for x in row.results if x["status"] == "done"]
        for name in sweep.metrics:
            numbers = [x["metrics"].get(name, x.get(name)) for x in done]
            if values := [float(x) for x in numbers if isinstance(x, int | float) and abs(x) < _LARGEST_METRIC]:
                row.estimates[name] = estimate(values)
        rows.append(row)
    base, *others = rows
    for metric in sweep.metrics if not base.n_diverged else ():
        if metric in base.estimates:
            compared = [row for row in others if metric in row.estimates and not row.n_diverged]
            by_cell = {row.cell.name: row.estimates[metric].values for row in compared}
            comparison = compare(base.estimates[metric].values, by_cell)
            for row in others:
                if row.cell.name in comparison.p:
                    row.p[metric] = comparison.p[row.cell.name]
                if row.cell.name in comparison.apart:
                    row.apart.append(metric)
    return SweepReport(sweep, out, columns, tuple(rows))


def _columns(configs: dict[str, RunConfig], base: str) -> tuple[tuple[str, ...], dict[str, dict[str, str]]]:
    """The fields that have a column, and each cell's texts for them: all for the base, the changed ones for others."""
    values = {}
    for name, config in configs.items():
        values[name], model = settings(config), config.model
        if model.architecture != "recurrent":  # show the width of a head as d_k
            values[name]["d_k"] = model.head_width
            del values[name]["model.d_head"]
        if model.embedding_dropout == model.dropout:  # and equal dropouts as one
            values[name]["model.embedding_dropout"] = None
    changed = {key for fields in values.values() for key in fields if fields[key] != values[base].get(key)}
    always = ["model.n_layers", "model.d_model", "model.d_ff", "model.n_heads"]
    always = always[:2] if configs[base].model.architecture == "recurrent" else always
    columns = tuple(dict.fromkeys(key for key in (*_SYMBOLS, *values[base]) if key in changed or key in always))
    texts: dict[str, dict[str, str]] = {}
    for name, fields in values.items():
        own = [key for key in columns if name == base or fields.get(key) != values[base].get(key)]
        texts[name] = {key: format_value(fields.get(key)) for key in own}
    return columns, texts


def missing_answers(sweep: Sweep, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about tests, measures and metrics that finished runs lack; runs that are done are not repeated."""
    done, lines = [x for x in runs if x["status"] == "done"], list[str]()
    if not done:
        return lines

    def share(n: int) -> str:
        return f"{n} of {len(done)} finished runs {'was' if n == 1 else 'were'}"

    for name, source in sweep.tests.items():
        for other, n in Counter(x.get("tests", {}).get(name) for x in done).items():
            if other is None:
                lines.append(f"{share(n)} not evaluated on {name}: it was added after they were done")
            elif other != source:
                lines.append(f"{share(n)} evaluated on {name}={other}, not {source}")
    for measure in sweep.measures:
        if n := sum(measure not in x.get("measures", (measure,)) for x in done):
            lines.append(f"{share(n)} not measured by {measure}: it was added after they were done")
    answers = [pair for x in done for pair in (*x.items(), *x["metrics"].items())]
    known = {name for name, value in answers if isinstance(value, int | float) and not isinstance(value, bool)}
    refused = {name for x in done for name in x["metrics"].get("cannot") or ()}
    for name in sweep.metrics:
        if name not in known | refused:
            needs_test = name.partition("_")[0] == "test" and "test" not in sweep.tests
            hint = "; --test gives it" if needs_test else did_you_mean(name, sorted(known))
            lines.append(f"no finished run has the metric {name}{hint}")
    return lines
