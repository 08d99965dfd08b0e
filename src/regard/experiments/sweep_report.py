"""What a sweep came to, printed as the paper prints its table 3: the base on top, below it only what was changed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .significance import Estimate, compare, estimate
from .sweep import Cell, Sweep, read_result
from .sweep_asked import not_asked, smaller_is_better
from .sweep_columns import columns_of, symbol

__all__ = ["LEVEL", "Report", "RowOf", "gather", "smaller_is_better"]

LEVEL = 0.05
"""Of all tests of a metric together."""
TITLES = {
    **{"train_loss": "loss (train)", "valid_loss": "loss (valid)", "perplexity": "PPL (valid)"},
    **{"bleu": "BLEU (valid)", "test_bleu": "BLEU (test)", "loss_token_by_token": "loss token by token"},
}


@dataclass(frozen=True)
class RowOf:
    """One cell and what its seeds came to."""

    cell: Cell
    changed: dict[str, str]
    """Of the table's columns, those in which it differs from the base; of the base, all."""
    runs: dict[int, dict[str, Any] | None]
    estimates: dict[str, Estimate]
    """Over the seeds that were done."""
    p: dict[str, float] = field(default_factory=dict)
    """Against the base, corrected for the number of cells; missing where there is nothing to test."""
    apart: tuple[str, ...] = ()
    """Metrics in which its seeds spread so far that it was tested by itself."""

    def _count(self, status: str) -> int:
        return sum(x is not None and x["status"] == status for x in self.runs.values())

    @property
    def n_done(self) -> int:
        return self._count("done")

    @property
    def n_diverged(self) -> int:
        return self._count("diverged")

    @property
    def n_failed(self) -> int:
        return self._count("failed")

    @property
    def n_missing(self) -> int:
        return sum(x is None for x in self.runs.values())

    def mean_of(self, name: str) -> float | None:
        """Of the runs that know it: parameters, seconds, memory_mib, train_loss."""
        known = [x[name] for x in self.runs.values() if x is not None and x.get(name) is not None]
        return sum(known) / len(known) if known else None

    def differs(self, metric: str) -> bool:
        return self.p.get(metric, 1.0) < LEVEL

    @property
    def state(self) -> str:
        """What is to be said where not every seed was done."""
        parts = [(self.n_diverged, "diverged"), (self.n_failed, "failed"), (self.n_missing, "not run yet")]
        n = len(self.runs)
        return ", ".join(what if count == n else f"{count} of {n} {what}" for count, what in parts if count)

    def document(self) -> dict[str, Any]:
        return {
            **{"name": self.cell.name, "group": self.cell.group, "words": list(self.cell.words)},
            **{"changed": self.changed, "done": self.n_done, "diverged": self.n_diverged, "failed": self.n_failed},
            "missing": self.n_missing,
            "metrics": {
                name: {"mean": x.mean, "se": x.se, "values": list(x.values), "p": self.p.get(name)}
                for name, x in self.estimates.items()
            },
            **{name: self.mean_of(name) for name in ("parameters", "seconds", "memory_mib", "train_loss")},
            "messages": sorted({x["message"] for x in self.runs.values() if x is not None and x.get("message")}),
        }


@dataclass(frozen=True)
class Report:
    """The table, for people and for machines."""

    sweep: Sweep
    out: Path
    columns: tuple[str, ...]
    rows: tuple[RowOf, ...]
    """The base first."""

    @property
    def base(self) -> RowOf:
        return self.rows[0]

    def __getitem__(self, name: str) -> RowOf:
        for row in self.rows:
            if row.cell.name == name:
                return row
        raise KeyError(f"{name!r} is none of {', '.join(row.cell.name for row in self.rows)}")

    @property
    def finished(self) -> bool:
        return not any(row.n_missing or row.n_failed for row in self.rows)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those asked for that some run has."""
        return tuple(name for name in self.sweep.metrics if any(name in row.estimates for row in self.rows))

    # ------------------------------------------------------------------------------------- for machines

    def document(self) -> dict[str, Any]:
        return {
            **{"name": self.sweep.name, "out": str(self.out), "finished": self.finished},
            **{"recipe": self.sweep.recipe, "base_words": list(self.sweep.base_words), "seeds": list(self.sweep.seeds)},
            **{"metrics": list(self.metrics), "level": LEVEL, "test": "Dunnett's"},
            "cells": [row.document() for row in self.rows],
            "said": self.said(),
        }

    def csv(self) -> str:
        """A line a cell."""
        measured = [part for name in self.metrics for part in (name, f"{name}_se", f"{name}_p")]
        head = ["cell", "group", *self.columns, *measured, "parameters", "seconds", "memory_mib", "seeds", "diverged"]
        return _csv([head, *([*map(str, self._csv_row(row))] for row in self.rows)])

    def _csv_row(self, row: RowOf) -> list[Any]:
        numbers: list[Any] = []
        for name in self.metrics:
            found = row.estimates.get(name)
            numbers += ["", "", ""] if found is None else [found.mean, _or(found.se), _or(row.p.get(name))]
        facts = [_or(row.mean_of(name)) for name in ("parameters", "seconds", "memory_mib")]
        shown = [row.changed.get(name, self.base.changed[name]) for name in self.columns]
        return [row.cell.name, row.cell.group, *shown, *numbers, *facts, row.n_done, row.n_diverged]

    def runs_csv(self) -> str:
        """A line a run."""
        runs = [(row.cell.name, seed, x) for row in self.rows for seed, x in row.runs.items() if x is not None]
        names = sorted({name for _, _, x in runs for name, value in x["metrics"].items() if isinstance(value, float)})
        facts = ("train_loss", "reached", "parameters", "seconds", "memory_mib")
        lines = [["cell", "seed", "status", *names, *facts]]
        for cell, seed, x in runs:
            values = [*(x["metrics"].get(name) for name in names), *(x.get(name) for name in facts)]
            lines.append([cell, str(seed), x["status"], *(str(_or(value)) for value in values)])
        return _csv(lines)

    # ------------------------------------------------------------------------------------- for people

    def _lines(self) -> list[list[str]]:
        """Head and rows as texts."""
        head = ["", "", *(symbol(name) for name in self.columns)]
        head += [TITLES.get(name, name) for name in self.metrics] + ["params", "time"]
        lines, group = [head], ""
        for row in self.rows:
            letter = f"({row.cell.group})" if row.cell.group and row.cell.group != group else ""
            group = row.cell.group
            fields = [row.changed.get(name, "") for name in self.columns]
            n_parameters, seconds = row.mean_of("parameters"), row.mean_of("seconds")
            facts = [
                "" if n_parameters is None else _millions(n_parameters),
                "" if seconds is None else f"{seconds:.0f} s",
            ]
            lines.append([letter, row.cell.name, *fields, *(self._number(row, name) for name in self.metrics), *facts])
        return lines

    def _number(self, row: RowOf, name: str) -> str:
        found = row.estimates.get(name)
        if found is None:
            return row.state or "–"
        digits = 2 if abs(found.mean) >= 5 else 3
        spread = "" if found.se is None else f" ± {found.se:.{digits}f}"
        mark = " *" if row.differs(name) else "  "
        return f"{found.mean:.{digits}f}{spread}{mark}"

    def table(self) -> str:
        lines = self._lines()
        widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
        shown = []
        for line in lines:
            texts = [
                text.ljust(n) if place < 2 else text.rjust(n)
                for place, (text, n) in enumerate(zip(line, widths, strict=True))
            ]
            shown.append("  ".join(texts).rstrip())
        rule = "─" * max(map(len, shown))
        return "\n".join(
            [shown[0], rule, shown[1], rule, *shown[2:], "", *self.said(), f"{self.out}/table.md, results.png"]
        )

    def markdown(self) -> str:
        lines = self._lines()
        rows = [" | ".join(text.strip().replace("|", "\\|") for text in line) for line in lines]
        align = "|".join(["---"] * 2 + ["---:"] * (len(lines[0]) - 2))
        words = " ".join(self.sweep.base_words)
        about = (
            f"Base: recipe `{self.sweep.recipe}` with `{words}`." if words else f"Base: recipe `{self.sweep.recipe}`."
        )
        table = "\n".join([f"| {rows[0]} |", f"|{align}|", *(f"| {row} |" for row in rows[1:])])
        said = "\n".join(f"- {line}" for line in self.said())
        return f"# {self.sweep.name}\n\n{self.sweep.about}\n\n{about}\n\n{table}\n\n{said}\n".replace("\n\n\n", "\n")

    @property
    def seeds_said(self) -> str:
        """Over how many seeds the numbers are."""
        counts = {row.n_done for row in self.rows if row.n_done} or {0}
        n, most = min(counts), max(counts)
        if most < 2:
            return "one seed: no standard error, nothing is tested"
        return f"mean ± standard error over {n if n == most else f'{n} to {most}'} seeds"

    def said(self) -> list[str]:
        """What the numbers allow to say, and what they do not."""
        lines = [self.seeds_said]
        for name in self.metrics:
            if name != "perplexity" or "valid_loss" not in self.metrics:  # one is the other's exponential
                lines += self._verdict(name)
        lines += [f"{row.cell.name}: {_why(row)}" for row in self.rows if row.n_diverged or row.n_failed]
        if unrun := sum(row.n_missing for row in self.rows):
            lines.append(f"{unrun} runs are not done yet")
        if (
            len({x.get("data_sha256") for row in self.rows for x in row.runs.values() if x and x.get("data_sha256")})
            > 1
        ):
            lines.append("not all runs saw the same data")
        if others := self._other_order():
            lines.append(f"other batches than the base: {', '.join(others)}")
        runs = [x for row in self.rows for x in row.runs.values() if x is not None]
        return lines + not_asked(self.sweep, runs) + self._samples()

    def _samples(self) -> list[str]:
        """What the first run of each cell writes, where it was asked to show it."""
        shown: list[str] = []
        for row in self.rows:
            first = next((x for x in row.runs.values() if x is not None and x.get("samples")), None)
            for sample in first["samples"] if first is not None else ():
                shown.append(
                    f"{row.cell.name} writes {sample['output']!r} for {sample['source']!r}: {sample['target']!r}"
                )
        return shown

    def _verdict(self, name: str) -> list[str]:
        tested = [row for row in self.rows[1:] if name in row.p]
        if not tested:
            return []
        title, sign = TITLES.get(name, name), 1 if smaller_is_better(name) else -1
        found, base = [row for row in tested if row.differs(name)], self.base.estimates[name].mean
        better = [row.cell.name for row in found if sign * (row.estimates[name].mean - base) < 0]
        worse = [row.cell.name for row in found if sign * (row.estimates[name].mean - base) > 0]
        same = [row.cell.name for row in tested if not row.differs(name)]
        parts = [f"{what}: {', '.join(who)}" for what, who in (("better", better), ("worse", worse)) if who]
        parts += [f"not significant: {', '.join(same)}"] if same else []
        wide = [row.cell.name for row in tested if name in row.apart]
        how = f"Dunnett's test of {len(tested)} cells" if len(tested) > 1 else "t-test"
        if len(wide) == len(tested):
            how = f"Welch's t-test, {len(tested)} cells, as the base's seeds spread far more than theirs"
        elif wide:
            how += f"; by Welch's, as its seeds spread far more: {', '.join(wide)}"
        return [f"{title} against {self.base.cell.name} (* p < {LEVEL:g}, {how}): {'; '.join(parts)}"]

    def _other_order(self) -> list[str]:
        """Cells whose words change the batches themselves."""
        known = {seed: x.get("order") for seed, x in self.base.runs.items() if x is not None}
        return [
            row.cell.name
            for row in self.rows[1:]
            if any(x and x.get("order") and known.get(seed) not in (None, x["order"]) for seed, x in row.runs.items())
        ]


def gather(sweep: Sweep, out: Path) -> Report:
    """Read the results and compare each cell with the base."""
    configs = {cell.name: sweep.config(cell) for cell in sweep.rows}
    columns, shown = columns_of(configs, sweep.base_name)
    rows = []
    for cell in sweep.rows:
        runs = {seed: read_result(out, cell.name, seed) for seed in sweep.seeds}
        found = {name: estimate(values) for name in sweep.metrics if (values := _values(runs, name))}
        rows.append(RowOf(cell, shown[cell.name], runs, found))
    return Report(sweep, out, columns, tuple(_tested(rows, sweep.metrics)))


def _values(runs: dict[int, dict[str, Any] | None], name: str) -> list[float]:
    done = [x for x in runs.values() if x is not None and x["status"] == "done"]
    values = [x["metrics"].get(name, x.get(name)) for x in done]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _tested(rows: list[RowOf], metrics: Sequence[str]) -> list[RowOf]:
    """Every metric of every cell against the base. A cell that lost seeds to divergence is not compared by the rest."""
    base = rows[0]
    found: dict[str, dict[str, float]] = {row.cell.name: {} for row in rows}
    apart: dict[str, list[str]] = {row.cell.name: [] for row in rows}
    for metric in metrics:
        if metric not in base.estimates or base.n_diverged:
            continue
        whole = [row for row in rows[1:] if metric in row.estimates and not row.n_diverged]
        compared = compare(
            base.estimates[metric].values, {row.cell.name: row.estimates[metric].values for row in whole}
        )
        for name, p in compared.p.items():
            found[name][metric] = p
        for name in compared.apart:
            apart[name].append(metric)
    return [
        replace(row, p=found[row.cell.name], apart=tuple(apart[row.cell.name])) if row is not base else row
        for row in rows
    ]


def _why(row: RowOf) -> str:
    """What became of runs that were not done, with the first message of each kind."""
    seen = [x for x in row.runs.values() if x is not None and x["status"] != "done"]
    return f"{row.state}; {seen[0].get('message', '')}" if seen else row.state


def _millions(n: float) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1e7 else f"{n / 1e6:.2f} M" if n >= 1e5 else f"{n:,.0f}"


def _or(value: Any) -> Any:
    return "" if value is None else value


def _csv(lines: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
