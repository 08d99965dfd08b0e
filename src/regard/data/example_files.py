"""Pairs, texts and labelled texts as UTF-8 in one file; only the start of each text is kept in memory.

Five million pairs of Python strings take gigabytes; as bytes on disk, read on access, they take almost nothing. A small
file stays in memory. While it is being written, a larger one is an unnamed temporary file that ends with the process.

Reading, checking and splitting five million lines takes minutes, hashing them takes a second: large sources are cached
with their split and report. Each combination of content and options has a folder, which may be deleted at any time.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import IO, Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import BadLine
from ..foundation.files import cache_folder, replace_directory, write_atomic
from ..foundation.jsonio import to_json
from .examples import Example, Labelled, Pair, ReadReport, Text

_IN_MEMORY = 1 << 24  # bytes of text up to which a file stays in memory
_PART = 1 << 20  # bytes read at a time
_ROWS = 4096  # rows read at a time


class ExampleFile(Sequence[Example]):
    """The examples at ``rows`` of a file: Labelled if it has labels, else Pair or Text by ``n_texts``."""

    def __init__(
        self,
        file: IO[bytes],
        starts: NDArray[np.int64],
        n_texts: int = 1,
        labels: NDArray[np.int32] | None = None,
        rows: NDArray[np.integer] | None = None,
        lock: Lock | None = None,
    ) -> None:
        self._file, self._starts, self._n_texts, self._labels = file, starts, n_texts, labels
        self._rows = np.arange((len(starts) - 1) // n_texts, dtype=np.int32) if rows is None else rows
        self._lock = lock or Lock()  # seek and read must not interleave: batches are prepared in another thread

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return list(self.select(np.arange(len(self))[index]))
        row, n = int(self._rows[index]), self._n_texts
        bounds = self._starts[row * n : (row + 1) * n + 1].tolist()
        return self._example(row, self._read(bounds[0], bounds[-1]), bounds[0], bounds)

    def __iter__(self) -> Iterator[Example]:
        n = self._n_texts
        for first in range(0, len(self._rows), _ROWS):
            rows = self._rows[first : first + _ROWS].tolist()
            low, high = min(rows), max(rows) + 1
            bounds = self._starts[low * n : high * n + 1].tolist()
            if high - low > 4 * len(rows) or bounds[-1] - bounds[0] > 16 * _PART:  # scattered rows, or long texts
                yield from (self[index] for index in range(first, first + len(rows)))
                continue
            raw = self._read(bounds[0], bounds[-1])
            for row in rows:
                yield self._example(row, raw, bounds[0], bounds[(row - low) * n : (row - low + 1) * n + 1])

    def _read(self, start: int, end: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start)

    def _example(self, row: int, raw: bytes, offset: int, bounds: list[int]) -> Example:
        """Decode a row: ``bounds`` delimit its texts in the file, ``raw`` is the file's content from ``offset`` on."""
        first = str(raw[bounds[0] - offset : bounds[1] - offset], "utf-8", "surrogatepass")
        second = None
        if self._n_texts == 2:
            second = str(raw[bounds[1] - offset : bounds[2] - offset], "utf-8", "surrogatepass")
        if self._labels is not None:
            return Labelled(first, int(self._labels[row]), second)
        return Text(first) if second is None else Pair(first, second)

    def select(self, indices: NDArray[np.integer]) -> ExampleFile:
        """A view of the examples at ``indices``, in that order."""
        return ExampleFile(self._file, self._starts, self._n_texts, self._labels, self._rows[indices], self._lock)

    @property
    def holds_documents(self) -> bool:
        """Whether the examples are Texts."""
        return self._n_texts == 1 and self._labels is None

    @property
    def labels(self) -> NDArray[np.int32] | None:
        """(n,) class index of each example; None if they have no labels."""
        return None if self._labels is None else self._labels[self._rows]

    @property
    def n_bytes(self) -> int:
        """Total size of the texts in bytes."""
        first = self._rows.astype(np.int64) * self._n_texts
        return int((self._starts[first + self._n_texts] - self._starts[first]).sum())

    @property
    def n_texts(self) -> int:
        """Number of texts per example."""
        return self._n_texts

    def save(self, path: Path) -> None:
        """Write the examples to PATH.texts, PATH.starts and, if they have labels, PATH.labels."""
        n, end = self._n_texts, 0
        with _beside(path, "texts").open("wb") as texts, _beside(path, "starts").open("wb") as starts:
            starts.write(np.zeros(1, dtype="<i8").tobytes())
            for first in range(0, len(self._rows), _ROWS):
                rows = self._rows[first : first + _ROWS].astype(np.int64)
                indices = (rows[:, None] * n + np.arange(n)).reshape(-1)
                ends = end + np.cumsum(self._starts[indices + 1] - self._starts[indices])
                starts.write(ends.astype("<i8").tobytes())
                end = int(ends[-1])
                for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):  # runs of consecutive rows
                    start, stop = (int(self._starts[row * n]) for row in (run[0], run[-1] + 1))
                    for offset in range(start, stop, _PART):
                        texts.write(self._read(offset, min(offset + _PART, stop)))
        if (labels := self.labels) is not None:
            _beside(path, "labels").write_bytes(labels.astype("<i4").tobytes())

    @classmethod
    def open(cls, path: Path, n_texts: int) -> ExampleFile:
        """Open the files that ``save`` wrote; raises ValueError if they do not match."""
        texts, label_file = _beside(path, "texts"), _beside(path, "labels")
        starts = np.memmap(_beside(path, "starts"), dtype="<i8", mode="r")
        labels = np.fromfile(label_file, dtype="<i4") if label_file.exists() else None
        if texts.stat().st_size != starts[-1] or (len(starts) - 1) % n_texts:
            raise ValueError(f"{path} is damaged")
        return cls(texts.open("rb"), starts, n_texts, labels)

    def parts(self, index: int) -> Iterator[str]:
        """The text of a document, one part at a time, because it may be larger than memory."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        return (decoder.decode(raw) for _, raw in self._raw_parts(index))

    def _raw_parts(self, index: int) -> Iterator[tuple[int, bytes]]:
        """(offset in the file, bytes) of each part of a document."""
        row = int(self._rows[index])
        start, end = self._starts[row : row + 2].tolist()
        return ((offset, self._read(offset, min(offset + _PART, end))) for offset in range(start, end, _PART))

    def n_characters(self, index: int) -> int:
        """Number of characters of a document."""
        return sum(len(_first_bytes(raw)) for _, raw in self._raw_parts(index))

    def split_document(self, index: int, n_characters: int) -> tuple[ExampleFile, ExampleFile]:
        """The first ``n_characters`` of a document and the rest, each as a file of one document."""
        row, remaining = int(self._rows[index]), n_characters
        start, end = self._starts[row : row + 2].tolist()
        cut = end
        for offset, raw in self._raw_parts(index):
            characters = _first_bytes(raw)
            if remaining < len(characters):
                cut = offset + int(characters[remaining])
                break
            remaining -= len(characters)
        head, tail = (np.asarray(bounds, dtype=np.int64) for bounds in ((start, cut), (cut, end)))
        return ExampleFile(self._file, head, lock=self._lock), ExampleFile(self._file, tail, lock=self._lock)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _first_bytes(raw: bytes) -> NDArray[np.int64]:
    """Offsets of the first byte of each UTF-8 character; continuation bytes are 10xxxxxx."""
    return np.flatnonzero((np.frombuffer(raw, dtype=np.uint8) & 0xC0) != 0x80)


class ExampleWriter:
    """Collects examples as they are read; ``finish`` returns them as an ExampleFile."""

    def __init__(self, n_texts: int = 1) -> None:
        self._file: IO[bytes] = io.BytesIO()
        self._starts, self._labels = array("q", [0]), array("i")
        self._end, self._n_texts = 0, n_texts

    def add(self, *texts: str, label: int | None = None) -> None:
        """Add one example of ``n_texts`` texts."""
        for text in texts:
            self.write(text)
            self.end_text()
        if label is not None:
            self._labels.append(label)

    def write(self, part: str) -> None:
        """Append to the current text; ``end_text`` completes it."""
        self._end += self._file.write(part.encode("utf-8", "surrogatepass"))
        if self._end > _IN_MEMORY and isinstance(self._file, io.BytesIO):
            self._move_to_disk(self._file.getvalue())

    def end_text(self) -> None:
        self._starts.append(self._end)

    def _move_to_disk(self, written: bytes) -> None:
        folder = cache_folder() / "examples"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder if folder.is_dir() else None)  # noqa: SIM115 — stays open
        self._file.write(written)

    def finish(self, renumbered: Sequence[int] | None = None) -> ExampleFile:
        """The examples written so far; label n becomes ``renumbered[n]``."""
        self._file.flush()
        starts = np.frombuffer(self._starts, dtype=np.int64)
        labels = None
        if self._labels:
            labels = np.frombuffer(self._labels, dtype=np.int32)
            labels = labels if renumbered is None else np.asarray(renumbered, dtype=np.int32)[labels]
        return ExampleFile(self._file, starts, self._n_texts, labels)


def document_parts(examples: Sequence[Example]) -> Iterator[tuple[str, bool]]:
    """The texts of Text examples in parts that fit in memory: (part, whether it ends its document)."""
    for index in range(len(examples)):
        if isinstance(examples, ExampleFile):
            parts = examples.parts(index)
        else:
            parts = iter((cast(Text, examples[index]).text,))
        before = next(parts, "")
        for part in parts:
            yield before, False
            before = part
        yield before, True


# ------------------------------------------------------------------------------------- a cache of large sources


_VERSION = 2  # increase it when a change makes the same file be read or split differently
_HEADER = "source.json"
LARGE = 1 << 26  # bytes of files or training text from which the result is cached for later runs


def content_key(paths: Sequence[Path], reading: Mapping[str, Any]) -> str | None:
    """A hash of the files' content and of the options they are read with; None if they are too small to cache."""
    if sum(path.stat().st_size for path in paths) < LARGE:
        return None
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    about = json.dumps([_VERSION, digests, dict(reading)], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def read_source(key: str) -> tuple[dict[str, Any], ExampleFile, ExampleFile, ReadReport] | None:
    """(``about`` of ``write_source``, training examples, held-out examples, report); None if it is not cached."""
    folder = _folder(key)
    try:
        header = json.loads((folder / _HEADER).read_bytes())
        fields = header.pop("report")
        fields |= {"first": [BadLine(**line) for line in fields["first"]], "reasons": Counter(fields["reasons"])}
        report = ReadReport(**fields)
        train, valid = (ExampleFile.open(folder / side, header["n_texts"]) for side in ("train", "valid"))
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: the source files are read again
        return None
    return header, train, valid, report


def write_source(
    key: str, about: Mapping[str, Any], train: ExampleFile, valid: ExampleFile, report: ReadReport
) -> None:
    """Store a source. A full or read-only disk is not an error."""
    with suppress(OSError), replace_directory(_folder(key)) as folder:
        train.save(folder / "train")
        valid.save(folder / "valid")
        lines = [asdict(line) for line in report.first]
        fields = {**vars(report), "first": lines, "reasons": dict(report.reasons)}
        header = {**about, "n_texts": train.n_texts, "report": fields}
        write_atomic(folder / _HEADER, to_json(header))


def _folder(key: str) -> Path:
    return cache_folder() / "examples" / key
