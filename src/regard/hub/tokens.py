"""What stands before and after a model: text to ids and back, images to pixels, classes to words."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ..config import ModelConfig
from ..data.tokenizers import SPECIAL
from ..data.tokenizers import Tokenizer as OwnTokenizer
from ..errors import BadModelFile, RegardError
from ..foundation.jsonio import to_json
from .directory import Directory
from .images import ImageProcessor

ONE, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"
IMAGE = "preprocessor_config.json"
# Files beside the tokenizer that others read; they are kept as they came and written back.
_COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json", IMAGE),
)


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def size(self) -> int:
        """Ids there are."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens the model was trained with around them."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are left out."""
        ...


class JsonTokenizer:
    """A tokenizer.json, read and run by the ``tokenizers`` library. ``content`` is the file, kept as it came."""

    def __init__(self, content: bytes, name: str = ONE) -> None:
        from tokenizers import Tokenizer as Inner

        self.content, self.name = content, name
        with _refusing_panics(name):
            self._inner = Inner.from_str(content.decode("utf-8"))
            # How long a text may be and what fills a batch is the caller's business, not the file's.
            self._inner.no_truncation()
            self._inner.no_padding()

    @property
    def size(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        with _refusing_panics(self.name):
            return list(self._inner.encode(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        with _refusing_panics(self.name):
            return self._inner.decode(list(ids))

    def token(self, index: int | None) -> str | None:
        """How an id is written; None for one that does not exist."""
        return None if index is None else self._inner.id_to_token(index)


def json_tokenizer(content: bytes, name: str = ONE) -> JsonTokenizer | OwnTokenizer:
    """One of those made here, which can show whole characters, or anybody else's."""
    made = JsonTokenizer(content, name)
    ours = tuple(made.token(index) for index in range(len(SPECIAL))) == SPECIAL
    return OwnTokenizer(content, name) if ours else made


class MarianTokenizer:
    """One side of Marian's pair: SentencePiece cuts a text into pieces, vocab.json numbers them, </s> ends it.

    ``>>de<<`` at the start of a text, which says into what language to translate, is one token.
    """

    def __init__(self, model: bytes, vocab: Mapping[str, int], name: str) -> None:
        self.model, self.vocab, self.name = model, vocab, name
        try:
            self._unknown, self._end = vocab["<unk>"], vocab["</s>"]
        except KeyError as error:
            raise BadModelFile(f"vocab.json for {name} has no token {error}") from None
        self._words = {index: piece for piece, index in vocab.items()}
        if importlib.util.find_spec("sentencepiece") is not None:
            self._pieces  # noqa: B018 — a damaged file is refused now, not at the first text

    @cached_property
    def _pieces(self) -> Any:
        try:
            library = importlib.import_module("sentencepiece")
        except ImportError:
            raise RegardError(f"{self.name} is read by sentencepiece, which is not installed") from None
        try:
            pieces = library.SentencePieceProcessor()
            pieces.LoadFromSerializedProto(self.model)
            return pieces
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadModelFile(f"{self.name} is not a SentencePiece model: {error}") from None

    @property
    def size(self) -> int:
        return len(self.vocab)

    def encode(self, text: str) -> list[int]:
        code = re.match(r">>.+<<", text)
        words = [] if code is None else [code[0]]
        words += self._pieces.encode(text if code is None else text[code.end() :], out_type=str)
        return [self.vocab.get(word, self._unknown) for word in words] + [self._end]

    def decode(self, ids: Iterable[int]) -> str:
        special = {"<unk>", "</s>", "<pad>"}
        words = [word for index in ids if (word := self._words.get(index, "<unk>")) not in special]
        return self._pieces.decode_pieces(words).replace("▁", " ").strip()


@dataclass(frozen=True)
class Processor:
    """A model's inputs and outputs in people's terms. ``target`` is None where it is written as the source is."""

    source: Tokenizer | None = None
    target: Tokenizer | None = None
    image: ImageProcessor | None = None
    labels: tuple[str, ...] | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files of the directory it came from that only others read."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, where there is exactly one."""
        found = [x for x in (self.source, self.target) if x is not None]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} tokenizers; ask for processor.source or processor.target")
        return found[0]

    def sizes(self) -> dict[str, int]:
        """Tokens on each side that has a tokenizer of its own."""
        sides = {"source": self.source, "target": self.target}
        return {name: tokenizer.size for name, tokenizer in sides.items() if tokenizer is not None}

    def files(self, config: ModelConfig) -> dict[str, bytes]:
        """What a directory must hold for this to be read back, and for transformers to read it too."""
        both = self.source is not None and self.target is not None
        files = dict(self.companions)
        for tokenizer, name in ((self.source, SOURCE), (self.target, TARGET)):
            if isinstance(tokenizer, JsonTokenizer | OwnTokenizer):
                files[name if both else ONE] = tokenizer.content
                if not both:
                    files.setdefault("tokenizer_config.json", to_json(_tokenizer_config(tokenizer, config)))
            elif isinstance(tokenizer, MarianTokenizer):
                files[tokenizer.name] = tokenizer.model
                if not both or name == SOURCE or tokenizer.vocab == getattr(self.source, "vocab", None):
                    files.setdefault("vocab.json", to_json(dict(tokenizer.vocab)))
                else:
                    files.setdefault("target_vocab.json", to_json(dict(tokenizer.vocab)))
        if self.image is not None:
            files.setdefault(IMAGE, to_json(self.image.fields()))
        return files


def read_processor(directory: Directory, fields: Mapping[str, Any], config: ModelConfig) -> Processor | None:
    """What a directory brings for text, images and classes; None where it brings nothing."""
    source, target = _tokenizers(directory)
    if target is None and config.source != "text":
        source, target = None, source
    image = None
    if directory.has(IMAGE) and config.source == "image":
        try:
            image = ImageProcessor.read(directory.json(IMAGE), config)
        except (ValueError, TypeError, KeyError) as error:
            raise BadModelFile(f"{directory.root / IMAGE} cannot be read: {error}") from None
    labels = _labels(fields.get("id2label"), config) if config.head == "classify" else None
    if source is None and target is None and image is None and labels is None:
        return None
    companions = {name: directory.bytes(name) for name in _COMPANIONS if directory.has(name)}
    return Processor(source, target, image, labels, companions)


def _tokenizers(directory: Directory) -> tuple[Tokenizer | None, Tokenizer | None]:
    if directory.has(ONE):
        return json_tokenizer(directory.bytes(ONE), str(directory.root / ONE)), None
    if directory.has(SOURCE) and directory.has(TARGET):
        source, target = (json_tokenizer(directory.bytes(x), str(directory.root / x)) for x in (SOURCE, TARGET))
        return source, target
    if directory.has("source.spm") and directory.has("target.spm") and directory.has("vocab.json"):
        vocab = _vocabulary(directory, "vocab.json")
        target_vocab = _vocabulary(directory, "target_vocab.json") if directory.has("target_vocab.json") else vocab
        return (
            MarianTokenizer(directory.bytes("source.spm"), vocab, "source.spm"),
            MarianTokenizer(directory.bytes("target.spm"), target_vocab, "target.spm"),
        )
    return None, None


def _vocabulary(directory: Directory, name: str) -> dict[str, int]:
    vocab = directory.json(name)
    if not all(isinstance(index, int) for index in vocab.values()):
        raise BadModelFile(f"{directory.root / name} does not number its tokens")
    return vocab


def _labels(names: Any, config: ModelConfig) -> tuple[str, ...] | None:
    """``{"0": "bad", "1": "good"}`` in order."""
    if names is None:
        return None
    try:
        by_index = {int(index): str(name) for index, name in names.items()}
    except (ValueError, AttributeError):
        by_index = {}
    if sorted(by_index) != list(range(config.n_classes)):
        raise BadModelFile(f"config.json has id2label={names!r}, which does not name {config.n_classes} classes")
    labels = tuple(by_index[index] for index in range(config.n_classes))
    # What transformers writes where nobody named the classes is no name.
    return None if labels == tuple(f"LABEL_{index}" for index in range(config.n_classes)) else labels


def _tokenizer_config(tokenizer: JsonTokenizer | OwnTokenizer, config: ModelConfig) -> dict[str, Any]:
    """What transformers wants beside a tokenizer.json to open it."""
    special = {"bos_token": config.bos_id, "eos_token": config.eos_id, "pad_token": config.pad_id}
    words = {name: tokenizer.token(index) for name, index in special.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_len,
        **{name: word for name, word in words.items() if word is not None},
    }


@contextmanager
def _refusing_panics(name: str) -> Iterator[None]:
    """``tokenizers`` raises a bare Exception on a malformed file, or panics in Rust, which is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise BadModelFile(f"{name} is not a tokenizer that can be read: {said}") from None
