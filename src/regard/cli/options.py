"""How options and arguments are declared, and those that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.foundation.device import DEVICES

from . import completion


def argument(metavar: str, help: str, complete: Any = None) -> Any:
    """An argument without a default to show; ``complete`` offers values at the tab key."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


def option(
    metavar: str | None, help: str, *, least: float | None = None, default: str = "", complete: Any = None
) -> Any:
    """An option that is None unless given; ``default`` says what that means."""
    return typer.Option(metavar=metavar, help=help, min=least, show_default=default or False, autocompletion=complete)


def flag(name: str, help: str) -> Any:
    """``--name``, or ``--name/--no-name`` where it is on unless said otherwise."""
    return typer.Option(name, help=help)


AsJson = Annotated[bool, flag("--json", "Print one JSON document instead of the text.")]
Words = Annotated[
    list[str] | None, argument("WORDS", "Fields as section.field=value: `regard train --fields`.", completion.words)
]
ModelPath = Annotated[str, argument("MODEL", "A model directory or a run.", completion.models)]
TextFile = Annotated[Path | None, option("F", "Read from this file instead.")]
RecordsFile = Annotated[
    Path | None, option("F", "Lines of text, a table (.csv, .tsv, .jsonl, .parquet) or a folder of images.")
]
Column = Annotated[str | None, option("NAME", "Which column of the table to read; two of pairs: A,B.")]
Encoding = Annotated[str, typer.Option(help="Of the file; auto detects UTF-8, UTF-16 and CP949.")]
Out = Annotated[Path | None, option("F", "Write here; a table gets its columns and the new ones. Resumable.")]
Stream = Annotated[bool, flag("--stream", "Answer each line of stdin as it comes.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", autocompletion=completion.choices(*DEVICES))]
ModelEngine = Annotated[
    str, typer.Option(help="Who computes: torch, onnx.", autocompletion=completion.choices("torch", "onnx"))
]
Beam = Annotated[int | None, option("K", "Beams followed at a time.", least=1)]
LengthPenalty = Annotated[float | None, option("A", "α in log P / length^α.")]
NewTokens = Annotated[int | None, option("N", "Most new tokens.", least=1)]
Truncate = Annotated[bool, flag("--truncate", "Cut too long a text short; otherwise it is an error.")]


@dataclass
class GlobalOptions:
    """Options before the command, and the command line itself, which a run records."""

    debug: bool = False
    command: list[str] = field(default_factory=list)
