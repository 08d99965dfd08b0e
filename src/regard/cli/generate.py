"""`regard generate`: what follows a prompt, or what a model writes about a source."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import AsJson, as_options, emit, progress
from .reading import (
    Beam,
    Device,
    LengthPenalty,
    MaxNewTokens,
    ModelPath,
    TextFile,
    Truncate,
    given,
    lines_of,
    open_model,
    prompt_of,
)

if TYPE_CHECKING:
    from regard.generation import Drafted, Text, Texts
    from regard.models import Model


def generate(
    model: ModelPath,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Or --file, or text piped in.", show_default=False)
    ] = None,
    file: TextFile = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the file or the pipe is a prompt.")] = False,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Fewest new tokens.", show_default=False)
    ] = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Texts for each prompt.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Draw tokens, the flatter the higher.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Draw among the K likeliest.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Draw among the likeliest that have P.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="P", help="Draw among those P times the likeliest.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same texts every time.", show_default=False)] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="R", help="Above 1 makes what was said less likely.", show_default=False)
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="No N tokens in a row come twice.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; more than once.", show_default=False)
    ] = None,
    stop_token: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN", help="End at this token, a word or an id.", show_default=False)
    ] = None,
    bias: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=X", help="Add X to a token's logit; -inf forbids it.", show_default=False),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What every text starts with.", show_default=False)
    ] = None,
    truncate: Truncate = False,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A small model that guesses ahead.", show_default=False)
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens it guesses at a time.")] = 4,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What follows a prompt. The text appears as it is written; with --json, --beam or several prompts at the end."""
    prompts = lines_of(None if prompt is None else [prompt], file) if lines else [prompt_of(prompt, file)]
    options = given(
        **{"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "beam": beam, "n_best": n_best},
        **{"length_penalty": length_penalty, "temperature": temperature, "top_k": top_k, "top_p": top_p},
        **{"min_p": min_p, "seed": seed, "repetition_penalty": repetition_penalty, "prefix": prefix},
        no_repeat_ngram=no_repeat_ngram,
    )
    from regard.generation import GenerateConfig

    with as_options(*options):  # wrong ones are told at once
        GenerateConfig(**{name: value for name, value in options.items() if name != "prefix"})
    opened = open_model(model, device)
    options |= {"truncate": truncate, **_by_token(opened, stop, stop_token, bias)}
    if draft is not None:
        options |= {"draft": open_model(draft, device), "draft_tokens": draft_tokens}
    if len(prompts) == 1 and not as_json and draft is None and (beam or 1) == 1 and (n_best or 1) == 1:
        _stream(opened, prompts[0], options, echo)
        return
    from regard.generation import generate as run

    made = run(opened, prompts, **options)
    if made.drafted is not None and not as_json:
        progress(_worth(made.drafted))
    if as_json:
        emit(document(model, prompts, made))
    else:
        _print(prompts, made, echo)


def _by_token(
    model: Model, stop: list[str] | None, stop_token: list[str] | None, bias: list[str] | None
) -> dict[str, Any]:
    """What names tokens, with the names looked up."""
    from regard.errors import UsageError
    from regard.generation.words import Words

    words, found = Words(model), dict[str, Any]()
    if stop or stop_token:
        found["stop"] = [*(stop or ()), *(words.token(_id_or_word(token)) for token in stop_token or ())]
    biases: dict[int | str, float] = {}
    for typed in bias or ():
        token, _, value = typed.rpartition("=")
        try:
            biases[_id_or_word(token)] = float(value)
        except ValueError:
            raise UsageError(f"--bias {typed!r} is not TOKEN=NUMBER") from None
    return found | ({"logit_bias": biases} if biases else {})


def _id_or_word(token: str) -> int | str:
    return int(token) if token.isdecimal() else token


def _stream(model: Model, prompt: str, options: dict[str, Any], echo: bool) -> None:
    from regard.generation import stream

    pieces = stream(model, prompt, **options)
    first = next(pieces, "")  # what is wrong with the weights is said before anything is printed
    sys.stdout.write(f"{prompt if echo else ''}{first}")
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print(prompts: list[str], made: Texts, echo: bool) -> None:
    for prompt, texts in zip(prompts, made.n_best, strict=True):
        for text in texts:
            score = f"{text.score:.4f}\t" if len(texts) > 1 else ""
            print(f"{score}{prompt if echo else ''}{text.text}")


def _worth(drafted: Drafted) -> str:
    return f"draft: {drafted.accepted:,} of {drafted.proposed:,} guesses were right ({drafted.share:.1%})"


def document(model: str, inputs: list[str], made: Texts) -> dict[str, Any]:
    """Inputs and their texts, for machines."""
    found: dict[str, Any] = {"model": str(model)}
    if made.drafted is not None:
        counts = made.drafted
        found["draft"] = {"proposed": counts.proposed, "accepted": counts.accepted, "share": counts.share}
    found["results"] = [
        {"input": text, **_fields(texts[0]), **({"n_best": [_fields(x) for x in texts]} if len(texts) > 1 else {})}
        for text, texts in zip(inputs, made.n_best, strict=True)
    ]
    return found


def _fields(text: Text) -> dict[str, Any]:
    return {"text": text.text, "score": text.score, "finish": text.finish, "tokens": text.tokens}
