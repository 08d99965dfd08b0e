"""An evaluation as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .console_display import GAP, format_pairs, format_rows, printable

if TYPE_CHECKING:
    from .evaluating import EvaluationReport, SplitReport

__all__ = ["table_of"]

_WIDTH = 120
_MOST_CLASSES = 20
_MOST_CONFUSED = 10
_SHOWN_WORST = 3
_SHOWN_CHARACTERS = 400


def table_of(report: EvaluationReport) -> str:
    """Facts, then each set: its metrics, its classes, the comparison, the worst cases."""
    facts: dict[str, Any] = {
        "task": report.task,
        "weights": report.weights,
        "data": f"{report.data['source']}, {report.data['held_out']}",
    }
    facts |= {name: value for name, value in report.options.items() if value is not None}
    lines = [printable(report.path), *format_pairs(facts, _WIDTH)]
    for split in report.splits:
        lines += ["", *_split(split, report.against)]
    lines += [f"note: {printable(note)}" for note in report.notes]
    return "\n".join(lines)


def _split(split: SplitReport, against: str | None) -> list[str]:
    lines = [f"{split.name}: {split.n:,} example{'s' * (split.n != 1)}", *format_pairs(split.metrics, _WIDTH)]
    classes = split.details.get("classes", [])
    if classes:
        lines += ["classes", *format_rows(classes[:_MOST_CLASSES], _WIDTH)]
        if len(classes) > _MOST_CLASSES:
            lines.append(f"{GAP}… and {len(classes) - _MOST_CLASSES:,} more")
        if len(classes) <= _MOST_CONFUSED:
            lines += ["who is taken for whom", *_confusion(classes, split.details["confusion"])]
    if split.comparisons:
        lines += [f"against {printable(str(against))}, by paired bootstrap", *_comparisons(split)]
    worst = split.worst(_SHOWN_WORST)
    if worst:
        lines.append("worst")
        for row in worst:
            target = row.target if isinstance(row.target, str) else row.target[0]
            shown = {"source": row.source, "target": target, "output": row.output, "score": row.score}
            cut = {name: x[:_SHOWN_CHARACTERS] if isinstance(x, str) else x for name, x in shown.items()}
            lines += [*format_pairs(cut, _WIDTH), ""]
        lines.pop()
    return lines


def _confusion(classes: list[dict[str, Any]], counts: list[list[int]]) -> list[str]:
    """A row for each true class, a column for each that was said."""
    names = [str(one["label"]) for one in classes]
    said = [
        {"true ↓ said →": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, counts, strict=True)
    ]
    return format_rows(said, _WIDTH)


def _comparisons(split: SplitReport) -> list[str]:
    rows = [
        {
            "metric": one.metric,
            "other": one.a,
            "this": one.b,
            "difference": f"{one.difference:+.4f}",
            "95 %": f"[{one.low:+.4f}, {one.high:+.4f}]",
            "p": f"{one.p_value:.3f}",
        }
        for one in split.comparisons
    ]
    return format_rows(rows, _WIDTH)
