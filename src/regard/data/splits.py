"""Train and validation splits by a hash of the source side, so that all its targets go to one side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring as _quote
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from .example_files import ExampleFile, document_parts
from .examples import Chat, Example, ImageExample, Labelled, Pair, Preference, Tagged, Text, key_of
from .hashing import bits, stable_key, stable_keys

# What valid_rows="auto" holds out at most: of rows, and of a single text.
MAX_HELD_OUT_ROWS, MAX_HELD_OUT_CHARACTERS = 5_000, 5_000_000
AT_MOST = ", at most "


@dataclass(frozen=True)
class Split:
    """How examples were held out, and a hash to recognise them by."""

    how: str
    train_sha256: str
    valid_sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_out_mask(examples: Sequence[Example], options: DataConfig) -> NDArray[np.bool_]:
    """(n,) True for the examples held out: those whose source side has a hash below valid_fraction · 2⁶⁴.

    With valid_rows, source sides are taken by rising hash until there are that many examples; where the last one has
    several targets, a few more. "auto" does so where the share would be more than MAX_HELD_OUT_ROWS. Where source sides
    are so few that none would be held out, the one with the smallest hash is, unless it is the only one.
    """
    keys = stable_keys(("split", options.split_seed), map(key_of, examples))
    hashes = np.fromiter(keys, dtype=np.uint64, count=len(examples))
    rows = options.valid_rows
    if not isinstance(rows, int):
        below = hashes < np.uint64(int(options.valid_fraction * (1 << 64)))
        if not below.any() and np.unique(hashes).size > 1:
            return hashes == hashes.min()
        if rows is None or below.sum() <= MAX_HELD_OUT_ROWS:
            return below
        rows = MAX_HELD_OUT_ROWS
    if rows >= len(examples):
        raise ValueError(f"valid_rows={rows} leaves nothing of {len(examples)} examples to train on")
    threshold = np.partition(hashes, rows - 1)[rows - 1]
    return hashes <= threshold


def held_out_note(split: Split) -> str | None:
    """What to say where valid_rows="auto" holds out less than the share."""
    return f"held out: {split.how}; data.valid_rows=… sets another number" if AT_MOST in split.how else None


def stratified_sample(examples: Sequence[Example], n: int, seed: int) -> list[int]:
    """Indices of n examples, classes and lengths in the shares they have in all of them; in order.

    Every len / n-th of the examples sorted by class or length, those alike by a hash (systematic sampling).
    """
    if n >= len(examples):
        return list(range(len(examples)))
    shuffled = bits(stable_key("sample", seed), np.arange(len(examples)))
    order = np.lexsort((shuffled, np.array([_stratum(x) for x in examples])))
    return sorted(order[(2 * np.arange(n) + 1) * len(examples) // (2 * n)].tolist())


def _stratum(example: Example) -> float:
    """The class of an example, the first of several, or its number; of one without, the length of its source side."""
    match example:
        case Labelled(label=label) | ImageExample(label=int() | float() | tuple() as label):
            return label if not isinstance(label, tuple) else label[0] if label else -1
        case Pair(source=text) | Text(text=text) | Tagged(text=text):
            return len(text)
        case Chat() | Preference():
            return sum(len(content) for _, content in example.prompt)
    return 0


def split_tail(document: ExampleFile, options: DataConfig) -> tuple[ExampleFile, ExampleFile, str]:
    """The beginning and the end of one long document, which has no parts to hash, and what of it is held out."""
    n, fraction = document.n_characters(0), options.valid_fraction
    cut, how = int(n * (1 - fraction) + 1e-9), f"the last {fraction:g} of the text"
    if options.valid_rows == "auto" and n - cut > MAX_HELD_OUT_CHARACTERS:
        cut, how = n - MAX_HELD_OUT_CHARACTERS, f"{how}{AT_MOST}{MAX_HELD_OUT_CHARACTERS:,} characters"
    return *document.split_document(0, cut), how


def first_occurrences(examples: Sequence[Example], how: str) -> NDArray[np.int64]:
    """Indices of the examples that repeat no earlier one; with how="source", no earlier source side."""
    keys = np.zeros((len(examples), 2), dtype=np.uint64)  # of 128 bits: a set of Python's would take ten times as much
    for index, example in enumerate(examples):
        source, whole = content_keys(example)
        keys[index] = np.frombuffer(source if how == "source" else whole, dtype=np.uint64, count=2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the first of those alike comes first
    repeats = np.zeros(len(keys), dtype=bool)
    repeats[order[1:]] = np.all(keys[order[1:]] == keys[order[:-1]], axis=1)
    return np.flatnonzero(~repeats)


def content_keys(example: Example) -> tuple[bytes, bytes]:
    """Hashes of the source side and of the whole example; of an image, of its content, whatever its file is called."""
    content = _source_bytes(example)
    if isinstance(example, ImageExample) and isinstance(example.image, Path):
        content = example.image.read_bytes()
    source, rest = hashlib.sha256(content).digest(), b""
    if isinstance(example, ImageExample):
        rest = json.dumps([example.captions, example.label]).encode("utf-8", "surrogatepass")
    return source, hashlib.sha256(source + rest if rest else _serialise(example)).digest()


def sha256_of(examples: Sequence[Example]) -> str:
    """A hash of examples in their order; of images in files, their names and sizes."""
    digest = hashlib.sha256()
    if len(examples) and isinstance(examples, ExampleFile) and examples.holds_documents:
        is_first = True  # each as ["text"], a part at a time
        for part, is_last in document_parts(examples):
            text = _quote(part)[1:-1].encode("utf-8", "surrogatepass")
            digest.update(b'["' * is_first + text + b'"]\n' * is_last)
            is_first = is_last
        return digest.hexdigest()
    for example in examples:
        digest.update(_serialise(example) + b"\n")
    return digest.hexdigest()


def _source_bytes(example: Example) -> bytes:
    key = key_of(example)
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


def _serialise(example: Example) -> bytes:
    match example:
        case Pair(source, target):  # as json.dumps writes them, several times as fast
            return f"[{_quote(source)}, {_quote(target)}]".encode("utf-8", "surrogatepass")
        case Text(text):
            return f"[{_quote(text)}]".encode("utf-8", "surrogatepass")
        case Labelled(text, int() as label, None):
            return f"[{_quote(text)}, {label}]".encode("utf-8", "surrogatepass")
        case Labelled(text, label, second):
            fields: list[Any] = [text, label] if second is None else [text, label, second]
        case Tagged(words, tags):
            fields = [words, tags]
        case Chat(messages):
            fields = [messages]
        case Preference(prompt, chosen, rejected):
            fields = [prompt, chosen, rejected]
        case ImageExample(image=Path() as path, captions=captions, label=label):
            fields = [path.name, path.stat().st_size, captions, label]
        case _:
            fields = [hashlib.sha256(_source_bytes(example)).hexdigest(), example.captions, example.label]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
