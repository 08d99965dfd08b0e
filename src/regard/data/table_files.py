"""Readers of data files, one per format, each a stream of rows with their line numbers.

Tables (TSV, CSV, JSONL, Parquet) yield the chosen columns, parallel files one line of each file, caption files an image
and a text. Text is UTF-8, UTF-16 or CP949, detected by a byte order mark or the content; lines end in \\n or \\r\\n.
.gz is decompressed while reading, and only one line is in memory at a time, or some rows of a Parquet file. A line that
is too long or broken does not stop the reader: it is recorded in the report.
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
from ..errors import BadData, UsageError
from ..foundation.plugins import import_optional
from ..foundation.progress import track
from ..text.chat import read_messages
from .examples import ReadReport

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_MAX_JSON_BYTES = 1 << 30
_SAMPLE_BYTES = 1 << 20  # bytes from which the encoding is detected
_BINARY = {  # first bytes of files that are often passed by mistake
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive or an Office document",
    b"\x1f\x8b": "gzip, which must be named .gz",
    b"PAR1": "a Parquet table, which must be named .parquet",
}
_LISTS_LAST = ("labelled", "captions", "images", "questions")  # kinds whose last column may hold several texts
_HANGUL = range(0xAC00, 0xD7A4)


def suffix_of(path: Path) -> str:
    """``.tsv`` for pairs.tsv and for pairs.tsv.gz."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def stem_of(path: Path) -> str:
    """``train`` for train.tsv and for train.tsv.gz."""
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressing .gz; errors while it is read become BadData."""
    try:
        with cast(IO[bytes], gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is not a complete gzip file: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from None


def detect_encoding(path: Path) -> str:
    """``utf-16`` if there is a byte order mark, ``cp949`` if invalid as UTF-8 but mostly Hangul as CP949, else
    ``utf-8``, so that the lines of any other encoding are reported one by one."""
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
    """A file in another encoding that is read line by line as UTF-8."""

    def __init__(self, file: IO[bytes], path: Path, encoding: str) -> None:
        self.text = io.TextIOWrapper(file, encoding=encoding, newline="\n")
        self.path, self.encoding = path, encoding

    def readline(self, size: int) -> bytes:
        try:
            return self.text.readline(size).encode("utf-8", "surrogatepass")
        except UnicodeError as error:
            raise BadData(
                f"{self.path} is not {self.encoding.upper()} text: {error}; encoding=… sets another encoding"
            ) from None


@contextmanager
def open_utf8(path: Path, encoding: str, report: ReadReport | None = None) -> Iterator[IO[bytes] | _Utf8Lines]:
    """Open a file for reading lines as UTF-8. ``auto`` detects the encoding; the report records it unless UTF-8."""
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
    """(number from 1, line); the line is None if it was recorded as bad, which keeps parallel files aligned.

    ``ends`` keeps the end of each line as \\n; ``max_chars`` overrides the one in ``options``.
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
                rest = file.readline(1 << 20)  # skip the rest of a line that is too long to keep
                size += len(rest)
            line = _decode_line(raw, size, max_chars, path, number, report, options.normalise)
            if line is not None and ends and ended:
                line += "\n"
            yield number, line


def _decode_line(
    raw: bytes, size: int, max_chars: int, path: Path, number: int, report: ReadReport, normalise: str
) -> str | None:
    """Decode a line of ``size`` bytes that begins with ``raw``; a bad line is recorded in the report, and the result is
    None."""
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
    """The cells of the chosen columns, with the file and the line they come from."""

    file: Path
    line: int
    cells: tuple[Any, ...]


@dataclass(frozen=True)
class Schema:
    """The chosen columns of a table and the kind of example they make."""

    kind: Kind
    columns: tuple[str | int, ...]
    header: bool = False
    width: int | None = None  # number of columns every line must have; None: enough for the chosen ones
    names: tuple[str, ...] = ()  # names of all columns, if the table has a header
    guessed: bool = False  # whether the kind was inferred from the content alone


def read_table(path: Path, form: str, schema: Schema, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """The chosen columns of a TSV or CSV file."""
    records = table_rows(path, form, report, options)
    indices, width = [column for column in schema.columns if isinstance(column, int)], schema.width
    if schema.header:
        names = [name.strip() for name in next(records, (0, None))[1] or []]
        report.n_read -= 1
        for column in schema.columns:
            missing = column >= len(names) if isinstance(column, int) else column not in names
            if missing:
                raise ValueError(f"columns has {column!r}, but {path} has the columns {', '.join(names)}")
            if isinstance(column, str) and names.count(column) > 1:
                numbers = ",".join(str(x if isinstance(x, int) else names.index(x)) for x in schema.columns)
                raise ValueError(f"{path} has several columns {column!r}; choose by number: columns={numbers}")
        indices, width = [x if isinstance(x, int) else names.index(x) for x in schema.columns], len(names)
    elif len(indices) < len(schema.columns):
        raise ValueError(f"columns={schema.columns} has a name, but {path} has no header line (header=False)")
    for number, cells in records:
        if cells is None:
            continue
        if (width is not None and len(cells) != width) or len(cells) <= max(indices):
            expected = max(indices) + 1 if width is None else width
            report.add_bad(path, number, "wrong column count", f"{len(cells)} instead of {expected}")
            continue
        yield Row(path, number, tuple(cells[index].strip() for index in indices))


def table_rows(
    path: Path, form: str, report: ReadReport, options: DataConfig
) -> Iterator[tuple[int, list[str] | None]]:
    """The records of a table but its blank lines, which are no rows."""
    for number, cells in table_records(path, form, report, options):
        if cells is not None and len(cells) == 1 and not cells[0].strip():
            report.n_read -= 1
        else:
            yield number, cells


def table_records(
    path: Path, form: str, report: ReadReport, options: DataConfig
) -> Iterator[tuple[int, list[str] | None]]:
    """(line number, all cells) of each record; the cells are None if it was recorded as bad.

    TSV separates cells by tabs, without quoting or escapes. CSV separates them by commas, or by semicolons or tabs if
    the first line has more of those; quoted cells may contain newlines.
    """
    if form == "csv":
        yield from _csv_records(path, report, options)
    else:
        for number, line in read_lines(path, report, options):
            yield number, None if line is None else line.split("\t")


def csv_delimiter(path: Path, encoding: str) -> str:
    """The one of comma, semicolon and tab that the first line has most often."""
    with open_utf8(path, encoding) as file:
        first = file.readline(65536).decode("utf-8", "replace")
    return max(",;\t", key=first.count)


def _csv_records(path: Path, report: ReadReport, options: DataConfig) -> Iterator[tuple[int, list[str] | None]]:
    csv.field_size_limit(max(csv.field_size_limit(), options.max_chars))  # the library's own limit is 131,072
    numbers: list[int] = []  # line numbers of the current record

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


def read_object_rows(path: Path, form: str, schema: Schema, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """The chosen columns of JSON objects or of a Parquet file; a column is a key, or keys joined by dots."""
    roots = [str(column).split(".")[0] for column in schema.columns]
    for number, record in object_records(path, form, report, options, roots):
        if (cells := cells_of(record, schema, path, number, report)) is not None:
            yield Row(path, number, cells)


def object_records(
    path: Path, form: str, report: ReadReport, options: DataConfig, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """(number, value) for each line (jsonl), element of a list (json), or row (parquet): all of it or ``columns``."""
    if form in ("json", "parquet"):
        records = json_list(path) if form == "json" else parquet_rows(path, columns)
        for number, record in enumerate(records, start=1):
            report.n_read += 1
            yield number, record
        return
    for number, line in read_lines(path, report, options):
        if line is None:
            continue
        if not line.strip():
            report.n_read -= 1
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            report.add_bad(path, number, "not JSON", str(error))


def json_list(path: Path) -> list[Any]:
    content = _read_json(path)
    if not isinstance(content, list):
        raise BadData(f"{path} holds a JSON {type(content).__name__}; a list of objects is needed")
    return content


def _read_json(path: Path) -> Any:
    """Parse a JSON document, which must fit in memory. A .gz file may expand to about 100 times its size at most."""
    with open_bytes(path) as file:
        limit = _MAX_JSON_BYTES
        if path.suffix == ".gz":
            limit = min(limit, 100 * path.stat().st_size + (1 << 24))
        if len(raw := file.read(limit + 1)) > limit:
            hint = "a .jsonl file, with one object per line, may be larger"
            raise BadData(f"{path} holds more than {limit >> 20:,} MB of JSON; {hint}")
        try:
            return json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path} is not JSON: {error}") from None


def parquet_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, or these columns of them; 256 rows are in memory at a time."""
    file, names = open_parquet(path), None if columns is None else list(dict.fromkeys(columns))
    batches = track(file.iter_batches(256, columns=names), f"reading {path.name}", file.metadata.num_rows, len)
    while True:
        try:
            rows = next(batches).to_pylist()
        except StopIteration:
            return
        except (OSError, ValueError) as error:  # base classes of pyarrow's own errors
            raise BadData(f"{path} is damaged or not a Parquet file: {error}") from None
        yield from rows


def open_parquet(path: Path) -> Any:
    try:
        return import_optional("pyarrow.parquet", "Parquet", "data").ParquetFile(path, buffer_size=1 << 20)
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read as Parquet: {error}") from None


def cells_of(record: Any, schema: Schema, path: Path, number: int, report: ReadReport) -> tuple[Any, ...] | None:
    """The chosen columns of a record; None, and recorded as bad, if one is missing or is not a text."""
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
        is_last = len(cells) == len(schema.columns) - 1
        may_be_list = schema.kind == "tagged" or (schema.kind in _LISTS_LAST and is_last)
        if isinstance(value, str):
            cells.append(value.strip())
        elif may_be_list and isinstance(value, list) and all(isinstance(x, str | int) for x in value):
            cells.append(tuple(map(str, value)))
        elif isinstance(value, dict | list | bytes):
            report.add_bad(path, number, "not a text", f"{column!r} is {type(value).__name__}")
            return None
        else:  # an image of a Hugging Face dataset, or a date
            cells.append(value if schema.kind in ("captions", "images") else str(value))
    return tuple(cells)


def read_conll(path: Path, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """(words, tags) of each sentence: one word with its tag per line, sentences separated by blank lines.

    Columns are separated by tabs or spaces. The first is the word and the last the tag, unless ``options.columns`` says
    otherwise. In .conllu (Universal Dependencies) they are FORM and UPOS; comments, ranges and empty nodes are skipped.
    """
    is_conllu = suffix_of(path) == ".conllu"
    columns = [column for column in options.columns or ((1, 3) if is_conllu else (0, -1)) if isinstance(column, int)]
    if len(columns) != 2:
        hint = "say which two hold words and tags: columns=0,3"
        raise ValueError(f"columns={options.columns}: the columns of {path} have no names; {hint}")
    first = 0  # line of the sentence's first word
    pairs: list[tuple[str, str]] = []
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
    """(source, target) from the same line of two files; BadData if they have different numbers of lines."""
    source, target = paths
    n_source = n_target = 0
    lines = (read_lines(path, report, options) for path in (source, target))
    for left, right in zip_longest(*lines, fillvalue=(0, "")):
        n_source, n_target = max(n_source, left[0]), max(n_target, right[0])
        if n_source == n_target and left[1] is not None and right[1] is not None:
            yield Row(source, left[0], (left[1].strip(), right[1].strip()))
    if n_source != n_target:
        raise BadData(f"{source} has {n_source:,} lines and {target} has {n_target:,}, so they are not parallel")
    report.n_read -= n_target  # a pair of lines counts once


def read_documents(path: Path, report: ReadReport, options: DataConfig) -> Iterator[str | None]:
    """The lines of a file's documents, with None after the last line of each; whitespace is preserved.

    By ``options.documents``, the whole file is a document, each line is one, or blank lines separate them. Blank
    documents are left out.
    """
    by_line = options.documents == "line"
    max_chars = options.max_chars if by_line else 100 * options.max_chars  # many documents are a single long line
    blank_before: list[str] = []  # leading blank lines of a document that may turn out to be all blank
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
    """(image, caption) from ``{image: caption(s)}``, a list of ``{"image", "caption(s)"}``, or COCO's JSON."""
    for number, (image, captions) in enumerate(_caption_items(path, _read_json(path)), start=1):
        report.n_read += 1
        texts = [captions] if isinstance(captions, str) else captions
        if not isinstance(image, str) or not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
            report.add_bad(path, number, "not an image with captions", f"entry {number}")
            continue
        yield from (Row(path, number, (image, text.strip())) for text in texts)


def holds_captions(path: Path) -> bool:
    """Whether a JSON document is one that ``read_caption_json`` reads, not a list of other objects."""
    content = _read_json(path)
    first = content[0] if isinstance(content, list) and content else None
    return not isinstance(first, dict) or not first.keys().isdisjoint(("caption", "captions"))


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
    raise BadData(f"{path} holds a JSON {type(content).__name__}; images with captions are an object or a list")
