"""Finding the files of a source and detecting their content: one file, several, a folder with its parts, or hf:name.

Format and columns are detected from a file's name and its first lines; an option overrides each guess.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig, Format, Kind
from ..errors import BadData, UsageError
from ..foundation.checks import did_you_mean
from ..foundation.plugins import import_optional
from . import table_files
from .corpora import CORPORA
from .examples import ReadReport
from .images import read_idx
from .table_files import Row, Schema, read_lines, stem_of, suffix_of

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS: dict[str, Format] = {
    **{".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"},
    **{".json": "captions", ".conll": "conll", ".conllu": "conll", ".iob": "conll", ".bio": "conll"},
}
_TABLES = (".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet")
_SAMPLE_ROWS = 1000
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "source": ("source", "src", "input", "english", "en", "원문"),
    "target": ("target", "tgt", "output", "translation", "번역", "번역문"),
    "text": ("text", "document", "sentence", "review", "content", "문장", "본문", "리뷰"),
    "label": ("label", "class", "sentiment", "category", "labels", "레이블", "라벨"),
    "image": ("image", "file", "filename", "file_name", "path"),
    "caption": ("caption", "captions", "캡션"),
    "words": ("tokens", "words"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "prompt": ("prompt", "instruction", "question", "질문"),
    "input": ("input",),
    "answer": ("completion", "answer", "response", "output", "답", "답변"),
    "messages": ("messages", "conversations"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "anchor": ("anchor", "query"),
    "positive": ("positive", "pos"),
    "negative": ("negative", "neg"),
    "question": ("question", "질문"),
    "passages": ("passages", "contexts"),
}
_LANGUAGE_NAMES = """
ar bg bn cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk ko lt lv mk ml mn mr ms my nb ne
nl nn no pa pl pt ro ru sk sl sq sr sv sw ta te th tl tr uk ur uz vi zh arabic chinese czech danish dutch english
finnish french german greek hebrew hindi hungarian indonesian italian japanese korean norwegian polish portuguese
romanian russian spanish swedish thai turkish ukrainian vietnamese 영어 한국어 일본어 중국어
"""
_COLUMN_NAME = re.compile(r"(?=.{1,40}$)[^\W\d][\w-]*([ .][\w-]+)?")
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")
_PAIR_NAMES = (  # usual column names of two texts with one label
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2")),
    ("text_a", "text_b"),
)
# The columns of each kind; of several alternatives, the first whose columns all exist is used.
_COLUMNS_OF: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "captions": (("image", "caption"),),
    "images": (("image", "label"),),
    "labelled": (("text", "label"),),
    "questions": (("question", "answer", "passages"),),
    "preferences": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "chats": (("messages",), ("prompt", "input", "answer"), ("prompt", "answer")),
    "triplets": (("anchor", "positive", "negative"),),
    "pairs": (("anchor", "positive"), ("source", "target")),
    "text": (("text",),),
    "tagged": (("words", "tags"),),
}


def detect_format(path: Path, options: DataConfig) -> Format:
    """The format by suffix. With .txt or an unknown suffix, tsv if all the first lines have the same number of tabs."""
    if (by_suffix := FORMATS.get(suffix_of(path))) is not None:
        return by_suffix
    if "idx3-ubyte" in path.name or "idx4-ubyte" in path.name:
        return "idx"
    lines = [line for _, line in islice(read_lines(path, ReadReport(), options), 50) if line]
    tabs = {line.count("\t") for line in lines}
    return "tsv" if len(tabs) == 1 and tabs != {0} else "text"


def detect_schema(path: Path, form: Format, options: DataConfig) -> Schema:
    """Detect the kind of a table and its columns; ValueError if the options must say which columns to use."""
    if form in ("jsonl", "json", "parquet"):
        return _object_schema(path, form, options)
    records = islice(table_files.table_rows(path, form, ReadReport(), options), _SAMPLE_ROWS)
    rows = [cells for _, cells in records if cells is not None]
    if not rows:
        return Schema(options.kind or "pairs", options.columns or (0, 1), header=False, width=None)
    named = any(isinstance(column, str) for column in options.columns or ())
    keys = [cell.strip() for cell in rows[0]]
    guess = None if options.columns is not None else schema_of_keys(keys, options.kind)
    header = options.header if options.header is not None else named or has_header(rows, options.kind)
    if header and guess is not None:
        return guess
    body = rows[1:] if header else rows
    if options.columns is not None:
        kind = options.kind or _guess_kind(body, keys, options.columns, header, options.labels)
        return Schema(kind, options.columns, header)
    return _guess_columns(path, keys, body, header, options)


def _guess_columns(path: Path, keys: list[str], body: list[list[str]], header: bool, options: DataConfig) -> Schema:
    """The schema of a table of one or two columns, from its content; ValueError if it has more."""
    width, needed = len(keys), _COLUMNS_OF[options.kind][-1] if options.kind else ()
    if width == 1 and options.kind in (None, "text"):
        return Schema("text", (0,), header, 1)
    if width != 2 or len(needed) not in (0, 2):
        if header:
            roles = " and ".join(needed) or "to be used"
            hint = f"columns={_suggest_columns(keys, options.kind or 'pairs')}"
            raise ValueError(f"{path} has the columns {', '.join(keys)}; say which are {roles}: {hint}")
        hint = f"columns={','.join(map(str, range(len(needed) or 2)))}"
        raise ValueError(f"{path} has {width} columns without names; say which to use: {hint}")
    kind = options.kind or _guess_kind(body, keys, (0, 1), header, options.labels, any_order=True)
    label_first = kind == "labelled" and _are_classes([row[0] for row in body if len(row) == 2], options.labels)
    columns = (1, 0) if label_first else (0, 1)
    return Schema(kind, columns, header, 2, tuple(keys) if header else (), guessed=options.kind is None)


def has_header(rows: Sequence[Sequence[str]], kind: Kind | None = None) -> bool:
    """Whether the first row names the columns.

    It does if its cells are known column names or languages, or if they look like names and some column below is all
    numbers or classes. None of them may occur again in its column.
    """
    names = [cell.strip() for cell in rows[0]] if rows else []
    if len(names) < 2:
        texts = (*COLUMN_NAMES["text"], *COLUMN_NAMES["source"])
        return len(names) == 1 and unicodedata.normalize("NFC", names[0]).lower() in texts and len(rows) > 1
    if schema_of_keys(names, kind) is not None or schema_of_keys(names, None) is not None:
        return True
    columns = [[row[index].strip() for row in rows[1:] if len(row) == len(names)] for index in range(len(names))]
    if len(set(names)) < len(names) or any(not x or x in cells for x, cells in zip(names, columns, strict=True)):
        return False
    known = {*_LANGUAGE_NAMES.split()}.union(*COLUMN_NAMES.values())
    if all(name.lower().replace("_", "-").split("-")[0] in known for name in names):
        return True
    return all(_COLUMN_NAME.fullmatch(name) for name in names) and any(
        (len(cells) >= 2 and all(_NUMBER.fullmatch(cell) for cell in cells)) or _are_classes(cells) for cells in columns
    )


def schema_of_keys(keys: list[str], kind: Kind | None) -> Schema | None:
    """The schema that these column names suggest; None if they are not known names."""
    lower = {key.lower(): key for key in keys}
    label = next((lower[name] for name in COLUMN_NAMES["label"] if name in lower), None)
    pair = next(([lower[name] for name in names] for names in _PAIR_NAMES if lower.keys() >= set(names)), None)
    if label is not None and pair is not None and kind in (None, "labelled"):
        return Schema("labelled", (*pair, label), header=True, names=tuple(keys))
    for candidate in _COLUMNS_OF if kind is None else (kind,):
        for parts in _COLUMNS_OF[candidate]:
            matches = [[lower[name] for name in COLUMN_NAMES[role] if name in lower] for role in parts]
            if all(matches):
                # The other columns beside a text column may be its labels.
                guessed = kind is None and candidate == "text" and len(keys) > 1
                columns = tuple(names[0] for names in matches)
                return Schema(candidate, columns, header=True, names=tuple(keys), guessed=guessed)
    return None


def _suggest_columns(keys: list[str], kind: Kind) -> str:
    """The columns with known names for this kind, and the last columns for the rest."""
    known = [next((key for key in keys if key.lower() in COLUMN_NAMES[role]), None) for role in _COLUMNS_OF[kind][-1]]
    rest = iter([key for key in keys if key not in known][-known.count(None) :])
    return ",".join(key or next(rest, "…") for key in known)


def _object_schema(path: Path, form: Format, options: DataConfig) -> Schema:
    records = islice(table_files.object_records(path, form, ReadReport(), options), _SAMPLE_ROWS)
    objects = [record for _, record in records if isinstance(record, dict)]
    keys, both = (list(objects[0]), objects[0].get("translation")) if objects else ([], None)
    sides = [f"translation.{key}" for key in both] if isinstance(both, dict) else []
    keys = sides + [key for key in keys if not sides or key != "translation"]
    if options.columns is not None:
        columns = tuple(keys[x] if isinstance(x, int) and x < len(keys) else x for x in options.columns)
        if form == "parquet":
            _check_columns(path, columns, keys)
        schema = _schema_of_columns(columns, options.kind)
        if options.kind is None and schema.kind == "pairs":
            rows = (table_files.cells_of(record, schema, path, 0, ReadReport()) for record in objects)
            body = [list(cells) for cells in rows if cells is not None]
            kind = _guess_kind(body, list(map(str, columns)), (0, 1), True, options.labels)
            schema = replace(schema, kind=kind, guessed=kind != "pairs")
        return schema
    if len(sides) == 2:
        return Schema("pairs", tuple(sides), header=True)
    if (guess := schema_of_keys(keys, options.kind)) is not None:
        return guess
    if not keys:  # reading the file reports its lines
        return Schema(options.kind or "pairs", ("source", "target"), header=True)
    guess = _guess_columns(path, keys, [[str(x.get(key, "")) for key in keys] for x in objects], True, options)
    return replace(guess, columns=tuple(keys[int(index)] for index in guess.columns))


def _check_columns(name: str | Path, columns: Sequence[str | int], keys: Sequence[str]) -> None:
    """Raise ValueError for a column that a table does not have; of nested ones, the first part counts."""
    roots = {key.split(".")[0] for key in keys}
    if missing := [column for column in columns if str(column).split(".")[0] not in roots]:
        raise ValueError(f"columns has {missing[0]!r}, but {name} has the columns {', '.join(keys)}")


def _schema_of_columns(columns: tuple[str | int, ...], kind: Kind | None) -> Schema:
    if kind is None:
        guess = schema_of_keys([str(column) for column in columns], None)
        default: Kind = "text" if len(columns) == 1 else "pairs"
        kind = default if guess is None else guess.kind
    return Schema(kind, columns, header=True)


def _guess_kind(
    body: list[list[str]],
    keys: list[str],
    columns: tuple[str | int, ...],
    header: bool,
    labels: tuple[str, ...] | None,
    any_order: bool = False,
) -> Kind:
    """Guess the kind of two columns: names of images mean captions or images, a column of classes means labelled, and
    anything else is pairs.

    Columns that the user chose have the label second; with ``any_order`` it may also be first.
    """
    if len(columns) == 1:
        return "text"
    if any(isinstance(x, int) and x >= len(keys) for x in columns):
        return "pairs"  # reading the file reports the missing column
    guess = schema_of_keys([x if isinstance(x, str) else keys[x] for x in columns], None) if header else None
    if guess is not None and not guess.guessed:
        return guess.kind
    indices = [x if isinstance(x, int) else keys.index(x) for x in columns if x in keys or isinstance(x, int)]
    cells = [[row[index] for index in indices] for row in body if len(row) > max(indices, default=0)]
    if len(indices) < 2 or not cells:
        return "pairs"
    first, second = [row[0] for row in cells], [row[1] for row in cells]
    if all(cell.lower().endswith(IMAGE_SUFFIXES) for cell in first[:20]):
        return "images" if _are_classes(second, labels) else "captions"
    return "labelled" if _are_classes(second, labels) or (any_order and _are_classes(first, labels)) else "pairs"


def _are_classes(values: list[str], labels: tuple[str, ...] | None = None) -> bool:
    """Whether the values are ``labels``, or look like classes: one or two words each, and far fewer distinct ones than
    values."""
    distinct = set(values)
    if labels and distinct and distinct <= set(labels):
        return True
    short = all(len(x) <= 40 and len(x.split()) <= 2 for x in distinct)
    return short and len(values) >= 4 and len(distinct) <= min(100, max(2, len(values) // 4))


_TRAIN, _VALID = ("train", "training"), ("valid", "val", "validation", "dev")


@dataclass(frozen=True)
class SourceFiles:
    """Files that belong together, and their format and content."""

    form: Format
    kind: Kind
    paths: tuple[Path, ...] = ()
    schema: Schema | None = None
    images: Path | None = None
    labels: tuple[str, ...] | None = None
    idx: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
    table: Any = None  # the rows of a Hugging Face dataset
    valid: SourceFiles | None = None  # the held-out part, if the source has one
    tables: tuple[SourceFiles, ...] = ()  # several tables of pairs, read one after the other


def find_source_files(name: str, options: DataConfig) -> SourceFiles:
    """Find the files that ``name`` means and detect what they hold, as far as ``options`` does not say."""
    # Three columns are two texts and a label. Label sets and numbers cannot be distinguished from texts.
    is_labelled = options.problem_type != "single_label" or len(options.columns or ()) == 3
    if options.kind is None and is_labelled:
        options = options.with_(kind="labelled")
    if name.startswith("hf:"):
        return _from_hugging_face(name, options)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, options)
    if path.is_file():
        return _from_file(path, options)
    parts = [Path(part.strip()).expanduser() for part in name.split(",")]
    if options.format != "parallel" and all(part.is_file() and suffix_of(part) in _TABLES for part in parts):
        return _from_tables(name, parts, options)
    if len(parts) == 2 and all(part.is_file() for part in parts):
        return SourceFiles("parallel", "pairs", tuple(parts))
    missing = next((part for part in parts if not part.is_file()), path)
    hint = did_you_mean(name, CORPORA) or f"; embedded corpora are {', '.join(CORPORA)}"
    raise UsageError(f"there is no file {missing}{hint}")


def _from_file(path: Path, options: DataConfig) -> SourceFiles:
    form = options.format or detect_format(path, options)
    if form == "captions" and options.format is None:
        form = "captions" if options.kind in (None, "captions") and table_files.holds_captions(path) else "json"
    match form:
        case "text":
            return SourceFiles("text", "text", (path,))
        case "idx":
            return _from_idx(path)
        case "captions":
            return SourceFiles("captions", "captions", (path,), images=_image_folder(path, options))
        case "conll":
            return SourceFiles("conll", "tagged", (path,))
        case "tsv" | "csv" | "jsonl" | "json" | "parquet":
            schema = detect_schema(path, form, options)
            _check_count(path, schema)
            images = _image_folder(path, options) if schema.kind in ("captions", "images") else None
            return SourceFiles(form, schema.kind, (path,), schema, images)
    raise ValueError(f"{path} is a single file, which format={form!r} cannot describe")


def _check_count(path: Path, schema: Schema) -> None:
    """Raise ValueError if the chosen columns are too few or too many for the kind."""
    counts = [len(parts) for parts in _COLUMNS_OF[schema.kind]]
    n, most = len(schema.columns), {"labelled": 3, "questions": 100}.get(schema.kind, max(counts))
    if not min(counts) <= n <= most:
        roles = " and ".join(_COLUMNS_OF[schema.kind][-1])
        raise ValueError(f"columns={','.join(map(str, schema.columns))}: {path} is read for {roles}, not {n} columns")


def _from_tables(name: str, paths: list[Path], options: DataConfig) -> SourceFiles:
    """Several tables of pairs, such as real and back-translated ones, each with its own columns."""
    if options.kind not in (None, "pairs"):
        raise ValueError(f"source={name} names several files, which are read as pairs, not as kind={options.kind}")
    tables = tuple(_from_file(path, options.with_(kind="pairs")) for path in paths)
    return replace(tables[0], paths=tuple(paths), tables=tables)


def _image_folder(path: Path, options: DataConfig) -> Path:
    if options.images is not None:
        folder = Path(options.images).expanduser()
        if not folder.is_dir():
            raise UsageError(f"images={options.images}: there is no folder {folder}")
        return folder
    return path.parent / "images" if (path.parent / "images").is_dir() else path.parent


def _from_folder(path: Path, options: DataConfig) -> SourceFiles:
    """A folder of IDX files, train and valid tables, parallel files with different endings, images by class, or
    documents."""
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if idx := [file for file in files if "idx3-ubyte" in file.name or "idx4-ubyte" in file.name]:
        train, valid = ([file for file in idx if file.name.startswith(names)] for names in (_TRAIN, _VALID))
        if len(train) != 1:
            raise BadData(f"{path} has {len(train)} files train-images-idx3-ubyte; one is needed")
        return replace(_from_idx(train[0]), valid=_from_idx(valid[0]) if valid else None)
    train, valid = ([file for file in files if stem_of(file).lower() in names] for names in (_TRAIN, _VALID))
    if train:
        train_files = _from_parts(path, train, options)
        return replace(train_files, valid=_from_parts(path, valid, options, train_files) if valid else None)
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    classes = [x.name for x in folders if any(file.suffix.lower() in IMAGE_SUFFIXES for file in x.iterdir())]
    if classes and options.kind in (None, "images"):
        return SourceFiles("folder", "images", (path,), images=path, labels=tuple(classes))
    documents = tuple(file for file in files if suffix_of(file) == ".txt")
    if documents:
        return SourceFiles("text", "text", documents)
    raise BadData(f"{path} has neither train files, nor folders of images, nor .txt documents")


def _from_parts(path: Path, files: list[Path], options: DataConfig, like: SourceFiles | None = None) -> SourceFiles:
    """The files of one part of a folder; ``like`` is the training part, whose columns the held-out part shares."""
    tables = [file for file in files if suffix_of(file) in FORMATS]
    if tables or len(files) == 1:
        if like is not None and like.schema is not None:
            options = options.with_(kind=like.kind)
        part = _from_file((tables or files)[0], options)
        if tables and like is not None and part.kind == like.kind:
            return replace(part, schema=like.schema or part.schema)
        return part
    endings = {suffix_of(file).removeprefix("."): file for file in files}
    chosen = options.columns or (tuple(endings) if len(endings) == 2 else None)
    if chosen is None or len(chosen) != 2 or any(str(ending) not in endings for ending in chosen):
        hint = f"say which two: columns={','.join(list(endings)[:2])}"
        raise ValueError(f"{path} has files ending in {', '.join(endings)}, columns={options.columns}; {hint}")
    return SourceFiles("parallel", "pairs", tuple(endings[str(ending)] for ending in chosen))


def _from_idx(images: Path) -> SourceFiles:
    labels = images.with_name(images.name.replace("images-idx3", "labels-idx1").replace("images-idx4", "labels-idx1"))
    if not labels.is_file() or labels == images:
        raise BadData(f"{images} has no labels: there is no file {labels.name} beside it")
    pixels, numbers = read_idx(images), read_idx(labels)
    if numbers.ndim != 1 or pixels.ndim not in (3, 4) or len(pixels) != len(numbers):
        raise BadData(f"{images} has shape {pixels.shape}, but {labels} has {numbers.shape}")
    return SourceFiles("idx", "images", (images, labels), idx=(pixels, numbers))


def read_rows(files: SourceFiles, report: ReadReport, options: DataConfig) -> Iterator[Row]:
    """The rows of any format but text; documents are read by ``read_documents``."""
    if files.tables:
        for table in files.tables:
            yield from read_rows(table, report, options)
        return
    path, schema = files.paths[0], files.schema or Schema(files.kind, ())
    match files.form:
        case "hf":
            yield from _table_rows(files, schema, report)
        case "tsv" | "csv":
            yield from table_files.read_table(path, files.form, schema, report, options)
        case "jsonl" | "json" | "parquet":
            yield from table_files.read_object_rows(path, files.form, schema, report, options)
        case "conll":
            yield from table_files.read_conll(path, report, options)
        case "parallel":
            yield from table_files.read_parallel(files.paths, report, options)
        case "captions":
            yield from table_files.read_caption_json(path, report, options)
        case "folder":  # one subfolder per class
            for label in files.labels or ():
                for number, file in enumerate(sorted((path / label).iterdir()), start=1):
                    if file.suffix.lower() in IMAGE_SUFFIXES:
                        report.n_read += 1
                        yield Row(file, number, (f"{label}/{file.name}", label))


def _from_hugging_face(name: str, options: DataConfig) -> SourceFiles:
    """Load ``hf:name`` or ``hf:name:configuration`` with the ``datasets`` library."""
    repository, _, configuration = name.removeprefix("hf:").partition(":")
    splits = import_optional("datasets", name, "data").load_dataset(repository, configuration or None)
    train, valid = (next((splits[x] for x in names if x in splits), None) for names in (_TRAIN, _VALID))
    if train is None:
        raise BadData(f"{name} has the splits {', '.join(splits)}, but none to train on")
    keys = list(train.features)
    if "translation" in keys:
        languages = options.columns or tuple(train[0]["translation"])[:2]
        schema: Schema | None = Schema("pairs", tuple(f"translation.{x}" for x in languages), header=True)
    elif options.columns is not None:
        schema = _schema_of_columns(options.columns, options.kind)
    else:
        schema = schema_of_keys(keys, options.kind)
    if schema is None:
        raise ValueError(f"{name} has the columns {', '.join(keys)}; say which to use: columns=a,b")
    _check_columns(name, schema.columns, keys)
    has_labels = schema.kind in ("labelled", "images")
    names = getattr(train.features[str(schema.columns[-1])], "names", None) if has_labels else None
    labels = None if names is None else tuple(names)
    files = SourceFiles("hf", schema.kind, (Path(name),), schema, labels=labels, table=train)
    return files if valid is None else replace(files, valid=replace(files, table=valid))


def _table_rows(files: SourceFiles, schema: Schema, report: ReadReport) -> Iterator[Row]:
    names = files.labels or ()
    for number, record in enumerate(files.table, start=1):
        report.n_read += 1
        cells = table_files.cells_of(record, schema, files.paths[0], number, report)
        if cells and names and cells[-1].isdigit() and int(cells[-1]) < len(names):  # an index into the class names
            cells = (*cells[:-1], names[int(cells[-1])])
        if cells:
            yield Row(files.paths[0], number, cells)
