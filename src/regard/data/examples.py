"""The kinds of examples, and the report about lines that could not be read as one."""

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
    """A source text and its target, such as a translation."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


Label = int | tuple[int, ...] | float  # index of a class, indices of several labels, or a number to predict


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text or a pair of texts with its label; ``Source.labels`` has the names of the classes."""

    text: str
    label: Label
    second: str | None = None


@dataclass(frozen=True, slots=True)
class Tagged:
    """The words of a sentence and the index of each word's tag; ``Source.labels`` has the names of the tags."""

    words: tuple[str, ...]
    tags: tuple[int, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True, eq=False)
class ImageExample:
    """An image with its captions or its label."""

    image: Path | np.ndarray | Image  # a file, uint8 pixels (height, width[, C]), or an open image
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
    """Messages and two answers to them, one chosen and one rejected."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Triplet:
    """A text, one whose embedding should be close to it, and one whose embedding should not."""

    anchor: str
    positive: str
    negative: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and passages of which at least one contains the answer, most relevant first."""

    question: str
    answer: str
    passages: tuple[str, ...]


Example = Question | Triplet | Pair | Text | Labelled | Tagged | ImageExample | Chat | Preference


def label_text(label: Label, names: Sequence[str] | None) -> str:
    """A label as text: ``good``, ``red;round``, ``3.5``."""
    if isinstance(label, tuple):
        return ";".join(label_text(part, names) for part in label)
    return names[label] if names and isinstance(label, int) else f"{label:.6g}"


def key_of(example: Example) -> str | bytes:
    """The source side of an example. Examples with the same key go to the same side of a split."""
    match example:
        case (
            Pair(source=text)
            | Text(text=text)
            | Labelled(text=text)
            | Tagged(text=text)
            | Triplet(anchor=text)
            | Question(question=text)
        ):
            return text
        case Chat() | Preference():
            return "\n\n".join(content for _, content in example.prompt)
        case ImageExample(image=Path() as path):
            return path.name
    assert not isinstance(example.image, Path)
    return example.image.tobytes()


def chat_of(cells: Sequence[Any]) -> Chat:
    """Build a chat from one cell (messages), two (prompt, answer) or three (instruction, input, output).

    A cell is a text or a list of messages. Messages after the last answer are dropped. Raises ValueError if there is no
    answer or nothing before it.
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
    """Build a preference from two cells (chosen, rejected, each a whole chat) or three (prompt, chosen, rejected)."""
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
    """Counts of the lines read. All bad lines are counted; only the first ones are kept."""

    n_read: int = 0
    n_bad: int = 0
    n_normalised: int = 0  # lines converted to Unicode's composed form (NFC)
    first: list[BadLine] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # number of bad lines by reason
    encodings: dict[str, str] = field(default_factory=dict)  # encoding of each file that is not UTF-8
    n_of_first: int | None = None  # number of examples from the first of several tables

    def add_bad(self, file: str | Path, line: int, reason: str, detail: str = "") -> None:
        """Record a bad line. ``reason`` is shared by all lines of its kind; ``detail`` describes this line."""
        self.n_bad += 1
        self.reasons[reason] += 1
        if len(self.first) < _MAX_SHOWN:
            self.first.append(BadLine(str(file), line, f"{reason}: {detail}" if detail else reason))

    def to_text(self, *, refused: bool = True) -> str:
        """The number of bad lines, then one line for each of the first ones."""
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
    """The name of an image in reports: that of its file, else "image"."""
    name = getattr(example.image, "name", None)
    return str(name) if name else "image"
