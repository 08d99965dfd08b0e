"""`regard learn`: list, start, check and solve the exercises of the course, and watch a model learn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.foundation.language import localise

from . import terminal
from .options import AsJson, argument, flag, option
from .serve_command import OpenBrowser, Port

if TYPE_CHECKING:
    from regard.course.exercises import Exercise

learn_app = typer.Typer(help="Forty self-checking exercises for the chapters of docs/learn.")


def _numbers(incomplete: str) -> list[str]:
    from regard.course.exercises import chapters

    return [e.number for chapter in chapters() for e in chapter.exercises if e.number.startswith(incomplete)]


Number = Annotated[str, argument("EXERCISE", "Number of the exercise: 3.2 is the second of chapter 3.", _numbers)]


@learn_app.callback(invoke_without_command=True)
def list_without_command(ctx: typer.Context) -> None:
    """Forty self-checking exercises for the chapters of docs/learn."""
    if ctx.invoked_subcommand is None:
        list_exercises()


@learn_app.command("list")
def list_exercises(as_json: AsJson = False) -> None:
    """List chapters and exercises, and which are solved."""
    from regard.course.exercises import progress_report

    report = progress_report()
    if as_json:
        terminal.print_json(report)
        return
    for chapter in report["chapters"]:
        print(f"{chapter['chapter']} · {chapter['title']}  ({chapter['page']})")
        for exercise in chapter["exercises"]:
            mark = "✓" if exercise["solved"] else "·" if exercise["attempts"] else " "
            print(f"  {mark} {exercise['number']}  {exercise['title']}")
    exercises = [exercise for chapter in report["chapters"] for exercise in chapter["exercises"]]
    n_solved = sum(exercise["solved"] for exercise in exercises)
    print(localise(f"{n_solved} of {len(exercises)} solved; progress is kept in {report['progress_file']}"))
    unsolved = next((exercise["number"] for exercise in exercises if not exercise["solved"]), None)
    if unsolved is not None:
        print(localise(f"Next: regard learn start {unsolved}"))


@learn_app.command("start")
def start(
    number: Number,
    notebook: Annotated[bool, flag("--notebook", "A Jupyter notebook instead of a Python file.")] = False,
) -> None:
    """Write a file with a gap to fill into this folder: exercise_3_2.py."""
    from regard.course.exercises import find_exercise, write_exercise

    exercise = find_exercise(number)
    file = write_exercise(exercise, Path(), notebook=notebook)
    print(f"{exercise.number} · {exercise.title}\n\n{exercise.task}\n")
    print(localise(f"Fill the gap in {file}, then: regard learn check {number}"))


@learn_app.command("check")
def check(
    number: Number,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The file to test; its code runs in a separate process.",
            show_default="exercise_….py or .ipynb here",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test an answer against the library's own, and say in one sentence what is wrong.

    The exit code is 0 if it is right, else 1.
    """
    from regard.course.checking import check_file
    from regard.course.exercises import find_exercise, note_attempt

    exercise = find_exercise(number)
    verdict = check_file(exercise, file or _file_here(exercise))
    note_attempt(number, verdict.passed)
    if verdict.printed:
        terminal.progress(verdict.printed.rstrip("\n"))
    if as_json:
        terminal.print_json({"exercise": number, "passed": verdict.passed, "sentence": verdict.sentence})
    else:
        print(verdict)
    if not verdict:
        raise typer.Exit(1)


def _file_here(exercise: Exercise) -> Path:
    """The Python file or the notebook of an exercise in this folder; if both exist, the one saved last."""
    files = [Path(f"{exercise.file_name}{suffix}") for suffix in (".py", ".ipynb")]
    return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime, default=files[0])


@learn_app.command("hint")
def hint(number: Number) -> None:
    """Show the next hint; each call reveals one more."""
    from regard.course.exercises import find_exercise, next_hint

    exercise = find_exercise(number)
    step, text = next_hint(exercise)
    print(f"{step}/{len(exercise.hints)}  {text}")
    if step == len(exercise.hints):
        terminal.progress(
            localise(f"That is the last hint; a solution, after an attempt: regard learn solution {number}")
        )


@learn_app.command("solution")
def solution(number: Number) -> None:
    """Show a solution, after an attempt."""
    from regard.course.exercises import find_exercise, solution_after_attempt

    print(solution_after_attempt(find_exercise(number)), end="")


@learn_app.command("watch")
def watch(
    out: Annotated[Path | None, option("FOLDER", "Write the page there instead, for any file host.")] = None,
    port: Port = 0,
    open_browser: OpenBrowser = None,
) -> None:
    """Watch a small Transformer learn, in the browser: its loss, every head's attention. Press Ctrl-C to stop."""
    from regard.web.watch_page import serve_watch_page, write_watch_page

    if out is not None:
        print(localise(f"{write_watch_page(out)}: the page; any file server shows it, such as python -m http.server"))
    else:
        serve_watch_page(port, open_browser=sys.stderr.isatty() if open_browser is None else open_browser)
