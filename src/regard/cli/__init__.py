"""The command line, a thin layer: each command reads its options, calls the library, and prints the result.

Commands raise exceptions; only `main` turns them into exit codes (0 ok, 1 failure, 2 usage, 3 bad model file,
4 diverged, 130 Ctrl-C). Progress goes to stderr; with `--json`, stdout carries one document and nothing else.
Heavy imports come after a command has read its options, so that help and usage errors appear at once.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from regard import __version__
from regard.errors import RegardError
from regard.foundation.language import environment_language, localise

from . import (
    data_command,
    demo_command,
    experiment_commands,
    export_command,
    generation_commands,
    learn_command,
    look_command,
    retrieval_commands,
    serve_command,
    terminal,
    train_commands,
)
from . import doctor as doctor_command
from .options import GlobalOptions


def _load_examples() -> dict[str, list[tuple[str, str]]]:
    examples: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for line in Path(__file__).with_name("help_examples.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = examples[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            command, _, what_for = line.partition("  # ")
            rows.append((command, what_for))
    return examples


PLACEHOLDERS = {"int": "N", "float": "X", "str": "NAME", "dir": "DIR"}  # for the value of an option, by its type
EXAMPLES = _load_examples()  # (command line, purpose) by command name; `regard` is the program itself


def epilog(name: str) -> str | None:
    """The examples of a command, formatted for the end of its help; None if it has none."""
    if name not in EXAMPLES:
        return None
    lines = ["[bold]Examples[/bold]"]
    for row in EXAMPLES[name]:
        command, what_for = (text.replace("[", r"\[") for text in row)  # square brackets are markup in help texts
        lines += [f"[dim]# {what_for}[/dim]", command]
    return "\n".join(lines)


class _LocalisedHelp:
    """Help in the reader's language. Values of options have placeholders; flags and arguments show no type."""

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in ("help", "short_help", "epilog", "rich_help_panel"):
            if isinstance(text := options.get(name), str):
                options[name] = "\n\n".join(localise(_paragraph(part)) for part in cleandoc(text).split("\n\n"))
        super().__init__(*args, **options)

    def get_usage(self, ctx: Any) -> str:
        usage: str = super().get_usage(ctx)  # type: ignore[misc]  # defined in typer's class, the next base
        return usage.replace("Usage:", localise("Usage:"), 1)

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # as above
        for param in params:
            kind = (
                str(param.display_type(ctx)) if hasattr(param, "display_type") else ""
            )  # <int range>, from typer 0.25
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # its name says what it is
            elif param.metavar is None:
                is_flag = getattr(param, "is_flag", False)
                param.metavar = "" if is_flag else PLACEHOLDERS.get(kind.strip("<>").removesuffix(" range"))
            for name in ("help", "show_default"):
                if isinstance(text := getattr(param, name, None), str):
                    setattr(param, name, localise(text))
        return params


def _paragraph(text: str) -> str:
    """A paragraph of a docstring on one line, as in the catalog; the lines of examples are kept."""
    return text if text.startswith("[") else " ".join(text.split())


@contextmanager
def localised_typer() -> Iterator[None]:
    """Context in which typer's own messages are in the reader's language."""
    if environment_language() == "en":
        yield
        return
    from rich.text import Text
    from typer import rich_utils

    texts = {name: text for name, text in vars(rich_utils).items() if name.isupper() and isinstance(text, str)}
    report, strip = rich_utils.rich_format_error, Text.rstrip_end

    def report_localised(error: Any) -> None:
        message = localise(error.format_message())
        error.format_message = lambda: message
        report(error)

    def strip_columns(line: Text, size: int) -> None:
        """`Text.rstrip_end` by columns. rich counts characters, but Korean ones take two columns each, so that a line
        that fills its cell would lose its last word to an ellipsis."""
        if (n := min(len(line) - len(line.plain.rstrip()), line.cell_len - size)) > 0:
            line.right_crop(n)

    try:
        setattr(Text, "rstrip_end", strip_columns)  # noqa: B010  # mypy rejects a plain assignment to a method
        localised = {name: localise(text) for name, text in texts.items()}
        vars(rich_utils).update(localised, rich_format_error=report_localised)
        yield
    finally:
        vars(rich_utils).update(texts, rich_format_error=report)
        setattr(Text, "rstrip_end", strip)  # noqa: B010  # as above


class Command(_LocalisedHelp, TyperCommand):
    """A command of the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of the command; for `train --steps 300` the error suggests the field train.steps=300."""
        try:
            return super().parse_args(ctx, args)
        except Exception as failure:
            from regard.config.overrides import field_names

            name = getattr(failure, "option_name", "").lstrip("-").replace("-", "_")
            alike = [f"{field}=…" for field in field_names() if field.partition(".")[2] == name]
            takes_fields = any(param.metavar == "FIELD=VALUE" for param in self.params)
            if alike and takes_fields and hasattr(failure, "possibilities"):
                failure.possibilities = alike
            raise


class CommandGroup(_LocalisedHelp, TyperGroup):
    """The program, or a group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name; `regard learn 2.1` is pointed to `start 2.1`."""
        if self.name == "learn" and re.fullmatch(r"\d+\.\d+", args[0]):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {f'start {args[0]}'!r}?")
        return super().resolve_command(ctx, args)


def finish_commands(app: typer.Typer, path: str = "") -> None:
    """Give every command its class and its examples."""
    for command in app.registered_commands:
        name = f"{path} {command.name}".strip()
        command.cls, command.epilog = Command, epilog(name) or command.epilog
    for group in app.registered_groups:
        group.cls = CommandGroup
        if group.typer_instance is not None:
            finish_commands(group.typer_instance, f"{path} {group.name}".strip())


LEARN, TRAIN, LOOK, SHIP, RESEARCH = "Learn", "Train", "Look", "Ship", "Research"  # the help panels

app = typer.Typer(
    cls=CommandGroup,
    help="Build a Transformer, train it, see inside it, ship it.",
    epilog=epilog("regard"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo", rich_help_panel=LEARN)(demo_command.demo)
app.command("doctor", rich_help_panel=LEARN)(doctor_command.doctor)
app.add_typer(learn_command.learn_app, name="learn", rich_help_panel=LEARN)
app.add_typer(data_command.data_app, name="data", rich_help_panel=TRAIN)
app.command("train", rich_help_panel=TRAIN)(train_commands.train)
app.command("eval", rich_help_panel=TRAIN)(train_commands.evaluate)
app.command("average", rich_help_panel=TRAIN)(train_commands.average)
app.command("distill", rich_help_panel=TRAIN)(train_commands.distill)
app.command("backtranslate", rich_help_panel=TRAIN)(train_commands.backtranslate)
app.command("look", rich_help_panel=LOOK)(look_command.look)
app.command("circuit", rich_help_panel=LOOK)(look_command.circuit)
app.command("serve", rich_help_panel=LOOK)(serve_command.serve)
app.command("lens", rich_help_panel=LOOK)(look_command.lens)
app.command("info", rich_help_panel=LOOK)(data_command.info)
app.command("translate", rich_help_panel=SHIP)(generation_commands.translate)
app.command("generate", rich_help_panel=SHIP)(generation_commands.generate)
app.command("classify", rich_help_panel=SHIP)(generation_commands.classify)
app.command("caption", rich_help_panel=SHIP)(generation_commands.caption)
app.command("embed", rich_help_panel=SHIP)(retrieval_commands.embed)
app.command("index", rich_help_panel=SHIP)(retrieval_commands.index)
app.command("answer", rich_help_panel=SHIP)(retrieval_commands.answer)
app.command("export", rich_help_panel=SHIP)(export_command.export)
app.command("deploy", rich_help_panel=SHIP)(serve_command.deploy)
app.command("ablate", rich_help_panel=RESEARCH)(experiment_commands.ablate)
app.command("cost", rich_help_panel=RESEARCH)(experiment_commands.cost)
app.add_typer(experiment_commands.bench_app, name="bench", rich_help_panel=RESEARCH)
finish_commands(app)  # after the last command


def _print_version(is_set: bool) -> None:
    if is_set:
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


def _is_out_of_memory(failure: Exception) -> bool:
    """torch has an exception of its own for a GPU; for a CPU, as in Rust libraries, only the message tells."""
    has_message = any(words in str(failure) for words in ("can't allocate memory", "Cannot allocate memory"))
    return has_message or isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"


@cache
def build_commands(language: str) -> Any:
    """The commands with their help in this language; cached, because typer takes a while to read every signature."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; the only place where exceptions become exit codes."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = GlobalOptions(command=["regard", *arguments])
    terminal.allow_any_text()
    try:
        with localised_typer():
            build_commands(environment_language())(args=arguments, prog_name="regard", obj=options)
    except SystemExit as end:  # typer has already reported a usage error (2) or Ctrl-C (130)
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (RegardError, ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as failure:
        if isinstance(failure, RuntimeError) and not _is_out_of_memory(failure):
            raise  # a bug, so the traceback is needed
        if options.debug:
            traceback.print_exc()
        elif _is_out_of_memory(failure):
            why = str(failure).partition("\n")[0] or "none is left"
            hint = "a smaller model, a smaller batch or shorter texts need less"
            terminal.report_failure(RegardError(f"there is not enough memory ({why}); {hint}"), options.command)
            return 1
        else:
            terminal.report_failure(failure, options.command)
        return failure.exit_code if isinstance(failure, RegardError) else 1
    return 0


def run() -> NoReturn:
    """The program `regard`: run the command of sys.argv and end the process with its exit code.

    Processes of torchrun skip Python's shutdown, in which gloo's threads, which DDP leaves behind, can abort them.
    """
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        print(end="", flush=True)
        os._exit(code)
    sys.exit(code)
