"""The command line: thin. Each command reads its options, calls the room that does the work, and prints the answer.

Commands raise; `main` alone turns what they raise into exit codes (0 ok, 1 failure, 2 usage, 3 bad model file,
4 diverged, 130 Ctrl-C). Progress goes to stderr; with `--json` stdout carries one document and nothing else.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import __version__
from regard.errors import RegardError

app = typer.Typer(
    help="Build a Transformer, train it, see inside it, ship it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure: time and memory against length.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@dataclass
class Common:
    """The options that stand before every command, for `main` to know once a command has failed."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"regard {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="REGARD_DEBUG", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """Build a Transformer, train it, see inside it, ship it."""
    ctx.obj.debug = debug


def progress(line: str) -> None:
    """Say what is going on, where it cannot mix with an answer on stdout."""
    print(line, file=sys.stderr, flush=True)


def emit(document: dict[str, Any]) -> None:
    """The one document that `--json` promises on stdout. NaN and infinity are not JSON, so they fail here."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def _lengths(text: str) -> list[int]:
    """`512,1024` → [512, 1024]."""
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"{text!r} is not a comma-separated list of positive whole numbers", param_hint="--lengths"
        )
    return [int(word) for word in words]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(help="A model directory, of regard or of Hugging Face.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with manifest.json.")] = True,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin where there is no safetensors file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")] = False,
) -> None:
    """What a model directory holds: architecture, parameters, config, files, and whether they are what was written."""
    from regard.io import describe

    description = describe(directory, allow_pickle=allow_pickle, verify=verify)
    if as_json:
        emit(description.document())
    else:
        print(description.table())


@bench.command("attention")
def bench_attention(
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to measure, separated by commas.")
    ] = "512,1024,2048,4096,8192",
    mechanisms: Annotated[
        str | None, typer.Option(help="Mechanisms to measure, separated by commas; all of them unless given.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of one head.")] = 64,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Look only at the past.")] = True,
    backward: Annotated[
        bool, typer.Option("--backward/--forward", help="Measure forward and backward, or forward alone.")
    ] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the table and the PNG.")] = Path(
        "runs/bench-attention"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Time and memory of every attention mechanism against length, with the fitted exponent of each."""
    wanted_lengths = _lengths(lengths)
    from regard.experiments.bench_attention import bench_attention as measure
    from regard.experiments.contenders import choose

    wanted = None if mechanisms is None else _words(mechanisms)
    try:
        choose(wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mechanisms") from None
    if wanted == []:
        raise typer.BadParameter("names no mechanism", param_hint="--mechanisms")

    result = measure(
        lengths=wanted_lengths,
        mechanisms=wanted,
        n_heads=heads,
        d_head=width,
        causal=causal,
        backward=backward,
        out=out,
        progress=progress,
    )
    if as_json:
        emit(result.document())
    else:
        print(result.table())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the only place where exceptions become exit codes."""
    options = Common()
    try:
        app(args=argv, prog_name="regard", obj=options)
    except SystemExit as done:  # typer has already said what was wrong with the usage (2) or that Ctrl-C came (130)
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (RegardError, ValueError, TypeError, OSError) as failure:
        if options.debug:
            traceback.print_exc()
        else:
            # One line whatever the message holds: logs and scripts read it line by line.
            print(f"regard: {' '.join(str(failure).split()) or type(failure).__name__}", file=sys.stderr)
        return failure.exit_code if isinstance(failure, RegardError) else 1
    return 0
