"""What the commands that use a model share: where text comes from, which model answers, where answers go."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completing

if TYPE_CHECKING:
    from regard.models import Model

ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model directory or a run.", show_default=False, autocompletion=completing.models
    ),
]
TextFile = Annotated[
    Path | None, typer.Option("--file", metavar="F", help="Read from this file instead.", show_default=False)
]
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
DEVICES = ("auto", "cpu", "cuda", "mps")
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", autocompletion=completing.choices(*DEVICES))]
Beam = Annotated[int | None, typer.Option(min=1, metavar="K", help="Beams followed at a time.", show_default=False)]
LengthPenalty = Annotated[float | None, typer.Option(metavar="A", help="α in log P / length^α.", show_default=False)]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="Most new tokens.", show_default=False)]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut too long a text short; otherwise it is an error.")]


def device_of(name: str) -> str:
    """The device asked for, or the best there is."""
    from regard.errors import UsageError

    if name not in DEVICES:
        raise UsageError(f"--device {name} is none of auto, cpu, cuda, mps")
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not (torch.cuda if name == "cuda" else torch.backends.mps).is_available():
        raise UsageError(f"--device {name}: this machine, or this torch, has none; --device cpu")
    return name


def open_model(path: str | Path, device: str = "auto") -> Model:
    """The model of a directory, on the device asked for or the best there is."""
    device = device_of(device)
    from regard.io import load

    return load(path, device=device)


def text_of(file: Path | None) -> str:
    """All of a file, or of what is piped in; what is no UTF-8 text is refused."""
    from regard.errors import RegardError, UsageError

    if file is None and sys.stdin.isatty():
        raise UsageError("there is nothing to read: give text, --file F, or pipe text in")
    name = "the input" if file is None else str(file)
    try:
        raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise RegardError(f"{name} cannot be read: {error.strerror or error}") from None
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RegardError(f"{name} is not UTF-8 text: byte 0x{raw[error.start]:02x} at {error.start}") from None
    if "\0" in text:
        raise RegardError(f"{name} is not text: it holds a NUL character at {text.index(chr(0))}")
    return text


def lines_of(words: Sequence[str] | None, file: Path | None) -> list[str]:
    """The texts typed, or the lines of a file or of what is piped in, blank ones too."""
    if words:
        _not_both(file)
        return list(words)
    lines = text_of(file).split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)]


def prompt_of(word: str | None, file: Path | None) -> str:
    """The prompt typed, or all of a file or of what is piped in, without the end of its last line."""
    if word is not None:
        _not_both(file)
        return word
    return text_of(file).removesuffix("\n").removesuffix("\r")


def _not_both(file: Path | None) -> None:
    from regard.errors import UsageError

    if file is not None:
        raise UsageError(f"--file {file} and text are both given: one of them is enough")


def check_out(out: Path | None) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    from regard.errors import RegardError

    if out is None:
        return
    if out.is_dir():
        raise RegardError(f"--out {out} is a directory; a file is needed")
    if not out.parent.is_dir():
        raise RegardError(f"--out {out} cannot be written: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise RegardError(f"--out {out} cannot be written: {out.parent} may not be written to")


def need_text(model: Model, inputs: Sequence[str]) -> None:
    """Refuse the name of an image where text is read: it would be taken for a sentence."""
    from regard.errors import UsageError

    for name in inputs if model.config.source == "text" else ():
        if name.lower().endswith(_PICTURES) and Path(name).is_file():
            raise UsageError(f"{name} is an image file, and this model reads text")


def one_line(text: str) -> str:
    """A text as one line: one line in is one line out."""
    return " ".join(text.splitlines())


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}
