"""The command line: thin. Each command reads its options, calls the room that does the work, and prints the answer.

Commands raise; `main` alone turns what they raise into exit codes (0 ok, 1 failure, 2 usage, 3 bad model file,
4 diverged, 130 Ctrl-C). Progress goes to stderr; with `--json` stdout carries one document and nothing else.
Nothing heavy is imported before a command has read its options: help and usage errors come at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from regard import __version__
from regard.errors import RegardError

from . import (
    ablate,
    bench,
    caption,
    classify,
    cost,
    data,
    demo,
    doctor,
    evaluate,
    examples,
    export,
    generate,
    info,
    look,
    serve,
    train,
    translate,
)
from .common import Common, complain

app = typer.Typer(
    help="Build a Transformer, train it, see inside it, ship it.",
    epilog=examples.epilog("regard"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("translate")(translate.translate)
app.command("classify")(classify.classify)
app.command("caption")(caption.caption)
app.command("look")(look.look)
app.command("ablate")(ablate.ablate)
app.command("cost")(cost.cost)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.add_typer(data.app, name="data")
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)
examples.add_to(app)  # after the last of them


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the only place where exceptions become exit codes."""
    typed = sys.argv[1:] if argv is None else list(argv)
    options = Common(command=["regard", *typed])
    try:
        app(args=typed, prog_name="regard", obj=options)
    except SystemExit as done:  # typer has already said what was wrong with the usage (2) or that Ctrl-C came (130)
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (RegardError, ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as failure:
        if isinstance(failure, RuntimeError) and type(failure).__name__ != "OutOfMemoryError":
            raise  # nobody foresaw it: whoever mends it needs the traceback
        if options.debug:
            traceback.print_exc()
        else:
            complain(failure, options.command)
        return failure.exit_code if isinstance(failure, RegardError) else 1
    return 0
