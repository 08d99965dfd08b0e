"""What an example is, and what is said about lines that are none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadData, BadLine

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

__all__ = [
    *("Example", "ImageExample", "Labelled", "Pair", "Report", "Text", "key_of"),
]

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
