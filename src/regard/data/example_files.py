"""Pairs, texts and labelled texts as UTF-8 in one file, with where each text starts: memory holds only that index.

Five million pairs of Python strings take gigabytes; as bytes in a file, read where they are asked for, next to nothing.
A small file stays in memory. A file that is being read into has no name and ends with the process.
"""

from __future__ import annotations

import codecs
import io
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, cast, overload

import numpy as np
from numpy.typing import NDArray

from ..foundation.files import cache_folder
from .examples import Example, Labelled, Pair, Text

_IN_MEMORY = 1 << 24  # bytes of text that are kept in memory
_PART = 1 << 20  # bytes read at a time
_ROWS = 4096  # rows read at a time


class ExampleFile(Sequence[Example]):
    """The examples at ``rows`` of a file; those with a label are Labelled, others with two texts Pairs."""

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
        self._lock = lock or Lock()  # reading is seeking first, and batches are made in another thread

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
        places = self._starts[row * n : (row + 1) * n + 1].tolist()
        return self._example(row, self._read(places[0], places[-1]), places[0], places)

    def __iter__(self) -> Iterator[Example]:
        for first in range(0, len(self._rows), _ROWS):
            rows, n = self._rows[first : first + _ROWS].tolist(), self._n_texts
            low, high = min(rows), max(rows) + 1
            places = self._starts[low * n : high * n + 1].tolist()
            if high - low > 4 * len(rows) or places[-1] - places[0] > 16 * _PART:  # far apart, or long texts
                yield from (self[index] for index in range(first, first + len(rows)))
                continue
            raw = self._read(places[0], places[-1])
            for row in rows:
                yield self._example(row, raw, places[0], places[(row - low) * n : (row - low + 1) * n + 1])

    def _read(self, start: int, end: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start)

    def _example(self, row: int, raw: bytes, offset: int, places: list[int]) -> Example:
        """The example of a row whose texts lie between ``places`` of the file; ``raw`` begins at ``offset`` of it."""
        first = str(raw[places[0] - offset : places[1] - offset], "utf-8", "surrogatepass")
        second = None
        if self._n_texts == 2:
            second = str(raw[places[1] - offset : places[2] - offset], "utf-8", "surrogatepass")
        if self._labels is not None:
            return Labelled(first, int(self._labels[row]), second)
        return Text(first) if second is None else Pair(first, second)

    def select(self, indices: NDArray[np.integer]) -> ExampleFile:
        """These examples, in this order, of the same file."""
        return ExampleFile(self._file, self._starts, self._n_texts, self._labels, self._rows[indices], self._lock)

    @property
    def holds_documents(self) -> bool:
        """Whether the examples are Texts."""
        return self._n_texts == 1 and self._labels is None

    @property
    def labels(self) -> NDArray[np.int32] | None:
        """(n,) the number of each example's class; None where there are none."""
        return None if self._labels is None else self._labels[self._rows]

    @property
    def n_bytes(self) -> int:
        """Bytes of text in all examples."""
        first = self._rows.astype(np.int64) * self._n_texts
        return int((self._starts[first + self._n_texts] - self._starts[first]).sum())

    @property
    def n_texts(self) -> int:
        """Texts of each example."""
        return self._n_texts

    def save(self, path: Path) -> None:
        """Write the examples to PATH.texts, PATH.starts and, where there are any, PATH.labels."""
        n, end = self._n_texts, 0
        with _beside(path, "texts").open("wb") as texts, _beside(path, "starts").open("wb") as starts:
            starts.write(np.zeros(1, dtype="<i8").tobytes())
            for first in range(0, len(self._rows), _ROWS):
                rows = self._rows[first : first + _ROWS].astype(np.int64)
                places = (rows[:, None] * n + np.arange(n)).reshape(-1)
                ends = end + np.cumsum(self._starts[places + 1] - self._starts[places])
                starts.write(ends.astype("<i8").tobytes())
                end = int(ends[-1])
                for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):  # rows that lie side by side
                    start, stop = (int(self._starts[row * n]) for row in (run[0], run[-1] + 1))
                    for place in range(start, stop, _PART):
                        texts.write(self._read(place, min(place + _PART, stop)))
        if (labels := self.labels) is not None:
            _beside(path, "labels").write_bytes(labels.astype("<i4").tobytes())

    @classmethod
    def open(cls, path: Path, n_texts: int) -> ExampleFile:
        """What ``save`` wrote; ValueError where the files do not belong together."""
        starts, labels = np.memmap(_beside(path, "starts"), dtype="<i8", mode="r"), _beside(path, "labels")
        numbers = np.fromfile(labels, dtype="<i4") if labels.exists() else None
        if _beside(path, "texts").stat().st_size != starts[-1] or (len(starts) - 1) % n_texts:
            raise ValueError(f"{path} is damaged")
        return cls(_beside(path, "texts").open("rb"), starts, n_texts, numbers)

    def parts(self, index: int) -> Iterator[str]:
        """The text of an example of one text, a part at a time: a document may be larger than memory."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        return (decoder.decode(raw) for _, raw in self._raw_parts(index))

    def _raw_parts(self, index: int) -> Iterator[tuple[int, bytes]]:
        """Where each part of a document starts in the file, and its bytes."""
        row = int(self._rows[index])
        start, end = self._starts[row : row + 2].tolist()
        return ((place, self._read(place, min(place + _PART, end))) for place in range(start, end, _PART))

    def n_characters(self, index: int) -> int:
        """The length of a document."""
        return sum(len(_first_bytes(raw)) for _, raw in self._raw_parts(index))

    def split_document(self, index: int, n_characters: int) -> tuple[ExampleFile, ExampleFile]:
        """The first ``n_characters`` of a document and the rest, each as a file of one document."""
        row, left = int(self._rows[index]), n_characters
        start, end = self._starts[row : row + 2].tolist()
        cut = end
        for place, raw in self._raw_parts(index):
            characters = _first_bytes(raw)
            if left < len(characters):
                cut = place + int(characters[left])
                break
            left -= len(characters)
        sides = (np.asarray(places, dtype=np.int64) for places in ((start, cut), (cut, end)))
        head, tail = (ExampleFile(self._file, places, lock=self._lock) for places in sides)
        return head, tail


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _first_bytes(raw: bytes) -> NDArray[np.int64]:
    """Where characters start in UTF-8: those that are longer go on with bytes 10xxxxxx."""
    return np.flatnonzero((np.frombuffer(raw, dtype=np.uint8) & 0xC0) != 0x80)


class ExampleWriter:
    """Takes examples as they are read; ``finish`` gives them back as an ExampleFile."""

    def __init__(self, n_texts: int = 1) -> None:
        self._file: IO[bytes] = io.BytesIO()
        self._starts, self._labels, self._end, self._n_texts = array("q", [0]), array("i"), 0, n_texts

    def add(self, *texts: str, label: int | None = None) -> None:
        """One example of ``n_texts`` texts."""
        for text in texts:
            self.write(text)
            self.end_text()
        if label is not None:
            self._labels.append(label)

    def write(self, part: str) -> None:
        """A part of a text, which ``end_text`` ends."""
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
        """``renumbered`` gives another number for each label."""
        self._file.flush()
        starts, labels = np.frombuffer(self._starts, dtype=np.int64), None
        if self._labels:
            labels = np.frombuffer(self._labels, dtype=np.int32)
            labels = labels if renumbered is None else np.asarray(renumbered, dtype=np.int32)[labels]
        return ExampleFile(self._file, starts, self._n_texts, labels)


def document_parts(examples: Sequence[Example]) -> Iterator[tuple[str, bool]]:
    """The texts of Text examples in parts that fit into memory, each with whether its document ends there."""
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
