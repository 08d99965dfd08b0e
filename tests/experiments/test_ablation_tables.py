"""The table of docs/ablations.md is what the stored runs say: means, standard errors and stars."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from regard.experiments.significance import compare, estimate
from regard.experiments.sweep_report import LEVEL

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = {  # as the table writes a cell, and as the sweep does
    **{f"h = {n}": f"h={n}" for n in (1, 2, 4, 16)},
    **{"d_k = 8, a quarter": "d_k=8", "d_k = 16, half": "d_k=16"},
    **{"N = 2, two thirds": "N=2", "N = 4, four thirds": "N=4"},
    **{"d_ff = 512, half": "d_ff=512", "d_ff = 2,048, double": "d_ff=2048"},
    **{f"dropout = {x}": f"dropout={x}" for x in ("0.0", "0.2", "0.3")},
    **{f"smoothing = {x}": f"smoothing={x}" for x in ("0.0", "0.2")},
    **{"positions learned": "positions=learned", "positions none": "positions=none"},
    **{"no norm": "no norm", "no residual": "no residual"},
}
COLUMNS = (("700", "valid_loss", 3), ("700", "test_bleu", 1), ("1600", "valid_loss", 3), ("1600", "test_bleu", 1))


def stored(steps: str, metric: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with (DOCS / "results" / f"ablations-{steps}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert row["status"] == "done"
            found.setdefault(row["cell"], []).append(float(row[metric]))
    return found


def written() -> dict[str, list[str]]:
    """The four columns of numbers of every row."""
    rows: dict[str, list[str]] = {}
    for line in (DOCS / "ablations.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 9 and "±" in cells[2]:
            rows["base" if cells[1].startswith("**base**") else NAMES[cells[1]]] = cells[2:6]
    return rows


@pytest.mark.parametrize(("column", "steps", "metric", "digits"), [(n, *c) for n, c in enumerate(COLUMNS)])
def test_a_column(column: int, steps: str, metric: str, digits: int) -> None:
    runs, said = stored(steps, metric), written()
    assert set(said) == set(runs)
    assert len(said) == 20
    p = compare(runs["base"], {name: values for name, values in runs.items() if name != "base"}).p
    for name, values in runs.items():
        found = estimate(values)
        star = " *" if name != "base" and p[name] < LEVEL else ""
        assert re.sub(r"\s+", " ", said[name][column]) == f"{found.mean:.{digits}f} ± {found.se:.{digits}f}{star}", name


def runs_of(name: str, *metrics: str) -> dict[str, list[list[float]]]:
    """By cell, one list for each metric; a run that could not be asked is left out."""
    found: dict[str, list[list[float]]] = {}
    with (DOCS / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            lists = found.setdefault(row["cell"], [[] for _ in metrics])
            for values, metric in zip(lists, metrics, strict=True):
                if row[metric]:
                    values.append(float(row[metric]))
    return found


def rows_of(page: str, n_columns: int) -> dict[str, list[str]]:
    lines = [line.split("|")[1:-1] for line in (DOCS / page).read_text(encoding="utf-8").splitlines()]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if len(line) == n_columns}


def test_the_number_of_heads() -> None:
    said = rows_of("ablations.md", 4)
    for cell, values in runs_of("ablate-heads", "valid_loss", "bleu").items():
        loss, bleu = (estimate(x) for x in values)
        row = said["base, h = 4" if cell == "base" else cell.replace("=", " = ")]
        assert row[1].removesuffix(" *") == f"{loss.mean:.3f} ± {loss.se:.3f}"
        assert row[2].removesuffix(" *") == f"{bleu.mean:.2f} ± {bleu.se:.2f}"


def test_beyond_the_length_of_training() -> None:
    said = rows_of("research.md", 5)
    for cell, values in runs_of("extrapolation", *(f"loss_{n}x" for n in (1, 2, 4, 8))).items():
        row = said["rope (the base)" if cell == "base" else cell.removeprefix("positions=")]
        means = [estimate(x) if x else None for x in values]
        assert row == ["cannot" if x is None else f"{x.mean:.3f} ± {x.se:.3f}" for x in means]


def test_the_shoot_out() -> None:
    lines = [line.split("|")[1:-1] for line in (DOCS / "research.md").read_text(encoding="utf-8").splitlines()]
    said = {line[1].strip(): line[2].strip() for line in lines if len(line) == 9}
    names = {"base": "**dot, sinusoidal** (the base)", "fourier": "fourier (FNet)"}
    runs = {cell: values for cell, (values,) in runs_of("mechanisms", "valid_loss").items()}
    p = compare(runs["base"], {name: values for name, values in runs.items() if name != "base"}).p
    assert len(runs) == 15
    for cell, values in runs.items():
        loss, star = estimate(values), " *" if p.get(cell, 1.0) < LEVEL else ""
        assert said[names.get(cell, cell.removeprefix("positions="))] == f"{loss.mean:.3f} ± {loss.se:.3f}{star}"
