"""`regard train` and `regard eval`: a run from words, a config file or a checkpoint, and how good it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from regard.errors import UsageError
from regard.foundation.language import localise

from . import completion, terminal
from .options import AsJson, Beam, Column, Device, Encoding, Words, argument, flag, option
from .terminal import without_none

Style = Literal["auto", "json", "quiet"]


def train(
    ctx: typer.Context,
    task: Annotated[
        str | None,
        argument("TASK", "translate, lm, mlm, sft, dpo, classify, classify-images, tag or caption.", completion.tasks),
    ] = None,
    words: Words = None,
    preset: Annotated[
        str | None, option(None, "Start from this recipe; --list shows them.", complete=completion.recipes)
    ] = None,
    config: Annotated[
        Path | None, option("FILE", "Read fields from a .yaml, .toml or .json file; words override it.")
    ] = None,
    save_config: Annotated[
        Path | None, option("FILE", "Write every field of the run to this file, then train.")
    ] = None,
    resume: Annotated[
        str | None, option("RUN", "Go on with the run in this directory.", complete=completion.models)
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            "HOW",
            "With --resume: continue the schedule over more train.steps, or restart it with a new warm-up.",
            default="continue",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, flag("--quiet", "Only the answer at the end.")] = False,
    list_recipes: Annotated[bool, flag("--list", "Show tasks, presets and models, and exit.")] = False,
    list_fields: Annotated[
        bool, flag("--fields", "Show every data., model. and train. field with its default, and exit.")
    ] = False,
) -> None:
    """Train a model: regard train translate data=pairs.tsv train.steps=2000 model.n_layers=4.

    Fields are section.field=value words; data=SOURCE is short for data.source=SOURCE, model=NAME takes a model preset.
    `regard train --fields` lists every field, `regard train --list` tasks and presets.
    """
    if list_recipes or list_fields:
        from regard import recipes
        from regard.config import overrides as fields

        if as_json:
            terminal.print_json(recipes.recipes_to_dict() if list_recipes else fields.fields_to_dict())
        else:
            print(localise(recipes.recipes_to_text() if list_recipes else fields.fields_to_text()))
        return
    arguments = [*([] if task is None else [task]), *(words or [])]
    style: Style = "quiet" if quiet else "json" if as_json else "auto"
    if resume is not None:
        options = {"--preset": preset, "--config": config, "--save-config": save_config}
        for name in (name for name, value in options.items() if value is not None):
            raise UsageError(f"--resume goes on with the run's own recipe; {name} cannot change it")
        _resume(resume, arguments, schedule, style, as_json)
        return
    if schedule is not None:
        raise UsageError(f"--schedule {schedule} is for --resume RUN; train.schedule=… chooses that of a new run")
    from regard.recipes import TASKS, run_config

    has_task = bool(arguments) and "=" not in arguments[0]
    if not has_task and preset is None and config is None:
        raise UsageError(f"a task comes first: regard train TASK, one of {', '.join(TASKS)}")
    typed_task, overrides = (arguments[0], arguments[1:]) if has_task else (None, arguments)
    run = run_config(typed_task, overrides, preset=preset, config_file=config)
    if save_config is not None:
        from regard.config.config_file import save_config_file

        save_config_file(save_config, run)
        terminal.progress(f"wrote {save_config}")
    from regard.training.trainer import train as train_run

    _print_once(train_run(run, style=style, command=ctx.obj.command), as_json)


def _resume(run: str, words: list[str], schedule: str | None, style: Style, as_json: bool) -> None:
    from regard.config import DataConfig
    from regard.config.overrides import build_section, parse_overrides
    from regard.config.train_config import RESUMABLE, TrainConfig

    if words and "=" not in words[0]:
        raise UsageError(f"--resume RUN knows its task: leave out {words[0]!r}")
    if schedule not in (None, "restart", "continue"):
        raise UsageError(f"--schedule {schedule} is none of restart, continue")
    given = parse_overrides(words, sections={"train": TrainConfig, "data": DataConfig})
    for section, allowed in {"train": RESUMABLE, "data": ("source", "valid", "images")}.items():
        for field in given.get(section, {}):
            if field not in allowed:
                names = ", ".join(f"{section}.{name}" for name in allowed)
                raise UsageError(f"{section}.{field} cannot change in a resumed run; {names} can")
    overrides: dict[str, Any] = given.get("train", {})
    build_section("train", TrainConfig, overrides)  # refuses values that are wrong in any run
    from regard.training.trainer import resume

    options: dict[str, Any] = {"data": given["data"]} if "data" in given else {}
    options |= {"restart_schedule": True} if schedule == "restart" else {}
    _print_once(resume(run, style=style, **options, **overrides), as_json)


def _print_once(result: Any, as_json: bool) -> None:
    """Of the processes torchrun started, only the first prints."""
    if os.environ.get("RANK", "0") == "0":
        terminal.print_result(result, as_json)


def evaluate(
    path: Annotated[str, argument("RUN_OR_DIR", "A run, RUN@STEP, or a model directory.", completion.models)],
    words: Words = None,
    against: Annotated[
        str | None,
        option("OTHER", "Compare with this run or directory by paired bootstrap.", complete=completion.models),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the output of every example and the worst cases.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Which examples: valid, another set the source holds out, all of those, or train.")
    ] = "valid",
    beam: Annotated[int | None, option(None, "Beam width; as in training unless given.", least=1)] = None,
    length_penalty: Annotated[float | None, option(None, "Length penalty; as in training unless given.")] = None,
    stride: Annotated[int | None, option(None, "Move the window of perplexity by so many tokens.", least=1)] = None,
    comet: Annotated[
        str | None, option("MODEL", "Also COMET by this model, such as Unbabel/wmt22-comet-da; needs unbabel-comet.")
    ] = None,
    limit: Annotated[int | None, option(None, "Only the first so many examples.", least=1)] = None,
    device: Device = "auto",
    precision: Annotated[
        str | None, option(None, "fp32, bf16 or fp16: of the loss's matrix products.", default="fp32")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Metrics on held-out data: the run's own, or data.source=… and other data.* words."""
    from regard.config import DataConfig
    from regard.config.overrides import parse_overrides
    from regard.foundation.device import DEVICES

    data: dict[str, Any] = parse_overrides(words or [], sections={"data": DataConfig}).get("data", {})
    if device not in DEVICES:
        raise UsageError(f"--device {device} is none of {', '.join(DEVICES)}")
    if precision not in (None, "fp32", "bf16", "fp16"):
        raise UsageError(f"--precision {precision} is none of fp32, bf16, fp16")
    from regard.training.evaluation import evaluate as run

    decoding = without_none(beam=beam, length_penalty=length_penalty, stride=stride, limit=limit, precision=precision)
    options = {**without_none(against=against, out=out, comet=comet), **decoding}
    terminal.print_result(run(path, data, split=split, device=device, **options), as_json)


def distill(
    teacher: Annotated[
        str, argument("TEACHER", "A translator: a run, RUN@STEP, or a model directory.", completion.models)
    ],
    out: Annotated[Path, argument("OUT", "The file for the pairs: .tsv or .jsonl.")],
    words: Words = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam width.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Length penalty.")] = 1.0,
    limit: Annotated[int | None, option(None, "Only the first so many sources.", least=1)] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a student's training data: the sources a translator learned from, with its own translations.

    Of the run's own data, or of data.source=… and other data.* words. Held-out pairs go to OUT.valid as they are.
    """
    from regard.config import DataConfig
    from regard.config.overrides import parse_overrides
    from regard.training.distillation import distill as run

    data: dict[str, Any] = parse_overrides(words or [], sections={"data": DataConfig}).get("data", {})
    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "limit": limit, "device": device}
    terminal.print_result(run(teacher, out, data, **options, progress=terminal.progress), as_json)


def backtranslate(
    model: Annotated[
        str,
        argument("MODEL", "A translator of the other direction, which reads what TEXTS holds.", completion.models),
    ],
    texts: Annotated[Path, argument("TEXTS", "Lines of text, or a table.")],
    out: Annotated[Path, argument("OUT", "The file for the pairs: .tsv or .jsonl.")],
    beam: Beam = None,
    sample: Annotated[bool, flag("--sample", "Draw the sources instead of searching for the likeliest.")] = False,
    temperature: Annotated[float | None, option("T", "Draw tokens, the flatter the higher.")] = None,
    top_k: Annotated[int | None, option("K", "Draw among the K likeliest.")] = None,
    top_p: Annotated[float | None, option("P", "Draw among the likeliest that have P.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    tag: Annotated[str | None, option("TEXT", "Put this before every source, such as '<BT>'.")] = None,
    column: Column = None,
    encoding: Encoding = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make pairs of texts in one language: a translator writes the other side, with beam 4 unless it draws.

    The pairs are sources by the model and targets as they are. Train on them beside real ones:
    data.source=pairs.tsv,OUT. A command that was stopped goes on when it is typed again.
    """
    from regard.generation import GenerateConfig

    decoding = without_none(beam=beam, sample=sample or None, temperature=temperature, top_k=top_k, top_p=top_p)
    with terminal.usage_errors(*decoding):
        GenerateConfig(**decoding)
    terminal.check_out(out)
    terminal.read_records(None, texts, column, encoding, stream=False)  # refuses a column that is not there
    from regard.training.back_translation import back_translate as run

    options: dict[str, Any] = {"column": column, "encoding": encoding, "tag": tag, "seed": seed, "device": device}
    terminal.print_result(run(model, texts, out, **options, progress=terminal.progress, **decoding), as_json)


def average(
    paths: Annotated[
        list[str], argument("RUN@STEP… OUT", "Two or more checkpoints, then a new folder.", completion.models)
    ],
    as_json: AsJson = False,
) -> None:
    """Average the weights of several checkpoints into one model: regard average RUN@800 RUN@1000 OUT."""
    *models, out = paths
    if len(models) < 2:
        raise UsageError("regard average takes two or more models and a folder for the result: RUN@800 RUN@1000 OUT")
    from regard.training.averaging import average_models

    average_models(models, out)
    if as_json:
        terminal.print_json({"path": out, "models": models})
    else:
        print(localise(f"{out}: the average of {', '.join(models)}\nnext: regard eval {out} data.source=FILE"))
