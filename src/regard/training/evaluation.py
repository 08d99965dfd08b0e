"""``evaluate``: the metrics of a trained model on held-out data, and their comparison with another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import DataConfig
from ..data.corpora import CORPORA
from ..data.sources import Source
from ..errors import BadData
from ..foundation.checks import check_positive
from ..foundation.device import resolve_device
from ..models import Model
from .evaluation_report import EvaluationReport, SplitReport, check_replaceable, write_evaluation
from .metrics.statistics import paired_bootstrap
from .metrics.translation_metrics import Comet
from .precision import Precision, PrecisionName
from .predictors import ALL_OF_IT, Predictor, data_config_for, open_examples, open_predictor, task_for, with_task_for
from .tasks import Scores, Task
from .tasks.translation import Translate

WHOLE = "whole"  # the name of the only set when all examples of a file are evaluated


def evaluate(
    path: str | Path | Model,
    data: Mapping[str, Any] | DataConfig | str | Path | None = None,
    *,
    against: str | Path | Model | None = None,
    out: str | Path | None = None,
    split: str = "valid",
    beam: int | None = None,
    length_penalty: float | None = None,
    stride: int | None = None,
    comet: str | None = None,
    limit: int | None = None,
    device: str = "auto",
    precision: PrecisionName = "fp32",
) -> EvaluationReport:
    """Evaluate a run (RUN or RUN@1200), a model directory or a model on examples it was not trained on.

    data       a file or corpus, or fields of DataConfig that replace those of the run. A file given here is evaluated
               whole; a model directory needs one, since it has no data of its own
    against    another run or model to compare with on the same examples: the difference of each metric with its
               confidence interval (paired bootstrap)
    out        a directory for outputs.jsonl, worst.md and report.json; only an earlier evaluation is overwritten
    split      valid, another set that the source holds out, "all" of those, or "train"
    stride     language models: also compute perplexity with windows that move by this many tokens
    comet      translations: also compute COMET with this model of the package unbabel-comet, or a checkpoint file
    limit      use only the first examples of each set
    precision  precision of the loss
    """
    check_positive(stride=stride, limit=limit, beam=beam)
    if out is not None:
        check_replaceable(Path(out))
    torch_device, fields = resolve_device(device), _data_fields(data)
    predictors, tasks = _open_tasks(path, against, torch_device, fields)
    predictor = predictors[0]
    task_class, recipe = predictor.task_class, predictor.config.train
    if stride is not None and "stride" not in task_class.evaluation_options:
        raise ValueError(f"stride={stride} is for language models, but {path} is for the task {task_class.name!r}")
    if comet is not None and not issubclass(task_class, Translate):
        raise ValueError(f"comet={comet} is for translations, but {path} is for the task {task_class.name!r}")
    judge = None if comet is None else Comet(comet, on_gpu=torch_device.type == "cuda")
    source = tasks[0].source
    options: dict[str, Any] = {
        "beam": recipe.beam if beam is None else beam,
        "length_penalty": recipe.length_penalty if length_penalty is None else length_penalty,
        "stride": stride,
    }
    options = {name: value for name, value in options.items() if name in task_class.evaluation_options}
    reported = {**options, **({} if comet is None else {"comet": comet})}
    reports, notes = [], []
    if predictor.run is not None and not fields and predictor.run.facts["data"]["sha256"] != source.sha256:
        notes.append(f"{source.name} has changed since {predictor.name} was trained")
    for name in _split_names(source, split):
        scores = []
        for each, task in zip(predictors, tasks, strict=True):
            examples = task.examples("valid" if name == WHOLE else name, limit)
            if not examples:
                raise BadData(f"{source.name} has no held-out examples to evaluate on; data.source=FILE names others")
            measured = task.score(each.model, examples, Precision(precision, torch_device), **options)
            scores.append(measured if judge is None else _with_comet(measured, judge))
            if task.n_held_out_cut:
                cut = f"{task.n_held_out_cut:,} texts of {source.name if name == WHOLE else name}"
                notes.append(f"{cut} were cut to the length that {each.name} can read")
        reports.append(_split_report(name, predictors, tasks[0], scores))
    report = EvaluationReport(
        path=predictor.name,
        task=task_class.name,
        weights=predictor.weights,
        data={"source": source.name, "held_out": source.split.how, "sha256": source.sha256},
        options={"limit": limit, **reported, "precision": precision, "device": str(torch_device)},
        splits=tuple(reports),
        against=None if against is None else predictors[1].name,
        notes=tuple(dict.fromkeys(notes)),
    )
    if out is not None:
        write_evaluation(Path(out), report)
    return report


def _with_comet(scores: Scores, judge: Comet) -> Scores:
    rows = scores.rows
    texts = ([row.source for row in rows], [row.output for row in rows], [row.first_target for row in rows])
    statistics = judge.statistics(*texts)
    return replace(scores, metrics={**scores.metrics, "comet": statistics.corpus()}, comet=statistics)


def _data_fields(data: Mapping[str, Any] | DataConfig | str | Path | None) -> dict[str, Any]:
    if isinstance(data, DataConfig):
        return {name: getattr(data, name) for name in data.model_fields_set}
    fields = {"source": str(data)} if isinstance(data, str | Path) else dict(data or {})
    DataConfig(**fields)  # refuses unknown fields
    return fields


def _open_tasks(
    path: str | Path | Model, against: str | Path | Model | None, device: torch.device, fields: Mapping[str, Any]
) -> tuple[list[Predictor], list[Task]]:
    """One or two predictors, and the task of each over the same examples.

    Both use the seed of the first, so that the same tokens are masked.
    """
    predictor = open_predictor(path, device)
    seed = predictor.config.train.seed
    data, whole = data_config_for(predictor, fields)
    source = open_examples(data, whole, predictor)
    predictor = with_task_for(predictor, source)
    predictors, tasks = [predictor], [task_for(predictor, source, data, fields, seed)]
    if against is not None:
        other = _open_other(predictor, source, against, device)
        # A corpus always holds out the same examples. From a file, the other run may have held out others and trained
        # on these.
        same_corpus = data.source in CORPORA and other.config.data.source == data.source
        if other.run is not None and not same_corpus and not fields.keys() & {"source", "valid"}:
            held_out = other.run.facts["data"]["split"]["valid_sha256"]
            if held_out != source.split.valid_sha256:
                raise ValueError(
                    f"{other.name} held out other examples than {predictor.name} and may have been trained on these; "
                    "data.source=FILE evaluates both on another file"
                )
        if other.labels != predictor.labels:  # the other model may number the same classes differently
            source = open_examples(data.with_(labels=None), whole, other)
        tasks.append(task_for(other, source, data, fields, seed))
        predictors.append(other)
    return predictors, tasks


def _split_report(name: str, predictors: list[Predictor], task: Task, scores: list[Scores]) -> SplitReport:
    ours = scores[0]
    values = {**ours.metrics, "tokens_per_second": round(ours.tokens_per_second, 1)}
    report = SplitReport(name, ours.n, values, ours.details, tuple(ours.rows), passages=ours.texts is not None)
    if len(scores) == 1:
        return report
    (predictor, other), theirs = predictors, scores[1]
    our_examples, their_examples = ([(row.source, row.target) for row in each.rows] for each in scores)
    if ours.texts is None and our_examples != their_examples:
        names = f"{predictor.name} and {other.name}"
        raise ValueError(f"{names} were evaluated on different examples, so they cannot be compared")
    pairs = task.paired_statistics(ours, theirs, predictor.tokens_sha256 == other.tokens_sha256)
    pairs += [(ours.comet, theirs.comet)] if ours.comet is not None and theirs.comet is not None else []
    comparisons = tuple(paired_bootstrap(their, our) for our, their in pairs)
    return replace(report, comparisons=comparisons, other=theirs.metrics, other_rows=tuple(theirs.rows))


def _split_names(source: Source, split: str) -> list[str]:
    held_out = ["valid", *source.others]
    if split not in (*held_out, "all", "train"):
        raise ValueError(f"split={split!r} is not one of {', '.join([*held_out, 'all', 'train'])} of {source.name}")
    if source.split.how == ALL_OF_IT:
        return [WHOLE]
    return held_out if split == "all" else [split]


def _open_other(predictor: Predictor, source: Source, path: str | Path | Model, device: torch.device) -> Predictor:
    other = with_task_for(open_predictor(path, device), source)
    names = f"{predictor.name} and {other.name}"
    if other.task_class is not predictor.task_class:
        tasks = f"{predictor.config.task!r} and {other.config.task!r}"
        raise ValueError(f"{names} are for the tasks {tasks}, so they cannot be compared")
    labels, theirs = predictor.labels, other.labels
    if labels is not None and theirs is not None and set(labels) != set(theirs):
        classes = f"{', '.join(labels)} and {', '.join(theirs)}"
        raise ValueError(f"{names} have different classes, {classes}, so they cannot be compared")
    return other
