"""Weights as a CSV file: one line each, so that any program can filter, join and plot them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from .show import Chosen

HEADER = ("kind", "layer", "head", "row", "row_text", "col", "col_text", "weight")


def lines(what: Chosen) -> Iterator[str]:
    """The file, some rows at a time. ``row`` and ``col`` count what is shown; nine digits give a float32 back."""
    held = io.StringIO(newline="")
    out = csv.writer(held, lineterminator="\r\n")
    out.writerow(HEADER)
    first = len(range(len(what.view.rows))[: what.rows.start or 0])
    left = range(len(what.view.cols))[what.cols].start if what.col_labels else 0
    head = "mean" if what.head is None else what.head
    rows, cols = what.row_labels, what.col_labels
    for start, part in what.portions(1 << 16):
        for n, values in enumerate(part.tolist(), start):
            for m, value in enumerate(values):
                texts = (first + n, rows[n].text, left + m, cols[m].text)
                out.writerow((what.kind, what.layer, head, *texts, f"{value:.9g}"))
        yield held.getvalue()
        held.seek(0)
        held.truncate()
    if held.tell():
        yield held.getvalue()


def write(what: Chosen, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        out.writelines(lines(what))
