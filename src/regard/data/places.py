"""From the word a source is named by to the files it means: a file, two, a folder with its parts, or hf:name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig, Format, Kind
from ..errors import BadData, RegardError
from .corpora import CORPORA
from .detect import IMAGE_SUFFIXES, detect_format, detect_schema, schema_of_keys
from .examples import Report, Text
from .files import Row, Schema, cells_of, read_caption_json, read_csv, read_jsonl, read_parallel, read_texts, read_tsv
from .images import read_idx
from .lines import stem_of, suffix_of

__all__ = ["Place", "place_of", "rows_of"]

_TRAIN, _VALID = ("train", "training"), ("valid", "val", "validation", "dev")
_TABLES = (".tsv", ".csv", ".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Place:
    """Files that belong together, and what they hold."""

    form: Format
    kind: Kind
    paths: tuple[Path, ...] = ()
    schema: Schema | None = None
    images: Path | None = None
    labels: tuple[str, ...] | None = None
    idx: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
    table: Any = None
    """The rows of a dataset that is no file."""
    valid: Place | None = None
    """The held-out part, where the source brings one."""


def place_of(name: str, options: DataConfig) -> Place:
    """What a name means."""
    if name.startswith("hf:"):
        return _hugging_face(name, options)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, options)
    if path.is_file():
        return _file(path, options)
    parts = [Path(part.strip()).expanduser() for part in name.split(",")]
    if len(parts) == 2 and all(part.is_file() for part in parts):
        return Place("parallel", "pairs", tuple(parts))
    missing = next((part for part in parts if not part.is_file()), path)
    near = difflib.get_close_matches(name, CORPORA, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; embedded corpora are {', '.join(CORPORA)}"
    raise BadData(f"source={name!r}: there is no file {missing}{hint}")


def _file(path: Path, options: DataConfig) -> Place:
    form = options.format or detect_format(path)
    match form:
        case "text":
            return Place("text", "text", (path,))
        case "idx":
            return _idx(path)
        case "captions":
            return Place("captions", "captions", (path,), images=_image_folder(path, options))
        case "tsv" | "csv" | "jsonl":
            schema = detect_schema(path, form, options)
            pictures = schema.kind in ("captions", "images")
            images = _image_folder(path, options) if pictures else None
            return Place(form, schema.kind, (path,), schema, images)
    raise ValueError(f"format={form!r} is not one of a single file, which {path} is")


def _image_folder(path: Path, options: DataConfig) -> Path:
    if options.images is not None:
        return Path(options.images).expanduser()
    return path.parent / "images" if (path.parent / "images").is_dir() else path.parent


def _folder(path: Path, options: DataConfig) -> Place:
    """IDX files; train and valid tables; parallel files told by their endings; folders of images; documents."""
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if idx := [file for file in files if "idx3-ubyte" in file.name or "idx4-ubyte" in file.name]:
        return _idx_folder(path, idx)
    by_part = {part: _parts(files, names) for part, names in (("train", _TRAIN), ("valid", _VALID))}
    if train := by_part["train"]:
        made = _part(path, train, options)
        valid = by_part["valid"]
        return replace(made, valid=_part(path, valid, options, made) if valid else None)
    classes = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _has_image(folder)]
    if classes and options.kind in (None, "images"):
        return Place("folder", "images", (path,), images=path, labels=tuple(folder.name for folder in classes))
    documents = tuple(file for file in files if suffix_of(file) == ".txt")
    if documents:
        return Place("text", "text", documents)
    raise BadData(f"{path} has neither train files, nor folders of images, nor .txt documents")


def _parts(files: list[Path], names: tuple[str, ...]) -> list[Path]:
    return [file for file in files if stem_of(file).lower() in names]


def _part(path: Path, files: list[Path], options: DataConfig, like: Place | None = None) -> Place:
    tables = [file for file in files if suffix_of(file) in _TABLES]
    if tables:
        made = _file(tables[0], options)
        return made if like is None or made.kind != like.kind else replace(made, schema=like.schema or made.schema)
    if len(files) == 1:
        return _file(files[0], options)
    endings = {suffix_of(file).removeprefix("."): file for file in files}
    wanted = options.columns or (tuple(endings) if len(endings) == 2 else None)
    if wanted is None or len(wanted) != 2 or any(str(ending) not in endings for ending in wanted):
        hint = f"say which two: columns={','.join(list(endings)[:2])}"
        raise ValueError(f"{path} has files ending in {', '.join(endings)}, columns={options.columns}; {hint}")
    return Place("parallel", "pairs", tuple(endings[str(ending)] for ending in wanted))


def _has_image(folder: Path) -> bool:
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in folder.iterdir())


def _idx(images: Path) -> Place:
    labels = images.with_name(images.name.replace("images-idx3", "labels-idx1").replace("images-idx4", "labels-idx1"))
    if not labels.is_file() or labels == images:
        raise BadData(f"{images} has no file of labels beside it; {labels.name} was looked for")
    pixels, numbers = read_idx(images), read_idx(labels)
    if numbers.ndim != 1 or pixels.ndim not in (3, 4) or len(pixels) != len(numbers):
        raise BadData(f"{images} has shape {pixels.shape}, but {labels} has {numbers.shape}")
    return Place("idx", "images", (images, labels), idx=(pixels, numbers))


def _idx_folder(path: Path, files: list[Path]) -> Place:
    train = [file for file in files if file.name.startswith(_TRAIN)]
    valid = [file for file in files if file.name.startswith(_VALID)]
    if len(train) != 1:
        raise BadData(f"{path} has {len(train)} files train-images-idx3-ubyte; one is needed")
    return replace(_idx(train[0]), valid=_idx(valid[0]) if valid else None)


def rows_of(place: Place, report: Report, options: DataConfig) -> Iterator[Row | Text]:
    """The rows of a place, one after the other."""
    if place.table is not None:
        assert place.schema is not None
        yield from _table_rows(place, place.schema, report)
        return
    readers = {"tsv": read_tsv, "csv": read_csv, "jsonl": read_jsonl}
    match place.form:
        case "tsv" | "csv" | "jsonl":
            assert place.schema is not None
            yield from readers[place.form](place.paths[0], place.schema, report, options)
        case "parallel":
            yield from read_parallel(place.paths, report, options)
        case "captions":
            yield from read_caption_json(place.paths[0], report, options)
        case "text":
            for path in place.paths:
                yield from read_texts(path, report, options)
        case "folder":
            yield from _folder_rows(place, report)


def _folder_rows(place: Place, report: Report) -> Iterator[Row]:
    """One folder for each class."""
    for label in place.labels or ():
        for number, file in enumerate(sorted((place.paths[0] / label).iterdir()), start=1):
            if file.suffix.lower() in IMAGE_SUFFIXES:
                report.n_read += 1
                yield Row(file, number, (f"{label}/{file.name}", label))


def _hugging_face(name: str, options: DataConfig) -> Place:
    """``hf:name`` or ``hf:name:configuration``, through the ``datasets`` library."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise RegardError(f"{name} is read by datasets, which is not installed: pip install 'regard[data]'") from None
    repository, _, configuration = name.removeprefix("hf:").partition(":")
    splits = library.load_dataset(repository, configuration or None)
    train = next((splits[x] for x in _TRAIN if x in splits), None)
    if train is None:
        raise BadData(f"{name} has the splits {', '.join(splits)}, none of them to train on")
    keys = list(train.features)
    if "translation" in keys:
        languages = options.columns or tuple(train[0]["translation"])[:2]
        schema: Schema | None = Schema("pairs", tuple(f"translation.{x}" for x in languages), header=True)
    elif options.columns is not None:
        guess = schema_of_keys([str(x) for x in options.columns], options.kind)
        kind: Kind = options.kind or (guess.kind if guess else "text" if len(options.columns) == 1 else "pairs")
        schema = Schema(kind, options.columns, header=True)
    else:
        schema = schema_of_keys(keys, options.kind)
    if schema is None:
        raise ValueError(f"{name} has the columns {', '.join(keys)}; say which to take: columns=a,b")
    labels = None
    if schema.kind in ("labelled", "images"):
        names = getattr(train.features[str(schema.columns[1])], "names", None)
        labels = None if names is None else tuple(names)
    valid = next((splits[x] for x in _VALID if x in splits), None)
    made = Place("hf", schema.kind, (Path(name),), schema, labels=labels, table=train)
    return made if valid is None else replace(made, valid=replace(made, table=valid))


def _table_rows(place: Place, schema: Schema, report: Report) -> Iterator[Row]:
    names = place.labels or ()
    for number, record in enumerate(place.table, start=1):
        report.n_read += 1
        cells = cells_of(record, schema, place.paths[0], number, report)
        if cells is None:
            continue
        if names and cells[1].isdigit() and int(cells[1]) < len(names):  # such tables number their classes
            cells = (cells[0], names[int(cells[1])])
        yield Row(place.paths[0], number, cells)
