"""The models behind the tokenizers, each made from texts with the ``tokenizers`` library and nothing left to chance."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from .unigram import train_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

__all__ = ["BYTES", "MAKERS", "SPACE", "SPECIAL", "Template", "one_thread", "speakable", "surround"]

Template = Literal["none", "eos", "bos-eos"]
"""What stands around an encoded text: nothing (language models), its end (translation), both (classifiers)."""

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
PAD, BOS, EOS, UNK, MASK = range(5)
"""Fixed ids, the first three being the defaults of ModelConfig."""
SPACE = "▁"
_WORD = r"▁?(?:\w+|[^\w\s▁])|▁|\s"


def _chars(texts: Iterable[str], vocab_size: int | None) -> Inner:
    from tokenizers import decoders, normalizers

    counts: Counter[str] = Counter()
    normal = normalizers.NFC()
    for text in texts:
        counts.update(normal.normalize_str(speakable(text)))
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
    inner.train_from_iterator(sorted(map(speakable, texts)), trainer)
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


MAKERS: dict[str, Callable[[Iterable[str], int | None], Any]] = {
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
        [normalizers.NFC(), normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return inner


def _count_parts(inner: Inner, texts: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    assert inner.normalizer is not None and inner.pre_tokenizer is not None
    for text, n in Counter(map(speakable, texts)).items():
        for part, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)):
            counts[part] += n
    return counts


def surround(inner: Inner, template: Template) -> None:
    from tokenizers import processors

    shapes = {"none": "$A", "eos": "$A <eos>", "bos-eos": "<bos> $A <eos>"}
    if template not in shapes:
        raise ValueError(f"template={template!r} is not one of {', '.join(shapes)}")
    if template != "none":
        both = f"{shapes[template]} {shapes[template].replace('$A', '$B').removeprefix('<bos> ')}"
        special = [("<bos>", BOS), ("<eos>", EOS)]
        inner.post_processor = processors.TemplateProcessing(single=shapes[template], pair=both, special_tokens=special)


def speakable(text: str) -> str:
    """Half of a surrogate pair is no character and has no UTF-8; what stands for the unreadable takes its place."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level models write each byte (Radford et al. 2019): itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_letters()
_LETTERS = tuple(sorted(BYTES, key=lambda letter: BYTES[letter]))


@contextmanager
def one_thread() -> Iterator[None]:
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
