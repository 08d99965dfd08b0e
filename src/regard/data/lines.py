"""Lines of a text file, one at a time: no line, however long or broken, takes the reader down or goes unsaid.

UTF-8, with or without a byte order mark; lines end in \\n or \\r\\n; .gz is unpacked while reading; memory is one line.
"""

from __future__ import annotations

import gzip
import unicodedata
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, cast

from ..config import DataConfig
from ..errors import BadData
from .examples import Report

__all__ = ["open_bytes", "read_lines", "stem_of", "suffix_of"]

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"


def suffix_of(path: Path) -> str:
    """``.tsv`` of pairs.tsv and of pairs.tsv.gz."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def stem_of(path: Path) -> str:
    """``train`` of train.tsv and of train.tsv.gz."""
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where it is .gz; what cannot be read is a BadData."""
    try:
        with cast(IO[bytes], gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from None


def read_lines(
    path: Path, report: Report, options: DataConfig, *, ends: bool = False, max_chars: int | None = None
) -> Iterator[tuple[int, str | None]]:
    """(number from 1, line); None for a line that was noted as bad, so that parallel files stay side by side.

    ``ends`` keeps the end of a line, as one \\n; ``max_chars`` stands in for that of the options.
    """
    max_chars = max_chars or options.max_chars
    most = 4 * max_chars + 8  # a character has at most four bytes
    with open_bytes(path) as file:
        for number in count(1):
            raw = file.readline(most)
            if not raw:
                return
            report.n_read += 1
            if number == 1:
                if raw.startswith(_UTF16):
                    raise BadData(f"{path} is UTF-16; UTF-8 is needed")
                raw = raw.removeprefix(_BOM)
            ended = raw.endswith(b"\n")
            size = len(raw) if ended or len(raw) < most - len(_BOM) else len(raw) + _rest_of_line(file)
            line = _checked(raw, size, max_chars, path, number, report, options.normalise)
            yield number, line + "\n" if ends and ended and line is not None else line


def _rest_of_line(file: IO[bytes]) -> int:
    """How much more there is of a line, read past without being held."""
    size = 0
    while rest := file.readline(1 << 20):
        size += len(rest)
        if rest.endswith(b"\n"):
            break
    return size


def _checked(
    raw: bytes, size: int, max_chars: int, path: Path, number: int, report: Report, normalise: str
) -> str | None:
    """The text of a line of ``size`` bytes, of which ``raw`` are the first; None, and a note, where it is no good."""
    if size > len(raw):
        report.bad(path, number, "line too long", f"{size:,} bytes, more than max_chars={max_chars}")
        return None
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        report.bad(path, number, "invalid UTF-8", f"byte 0x{raw[error.start]:02x} at {error.start}")
        return None
    if len(text) > max_chars:
        report.bad(path, number, "line too long", f"{len(text):,} characters, more than max_chars={max_chars}")
        return None
    if "\0" in text:
        report.bad(path, number, "a NUL character", "the file may not be text")
        return None
    if normalise == "NFC" and not unicodedata.is_normalized("NFC", text):
        report.n_normalised += 1
        text = unicodedata.normalize("NFC", text)
    return text
