"""``evaluate``: the metrics of a trained model on held-out data, their comparison with another model, and the report.

A report is an object, a text, and a directory that is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import DataConfig
from ..data.corpora import CORPORA
from ..data.sources import Source
from ..errors import BadData, BadModelFile
from ..foundation.checks import check_positive
from ..foundation.device import resolve_device
from ..foundation.files import atomic_file, replace_directory, write_atomic
from ..foundation.jsonio import to_json, to_jsonable
from ..foundation.language import localise
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Manifest, file_names
from ..models import Model
from .console_display import GAP, format_pairs, format_rows, printable
from .metrics.statistics import Comparison, paired_bootstrap
from .metrics.translation_metrics import Comet
from .precision import Precision, PrecisionName
from .predictors import ALL_OF_IT, Predictor, data_config_for, open_examples, open_predictor, task_for, with_task_for
from .tasks import ExampleResult, Scores, Task
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
        check_evaluation_folder(Path(out))
    torch_device, fields = resolve_device(device), _data_fields(data)
    predictors, tasks = _open_tasks(path, against, torch_device, fields)
    predictor, source = predictors[0], tasks[0].source
    options = _task_options(predictor, beam=beam, length_penalty=length_penalty, stride=stride, comet=comet)
    judge = None if comet is None else Comet(comet, on_gpu=torch_device.type == "cuda")
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
        task=predictor.task_class.name,
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


def _task_options(predictor: Predictor, *, comet: str | None, **options: Any) -> dict[str, Any]:
    """The options that the task has; those that are not given are as in training. The others are refused."""
    task_class, recipe = predictor.task_class, predictor.config.train
    own = task_class.evaluation_options
    for name, value in {**options, "comet": comet}.items():
        if value is not None and name not in own and not (name == "comet" and issubclass(task_class, Translate)):
            kind = {"stride": "language models", "comet": "translations"}.get(name, "generated texts")
            raise ValueError(f"{name}={value} is for {kind}, but {predictor.name} is for the task {task_class.name!r}")
    return {name: getattr(recipe, name, None) if options[name] is None else options[name] for name in own}


def _with_comet(scores: Scores, judge: Comet) -> Scores:
    rows = scores.rows
    texts = ([row.source for row in rows], [row.output for row in rows], [row.first_target for row in rows])
    statistics = judge.statistics(*texts)
    return replace(scores, metrics={**scores.metrics, "comet": statistics.corpus()}, comet=statistics)


def _data_fields(data: Mapping[str, Any] | DataConfig | str | Path | None) -> dict[str, Any]:
    if data is not None and not isinstance(data, Mapping | DataConfig | str | Path):
        kind = type(data).__name__
        raise TypeError(
            f"data is a {kind}, not a file, a corpus or fields of DataConfig; write examples to a file first"
        )
    if not isinstance(data, DataConfig):
        data = DataConfig(**({"source": data} if isinstance(data, str | Path) else data or {}))
    return {name: getattr(data, name) for name in data.model_fields_set}


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


# ------------------------------------------------------------------------------------- the report


OUTPUTS, WORST, REPORT = "outputs.jsonl", "worst.md", "report.json"
_FILES = {OUTPUTS, WORST, REPORT, MANIFEST}
_MAX_WORST_IN_FILE, _MAX_WORST_SHOWN = 20, 3
_MAX_CLASSES, _MAX_CONFUSION = 20, 10
_MAX_CHARACTERS, _WIDTH = 400, 120


@dataclass(frozen=True)
class SplitReport:
    """The results on one set of examples."""

    name: str
    n: int  # number of examples: pairs, texts, images
    metrics: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)  # for classifiers: ``classes`` and ``confusion``
    rows: tuple[ExampleResult, ...] = field(default=(), repr=False)  # one per example, or per passage of a text
    passages: bool = False  # rows are passages, whose output is the most likely token at each position
    comparisons: tuple[Comparison, ...] = ()
    other: dict[str, Any] = field(default_factory=dict)  # the metrics of the other model
    other_rows: tuple[ExampleResult, ...] = field(default=(), repr=False)

    def worst(self, k: int = 20) -> tuple[ExampleResult, ...]:
        """The k rows with the lowest scores, ties by the higher loss; correct answers are left out."""
        wrong = [row for row in self.rows if self.passages or not row.is_correct]
        return tuple(sorted(wrong, key=lambda row: (row.score, -(row.loss or 0.0))))[:k]

    def other_row(self, index: int) -> ExampleResult | None:
        """The result of the other model for the same example, if there is one for each."""
        return self.other_rows[index] if len(self.other_rows) == len(self.rows) else None

    def to_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {"n": self.n, **to_jsonable(self.metrics), **self.details}
        if self.comparisons:
            comparisons = [comparison.to_dict() for comparison in self.comparisons]
            document["against"] = {"metrics": to_jsonable(self.other), "comparisons": comparisons}
        return document


@dataclass(frozen=True)
class EvaluationReport:
    """The results of a model on one set of examples or on several."""

    path: str
    task: str
    weights: str
    data: dict[str, Any]  # the source of the examples and its hash
    options: dict[str, Any]
    splits: tuple[SplitReport, ...]
    against: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the first set, which is often the only one."""
        return self.splits[0].metrics

    @property
    def rows(self) -> tuple[ExampleResult, ...]:
        """The rows of all sets."""
        return tuple(row for split in self.splits for row in split.rows)

    def __getitem__(self, name: str) -> SplitReport:
        for split in self.splits:
            if split.name == name:
                return split
        raise KeyError(f"{name!r} is not one of {', '.join(split.name for split in self.splits)}")

    def to_dict(self) -> dict[str, Any]:
        about = {"path": self.path, "task": self.task, "weights": self.weights, "data": self.data}
        against = {} if self.against is None else {"against": self.against}
        splits = {split.name: split.to_dict() for split in self.splits}
        return {**about, "options": self.options, **against, "splits": splits, "notes": list(self.notes)}

    def to_text(self) -> str:
        data = f"{self.data['source']}, {self.data['held_out']}"
        options = {name: value for name, value in self.options.items() if value is not None}
        facts = {"task": self.task, "weights": localise(self.weights), "data": localise(data), **options}
        lines = [printable(self.path), *format_pairs(facts, _WIDTH)]
        for split in self.splits:
            lines += ["", *_split_lines(split, self.against)]
        return "\n".join([*lines, *(f"note: {printable(note)}" for note in self.notes)])


def _split_lines(split: SplitReport, against: str | None) -> list[str]:
    lines = [f"{split.name}: {split.n:,} example{'s' * (split.n != 1)}", *format_pairs(split.metrics, _WIDTH)]
    if classes := split.details.get("classes", []):
        lines += ["classes", *format_rows(classes[:_MAX_CLASSES], _WIDTH)]
        if len(classes) > _MAX_CLASSES:
            lines.append(f"{GAP}… and {len(classes) - _MAX_CLASSES:,} more")
        if len(classes) <= _MAX_CONFUSION and "confusion" in split.details:
            names = [str(each["label"]) for each in classes]
            table = zip(names, split.details["confusion"], strict=True)
            rows = [{localise("true ↓ predicted →"): name, **dict(zip(names, row, strict=True))} for name, row in table]
            lines += ["confusion", *format_rows(rows, _WIDTH)]
    if split.comparisons:
        lines.append(f"against {printable(str(against))}, by paired bootstrap")
        rows = []
        for each in split.comparisons:
            scores = {"metric": each.metric, "other": each.a, "this": each.b, "difference": f"{each.difference:+.4f}"}
            interval = f"[{each.low:+.4f}, {each.high:+.4f}]"
            scores |= {"95 %": interval, "p": f"{each.p_value:.3f}"}
            rows.append({localise(name): value for name, value in scores.items()})
        lines += format_rows(rows, _WIDTH)
    worst = split.worst(_MAX_WORST_SHOWN)
    if worst:
        lines.append("worst")
        for row in worst:
            texts = {"source": row.source, "target": row.first_target, "output": row.output}
            shown = {name: text[:_MAX_CHARACTERS] for name, text in texts.items()}
            lines += [*format_pairs({**shown, "score": row.score}, _WIDTH), ""]
        lines.pop()
    return lines


def check_evaluation_folder(target: Path) -> None:
    """Raise FileExistsError for a directory that holds anything but an unchanged earlier evaluation."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; an evaluation is written as a directory")
    if not target.exists() or not any(target.iterdir()):
        return
    names = set(file_names(target))
    if unknown := sorted(names - _FILES):
        raise FileExistsError(f"{target} holds {unknown[0]}, which is not part of an evaluation and would be lost")
    try:
        manifest = Manifest.read(target)
        if manifest is None or set(manifest.files) != _FILES - {MANIFEST}:
            raise FileExistsError(f"{target} holds files that were not written as an evaluation; they would be lost")
        manifest.check(target)
    except BadModelFile as error:
        raise FileExistsError(f"{target} has been changed since it was written, and would be lost: {error}") from None


def write_evaluation(target: Path, report: EvaluationReport) -> None:
    """Write the three files and their manifest to a new directory, which then replaces the old one."""
    check_evaluation_folder(target)
    with replace_directory(target) as folder:
        with atomic_file(folder / OUTPUTS) as file:
            for split in report.splits:
                for index, row in enumerate(split.rows):
                    line: dict[str, Any] = {"split": split.name, "index": index, **row.to_dict()}
                    if other := split.other_row(index):
                        line["other"] = {"output": other.output, "score": other.score, "loss": other.loss}
                    text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
                    file.write(text.encode("utf-8", "surrogatepass"))
        write_atomic(folder / WORST, _worst_markdown(report).encode("utf-8", "surrogatepass"))
        write_atomic(folder / REPORT, to_json(report.to_dict()))
        Manifest.of(folder).write(folder)


def _worst_markdown(report: EvaluationReport) -> str:
    parts = [f"# The worst cases of {report.path}", f"{report.task}, {report.data['source']}"]
    for split in report.splits:
        cases = split.worst(_MAX_WORST_IN_FILE)
        parts.append(f"## {split.name}: {len(cases)} of {len(split.rows):,}")
        if not cases:
            parts.append("Nothing is wrong.")
        indices = {id(row): index for index, row in enumerate(split.rows)}
        for number, row in enumerate(cases, 1):
            loss = "" if row.loss is None else f", loss {row.loss:.4f}"
            parts.append(f"### {number}. score {row.score:.4f}{loss} (index {indices[id(row)]})")
            targets = [row.target] if isinstance(row.target, str) else row.target
            texts = [("source", row.source), *(("target", text) for text in targets), ("output", row.output)]
            if other := split.other_row(indices[id(row)]):
                texts.append(("other", other.output))
            for name, text in texts:  # indented as code, so that no text is rendered as Markdown
                block = "\n".join(f"    {line}" for line in text.splitlines()) or "    (nothing)"
                parts.append(f"{name}\n\n{block}")
    return "\n\n".join(parts) + "\n"
