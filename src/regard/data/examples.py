"""What an example is, what is said about lines that are none, and the options a source is opened with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator, model_validator

from ..config import Config
from ..errors import RegardError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

__all__ = [
    *("BadData", "BadLine", "DataConfig", "Example", "Format", "ImageExample", "Kind", "Labelled", "Pair"),
    *("Report", "Text", "key_of"),
]

Kind = Literal["pairs", "text", "labelled", "captions", "images"]
"""Sentence pairs, plain text, labelled text, captioned images, labelled images."""
Format = Literal["tsv", "csv", "jsonl", "parallel", "text", "captions", "folder", "idx", "hf"]
"""How it is written down."""
MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and what it becomes."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text and the number of its class; the names stand in ``Source.labels``."""

    text: str
    label: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageExample:
    """An image with its captions, or with the number of its class."""

    image: Path | np.ndarray | Image
    """A file, pixels (height, width) or (height, width, C) of uint8, or an open image."""
    captions: tuple[str, ...] = ()
    label: int | None = None


Example = Pair | Text | Labelled | ImageExample


def key_of(example: Example) -> str | bytes:
    """What an example is asked with: two examples with the same key belong to the same side of a split."""
    match example:
        case Pair(source=text) | Text(text=text) | Labelled(text=text):
            return text
        case ImageExample(image=Path() as path):
            return path.name
    assert not isinstance(example.image, Path)
    return example.image.tobytes()


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no example, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class BadData(RegardError):
    """Files that cannot be used as they are; ``lines`` holds the first bad lines, ``n_bad`` says how many there are."""

    def __init__(self, message: str, lines: tuple[BadLine, ...] = (), n_bad: int = 0) -> None:
        super().__init__(message)
        self.lines, self.n_bad = lines, n_bad


@dataclass
class Report:
    """What reading met: every bad line is counted, the first ones are kept in full."""

    n_read: int = 0
    n_bad: int = 0
    n_normalised: int = 0
    """Lines that were not in Unicode's composed form (NFC) and were brought into it."""
    first: list[BadLine] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """How many bad lines there are of each sort."""

    def bad(self, file: str | Path, line: int, sort: str, detail: str = "") -> None:
        """Note a bad line. ``sort`` is the same for all lines of the sort; ``detail`` is this line's own."""
        self.n_bad += 1
        self.reasons[sort] += 1
        if len(self.first) < MOST_SHOWN:
            self.first.append(BadLine(str(file), line, f"{sort}: {detail}" if detail else sort))

    def refuse(self) -> None:
        """Raise for what was found, if anything was."""
        if self.n_bad:
            raise BadData(self.text(), tuple(self.first), self.n_bad)

    def text(self, *, refused: bool = True) -> str:
        """One line each for the first bad ones, and how many there are."""
        fate = "bad_lines='skip' leaves them out" if refused else "left out, as bad_lines='skip' says"
        head = f"{self.n_bad:,} bad line{'s' * (self.n_bad != 1)} of {self.n_read:,}; {fate}"
        rest = [f"… and {self.n_bad - len(self.first):,} more"] if self.n_bad > len(self.first) else []
        return "\n".join([head, *(f"  {line}" for line in self.first), *(f"  {line}" for line in rest)])

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "read": self.n_read,
            "bad": self.n_bad,
            "normalised": self.n_normalised,
            "reasons": dict(self.reasons.most_common()),
            "first": [{"file": x.file, "line": x.line, "reason": x.reason} for x in self.first],
        }


class DataConfig(Config):
    """Where examples come from and how they are read."""

    source: str = "en-ko"
    """An embedded corpus, a file, two parallel files (a,b), a folder, or hf:name."""
    valid: str | None = None
    """Held-out examples of their own, written as source is; None: a part of the source is held out."""
    format: Format | None = None
    """How it is written down; None: told from name and content."""
    kind: Kind | None = None
    """What the examples are; None: told from the content."""
    columns: tuple[str | int, ...] | None = None
    """Columns by name or number from 0, in the order text/source/image, then target/label/caption; others are ignored.
    For a folder of parallel files the two endings: en, de."""
    header: bool | None = None
    """Whether the first line of a table names its columns; None: told from the content."""
    labels: tuple[str, ...] | None = None
    """The classes in order, any other being a bad line; None: those that occur, sorted."""
    images: str | None = None
    """The folder with the images of a caption file; None: beside it, or in images/ beside it."""
    documents: Literal["whole", "line", "blank"] = "whole"
    """A text file is one document, or one a line, or documents are separated by blank lines."""
    valid_fraction: float = 0.05
    """Share held out where there are no files for it."""
    valid_rows: int | None = None
    """Instead of a share, this many examples: those whose source side has the smallest hashes."""
    split_seed: int = 0
    """Another number holds out other examples."""
    deduplicated: Literal["no", "exact", "source"] = "no"
    """Leave out repeated examples, or all but the first of those with one source side."""
    bad_lines: Literal["error", "skip"] = "error"
    """Refuse files with bad lines, or leave those lines out and report them."""
    normalise: Literal["NFC", "none"] = "NFC"
    """Unicode's composed form: a Hangul syllable typed as its letters becomes one character."""
    max_chars: int = 100_000
    """A longer line is a bad line; in documents of many lines, one a hundred times as long."""
    max_pixels: int = 50_000_000
    """A larger image is a bad line: decoding it could take all memory."""
    check_images: bool = True
    """Decode every image once when the source is opened, so that none fails in mid-training."""
    epoch_examples: int = 100_000
    """What counts as one epoch of an embedded corpus that has no end."""

    @field_validator("columns", "labels", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """``en,de`` and ``bad,good`` as they are typed; a list where it is one."""
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _numbers(cls, value: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        """``0,1`` are numbers."""
        return None if value is None else tuple(int(x) if isinstance(x, str) and x.isdigit() else x for x in value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ValueError(f"valid_fraction={self.valid_fraction} must lie in [0, 1)")
        for name in ("valid_rows", "max_chars", "max_pixels", "epoch_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        return self
