"""A grid of one's own, as a TOML file.

name = "width"                        # unless given, the file's name
recipe = "en-ko"                      # of `regard train --list`
words = ["train.steps=500"]           # about the base
seeds = 3
metrics = ["valid_loss", "bleu"]
[grid]                                # every combination is a cell
"model.n_heads" = [1, 4]
"model.d_ff" = [128, 512]
[[cells]]                             # and cells of their own
name = "no norm"
words = ["model.norm=none"]
[tests]                               # evaluated too: test_bleu
test = "test.en,test.de"
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.words import UsageError, nearest, written
from .sweep import Cell, Sweep, settings

_KNOWN = ("name", "about", "recipe", "words", "seeds", "metrics", "measures", "grid", "cells", "tests", "base_name")


def read_grid(path: Path) -> Sweep:
    """The sweep a file describes."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in found:
        if name not in _KNOWN:
            raise UsageError(f"{path} says {name!r}, which means nothing here{nearest(name, _KNOWN)}")
    if "recipe" not in found:
        raise UsageError(f"{path} names no recipe")
    seeds = found.get("seeds", 3)
    cells = [*_grid(found.get("grid", {})), *(_cell(path, x) for x in found.get("cells", ()))]
    tests = {str(name): str(source) for name, source in found.get("tests", {}).items()}
    metrics = tuple(found.get("metrics", ("valid_loss", *(f"{name}_bleu" for name in tests))))
    sweep = Sweep(
        name=str(found.get("name", path.stem)),
        recipe=str(found["recipe"]),
        base_words=tuple(found.get("words", ())),
        cells=tuple(cells),
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        metrics=metrics,
        tests=tests,
        measures=tuple(found.get("measures", ())),
        base_name=str(found.get("base_name", "base")),
        about=str(found.get("about", "")),
    )
    return _without_base(sweep)


def _grid(grid: dict[str, Any]) -> list[Cell]:
    if not grid:
        return []
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"grid: {key!r} needs a list of values, not {values!r}")
    cells = []
    for chosen in itertools.product(*grid.values()):
        pairs = [(key, written(value)) for key, value in zip(grid, chosen, strict=True)]
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
        cells.append(Cell(name.replace("/", "-"), tuple(f"{key}={value}" for key, value in pairs)))
    return cells


def _without_base(sweep: Sweep) -> Sweep:
    """The combination that changes nothing is the base itself."""
    base = settings(sweep.config(sweep.rows[0]))
    return replace(sweep, cells=tuple(cell for cell in sweep.cells if settings(sweep.config(cell)) != base))


def _cell(path: Path, fields: Any) -> Cell:
    if not isinstance(fields, dict) or "name" not in fields or set(fields) - {"name", "words", "group"}:
        raise UsageError(f"{path}: a cell has a name, words and perhaps a group, not {fields!r}")
    return Cell(str(fields["name"]), tuple(fields.get("words", ())), str(fields.get("group", "")))
