"""Held out by what is asked, not by chance: a hash of the source side decides, so all its answers go to one side."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .examples import DataConfig, Example, ImageExample, Labelled, Pair, Text, key_of
from .hashing import stable_key

__all__ = ["Split", "deduplicate", "held_out", "hold_out_tail", "sha256_of"]


@dataclass(frozen=True)
class Split:
    """How examples were held out, and a hash to recognise them by."""

    how: str
    train_sha256: str
    valid_sha256: str

    def document(self) -> dict[str, Any]:
        return {"how": self.how, "train_sha256": self.train_sha256, "valid_sha256": self.valid_sha256}


def held_out(examples: Sequence[Example], options: DataConfig) -> NDArray[np.bool_]:
    """Which examples are held out: those whose source side has a hash below valid_fraction · 2⁶⁴.

    With valid_rows, source sides are taken by rising hash until there are that many examples; where the last one taken
    has several answers, a few more.
    """
    hashes = np.fromiter(
        (stable_key("split", options.split_seed, key_of(x)) for x in examples), dtype=np.uint64, count=len(examples)
    )
    if options.valid_rows is None:
        return hashes < np.uint64(int(options.valid_fraction * (1 << 64)))
    if options.valid_rows >= len(examples):
        raise ValueError(f"valid_rows={options.valid_rows} leaves nothing of {len(examples)} examples to train on")
    border = np.sort(hashes)[options.valid_rows - 1]
    return hashes <= border


def hold_out_tail(text: str, fraction: float) -> tuple[str, str]:
    """The beginning and the end of one long document, which has no parts to hash."""
    cut = int(len(text) * (1 - fraction) + 1e-9)
    return text[:cut], text[cut:]


def deduplicate(examples: Iterable[Example], how: str) -> tuple[list[Example], int]:
    """The first of each, and how many others there were."""
    seen: set[int] = set()
    kept: list[Example] = []
    n = 0
    for example in examples:
        n += 1
        key = stable_key(key_of(example)) if how == "source" else stable_key(_line(example))
        if key not in seen:
            seen.add(key)
            kept.append(example)
    return kept, n - len(kept)


def sha256_of(examples: Iterable[Example]) -> str:
    """A hash of examples in their order; of images in files, their names and sizes."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_line(example) + b"\n")
    return digest.hexdigest()


def repeats(keys: Iterable[str | bytes]) -> int:
    """How many keys stand there that had stood there before."""
    counts = Counter(stable_key(key) for key in keys)
    return sum(counts.values()) - len(counts)


def _line(example: Example) -> bytes:
    match example:
        case Pair(source, target):
            fields: list[Any] = [source, target]
        case Text(text):
            fields = [text]
        case Labelled(text, label):
            fields = [text, label]
        case ImageExample(image=Path() as path, captions=captions, label=label):
            fields = [path.name, path.stat().st_size, captions, label]
        case ImageExample(image=image, captions=captions, label=label):
            fields = [hashlib.sha256(image.tobytes()).hexdigest(), captions, label]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
