"""A sweep: one run repeated with one setting changed at a time, each cell with several seeds, in one directory.

OUT/sweep.json                    the definition of the sweep
OUT/shared/…                      tokenizers, trained once for all runs on the same data
OUT/cells/CELL/seed-N/result.json the outcome of one run, written atomically at its end; a run that has one is done
OUT/cells/CELL/seed-N/run/        its run directory, for resuming; the weights are deleted when it is done
OUT/table.md, table.csv, runs.csv, results.png, curves.png

Runs with the same seed see the same batches in the same order in every cell. Paths inside OUT are relative, so the
directory can be moved. A sweep's directory is not trusted: nothing it names is imported. To resume a sweep with a
mechanism of your own, name the mechanism again, list it in REGARD_MIXERS, or add it to ``MIXERS``; list a model class
in REGARD_MODELS, or register it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..config import ModelConfig, RunConfig
from ..config.mixers import get_mixer
from ..config.overrides import flat_fields, format_value, parse_overrides
from ..errors import BadModelFile, RegardError, UsageError
from ..foundation.checks import did_you_mean
from ..foundation.files import write_atomic
from ..foundation.jsonio import read_json, to_json
from ..models.build import model_class
from ..recipes import recipe as recipe_of
from ..recipes import run_config
from ..training.run_inputs import open_run_source, resolve_run

SWEEP_FILE, RESULT_FILE = "sweep.json", "result.json"
FINAL = ("done", "diverged")  # final outcomes; a failed run is tried again by the next call
# Paths and devices may differ between machines; results record the hash of their data instead.
_MACHINE_FIELDS = ("data.source", "data.valid", "train.out", "train.seed", "train.device")
# Fields without effect in a recurrent model, and in a model without norms.
_UNUSED_RECURRENT = ("n_heads", "n_kv_heads", "d_head", "d_ff", "positions", "norm", "norm_place", "attention_scale")
_UNUSED_WITHOUT_NORM = ("norm_place", "norm_eps", "norm_bias")
_FILES_OF_FINISHED_RUN = ("run.json", "provenance.json", "metrics.jsonl", "evaluation.json")
_CELL_NAME = re.compile(r"[^\W/\\:]([\w.,=+ ×½¼-]*[^\W/\\:])?")


@dataclass(frozen=True)
class Cell:
    """One row of the table: overrides (``model.n_heads=1``) of the base."""

    name: str
    words: tuple[str, ...] = ()
    group: str = ""  # rows of a group are listed under its letter, as in the paper's table 3

    def __post_init__(self) -> None:
        if not _CELL_NAME.fullmatch(self.name):
            raise UsageError(f"cell name {self.name!r}: letters, digits and . , = + - are allowed")


@dataclass(frozen=True)
class Sweep:
    """A base (a recipe with overrides) and cells that each change one thing about it."""

    name: str
    recipe: str  # a name in ``regard.RECIPES``; determines the task
    base_words: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()  # the base itself is not listed; it is always run
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("valid_loss",)  # columns of the table, tested against the base; figures use the first
    # Further examples to evaluate each finished model on, by name: {"test": "test.en,test.de"} → test_bleu, …
    tests: Mapping[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = ()  # functions ``package.module:name``: directory of a finished run → more metrics
    base_name: str = "base"
    about: str = ""
    ending: str = ""  # the name of its report in ``extended_reports.extend_report``
    stored: bool = field(default=False, compare=False)  # read from a directory, so nothing that it names is imported

    def __post_init__(self) -> None:
        folders: dict[str, str] = {}
        for cell in self.rows:
            # Some file systems ignore case and Unicode normalisation.
            folder = unicodedata.normalize("NFC", cell.name.replace(" ", "_")).casefold()
            if folders.setdefault(folder, cell.name) != cell.name:
                raise UsageError(f"cells {folders[folder]!r} and {cell.name!r} would share a directory")
        names = [cell.name for cell in self.rows]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"two cells are called {min(duplicates)!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds={self.seeds} must be one or more different numbers")
        if not self.metrics:
            raise UsageError("a sweep needs at least one metric")

    @property
    def rows(self) -> tuple[Cell, ...]:
        """The base, then the cells."""
        return (Cell(self.base_name), *self.cells)

    def config(self, cell: Cell, seed: int = 0) -> RunConfig:
        """The config of a cell's run; the runner sets ``train.out``."""
        words = merge_words(self.base_words, cell.words, (f"train.seed={seed}",))
        for word in words if self.stored else ():
            name, _, value = word.partition("=")
            if name in ("model.mixer", "model.model_class") and ":" in value:  # a class named only by a file
                try:
                    get_mixer(value) if name == "model.mixer" else model_class(ModelConfig(model_class=value))
                except ValueError as error:
                    raise BadModelFile(str(error)) from None
        return run_config(recipe_of(self.recipe)["task"], words, preset=self.recipe)

    def with_words(self, words: Sequence[str]) -> Sweep:
        """The same sweep with further overrides of the base; those of the cells still take precedence."""
        return replace(self, base_words=tuple(merge_words(self.base_words, words)))

    def test_metric(self, name: str) -> str:
        """The metric shown for the further examples ``name``: BLEU, accuracy or loss, depending on the model."""
        model = self.config(self.rows[0]).model
        if model.head == "classify":
            return f"{name}_accuracy"
        translates = model.architecture in ("encoder-decoder", "recurrent") and model.source == "text"
        return f"{name}_bleu" if translates else f"{name}_loss"

    def without_base_copies(self) -> Sweep:
        """The same sweep without cells whose overrides have no effect on the base."""
        base = _effective_settings(self.config(self.rows[0]))
        cells = tuple(cell for cell in self.cells if _effective_settings(self.config(cell)) != base)
        if self.cells and not cells:
            names = ", ".join(cell.name for cell in self.cells)
            raise UsageError(f"{self.name}: there is nothing to compare: {names} would be the same run as the base")
        return replace(self, cells=cells)

    # ------------------------------------------------------------------------------------- on disk

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stored"}

    @classmethod
    def read(cls, out: str | Path) -> Sweep:
        """The sweep stored in a directory."""
        path = Path(out) / SWEEP_FILE
        if not path.is_file():
            raise RegardError(f"{out} is not a sweep: it has no {SWEEP_FILE}")
        fields = read_json(path)
        try:
            sweep = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "it"
            raise BadModelFile(f"{path} is not a sweep: {where}: {problem['msg']}") from None
        return replace(sweep, stored=True)

    def write(self, out: Path) -> None:
        """Write into a new directory, or update the same sweep: cells and seeds can be added, settings cannot change.

        Stored seeds that this sweep does not list are kept.
        """
        path, merged = out / SWEEP_FILE, self
        if path.exists():
            before = Sweep.read(out)
            self.check_same_settings(before, out)
            merged = replace(self, seeds=tuple(dict.fromkeys((*before.seeds, *self.seeds))))
        elif out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} is not empty and holds no sweep; choose another directory with --out")
        out.mkdir(parents=True, exist_ok=True)
        content = to_json(merged.to_dict())
        if not path.exists() or path.read_bytes() != content:
            write_atomic(path, content)

    def check_same_settings(self, stored: Sweep, out: Path) -> None:
        """Raise UsageError if a cell of the stored sweep has the same name but other settings, or runs on other data.

        Files may have moved, so data at another path are compared by their hash.
        """
        own_cells = {cell.name: cell for cell in self.rows}
        hashes: dict[Any, str] = {}  # of the data that cells have in common
        for stored_cell in stored.rows:
            if (cell := own_cells.get(stored_cell.name)) is None:
                continue
            former, config = stored.config(stored_cell), self.config(cell)
            before = settings(former)
            for name, value in settings(config).items():
                if before.get(name) != value:
                    change = f"{name}={before.get(name)}, not {value}; choose another directory with --out"
                    raise UsageError(f"{out} holds this sweep with other settings: {change}")
            seeds = stored.seeds if former.data != config.data else ()
            results = (read_result(out, cell.name, seed) for seed in seeds)
            recorded = {x["data_sha256"] for x in results if x and x.get("data_sha256")}
            if not recorded:
                continue
            if (key := (config.task, config.data)) not in hashes:
                hashes[key] = data_hash(config)
            if recorded != {hashes[key]}:
                raise UsageError(f"{out} holds runs of {cell.name!r} on other data; choose another --out")

    def check_measures(self, file: Path) -> None:
        """Refuse to call a function that only a stored file names, unless it belongs to regard."""
        for measure in self.measures if self.stored else ():
            if not measure.startswith("regard."):
                raise BadModelFile(
                    f"{file} names the measure {measure!r}, and code named by a stored sweep is never run; "
                    "resume it with regard ablate FILE.toml, the grid it came from"
                )


def check_words(words: Sequence[str]) -> list[str]:
    """Check the syntax of a user's overrides before any process is started, and import a mechanism that they name."""
    parse_overrides(words)
    return list(words)


def merge_words(*layers: Iterable[str]) -> list[str]:
    """Merge overrides; later layers win. As in a recipe, ``model=NAME`` discards earlier ``model.…`` overrides."""
    merged: dict[str, str] = {}
    for layer in layers:
        names = {word: word.partition("=")[0] for word in layer}
        words = {{"model": "model.preset", "data": "data.source"}.get(name, name): word for word, name in names.items()}
        if "model.preset" in words:
            merged = {name: word for name, word in merged.items() if not name.startswith("model.")}
        merged |= words
    return list(merged.values())


def settings(config: RunConfig) -> dict[str, Any]:
    """The settings that define a run, by field; paths, seed and device are not among them."""
    return {name: value for name, value in flat_fields(config).items() if name not in _MACHINE_FIELDS}


def _effective_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that have an effect in this model."""
    model, unused = config.model, tuple[str, ...]()
    if model.architecture == "recurrent":
        unused = _UNUSED_RECURRENT
    elif model.norm == "none":
        unused = _UNUSED_WITHOUT_NORM
    return {name: value for name, value in settings(config).items() if name.removeprefix("model.") not in unused}


def fingerprint(config: RunConfig) -> str:
    """A hash of a run's settings and seed, which identifies its result."""
    text = json.dumps([settings(config), config.train.seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_folder(out: Path, cell: str, seed: int) -> Path:
    return out / "cells" / cell.replace(" ", "_") / f"seed-{seed}"


def prune_run(folder: Path) -> None:
    """Delete a finished run's weights and keep its records."""
    for path in (folder / "run").glob("*"):
        if path.name not in _FILES_OF_FINISHED_RUN:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "spent.json").unlink(missing_ok=True)


class _ResultMetrics(BaseModel):
    cannot: dict[str, str] | None = None  # metrics that cannot be measured, each with the reason


class _ResultSample(BaseModel):
    source: Any
    target: Any
    output: Any


class _Result(BaseModel):
    """The fields of result.json that are read, with their types; it may contain others."""

    status: str
    metrics: _ResultMetrics
    message: str = ""
    tests: dict[str, str] = {}
    measures: list[str] = []
    samples: list[_ResultSample] = []
    curve: list[tuple[int, float | None]] = []
    order: str = ""
    data_sha256: str = ""
    parameters: float | None = None
    seconds: float | None = None
    memory_mib: float | None = None
    train_loss: float | None = None


def data_hash(config: RunConfig) -> str:
    """The SHA-256 of the examples of a run, as its provenance records it."""
    return open_run_source(resolve_run(config)).sha256


def read_result(out: Path, cell: str, seed: int) -> dict[str, Any] | None:
    """The outcome of a run; None if it has none or its file cannot be read."""
    path = run_folder(out, cell, seed) / RESULT_FILE
    try:
        result = read_json(path)
        _Result.model_validate_json(json.dumps(result), strict=True)
    except (BadModelFile, ValidationError):
        return None
    return result


# ------------------------------------------------------------------------------------- sweeps in TOML files

_FIELDS = ("name", "about", "recipe", "words", "seeds", "metrics", "measures", "grid", "cells", "tests", "base_name")


def read_grid(path: Path, words: Sequence[str] = ()) -> Sweep:
    """The sweep that a file describes, with further overrides of its base.

    [grid] lists values for each field, and every combination is a cell, except the one that equals the base; [[cells]]
    are further cells (name, words); [tests] are further examples to evaluate on. docs/ablations.md has an example.

    Such a file is trusted like a script: a ``module:Class`` (model.mixer) or ``module:function`` (measures) in it is
    imported and run. Read a file from somebody else before you run it.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in fields:
        if name not in _FIELDS:
            raise UsageError(f"{path} has an unknown field {name!r}{did_you_mean(name, _FIELDS)}")
    if "recipe" not in fields:
        raise UsageError(f"{path} does not name a recipe")
    for name in ("grid", "tests"):
        if not isinstance(fields.setdefault(name, {}), dict):
            raise UsageError(f"{path}: {name} must be a table, [{name}], not {fields[name]!r}")
    tests = {str(name): str(source) for name, source in fields["tests"].items()}
    cells, seeds = fields.get("cells", []), fields.get("seeds", 3)
    if not isinstance(cells, list):
        raise UsageError(f"{path}: cells must be written as [[cells]], not {cells!r}")
    if any(type(x) is not int for x in (seeds if isinstance(seeds, list) else [seeds])):
        raise UsageError(f"{path}: seeds must be a number or a list of numbers, not {seeds!r}")
    sweep = Sweep(
        name=str(fields.get("name", path.stem)),
        recipe=str(fields["recipe"]),
        base_words=_toml_strings(path, fields, "words"),
        cells=(*_grid_cells(fields["grid"]), *(_toml_cell(path, cell) for cell in cells)),
        seeds=tuple(seeds if isinstance(seeds, list) else range(seeds)),
        metrics=_toml_strings(path, fields, "metrics", ["valid_loss"]),
        tests=tests,
        measures=_toml_strings(path, fields, "measures"),
        base_name=str(fields.get("base_name", "base")),
        about=str(fields.get("about", "")),
    )
    if "metrics" not in fields:
        sweep = replace(sweep, metrics=(*sweep.metrics, *map(sweep.test_metric, tests)))
    return sweep.with_words(words).without_base_copies()


def _toml_strings(path: Path, fields: dict[str, Any], name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
    strings = fields.get(name, list(default))
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise UsageError(f"{path}: {name} must be a list of strings, not {strings!r}")
    return tuple(strings)


def _grid_cells(grid: dict[str, Any]) -> list[Cell]:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"grid: {key!r} needs a list of values, not {values!r}")
    cells = []
    for combination in itertools.product(*grid.values()) if grid else ():
        pairs = [(key, format_value(value)) for key, value in zip(grid, combination, strict=True)]
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
        cells.append(Cell(name.replace("/", "-").replace(":", "."), tuple(f"{key}={value}" for key, value in pairs)))
    return cells


def _toml_cell(path: Path, fields: Any) -> Cell:
    if not isinstance(fields, dict) or "name" not in fields or set(fields) - {"name", "words", "group"}:
        raise UsageError(f"{path}: a cell must have a name, words and optionally a group, not {fields!r}")
    return Cell(str(fields["name"]), _toml_strings(path, fields, "words"), str(fields.get("group", "")))
