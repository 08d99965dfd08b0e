"""Input and output of commands: models, texts, results and failures."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.errors import RegardError, UsageError
from regard.foundation.language import localise

from . import advice
from .options import DTYPES

if TYPE_CHECKING:
    from regard.data.record_files import Records
    from regard.models import Model


def allow_any_text() -> None:
    """Print characters outside the terminal's encoding as \\uXXXX, so that ASCII or cp1252 does not stop a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def print_result(result: Any, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    else:
        print(localise(result.to_text(), errors=False))


def print_either(document: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the document of ``--json``, or else the text."""
    if as_json:
        print_json(document)
    else:
        print(localise(text))


def print_json(document: dict[str, Any]) -> None:
    """Print the single document of `--json`. NaN and infinity are not JSON and raise ValueError."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(document, ensure_ascii=not is_unicode, indent=2, allow_nan=False))


def progress(line: str) -> None:
    """Print a line to stderr, so that it does not mix with the result."""
    print(localise(line), file=sys.stderr, flush=True)


def report_failure(failure: Exception, command: Sequence[str] = ()) -> None:
    """Print a failure as a single line on stderr, for logs and scripts; each bad line of data gets another."""
    lines, message = [str(line) for line in getattr(failure, "lines", ())], str(failure)
    if isinstance(failure, OSError) and failure.filename is not None and failure.strerror:
        # Replace the temporary name of a file being written by its final name.
        name = re.sub(r"/\.([^/]+?)\.[a-z0-9_]{8}(\.saving)?(?=/|$)", r"/\1", str(failure.filename))
        message = f"{name} cannot be read or written: {failure.strerror}"
    message = advice.in_command_line_terms(message.split("\n", 1)[0] if lines else message)
    text = localise(" ".join(message.split()) or type(failure).__name__)
    hint = advice.advise(command, failure)
    hint = "" if hint in message else localise(hint)  # the message of another process ends with its own hint
    progress(f"regard: {text.removesuffix('.') if hint else text}{hint}")
    for line in lines:
        progress(" ".join(line.split()))
    if (n_hidden := getattr(failure, "n_bad", 0) - len(lines)) > 0:
        progress(f"… and {n_hidden:,} more")


@contextmanager
def usage_errors(*names: str) -> Iterator[None]:
    """Context that turns ValueErrors of the library into usage errors; ``beam=`` becomes ``--beam`` if it is named."""
    try:
        yield
    except ValueError as failure:
        message = str(failure)
        for name in names:
            message = re.sub(rf"\b{name}=", f"--{name.replace('_', '-')} ", message)
        raise UsageError(message) from None


def check_generation(**options: Any) -> dict[str, Any]:
    """The options of a search that are not None; UsageError before a model is opened if their values are invalid."""
    from regard.generation import GenerateConfig

    options = without_none(**options)
    with usage_errors(*options):
        GenerateConfig(**options)
    return options


def device_name(name: str) -> str:
    """The name of a device after resolving ``auto`` to the best one available."""
    if name == "cpu":
        return name
    from regard.foundation.device import resolve_device

    with usage_errors("device"):
        return str(resolve_device(name))


def open_model(path: str | Path, device: str = "auto", engine: str = "torch", dtype: str | None = None) -> Model:
    """The model at a path, run by torch or by ONNX Runtime."""
    device = device_name(device)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if dtype is not None and engine != "torch":
        raise UsageError(f"--dtype {dtype} is for --engine torch; the precision of an export is fixed")
    if engine == "onnx":
        check_export(path, "onnx")
        from regard.export.engines import OnnxEngine, open_engine

        return cast("OnnxEngine", open_engine(path, "onnx")).model
    if engine != "torch":
        raise UsageError(f"--engine {engine} is not one of torch, onnx")
    from regard.io import load

    return load(path, device=device, dtype=dtype)


def check_export(path: str | Path, engine: str) -> None:
    """Raise an error for a run, which only the torch engine can read."""
    if (Path(path) / "run.json").is_file():
        raise RegardError(f"{path} is a run, not an export; regard export {path} {engine} shipped makes one")


def read_text(file: Path | None, encoding: str = "utf-8") -> str:
    """The contents of a file, or of stdin, which is UTF-8; anything but text is refused."""
    if file is None and sys.stdin.isatty():
        raise UsageError("there is nothing to read: give text, --file F, or pipe text in")
    if file is None:
        return decode_text(sys.stdin.buffer.read(), "the input")
    from regard.foundation.files import read_input

    return decode_text(read_input(file), str(file), encoding)


def decode_text(raw: bytes, name: str, encoding: str = "utf-8", *, is_start: bool = True) -> str:
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf" if is_start else b"").decode(encoding)
    except UnicodeDecodeError as error:
        place = f"byte 0x{raw[error.start]:02x} at {error.start}"
        raise RegardError(f"{name} is not {encoding.upper()} text: {place}") from None
    if "\0" in text:
        raise RegardError(f"{name} is not text: it contains a NUL character at {text.index(chr(0))}")
    return text


def read_records(
    texts: Sequence[str] | None,
    file: Path | None,
    column: str | None,
    encoding: str,
    *,
    stream: bool,
    images: bool = False,
) -> Records | None:
    """The given texts or images, else the records of a file or the lines of stdin, including blank lines.

    None with ``stream``, as lines are then answered one by one.
    """
    from regard.data.record_files import open_records, text_records

    if stream:
        if texts or file is not None:
            raise UsageError("--stream answers the lines of stdin: leave out the texts and --file")
        return None
    if file is None:
        _refuse_column(column)
    if texts:
        _refuse_file(file)
        if images and len(texts) == 1 and Path(texts[0]).is_dir():
            return open_records(Path(texts[0]), images=True)
        if images:
            folders = {name: open_records(Path(name), images=True) for name in texts if Path(name).is_dir()}
            names = [[x.text for x in folders[name].read()] if name in folders else [name] for name in texts]
            return text_records([name for part in names for name in part])
        return text_records(texts)
    if file is not None:
        with usage_errors("column", "encoding"):
            return open_records(file, column, images=images, encoding=encoding)
    lines = read_text(None).split("\n")
    return text_records([line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)], "stdin")


def stdin_lines() -> Iterator[str]:
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        text = decode_text(raw, f"line {number} of the input", is_start=number == 1)
        yield text.removesuffix("\n").removesuffix("\r")


def read_prompt(prompt: str | None, file: Path | None, column: str | None, encoding: str) -> str:
    """The given prompt, else the contents of a text file or of stdin without the last line break."""
    _refuse_column(column)
    if prompt is not None:
        _refuse_file(file)
        return prompt
    if file is not None:
        from regard.config import DataConfig
        from regard.data.table_files import detect_encoding

        with usage_errors("encoding"):
            encoding = DataConfig(encoding=encoding).encoding
        encoding = detect_encoding(file) if encoding == "auto" else encoding
    return read_text(file, encoding).removesuffix("\n").removesuffix("\r")


def _refuse_column(column: str | None) -> None:
    if column is not None:
        raise UsageError(f"--column {column} needs a table: name it with --file F")


def _refuse_file(file: Path | None) -> None:
    if file is not None:
        raise UsageError(f"--file {file} and text are both given: one of them is enough")


def check_out(out: Path | None, suffixes: Sequence[str] = (), *, source: Path | None = None) -> None:
    """Raise an error for a file that cannot be written, has another suffix, or is ``source``, before any work is done.

    Answers that replace the file they are made from would lose its texts.
    """
    if out is None:
        return
    if suffixes and out.suffix.lower() not in suffixes:
        raise UsageError(f"--out {out} ends in {out.suffix or 'nothing'}; it may end in {', '.join(suffixes)}")
    if source is not None and out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"--out {out} is the file to read, which would be lost; choose another")
    if out.suffix == ".gz":
        raise UsageError(f"--out {out}: output is not compressed; leave out .gz")
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; a file is needed")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out} cannot be written: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise RegardError(f"--out {out} cannot be written: {out.parent} is not writable")


def check_inputs(model: Model, inputs: Sequence[str]) -> None:
    """Refuse a missing file for a model that reads images, and an image file for a model that reads text, which would
    take its name for a sentence."""
    from regard.data.source_files import IMAGE_SUFFIXES

    for name in inputs:
        if model.config.source == "image" and not os.path.exists(name):
            raise UsageError(f"{name}: no such file")
        if model.config.source == "text" and name.lower().endswith(IMAGE_SUFFIXES) and Path(name).is_file():
            raise UsageError(f"{name} is an image file, and this model reads text")


def one_line(text: str) -> str:
    return " ".join(text.splitlines())


def without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def split_commas(text: str) -> list[str]:
    """`a, b` → [a, b]."""
    return [word.strip() for word in text.split(",") if word.strip()]
