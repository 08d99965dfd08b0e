"""Train and validation splits by a hash of the source side, so that all its targets go to one side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from .examples import Example, ImageExample, Labelled, Pair, Text, key_of
from .hashing import bits, stable_key


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
    several targets, a few more.
    """
    hashes = np.fromiter(
        (stable_key("split", options.split_seed, key_of(x)) for x in examples), dtype=np.uint64, count=len(examples)
    )
    if options.valid_rows is None:
        return hashes < np.uint64(int(options.valid_fraction * (1 << 64)))
    if options.valid_rows >= len(examples):
        raise ValueError(f"valid_rows={options.valid_rows} leaves nothing of {len(examples)} examples to train on")
    threshold = np.sort(hashes)[options.valid_rows - 1]
    return hashes <= threshold


def stratified_sample(examples: Sequence[Example], n: int, seed: int) -> list[int]:
    """Indices of n examples, classes and lengths in the shares they have in all of them; in order.

    Every len / n-th of the examples sorted by class or length, those alike by a hash (systematic sampling).
    """
    if n >= len(examples):
        return list(range(len(examples)))
    shuffled = bits(stable_key("sample", seed), np.arange(len(examples)))
    order = np.lexsort((shuffled, np.array([_stratum(x) for x in examples])))
    return sorted(order[(2 * np.arange(n) + 1) * len(examples) // (2 * n)].tolist())


def _stratum(example: Example) -> int:
    """The class of an example; of one without, the length of its source side."""
    match example:
        case Labelled(label=label) | ImageExample(label=int() as label):
            return label
        case Pair(source=text) | Text(text=text):
            return len(text)
    return 0


def split_tail(text: str, fraction: float) -> tuple[str, str]:
    """The beginning and the end of one long document, which has no parts to hash."""
    cut = int(len(text) * (1 - fraction) + 1e-9)
    return text[:cut], text[cut:]


def first_occurrences(examples: Iterable[Example], how: str) -> list[int]:
    """Indices of the examples that repeat no earlier one; with how="source", no earlier source side."""
    first: dict[bytes, int] = {}
    for index, example in enumerate(examples):
        key = hashlib.sha256(_source_bytes(example) if how == "source" else _serialise(example)).digest()
        first.setdefault(key, index)
    return list(first.values())


def sha256_of(examples: Iterable[Example]) -> str:
    """A hash of examples in their order; of images in files, their names and sizes."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_serialise(example) + b"\n")
    return digest.hexdigest()


def _source_bytes(example: Example) -> bytes:
    key = key_of(example)
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


def _serialise(example: Example) -> bytes:
    match example:
        case Pair(source, target):
            fields: list[Any] = [source, target]
        case Text(text):
            fields = [text]
        case Labelled(text, label):
            fields = [text, label]
        case ImageExample(image=Path() as path, captions=captions, label=label):
            fields = [path.name, path.stat().st_size, captions, label]
        case _:
            fields = [hashlib.sha256(_source_bytes(example)).hexdigest(), example.captions, example.label]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
