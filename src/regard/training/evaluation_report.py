"""The result of an evaluation: as objects, as text, and as a directory that is written atomically."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadModelFile
from ..foundation.files import atomic_file, replace_directory, write_atomic
from ..foundation.jsonio import to_json, to_jsonable
from ..foundation.language import localise
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Manifest, file_names
from .console_display import GAP, format_pairs, format_rows, printable
from .metrics.statistics import Comparison
from .tasks import ExampleResult

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
        document: dict[str, Any] = {**about, "options": self.options}
        if self.against is not None:
            document["against"] = self.against
        document["splits"] = {split.name: split.to_dict() for split in self.splits}
        return {**document, "notes": list(self.notes)}

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
    classes = split.details.get("classes", [])
    if classes:
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


def check_replaceable(target: Path) -> None:
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
    check_replaceable(target)
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
