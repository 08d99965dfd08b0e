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

Such a file is a script of its reader's: what it names as ``module:Class`` (model.mixer) or ``module:function``
(measures) is imported and run. A grid of somebody else's is to be read first, as any script is.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.overrides import format_value
from ..errors import UsageError
from ..foundation.suggestions import did_you_mean
from .sweep import Cell, Sweep

_KNOWN = ("name", "about", "recipe", "words", "seeds", "metrics", "measures", "grid", "cells", "tests", "base_name")


def read_grid(path: Path, words: Sequence[str] = ()) -> Sweep:
    """The sweep a file describes, with more words about its base; the combination that changes nothing is the base."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in found:
        if name not in _KNOWN:
            raise UsageError(f"{path} says {name!r}, which means nothing here{did_you_mean(name, _KNOWN)}")
    if "recipe" not in found:
        raise UsageError(f"{path} names no recipe")
    tests = {str(name): str(source) for name, source in _table(path, found, "tests").items()}
    own = found.get("cells", [])
    if not isinstance(own, list):
        raise UsageError(f"{path}: cells are written [[cells]], not {own!r}")
    cells = [*_grid(_table(path, found, "grid")), *(_cell(path, x) for x in own)]
    sweep = Sweep(
        name=str(found.get("name", path.stem)),
        recipe=str(found["recipe"]),
        base_words=_texts(path, found, "words"),
        cells=tuple(cells),
        seeds=_seeds(path, found.get("seeds", 3)),
        metrics=_texts(path, found, "metrics") if "metrics" in found else ("valid_loss",),
        tests=tests,
        measures=_texts(path, found, "measures"),
        base_name=str(found.get("base_name", "base")),
        about=str(found.get("about", "")),
    )
    if "metrics" not in found:
        sweep = replace(sweep, metrics=(*sweep.metrics, *map(sweep.metric_of_test, tests)))
    return sweep.with_words(words).without_base()


def _texts(path: Path, fields: dict[str, Any], name: str) -> tuple[str, ...]:
    found = fields.get(name, [])
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise UsageError(f"{path}: {name} is a list of texts, not {found!r}")
    return tuple(found)


def _table(path: Path, fields: dict[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {name} is a table, [{name}], not {found!r}")
    return found


def _seeds(path: Path, found: Any) -> tuple[int, ...]:
    """How many, or which."""
    given = found if isinstance(found, list) else [found]
    if any(isinstance(x, bool) or not isinstance(x, int) for x in given):
        raise UsageError(f"{path}: seeds is a number or a list of numbers, not {found!r}")
    return tuple(found) if isinstance(found, list) else tuple(range(found))


def _grid(grid: dict[str, Any]) -> list[Cell]:
    if not grid:
        return []
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"grid: {key!r} needs a list of values, not {values!r}")
    cells = []
    for chosen in itertools.product(*grid.values()):
        pairs = [(key, format_value(value)) for key, value in zip(grid, chosen, strict=True)]
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
        cells.append(Cell(name.replace("/", "-").replace(":", "."), tuple(f"{key}={value}" for key, value in pairs)))
    return cells


def _cell(path: Path, fields: Any) -> Cell:
    if not isinstance(fields, dict) or "name" not in fields or set(fields) - {"name", "words", "group"}:
        raise UsageError(f"{path}: a cell has a name, words and perhaps a group, not {fields!r}")
    return Cell(str(fields["name"]), _texts(path, fields, "words"), str(fields.get("group", "")))
