"""Helpers that declare options and arguments, and the options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.foundation.device import DEVICES

from . import completion

PORT = 8017  # the default port of the explorer and the API


def argument(metavar: str, help: str, complete: Any = None) -> Any:
    """An argument without a default in its help; ``complete`` offers completions."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


def option(
    metavar: str | None, help: str, *, least: float | None = None, default: str = "", complete: Any = None
) -> Any:
    """An option whose default is None; ``default`` is shown in its place in the help."""
    return typer.Option(metavar=metavar, help=help, min=least, show_default=default or False, autocompletion=complete)


def flag(name: str, help: str) -> Any:
    """A flag ``--name``, or ``--name/--no-name`` if it is on by default."""
    return typer.Option(name, help=help)


def engine_option(help: str, *names: str) -> Any:
    """The option --engine with the engines that a command can use."""
    return typer.Option(help=f"{help}: {', '.join(names)}.", autocompletion=completion.choices(*names))


AsJson = Annotated[bool, flag("--json", "Print one JSON document instead of the text.")]
Words = Annotated[
    list[str] | None,
    argument("FIELD=VALUE", "Fields to set, as section.field=value; see `regard train --fields`.", completion.words),
]
ModelPath = Annotated[str, argument("MODEL", "A run, RUN@STEP, or a model directory.", completion.models)]
RecordsFile = Annotated[
    Path | None, option("FILE", "Lines of text, a table (.csv, .tsv, .jsonl, .parquet) or a folder of images.")
]
Column = Annotated[str | None, option("NAME", "The column of the table to read; for pairs, two: A,B.")]
Encoding = Annotated[str, typer.Option(help="Encoding of the file; auto detects UTF-8, UTF-16 and CP949.")]
Out = Annotated[
    Path | None,
    option("F", "Write to this .csv, .tsv, .jsonl, .parquet or .txt; a table keeps its columns. Resumable."),
]
On = Annotated[str, typer.Option(metavar="PLACE", help="local, ray (this machine's cluster) or ray://HOST:PORT.")]
Jobs = Annotated[
    int | None, option("N", "Number of processes that answer a file.", least=1, default="1; on Ray one per core")
]
Stream = Annotated[bool, flag("--stream", "Answer each line of stdin as it arrives.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", autocompletion=completion.choices(*DEVICES))]
DTYPES = ("float32", "bfloat16", "float16")
Dtype = Annotated[
    str | None,
    option(
        "TYPE", f"Type of the weights: {', '.join(DTYPES)}; default: as stored.", complete=completion.choices(*DTYPES)
    ),
]
ModelEngine = Annotated[str, engine_option("Engine that runs the model", "torch", "onnx")]
Beam = Annotated[int | None, option("K", "Beam width; 1 is greedy.", least=1)]
LengthPenalty = Annotated[float | None, option("A", "Length penalty: α in log P / length^α.")]
NewTokens = Annotated[int | None, option("N", "Maximum number of new tokens.", least=1)]
Truncate = Annotated[bool, flag("--truncate", "Truncate texts that are too long, instead of failing.")]


@dataclass
class GlobalOptions:
    """The options before the command, and the command line itself, which a run records."""

    debug: bool = False
    command: list[str] = field(default_factory=list)
