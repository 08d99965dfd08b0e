"""Train and validation splits by a hash of the source side, so that all targets of a source go to the same side."""

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
from .examples import Chat, Example, ImageExample, Labelled, Pair, Preference, Question, Tagged, Text, Triplet, key_of
from .hashing import bits, stable_key, stable_keys
from .images import IdxImages

# The most that valid_rows="auto" holds out, of many examples and of a single document.
MAX_HELD_OUT_ROWS, MAX_HELD_OUT_CHARACTERS = 5_000, 5_000_000
AT_MOST = ", at most "


@dataclass(frozen=True)
class Split:
    """How examples were held out, and hashes that identify both sides."""

    how: str
    train_sha256: str
    valid_sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_out_mask(examples: Sequence[Example], options: DataConfig) -> NDArray[np.bool_]:
    """(n,) True for the held-out examples: those whose source side has a hash below valid_fraction · 2⁶⁴.

    With valid_rows=n, the n examples with the smallest hashes are held out, and all others that share a source side
    with the last of them. "auto" holds out valid_fraction but at most MAX_HELD_OUT_ROWS in this way. If no hash is
    below the threshold, the source side with the smallest hash is held out, unless it is the only one.
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


def select(examples: Sequence[Example], indices: NDArray[np.int64]) -> Sequence[Example]:
    """The examples at ``indices``, in that order; of an ExampleFile or IdxImages without reading them."""
    if isinstance(examples, IdxImages):
        return IdxImages(examples.images, examples.labels, examples.rows[indices])
    if isinstance(examples, ExampleFile):
        return examples.select(indices)
    return [examples[index] for index in indices.tolist()]


def split_examples(
    examples: Sequence[Example], config: DataConfig, n_of_first: int | None
) -> tuple[Sequence[Example], Sequence[Example], str]:
    """(train, valid, how they were split). ``n_of_first``: hold out only examples of the first of several tables."""
    rows, fraction = config.valid_rows, config.valid_fraction
    if fraction == 0 and not isinstance(rows, int):
        return examples, select(examples, np.zeros(0, dtype=np.int64)), "nothing held out"
    if isinstance(examples, ExampleFile) and examples.holds_documents and len(examples) == 1:
        return split_tail(examples, config)
    mask = np.zeros(len(examples), dtype=np.bool_)
    candidates = examples if n_of_first is None else select(examples, np.arange(n_of_first))
    mask[:n_of_first] = held_out_mask(candidates, config)
    train, valid = (select(examples, np.flatnonzero(mask == side)) for side in (False, True))
    hashed = "pixels" if isinstance(examples, IdxImages) else "source side"
    hashed += "" if n_of_first is None else " in the first file"
    size = f"valid_rows={rows}" if isinstance(rows, int) else f"valid_fraction={fraction:g}"
    at_most = f"{AT_MOST}{MAX_HELD_OUT_ROWS:,} examples" if rows == "auto" and len(valid) >= MAX_HELD_OUT_ROWS else ""
    return train, valid, f"by hash of the {hashed}, {size}, split_seed={config.split_seed}{at_most}"


def held_out_note(split: Split) -> str | None:
    """The message to print if valid_rows="auto" held out less than valid_fraction; else None."""
    return f"held out: {split.how}; data.valid_rows=… sets another number" if AT_MOST in split.how else None


def stratified_sample(examples: Sequence[Example], n: int, seed: int) -> list[int]:
    """Sorted indices of n examples with classes and lengths in the same proportions as in all of them.

    Systematic sampling: every (len / n)-th example in the order of class or length, with ties broken by a hash.
    """
    if n >= len(examples):
        return list(range(len(examples)))
    shuffled = bits(stable_key("sample", seed), np.arange(len(examples)))
    order = np.lexsort((shuffled, np.array([_stratum(x) for x in examples])))
    return sorted(order[(2 * np.arange(n) + 1) * len(examples) // (2 * n)].tolist())


def _stratum(example: Example) -> float:
    """The label of an example, or the first of several; without a label, the length of its source side."""
    match example:
        case Labelled(label=label) | ImageExample(label=int() | float() | tuple() as label):
            if isinstance(label, tuple):
                return label[0] if label else -1
            return label
        case Pair(source=text) | Text(text=text) | Tagged(text=text) | Triplet(anchor=text) | Question(question=text):
            return len(text)
        case Chat() | Preference():
            return sum(len(content) for _, content in example.prompt)
    return 0


def split_tail(document: ExampleFile, options: DataConfig) -> tuple[ExampleFile, ExampleFile, str]:
    """Hold out the end of a single document, which has no parts to hash: (beginning, end, how it was split)."""
    n = document.n_characters(0)
    cut = int(n * (1 - options.valid_fraction) + 1e-9)
    how = f"the last {options.valid_fraction:g} of the text"
    if options.valid_rows == "auto" and n - cut > MAX_HELD_OUT_CHARACTERS:
        cut = n - MAX_HELD_OUT_CHARACTERS
        how += f"{AT_MOST}{MAX_HELD_OUT_CHARACTERS:,} characters"
    return *document.split_document(0, cut), how


def first_occurrences(examples: Sequence[Example], how: str) -> NDArray[np.int64]:
    """Indices of the examples that do not repeat an earlier one or, with how="source", an earlier source side."""
    keys = np.zeros((len(examples), 2), dtype=np.uint64)  # 128 bits each, a tenth of the memory of a Python set
    for index, example in enumerate(examples):
        source, whole = content_keys(example)
        keys[index] = np.frombuffer(source if how == "source" else whole, dtype=np.uint64, count=2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the first of several equal keys stays first
    repeats = np.zeros(len(keys), dtype=bool)
    repeats[order[1:]] = np.all(keys[order[1:]] == keys[order[:-1]], axis=1)
    return np.flatnonzero(~repeats)


def content_keys(example: Example) -> tuple[bytes, bytes]:
    """Hashes of the source side and of the whole example; an image is hashed by content, not by file name."""
    content = _source_bytes(example)
    if isinstance(example, ImageExample) and isinstance(example.image, Path):
        content = example.image.read_bytes()
    source, rest = hashlib.sha256(content).digest(), b""
    if isinstance(example, ImageExample):
        rest = json.dumps([example.captions, example.label]).encode("utf-8", "surrogatepass")
    return source, hashlib.sha256(source + rest if rest else _serialise(example)).digest()


def sha256_of(examples: Sequence[Example]) -> str:
    """A hash of the examples in their order. Image files are represented by their names and sizes."""
    digest = hashlib.sha256()
    if len(examples) and isinstance(examples, ExampleFile) and examples.holds_documents:
        is_first = True  # each document as ["text"], one part at a time
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
        case Pair(source, target):  # the output of json.dumps, several times as fast
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
        case Preference(first, second, third) | Triplet(first, second, third) | Question(first, second, third):
            fields = [first, second, third]
        case ImageExample(image=Path() as path, captions=captions, label=label):
            fields = [path.name, path.stat().st_size, captions, label]
        case _:
            fields = [hashlib.sha256(_source_bytes(example)).hexdigest(), example.captions, example.label]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
