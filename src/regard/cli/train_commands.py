"""`regard train`, `eval`, `distill`, `backtranslate` and `average`: training runs, their metrics and their data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from regard.errors import UsageError

from . import completion, terminal
from .options import AsJson, Beam, Column, Device, Encoding, ModelPath, Words, argument, flag, option
from .terminal import without_none

Style = Literal["auto", "json", "quiet"]


def train(
    ctx: typer.Context,
    task: Annotated[
        str | None,
        argument(
            "TASK",
            "translate, lm, mlm, electra, sft, dpo, classify, classify-images, tag, caption, contrast, embed "
            "or answer.",
            completion.tasks,
        ),
    ] = None,
    words: Words = None,
    preset: Annotated[
        str | None, option(None, "Start from this recipe; --list shows them.", complete=completion.recipes)
    ] = None,
    config: Annotated[
        Path | None, option("FILE", "Read fields from a .yaml, .toml or .json file; fields typed here override it.")
    ] = None,
    save_config: Annotated[
        Path | None, option("FILE", "Write every field of the run to this file, then train.")
    ] = None,
    resume: Annotated[
        str | None, option("RUN", "Resume the run in this directory.", complete=completion.models)
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
    quiet: Annotated[bool, flag("--quiet", "Print only the final result.")] = False,
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
        from regard.config.overrides import fields_to_dict, fields_to_text
        from regard.recipes import recipes_to_dict, recipes_to_text

        document, text = recipes_to_dict(), recipes_to_text()
        if not list_recipes:
            document, text = fields_to_dict(), fields_to_text()
        terminal.print_either(document, text, as_json)
        return
    arguments = [*([] if task is None else [task]), *(words or [])]
    style: Style = "quiet" if quiet else "json" if as_json else "auto"
    if resume is not None:
        options = {"--preset": preset, "--config": config, "--save-config": save_config}
        for name in (name for name, value in options.items() if value is not None):
            raise UsageError(f"--resume keeps the run's own recipe; {name} cannot change it")
        _resume(resume, arguments, schedule, style, as_json)
        return
    if schedule is not None:
        raise UsageError(f"--schedule {schedule} is for --resume RUN; for a new run, use train.schedule=…")
    from regard.recipes import TASKS, run_config

    has_task = bool(arguments) and "=" not in arguments[0]
    if not has_task and preset is None and config is None:
        raise UsageError(f"name a task first: regard train TASK, one of {', '.join(TASKS)}")
    task, overrides = (arguments[0], arguments[1:]) if has_task else (None, arguments)
    run = run_config(task, overrides, preset=preset, config_file=config)
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
        raise UsageError(f"--schedule {schedule} is not one of restart, continue")
    overrides = parse_overrides(words, sections={"train": TrainConfig, "data": DataConfig})
    for section, allowed in {"train": RESUMABLE, "data": ("source", "valid", "images")}.items():
        for field in overrides.get(section, {}):
            if field not in allowed:
                names = ", ".join(f"{section}.{name}" for name in allowed)
                raise UsageError(f"{section}.{field} cannot change in a resumed run; {names} can")
    train_fields: dict[str, Any] = overrides.get("train", {})
    build_section("train", TrainConfig, train_fields)  # refuses values that are wrong in any run
    from regard.training.trainer import resume

    options: dict[str, Any] = {"data": overrides["data"]} if "data" in overrides else {}
    options |= {"restart_schedule": True} if schedule == "restart" else {}
    _print_once(resume(run, style=style, **options, **train_fields), as_json)


def _print_once(result: Any, as_json: bool) -> None:
    """Print the result in the first of the processes that torchrun started."""
    if os.environ.get("RANK", "0") == "0":
        terminal.print_result(result, as_json)


def evaluate(
    path: ModelPath,
    words: Words = None,
    against: Annotated[
        str | None,
        option("OTHER", "Compare with this run or directory by paired bootstrap.", complete=completion.models),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the output of every example and the worst cases.")
    ] = None,
    split: Annotated[
        str,
        typer.Option(help="Examples: valid, another held-out set of the source, all (every held-out set), or train."),
    ] = "valid",
    beam: Annotated[int | None, option(None, "Beam width; as in training unless given.", least=1)] = None,
    length_penalty: Annotated[float | None, option(None, "Length penalty; as in training unless given.")] = None,
    stride: Annotated[int | None, option(None, "Stride of the perplexity window, in tokens.", least=1)] = None,
    comet: Annotated[
        str | None,
        option("MODEL", "Also compute COMET with this model, such as Unbabel/wmt22-comet-da; needs unbabel-comet."),
    ] = None,
    limit: Annotated[int | None, option(None, "Evaluate at most this many examples.", least=1)] = None,
    device: Device = "auto",
    precision: Annotated[
        str | None, option(None, "Precision of the loss's matrix products: fp32, bf16 or fp16.", default="fp32")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate on held-out data: the run's own, or data.source=… with other data.* fields."""
    from regard.foundation.device import DEVICES

    data = _data_fields(words)
    if device not in DEVICES:
        raise UsageError(f"--device {device} is not one of {', '.join(DEVICES)}")
    if precision not in (None, "fp32", "bf16", "fp16"):
        raise UsageError(f"--precision {precision} is not one of fp32, bf16, fp16")
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
    limit: Annotated[int | None, option(None, "Translate at most this many sources.", least=1)] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a student's training data: the sources a translator learned from, with its own translations.

    The sources are those of the run's data, or of data.source=… with other data.* fields. Held-out pairs are written
    unchanged to a second file: pairs.valid.tsv beside pairs.tsv.
    """
    data = _data_fields(words)
    terminal.check_out(out)
    from regard.training.distillation import distill as run

    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "limit": limit, "device": device}
    terminal.print_result(run(teacher, out, data, **options, progress=terminal.progress), as_json)


def _data_fields(words: list[str] | None) -> dict[str, Any]:
    """The fields of data.* overrides; others are refused."""
    from regard.config import DataConfig
    from regard.config.overrides import parse_overrides

    return parse_overrides(words or [], sections={"data": DataConfig}).get("data", {})


def backtranslate(
    model: Annotated[
        str, argument("MODEL", "A translator in the other direction, from the language of TEXTS.", completion.models)
    ],
    texts: Annotated[Path, argument("TEXTS", "Lines of text, or a table.")],
    out: Annotated[Path, argument("OUT", "The file for the pairs: .tsv or .jsonl.")],
    beam: Beam = None,
    sample: Annotated[bool, flag("--sample", "Sample the sources instead of searching for the likeliest.")] = False,
    temperature: Annotated[float | None, option("T", "Sample tokens; higher values are more random.")] = None,
    top_k: Annotated[int | None, option("K", "Sample among the K likeliest tokens.")] = None,
    top_p: Annotated[float | None, option("P", "Sample among the likeliest tokens of total probability P.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    tag: Annotated[str | None, option("TEXT", "Put this before every source, such as '<BT>'.")] = None,
    column: Column = None,
    encoding: Encoding = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make pairs from texts in one language: a translator generates the other side, with beam 4 unless it samples.

    Each pair is a source from the model and an unchanged target. Train on them together with real pairs:
    data.source=pairs.tsv,OUT. Run the same command again to resume one that was stopped.
    """
    sampling = {"sample": sample or None, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    decoding = terminal.check_generation(beam=beam, **sampling)
    terminal.check_out(out, source=texts)
    terminal.read_records(None, texts, column, encoding, stream=False)  # refuses an unknown column
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
    text = f"{out}: the average of {', '.join(models)}\nnext: regard eval {out} data.source=FILE"
    terminal.print_either({"path": out, "models": models}, text, as_json)
