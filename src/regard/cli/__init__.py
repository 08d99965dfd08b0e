"""The command line: thin. Each command reads its options, calls the library, and prints the answer.

Commands raise; `main` alone turns exceptions into exit codes (0 ok, 1 failure, 2 usage, 3 bad model file,
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
    data_command,
    demo_command,
    experiment_commands,
    export_command,
    generation_commands,
    help_examples,
    look_command,
    train_commands,
)
from . import doctor as doctor_command
from .options import GlobalOptions, report_failure

app = typer.Typer(
    help="Build a Transformer, train it, see inside it, ship it.",
    epilog=help_examples.epilog("regard"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command.demo)
app.command("train")(train_commands.train)
app.command("eval")(train_commands.evaluate)
app.command("generate")(generation_commands.generate)
app.command("translate")(generation_commands.translate)
app.command("classify")(generation_commands.classify)
app.command("caption")(generation_commands.caption)
app.command("look")(look_command.look)
app.command("ablate")(experiment_commands.ablate)
app.command("cost")(experiment_commands.cost)
app.command("export")(export_command.export)
app.command("serve")(demo_command.serve)
app.add_typer(data_command.data_app, name="data")
app.command("info")(data_command.info)
app.add_typer(experiment_commands.bench_app, name="bench")
app.command("doctor")(doctor_command.doctor)
help_examples.add_examples(app)  # after the last command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"regard {__version__}")
        raise typer.Exit()


@app.callback()
def set_global_options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="REGARD_DEBUG", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """Build a Transformer, train it, see inside it, ship it."""
    ctx.obj.debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the only place where exceptions become exit codes."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = GlobalOptions(command=["regard", *arguments])
    try:
        app(args=arguments, prog_name="regard", obj=options)
    except SystemExit as end:  # typer has already printed a usage error (2) or seen Ctrl-C (130)
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (RegardError, ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as failure:
        if isinstance(failure, RuntimeError) and type(failure).__name__ != "OutOfMemoryError":
            raise  # unforeseen: mending it needs the traceback
        if options.debug:
            traceback.print_exc()
        else:
            report_failure(failure, options.command)
        return failure.exit_code if isinstance(failure, RegardError) else 1
    return 0
