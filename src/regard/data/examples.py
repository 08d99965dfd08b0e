"""What an example is, and the report about lines that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadLine
from ..text.chat import ANSWERS, Message, read_messages

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and what it becomes."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


Label = int | tuple[int, ...] | float  # the number of a class, those of several, or a number to predict


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two of them, with its label; the names of classes stand in ``Source.labels``."""

    text: str
    label: Label
    second: str | None = None


@dataclass(frozen=True, slots=True)
class Tagged:
    """The words of a sentence and the number of each one's tag; the names stand in ``Source.labels``."""

    words: tuple[str, ...]
    tags: tuple[int, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True, eq=False)
class ImageExample:
    """An image with its captions, or with its label."""

    image: Path | np.ndarray | Image  # a file, pixels (height, width[, C]) of uint8, or an open image
    captions: tuple[str, ...] = ()
    label: Label | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages; those of the assistant are the answers to learn, and the last message is one."""

    messages: tuple[Message, ...]

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        return self.messages[-1][1]


@dataclass(frozen=True, slots=True)
class Preference:
    """Messages, and two answers to them of which the first is preferred."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


Example = Pair | Text | Labelled | Tagged | ImageExample | Chat | Preference


def label_text(label: Label, names: Sequence[str] | None) -> str:
    """A label as people write it: ``good``, ``red;round``, ``3.5``."""
    if isinstance(label, tuple):
        return ";".join(label_text(each, names) for each in label)
    return names[label] if names and isinstance(label, int) else f"{label:.6g}"


def key_of(example: Example) -> str | bytes:
    """The source side of an example: examples with the same key belong to the same side of a split."""
    match example:
        case Pair(source=text) | Text(text=text) | Labelled(text=text) | Tagged(text=text):
            return text
        case Chat() | Preference():
            return "\n\n".join(content for _, content in example.prompt)
        case ImageExample(image=Path() as path):
            return path.name
    assert not isinstance(example.image, Path)
    return example.image.tobytes()


def chat_of(cells: Sequence[Any]) -> Chat:
    """A chat from one cell (messages), two (prompt, answer) or three (instruction, input, output).

    A cell is a text or messages; what follows the last answer is left out. ValueError says what is missing.
    """
    messages = _messages(cells[0], "user")
    if len(cells) == 3 and cells[1]:
        messages = (("user", f"{cells[0]}\n\n{cells[1]}"),)
    if len(cells) > 1:
        messages = (*messages, *_messages(cells[-1], ANSWERS)[-1:])
    last = max((n for n, (role, _) in enumerate(messages) if role == ANSWERS), default=-1)
    if last < 1:
        raise ValueError("no answer of the assistant" if last < 0 else "nothing before the answer")
    return Chat(messages[: last + 1])


def preference_of(cells: Sequence[Any]) -> Preference:
    """A preference from two cells (chosen, rejected: whole chats) or three (prompt, chosen, rejected)."""
    chosen, rejected = (_messages(cell, ANSWERS) for cell in cells[-2:])
    prompt = chosen[:-1] or (_messages(cells[0], "user") if len(cells) == 3 else ())
    if not prompt:
        raise ValueError("nothing before the answers")
    if chosen[-1] == rejected[-1]:
        raise ValueError("chosen and rejected are the same")
    return Preference(prompt, chosen[-1][1], rejected[-1][1])


def _messages(cell: Any, role: str) -> tuple[Message, ...]:
    messages = ((role, cell),) if isinstance(cell, str) else read_messages(cell)
    if messages is None:
        raise ValueError("not a list of messages with role and content")
    return messages


@dataclass
class ReadReport:
    """Counts of the lines that were read: every bad one is counted, the first ones are kept in full."""

    n_read: int = 0
    n_bad: int = 0
    n_normalised: int = 0  # lines that were brought into Unicode's composed form (NFC)
    first: list[BadLine] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # bad lines by reason
    encodings: dict[str, str] = field(default_factory=dict)  # of the files that are not UTF-8
    n_of_first: int | None = None  # pairs in the first of several tables

    def add_bad(self, file: str | Path, line: int, reason: str, detail: str = "") -> None:
        """Record a bad line. ``reason`` is the same for all lines of its kind; ``detail`` is this line's own."""
        self.n_bad += 1
        self.reasons[reason] += 1
        if len(self.first) < _MAX_SHOWN:
            self.first.append(BadLine(str(file), line, f"{reason}: {detail}" if detail else reason))

    def to_text(self, *, refused: bool = True) -> str:
        """One line each for the first bad ones, and how many there are."""
        fate = "bad_lines='skip' leaves them out" if refused else "left out, as bad_lines='skip' says"
        head = f"{self.n_bad:,} bad line{'s' * (self.n_bad != 1)} of {self.n_read:,}; {fate}"
        rest = [f"  … and {self.n_bad - len(self.first):,} more"] if self.n_bad > len(self.first) else []
        return "\n".join([head, *(f"  {line}" for line in self.first), *rest])

    def to_dict(self) -> dict[str, Any]:
        return {
            "read": self.n_read,
            "bad": self.n_bad,
            "normalised": self.n_normalised,
            "reasons": dict(self.reasons.most_common()),
            "first": [asdict(line) for line in self.first],
            **({"encodings": self.encodings} if self.encodings else {}),
        }


def image_name(example: ImageExample) -> str:
    """What a report calls an image: its file's name."""
    name = getattr(example.image, "name", None)
    return str(name) if name else "image"
