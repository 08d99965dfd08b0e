"""Files of records to predict on: CSV, TSV, JSONL, Parquet, lines of text, or a folder of images.

Unlike an example of a source, a record keeps all its columns and its line number, so that a prediction can be written
next to its input. One record is in memory at a time, or one batch of a Parquet file.
"""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from ..config import DataConfig
from ..errors import BadData, UsageError
from ..foundation.plugins import import_optional
from .examples import ReadReport
from .images import find_image
from .source_files import COLUMN_NAMES, FORMATS, IMAGE_SUFFIXES, has_header, schema_of_keys
from .table_files import csv_delimiter, json_list, open_parquet, parquet_rows, read_lines, suffix_of, table_records

RecordForm = Literal["lines", "csv", "tsv", "jsonl", "parquet", "folder"]
TABLE_SUFFIXES: dict[str, RecordForm] = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
TABLE_SUFFIXES[".parquet"] = "parquet"
_OPTIONS = DataConfig(normalise="none", max_chars=10_000_000)
_SAMPLE_ROWS = 200


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its line in the file, the text the model reads, and all its columns."""

    line: int
    text: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The records of a file; ``read`` starts from the beginning each time."""

    name: str  # file name; empty for texts from the command line
    form: RecordForm
    columns: tuple[str, ...]
    read: Callable[[], Iterator[Record]]
    header: bool = True
    delimiter: str = ","
    column: str = "text"  # the column the model reads, or two of them as "a,b"
    has_pairs: bool = False  # whether two columns are read; their texts are joined by a tab
    encoding: str = "auto"

    def place(self, line: int) -> str:
        """The location of a record for messages: ``reviews.csv:8``."""
        return f"{self.name}:{line}" if self.name else f"text {line}"


def free_name(name: str, columns: Sequence[str]) -> str:
    """A name for a new column: ``label``, or ``label_2`` if there is already such a column."""
    names = [name, *(f"{name}_{n}" for n in range(2, len(columns) + 3))]
    return next(free for free in names if free not in columns)


def form_of(path: Path) -> RecordForm:
    if suffix_of(path) == ".json":  # a list of objects; answers are written as lines of JSON
        return "jsonl"
    return "folder" if path.is_dir() else TABLE_SUFFIXES.get(suffix_of(path), "lines")


def text_records(texts: Sequence[str], name: str = "", first: int = 1) -> Records:
    """Texts in memory, numbered from ``first``."""
    records = [Record(line, text, {"text": text}) for line, text in enumerate(texts, start=first)]
    return Records(name, "lines", ("text",), lambda: iter(records))


def open_records(path: Path, column: str | None = None, *, images: bool = False, encoding: str = "auto") -> Records:
    """Open the records of a file. The model reads ``column`` (or two, "a,b"), by default one with a known name.

    With ``images``, the column holds file names in the folder of the table, or in a folder "images" beside it.
    """
    form, options = form_of(path), _OPTIONS.with_(encoding=encoding)
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if form in ("lines", "folder") and column is not None:
        read_as = "a folder of images" if form == "folder" else f"lines, not as a table ({', '.join(TABLE_SUFFIXES)})"
        raise ValueError(f"column={column}: {path} has no columns: by its name it is read as {read_as}")
    if form == "folder":
        if not images:
            raise UsageError(f"{path} is a folder of images, and texts are needed")
        return Records(str(path), form, ("image",), lambda: _folder_records(path))
    if form == "lines" and FORMATS.get(suffix_of(path)) == "conll":
        raise UsageError(f"{path} holds words with their tags; predictions need a sentence on each line")
    if form == "lines":
        return Records(str(path), form, ("text",), lambda: _line_records(path, options), encoding=encoding)
    header, delimiter = True, ","
    if form in ("csv", "tsv"):
        records = islice(table_records(path, form, ReadReport(), options), _SAMPLE_ROWS)
        rows = [cells for _, cells in records if cells is not None]
        first = [cell.strip() for cell in rows[0]] if rows else []
        header = has_header(rows) or (column in first and not str(column).isdigit())
        names: list[str] = []
        for index, name in enumerate(first):
            names.append(free_name(name, names) if header else str(index))
        delimiter = csv_delimiter(path, options.encoding) if form == "csv" else "\t"
    elif form == "jsonl":
        names = list(next((record for _, record in _jsonl_objects(path, options) if record), {}))
    else:
        names = list(open_parquet(path).schema_arrow.names)
    requested = [column] if column is None or column in names else column.split(",")
    chosen = [_choose_column(path, names, name, images, nested=form in ("jsonl", "parquet")) for name in requested]
    folder = path.parent if images else None
    has_pairs = len(chosen) > 1

    def read() -> Iterator[Record]:
        for line, fields in _fields(path, form, names, header, options):
            cells = [_cell(fields, name, path, line, folder) for name in chosen]
            text = "\t".join(cell.replace("\t", " ") for cell in cells) if has_pairs else cells[0]
            yield Record(line, text, fields)

    return Records(str(path), form, tuple(names), read, header, delimiter, ",".join(chosen), has_pairs, encoding)


def _choose_column(path: Path, names: Sequence[str], requested: str | None, images: bool, nested: bool) -> str:
    """The requested column, by name or number; without a request, the one with a known name, or the only one.

    Names are compared in NFC, because macOS writes Hangul decomposed.
    """
    composed = {unicodedata.normalize("NFC", name): name for name in names}
    if requested is not None:
        requested = composed.get(unicodedata.normalize("NFC", requested), requested)
        if requested in names or (nested and requested.split(".")[0] in names):
            return requested
        if requested.isdigit() and int(requested) < len(names):
            return names[int(requested)]
        columns = f"the columns {', '.join(names)}" if names else "no records"
        raise ValueError(f"column={requested}: {path} has {columns}")
    known = COLUMN_NAMES["image"] if images else (*COLUMN_NAMES["source"], *COLUMN_NAMES["text"])
    lower = {key.lower(): name for key, name in composed.items()}
    if (match := next((lower[name] for name in known if name in lower), None)) is not None:
        return match
    if len(names) <= 1:
        return names[0] if names else ""
    schema = schema_of_keys([*names, "label"], "labelled")  # finds two texts, as in training
    hint = names[0] if schema is None else ",".join(map(str, schema.columns[:-1]))
    raise ValueError(f"{path} has the columns {', '.join(names)}; say which to read: column={hint}")


def _fields(
    path: Path, form: RecordForm, names: Sequence[str], header: bool, options: DataConfig
) -> Iterator[tuple[int, dict[str, Any]]]:
    if form == "jsonl":
        yield from _jsonl_objects(path, options)
    elif form == "parquet":
        yield from enumerate(parquet_rows(path), start=1)
    else:
        report = ReadReport()
        for number, (line, cells) in enumerate(table_records(path, form, report, options)):
            _refuse_bad(report)
            if cells is None or (header and number == 0):
                continue
            blank = not any(cell.strip() for cell in cells)
            if len(cells) != len(names) and not blank:
                raise BadData(f"{path}:{line}: {len(cells)} columns instead of {len(names)}")
            yield line, dict(zip(names, cells if len(cells) == len(names) else [""] * len(names), strict=True))
        _refuse_bad(report)


def _jsonl_objects(path: Path, options: DataConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, record in enumerate(json_list(path), 1) if suffix_of(path) == ".json" else _json_lines(path, options):
        if not isinstance(record, dict):
            raise BadData(f"{path}:{number}: {type(record).__name__} instead of an object")
        yield number, record


def _json_lines(path: Path, options: DataConfig) -> Iterator[tuple[int, Any]]:
    report = ReadReport()
    for number, line in read_lines(path, report, options):
        _refuse_bad(report)
        try:
            yield number, json.loads(line or "") if (line or "").strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path}:{number}: not JSON: {error}") from None


def _line_records(path: Path, options: DataConfig) -> Iterator[Record]:
    report = ReadReport()
    for number, line in read_lines(path, report, options):
        _refuse_bad(report)
        yield Record(number, line or "", {"text": line or ""})


def _folder_records(path: Path) -> Iterator[Record]:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not files:
        raise BadData(f"{path}: no images in this folder; supported file names end in {', '.join(IMAGE_SUFFIXES)}")
    for number, file in enumerate(files, start=1):
        yield Record(number, str(file), {"image": file.relative_to(path).as_posix()})


def _refuse_bad(report: ReadReport) -> None:
    """Raise BadData on the first bad line: skipping it would shift all later predictions to the wrong record."""
    if report.first:
        raise BadData(str(report.first[0]))


def _cell(fields: Mapping[str, Any], column: str, path: Path, line: int, folder: Path | None) -> str:
    value: Any = fields.get(column)
    if column not in fields:
        value = fields
        for key in column.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return ""
    if isinstance(value, dict | list):
        parts = list(value) if isinstance(value, dict) else []
        hint = f"; say which part to read: column={column}.{parts[0]}" if parts else ""
        raise BadData(f"{path}:{line}: {column!r} is not a text but a {type(value).__name__}{hint}")
    if folder is None or not str(value).strip():
        return str(value)
    paths = (find_image(place, str(value)) for place in (folder / "images", folder))  # in this order, as in training
    return str(next(filter(os.path.exists, paths), folder / str(value)))


def write_records(
    file: IO[bytes], form: RecordForm, records: Records, new: Mapping[str, type], rows: Iterable[dict[str, Any]]
) -> None:
    """Write rows with the columns of ``records`` followed by the ``new`` ones, whose types are str or float."""
    if form == "parquet":
        _write_parquet(file, records, new, rows)
    else:
        encode = row_encoder(form, records, new)
        file.write(encode(None))
        for row in rows:
            file.write(encode(row))


def row_encoder(
    form: RecordForm, records: Records, new: Mapping[str, type]
) -> Callable[[dict[str, Any] | None], bytes]:
    """A function that encodes a row as bytes, or the header if it is given None."""
    names, header = [*records.columns, *new], records.header and form in ("csv", "tsv")
    delimiter = records.delimiter if records.form == "csv" else ","

    def encode(row: dict[str, Any] | None) -> bytes:
        if form == "jsonl":
            # JSON may hold half of a surrogate pair, which is written as it was read: \ud800
            line = "" if row is None else f"{json.dumps(row, ensure_ascii=False, default=str)}\n"
            return line.encode("utf-8", "backslashreplace")
        if row is None and not header:
            return b""
        cells = names if row is None else [_cell_text(row.get(name), name in new) for name in names]
        if form == "csv":
            text = io.StringIO()
            csv.writer(text, delimiter=delimiter, lineterminator="\n").writerow(cells)
            return text.getvalue().encode("utf-8", "surrogatepass")
        line = "\t".join(" ".join(cell.replace("\t", " ").splitlines()) for cell in cells)
        return f"{line}\n".encode("utf-8", "surrogatepass")

    return encode


def _cell_text(value: Any, is_new: bool = False) -> str:
    """A value as a cell of a table: only numbers in new columns are rounded, lists are written as JSON."""
    if value is None:
        return ""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:.6g}" if is_new and isinstance(value, float) else str(value)


def _write_parquet(file: IO[bytes], records: Records, new: Mapping[str, type], rows: Iterable[dict[str, Any]]) -> None:
    arrow, parquet = (import_optional(name, "Parquet", "data") for name in ("pyarrow", "pyarrow.parquet"))
    if records.form == "parquet":
        schema = open_parquet(Path(records.name)).schema_arrow
    else:
        schema = arrow.schema([(name, arrow.string()) for name in records.columns])
        rows = ({x: y if y is None or x in new else _cell_text(y) for x, y in row.items()} for row in rows)
    for name, kind in new.items():
        schema = schema.append(arrow.field(name, arrow.float64() if kind is float else arrow.string()))
    source = iter(rows)
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(source, 1024)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
