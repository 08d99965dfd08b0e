"""Readers of text files: one for each way examples are written down, each a stream of rows with their line numbers.

Tables (TSV, CSV, JSONL) give the chosen columns; parallel files a line of each; captions come as JSON or as a table.
UTF-8, UTF-16 or CP949, told by a byte order mark or by the content; lines end in \\n or \\r\\n; .gz is unpacked while
reading; memory is one line.
No line, however long or broken, stops the reader: it is recorded in the report.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any, cast

from ..config import DataConfig, Kind
from ..errors import BadData
from ..foundation.progress import track
from ..text.chat import read_messages
from .examples import ReadReport

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_MAX_JSON_BYTES = 1 << 30
_SAMPLE_BYTES = 1 << 20  # of which the encoding is told
_BINARY = {  # how files begin that are often given by mistake
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive or an Office document",
    b"\x1f\x8b": "gzip, which must be named .gz",
    b"PAR1": "a Parquet table",
}
_LISTS_LAST = ("labelled", "captions", "images")  # kinds whose last column may hold several texts
_HANGUL = range(0xAC00, 0xD7A4)


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


def detect_encoding(path: Path) -> str:
    """``utf-8``, ``utf-16`` by its byte order mark, or ``cp949``: no UTF-8, and mostly Hangul when read as CP949.

    What is none of these is called UTF-8, so that its bad lines are named one by one.
    """
    with open_bytes(path) as file:
        raw = file.read(_SAMPLE_BYTES)
    if raw.startswith(_UTF16_BOMS):
        return "utf-16"
    decoder, whole = codecs.getincrementaldecoder, len(raw) < _SAMPLE_BYTES
    try:
        decoder("utf-8")().decode(raw, whole)
    except UnicodeDecodeError:
        try:
            letters = [letter for letter in decoder("cp949")().decode(raw, whole) if not letter.isascii()]
        except UnicodeDecodeError:
            return "utf-8"
        return "cp949" if sum(ord(letter) in _HANGUL for letter in letters) > 0.8 * len(letters) else "utf-8"
    return "utf-8"


class _Utf8Lines:
    """A file of another encoding, line by line as UTF-8."""

    def __init__(self, file: IO[bytes], path: Path, encoding: str) -> None:
        self.text = io.TextIOWrapper(file, encoding=encoding, newline="\n")
        self.path, self.encoding = path, encoding

    def readline(self, size: int) -> bytes:
        try:
            return self.text.readline(size).encode("utf-8", "surrogatepass")
        except UnicodeError as error:
            raise BadData(
                f"{self.path} is not {self.encoding.upper()} text: {error}; encoding=… names another"
            ) from None


@contextmanager
def open_utf8(path: Path, encoding: str, report: ReadReport | None = None) -> Iterator[IO[bytes] | _Utf8Lines]:
    """The lines of a file as UTF-8; ``auto`` detects its encoding, which the report notes where it is another."""
    with open_bytes(path) as file:
        raw = file.read(8)
    if (kind := next((kind for magic, kind in _BINARY.items() if raw.startswith(magic)), None)) is not None:
        raise BadData(f"{path} is {kind}, not a text file")
    encoding = detect_encoding(path) if encoding == "auto" else encoding
    with open_bytes(path) as file:
        if encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig"):
            yield file
            return
        if report is not None:
            report.encodings[str(path)] = encoding
        yield _Utf8Lines(file, path, encoding)


def read_lines(
    path: Path, report: ReadReport, options: DataConfig, *, ends: bool = False, max_chars: int | None = None
) -> Iterator[tuple[int, str | None]]:
    """(number from 1, line); None for a line recorded as bad, so that parallel files stay side by side.

    ``ends`` keeps the end of a line, as one \\n; ``max_chars`` overrides that of the options.
    """
    max_chars = max_chars or options.max_chars
    max_bytes = 4 * max_chars + 8  # a character has at most four bytes
    with open_utf8(path, options.encoding, report) as file:
        lines = iter(lambda: file.readline(max_bytes), b"")
        for number, raw in enumerate(track(lines, f"reading {path.name}", path.stat().st_size, len), start=1):
            report.n_read += 1
            raw = raw.removeprefix(_BOM) if number == 1 else raw
            size, ended, rest = len(raw), raw.endswith(b"\n"), raw
            while rest and not rest.endswith(b"\n") and size >= max_bytes - len(_BOM):
                rest = file.readline(1 << 20)  # of a line too long to hold
                size += len(rest)
            line = _decode_line(raw, size, max_chars, path, number, report, options.normalise)
            yield number, line + "\n" if ends and ended and line is not None else line


def _decode_line(
    raw: bytes, size: int, max_chars: int, path: Path, number: int, report: ReadReport, normalise: str
) -> str | None:
    """The text of a line of ``size`` bytes, of which ``raw`` are the first; None where it is recorded as bad."""
    text, fault = "", None
    content = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        fault = "invalid UTF-8", f"byte 0x{content[error.start]:02x} at {error.start}"
    if size > len(raw) or len(text) > max_chars:
        length = f"{size:,} bytes" if size > len(raw) else f"{len(text):,} characters"
        fault = "line too long", f"{length}, more than max_chars={max_chars}"
    elif "\0" in text:
        fault = "a NUL character", "the file may not be text"
    if fault is not None:
        report.add_bad(path, number, *fault)
        return None
    if normalise == "NFC" and not unicodedata.is_normalized("NFC", text):
        report.n_normalised += 1
        text = unicodedata.normalize("NFC", text)
    return text


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of the chosen columns, with their file and line."""

    file: Path
    line: int
    cells: tuple[Any, ...]


@dataclass(frozen=True)
class Schema:
    """Which columns of a table to take and what they are."""

    kind: Kind
    columns: tuple[str | int, ...]
    header: bool = False
    width: int | None = None  # columns that every line must have; None: enough for the chosen ones
    names: tuple[str, ...] = ()  # of all columns, where the table has a header that says nothing about the kind
    guessed: bool = False  # whether the kind was told from the content alone


def read_table(path: Path, form: str, schema: Schema, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """The chosen columns of a TSV or CSV file."""
    records = table_records(path, form, report, options)
    indices, width = [column for column in schema.columns if isinstance(column, int)], schema.width
    if schema.header:
        names = [name.strip() for name in next(records, (0, None))[1] or []]
        report.n_read -= 1
        for column in schema.columns:
            if column >= len(names) if isinstance(column, int) else column not in names:
                raise ValueError(f"columns has {column!r}, but {path} has the columns {', '.join(names)}")
        indices, width = [x if isinstance(x, int) else names.index(x) for x in schema.columns], len(names)
    elif len(indices) < len(schema.columns):
        raise ValueError(f"columns={schema.columns} has a name, but {path} has no header line (header=False)")
    for number, cells in records:
        if cells is None:
            continue
        if (width is not None and len(cells) != width) or len(cells) <= max(indices):
            need = max(indices) + 1 if width is None else width
            report.add_bad(path, number, "wrong column count", f"{len(cells)} instead of {need}")
            continue
        yield Row(path, number, tuple(cells[index].strip() for index in indices))


def table_records(
    path: Path, form: str, report: ReadReport, options: DataConfig
) -> Iterator[tuple[int, list[str] | None]]:
    """All cells of each record and its line number; None for one recorded as bad.

    TSV has tabs between cells, and nothing is quoted or escaped. CSV has commas, or semicolons where the first line has
    more of them; quoted cells may hold line ends.
    """
    if form == "csv":
        yield from _csv_records(path, report, options)
    else:
        for number, line in read_lines(path, report, options):
            yield number, None if line is None else line.split("\t")


def csv_delimiter(path: Path, encoding: str) -> str:
    """A semicolon where the first line has more of them than commas."""
    with open_utf8(path, encoding) as file:
        first = file.readline(65536)
    return ";" if first.count(b";") > first.count(b",") else ","


def _csv_records(path: Path, report: ReadReport, options: DataConfig) -> Iterator[tuple[int, list[str] | None]]:
    numbers: list[int] = []  # of the lines of the current record

    def lines() -> Iterator[str]:
        for number, line in read_lines(path, report, options, ends=True):
            if line is not None:
                numbers.append(number)
                yield line

    reader = csv.reader(lines(), delimiter=csv_delimiter(path, options.encoding), strict=True)
    while True:
        numbers.clear()
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            report.add_bad(path, numbers[0], "malformed CSV", str(error))
            yield numbers[0], None
            continue
        yield numbers[0], record or [""]


def read_json_rows(path: Path, form: str, schema: Schema, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """The chosen columns of JSON objects; a column is a key, or keys with dots between them."""
    for number, record in json_records(path, form, report, options):
        if (cells := cells_of(record, schema, path, number, report)) is not None:
            yield Row(path, number, cells)


def json_records(path: Path, form: str, report: ReadReport, options: DataConfig) -> Iterator[tuple[int, Any]]:
    """One JSON value a line (jsonl), or those of one list (json), with their numbers."""
    if form == "json":
        for number, record in enumerate(_json_list(path), start=1):
            report.n_read += 1
            yield number, record
        return
    for number, line in read_lines(path, report, options):
        if line is None:
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            report.add_bad(path, number, "not JSON", str(error))


def _json_list(path: Path) -> list[Any]:
    content = _read_json(path)
    if not isinstance(content, list):
        raise BadData(f"{path} holds {type(content).__name__}; a list of objects is needed")
    return content


def _read_json(path: Path) -> Any:
    """One document, which is held whole; what is packed may unpack to a hundred times its size, not a thousand."""
    with open_bytes(path) as file:
        most = min(_MAX_JSON_BYTES, 100 * path.stat().st_size + (1 << 24)) if path.suffix == ".gz" else _MAX_JSON_BYTES
        if len(raw := file.read(most + 1)) > most:
            hint = "write one object a line (.jsonl), which is read line by line"
            raise BadData(f"{path} holds more than {most >> 20:,} MB of JSON; {hint}")
        try:
            return json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path} is not JSON: {error}") from None


def cells_of(record: Any, schema: Schema, path: Path, number: int, report: ReadReport) -> tuple[Any, ...] | None:
    """The columns of a record; None where one is missing or no text, which is recorded as bad."""
    cells: list[Any] = []
    for column in schema.columns:
        value = record
        for key in str(column).split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            report.add_bad(path, number, "missing field", repr(column))
            return None
        if isinstance(value, bool | int | float):
            value = str(int(value)) if isinstance(value, bool) else str(value)
        if schema.kind in ("chats", "preferences") and (messages := read_messages(value)) is not None:
            cells.append(messages)
            continue
        is_list_wanted = schema.kind == "tagged" or (
            schema.kind in _LISTS_LAST and len(cells) == len(schema.columns) - 1
        )
        many = is_list_wanted and isinstance(value, list) and all(isinstance(x, str | int) for x in value)
        if isinstance(value, dict | list) and not many:
            report.add_bad(path, number, "not a text", f"{column!r} is {type(value).__name__}")
            return None
        cells.append(value.strip() if isinstance(value, str) else tuple(map(str, value)) if many else value)
    return tuple(cells)


def read_conll(path: Path, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """A word a line with its tag, sentences separated by blank lines: (words, tags).

    Columns are separated by tabs or spaces; the first is the word, the last the tag, or what ``columns`` says. In
    .conllu (Universal Dependencies) they are FORM and UPOS, without comments, ranges and empty nodes.
    """
    is_conllu = suffix_of(path) == ".conllu"
    columns = [column for column in options.columns or ((1, 3) if is_conllu else (0, -1)) if isinstance(column, int)]
    if len(columns) != 2:
        hint = "say which two hold words and tags: columns=0,3"
        raise ValueError(f"columns={options.columns}: the columns of {path} have no names; {hint}")
    first, pairs = 0, list[tuple[str, str]]()
    for number, line in chain(read_lines(path, report, options), ((0, ""),)):
        cells = (line or "").split("\t" if "\t" in (line or "") else None)
        if not cells or cells[0] == "-DOCSTART-":
            if pairs:
                yield Row(path, first, tuple(zip(*pairs, strict=True)))
            pairs = []
        elif is_conllu and (cells[0].startswith("#") or not cells[0].isdigit()):
            continue
        elif len(cells) < 2 or max(columns) >= len(cells):
            report.add_bad(path, number, "no word with its tag", repr(line)[:80])
        else:
            first = first if pairs else number
            word, tag = (cells[column] for column in columns)
            pairs.append((word, tag))


def read_parallel(paths: Sequence[Path], report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """Line i of one file belongs to line i of the other, so files of different lengths are refused in any case."""
    source, target = paths
    n_source = n_target = 0
    lines = (read_lines(path, report, options) for path in (source, target))
    for left, right in zip_longest(*lines, fillvalue=(0, "")):
        n_source, n_target = max(n_source, left[0]), max(n_target, right[0])
        if n_source == n_target and left[1] is not None and right[1] is not None:
            yield Row(source, left[0], (left[1].strip(), right[1].strip()))
    if n_source != n_target:
        raise BadData(f"{source} has {n_source:,} lines and {target} has {n_target:,}, so they are not parallel")
    report.n_read -= n_target  # a pair of lines is one


def read_documents(path: Path, report: ReadReport, options: DataConfig) -> Iterator[str | None]:
    """The lines of a file's documents, and None after the last one of each; spaces stay as they are.

    A file is one document, or has one a line, or one for each stretch without a blank line. Blank ones are left out.
    """
    by_line = options.documents == "line"
    max_chars = options.max_chars if by_line else 100 * options.max_chars  # many documents are a single long line
    blank_before: list[str] = []  # of a document that may still be all blank
    is_open = False
    for _, line in read_lines(path, report, options, ends=True, max_chars=max_chars):
        if line is None:
            continue
        is_blank = not line.strip()
        if not is_blank:
            yield from blank_before
            blank_before.clear()
            yield line.removesuffix("\n") if by_line else line
            is_open = True
        elif options.documents == "whole":
            if is_open:
                yield line
            else:
                blank_before.append(line)
        if is_open and (by_line or (is_blank and options.documents == "blank")):
            yield None
            is_open = False
    if is_open:
        yield None


def read_caption_json(path: Path, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """``{image: caption(s)}``, a list of ``{"image", "caption(s)"}``, or COCO's images and annotations."""
    for number, (image, captions) in enumerate(_caption_items(path, _read_json(path)), start=1):
        report.n_read += 1
        texts = [captions] if isinstance(captions, str) else captions
        if not isinstance(image, str) or not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
            report.add_bad(path, number, "no image with its captions", f"entry {number}")
            continue
        yield from (Row(path, number, (image, text.strip())) for text in texts)


def _is_coco_image(image: dict[str, Any]) -> bool:
    return isinstance(image.get("id"), str | int) and "file_name" in image


def _caption_items(path: Path, content: Any) -> list[tuple[Any, Any]]:
    match content:
        case {"images": list(images), "annotations": list(annotations)}:
            names = {x["id"]: x["file_name"] for x in images if isinstance(x, dict) and _is_coco_image(x)}
            notes = [note if isinstance(note, dict) else {} for note in annotations]
            keys = [note.get("image_id") for note in notes]
            return [
                (names.get(key) if isinstance(key, str | int) else None, note.get("caption"))
                for key, note in zip(keys, notes, strict=True)
            ]
        case dict():
            return list(content.items())
        case list():
            records = [item if isinstance(item, dict) else {} for item in content]
            return [(x.get("image", x.get("file_name")), x.get("captions", x.get("caption"))) for x in records]
    raise BadData(f"{path} holds {type(content).__name__}; images with captions are an object or a list")
