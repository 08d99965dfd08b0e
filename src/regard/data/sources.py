"""``open_source``: the examples of a corpus, of files or of a dataset, split into training and held-out sequences."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import DataConfig, Kind
from ..errors import BadData
from ..foundation.language import localise
from .corpora import CORPORA, Corpus, fingerprint, open_corpus
from .example_files import ExampleFile, ExampleWriter, content_key, read_source, write_source
from .examples import (
    Example,
    ImageExample,
    Label,
    Labelled,
    Pair,
    Question,
    ReadReport,
    Tagged,
    Text,
    Triplet,
    chat_of,
    preference_of,
)
from .images import IdxImages, check_image, find_image
from .source_files import SourceFiles, find_source_files, read_rows
from .splits import Split, first_occurrences, select, sha256_of, split_examples
from .table_files import Row, Schema, read_documents

_log = logging.getLogger(__name__)
_MAX_LABELS = 10_000
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """Training and held-out examples with their split, class names and read report."""

    name: str
    kind: Kind
    train: Sequence[Example]
    valid: Sequence[Example]
    split: Split
    labels: tuple[str, ...] | None = None
    report: ReadReport = field(default_factory=ReadReport)
    n_duplicates: int = 0  # number of examples removed by the option deduplicated
    others: Mapping[str, Sequence[Example]] = field(default_factory=dict)  # further held-out splits of a corpus
    schema: Schema | None = None  # columns of a table
    kind_implied: bool = False  # whether the kind was inferred from the task instead of the table

    @property
    def sha256(self) -> str:
        """The hash that a run records to identify its data."""
        return hashlib.sha256(f"{self.split.train_sha256}{self.split.valid_sha256}".encode()).hexdigest()


class CorpusView(Sequence[Example]):
    """The first ``size`` examples of a corpus split, generated on first access; texts are then cached."""

    def __init__(self, corpus: Corpus[Any], split: str, size: int) -> None:
        self.corpus, self.split, self.size = corpus, split, size
        self._cache: dict[int, Example] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        if index < 0:
            index += self.size
        if not 0 <= index < self.size:
            raise IndexError(f"index={index} is not one of the {self.size} examples of {self.corpus.name}")
        if index not in self._cache:
            example = _to_example(self.corpus.example(self.split, index))
            if isinstance(example, ImageExample):  # drawn again on every access: pixels take too much memory to cache
                return example
            self._cache[index] = example
        return self._cache[index]


def open_source(
    source: str | Path | Sequence[str | Path] | Corpus[Any] | DataConfig | None = None, **options: Any
) -> Source:
    """Open an embedded corpus, files or a Hugging Face dataset; ``options`` are the fields of DataConfig.

    Bad lines raise one BadData that lists them; with bad_lines="skip" they are left out, counted and reported.
    """
    if isinstance(source, DataConfig):
        config = source.with_(**options)
    elif source is None or isinstance(source, str | Path | Sequence):
        config = DataConfig(**(options if source is None else {**options, "source": source}))
    else:
        return _load_corpus(source, DataConfig(source=source.name, **options))
    if config.source in CORPORA:
        return _load_corpus(open_corpus(config.source), config)
    files = find_source_files(config.source, config)
    valid_files = files.valid if config.valid is None else find_source_files(config.valid, config)
    both = (files.kind, None if valid_files is None else valid_files.kind)
    if config.valid is not None and both in (("labelled", "pairs"), ("images", "captions")):
        # A few rows do not show that a column holds classes. Its order is that of the training table.
        named = files.schema is None or not all(isinstance(x, int) for x in files.schema.columns)
        columns = config.columns if named or files.schema is None else files.schema.columns
        valid_files = find_source_files(config.valid, config.with_(kind=files.kind, columns=columns))
    key = _cache_key(config, files, valid_files)
    opened = None if key is None else _from_cache(key, config, files)
    if opened is None:
        opened = _load_files(config, files, valid_files, ReadReport())
        report = opened.report
        if report.n_bad and config.bad_lines == "error":
            raise BadData(report.to_text(), tuple(report.first), report.n_bad)
        if not len(opened.train):
            raise BadData(f"{config.source} has no example to train on")
        if key is not None:
            opened = _to_cache(key, opened)
    if opened.report.n_bad:
        _log.warning("%s", localise(opened.report.to_text(refused=False)))
    if opened.split.train_sha256 == opened.split.valid_sha256:
        _log.warning("%s", localise(f"{config.source}: the held-out examples are the training examples themselves"))
    for file, encoding in opened.report.encodings.items():
        _log.warning("%s", localise(f"{file} is read as {encoding.upper()}; data.encoding=… sets another encoding"))
    return opened


def _cache_key(config: DataConfig, files: SourceFiles, valid_files: SourceFiles | None) -> str | None:
    """The key under which a large source of texts is cached; None for any other source."""
    parts = [part for part in (files, valid_files) if part is not None]
    if any(part.form in ("hf", "idx", "folder") or part.kind not in ("text", "pairs", "labelled") for part in parts):
        return None
    if config.problem_type != "single_label":
        return None
    defaults = DataConfig()  # options at their defaults are left out, so that a new option does not change old keys
    names = [
        name for name in (*_FILE_OPTIONS, "kind", "valid_rows") if getattr(config, name) != getattr(defaults, name)
    ]
    reading: dict[str, Any] = {name: getattr(config, name) for name in names if name != "valid"}
    tables = [table for part in parts for table in part.tables or (part,)]
    reading["files"] = [(table.form, table.kind, str(table.schema)) for table in tables]
    reading["n_held_out"] = 0 if valid_files is None else len(valid_files.paths)
    return content_key([path for part in parts for path in part.paths], reading)


def _to_cache(key: str, source: Source) -> Source:
    """Cache a source and return it with its examples read from the cache, so that its temporary file is freed."""
    assert isinstance(source.train, ExampleFile) and isinstance(source.valid, ExampleFile)
    about = {"labels": source.labels, "split": source.split.to_dict(), "n_duplicates": source.n_duplicates}
    write_source(key, about, source.train, source.valid, source.report)
    cached = read_source(key)
    return source if cached is None else replace(source, train=cached[1], valid=cached[2])


def _from_cache(key: str, config: DataConfig, files: SourceFiles) -> Source | None:
    if (cached := read_source(key)) is None:
        return None
    about, train, valid, report = cached
    labels = None if about["labels"] is None else tuple(about["labels"])
    split = Split(**about["split"])
    n_duplicates = about["n_duplicates"]
    return Source(config.source, files.kind, train, valid, split, labels, report, n_duplicates, schema=files.schema)


# Options that apply to files only, not to an embedded corpus.
_FILE_OPTIONS = {
    *("valid", "format", "columns", "header", "encoding", "labels", "images", "documents", "valid_fraction"),
    *("split_seed", "problem_type", "deduplicated", "bad_lines", "normalise", "max_chars", "max_pixels"),
    "check_images",
}


def _load_corpus(corpus: Corpus[Any], config: DataConfig) -> Source:
    changed = {name for name in _FILE_OPTIONS if getattr(config, name) != DataConfig.model_fields[name].default}
    if changed:
        raise ValueError(f"{min(changed)} does not apply to the embedded corpus {corpus.name}")
    train, valid, *rest = corpus.splits
    n_valid = config.valid_rows if isinstance(config.valid_rows, int) else 2000
    views = {}
    for split in corpus.splits:
        size = corpus.size(split)
        if size is None:  # an endless split
            size = config.epoch_examples if split == train else n_valid
        views[split] = CorpusView(corpus, split, size)
    first = views[train][0]
    kind: Kind = "pairs" if isinstance(first, Pair) else "text" if isinstance(first, Text) else "captions"
    # A corpus of files has a digest of all of them; a generated one is identified by the first examples of each split.
    content = getattr(corpus, "digest", None) or fingerprint(corpus)
    hashes = [hashlib.sha256(f"{content} {name} {len(views[name])}".encode()).hexdigest() for name in (train, valid)]
    split_of = Split("by composition", *hashes)
    report = ReadReport(n_read=sum(map(len, views.values())))
    for file in getattr(corpus, "undecodable", ()):
        report.add_bad(file, 1, "cannot be decoded")
    others = {name: views[name] for name in rest}
    return Source(corpus.name, kind, views[train], views[valid], split_of, report=report, others=others)


def _to_example(example: Any) -> Example:
    """Convert an example of a corpus, dropping what training does not need (alignment, boxes of objects)."""
    if hasattr(example, "source"):
        return Pair(example.source, example.target)
    if isinstance(example, str) or hasattr(example, "text"):
        return Text(example if isinstance(example, str) else example.text)
    captions = getattr(example, "captions", None) or (example.caption,)
    return ImageExample(example.image, tuple(captions.values() if isinstance(captions, Mapping) else captions))


def _load_files(config: DataConfig, files: SourceFiles, valid_files: SourceFiles | None, report: ReadReport) -> Source:
    train, labels = _examples(config, files, report, config.labels)
    parts, n_of_first = [train], report.n_of_first
    if valid_files is not None:
        if valid_files.kind != files.kind:
            held_out = config.valid or "its held-out part"
            raise ValueError(f"{config.source} holds {files.kind}, but {held_out} holds {valid_files.kind}")
        parts.append(_examples(config, valid_files, report, labels)[0])
    n_before = sum(map(len, parts))
    if config.deduplicated != "no":
        kept = [first_occurrences(part, config.deduplicated) for part in parts]
        parts = [select(part, indices) for part, indices in zip(parts, kept, strict=True)]
        n_of_first = None if n_of_first is None else int((kept[0] < n_of_first).sum())
    n_duplicates = n_before - sum(map(len, parts))
    if valid_files is None:
        train, valid, how = split_examples(parts[0], config, n_of_first)
    else:
        (train, valid), how = parts, "files of their own"
    split = Split(how, sha256_of(train), sha256_of(valid))
    return Source(config.source, files.kind, train, valid, split, labels, report, n_duplicates, schema=files.schema)


def _examples(
    config: DataConfig, files: SourceFiles, report: ReadReport, labels: tuple[str, ...] | None
) -> tuple[Sequence[Example], tuple[str, ...] | None]:
    """The examples of some files, and the names of their classes if they have any."""
    labels = labels or _normalise(files.labels, config)
    if files.idx is not None:
        images, numbers = files.idx
        report.n_read += len(images)
        n_classes = int(numbers.max(initial=0)) + 1
        labels = labels or tuple(map(str, range(n_classes)))
        if n_classes > len(labels):
            raise BadData(f"{config.source} has the label {n_classes - 1}, but labels names only {len(labels)}")
        return IdxImages(images, numbers), labels
    if files.form == "text":
        return _documents(files, report, config), None
    if files.kind in ("chats", "preferences"):
        return _messages(read_rows(files, report, config), files.kind, report, config), None
    rows = _valid_rows(read_rows(files, report, config), report, config)
    if files.kind == "triplets":
        return [Triplet(*row.cells) for row in rows], None
    if files.kind == "questions":
        questions: list[Example] = []
        for row in rows:  # the passages are a list in the third cell, or all cells from the third on
            passages = row.cells[2] if isinstance(row.cells[2], tuple) else row.cells[2:]
            questions.append(Question(row.cells[0], row.cells[1], passages))
        return questions, None
    if files.kind in ("text", "pairs"):
        writer, n_of_first = ExampleWriter(2 if files.kind == "pairs" else 1), 0
        for row in rows:
            writer.add(*row.cells)
            n_of_first += row.file is files.paths[0]
        report.n_of_first = n_of_first if files.tables else None
        return writer.finish(), None
    if files.kind == "captions":  # one example per image, with all its captions in order
        captions: dict[Any, list[str]] = {}
        for row, image in _usable_images(rows, files, config, report):
            caption = row.cells[1]
            captions.setdefault(image, []).extend([caption] if isinstance(caption, str) else caption)
        return [ImageExample(image, tuple(texts)) for image, texts in captions.items()], None
    if files.kind == "tagged":
        return _read_tags(list(rows), report, labels)
    if config.problem_type != "single_label":
        return _read_other_labels(config, files, list(rows), report, labels)
    return _read_classes(config, files, rows, report, labels)


def _read_classes(
    config: DataConfig, files: SourceFiles, rows: Iterable[Row], report: ReadReport, labels: tuple[str, ...] | None
) -> tuple[Sequence[Example], tuple[str, ...]]:
    """Examples whose last cell is the name of a class, and the names of all classes."""
    seen = {name: number for number, name in enumerate(labels or ())}  # without labels, numbered in order of appearance
    rows = _with_known_labels(rows, seen, labels, report)
    writer = ExampleWriter(len(files.schema.columns) - 1 if files.schema is not None else 1)
    images = []
    if files.kind == "labelled":
        for row in rows:
            writer.add(*row.cells[:-1], label=seen[row.cells[-1]])
    else:
        images = [(image, row.cells[1]) for row, image in _usable_images(rows, files, config, report)]
    order = int if all(name.lstrip("-").isdigit() for name in seen) else str
    labels = labels or tuple(sorted(seen, key=order))
    number = {name: index for index, name in enumerate(labels)}
    if files.kind == "labelled":
        return writer.finish([number[name] for name in seen]), labels
    return [ImageExample(image, label=number[name]) for image, name in images], labels


def _messages(rows: Iterable[Row], kind: Kind, report: ReadReport, config: DataConfig) -> list[Example]:
    """Chats or preferences. In a chat, empty cells are dropped: the input of an instruction may be missing."""
    examples: list[Example] = []
    if kind == "chats":
        rows = (replace(row, cells=tuple(cell for cell in row.cells if cell != "")) for row in rows)
    for row in _valid_rows(rows, report, config):
        try:
            examples.append(chat_of(row.cells) if kind == "chats" else preference_of(row.cells))
        except ValueError as error:
            report.add_bad(row.file, row.line, str(error))
    return examples


def _documents(files: SourceFiles, report: ReadReport, config: DataConfig) -> ExampleFile:
    """The documents of text files, copied line by line, because one may be larger than memory."""
    writer = ExampleWriter()
    for path in files.paths:
        for line in read_documents(path, report, config):
            if line is None:
                writer.end_text()
            else:
                writer.write(line)
    return writer.finish()


def _read_other_labels(
    config: DataConfig, files: SourceFiles, rows: list[Row], report: ReadReport, labels: tuple[str, ...] | None
) -> tuple[list[Example], tuple[str, ...] | None]:
    """Examples whose last cell holds several labels or a number, and the names of all labels."""
    if config.problem_type == "regression":
        labelled, labels = _read_numbers(rows, report), None
    else:
        labelled, labels = _read_label_sets(rows, report, labels)
    if files.kind == "labelled":
        return [Labelled(row.cells[0], label, *row.cells[1:-1]) for row, label in labelled], labels
    label_of = {id(row): label for row, label in labelled}
    usable = _usable_images([row for row, _ in labelled], files, config, report)
    return [ImageExample(image, label=label_of[id(row)]) for row, image in usable], labels


def _read_numbers(rows: Iterable[Row], report: ReadReport) -> list[tuple[Row, Label]]:
    """(row, the number in its last cell); rows without a finite number are bad lines."""
    numbered: list[tuple[Row, Label]] = []
    for row in rows:
        try:
            value = float(row.cells[-1])
        except (ValueError, TypeError):
            value = math.nan
        if math.isfinite(value):
            numbered.append((row, value))
        else:
            report.add_bad(row.file, row.line, "not a number", repr(row.cells[-1])[:80])
    return numbered


def _read_label_sets(
    rows: list[Row], report: ReadReport, labels: tuple[str, ...] | None
) -> tuple[list[tuple[Row, Label]], tuple[str, ...]]:
    """(row, indices of the labels in its last cell) for each row, and the names of all labels."""
    names_of = [_split_labels(row.cells[-1]) for row in rows]
    labels = labels or tuple(sorted({name for names in names_of for name in names}))
    number = {name: index for index, name in enumerate(labels)}
    known: list[tuple[Row, Label]] = []
    for row, names in zip(rows, names_of, strict=True):
        if unknown := [name for name in names if name not in number]:
            _report_unknown(row, unknown[0], labels, report)
        else:
            known.append((row, tuple(sorted({number[name] for name in names}))))
    return known, labels


def _read_tags(
    rows: list[Row], report: ReadReport, labels: tuple[str, ...] | None
) -> tuple[list[Example], tuple[str, ...]]:
    """Sentences with the index of each word's tag, and the names of all tags, O first."""
    labels = labels or tuple(sorted({tag for row in rows for tag in row.cells[1]}, key=lambda tag: (tag != "O", tag)))
    number = {name: index for index, name in enumerate(labels)}
    sentences: list[Example] = []
    for row in rows:
        words, tags = row.cells
        if unknown := [tag for tag in tags if tag not in number]:
            _report_unknown(row, unknown[0], labels, report)
        elif len(words) != len(tags):
            report.add_bad(row.file, row.line, "not one tag per word", f"{len(words)} words, {len(tags)} tags")
        else:
            sentences.append(Tagged(words, tuple(number[tag] for tag in tags)))
    return sentences, labels


def _report_unknown(row: Row, name: str, labels: tuple[str, ...], report: ReadReport) -> None:
    report.add_bad(row.file, row.line, "unknown label", f"{name!r} is not one of {', '.join(labels[:20])}")


def _split_labels(cell: str | tuple[str, ...]) -> tuple[str, ...]:
    """The labels in a cell ``a;b``, ``a|b`` or ``a,b``, or in a JSON list; an empty cell has no labels."""
    parts = re.split("[;|,]", cell) if isinstance(cell, str) else cell
    return tuple(part.strip() for part in parts if part.strip())


def _with_known_labels(
    rows: Iterable[Row], seen: dict[str, int], labels: tuple[str, ...] | None, report: ReadReport
) -> Iterator[Row]:
    """The rows whose label is one of ``labels``. Without ``labels``, all rows; ``seen`` then numbers new labels."""
    for row in rows:
        name = row.cells[-1]
        if isinstance(name, tuple):
            raise ValueError(f"{row.file} has lists of labels; use data.problem_type=multi_label for them")
        if name not in seen and labels:
            _report_unknown(row, name, labels, report)
            continue
        if seen.setdefault(name, len(seen)) >= _MAX_LABELS and not labels:
            raise ValueError(
                f"the label column has over {_MAX_LABELS:,} different values, too many for classes; "
                "use data.problem_type=regression to predict numbers"
            )
        yield row


def _valid_rows(rows: Iterable[Row], report: ReadReport, config: DataConfig) -> Iterator[Row]:
    """The rows without a faulty cell, in NFC unless ``config.normalise`` is "none"."""
    last = -1 if config.problem_type == "multi_label" else None  # an empty set of labels is valid
    for row in rows:
        faults = [_cell_fault(cell, config) for cell in row.cells[:last]]
        if any(faults):
            fault = next(filter(None, faults))
            report.add_bad(row.file, row.line, fault, f"column {faults.index(fault) + 1} of {len(row.cells)}")
            continue
        cells = tuple([_normalise(cell, config) for cell in row.cells])
        if cells != row.cells:
            report.n_normalised += 1
            row = replace(row, cells=cells)
        yield row


def _cell_fault(cell: Any, config: DataConfig) -> str | None:
    """What is wrong with a cell, or None. JSON can escape half of a surrogate pair; an unclosed CSV quote gives a very
    long text."""
    for text in _texts_in(cell):
        if not text.strip():
            return "empty"
        if len(text) > config.max_chars:
            return "text too long"
        if not text.isascii() and _SURROGATE.search(text):
            return "half of a surrogate pair"
    return "empty" if cell == () else None


def _texts_in(cell: Any) -> Iterator[str]:
    """The texts of a cell: a single one, several captions, or those of messages."""
    if isinstance(cell, tuple):
        for part in cell:
            yield from _texts_in(part)
    elif isinstance(cell, str):
        yield cell


def _normalise(cell: Any, config: DataConfig) -> Any:
    if isinstance(cell, tuple):
        return tuple(_normalise(text, config) for text in cell)
    plain = not isinstance(cell, str) or config.normalise == "none" or cell.isascii()
    return cell if plain else unicodedata.normalize("NFC", cell)


def _usable_images(
    rows: Iterable[Row], files: SourceFiles, config: DataConfig, report: ReadReport
) -> Iterator[tuple[Row, Any]]:
    """(row, image) of all rows whose image can be read; each file is checked once."""
    images: dict[str, tuple[Path, str | None]] = {}
    root = files.images.resolve() if files.images is not None else None
    for row in rows:
        name = row.cells[0]
        if root is None or not isinstance(name, str):
            yield row, name
            continue
        if name not in images:
            image = find_image(root, name.replace("\0", "?"))
            inside = "\0" not in name and image.resolve().is_relative_to(root)
            fault = check_image(image, config.max_pixels, config.check_images) if inside else "outside its folder"
            images[name] = image, fault
        image, fault = images[name]
        if fault is not None:
            report.add_bad(row.file, row.line, "unusable image", f"{name} {fault}")
        else:
            yield row, image
