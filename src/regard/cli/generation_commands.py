"""`regard generate`, `translate`, `classify` and `caption`: what a model writes or decides."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError, UsageError

from . import completion, terminal
from .options import (
    AsJson,
    Beam,
    Device,
    LengthPenalty,
    ModelPath,
    NewTokens,
    TextFile,
    Truncate,
    argument,
    flag,
    option,
)
from .terminal import without_none

if TYPE_CHECKING:
    from regard.models import Model


_SEARCH_OPTIONS = (  # of `regard generate`, called as the fields of a GenerateConfig
    *("max_new_tokens", "min_new_tokens", "beam", "length_penalty", "n_best", "temperature", "top_k", "top_p", "min_p"),
    *("seed", "repetition_penalty", "no_repeat_ngram"),
)


def generate(
    ctx: typer.Context,
    model: ModelPath,
    prompt: Annotated[str | None, argument("PROMPT", "Or --file, or text piped in.")] = None,
    file: TextFile = None,
    lines: Annotated[bool, flag("--lines", "Each line of the file or the pipe is a prompt.")] = False,
    max_new_tokens: NewTokens = None,
    min_new_tokens: Annotated[int | None, option("N", "Fewest new tokens.", least=0)] = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    n_best: Annotated[int | None, option("N", "Texts for each prompt.", least=1)] = None,
    temperature: Annotated[float | None, option("T", "Draw tokens, the flatter the higher.")] = None,
    top_k: Annotated[int | None, option("K", "Draw among the K likeliest.")] = None,
    top_p: Annotated[float | None, option("P", "Draw among the likeliest that have P.")] = None,
    min_p: Annotated[float | None, option("P", "Draw among those P times the likeliest.")] = None,
    seed: Annotated[int | None, option(None, "The same texts every time.")] = None,
    repetition_penalty: Annotated[float | None, option("R", "Above 1 makes what was said less likely.")] = None,
    no_repeat_ngram: Annotated[int | None, option("N", "No N tokens in a row come twice.", least=0)] = None,
    stop: Annotated[list[str] | None, option("TEXT", "End before this text; more than once.")] = None,
    stop_token: Annotated[list[str] | None, option("TOKEN", "End at this token, a word or an id.")] = None,
    bias: Annotated[list[str] | None, option("TOKEN=X", "Add X to a token's logit; -inf forbids it.")] = None,
    prefix: Annotated[str | None, option("TEXT", "What every text starts with.")] = None,
    truncate: Truncate = False,
    draft: Annotated[str | None, option("MODEL", "A small model that guesses ahead.")] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens it guesses at a time.")] = 4,
    echo: Annotated[bool, flag("--echo", "Print the prompt before the text.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What follows a prompt. The text appears as it is written; with --json, --beam or several prompts at the end."""
    typed = None if prompt is None else [prompt]
    prompts = terminal.read_lines(typed, file) if lines else [terminal.read_prompt(prompt, file)]
    options = {name: ctx.params[name] for name in _SEARCH_OPTIONS if ctx.params[name] is not None}
    from regard.generation import GenerateConfig

    with terminal.usage_errors(*options):
        GenerateConfig(**options)
    opened = terminal.open_model(model, device)
    options |= {**without_none(prefix=prefix), "truncate": truncate, **_token_options(opened, stop, stop_token, bias)}
    if draft is not None:
        options |= {"draft": terminal.open_model(draft, device), "draft_tokens": draft_tokens}
    from regard.generation import generate as run
    from regard.generation import stream

    if len(prompts) == 1 and not as_json and draft is None and (beam or 1) == 1 and (n_best or 1) == 1:
        pieces = stream(opened, prompts[0], **options)
        first = next(pieces, "")  # fails before anything is printed
        sys.stdout.write(f"{prompts[0] if echo else ''}{first}")
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    generated = run(opened, prompts, **options)
    if as_json:
        terminal.print_json(_to_dict(model, prompts, generated))
        return
    if (draft_counts := generated.drafted) is not None:
        counts = f"{draft_counts.accepted:,} of {draft_counts.proposed:,} guesses"
        terminal.progress(f"draft: {counts} were right ({draft_counts.share:.1%})")
    for text, candidates in zip(prompts, generated.n_best, strict=True):
        for candidate in candidates:
            score = f"{candidate.score:.4f}\t" if len(candidates) > 1 else ""
            print(f"{score}{text if echo else ''}{candidate.text}")


def _token_options(
    model: Model, stop: list[str] | None, stop_token: list[str] | None, bias: list[str] | None
) -> dict[str, Any]:
    """The options that name tokens, with the names looked up."""
    from regard.generation.text_codec import ModelTokenizers

    tokenizers, options = ModelTokenizers(model), dict[str, Any]()
    if stop or stop_token:
        options["stop"] = [*(stop or ()), *(tokenizers.token_id(_id_or_word(token)) for token in stop_token or ())]
    biases: dict[int | str, float] = {}
    for typed in bias or ():
        token, _, value = typed.rpartition("=")
        try:
            biases[_id_or_word(token)] = float(value)
        except ValueError:
            raise UsageError(f"--bias {typed!r} is not TOKEN=NUMBER") from None
    return options | ({"logit_bias": biases} if biases else {})


def _id_or_word(token: str) -> int | str:
    return int(token) if token.isdecimal() else token


def _to_dict(model: str, inputs: list[str], generated: Any) -> dict[str, Any]:
    """Inputs and their texts for `--json`."""

    def fields(text: Any) -> dict[str, Any]:
        return {"text": text.text, "score": text.score, "finish": text.finish, "tokens": text.tokens}

    document: dict[str, Any] = {"model": str(model)}
    if (counts := generated.drafted) is not None:
        document["draft"] = {"proposed": counts.proposed, "accepted": counts.accepted, "share": counts.share}
    document["results"] = [
        {"input": text, **fields(best[0]), **({"n_best": [fields(x) for x in best]} if len(best) > 1 else {})}
        for text, best in zip(inputs, generated.n_best, strict=True)
    ]
    return document


_ENGINES = ("torch", "onnx", "ctranslate2")
_LINES_AT_ONCE = 512


def translate(
    model: ModelPath,
    texts: Annotated[list[str] | None, argument("TEXT", "Or --file, or lines piped in.")] = None,
    file: TextFile = None,
    beam: Annotated[int, typer.Option(min=1, metavar="K", help="Beams followed at a time.")] = 4,
    length_penalty: LengthPenalty = None,
    max_new_tokens: NewTokens = None,
    truncate: Truncate = False,
    engine: Annotated[
        str, typer.Option(help=f"Who computes: {', '.join(_ENGINES)}.", autocompletion=completion.choices(*_ENGINES))
    ] = "torch",
    out: Annotated[Path | None, option("F", "Write the lines to this file.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Translate texts, or a file line by line; a blank line stays blank."""
    from regard.generation import GenerateConfig

    if engine not in _ENGINES:
        raise UsageError(f"--engine {engine} is none of {', '.join(_ENGINES)}")
    if texts and not all(text.strip() for text in texts):
        raise UsageError("a text to translate is empty")
    options = without_none(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens, truncate=truncate)
    with terminal.usage_errors(*options):  # before a model is opened
        GenerateConfig(**options)
    terminal.check_out(out)
    lines = terminal.read_lines(texts, file)
    is_torch = engine == "torch"
    run = _torch_translator(model, device, options) if is_torch else _engine_translator(model, engine, options)
    run([line for line in lines if line.strip()], True)  # nothing is written where one of them is refused
    translations: list[str] = []
    scores: list[float | None] = []
    stream = not (texts or as_json or out is not None)
    for start in range(0, len(lines), _LINES_AT_ONCE):
        part = lines[start : start + _LINES_AT_ONCE]
        answers = run(filled, False) if (filled := [line for line in part if line.strip()]) else []
        texts_of, scores_of = iter(answers), iter(getattr(answers, "scores", ()))
        translations += [terminal.one_line(next(texts_of)) if line.strip() else "" for line in part]
        scores += [next(scores_of, None) if line.strip() else None for line in part]
        if stream:
            _write_lines(translations[start:])
        if not texts:
            terminal.progress(f"{len(translations):,} of {len(lines):,} lines")
    if out is not None:
        from regard.foundation.files import write_atomic

        write_atomic(out, "".join(f"{line}\n" for line in translations).encode())
    if as_json:
        rows = zip(lines, translations, scores, strict=True)
        results = [{"input": line, "text": text, "score": score} for line, text, score in rows]
        terminal.print_json({"model": model, "engine": engine, "results": results})
    elif out is None and not stream:
        _write_lines(translations)


# Texts to their translations; with True, only a check that all of them can be translated.
Translator = Callable[[list[str], bool], list[str]]


def _torch_translator(path: str, device: str, options: dict[str, Any]) -> Translator:
    from regard.generation import check_texts
    from regard.generation import translate as run
    from regard.generation.text_generation import check_can_translate

    model = terminal.open_model(path, device)
    check_can_translate(model)

    def answer(texts: list[str], only_check: bool) -> list[str]:
        if only_check:
            check_texts(model, texts, options["truncate"])
            return []
        return run(model, texts, **options)

    return answer


def _engine_translator(path: str, name: str, options: dict[str, Any]) -> Translator:
    """An exported model in another runtime, with the beam search of the torch engine where possible."""
    from regard.generation.prompts import source_tensors

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
            source_tensors(rows, None, opened.config, options["truncate"])
        return []

    return answer


def _write_lines(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def classify(
    model: ModelPath,
    inputs: Annotated[list[str] | None, argument("TEXT_OR_IMAGE", "Or --file, or lines piped in.")] = None,
    file: TextFile = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Classes to show, likeliest first.")] = 1,
    truncate: Truncate = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The class of each text, or of each image file: one line for each, the class and its probability."""
    texts = terminal.read_lines(inputs, file)
    from regard.generation import classify as run
    from regard.generation.text_generation import check_can_classify

    opened = terminal.open_model(model, device)
    check_can_classify(opened)
    terminal.refuse_images(opened, texts)
    predictions = run(opened, texts, truncate=truncate) if texts else []
    if as_json:
        results = [
            {"input": text, "label": prediction.label, "probability": prediction.probability, "all": prediction.all}
            for text, prediction in zip(texts, predictions, strict=True)
        ]
        terminal.print_json({"model": model, "results": results})
        return
    for prediction in predictions:
        print("\t".join(f"{label}\t{chance:.4f}" for label, chance in list(prediction.all.items())[:top]))


def caption(
    model: ModelPath,
    images: Annotated[list[str], argument("IMAGE", "Image files.")],
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    max_new_tokens: NewTokens = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """A caption for each image file, one line each; with several, the file's name before it."""
    from regard.generation import GenerateConfig
    from regard.generation import caption as run

    options = without_none(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens)
    with terminal.usage_errors(*options):
        GenerateConfig(**options)
    captions = run(terminal.open_model(model, device), images, **options)
    if as_json:
        terminal.print_json(_to_dict(model, images, captions))
        return
    for image, text in zip(images, captions, strict=True):
        print(f"{image}\t{terminal.one_line(text)}" if len(images) > 1 else terminal.one_line(text))
