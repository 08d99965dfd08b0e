"""Held out by what is asked, not by chance: a hash of the source side decides, so all its answers go to one side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from .examples import Example, ImageExample, Labelled, Pair, Text, key_of
from .hashing import stable_key

__all__ = ["Split", "firsts", "held_out", "hold_out_tail", "sha256_of"]


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


def firsts(examples: Iterable[Example], how: str) -> list[int]:
    """Where the first of each stands, of examples that are the same, or only ask the same."""
    seen: set[bytes] = set()
    kept: list[int] = []
    for place, example in enumerate(examples):
        key = hashlib.sha256(_asked(example) if how == "source" else _line(example)).digest()
        if key not in seen:
            seen.add(key)
            kept.append(place)
    return kept


def sha256_of(examples: Iterable[Example]) -> str:
    """A hash of examples in their order; of images in files, their names and sizes."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_line(example) + b"\n")
    return digest.hexdigest()


def _asked(example: Example) -> bytes:
    key = key_of(example)
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


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
        case _:
            fields = [hashlib.sha256(_asked(example)).hexdigest(), example.captions, example.label]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
