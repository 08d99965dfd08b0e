"""`regard train`: a run from words, or one that goes on."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer

from . import completing
from .common import AsJson, Result, Words, emit, show

Style = Literal["auto", "json", "quiet"]
# A resumed run is the same run: its words may only say how far it goes and how often it speaks.
MAY_CHANGE = ("steps", "stop_at", "eval_every", "save_every", "log_every", "samples", "keep", "patience")


def train(
    ctx: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="translate, lm, mlm, classify, classify-images or caption.",
            show_default=False,
            autocompletion=completing.tasks,
        ),
    ] = None,
    words: Words = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from this recipe; --list shows them.", autocompletion=completing.recipes)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with the run in this directory.", autocompletion=completing.models),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the answer at the end.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show tasks, presets and models, and leave.")] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="Show every data., model. and train. field with its default, and leave.")
    ] = False,
) -> None:
    """Train a model: regard train translate data=pairs.tsv train.steps=2000 model.n_layers=4.

    Fields are section.field=value words; data=SOURCE is short for data.source=SOURCE, model=NAME takes a model preset.
    `regard train --fields` lists every field, `regard train --list` tasks and presets.
    """
    if listed or fields:
        _lists(listed, as_json)
        return
    typed = [*([] if task is None else [task]), *(words or [])]
    style: Style = "quiet" if quiet else "json" if as_json else "auto"
    if resume is not None:
        _resume(resume, typed, preset, style, as_json)
        return
    from regard.errors import UsageError
    from regard.recipes import TASKS, recipe, run_config

    if preset is not None and (not typed or "=" in typed[0]):
        typed.insert(0, recipe(preset)["task"])
    if not typed or "=" in typed[0]:
        raise UsageError(f"a task comes first: regard train TASK, one of {', '.join(TASKS)}")
    config = run_config(typed[0], typed[1:], preset=preset)
    from regard.training.trainer import train as run

    _show_once(run(config, style=style, command=ctx.obj.command), as_json)


def _resume(run: str, words: list[str], preset: str | None, style: Style, as_json: bool) -> None:
    from regard.config.overrides import SECTIONS, check_section, parse_overrides
    from regard.errors import UsageError

    if preset is not None:
        raise UsageError("--resume goes on with the run's own recipe; --preset cannot change it")
    if words and "=" not in words[0]:
        raise UsageError(f"--resume RUN knows its task: leave out {words[0]!r}")
    overrides: dict[str, Any] = parse_overrides(words, sections={"train": SECTIONS["train"]}).get("train", {})
    for field in overrides:
        if field not in MAY_CHANGE:
            allowed = ", ".join(f"train.{name}" for name in MAY_CHANGE)
            raise UsageError(f"train.{field} cannot change in a resumed run; {allowed} can")
    check_section("train", overrides)
    from regard.training.trainer import resume

    _show_once(resume(run, style=style, **overrides), as_json)


def _show_once(result: Result, as_json: bool) -> None:
    """Of the processes torchrun started, the first one answers for all."""
    if os.environ.get("RANK", "0") == "0":
        show(result, as_json)


def _lists(recipes: bool, as_json: bool) -> None:
    from regard.config.overrides import fields_to_dict, fields_to_text
    from regard.recipes import recipes_to_dict, recipes_to_text

    if as_json:
        emit(recipes_to_dict() if recipes else fields_to_dict())
    else:
        print(recipes_to_text() if recipes else fields_to_text())
