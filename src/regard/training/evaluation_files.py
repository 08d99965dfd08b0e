"""An evaluation on disk: what came out for every example, the worst cases to read, the report; all of it or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadModelFile
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import to_json
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Manifest, file_names

if TYPE_CHECKING:
    from .evaluating import EvaluationReport, SplitReport
    from .tasks import Row

__all__ = ["need_ours", "write_evaluation"]

OUTPUTS, WORST, REPORT = "outputs.jsonl", "worst.md", "report.json"
_FILES = {OUTPUTS, WORST, REPORT, MANIFEST}
_MOST_WORST = 20


def need_ours(target: Path) -> None:
    """Refuse a directory that holds anything but an earlier evaluation, as it was written."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; an evaluation is written as a directory")
    names = set(file_names(target))
    if not names and not any(target.iterdir()):
        return
    if strange := sorted(names - _FILES):
        raise FileExistsError(f"{target} holds {strange[0]}, which is no part of an evaluation; it would be lost")
    try:
        manifest = Manifest.read(target)
        if manifest is None or set(manifest.files) != _FILES - {MANIFEST}:
            raise FileExistsError(f"{target} holds files that were not written as an evaluation; they would be lost")
        manifest.check(target)
    except BadModelFile as error:
        raise FileExistsError(f"{target} has been changed since it was written, and would be lost: {error}") from None


def write_evaluation(target: Path, report: EvaluationReport) -> None:
    """Write the three files and their manifest into a new directory, which then takes the place of the old one."""
    need_ours(target)
    with replace_directory(target) as folder:
        lines = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in _lines(report))
        write_atomic(folder / OUTPUTS, "".join(lines).encode("utf-8", "surrogatepass"))
        write_atomic(folder / WORST, _worst(report).encode("utf-8", "surrogatepass"))
        write_atomic(folder / REPORT, to_json(report.document()))
        Manifest.of(folder).write(folder)


def _lines(report: EvaluationReport) -> Iterator[dict[str, Any]]:
    """One object for each example: what was asked, expected and said, and what the other system said."""
    for split in report.splits:
        paired = len(split.other_rows) == len(split.rows)
        for place, row in enumerate(split.rows):
            line: dict[str, Any] = {"split": split.name, "index": place, **row.document()}
            if paired:
                line["other"] = {name: getattr(split.other_rows[place], name) for name in ("output", "score", "loss")}
            yield line


def _worst(report: EvaluationReport) -> str:
    parts = [f"# The worst cases of {report.path}", f"{report.task}, {report.data['source']}"]
    for split in report.splits:
        cases = split.worst(_MOST_WORST)
        parts.append(f"## {split.name}: {len(cases)} of {len(split.rows):,}")
        if not cases:
            parts.append("Nothing is wrong.")
        places = {id(row): place for place, row in enumerate(split.rows)}
        parts += [_case(number, places[id(row)], row, split) for number, row in enumerate(cases, 1)]
    return "\n\n".join(parts) + "\n"


def _case(number: int, place: int, row: Row, split: SplitReport) -> str:
    about = f"score {row.score:.4f}" + ("" if row.loss is None else f", loss {row.loss:.4f}")
    targets = [row.target] if isinstance(row.target, str) else row.target
    shown = [("source", row.source), *(("target", text) for text in targets), ("output", row.output)]
    if len(split.other_rows) == len(split.rows):
        shown.append(("other", split.other_rows[place].output))
    return "\n\n".join(
        [f"### {number}. {about} (index {place})", *(f"{name}\n\n{_block(text)}" for name, text in shown)]
    )


def _block(text: str) -> str:
    """Indented, so that nothing in a text is taken for the page's own marks."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (nothing)"
