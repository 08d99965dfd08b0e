"""Exercises as data: the task in two languages, a template with a gap, hints, a solution, typical mistakes.

A learner's attempts, solved exercises and hints are kept in one JSON file in the user's state folder.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import UsageError
from ..foundation.files import state_folder, write_atomic
from ..foundation.language import LANGUAGES, environment_language, localise

N_CHAPTERS = 8


class Texts(NamedTuple):
    """A text in both languages; ``str`` gives the one in the user's language."""

    en: str
    ko: str

    def __str__(self) -> str:
        return self[LANGUAGES.index(environment_language())]


class Mistake(NamedTuple):
    """A typical wrong answer: the solution with ``old`` replaced by ``new``, and the message it gets."""

    old: str
    new: str
    say: Texts


@dataclass(frozen=True)
class Exercise:
    """A function to write, with everything a learner sees."""

    number: str  # "3.2" is the second exercise of chapter 3
    function: str
    title: Texts
    task: Texts
    hints: tuple[Texts, ...]
    template: str
    solution: str
    mistakes: tuple[Mistake, ...]

    @property
    def file_name(self) -> str:
        """The name of the learner's file without its suffix: exercise_3_2."""
        return f"exercise_{self.number.replace('.', '_')}"

    def code_with(self, *mistakes: Mistake) -> str:
        """The solution with these mistakes."""
        code = self.solution
        for mistake in mistakes:
            code = code.replace(mistake.old, mistake.new)
        return code


@dataclass(frozen=True)
class Chapter:
    """A chapter of docs/learn and its exercises."""

    number: int
    page: str
    title: Texts
    exercises: tuple[Exercise, ...]


@cache
def chapters() -> tuple[Chapter, ...]:
    """All chapters, in order."""
    return tuple(_load_chapter(number) for number in range(1, N_CHAPTERS + 1))


def _load_chapter(number: int) -> Chapter:
    text = files("regard.course").joinpath(f"exercises/chapter{number}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    exercises = tuple(_exercise(name, entry) for name, entry in table.items() if isinstance(entry, dict))
    return Chapter(number, table["page"], Texts(*table["title"]), exercises)


def _exercise(number: str, entry: dict[str, Any]) -> Exercise:
    solution = entry["solution"].lstrip("\n")
    return Exercise(
        number,
        entry["function"],
        Texts(*entry["title"]),
        Texts(*entry["task"]),
        tuple(Texts(*hint) for hint in entry["hints"]),
        entry["template"].lstrip("\n") if "template" in entry else _without_body(solution, entry["function"]),
        solution,
        tuple(Mistake(mistake["old"], mistake["new"], Texts(*mistake["say"])) for mistake in entry["mistakes"]),
    )


def _without_body(solution: str, function: str) -> str:
    """The solution with the body of the function replaced by a gap."""
    head = solution.partition(f"def {function}(")[0]
    signature = solution[len(head) :].partition("\n")[0]
    return f"{head}{signature}\n    ...\n"


def find_exercise(number: str) -> Exercise:
    """The exercise with this number; raises UsageError if there is none."""
    known = {exercise.number: exercise for chapter in chapters() for exercise in chapter.exercises}
    if number not in known:
        raise UsageError(f"there is no exercise {number}; regard learn lists them")
    return known[number]


def write_exercise(exercise: Exercise, folder: Path, *, notebook: bool = False) -> Path:
    """Write the file to complete, as Python or as a notebook. An existing file is never overwritten."""
    file = folder / f"{exercise.file_name}{'.ipynb' if notebook else '.py'}"
    if file.exists():
        raise UsageError(f"{file} already exists; regard learn check {exercise.number} tests it")
    title = f"{exercise.number} · {exercise.title}"
    if notebook:
        call = f'import regard\n\nregard.check("{exercise.number}", {exercise.function})'
        cells = [("markdown", f"# {title}\n\n{exercise.task}"), ("code", exercise.template), ("code", call)]
        content = notebook_json(cells)
    else:
        wrapped = textwrap.wrap(str(exercise.task), 98)
        then = localise(f"Then: regard learn check {exercise.number}; when stuck: regard learn hint {exercise.number}")
        comment = "\n".join(f"# {line}" if line else "#" for line in (title, "", *wrapped, "", then))
        content = f"{comment}\n\n{exercise.template}".encode()
    write_atomic(file, content)
    return file


def read_answer(file: Path) -> str:
    """The Python code of a learner's file; for a notebook, its code cells without magics and calls of the check."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text") from None
    if file.suffix != ".ipynb":
        return text
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} is not a notebook") from None
    return "\n".join(line for line in lines if not line.startswith(("%", "!", "regard.check("))) + "\n"


def notebook_json(cells: Iterable[tuple[Literal["markdown", "code"] | str, str]]) -> bytes:
    """A Jupyter notebook (nbformat 4.5) from (kind, text) of its cells."""
    entries: list[dict[str, Any]] = [
        {
            "cell_type": kind,
            "id": f"cell-{n}",
            "metadata": {},
            "source": text.rstrip("\n").splitlines(keepends=True),
            **({"execution_count": None, "outputs": []} if kind == "code" else {}),
        }
        for n, (kind, text) in enumerate(cells)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": entries, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()


# ------------------------------------------------------------------------------------- progress


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
    document = {"exercises": {number: asdict(record) for number, record in progress.items()}}
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
