"""The result of an evaluation: as objects, as text for people, and as a directory written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadModelFile
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import to_json, to_jsonable
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
    n: int  # examples: pairs, texts, images
    metrics: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)  # of classification: ``classes`` and ``confusion``
    rows: tuple[ExampleResult, ...] = field(default=(), repr=False)  # every example, or every passage of a text
    passages: bool = False  # whether rows are passages: their output is the likeliest token at each place
    comparisons: tuple[Comparison, ...] = ()
    other: dict[str, Any] = field(default_factory=dict)  # the metrics of the other model
    other_rows: tuple[ExampleResult, ...] = field(default=(), repr=False)

    def worst(self, k: int = 20) -> tuple[ExampleResult, ...]:
        """The k rows with the lowest scores, among equals those with the higher loss; no correct answers."""
        wrong = [row for row in self.rows if self.passages or not row.is_correct]
        return tuple(sorted(wrong, key=lambda row: (row.score, -(row.loss or 0.0))))[:k]

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
    data: dict[str, Any]  # where the examples came from, and their hash
    options: dict[str, Any]
    splits: tuple[SplitReport, ...]
    against: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the first set, which often is the only one."""
        return self.splits[0].metrics

    @property
    def rows(self) -> tuple[ExampleResult, ...]:
        """Of all sets."""
        return tuple(row for split in self.splits for row in split.rows)

    def __getitem__(self, name: str) -> SplitReport:
        for split in self.splits:
            if split.name == name:
                return split
        raise KeyError(f"{name!r} is none of {', '.join(split.name for split in self.splits)}")

    def to_dict(self) -> dict[str, Any]:
        about = {"path": self.path, "task": self.task, "weights": self.weights, "data": self.data}
        document: dict[str, Any] = {**about, "options": self.options}
        if self.against is not None:
            document["against"] = self.against
        document["splits"] = {split.name: split.to_dict() for split in self.splits}
        return {**document, "notes": list(self.notes)}

    def to_text(self) -> str:
        facts: dict[str, Any] = {
            "task": self.task,
            "weights": self.weights,
            "data": f"{self.data['source']}, {self.data['held_out']}",
        }
        facts |= {name: value for name, value in self.options.items() if value is not None}
        lines = [printable(self.path), *format_pairs(facts, _WIDTH)]
        for split in self.splits:
            lines += ["", *_split_lines(split, self.against)]
        lines += [f"note: {printable(note)}" for note in self.notes]
        return "\n".join(lines)


# ------------------------------------------------------------------------------------- text for people


def _split_lines(split: SplitReport, against: str | None) -> list[str]:
    lines = [f"{split.name}: {split.n:,} example{'s' * (split.n != 1)}", *format_pairs(split.metrics, _WIDTH)]
    classes = split.details.get("classes", [])
    if classes:
        lines += ["classes", *format_rows(classes[:_MAX_CLASSES], _WIDTH)]
        if len(classes) > _MAX_CLASSES:
            lines.append(f"{GAP}… and {len(classes) - _MAX_CLASSES:,} more")
        if len(classes) <= _MAX_CONFUSION:
            lines += ["who is taken for whom", *_confusion_lines(classes, split.details["confusion"])]
    if split.comparisons:
        lines += [f"against {printable(str(against))}, by paired bootstrap", *_comparison_lines(split)]
    worst = split.worst(_MAX_WORST_SHOWN)
    if worst:
        lines.append("worst")
        for row in worst:
            target = row.target if isinstance(row.target, str) else row.target[0]
            texts = {"source": row.source, "target": target, "output": row.output}
            shown = {name: text[:_MAX_CHARACTERS] for name, text in texts.items()}
            lines += [*format_pairs({**shown, "score": row.score}, _WIDTH), ""]
        lines.pop()
    return lines


def _confusion_lines(classes: list[dict[str, Any]], counts: list[list[int]]) -> list[str]:
    """A row for each true class, a column for each predicted one."""
    names = [str(each["label"]) for each in classes]
    rows = [
        {"true ↓ said →": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, counts, strict=True)
    ]
    return format_rows(rows, _WIDTH)


def _comparison_lines(split: SplitReport) -> list[str]:
    rows = [
        {
            "metric": each.metric,
            "other": each.a,
            "this": each.b,
            "difference": f"{each.difference:+.4f}",
            "95 %": f"[{each.low:+.4f}, {each.high:+.4f}]",
            "p": f"{each.p_value:.3f}",
        }
        for each in split.comparisons
    ]
    return format_rows(rows, _WIDTH)


# ------------------------------------------------------------------------------------- files


def check_replaceable(target: Path) -> None:
    """Refuse a directory that holds anything but an earlier evaluation, as it was written."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; an evaluation is written as a directory")
    names = set(file_names(target))
    if not names and not any(target.iterdir()):
        return
    if unknown := sorted(names - _FILES):
        raise FileExistsError(f"{target} holds {unknown[0]}, which is no part of an evaluation; it would be lost")
    try:
        manifest = Manifest.read(target)
        if manifest is None or set(manifest.files) != _FILES - {MANIFEST}:
            raise FileExistsError(f"{target} holds files that were not written as an evaluation; they would be lost")
        manifest.check(target)
    except BadModelFile as error:
        raise FileExistsError(f"{target} has been changed since it was written, and would be lost: {error}") from None


def write_evaluation(target: Path, report: EvaluationReport) -> None:
    """Write the three files and their manifest into a new directory, which then replaces the old one."""
    check_replaceable(target)
    with replace_directory(target) as folder:
        lines = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in _output_lines(report))
        write_atomic(folder / OUTPUTS, "".join(lines).encode("utf-8", "surrogatepass"))
        write_atomic(folder / WORST, _worst_markdown(report).encode("utf-8", "surrogatepass"))
        write_atomic(folder / REPORT, to_json(report.to_dict()))
        Manifest.of(folder).write(folder)


def _output_lines(report: EvaluationReport) -> Iterator[dict[str, Any]]:
    """One object for each example: source, target and output, and the output of the other model."""
    for split in report.splits:
        paired = len(split.other_rows) == len(split.rows)
        for index, row in enumerate(split.rows):
            line: dict[str, Any] = {"split": split.name, "index": index, **row.to_dict()}
            if paired:
                line["other"] = {name: getattr(split.other_rows[index], name) for name in ("output", "score", "loss")}
            yield line


def _worst_markdown(report: EvaluationReport) -> str:
    parts = [f"# The worst cases of {report.path}", f"{report.task}, {report.data['source']}"]
    for split in report.splits:
        cases = split.worst(_MAX_WORST_IN_FILE)
        parts.append(f"## {split.name}: {len(cases)} of {len(split.rows):,}")
        if not cases:
            parts.append("Nothing is wrong.")
        indices = {id(row): index for index, row in enumerate(split.rows)}
        parts += [_case_markdown(number, indices[id(row)], row, split) for number, row in enumerate(cases, 1)]
    return "\n\n".join(parts) + "\n"


def _case_markdown(number: int, index: int, row: ExampleResult, split: SplitReport) -> str:
    about = f"score {row.score:.4f}" + ("" if row.loss is None else f", loss {row.loss:.4f}")
    targets = [row.target] if isinstance(row.target, str) else row.target
    texts = [("source", row.source), *(("target", text) for text in targets), ("output", row.output)]
    if len(split.other_rows) == len(split.rows):
        texts.append(("other", split.other_rows[index].output))
    parts = [f"### {number}. {about} (index {index})", *(f"{name}\n\n{_code_block(text)}" for name, text in texts)]
    return "\n\n".join(parts)


def _code_block(text: str) -> str:
    """Indented, so that nothing in a text is taken for Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (nothing)"
