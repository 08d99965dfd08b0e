"""A sweep: the same run with one thing changed at a time, every change with several seeds, kept in one directory.

OUT/sweep.json                    what is swept
OUT/shared/…                      tokenizers, made once for all runs that read the same data
OUT/cells/CELL/seed-N/result.json one run's outcome, written last and whole: where it stands, the run is never run again
OUT/cells/CELL/seed-N/run/        its run directory: an interrupted run goes on from it; weights go when it is done
OUT/table.md, table.csv, runs.csv, results.png, curves.png

Runs of one seed see the same batches in the same order in every cell. Paths inside OUT are relative: it may be moved.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ..config import RunConfig
from ..config.overrides import parse_overrides
from ..errors import BadModelFile, RegardError, UsageError
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..foundation.suggestions import did_you_mean
from ..recipes import recipe as recipe_of
from ..recipes import run_config
from .sweep_trust import need_known, need_our_measures

if TYPE_CHECKING:
    from .sweep_report import Report

__all__ = ["Cell", "Sweep", "layered", "report", "run"]

SWEEP_FILE, RESULT_FILE = "sweep.json", "result.json"
FINAL = ("done", "diverged")
"""Outcomes that stand; a run that failed is tried again when the sweep is started again."""
# Where files lie and what computes is the machine's business: a sweep may move. Results say what data they saw.
_OF_THE_MACHINE = {"data": ("source", "valid"), "train": ("out", "seed", "device")}
# What a recurrent model does not look at, and what means nothing where there is no norm.
_NOT_RECURRENT = ("n_heads", "n_kv_heads", "d_head", "d_ff", "positions", "norm", "norm_place", "attention_scale")
_OF_NORMS = ("norm_place", "norm_eps", "norm_bias")
_OF_TESTS = {"translate": "bleu", "classify": "accuracy", "classify-images": "accuracy"}
_KEPT = ("run.json", "provenance.json", "metrics.jsonl", "evaluation.json")
_NAME = re.compile(r"[^\W/\\:]([\w.,=+ ×½¼-]*[^\W/\\:])?")


@dataclass(frozen=True)
class Cell:
    """One row of the table: words (``model.n_heads=1``) that change the base."""

    name: str
    words: tuple[str, ...] = ()
    group: str = ""
    """Rows of one group stand together under its letter, as in the paper's table."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"cell name {self.name!r}: letters, digits and . , = + - are allowed")


@dataclass(frozen=True)
class Sweep:
    """A base (a recipe and words that change it) and the cells that change one thing of it."""

    name: str
    recipe: str
    """Of ``regard.RECIPES``; its task is the sweep's."""
    base_words: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    """Without the base itself, which is always run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("valid_loss",)
    """Shown and tested against the base; plots and conclusions follow the first one."""
    tests: Mapping[str, str] = field(default_factory=dict)
    """Further examples to evaluate each finished model on, by name: {"test": "test.en,test.de"} → test_bleu, …"""
    measures: tuple[str, ...] = ()
    """Functions ``package.module:name`` called with the finished run's directory, giving more metrics by name."""
    base_name: str = "base"
    about: str = ""
    ending: str = ""
    """What its report says more than the table, of ``ablations.FINISHED``; sweeps by name alone have one."""
    stored: bool = field(default=False, compare=False)
    """Read from a directory, which may be anybody's: nothing that it names is imported."""

    def __post_init__(self) -> None:
        folders: dict[str, str] = {}
        for cell in self.rows:
            # Some file systems take upper and lower case for one, and both ways to write an accent.
            folder = unicodedata.normalize("NFC", _folder(cell.name)).casefold()
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
        """What is run for a cell; ``train.out`` is for the runner to say."""
        words = layered(self.base_words, cell.words, (f"train.seed={seed}",))
        if self.stored:
            need_known(words)
        return run_config(recipe_of(self.recipe)["task"], words, preset=self.recipe)

    def with_words(self, words: Sequence[str]) -> Sweep:
        """The same with more words about the base; cells still change what they are about."""
        return replace(self, base_words=tuple(layered(self.base_words, words)))

    def metric_of_test(self, name: str) -> str:
        """What is shown of further examples."""
        task = recipe_of(self.recipe)["task"]
        return f"{name}_{_OF_TESTS.get(task, 'loss')}"

    def without_base(self) -> Sweep:
        """The same without cells that are the base itself: what they change, it has already, or does not look at."""
        base = _meant(self.config(self.rows[0]))
        cells = tuple(cell for cell in self.cells if _meant(self.config(cell)) != base)
        if self.cells and not cells:
            names = ", ".join(cell.name for cell in self.cells)
            raise UsageError(f"{self.name}: nothing is left to compare: {names} would be the same run as the base")
        return replace(self, cells=cells)

    # ------------------------------------------------------------------------------------- on disk

    def document(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stored"}

    @classmethod
    def read(cls, out: str | Path) -> Sweep:
        """The sweep that a directory holds."""
        path = Path(out) / SWEEP_FILE
        if not path.is_file():
            raise RegardError(f"{out} holds no sweep: it has no {SWEEP_FILE}")
        fields = parse_json(path.read_bytes(), path)
        try:
            found = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "it"
            raise BadModelFile(f"{path} is not a sweep: {where}: {problem['msg']}") from None
        return replace(found, stored=True)

    def write(self, out: Path) -> None:
        """Into a new directory, or over the same sweep: cells and seeds may join, settings may not change. Seeds that
        are not asked for today stay part of it."""
        path, whole = out / SWEEP_FILE, self
        if path.exists():
            before = Sweep.read(out)
            self.need_same(before, out)
            whole = replace(self, seeds=tuple(dict.fromkeys((*before.seeds, *self.seeds))))
        elif out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} already holds something else; --out names another directory")
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != to_json(whole.document()):
            write_atomic(path, to_json(whole.document()))

    def need_same(self, stored: Sweep, out: Path) -> None:
        """Refuse where a cell of that name was another run there."""
        mine = {cell.name: cell for cell in self.rows}
        for cell in stored.rows:
            if cell.name in mine and (other := _first_difference(stored.config(cell), self.config(mine[cell.name]))):
                raise UsageError(f"{out} holds this sweep with other settings: {other}; --out names another directory")


def layered(*layers: Iterable[str]) -> list[str]:
    """Words with later layers over earlier ones; ``model=NAME`` starts the model afresh, as it does in a recipe."""
    kept: dict[str, str] = {}
    for layer in layers:
        words = {_key(word): word for word in layer}
        if "model.preset" in words:
            kept = {key: word for key, word in kept.items() if not key.startswith("model.")}
        kept |= words
    return list(kept.values())


def _key(word: str) -> str:
    name = word.partition("=")[0]
    return {"model": "model.preset", "data": "data.source"}.get(name, name)


def settings(config: RunConfig) -> dict[str, Any]:
    """What makes a run the one it is, field by field."""
    found: dict[str, Any] = {"task": config.task}
    for section in ("data", "model", "train"):
        left = _OF_THE_MACHINE.get(section, ())
        fields = getattr(config, section).model_dump(mode="json")
        found |= {f"{section}.{name}": value for name, value in fields.items() if name not in left}
    return found


def _meant(config: RunConfig) -> dict[str, Any]:
    """The settings that this model looks at."""
    model, found = config.model, settings(config)
    unseen = _NOT_RECURRENT if model.architecture == "recurrent" else _OF_NORMS if model.norm == "none" else ()
    return {name: value for name, value in found.items() if name.removeprefix("model.") not in unseen}


def fingerprint(config: RunConfig) -> str:
    """What a result is recognised by."""
    text = json.dumps([settings(config), config.train.seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _first_difference(stored: RunConfig, asked: RunConfig) -> str | None:
    before, now = settings(stored), settings(asked)
    for name in now:
        if before.get(name) != now[name]:
            return f"{name}={before.get(name)}, not {now[name]}"
    return None


def folder_of(out: Path, cell: str, seed: int) -> Path:
    return out / "cells" / _folder(cell) / f"seed-{seed}"


def _folder(cell: str) -> str:
    return cell.replace(" ", "_")


def prune(folder: Path) -> None:
    """Leave of a finished run what says how it went; its weights go."""
    for path in (folder / "run").glob("*"):
        if path.name not in _KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "spent.json").unlink(missing_ok=True)


def read_result(out: Path, cell: str, seed: int) -> dict[str, Any] | None:
    """The outcome of a run; None where there is none, or where it cannot be read."""
    try:
        found = json.loads((folder_of(out, cell, seed) / RESULT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    sound = isinstance(found, dict) and "status" in found and isinstance(found.get("metrics"), dict)
    return found if sound else None


def run(
    sweep: Sweep,
    out: str | Path,
    *,
    jobs: int | None = None,
    minutes: float | None = None,
    max_seconds: float | None = None,
    keep: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run what is not yet done, each (cell, seed) in a process of its own, ``jobs`` of them at once; then report.

    minutes      stop in time to be done after so many: what is in flight is saved, the next call goes on
    max_seconds  a run that takes longer has failed
    keep         leave the weights of finished runs where they are
    Ctrl-C saves what is in flight and raises ``Interrupted``.
    """
    from .sweep_run import run_all

    out = Path(out)
    for cell in sweep.rows:
        sweep.config(cell)  # what cannot be meant is said before anything is run
    if sweep.stored:
        need_our_measures(sweep.measures, out / SWEEP_FILE)
    run_all(sweep, out, jobs=jobs, minutes=minutes, max_seconds=max_seconds, keep=keep, progress=progress)
    return report(out, sweep)


def report(out: str | Path, sweep: Sweep | None = None) -> Report:
    """What the runs in a directory came to, also written there: table.md, table.csv, runs.csv and pictures."""
    from .sweep_figure import draw
    from .sweep_report import gather

    out = Path(out)
    found = gather(sweep or Sweep.read(out), out)
    write_atomic(out / "table.md", found.markdown().encode())
    write_atomic(out / "table.csv", found.csv().encode())
    write_atomic(out / "runs.csv", found.runs_csv().encode())
    if found.metrics and any(row.n_done for row in found.rows):
        draw(found, out)
    return found


def named_words(words: Sequence[str]) -> list[str]:
    """Words that a person gave, checked for their form before any process is started; a mechanism of their own that
    they name is imported now, and known from then on."""
    parse_overrides(words)
    return list(words)


def unknown(what: str, name: str, names: Iterable[str]) -> UsageError:
    """There is no such ablation, axis, field …"""
    names = list(names)
    return UsageError(f"there is no {what} {name!r}{did_you_mean(name, names)} (all: {', '.join(names)})")
