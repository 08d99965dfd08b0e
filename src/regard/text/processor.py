"""A model's tokenizers, image processor and class names, and the files they are read from and written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.jsonio import to_json
from .chat import TEMPLATE_FILE, ChatTemplate, template_in
from .image_processor import ImageProcessor
from .tokenizer import MarianTokenizer, Tokenizer
from .vocabulary_files import read_vocabulary

# What a special token is called in tokenizer_config.json, then how it is usually written.
_SPECIAL_TOKENS = {
    "bos": (("bos_token", "cls_token"), ()),
    "eos": (("eos_token", "sep_token"), ()),
    "unk": (("unk_token",), ("[UNK]", "<unk>")),
    "mask": (("mask_token",), ("[MASK]", "<mask>")),
}
ONE, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"
IMAGE, TOKENIZER_CONFIG = "preprocessor_config.json", "tokenizer_config.json"
# Files beside the tokenizer that only other programs read; they are written back unchanged.
_COMPANIONS = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json", IMAGE),
)
PROCESSOR_FILES = (ONE, SOURCE, TARGET, *_COMPANIONS)


class ModelFiles(Protocol):
    """What ``read_processor`` needs of a model directory."""

    @property
    def root(self) -> Path: ...

    def has(self, name: str) -> bool: ...

    def bytes(self, name: str) -> bytes: ...

    def json(self, name: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Processor:
    """``source``: tokenizer of what the model reads; ``target``: of what it writes, None where it is the source's."""

    source: Tokenizer | None = None
    target: Tokenizer | None = None
    image: ImageProcessor | None = None
    labels: tuple[str, ...] | None = None
    chat_template: str | None = None  # in Jinja: how messages become the text a model reads
    companions: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # files that only other programs read

    @property
    def tokenizer(self) -> Tokenizer:
        """The only tokenizer; ValueError where there are two or none."""
        tokenizers = [x for x in (self.source, self.target) if x is not None]
        if len(tokenizers) != 1:
            raise ValueError(f"there are {len(tokenizers)} tokenizers; ask for processor.source or processor.target")
        return tokenizers[0]

    @property
    def chat(self) -> ChatTemplate | None:
        """What encodes messages; None where there is no template."""
        return None if self.chat_template is None else ChatTemplate(self.chat_template, self.tokenizer)

    def sizes(self) -> dict[str, int]:
        """Vocabulary size of each side that has its own tokenizer."""
        sides = {"source": self.source, "target": self.target}
        return {name: tokenizer.size for name, tokenizer in sides.items() if tokenizer is not None}

    def files(self, config: ModelConfig) -> dict[str, bytes]:
        """The files from which this is read back, and from which transformers reads it too."""
        both = self.source is not None and self.target is not None
        files = dict(self.companions)
        literal = any(x is not None and x.has_literal_special_tokens for x in (self.source, self.target))
        options = {"split_special_tokens": True} if literal else {}
        for tokenizer, name in ((self.source, SOURCE), (self.target, TARGET)):
            if isinstance(tokenizer, MarianTokenizer):
                files[tokenizer.name] = tokenizer.model
                shared = not both or name == SOURCE or tokenizer.vocab == getattr(self.source, "vocab", None)
                files.setdefault("vocab.json" if shared else "target_vocab.json", to_json(dict(tokenizer.vocab)))
            elif tokenizer is not None:
                files[name if both else ONE] = tokenizer.content
                if not both:  # transformers reads the special tokens here
                    special = {"bos_token": config.bos_id, "eos_token": config.eos_id, "pad_token": config.pad_id}
                    tokens = {key: tokenizer.token(index) for key, index in special.items()}
                    fields = {
                        "tokenizer_class": "PreTrainedTokenizerFast",
                        "model_max_length": config.max_len,
                        **options,
                    }
                    fields |= {key: token for key, token in tokens.items() if token is not None}
                    files.setdefault(TOKENIZER_CONFIG, to_json(fields))
        if both and options:
            files.setdefault(TOKENIZER_CONFIG, to_json(options))
        if self.chat_template is not None and self.chat_template != template_in(files):
            files[TEMPLATE_FILE] = self.chat_template.encode()
        if self.image is not None:
            files.setdefault(IMAGE, to_json(self.image.fields()))
        return files


def read_processor(directory: ModelFiles, fields: Mapping[str, Any], config: ModelConfig) -> Processor | None:
    """The processor of a model directory whose config.json has ``fields``; None where it has no part of one."""
    source, target = _read_tokenizers(directory)
    names: Any = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG):
        names |= directory.json(name) if directory.has(name) else {}
    if source is None:
        source = read_vocabulary(directory, fields, names)
    if target is None and config.source != "text":
        source, target = None, source
    image = None
    if directory.has(IMAGE) and config.source == "image":
        try:
            image = ImageProcessor.read(directory.json(IMAGE), config)
        except (ValueError, TypeError, KeyError) as error:
            raise BadModelFile(f"{directory.root / IMAGE} cannot be read: {error}") from None
    classes = fields.get("id2label") if config.head in ("classify", "tag") else None
    labels = None if classes is None else _read_labels(classes, config)
    if source is None and target is None and image is None and labels is None:
        return None
    companions = {name: directory.bytes(name) for name in _COMPANIONS if directory.has(name)}
    source, target = (with_special_ids_of(side, config, names) for side in (source, target))
    return Processor(source, target, image, labels, template_in(companions), companions)


def with_special_ids_of(
    tokenizer: Tokenizer | None, config: ModelConfig, names: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """A foreign tokenizer with the special ids of its model: from ``config``, else from the ``names`` of special
    tokens in tokenizer_config.json. What neither says is left out."""
    if tokenizer is None or tokenizer.is_native:
        return tokenizer
    ids: dict[str, int | None] = {"pad": config.pad_id, "bos": config.bos_id, "eos": config.eos_id}
    for special, (keys, usual) in _SPECIAL_TOKENS.items():
        given = [(names or {}).get(key) for key in keys]
        texts = [x["content"] if isinstance(x, dict) and "content" in x else x for x in given]
        found = (tokenizer.token_id(text) for text in (*texts, *usual) if isinstance(text, str))
        if ids.get(special) is None:
            ids[special] = next((index for index in found if index is not None), None)
    tokenizer = tokenizer.with_special_ids(**{name: index for name, index in ids.items() if index is not None})
    is_literal = (names or {}).get("split_special_tokens") is True and not isinstance(tokenizer, MarianTokenizer)
    return tokenizer.with_literal_special_tokens() if is_literal else tokenizer


def _read_tokenizers(directory: ModelFiles) -> tuple[Tokenizer | None, Tokenizer | None]:
    def read_json(name: str) -> Tokenizer:
        return Tokenizer(directory.bytes(name), str(directory.root / name))

    def read_marian(name: str, vocab_name: str) -> Tokenizer:
        vocab = directory.json(vocab_name)
        if not all(isinstance(index, int) for index in vocab.values()):
            raise BadModelFile(f"{directory.root / vocab_name} does not number its tokens")
        return MarianTokenizer(directory.bytes(name), vocab, name)

    if directory.has(ONE):
        return read_json(ONE), None
    if all(map(directory.has, (SOURCE, TARGET))):
        return read_json(SOURCE), read_json(TARGET)
    if all(map(directory.has, ("source.spm", "target.spm", "vocab.json"))):
        target_vocab = "target_vocab.json" if directory.has("target_vocab.json") else "vocab.json"
        return read_marian("source.spm", "vocab.json"), read_marian("target.spm", target_vocab)
    return None, None


def _read_labels(names: Any, config: ModelConfig) -> tuple[str, ...] | None:
    """``{"0": "bad", "1": "good"}`` in order; None for the placeholders transformers writes for unnamed classes."""
    try:
        by_index = {int(index): str(name) for index, name in names.items()}
    except (ValueError, AttributeError):
        by_index = {}
    if sorted(by_index) != list(range(config.n_classes)):
        raise BadModelFile(f"config.json has id2label={names!r}, which does not name {config.n_classes} classes")
    labels = tuple(by_index[index] for index in range(config.n_classes))
    return None if labels == tuple(f"LABEL_{index}" for index in range(config.n_classes)) else labels
