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
from typing import IO

from .examples import BadData, DataConfig, Report

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
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from None


def read_lines(
    path: Path, report: Report, options: DataConfig, *, ends: bool = False
) -> Iterator[tuple[int, str | None]]:
    """(number from 1, line); None for a line that was noted as bad, so that parallel files stay side by side.

    ``ends`` keeps the end of a line, as one \\n.
    """
    most = 4 * options.max_chars + 8  # a character has at most four bytes
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
            yield number, _line(file, raw, most, path, number, report, options, ends)


def _line(
    file: IO[bytes], raw: bytes, most: int, path: Path, number: int, report: Report, options: DataConfig, ends: bool
) -> str | None:
    size = len(raw)
    while not raw.endswith(b"\n") and size >= most - len(_BOM) and (rest := file.readline(1 << 20)):
        size += len(rest)
        if rest.endswith(b"\n"):
            break
    ended = raw.endswith(b"\n")
    if size == len(raw):
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text = raw.decode("utf-8") if size < most else ""
    except UnicodeDecodeError as error:
        report.bad(path, number, "invalid UTF-8", f"byte 0x{raw[error.start]:02x} at {error.start}")
        return None
    if size >= most or len(text) > options.max_chars:
        what = f"{size:,} bytes" if size >= most else f"{len(text):,} characters"
        report.bad(path, number, "line too long", f"{what}, more than max_chars={options.max_chars}")
        return None
    if "\0" in text:
        report.bad(path, number, "a NUL character", "the file may not be text")
        return None
    if options.normalise != "none" and not unicodedata.is_normalized(options.normalise, text):
        report.n_normalised += 1
        text = unicodedata.normalize(options.normalise, text)
    return text + "\n" if ends and ended else text
