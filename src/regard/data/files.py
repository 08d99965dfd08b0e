"""Readers: one for each way examples are written down, each a stream of rows with their line numbers.

Tables (TSV, CSV, JSONL) give the chosen columns; parallel files a line of each; captions come as JSON or as a table.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..config import DataConfig, Kind
from ..errors import BadData
from .examples import Report, Text
from .lines import open_bytes, read_lines

__all__ = ["Row", "Schema", "read_caption_json", "read_csv", "read_jsonl", "read_parallel", "read_texts", "read_tsv"]


@dataclass(frozen=True, slots=True)
class Row:
    """The cells a reader was asked for, and where they stood."""

    file: Path
    line: int
    cells: tuple[Any, ...]


@dataclass(frozen=True)
class Schema:
    """Which columns of a table to take and what they are."""

    kind: Kind
    columns: tuple[str | int, ...]
    header: bool = False
    width: int | None = None
    """How many columns every line must have; None: enough for those that are taken."""


def read_tsv(path: Path, schema: Schema, report: Report, options: DataConfig) -> Iterator[Row]:
    """Cells between tabs; nothing is quoted or escaped."""
    lines = read_lines(path, report, options)
    records = ((number, None if line is None else line.split("\t")) for number, line in lines)
    return _columns(path, records, schema, report)


def read_csv(path: Path, schema: Schema, report: Report, options: DataConfig) -> Iterator[Row]:
    """Comma-separated, or by semicolons where the first line has more of them; quoted cells may hold line ends."""
    return _columns(path, csv_records(path, report, options), schema, report)


def csv_records(path: Path, report: Report, options: DataConfig) -> Iterator[tuple[int, list[str] | None]]:
    taken: list[int] = []

    def lines() -> Iterator[str]:
        for number, line in read_lines(path, report, options, ends=True):
            if line is not None:
                taken.append(number)
                yield line

    with open_bytes(path) as file:
        first = file.readline(65536)
    reader = csv.reader(lines(), delimiter=";" if first.count(b";") > first.count(b",") else ",", strict=True)
    while True:
        taken.clear()
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            report.bad(path, taken[0], "malformed CSV", str(error))
            yield taken[0], None
            continue
        yield taken[0], record or [""]


def _columns(
    path: Path, records: Iterator[tuple[int, list[str] | None]], schema: Schema, report: Report
) -> Iterator[Row]:
    places: list[int] = []
    width = schema.width
    if schema.header:
        names = [name.strip() for name in next(records, (0, None))[1] or []]
        report.n_read -= 1
        places, width = [_place(path, names, column) for column in schema.columns], len(names)
    else:
        for column in schema.columns:
            if not isinstance(column, int):
                raise ValueError(f"columns={schema.columns} has a name, but {path} has no header line (header=False)")
            places.append(column)
    for number, cells in records:
        if cells is None:
            continue
        if (width is not None and len(cells) != width) or len(cells) <= max(places):
            need = max(places) + 1 if width is None else width
            report.bad(path, number, "wrong column count", f"{len(cells)} instead of {need}")
            continue
        yield Row(path, number, tuple(cells[place].strip() for place in places))


def _place(path: Path, names: list[str], column: str | int) -> int:
    if isinstance(column, int) and column < len(names):
        return column
    if column not in names:
        raise ValueError(f"columns has {column!r}, but {path} has the columns {', '.join(names)}")
    return names.index(str(column))


def read_jsonl(path: Path, schema: Schema, report: Report, options: DataConfig) -> Iterator[Row]:
    """One JSON object a line; a column is a key, or keys with dots between them."""
    for number, line in read_lines(path, report, options):
        if line is None:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            report.bad(path, number, "not JSON", str(error))
            continue
        if (cells := cells_of(record, schema, path, number, report)) is not None:
            yield Row(path, number, cells)


def cells_of(record: Any, schema: Schema, path: Path, number: int, report: Report) -> tuple[Any, ...] | None:
    """The columns of a record; None, and a note, where one is missing or is no text."""
    cells = []
    for column in schema.columns:
        value = record
        for key in str(column).split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            report.bad(path, number, "missing field", repr(column))
            return None
        if isinstance(value, bool | int | float):
            value = str(int(value)) if isinstance(value, bool) else str(value)
        many = isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)
        if isinstance(value, dict | list) and not many:
            report.bad(path, number, "not a text", f"{column!r} is {type(value).__name__}")
            return None
        cells.append(value.strip() if isinstance(value, str) else tuple(value) if many else value)
    return tuple(cells)


def read_parallel(paths: Sequence[Path], report: Report, options: DataConfig) -> Iterator[Row]:
    """Line i of one file belongs to line i of the other, so files of different lengths are refused in any case."""
    source, target = paths
    missing = (0, "")
    n_source = n_target = 0
    for left, right in zip_longest(
        read_lines(source, report, options), read_lines(target, report, options), fillvalue=missing
    ):
        n_source, n_target = max(n_source, left[0]), max(n_target, right[0])
        if n_source == n_target and left[1] is not None and right[1] is not None:
            yield Row(source, left[0], (left[1].strip(), right[1].strip()))
    if n_source != n_target:
        raise BadData(f"{source} has {n_source:,} lines and {target} has {n_target:,}, so they are not parallel")
    report.n_read -= n_target  # a pair of lines is one


def read_texts(path: Path, report: Report, options: DataConfig) -> Iterator[Text]:
    """A file as one document, or one a line, or one for each stretch without a blank line; spaces stay as they are."""
    unit = options.documents == "line"  # elsewhere a line is no unit: many documents are a single long one
    most = options.max_chars if unit else 100 * options.max_chars
    lines = read_lines(path, report, options, ends=True, max_chars=most)
    if options.documents == "line":
        yield from (Text(line.removesuffix("\n")) for _, line in lines if line is not None and line.strip())
        return
    held: list[str] = []
    for _, line in lines:
        if line is None:
            continue
        if options.documents == "blank" and not line.strip():
            if held:
                yield Text("".join(held))
            held = []
            continue
        held.append(line)
    if any(line.strip() for line in held):
        yield Text("".join(held))


def read_caption_json(path: Path, report: Report, options: DataConfig) -> Iterator[Row]:
    """``{image: caption(s)}``, a list of ``{"image", "caption(s)"}``, or COCO's images and annotations."""
    with open_bytes(path) as file:
        try:
            content = json.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path} is not JSON: {error}") from None
    for number, (image, captions) in enumerate(_caption_items(path, content), start=1):
        report.n_read += 1
        texts = [captions] if isinstance(captions, str) else captions
        if not isinstance(image, str) or not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
            report.bad(path, number, "no image with its captions", f"entry {number}")
            continue
        yield from (Row(path, number, (image, text.strip())) for text in texts)


def _caption_items(path: Path, content: Any) -> list[tuple[Any, Any]]:
    match content:
        case {"images": list(images), "annotations": list(annotations)}:
            names = {image["id"]: image["file_name"] for image in images if {"id", "file_name"} <= image.keys()}
            return [(names.get(note.get("image_id")), note.get("caption")) for note in annotations]
        case dict():
            return list(content.items())
        case list():
            records = [item if isinstance(item, dict) else {} for item in content]
            return [(x.get("image", x.get("file_name")), x.get("captions", x.get("caption"))) for x in records]
    raise BadData(f"{path} holds {type(content).__name__}; images with captions are an object or a list")
