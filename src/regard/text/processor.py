"""A model's processor, that is its tokenizers, image processor and class names, and the files that store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.jsonio import parse_json, to_json, wrong_values_as_bad_file
from .chat import TEMPLATE_FILE, ChatTemplate, template_in
from .image_processor import ImageProcessor
from .tokenizer import MarianTokenizer, Tokenizer
from .vocabulary_files import read_vocabulary

# For each special token: its fields in tokenizer_config.json, and the usual spellings.
_SPECIAL_TOKENS = {
    "bos": (("bos_token", "cls_token"), ()),
    "eos": (("eos_token", "sep_token"), ()),
    "unk": (("unk_token",), ("[UNK]", "<unk>")),
    "mask": (("mask_token",), ("[MASK]", "<mask>")),
}
ONE, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"
IMAGE, TOKENIZER_CONFIG = "preprocessor_config.json", "tokenizer_config.json"
PROMPTS = "config_sentence_transformers.json"  # the prompts to prepend to texts before they are embedded
INPUTS = "regard_inputs.json"  # of a classifier of pairs: that it reads two texts
# Files beside the tokenizer, mostly for other programs; they are written back unchanged.
_COMPANIONS = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json", IMAGE, PROMPTS, INPUTS),
)
PROCESSOR_FILES = (ONE, SOURCE, TARGET, *_COMPANIONS)


class ModelFiles(Protocol):
    """The interface of a model directory that ``read_processor`` needs."""

    @property
    def root(self) -> Path: ...

    def has(self, name: str) -> bool: ...

    def bytes(self, name: str) -> bytes: ...

    def json(self, name: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Processor:
    """Everything that prepares a model's inputs and reads its outputs.

    ``source`` is the tokenizer of the inputs, ``target`` that of the outputs, or None if they share one.
    """

    source: Tokenizer | None = None
    target: Tokenizer | None = None
    image: ImageProcessor | None = None
    labels: tuple[str, ...] | None = None
    chat_template: str | None = None  # Jinja template that writes messages as text
    companions: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # the files of _COMPANIONS, by name

    @property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizer of each side that has its own, "source" or "target"."""
        sides = {"source": self.source, "target": self.target}
        return {side: tokenizer for side, tokenizer in sides.items() if tokenizer is not None}

    def tokenizer_of(self, side: str) -> Tokenizer | None:
        """The tokenizer of "source" or "target"; that of the other side if it has none of its own."""
        own, other = (self.source, self.target) if side == "source" else (self.target, self.source)
        return other if own is None else own

    @property
    def tokenizer(self) -> Tokenizer:
        """The only tokenizer; raises ValueError if there are two or none."""
        if len(tokenizers := list(self.tokenizers.values())) != 1:
            raise ValueError(f"there are {len(tokenizers)} tokenizers; use processor.source or processor.target")
        return tokenizers[0]

    @property
    def chat(self) -> ChatTemplate | None:
        """The encoder of messages; None without a chat template."""
        return None if self.chat_template is None else ChatTemplate(self.chat_template, self.tokenizer)

    def prompt(self, name: str | None = None) -> str:
        """The prompt to prepend to a text before it is embedded: the named one, else the default, else an empty one."""
        content = parse_json(self.companions[PROMPTS], PROMPTS) if PROMPTS in self.companions else {}
        prompts = content.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise BadModelFile(f"{PROMPTS}: prompts must map names to texts")
        name = content.get("default_prompt_name") if name is None else name
        if name is not None and name not in prompts:
            raise ValueError(f"there is no prompt {name!r}; this model has {', '.join(prompts) or 'none'}")
        return "" if name is None else prompts[name]

    @property
    def reads_pairs(self) -> bool:
        """Whether the model is a classifier that was trained on pairs of texts."""
        return INPUTS in self.companions and parse_json(self.companions[INPUTS], INPUTS).get("texts") == 2

    def with_pairs(self, reads_pairs: bool) -> Processor:
        """The processor of a classifier that is trained on pairs of texts, or on single ones."""
        others = {name: content for name, content in self.companions.items() if name != INPUTS}
        return replace(self, companions=others | ({INPUTS: to_json({"texts": 2})} if reads_pairs else {}))

    def sizes(self) -> dict[str, int]:
        """Vocabulary size of each side that has its own tokenizer."""
        return {side: tokenizer.size for side, tokenizer in self.tokenizers.items()}

    def files(self, config: ModelConfig) -> dict[str, bytes]:
        """The files to save, by name; ``read_processor`` and transformers can both load them."""
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
                if not both:  # transformers reads the special tokens from tokenizer_config.json
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
    """The processor of a model directory whose config.json has ``fields``; None if it has no part of one."""
    source, target = _read_tokenizers(directory)
    names: Any = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG):
        names |= directory.json(name) if directory.has(name) else {}
    if source is None:
        with wrong_values_as_bad_file(f"{directory.root}: a file of the vocabulary or {TOKENIZER_CONFIG}"):
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
    if isinstance(classes, dict) and fields.get("num_labels", len(classes)) != len(classes):
        classes = None  # stale names for another number of classes; transformers ignores them too
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
    tokens in tokenizer_config.json. Ids found in neither are left out."""
    if tokenizer is None or tokenizer.is_native:
        return tokenizer
    ids: dict[str, int | None] = {"pad": config.pad_id, "bos": config.bos_id, "eos": config.eos_id}
    for special, (keys, usual) in _SPECIAL_TOKENS.items():
        if ids.get(special) is not None:
            continue
        values = [(names or {}).get(key) for key in keys]
        texts = [x["content"] if isinstance(x, dict) and "content" in x else x for x in values]
        candidates = (tokenizer.token_id(text) for text in (*texts, *usual) if isinstance(text, str))
        ids[special] = next((index for index in candidates if index is not None), None)
    tokenizer = tokenizer.with_special_ids(**{name: index for name, index in ids.items() if index is not None})
    is_literal = (names or {}).get("split_special_tokens") is True and not isinstance(tokenizer, MarianTokenizer)
    return tokenizer.with_literal_special_tokens() if is_literal else tokenizer


def _read_tokenizers(directory: ModelFiles) -> tuple[Tokenizer | None, Tokenizer | None]:
    def read_json(name: str) -> Tokenizer:
        return Tokenizer(directory.bytes(name), str(directory.root / name))

    def read_marian(name: str, vocab_name: str) -> Tokenizer:
        vocab = directory.json(vocab_name)
        if not all(isinstance(index, int) for index in vocab.values()):
            raise BadModelFile(f"{directory.root / vocab_name} does not map every token to an integer")
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
        raise BadModelFile(f"id2label={names!r} in config.json does not name {config.n_classes} classes")
    labels = tuple(by_index[index] for index in range(config.n_classes))
    return None if labels == tuple(f"LABEL_{index}" for index in range(config.n_classes)) else labels
