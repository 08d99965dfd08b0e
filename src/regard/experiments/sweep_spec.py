"""A sweep: the same run with one thing changed at a time, every change with several seeds, kept in one directory.

OUT/sweep.json                    what is swept
OUT/shared/…                      tokenizers, trained once for all runs that read the same data
OUT/cells/CELL/seed-N/result.json one run's outcome, written last and whole: where it stands, the run is never run again
OUT/cells/CELL/seed-N/run/        its run directory: an interrupted run goes on from it; weights go when it is done
OUT/table.md, table.csv, runs.csv, results.png, curves.png

Runs of one seed see the same batches in the same order in every cell. Paths inside OUT are relative: it may be moved.
A sweep's directory may be anybody's: nothing it names is imported. It goes on where a mechanism of one's own is known:
typed again, in REGARD_MIXERS, or entered in ``MIXERS``.
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

from ..config import RunConfig
from ..config.mixers import get_mixer
from ..config.overrides import format_value, parse_overrides
from ..errors import BadModelFile, RegardError, UsageError
from ..foundation.checks import did_you_mean
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..recipes import recipe as recipe_of
from ..recipes import run_config

SWEEP_FILE, RESULT_FILE = "sweep.json", "result.json"
FINAL = ("done", "diverged")  # outcomes that stand; a run that failed is tried again with the next start
# Where files lie and what computes is the machine's business: a sweep may move. Results say what data they saw.
_MACHINE_FIELDS = {"data": ("source", "valid"), "train": ("out", "seed", "device")}
# Fields that a recurrent model does not read, and those that mean nothing without a norm.
_UNUSED_RECURRENT = ("n_heads", "n_kv_heads", "d_head", "d_ff", "positions", "norm", "norm_place", "attention_scale")
_UNUSED_WITHOUT_NORM = ("norm_place", "norm_eps", "norm_bias")
_FILES_OF_FINISHED_RUN = ("run.json", "provenance.json", "metrics.jsonl", "evaluation.json")
_CELL_NAME = re.compile(r"[^\W/\\:]([\w.,=+ ×½¼-]*[^\W/\\:])?")
# Measures by the names that earlier versions wrote into sweeps and results.
_MOVED_MEASURES = {
    "regard.experiments.token_by_token:measure": "regard.experiments.sweep_cell:measure_token_by_token",
    "regard.experiments.extrapolation:losses": "regard.experiments.sweep_cell:measure_lengths",
}


@dataclass(frozen=True)
class Cell:
    """One row of the table: words (``model.n_heads=1``) that change the base."""

    name: str
    words: tuple[str, ...] = ()
    group: str = ""  # rows of one group stand together under its letter, as in the paper's table

    def __post_init__(self) -> None:
        if not _CELL_NAME.fullmatch(self.name):
            raise UsageError(f"cell name {self.name!r}: letters, digits and . , = + - are allowed")


@dataclass(frozen=True)
class Sweep:
    """A base (a recipe and words that change it) and the cells that change one thing of it."""

    name: str
    recipe: str  # of ``regard.RECIPES``; its task is the sweep's
    base_words: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()  # without the base itself, which is always run
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("valid_loss",)  # shown and tested against the base; figures follow the first one
    # Further examples to evaluate each finished model on, by name: {"test": "test.en,test.de"} → test_bleu, …
    tests: Mapping[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = ()  # functions ``package.module:name`` of a finished run's directory → more metrics
    base_name: str = "base"
    about: str = ""
    ending: str = ""  # which of ``ablations.EXTENDED_REPORTS`` it ends with
    stored: bool = field(default=False, compare=False)  # read from a directory: nothing that it names is imported

    def __post_init__(self) -> None:
        folders: dict[str, str] = {}
        for cell in self.rows:
            # Some file systems take upper and lower case for one, and both ways to write an accent.
            folder = unicodedata.normalize("NFC", cell.name.replace(" ", "_")).casefold()
            if folders.setdefault(folder, cell.name) != cell.name:
                raise UsageError(f"cells {folders[folder]!r} and {cell.name!r} would have one directory")
        names = [cell.name for cell in self.rows]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"two cells are called {min(twice)!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds={self.seeds} must be at least one number, each once")
        if not self.metrics:
            raise UsageError("a sweep needs at least one metric")

    @property
    def rows(self) -> tuple[Cell, ...]:
        """The base, then the cells."""
        return (Cell(self.base_name), *self.cells)

    def config(self, cell: Cell, seed: int = 0) -> RunConfig:
        """What is run for a cell; the runner sets ``train.out``."""
        words = merge_words(self.base_words, cell.words, (f"train.seed={seed}",))
        for word in words if self.stored else ():
            name, _, value = word.partition("=")
            if name == "model.mixer" and ":" in value:  # a mechanism, module:Class, that nobody but a file has named
                try:
                    get_mixer(value)
                except ValueError as error:
                    raise BadModelFile(str(error)) from None
        return run_config(recipe_of(self.recipe)["task"], words, preset=self.recipe)

    def with_words(self, words: Sequence[str]) -> Sweep:
        """The same with more words about the base; cells still change what they are about."""
        return replace(self, base_words=tuple(merge_words(self.base_words, words)))

    def test_metric(self, name: str) -> str:
        """The metric that is shown of further examples: BLEU, accuracy or loss, by what the model does."""
        model = self.config(self.rows[0]).model
        if model.head == "classify":
            return f"{name}_accuracy"
        translates = model.architecture in ("encoder-decoder", "recurrent") and model.source == "text"
        return f"{name}_bleu" if translates else f"{name}_loss"

    def without_base_copies(self) -> Sweep:
        """The same without cells that are the base itself: what they change, it has already, or does not read."""
        base = _effective_settings(self.config(self.rows[0]))
        cells = tuple(cell for cell in self.cells if _effective_settings(self.config(cell)) != base)
        if self.cells and not cells:
            names = ", ".join(cell.name for cell in self.cells)
            raise UsageError(f"{self.name}: nothing is left to compare: {names} would be the same run as the base")
        return replace(self, cells=cells)

    # ------------------------------------------------------------------------------------- on disk

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stored"}

    @classmethod
    def read(cls, out: str | Path) -> Sweep:
        """The sweep that a directory holds."""
        path = Path(out) / SWEEP_FILE
        if not path.is_file():
            raise RegardError(f"{out} holds no sweep: it has no {SWEEP_FILE}")
        fields = parse_json(path.read_bytes(), path)
        try:
            sweep = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "it"
            raise BadModelFile(f"{path} is not a sweep: {where}: {problem['msg']}") from None
        return replace(sweep, stored=True, measures=tuple(_current_measures(sweep.measures)))

    def write(self, out: Path) -> None:
        """Into a new directory, or over the same sweep: cells and seeds may join, settings may not change. Seeds that
        are not asked for today stay part of it."""
        path, whole = out / SWEEP_FILE, self
        if path.exists():
            before = Sweep.read(out)
            self.check_same_settings(before, out)
            whole = replace(self, seeds=tuple(dict.fromkeys((*before.seeds, *self.seeds))))
        elif out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} already holds something else; --out names another directory")
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != to_json(whole.to_dict()):
            write_atomic(path, to_json(whole.to_dict()))

    def check_same_settings(self, stored: Sweep, out: Path) -> None:
        """Refuse where a cell of that name was another run there."""
        mine = {cell.name: cell for cell in self.rows}
        for cell in stored.rows:
            now = settings(self.config(mine[cell.name])) if cell.name in mine else {}
            before = settings(stored.config(cell)) if now else {}
            for name, value in now.items():
                if before.get(name) != value:
                    change = f"{name}={before.get(name)}, not {value}; --out names another directory"
                    raise UsageError(f"{out} holds this sweep with other settings: {change}")

    def check_measures(self, file: Path) -> None:
        """Refuse to call a function that nobody but a file has named, unless it is one of regard's."""
        for measure in self.measures if self.stored else ():
            if not measure.startswith("regard."):
                raise BadModelFile(
                    f"{file} asks for {measure!r}, and code that a directory names is never run unasked; "
                    "regard ablate FILE.toml, the grid it came from, goes on with it"
                )


def _current_measures(measures: Iterable[str]) -> list[str]:
    return [_MOVED_MEASURES.get(measure, measure) for measure in measures]


def check_words(words: Sequence[str]) -> list[str]:
    """Words that a person gave, checked for their form before any process is started; a mechanism of their own that
    they name is imported now, and known from then on."""
    parse_overrides(words)
    return list(words)


def merge_words(*layers: Iterable[str]) -> list[str]:
    """Words with later layers over earlier ones; ``model=NAME`` starts the model afresh, as it does in a recipe."""
    merged: dict[str, str] = {}
    for layer in layers:
        names = {word: word.partition("=")[0] for word in layer}
        words = {{"model": "model.preset", "data": "data.source"}.get(name, name): word for word, name in names.items()}
        if "model.preset" in words:
            merged = {name: word for name, word in merged.items() if not name.startswith("model.")}
        merged |= words
    return list(merged.values())


def settings(config: RunConfig) -> dict[str, Any]:
    """What makes a run the one it is, field by field."""
    fields: dict[str, Any] = {"task": config.task}
    for section in ("data", "model", "train"):
        skipped = _MACHINE_FIELDS.get(section, ())
        values = getattr(config, section).model_dump(mode="json")
        fields |= {f"{section}.{name}": value for name, value in values.items() if name not in skipped}
    return fields


def _effective_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that this model reads."""
    model, unused = config.model, tuple[str, ...]()
    if model.architecture == "recurrent":
        unused = _UNUSED_RECURRENT
    elif model.norm == "none":
        unused = _UNUSED_WITHOUT_NORM
    return {name: value for name, value in settings(config).items() if name.removeprefix("model.") not in unused}


def fingerprint(config: RunConfig) -> str:
    """What a result is recognised by."""
    text = json.dumps([settings(config), config.train.seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_folder(out: Path, cell: str, seed: int) -> Path:
    return out / "cells" / cell.replace(" ", "_") / f"seed-{seed}"


def prune_run(folder: Path) -> None:
    """Leave of a finished run what says how it went; its weights go."""
    for path in (folder / "run").glob("*"):
        if path.name not in _FILES_OF_FINISHED_RUN:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "spent.json").unlink(missing_ok=True)


class _Metrics(BaseModel):
    cannot: dict[str, str] | None = None  # metrics that cannot be measured, each with the reason


class _Sample(BaseModel):
    source: Any
    target: Any
    output: Any


class _Result(BaseModel):
    """The types of what is read of result.json; anything may stand beside it."""

    status: str
    metrics: _Metrics
    message: str = ""
    tests: dict[str, str] = {}
    measures: list[str] = []
    samples: list[_Sample] = []
    curve: list[tuple[int, float | None]] = []
    order: str = ""
    data_sha256: str = ""
    parameters: float | None = None
    seconds: float | None = None
    memory_mib: float | None = None
    train_loss: float | None = None


def read_result(out: Path, cell: str, seed: int) -> dict[str, Any] | None:
    """The outcome of a run; None where there is none, or where it cannot be read."""
    path = run_folder(out, cell, seed) / RESULT_FILE
    try:
        result = parse_json(path.read_bytes(), path)
        _Result.model_validate_json(json.dumps(result), strict=True)
    except (OSError, BadModelFile, ValidationError):
        return None
    return {**result, "measures": _current_measures(result["measures"])} if "measures" in result else result


# ------------------------------------------------------------------------------------- a grid of one's own, as TOML

_FIELDS = ("name", "about", "recipe", "words", "seeds", "metrics", "measures", "grid", "cells", "tests", "base_name")


def read_grid(path: Path, words: Sequence[str] = ()) -> Sweep:
    """The sweep a file describes, with more words about its base; the combination that changes nothing is the base.

    [grid] has a list of values for each field, every combination a cell; [[cells]] are further cells (name, words);
    [tests] are further examples to evaluate on. docs/ablations.md has an example.

    Such a file is a script of its reader's: what it names as ``module:Class`` (model.mixer) or ``module:function``
    (measures) is imported and run. A grid of somebody else's is to be read first, as any script is.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in fields:
        if name not in _FIELDS:
            raise UsageError(f"{path} says {name!r}, which means nothing here{did_you_mean(name, _FIELDS)}")
    if "recipe" not in fields:
        raise UsageError(f"{path} names no recipe")
    for name in ("grid", "tests"):
        if not isinstance(fields.setdefault(name, {}), dict):
            raise UsageError(f"{path}: {name} is a table, [{name}], not {fields[name]!r}")
    tests = {str(name): str(source) for name, source in fields["tests"].items()}
    own_cells, seeds = fields.get("cells", []), fields.get("seeds", 3)
    if not isinstance(own_cells, list):
        raise UsageError(f"{path}: cells are written [[cells]], not {own_cells!r}")
    if any(type(x) is not int for x in (seeds if isinstance(seeds, list) else [seeds])):
        raise UsageError(f"{path}: seeds is a number or a list of numbers, not {seeds!r}")
    sweep = Sweep(
        name=str(fields.get("name", path.stem)),
        recipe=str(fields["recipe"]),
        base_words=_toml_texts(path, fields, "words"),
        cells=(*_grid_cells(fields["grid"]), *(_toml_cell(path, cell) for cell in own_cells)),
        seeds=tuple(seeds if isinstance(seeds, list) else range(seeds)),
        metrics=_toml_texts(path, fields, "metrics", ["valid_loss"]),
        tests=tests,
        measures=_toml_texts(path, fields, "measures"),
        base_name=str(fields.get("base_name", "base")),
        about=str(fields.get("about", "")),
    )
    if "metrics" not in fields:
        sweep = replace(sweep, metrics=(*sweep.metrics, *map(sweep.test_metric, tests)))
    return sweep.with_words(words).without_base_copies()


def _toml_texts(path: Path, fields: dict[str, Any], name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
    texts = fields.get(name, list(default))
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path}: {name} is a list of texts, not {texts!r}")
    return tuple(texts)


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
        raise UsageError(f"{path}: a cell has a name, words and perhaps a group, not {fields!r}")
    return Cell(str(fields["name"]), _toml_texts(path, fields, "words"), str(fields.get("group", "")))
