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
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .examples import BadData
from .token_files import write_atomically
from .unigram import train_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

__all__ = ["Piece", "SPECIAL", "Tokenizer", "TokenizerKind", "train_pair", "train_tokenizer"]

TokenizerKind = Literal["chars", "bytes", "words", "bpe", "unigram"]
Template = Literal["none", "eos", "bos-eos"]
"""What stands around an encoded text: nothing (language models), its end (translation), both (classifiers)."""

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
PAD, BOS, EOS, UNK, MASK = range(5)
"""Fixed ids, the first three being the defaults of ModelConfig."""
_SPACE = "▁"
_WORD = r"▁?(?:\w+|[^\w\s▁])|▁|\s"


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
        return list(self._inner.encode(_speakable(text), add_special_tokens=special).ids)

    def encode_all(self, texts: Iterable[str], *, special: bool = True) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        batch = [_speakable(text) for text in texts]
        return [encoding.ids for encoding in self._inner.encode_batch_fast(batch, add_special_tokens=special)]

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
                text = token.replace(_SPACE, " ")
                text = text.removeprefix(" ") if at_start else text
                at_start = False
                return text, True

            return read_text
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def read_bytes(token: str | None) -> tuple[str, bool]:
            raw = b"" if token is None else bytes(_BYTES[letter] for letter in token)
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
    if kind not in _MAKERS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(_MAKERS)}")
    least = len(SPECIAL) + (256 if kind in ("bytes", "bpe") else 1)
    if vocab_size is not None and vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size} is less than the {least} that kind={kind!r} needs")
    with _one_thread():
        inner = _MAKERS[kind](texts, vocab_size)
    inner.add_special_tokens(list(SPECIAL))
    _surround(inner, template)
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


def _chars(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import decoders, normalizers

    counts: Counter[str] = Counter()
    normal = normalizers.NFC()
    for text in texts:
        counts.update(normal.normalize_str(_speakable(text)))
    kept = sorted(counts, key=lambda letter: (-counts[letter], letter))
    kept = sorted(kept if vocab_size is None else kept[: vocab_size - len(SPECIAL)])
    inner = _bpe_model([*SPECIAL, *kept], unknown=True)
    inner.normalizer, inner.decoder = normal, decoders.Fuse()
    return inner


def _bytes(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import decoders, pre_tokenizers

    inner = _bpe_model([*SPECIAL, *_LETTERS], unknown=False)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _bpe(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or 8000,
        special_tokens=list(SPECIAL),
        initial_alphabet=list(_LETTERS),
        show_progress=False,
    )
    inner.train_from_iterator(sorted(map(_speakable, texts)), trainer)
    return inner


def _words(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import models

    inner = _spaced_parts()
    counts = _count_parts(inner, texts)
    kept = sorted(counts, key=lambda word: (-counts[word], word))
    kept = kept if vocab_size is None else kept[: vocab_size - len(SPECIAL)]
    numbers = {word: index for index, word in enumerate([*SPECIAL, *kept])}
    inner.model = models.WordLevel(numbers, unk_token=SPECIAL[UNK])
    return inner


def _unigram(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import models

    inner = _spaced_parts()
    counts = _count_parts(inner, texts)
    pieces = train_unigram(counts, (vocab_size or 8000) - len(SPECIAL))
    inner.model = models.Unigram([*((name, 0.0) for name in SPECIAL), *pieces], unk_id=UNK)
    return inner


_MAKERS: dict[str, Callable[[Iterable[str], int | None], Any]] = {
    "chars": _chars,
    "bytes": _bytes,
    "words": _words,
    "bpe": _bpe,
    "unigram": _unigram,
}


def _bpe_model(vocabulary: list[str], unknown: bool) -> Inner:
    """A BPE without merges: every character a token."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    numbers = {token: index for index, token in enumerate(vocabulary)}
    return Inner(models.BPE(numbers, [], unk_token=SPECIAL[UNK] if unknown else None, fuse_unk=False))


def _spaced_parts() -> Inner:
    """Words and signs, each with the space before it, which can be put together again."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    inner = Inner(models.WordLevel({}, unk_token=SPECIAL[UNK]))
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return inner


def _count_parts(inner: Inner, texts: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    assert inner.normalizer is not None and inner.pre_tokenizer is not None
    for text, n in Counter(map(_speakable, texts)).items():
        for part, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)):
            counts[part] += n
    return counts


def _surround(inner: Inner, template: Template) -> None:
    from tokenizers import processors

    shapes = {"none": "$A", "eos": "$A <eos>", "bos-eos": "<bos> $A <eos>"}
    if template not in shapes:
        raise ValueError(f"template={template!r} is not one of {', '.join(shapes)}")
    if template != "none":
        both = f"{shapes[template]} {shapes[template].replace('$A', '$B').removeprefix('<bos> ')}"
        special = [("<bos>", BOS), ("<eos>", EOS)]
        inner.post_processor = processors.TemplateProcessing(single=shapes[template], pair=both, special_tokens=special)


def _speakable(text: str) -> str:
    """Half of a surrogate pair is no character and has no UTF-8; what stands for the unreadable takes its place."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level models write each byte (Radford et al. 2019): itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()
_LETTERS = tuple(sorted(_BYTES, key=lambda letter: _BYTES[letter]))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Counting on several threads adds in an order that changes from run to run."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
