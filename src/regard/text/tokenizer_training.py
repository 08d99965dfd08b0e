"""Training of tokenizers with the ``tokenizers`` library; the same texts always give the same file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..config.data_config import TokenizerKind
from ..errors import BadData
from ..foundation.files import cache_folder
from .tokenizer import BOS, BYTE_OF_LETTER, EOS, SPACE, SPECIAL, UNK, Tokenizer, cut_text, replace_surrogates
from .unigram import train_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Template = Literal["none", "eos", "bos-eos"]
"""Special tokens around an encoded text: none (language models), <eos> (translation), or both (classifiers)."""

_TEMPLATES = get_args(Template)
_WORD = r"▁?(?:\w+|[^\w\s▁])|▁|\s"
_LETTERS = sorted(BYTE_OF_LETTER, key=lambda letter: BYTE_OF_LETTER[letter])


def train_tokenizer(
    texts: Iterable[str], kind: TokenizerKind = "bpe", vocab_size: int | None = None, template: Template = "none"
) -> Tokenizer:
    """Train a tokenizer. The same texts, in any order and on any machine, give the same file.

    ``vocab_size`` includes the special tokens. None means 8,000 for bpe and unigram, and every character or word of
    the texts for chars and words.
    """
    if kind not in TOKENIZER_KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(TOKENIZER_KINDS)}")
    least = len(SPECIAL) + (256 if kind in ("bytes", "bpe") else 1)
    if vocab_size is not None and vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size} is less than the {least} that kind={kind!r} needs")
    if template not in _TEMPLATES:
        raise ValueError(f"template={template!r} is not one of {', '.join(_TEMPLATES)}")
    with _single_threaded():
        backend = TOKENIZER_KINDS[kind](texts, vocab_size)
    backend.add_special_tokens(list(SPECIAL))
    set_template(backend, template)
    return Tokenizer(backend.to_str(pretty=False).encode("utf-8"))


def with_template(tokenizer: Tokenizer, template: Template) -> Tokenizer:
    """A native tokenizer with another template; the vocabulary and its ids stay the same."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.content.decode("utf-8"))
    set_template(backend, template)
    content = backend.to_str(pretty=False).encode("utf-8")
    return tokenizer if content == tokenizer.content else Tokenizer(content, tokenizer.name)


def with_nfc(tokenizer: Tokenizer) -> Tokenizer:
    """A native tokenizer that composes texts (NFC) before it encodes them, as ``data.normalise`` does with the data."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers

    backend = Backend.from_str(tokenizer.content.decode("utf-8"))
    if backend.normalizer is not None:  # chars, words and unigram compose by themselves
        return tokenizer
    backend.normalizer = normalizers.NFC()
    return Tokenizer(backend.to_str(pretty=False).encode("utf-8"), tokenizer.name)


def set_template(
    backend: Backend, template: Template, bos: tuple[str, int] = ("<bos>", BOS), eos: tuple[str, int] = ("<eos>", EOS)
) -> None:
    """Make ``backend`` add the special tokens of ``template``; ``bos`` and ``eos`` are (token, id)."""
    from tokenizers import processors

    first, last = [bos[0]] * (template == "bos-eos"), [eos[0]] * (template != "none")
    single, pair = [*first, "$A", *last], [*first, "$A", *last, "$B", *last]
    special: list[Any] = [bos, eos]
    processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    backend.post_processor = None if template == "none" else processor


def first_texts(texts: Iterable[str], max_texts: int, max_characters: int) -> Iterator[str]:
    """The first texts, at most ``max_texts``, up to the one that exceeds ``max_characters`` in total."""
    n_characters = 0
    for text in islice(texts, max_texts):
        yield text
        n_characters += len(text)
        if n_characters > max_characters:
            return


def cached_tokenizer(
    texts: Iterable[str], kind: TokenizerKind, vocab_size: int | None, template: Template
) -> Tokenizer:
    """Like ``train_tokenizer``, with the result cached on disk by texts and arguments."""
    texts = list(texts)
    key = hashlib.sha256(f"{version('tokenizers')} {kind} {vocab_size} {template}".encode())
    for text in texts:
        key.update(text.encode("utf-8", "surrogatepass") + b"\xff")
    path = cache_folder() / "tokenizers" / f"{key.hexdigest()[:32]}.json"
    with suppress(OSError, BadData):
        return Tokenizer.read_native(path.read_bytes(), "tokenizer.json")
    tokenizer = train_tokenizer(texts, kind, vocab_size, template)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(path)
    return tokenizer


def _train_chars(texts: Iterable[str], vocab_size: int | None) -> Backend:
    from tokenizers import decoders, normalizers

    counts: Counter[str] = Counter()
    nfc = normalizers.NFC()
    for text in texts:
        for piece in cut_text(replace_surrogates(text)):
            counts.update(nfc.normalize_str(piece))
    backend = _characters_as_tokens(sorted(_most_frequent(counts, vocab_size)), unk_token=SPECIAL[UNK])
    backend.normalizer, backend.decoder = nfc, decoders.Fuse()
    return backend


def _train_bytes(texts: Iterable[str], vocab_size: int | None) -> Backend:
    from tokenizers import decoders, pre_tokenizers

    backend = _characters_as_tokens(_LETTERS, unk_token=None)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _train_bpe(texts: Iterable[str], vocab_size: int | None) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or 8000, special_tokens=list(SPECIAL), initial_alphabet=_LETTERS, show_progress=False
    )
    pieces = (piece for text in texts for piece in cut_text(replace_surrogates(text)))
    backend.train_from_iterator(sorted(pieces), trainer)
    return backend


def _train_words(texts: Iterable[str], vocab_size: int | None) -> Backend:
    from tokenizers import models

    backend, counts = _split_and_count_words(texts)
    ids = {word: index for index, word in enumerate([*SPECIAL, *_most_frequent(counts, vocab_size)])}
    backend.model = models.WordLevel(ids, unk_token=SPECIAL[UNK])
    return backend


def _train_unigram(texts: Iterable[str], vocab_size: int | None) -> Backend:
    from tokenizers import models

    backend, counts = _split_and_count_words(texts)
    pieces = train_unigram(counts, (vocab_size or 8000) - len(SPECIAL))
    backend.model = models.Unigram([*((name, 0.0) for name in SPECIAL), *pieces], unk_id=UNK)
    return backend


TOKENIZER_KINDS: dict[str, Callable[[Iterable[str], int | None], Any]] = {
    "chars": _train_chars,
    "bytes": _train_bytes,
    "words": _train_words,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}


def _most_frequent(counts: Counter[str], vocab_size: int | None) -> list[str]:
    ordered = sorted(counts, key=lambda token: (-counts[token], token))
    return ordered if vocab_size is None else ordered[: vocab_size - len(SPECIAL)]


def _characters_as_tokens(characters: Iterable[str], unk_token: str | None) -> Backend:
    """A BPE model without merges, so that every character is a token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    ids = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    return Backend(models.BPE(ids, [], unk_token=unk_token, fuse_unk=False))


def _split_and_count_words(texts: Iterable[str]) -> tuple[Backend, Counter[str]]:
    """A backend that splits texts into words and punctuation, and the counts of these words in ``texts``.

    Each word keeps the space before it as ▁, so that decoding can restore the spaces.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    spaces = [normalizers.NFC(), normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    normalizer, splitter = normalizers.Sequence(spaces), pre_tokenizers.Split(Regex(_WORD), "isolated")
    backend = Backend(models.WordLevel({}, unk_token=SPECIAL[UNK]))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    counts: Counter[str] = Counter()
    for text, n in Counter(map(replace_surrogates, texts)).items():
        for number, piece in enumerate(cut_text(text)):
            words = splitter.pre_tokenize_str(normalizer.normalize_str(piece))
            for word, _ in words[1:] if number else words:  # drop the ▁ prepended to every piece but the first
                counts[word] += n
    return backend, counts


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Disable the threads of ``tokenizers``, which add up counts in an order that changes from run to run."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
