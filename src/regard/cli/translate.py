"""`regard translate`: one line in, one line out, by any of three engines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import completing
from .common import AsJson, as_options, emit, progress
from .reading import (
    Device,
    LengthPenalty,
    MaxNewTokens,
    ModelPath,
    TextFile,
    Truncate,
    check_out,
    given,
    lines_of,
    one_line,
    open_model,
)

_ENGINES = ("torch", "onnx", "ctranslate2")
_LINES_AT_ONCE = 512


def translate(
    model: ModelPath,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Or --file, or lines piped in.", show_default=False)
    ] = None,
    file: TextFile = None,
    beam: Annotated[int, typer.Option(min=1, metavar="K", help="Beams followed at a time.")] = 4,
    length_penalty: LengthPenalty = None,
    max_new_tokens: MaxNewTokens = None,
    truncate: Truncate = False,
    engine: Annotated[
        str, typer.Option(help=f"Who computes: {', '.join(_ENGINES)}.", autocompletion=completing.choices(*_ENGINES))
    ] = "torch",
    out: Annotated[
        Path | None, typer.Option(metavar="F", help="Write the lines to this file.", show_default=False)
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Translate texts, or a file line by line; a blank line stays blank."""
    from regard.errors import UsageError
    from regard.generation import GenerateConfig

    if engine not in _ENGINES:
        raise UsageError(f"--engine {engine} is none of {', '.join(_ENGINES)}")
    if texts and not all(text.strip() for text in texts):
        raise UsageError("a text to translate is empty")
    options = given(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens, truncate=truncate)
    with as_options(*options):  # wrong ones are told before a model is opened
        GenerateConfig(**options)
    check_out(out)
    lines = lines_of(texts, file)
    run = _torch(model, device, options) if engine == "torch" else _engine(model, engine, options)
    run([line for line in lines if line.strip()], True)  # nothing is written where one of them is refused
    made: list[str] = []
    scores: list[float | None] = []
    stream = not (texts or as_json or out is not None)
    for start in range(0, len(lines), _LINES_AT_ONCE):
        part = lines[start : start + _LINES_AT_ONCE]
        answers = run(asked, False) if (asked := [line for line in part if line.strip()]) else []
        texts_of, scores_of = iter(answers), iter(getattr(answers, "scores", ()))
        made += [one_line(next(texts_of)) if line.strip() else "" for line in part]
        scores += [next(scores_of, None) if line.strip() else None for line in part]
        if stream:
            _write(made[start:])
        if not texts:
            progress(f"{len(made):,} of {len(lines):,} lines")
    if out is not None:
        from regard.foundation.files import write_atomic

        write_atomic(out, "".join(f"{line}\n" for line in made).encode())
    if as_json:
        rows = zip(lines, made, scores, strict=True)
        results = [{"input": line, "text": text, "score": score} for line, text, score in rows]
        emit({"model": model, "engine": engine, "results": results})
    elif out is None and not stream:
        _write(made)


Run = Callable[[list[str], bool], list[str]]
"""Texts to their translations; or only a look whether all of them can be translated."""


def _torch(path: str, device: str, options: dict[str, Any]) -> Run:
    from regard.generation import check_texts
    from regard.generation import translate as run
    from regard.generation.texts import check_translates

    model = open_model(path, device)
    check_translates(model)

    def answer(texts: list[str], only_check: bool) -> list[str]:
        if only_check:
            check_texts(model, texts, options["truncate"])
            return []
        return run(model, texts, **options)

    return answer


def _engine(path: str, name: str, options: dict[str, Any]) -> Run:
    """An exported model by another runtime, searched as the torch engine searches where it can be."""
    from regard.errors import RegardError
    from regard.generation.prompts import sources_of

    if (Path(path) / "run.json").is_file():
        raise RegardError(f"{path} is a run, not an export; regard export {path} {name} shipped makes one")
    try:
        opened = importlib.import_module("regard.export.engines").open_engine(path, name)
    except ImportError as error:
        needed = f"--engine {name} needs {error.name or error}, which is not installed"
        raise RegardError(f'{needed}: pip install "regard[export]"') from None

    def answer(texts: list[str], only_check: bool) -> list[str]:
        if not only_check:
            return opened.translate(texts, **options, early_stopping=False)
        if texts:
            rows = [opened.tokenizer("source").encode(text) for text in texts]
            sources_of(rows, None, opened.config, options["truncate"])
        return []

    return answer


def _write(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
