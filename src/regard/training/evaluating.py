"""``evaluate``: what held-out data says about a trained model, beside another one where asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import DataConfig
from ..data.corpora import CORPORA
from ..data.examples import Example
from ..data.sources import Source
from ..errors import BadData
from .evaluation_files import need_ours, write_evaluation
from .evaluation_text import table_of
from .judging import Judged, judge
from .judging_texts import judge_texts, paired_texts
from .metrics.statistics import Comparison, paired_bootstrap
from .precision import Precision, PrecisionName
from .systems import ALL_OF_IT, System, data_for, open_data, open_system, task_for
from .tasks import Row, Task
from .tasks.language_modelling import Texts

__all__ = ["EvaluationReport", "SplitReport", "evaluate"]

WHOLE = "whole"
"""What a file that is evaluated from its first to its last example is called, where others have held-out sets."""


@dataclass(frozen=True)
class SplitReport:
    """What was found about one set of examples."""

    name: str
    n: int
    """Examples: pairs, texts, images."""
    metrics: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    """Of classes: ``classes``, a row each, and ``confusion``."""
    rows: tuple[Row, ...] = field(default=(), repr=False)
    """Every example, or every passage of a text, with what came out; in their order."""
    passages: bool = False
    """Whether rows are passages of texts: their output is the likeliest token at each place, not an answer."""
    comparisons: tuple[Comparison, ...] = ()
    other: dict[str, Any] = field(default_factory=dict)
    """The metrics of the other system."""
    other_rows: tuple[Row, ...] = field(default=(), repr=False)

    def worst(self, k: int = 20) -> tuple[Row, ...]:
        """The k rows with the lowest scores, of equals those with the higher loss; no answer that is right."""
        wrong = [row for row in self.rows if self.passages or not _is_right(row)]
        return tuple(sorted(wrong, key=lambda row: (row.score, -(row.loss or 0.0))))[:k]

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"n": self.n, **_finite(self.metrics), **self.details}
        if self.comparisons:
            found["against"] = {
                "metrics": _finite(self.other),
                "comparisons": [comparison.document() for comparison in self.comparisons],
            }
        return found


@dataclass(frozen=True)
class EvaluationReport:
    """What was found about a model, on one set of examples or on several."""

    path: str
    task: str
    weights: str
    data: dict[str, Any]
    """Where the examples came from, and their hash."""
    options: dict[str, Any]
    splits: tuple[SplitReport, ...]
    against: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the first set, which often is the only one."""
        return self.splits[0].metrics

    @property
    def rows(self) -> tuple[Row, ...]:
        """Of all sets."""
        return tuple(row for split in self.splits for row in split.rows)

    def __getitem__(self, split: str) -> SplitReport:
        for found in self.splits:
            if found.name == split:
                return found
        raise KeyError(f"{split!r} is none of {', '.join(found.name for found in self.splits)}")

    def document(self) -> dict[str, Any]:
        """As JSON."""
        about = {"path": self.path, "task": self.task, "weights": self.weights, "data": self.data}
        found: dict[str, Any] = {**about, "options": self.options}
        if self.against is not None:
            found["against"] = self.against
        found["splits"] = {split.name: split.document() for split in self.splits}
        return {**found, "notes": list(self.notes)}

    def table(self) -> str:
        """As lines for people."""
        return table_of(self)


def evaluate(
    path: str | Path,
    data: Mapping[str, Any] | DataConfig | None = None,
    *,
    against: str | Path | None = None,
    out: str | Path | None = None,
    split: str = "valid",
    beam: int | None = None,
    length_penalty: float | None = None,
    stride: int | None = None,
    limit: int | None = None,
    device: str = "auto",
    precision: PrecisionName = "fp32",
) -> EvaluationReport:
    """How good a run (RUN, RUN@1200) or a model directory is on examples it was not trained on.

    data       fields of DataConfig over the run's own. A source given here that is a file is evaluated whole; a model
               directory has no data of its own, so needs one
    against    another run or directory, asked the same: every metric's difference with its interval (paired bootstrap)
    out        a directory for outputs.jsonl, worst.md and report.json; it may replace one written here, nothing else
    split      valid, another set the source holds out, "all" of those, or "train"
    stride     of a language model: also perplexity with windows that move by so many tokens
    limit      only the first so many examples of each set
    precision  of the matrix products of the loss
    """
    _need_sense(stride=stride, limit=limit, beam=beam)
    if out is not None:
        need_ours(Path(out))
    place = _device(device)
    words = _words(data)
    system = open_system(path, place)
    if stride is not None and system.config.task != "lm":
        raise ValueError(f"stride={stride} is for language models, but {path} is for the task {system.config.task!r}")
    asked = _put_together(system, None if against is None else _other(system, against, place), words)
    recipe = system.config.train
    ask = _Asking(
        Precision(precision, place),
        recipe.beam if beam is None else beam,
        recipe.length_penalty if length_penalty is None else length_penalty,
        stride,
        limit,
    )
    found, notes = [], list(asked.notes)
    for name in _splits(asked.source, split):
        judged = [ask(task, one, name) for one, task in zip(asked.systems, asked.tasks, strict=True)]
        found.append(_reported(name, asked.systems, judged))
        notes += [note for one, task in zip(asked.systems, asked.tasks, strict=True) for note in _cut(task, one, name)]
    source = asked.source
    report = EvaluationReport(
        path=str(path),
        task=system.config.task,
        weights=system.weights,
        data={"source": source.name, "held_out": source.split.how, "sha256": source.sha256},
        options={**ask.options(system.config.task), "precision": precision, "device": str(place)},
        splits=tuple(found),
        against=None if against is None else str(against),
        notes=tuple(dict.fromkeys(notes)),
    )
    if out is not None:
        write_evaluation(Path(out), report)
    return report


def _words(data: Mapping[str, Any] | DataConfig | None) -> dict[str, Any]:
    if isinstance(data, DataConfig):
        return {name: getattr(data, name) for name in data.model_fields_set}
    words = dict(data or {})
    DataConfig(**words)  # refuses what is no field
    return words


@dataclass(frozen=True)
class _Together:
    """Who is asked, what, and what is to be said about it."""

    systems: list[System]
    tasks: list[Task]
    source: Source
    notes: list[str]


def _put_together(system: System, other: System | None, words: Mapping[str, Any]) -> _Together:
    """One system or two, each with a task over the same examples; what is hidden follows the first one's seed."""
    data, whole = data_for(system, words)
    source, seed = open_data(data, whole, system), system.config.train.seed
    notes = _changed(system, source, words)
    task = task_for(system, source, data, words, seed)
    if other is None:
        return _Together([system], [task], source, notes)
    if not words.keys() & {"source", "valid"}:
        _need_same_held_out(system, other, source, data)
    # Classes are numbered as each model numbers them.
    theirs = source if other.labels == system.labels else open_data(data.with_(labels=None), whole, other)
    return _Together([system, other], [task, task_for(other, theirs, data, words, seed)], source, notes)


@dataclass(frozen=True)
class _Asking:
    """How models are asked."""

    precision: Precision
    beam: int
    length_penalty: float
    stride: int | None
    limit: int | None

    def __call__(self, task: Task, system: System, split: str) -> Judged:
        examples = _examples(task, split, self.limit)
        if isinstance(task, Texts):
            return judge_texts(task, system.model, examples, self.precision, self.stride)
        penalty = self.length_penalty
        return judge(task, system.model, examples, self.precision, beam=self.beam, length_penalty=penalty)

    def options(self, task: str) -> dict[str, Any]:
        """Those that mean something to the task."""
        options: dict[str, Any] = {"limit": self.limit}
        if task in ("translate", "caption"):
            options |= {"beam": self.beam, "length_penalty": self.length_penalty}
        return options if task != "lm" else {**options, "stride": self.stride}


def _reported(name: str, systems: list[System], judged: list[Judged]) -> SplitReport:
    ours = judged[0]
    values = {**ours.metrics, "tokens_per_second": round(ours.tokens_per_second, 1)}
    alone = SplitReport(name, ours.n, values, ours.details, tuple(ours.rows), passages=ours.texts is not None)
    if len(judged) == 1:
        return alone
    theirs = judged[1]
    compared = tuple(paired_bootstrap(their, our) for our, their in _pairs(systems, ours, theirs))
    return replace(alone, comparisons=compared, other=theirs.metrics, other_rows=tuple(theirs.rows))


def _pairs(systems: list[System], ours: Judged, theirs: Judged) -> list[tuple[Any, Any]]:
    """The statistics of every metric that both have, of the same examples."""
    system, other = systems
    if ours.texts is not None:
        return paired_texts(ours.texts, theirs.texts, masked=system.config.task == "mlm")
    asked, asked_too = ([(row.source, row.target) for row in judged.rows] for judged in (ours, theirs))
    if asked != asked_too:
        raise ValueError(f"{system.name} and {other.name} were asked different examples, so they cannot be compared")
    pairs = list(zip(ours.statistics(), theirs.statistics(), strict=True))
    # Loss is a mean over tokens: over other tokens it is another thing.
    by_token = system.config.task in ("translate", "caption")
    return pairs[:-1] if by_token and system.tokens_sha256 != other.tokens_sha256 else pairs


def _splits(source: Source, split: str) -> list[str]:
    held = ["valid", *source.others]
    if split not in (*held, "all", "train"):
        raise ValueError(f"split={split!r} is none of {', '.join([*held, 'all', 'train'])} of {source.name}")
    if source.split.how == ALL_OF_IT:
        return [WHOLE]
    return held if split == "all" else [split]


def _examples(task: Task, split: str, limit: int | None) -> Sequence[Example]:
    known = {WHOLE: task.source.valid, "train": task.source.train, "valid": task.source.valid, **task.source.others}
    examples = task._first(known[split], limit)
    if not examples:
        raise BadData(f"{task.source.name} has nothing held out to evaluate on; data.source=FILE names other examples")
    return examples


# ------------------------------------------------------------------------------------- what must fit together


def _other(system: System, path: str | Path, device: torch.device) -> System:
    other = open_system(path, device)
    if other.config.task != system.config.task:
        tasks = f"{system.config.task!r} and {other.config.task!r}"
        raise ValueError(f"{system.name} and {other.name} are for the tasks {tasks}, so they cannot be compared")
    labels, theirs = system.labels, other.labels
    if labels is not None and theirs is not None and set(labels) != set(theirs):
        apart = f"{', '.join(labels)} and {', '.join(theirs)}"
        raise ValueError(f"{system.name} and {other.name} tell apart {apart}, so they cannot be compared")
    return other


def _need_same_held_out(system: System, other: System, source: Source, data: DataConfig) -> None:
    """Another run may have been trained on what this one held out. A corpus holds out by composition, so not there."""
    if other.run is None:
        return
    if data.source in CORPORA and other.config.data.source == data.source:
        return
    if other.run.facts["data"]["split"]["valid_sha256"] != source.split.valid_sha256:
        raise ValueError(
            f"{other.name} held out other examples than {system.name} and may have been trained on these; "
            "data.source=FILE evaluates both on a file of its own"
        )


def _changed(system: System, source: Source, words: Mapping[str, Any]) -> list[str]:
    if system.run is None or words:
        return []
    known = system.run.facts["data"]["sha256"]
    return [] if known == source.sha256 else [f"{source.name} is not what it was when {system.name} was trained"]


def _cut(task: Task, system: System, split: str) -> list[str]:
    n = task.held_out_cut
    return [f"{n:,} texts of {split} were cut to what {system.name} can read"] if n else []


def _need_sense(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _device(name: str) -> torch.device:
    """``auto`` is the best there is."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in has.items() if there)
    if not has.get(name.partition(":")[0], False):
        raise ValueError(f"device={name!r}: this machine, or this torch, has none")
    return torch.device(name)


def _is_right(row: Row) -> bool:
    return row.output == row.target or (isinstance(row.target, list) and row.output in row.target)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
