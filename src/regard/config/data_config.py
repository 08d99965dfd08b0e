"""DataConfig: where examples come from, how they are read, and how they become ids and pixels."""

from __future__ import annotations

import codecs
from io import BytesIO, TextIOWrapper
from typing import Literal, Self

from pydantic import field_validator, model_validator

from .base import Config, join_paths, split_commas

Kind = Literal[
    "pairs", "text", "labelled", "tagged", "captions", "images", "chats", "preferences", "triplets", "questions"
]
Format = Literal[
    "tsv", "csv", "jsonl", "json", "parquet", "conll", "parallel", "text", "captions", "folder", "idx", "hf"
]
ProblemType = Literal["single_label", "multi_label", "regression"]  # names of transformers, without _classification
TokenizerKind = Literal["chars", "bytes", "words", "bpe", "unigram"]  # trained on the data
TOKENIZER_FILES = (".json", ".model", ".spm")  # a tokenizer.json, or a SentencePiece model


class DataConfig(Config):
    """Where examples come from and how they are read."""

    source: str = "en-ko"
    """An embedded corpus, a file, two parallel files (a.en,a.de), several tables of pairs (a.tsv,b.tsv), a folder, or
    hf:name."""
    valid: str | None = None
    """Separate held-out examples, given like source; None: a part of the source is held out."""
    format: Format | None = None
    """The file format; None: detected from name and content."""
    kind: Kind | None = None
    """What the examples are; None: detected from the content."""
    columns: tuple[str | int, ...] | None = None
    """Columns by name or number from 0, in the order text/source/image/prompt, then target/label/caption/answer; others
    are ignored. Three columns are two texts and their label, or prompt, chosen and rejected, or anchor, positive and
    negative; in CoNLL files, words and tags; a column may contain messages. For a folder of parallel files, the two
    endings: en, de."""
    header: bool | None = None
    """Whether the first line of a table names its columns; None: detected from the content."""
    encoding: str = "auto"
    """Encoding of text files: utf-8, utf-16, cp949 or any other that Python supports; auto: detected from the
    content."""
    labels: tuple[str, ...] | None = None
    """The classes in order; a line with any other class is a bad line. None: those that occur, sorted."""
    problem_type: ProblemType = "single_label"
    """What a label is: one class, any number of them (a;b, or a JSON list), or a number to predict."""
    images: str | None = None
    """The folder with the images of a caption file; None: that of the file, or images/ next to it."""
    documents: Literal["whole", "line", "blank"] = "whole"
    """Whether a text file is one document, has one per line, or has documents separated by blank lines."""
    valid_fraction: float = 0.05
    """Share of the examples that is held out if valid is not given."""
    valid_rows: int | Literal["auto"] | None = "auto"
    """Number of held-out examples instead of a share: those whose source side has the smallest hashes; auto: the share,
    but at most 5,000 examples, or 5 million characters of a single text; None: the share, however many those are."""
    split_seed: int = 0
    """Seed that determines which examples are held out."""
    deduplicated: Literal["no", "exact", "source"] = "no"
    """Drop repeated examples (exact), or all but the first with the same source side (source)."""
    bad_lines: Literal["error", "skip"] = "error"
    """Reject files with bad lines, or skip those lines and report them."""
    normalise: Literal["NFC", "none"] = "NFC"
    """Unicode's composed form: a Hangul syllable typed as its letters becomes one character."""
    max_chars: int = 100_000
    """Maximum length of a line, beyond which it is a bad line; a hundred times as much for documents of many lines."""
    max_pixels: int = 50_000_000
    """Maximum size of an image, beyond which it is a bad line: decoding it could exhaust memory."""
    check_images: bool = True
    """Decode every image once when the source is opened, so that none fails during training."""
    epoch_examples: int = 100_000
    """Examples per epoch of an embedded corpus that has no end."""

    tokenizer: str = "auto"
    """chars, bytes, words, bpe, unigram, or a file: a tokenizer.json learned here, or a SentencePiece .model; auto:
    that of train.init, else one that suits the task."""
    vocab_size: int = 8000
    """Tokens to learn (bpe, unigram)."""
    joint_vocab: bool = True
    """One vocabulary for source and target."""
    max_len: int = 256
    """Maximum tokens of a text, or the context length of a language model."""
    max_target_len: int | None = None
    """Maximum tokens of a target or caption; None: max_len."""
    too_long: Literal["auto", "drop", "truncate"] = "auto"
    """What happens to longer examples, which are counted and reported; auto: pairs to translate and chats are dropped,
    others truncated."""
    packing: Literal["auto", "documents", "blocks"] = "auto"
    """Rows of a language model: documents packed side by side that do not see each other, or blocks cut anywhere from
    the text; auto: blocks for a single document, else documents."""
    passages: int | None = None
    """Number of passages to read per question, of those in the file; None: all."""
    chat_template: str | None = None
    """How messages are formatted as text: a Jinja file, or plain; None: the tokenizer's template, else plain."""
    mask_rate: float = 0.15
    """Share of the tokens that a masked language model must predict."""
    hide_rate: float = 0.0
    """Share of the tokens that become <mask> in training texts to classify or to translate (word dropout)."""
    bpe_dropout: float = 0.0
    """Probability that a BPE merge is skipped; the training pairs of a translator are segmented anew in every epoch
    (0.1 is usual)."""
    channels: Literal["model", "auto"] = "model"
    """Channels of images: model.n_channels; auto: 3 if the training images have colours."""
    shift: int = 0
    """Maximum shift of training images in pixels."""
    flip: bool = False
    """Every second training image is mirrored."""

    _join = field_validator("source", "valid", mode="before")(join_paths)
    _split = field_validator("columns", "labels", mode="before")(split_commas)

    @field_validator("columns")
    @classmethod
    def _column_numbers(cls, value: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        return None if value is None else tuple(int(x) if isinstance(x, str) and x.isdecimal() else x for x in value)

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        if value == "auto":
            return value
        try:
            TextIOWrapper(BytesIO(), value)  # LookupError for a codec that decodes to bytes, such as hex
            return codecs.lookup(value).name
        except LookupError:
            raise ValueError(f"{value!r} is an unknown encoding; utf-8, utf-16 and cp949 are known") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_shares(("valid_fraction", "hide_rate", "bpe_dropout"))
        if not 0.0 < self.mask_rate < 1.0:
            raise ValueError(f"mask_rate={self.mask_rate} must lie in (0, 1)")
        self.check_at_least(0, ("shift",))
        self.check_at_least(1, _POSITIVE if self.valid_rows == "auto" else ("valid_rows", *_POSITIVE))
        return self


_POSITIVE = ("passages", "max_chars", "max_pixels", "epoch_examples", "vocab_size", "max_len", "max_target_len")
