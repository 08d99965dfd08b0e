"""What a file holds, told from its name and its first lines; every guess can be overridden by an option."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from ..config import DataConfig, Format, Kind
from .examples import Report
from .files import Schema, csv_records
from .lines import read_lines, suffix_of

__all__ = ["IMAGE_SUFFIXES", "detect_format", "detect_schema", "schema_of_keys"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_BY_SUFFIX: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "captions",
}
_SNIFFED = 1000
_NAMES: dict[str, tuple[str, ...]] = {
    "source": ("source", "src", "input", "english", "en"),
    "target": ("target", "tgt", "output", "translation"),
    "text": ("text", "document", "sentence", "review", "content"),
    "label": ("label", "class", "sentiment", "category"),
    "image": ("image", "file", "filename", "file_name", "path"),
    "caption": ("caption", "captions"),
}
_WANTED: dict[Kind, tuple[str, ...]] = {
    "captions": ("image", "caption"),
    "images": ("image", "label"),
    "labelled": ("text", "label"),
    "pairs": ("source", "target"),
    "text": ("text",),
}


def detect_format(path: Path) -> Format:
    """By the ending; .txt and unknown ones are a table where every early line has the same number of tabs."""
    if (by_suffix := _BY_SUFFIX.get(suffix_of(path))) is not None:
        return by_suffix
    if "idx3-ubyte" in path.name or "idx4-ubyte" in path.name:
        return "idx"
    lines = [line for _, line in islice(read_lines(path, Report(), DataConfig()), 50) if line]
    tabs = {line.count("\t") for line in lines}
    return "tsv" if len(tabs) == 1 and tabs != {0} else "text"


def detect_schema(path: Path, form: Format, options: DataConfig) -> Schema:
    """Which columns are what."""
    if form == "jsonl":
        return _jsonl_schema(path, options)
    rows = _sample(path, form)
    if not rows:
        return Schema(options.kind or "pairs", options.columns or (0, 1), header=False, width=None)
    named = any(isinstance(column, str) for column in options.columns or ())
    keys = [cell.strip() for cell in rows[0]]
    guess = None if options.columns is not None else schema_of_keys(keys, options.kind)
    header = options.header if options.header is not None else named or (guess is not None and len(keys) > 1)
    if header and guess is not None:
        return guess
    body = rows[1:] if header else rows
    if options.columns is not None:
        return Schema(options.kind or _kind(body, keys, options.columns, header), options.columns, header)
    width = len(rows[0])
    if width == 1 and options.kind in (None, "text"):
        return Schema("text", (0,), header, 1)
    if width != 2:
        hint = "say which to take: columns=0,1 or their names"
        raise ValueError(f"{path} has {width} columns and none is named as expected; {hint}")
    kind = options.kind or _kind(body, keys, (0, 1), header, any_order=True)
    first_is_label = kind == "labelled" and _few([row[0] for row in body if len(row) == 2])
    return Schema(kind, (1, 0) if first_is_label else (0, 1), header, 2)


def schema_of_keys(keys: list[str], kind: Kind | None) -> Schema | None:
    """The columns that names tell; None where they tell nothing."""
    lower = {key.lower(): key for key in keys}
    for candidate, wanted in _WANTED.items():
        if kind not in (None, candidate):
            continue
        found = [next((lower[name] for name in _NAMES[what] if name in lower), None) for what in wanted]
        if all(name is not None for name in found):
            return Schema(candidate, tuple(name for name in found if name is not None), header=True)
    return None


def _jsonl_schema(path: Path, options: DataConfig) -> Schema:
    keys: list[str] = []
    for _, line in islice(read_lines(path, Report(), options), 50):
        try:
            record: Any = json.loads(line or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            both = record.get("translation")
            keys = [f"translation.{key}" for key in both] if isinstance(both, dict) else list(record)
            break
    if options.columns is not None:
        guess = schema_of_keys([str(column) for column in options.columns], options.kind)
        kind = options.kind or (guess.kind if guess else "text" if len(options.columns) == 1 else "pairs")
        return Schema(kind, options.columns, header=True)
    if len(keys) == 2 and all(key.startswith("translation.") for key in keys):
        return Schema("pairs", tuple(keys), header=True)
    if (guess := schema_of_keys(keys, options.kind)) is None:
        raise ValueError(f"{path} has the fields {', '.join(keys) or 'none'}; say which to take: columns=a,b")
    return guess


def _sample(path: Path, form: Format) -> list[list[str]]:
    options, report = DataConfig(), Report()
    if form == "csv":
        records = (cells for _, cells in csv_records(path, report, options))
    else:
        lines = read_lines(path, report, options)
        records = (None if line is None else line.split("\t") for _, line in lines)
    return [cells for cells in islice(records, _SNIFFED) if cells is not None]


def _kind(
    body: list[list[str]], keys: list[str], columns: tuple[str | int, ...], header: bool, any_order: bool = False
) -> Kind:
    """Image names make captions or labelled images, few different values labels; anything else is a pair.

    Columns that were asked for stand in their order, the label second; others may have it first.
    """
    if len(columns) == 1:
        return "text"
    if header and (guess := schema_of_keys([str(x) if isinstance(x, str) else keys[x] for x in columns], None)):
        return guess.kind
    places = [x if isinstance(x, int) else keys.index(x) for x in columns if x in keys or isinstance(x, int)]
    cells = [[row[place] for place in places] for row in body if len(row) > max(places, default=0)]
    if len(places) < 2 or not cells:
        return "pairs"
    first, second = [row[0] for row in cells], [row[1] for row in cells]
    if all(cell.lower().endswith(IMAGE_SUFFIXES) for cell in first[:20]):
        return "images" if _few(second) else "captions"
    return "labelled" if _few(second) or (any_order and _few(first)) else "pairs"


def _few(values: list[str]) -> bool:
    """Whether these are classes: one or two words, and each several times."""
    distinct = set(values)
    short = all(len(x) <= 40 and len(x.split()) <= 2 for x in distinct)
    return short and len(values) >= 4 and len(distinct) <= min(100, max(2, len(values) // 4))
