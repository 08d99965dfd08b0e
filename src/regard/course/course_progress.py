"""A learner's attempts, solved exercises and hints, in one JSON file in the user's state folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..foundation.files import state_folder, write_atomic
from .exercises import Exercise, Texts, chapters

_VERSION = 1


@dataclass
class ExerciseProgress:
    """The progress of a learner in one exercise."""

    attempts: int = 0
    solved: bool = False
    hints: int = 0  # number of hints shown


def progress_file() -> Path:
    """$XDG_STATE_HOME/regard/learn.json, else ~/.local/state/regard/learn.json."""
    return state_folder() / "learn.json"


def read_progress() -> dict[str, ExerciseProgress]:
    """Progress by exercise number. An unreadable file counts as empty; the next attempt overwrites it."""
    try:
        document = json.loads(progress_file().read_text(encoding="utf-8"))
        return {number: ExerciseProgress(**record) for number, record in document["exercises"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(progress: dict[str, ExerciseProgress]) -> None:
    file = progress_file()
    document = {"version": _VERSION, "exercises": {number: asdict(record) for number, record in progress.items()}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, (json.dumps(document, indent=1) + "\n").encode())
    except OSError:  # a read-only home directory must not fail the check
        return


def note_attempt(number: str, passed: bool) -> None:
    """Count an attempt; an exercise that was solved once stays solved."""
    progress = read_progress()
    record = progress.setdefault(number, ExerciseProgress())
    record.attempts += 1
    record.solved = record.solved or passed
    _write(progress)


def next_hint(exercise: Exercise) -> tuple[int, str]:
    """The number (from 1) and the text of the next hint; the last one is repeated."""
    progress = read_progress()
    record = progress.setdefault(exercise.number, ExerciseProgress())
    record.hints = min(record.hints + 1, len(exercise.hints))
    _write(progress)
    return record.hints, str(exercise.hints[record.hints - 1])


def solution_after_attempt(exercise: Exercise) -> str:
    """The solution; raises UsageError before the first attempt."""
    if not read_progress().get(exercise.number, ExerciseProgress()).attempts:
        number = exercise.number
        raise UsageError(f"the solution of {number} is shown after an attempt: regard learn check {number} tests yours")
    return exercise.solution


def progress_report() -> dict[str, Any]:
    """All chapters and exercises with the progress in each, for `regard learn` and its --json."""
    progress = read_progress()
    listed = [
        {
            "chapter": chapter.number,
            "title": str(chapter.title),
            "page": f"{Texts('docs/learn', 'docs/ko/learn')}/{chapter.page}",
            "exercises": [
                {"number": e.number, "title": str(e.title), **asdict(progress.get(e.number, ExerciseProgress()))}
                for e in chapter.exercises
            ],
        }
        for chapter in chapters()
    ]
    return {"progress_file": str(progress_file()), "chapters": listed}
