"""``open_source``: whatever examples come from, they end up as two sequences, one to train on and one held out."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..config import DataConfig, Kind
from ..errors import BadData
from .corpora import CORPORA, Corpus, fingerprint, open_corpus
from .examples import Example, ImageExample, Labelled, Pair, Report, Text
from .files import Row
from .images import IdxImages, check_image
from .places import Place, place_of, rows_of
from .splits import Split, firsts, held_out, hold_out_tail, sha256_of

__all__ = ["Source", "open_source"]

_log = logging.getLogger(__name__)
_MOST_LABELS = 10_000


@dataclass(frozen=True)
class Source:
    """Examples to train on and examples held out, and all that is to be said about how they came about."""

    name: str
    kind: Kind
    train: Sequence[Example]
    valid: Sequence[Example]
    split: Split
    labels: tuple[str, ...] | None = None
    report: Report = field(default_factory=Report)
    n_duplicates: int = 0
    """Examples left out because deduplicated asked for it."""
    others: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    """Further held-out sets of an embedded corpus."""

    @property
    def sha256(self) -> str:
        """What a run records to say which data it saw."""
        return hashlib.sha256(f"{self.split.train_sha256}{self.split.valid_sha256}".encode()).hexdigest()


class CorpusView(Sequence[Example]):
    """A stretch of an embedded corpus: examples are made when they are first asked for, and texts then kept."""

    def __init__(self, corpus: Corpus[Any], split: str, size: int) -> None:
        self.corpus, self.split, self.size = corpus, split, size
        self._made: dict[int, Example] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        if index < 0:
            index += self.size
        if not 0 <= index < self.size:
            raise IndexError(f"index={index} is not one of the {self.size} examples of {self.corpus.name}")
        if index in self._made:
            return self._made[index]
        made = _own(self.corpus.example(self.split, index))
        if not isinstance(made, ImageExample):  # those are drawn again: pixels take too much room
            self._made[index] = made
        return made


def open_source(
    source: str | Path | Sequence[str | Path] | Corpus[Any] | DataConfig | None = None, **options: Any
) -> Source:
    """The examples of an embedded corpus, of files or of a Hugging Face dataset; options are the fields of DataConfig.

    Bad lines raise one BadData that lists them, or are left out, counted and reported with bad_lines="skip".
    """
    if isinstance(source, DataConfig):
        config = source.with_(**options)
    elif source is None or isinstance(source, str | Path | Sequence):
        name = {} if source is None else {"source": _written(source)}
        valid = {"valid": _written(options["valid"])} if options.get("valid") is not None else {}
        config = DataConfig(**{**options, **name, **valid})
    else:
        return _from_corpus(source, DataConfig(source=source.name, **options))
    if config.source in CORPORA:
        return _from_corpus(open_corpus(config.source), config)
    report = Report()
    place = place_of(config.source, config)
    valid_place = place.valid if config.valid is None else place_of(config.valid, config)
    if place.idx is not None:
        opened = _from_idx(config, place, valid_place, report)
    else:
        opened = _from_rows(config, place, valid_place, report)
    if report.n_bad:
        if config.bad_lines == "error":
            report.refuse()
        _log.warning("%s", report.text(refused=False))
    if not len(opened.train):
        raise BadData(f"{config.source} has no example to train on")
    return opened


def _written(source: str | Path | Sequence[str | Path]) -> str:
    return str(source) if isinstance(source, str | Path) else ",".join(str(part) for part in source)


# Options about files, which an embedded corpus has none of.
_ABOUT_FILES = {
    *("valid", "format", "columns", "header", "labels", "images", "documents", "valid_fraction", "split_seed"),
    *("deduplicated", "bad_lines", "normalise", "max_chars", "max_pixels", "check_images"),
}


def _from_corpus(corpus: Corpus[Any], config: DataConfig) -> Source:
    if strange := {name for name in _ABOUT_FILES if getattr(config, name) != DataConfig.model_fields[name].default}:
        raise ValueError(f"{min(strange)} means nothing to the embedded corpus {corpus.name}")
    views = {}
    for split in corpus.splits:
        size = corpus.size(split)
        most = config.epoch_examples if split == corpus.splits[0] else config.valid_rows or 2000
        views[split] = CorpusView(corpus, split, most if size is None else size)
    train, valid, *rest = corpus.splits
    first = views[train][0]
    kind: Kind = "pairs" if isinstance(first, Pair) else "text" if isinstance(first, Text) else "captions"
    # All of what is read where it is files, the first examples of each split where it is a grammar.
    content = getattr(corpus, "digest", None) or fingerprint(corpus)
    hashes = [hashlib.sha256(f"{content} {name} {len(views[name])}".encode()).hexdigest() for name in (train, valid)]
    split_of = Split("by composition", *hashes)
    report = Report(n_read=sum(map(len, views.values())))
    for file in getattr(corpus, "undecodable", ()):
        report.bad(file, 1, "cannot be decoded")
    others = {name: views[name] for name in rest}
    return Source(corpus.name, kind, views[train], views[valid], split_of, report=report, others=others)


def _own(example: Any) -> Example:
    """A corpus says more about its examples (alignment, places of objects) than a training set needs."""
    if hasattr(example, "source"):
        return Pair(example.source, example.target)
    if isinstance(example, str) or hasattr(example, "text"):
        return Text(example if isinstance(example, str) else example.text)
    captions = getattr(example, "captions", None) or (example.caption,)
    return ImageExample(example.image, tuple(captions.values() if isinstance(captions, Mapping) else captions))


def _from_rows(config: DataConfig, place: Place, valid_place: Place | None, report: Report) -> Source:
    kind = place.kind
    train, labels = _examples(config, place, report, config.labels)
    valid: list[Example] | None = None
    if valid_place is not None:
        if valid_place.kind != kind:
            raise ValueError(f"{config.source} holds {kind}, but valid={config.valid} holds {valid_place.kind}")
        valid, _ = _examples(config, valid_place, report, labels)
    n_before = len(train) + len(valid or ())
    if config.deduplicated != "no":
        train = [train[place] for place in firsts(train, config.deduplicated)]
        valid = None if valid is None else [valid[place] for place in firsts(valid, config.deduplicated)]
    n_duplicates = n_before - len(train) - len(valid or ())
    how = "files of their own"
    if valid is None:
        train, valid, how = _split(train, config)
    split = Split(how, sha256_of(train), sha256_of(valid))
    return Source(config.source, kind, train, valid, split, labels, report, n_duplicates)


def _split(examples: list[Example], config: DataConfig) -> tuple[list[Example], list[Example], str]:
    if config.valid_fraction == 0 and config.valid_rows is None:
        return examples, [], "nothing held out"
    match examples:
        case [Text(text)]:
            head, tail = hold_out_tail(text, config.valid_fraction)
            return [Text(head)], [Text(tail)], f"the last {config.valid_fraction:g} of the text"
    out = held_out(examples, config)
    train = [x for x, held in zip(examples, out, strict=True) if not held]
    valid = [x for x, held in zip(examples, out, strict=True) if held]
    return train, valid, f"by hash of the source side, {_share(config)}"


def _share(config: DataConfig) -> str:
    rows, fraction = config.valid_rows, config.valid_fraction
    return f"{f'valid_fraction={fraction:g}' if rows is None else f'valid_rows={rows}'}, split_seed={config.split_seed}"


def _examples(
    config: DataConfig, place: Place, report: Report, labels: tuple[str, ...] | None
) -> tuple[list[Example], tuple[str, ...] | None]:
    """The examples of files, and the classes where they have any."""
    read = rows_of(place, report, config)
    if place.kind == "text":
        return [x if isinstance(x, Text) else Text(x.cells[0]) for x in _whole(read, report, config)], None
    rows = cast(Iterator[Row], read)
    if place.kind == "pairs":
        return [Pair(*row.cells) for row in _whole(rows, report, config)], None
    if place.kind == "captions":
        return _captioned(_whole(rows, report, config), place, config, report), None
    held = list(_whole(rows, report, config))
    labels = labels or place.labels or _sorted_labels({row.cells[1] for row in held})
    number = {name: index for index, name in enumerate(labels)}
    known = []
    for row in held:
        if row.cells[1] in number:
            known.append(row)
        else:
            report.bad(row.file, row.line, "unknown label", f"{row.cells[1]!r} is none of {', '.join(labels[:20])}")
    if place.kind == "labelled":
        return [Labelled(row.cells[0], number[row.cells[1]]) for row in known], labels
    good = _good_images(known, place, config, report)
    return [ImageExample(image, label=number[row.cells[1]]) for row, image in good], labels


def _whole(rows: Iterable[Any], report: Report, config: DataConfig) -> Iterator[Any]:
    """Rows whose every cell is a text that can be used; the lines of documents were looked at when they were read."""
    for row in rows:
        if not isinstance(row, Row):
            yield row
            continue
        faults = [(place, fault) for place, cell in enumerate(row.cells, 1) if (fault := _fault(cell, config))]
        if faults:
            place, fault = faults[0]
            report.bad(row.file, row.line, fault, f"column {place} of {len(row.cells)}")
            continue
        normal = tuple(_normal(cell, config) for cell in row.cells)
        report.n_normalised += normal != row.cells
        yield Row(row.file, row.line, normal)


def _fault(cell: Any, config: DataConfig) -> str | None:
    """What is wrong with a cell. JSON can write half a character, and quoted CSV a very long text, past the reader."""
    for text in cell if isinstance(cell, tuple) else (cell,):
        if isinstance(text, str) and not text.strip():
            return "empty"
        if isinstance(text, str) and len(text) > config.max_chars:
            return "text too long"
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            return "half of a surrogate pair"
    return "empty" if cell == () else None


def _normal(cell: Any, config: DataConfig) -> Any:
    if isinstance(cell, tuple):
        return tuple(_normal(text, config) for text in cell)
    plain = not isinstance(cell, str) or config.normalise == "none" or cell.isascii()
    return cell if plain else unicodedata.normalize("NFC", cell)


def _captioned(rows: Iterable[Row], place: Place, config: DataConfig, report: Report) -> list[Example]:
    """One example for each image, with all its captions in their order."""
    captions: dict[Any, list[str]] = {}
    for row, image in _good_images(rows, place, config, report):
        caption = row.cells[1]
        captions.setdefault(image, []).extend([caption] if isinstance(caption, str) else caption)
    return [ImageExample(image, tuple(texts)) for image, texts in captions.items()]


def _good_images(rows: Iterable[Row], place: Place, config: DataConfig, report: Report) -> Iterator[tuple[Row, Any]]:
    faults: dict[str, str | None] = {}
    root = place.images.resolve() if place.images is not None else None
    for row in rows:
        name = row.cells[0]
        if root is None or not isinstance(name, str):
            yield row, name
            continue
        if name not in faults:
            inside = (root / name).resolve().is_relative_to(root)
            fault = check_image(root / name, config.max_pixels, config.check_images) if inside else "outside its folder"
            faults[name] = fault
        if (fault := faults[name]) is not None:
            report.bad(row.file, row.line, "unusable image", f"{name} {fault}")
        else:
            yield row, root / name


def _sorted_labels(found: set[str]) -> tuple[str, ...]:
    if len(found) > _MOST_LABELS:
        raise ValueError(f"the label column has {len(found):,} different values, so it is not one of labels")
    numeric = all(name.lstrip("-").isdigit() for name in found)
    key: Callable[[str], Any] = int if numeric else str
    return tuple(sorted(found, key=key))


def _from_idx(config: DataConfig, place: Place, valid_place: Place | None, report: Report) -> Source:
    assert place.idx is not None
    images, numbers = place.idx
    report.n_read += len(images)
    n_classes = int(numbers.max(initial=0)) + 1
    labels = config.labels or tuple(map(str, range(n_classes)))
    if n_classes > len(labels):
        raise BadData(f"{config.source} has the label {n_classes - 1}, but labels names only {len(labels)}")
    everything = _distinct(IdxImages(images, numbers), config)
    n_duplicates = len(images) - len(everything)
    if valid_place is not None and valid_place.idx is not None:
        own = IdxImages(*valid_place.idx)
        train, valid, how = everything, _distinct(own, config), "files of their own"
        report.n_read += len(own)
        n_duplicates += len(own) - len(valid)
    else:
        out = held_out(everything, config)
        train, valid = (IdxImages(images, numbers, everything.rows[side]) for side in (~out, out))
        how = f"by hash of the pixels, {_share(config)}"
    split = Split(how, sha256_of(train), sha256_of(valid))
    return Source(config.source, "images", train, valid, split, labels, report, n_duplicates)


def _distinct(examples: IdxImages, config: DataConfig) -> IdxImages:
    if config.deduplicated == "no":
        return examples
    return IdxImages(
        examples.images, examples.labels, np.asarray(firsts(examples, config.deduplicated), dtype=np.int64)
    )
