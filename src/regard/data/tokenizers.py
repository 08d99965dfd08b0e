"""Text to ids and back. Every kind is a ``tokenizers`` model, so one tokenizer.json serves us and transformers alike.

- ``bytes`` and ``bpe`` (byte-level; Sennrich et al. 2016, Radford et al. 2019) give any text back exactly.
- ``chars``, ``words`` and ``unigram`` (Kudo 2018) give it back composed (NFC), with <unk> for what was never seen.
  In the last two a space is ▁ before the word it precedes, and the text begins with one more, taken off again.

People never see a piece of a character: ``pieces`` groups the tokens that only together make one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .examples import BadData
from .token_files import write_atomically
from .token_models import (
    BOS,
    BYTES,
    EOS,
    MAKERS,
    MASK,
    PAD,
    SPACE,
    SPECIAL,
    UNK,
    Template,
    one_thread,
    speakable,
    surround,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

__all__ = ["Piece", "SPECIAL", "Tokenizer", "TokenizerKind", "train_pair", "train_tokenizer"]

TokenizerKind = Literal["chars", "bytes", "words", "bpe", "unigram"]


_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """What a person sees: some tokens that make whole characters together."""

    text: str
    first: int
    """The first of its tokens."""
    last: int
    """One past the last."""
    start: int
    """Where its text starts in the decoded text; special tokens have no text there."""
    end: int


class Tokenizer:
    """A tokenizer.json, read and run by the ``tokenizers`` library. ``content`` is the file as it came."""

    pad_id, bos_id, eos_id, unk_id, mask_id = PAD, BOS, EOS, UNK, MASK

    def __init__(self, content: bytes, name: str = "tokenizer.json") -> None:
        from tokenizers import Tokenizer as Inner

        self.content, self.name = content, name
        try:
            self._inner: Inner = Inner.from_str(content.decode("utf-8"))
            decoder = (json.loads(content).get("decoder") or {}).get("type")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            raise BadData(f"{name} is not a tokenizer that can be read: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        # "<eos>" typed by someone is five characters, not the end of the text.
        self._inner.encode_special_tokens = True
        self._byte_level = decoder == "ByteLevel"
        found = tuple(self._inner.id_to_token(index) for index in range(len(SPECIAL)))
        if found != SPECIAL:
            raise BadData(f"{name} starts with the tokens {found}, but {SPECIAL} are needed")

    @property
    def size(self) -> int:
        """Ids there are."""
        return self._inner.get_vocab_size()

    @cached_property
    def sha256(self) -> str:
        """What it is recognised by."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; ``special`` puts around it what it was made with."""
        return list(self._inner.encode(speakable(text), add_special_tokens=special).ids)

    def encode_all(self, texts: Iterable[str], *, special: bool = True) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        return list(self.encode_stream(texts, special=special))

    def encode_stream(self, texts: Iterable[str], *, special: bool = True) -> Iterator[list[int]]:
        """The same as they come, with no more than some thousand texts held: for ``write_tokens``."""
        speakables = map(speakable, texts)
        while batch := list(islice(speakables, _AT_ONCE)):
            for encoding in self._inner.encode_batch_fast(batch, add_special_tokens=special):
                yield encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are left out."""
        return self._inner.decode([int(index) for index in ids])

    def token(self, index: int | None) -> str | None:
        """How an id is written in the file; None for one that does not exist."""
        return None if index is None else self._inner.id_to_token(index)

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Tokens as people see them, in order; tokens that hold parts of one character are one piece.

        The texts of those that are no special tokens, joined, are what ``decode`` gives.
        """
        made: list[Piece] = []
        place = first = 0
        held, read = "", self._reader()

        def close(last: int, text: str) -> None:
            nonlocal place, first, held
            if first < last:
                made.append(Piece(text, first, last, place, place + len(text)))
                place += len(text)
            first, held = last, ""

        for position, index in enumerate(map(int, ids)):
            token = None if 0 <= index < len(SPECIAL) else self.token(index)
            if token is None:
                close(position, held + read(None)[0])
                name = SPECIAL[index] if 0 <= index < len(SPECIAL) else f"<{index}>"
                made.append(Piece(name, position, position + 1, place, place))
                first = position + 1
                continue
            text, whole = read(token)
            held += text
            if whole:
                close(position + 1, held)
        close(len(ids), held + read(None)[0])
        return made

    def display_pieces(self, ids: Sequence[int]) -> list[str]:
        """The texts of ``pieces``."""
        return [piece.text for piece in self.pieces(ids)]

    def _reader(self) -> Callable[[str | None], tuple[str, bool]]:
        """A function from tokens in turn to (text, whether it ends with a whole character); None ends a text."""
        if not self._byte_level:
            spaced, at_start = self._spaced, True

            def read_text(token: str | None) -> tuple[str, bool]:
                nonlocal at_start
                if token is None or not spaced:
                    return token or "", True
                text = token.replace(SPACE, " ")
                text = text.removeprefix(" ") if at_start else text
                at_start = False
                return text, True

            return read_text
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def read_bytes(token: str | None) -> tuple[str, bool]:
            raw = b"" if token is None else bytes(BYTES[letter] for letter in token)
            text = decoder.decode(raw, final=token is None)
            return text, not decoder.getstate()[0]

        return read_bytes

    @cached_property
    def _spaced(self) -> bool:
        """Whether ▁ is how a space is written."""
        return "Prepend" in json.dumps(json.loads(self.content).get("normalizer"))

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_atomically(Path(path), self.content)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read it back."""
        try:
            return cls(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror}") from None


def train_tokenizer(
    texts: Iterable[str], kind: TokenizerKind = "bpe", vocab_size: int | None = None, template: Template = "none"
) -> Tokenizer:
    """A tokenizer for texts like these: the same texts in any order, on any machine, give the same file.

    ``vocab_size`` counts the special tokens; None: 8,000 for bpe and unigram, everything seen for chars and words.
    """
    if kind not in MAKERS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(MAKERS)}")
    least = len(SPECIAL) + (256 if kind in ("bytes", "bpe") else 1)
    if vocab_size is not None and vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size} is less than the {least} that kind={kind!r} needs")
    with one_thread():
        inner = MAKERS[kind](texts, vocab_size)
    inner.add_special_tokens(list(SPECIAL))
    surround(inner, template)
    return Tokenizer(inner.to_str(pretty=False).encode("utf-8"))


def train_pair(
    pairs: Iterable[tuple[str, str]],
    kind: TokenizerKind = "bpe",
    vocab_size: int | None = None,
    *,
    joint: bool = True,
    template: Template = "eos",
) -> tuple[Tokenizer, Tokenizer]:
    """Tokenizers for both sides of pairs: one vocabulary for both (the paper), or each its own."""
    sides = list(pairs)
    if joint:
        both = train_tokenizer([text for pair in sides for text in pair], kind, vocab_size, template)
        return both, both
    source, target = zip(*sides, strict=True) if sides else ((), ())
    return train_tokenizer(source, kind, vocab_size, template), train_tokenizer(target, kind, vocab_size, template)
