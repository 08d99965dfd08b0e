"""``regard bench attention``: time and memory of every attention mechanism against length, and how each of them grows.

A cell is one mechanism at one length, measured in a fresh process. What would not fit into the budget of memory or time
is not started; the table says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .contenders import Contender, Setup, choose
from .fit import exponent
from .measure import Children, available_memory
from .table import Row, aligned

MOST_BYTES = 4 << 30
"""A cell may need this much, and never more than half of what the machine has free."""
ENOUGH_S = 0.3
"""Seconds of runs after which a cell's best time is believed."""
PILOT = 256
"""Where nothing shorter was measured, this length tells how long the first one asked for will take."""


@dataclass(frozen=True)
class Cell:
    """One mechanism at one length: measured, or skipped with a reason."""

    mechanism: str
    length: int
    seconds: float | None = None
    peak_bytes: int | None = None
    runs: int = 0
    threads: int = 0
    skipped: str | None = None


@dataclass(frozen=True)
class Bench:
    """All cells of one benchmark."""

    lengths: list[int]
    contenders: list[Contender]
    setup: Setup  # its length stands for none
    cells: list[Cell]
    files: list[Path]

    def of(self, name: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.mechanism == name]

    def series(self, name: str, what: str) -> tuple[list[int], list[float]]:
        """Lengths and values ("seconds" or "peak_bytes") of the cells that were measured."""
        found = [(cell.length, getattr(cell, what)) for cell in self.of(name) if cell.skipped is None]
        return [length for length, _ in found], [value for _, value in found]

    def exponent(self, name: str, what: str) -> float | None:
        """p where the value grows like lengthᵖ at the longer lengths."""
        return exponent(*self.series(name, what))

    def document(self) -> dict[str, Any]:
        """Everything as JSON: numbers are finite or null."""
        return {
            "device": "cpu",
            "threads": self.threads,
            "torch": torch.__version__,
            "direction": self.direction,
            "causal": self.setup.causal,
            "n_heads": self.setup.n_heads,
            "d_head": self.setup.d_head,
            "lengths": self.lengths,
            "mechanisms": [
                {
                    "name": contender.name,
                    "title": contender.title,
                    "note": contender.note(self.setup),
                    "time_exponent": self.exponent(contender.name, "seconds"),
                    "memory_exponent": self.exponent(contender.name, "peak_bytes"),
                    "cells": [_without_name(cell) for cell in self.of(contender.name)],
                }
                for contender in self.contenders
            ],
            "files": [str(file) for file in self.files],
        }

    @property
    def threads(self) -> int:
        """Those of the measuring processes; this one's would be beside the point."""
        return max(cell.threads for cell in self.cells) or torch.get_num_threads()

    @property
    def direction(self) -> str:
        return "forward and backward" if self.setup.backward else "forward"

    @property
    def headline(self) -> str:
        causal = "causal" if self.setup.causal else "not causal"
        heads = f"{self.setup.n_heads} heads of width {self.setup.d_head}"
        return f"{self.direction}, {causal}, {heads}, fp32, CPU threads: {self.threads}, torch {torch.__version__}"

    def table(self) -> str:
        """Both tables, then the reasons of what was skipped and the notes."""
        remarks: list[str] = []
        marks = {
            (cell.mechanism, cell.length): _mark(remarks, f"{cell.mechanism} at {cell.length:,}: {cell.skipped}")
            for cell in self.cells
            if cell.skipped is not None
        }
        titles = {c.name: c.title for c in self.contenders}
        for contender in self.contenders:
            if note := contender.note(self.setup):
                titles[contender.name] += f" {_mark(remarks, f'{contender.name} {note}')}"
        parts = [f"Attention: {self.headline}"]
        for heading, what, unit in (("time, ms", "seconds", 1e-3), ("peak memory, MiB", "peak_bytes", 2**20)):
            head = Row(heading, [f"{length:,}" for length in self.lengths], "grows like")
            rows = [self._row(c, titles[c.name], what, unit, marks) for c in self.contenders]
            parts.append(aligned([head, *rows]))
        parts += ["\n".join(remarks)] if remarks else []
        parts += ["\n".join(f"wrote {file}" for file in self.files)] if self.files else []
        return "\n\n".join(parts)

    def _row(self, contender: Contender, title: str, what: str, unit: float, marks: dict[tuple[str, int], str]) -> Row:
        values = {cell.length: getattr(cell, what) for cell in self.of(contender.name)}
        entries = [
            marks.get((contender.name, length)) or _three_digits(values[length] / unit) for length in self.lengths
        ]
        power = self.exponent(contender.name, what)
        return Row(title, entries, "–" if power is None else f"T^{power:.2f}")


def _without_name(cell: Cell) -> dict[str, Any]:
    return {key: value for key, value in asdict(cell).items() if key not in ("mechanism", "threads")}


def _mark(remarks: list[str], remark: str) -> str:
    """Add a remark; the sign that points to it: (a), (b), …"""
    n = len(remarks)
    sign = f"({'' if n < 26 else chr(96 + n // 26)}{chr(97 + n % 26)})"
    remarks.append(f"{sign} {remark}")
    return sign


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def bench_attention(
    *,
    lengths: list[int],
    mechanisms: list[str] | None = None,
    n_heads: int = 8,
    d_head: int = 64,
    causal: bool = True,
    backward: bool = False,
    out: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Measure each mechanism at each length; with ``out``, leave table, JSON and picture in that folder."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={lengths} must be at least one whole number, each at least 1")
    for name, value in (("n_heads", n_heads), ("d_head", d_head)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    contenders, lengths = choose(mechanisms), sorted(set(lengths))
    if out is not None:  # before anything is measured: nobody should wait a minute to hear that it cannot be written
        out.mkdir(parents=True, exist_ok=True)
    setup = Setup(0, n_heads, d_head, causal, backward)
    most_bytes = min(MOST_BYTES, available_memory() // 2)
    cells: list[Cell] = []
    with Children("regard.experiments.contenders") as children:
        for contender in contenders:
            known: Cell | None = None
            for length in lengths:
                cell = _cell(children, contender, replace(setup, length=length), known, most_bytes)
                known = cell if cell.skipped is None else known
                cells.append(cell)
                progress(_said(cell))
    found = Bench(lengths, contenders, setup, cells, [])
    return found if out is None else write(found, out)


def _cell(children: Children, contender: Contender, setup: Setup, known: Cell | None, most_bytes: int) -> Cell:
    needs = contender.foretold_bytes(setup)
    if needs > most_bytes:
        reason = f"needs {_amount(needs)}, more than the {_amount(most_bytes)} allowed"
        return Cell(contender.name, setup.length, skipped=reason)
    if known is None and setup.length > PILOT:
        known = _measured(children, contender, replace(setup, length=PILOT))
    if known is not None and known.seconds is not None:
        takes = contender.foretold_seconds(setup, known.length, known.seconds)
        if takes > contender.most_seconds:
            reason = f"would take about {takes:.1f} s, more than the {contender.most_seconds:g} s allowed"
            return Cell(contender.name, setup.length, threads=known.threads, skipped=reason)
    return _measured(children, contender, setup)


def _measured(children: Children, contender: Contender, setup: Setup) -> Cell:
    call = "regard.experiments.contenders:measure_cell"
    answer = children.call(call, name=contender.name, setup=asdict(setup), enough_s=ENOUGH_S)
    return Cell(
        contender.name, setup.length, answer["seconds"], answer["peak_bytes"], answer["runs"], answer["threads"]
    )


def _amount(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def _said(cell: Cell) -> str:
    if cell.seconds is None or cell.peak_bytes is None:
        return f"{cell.mechanism} at {cell.length:,}: {cell.skipped}"
    return f"{cell.mechanism} at {cell.length:,}: {cell.seconds * 1e3:,.1f} ms, {cell.peak_bytes / 2**20:,.1f} MiB"


def write(found: Bench, out: Path) -> Bench:
    """The table, the document and the picture of a benchmark, as files in a folder."""
    from .figure import draw

    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"attention.{ending}" for ending in ("txt", "json", "png")]
    found = replace(found, files=files)
    files[0].write_text(found.table() + "\n", encoding="utf-8")
    files[1].write_text(json.dumps(found.document(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    draw(found, files[2])
    return found
