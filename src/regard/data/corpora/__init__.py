"""The embedded corpora: available on every machine, deterministic, mostly endless, with splits held out by composition.

`en-ko` has sentence pairs with their true alignment, `shapes` drawn scenes with captions and the box of every object,
`stdlib` the source of the installed Python standard library, `repeats` random words followed by the same words again.
Each is a pure function from (split, index) to an example: example 7 of a split is always the same, on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import import_module
from itertools import count, islice
from typing import Any, Protocol, TypeVar

from ...foundation.checks import did_you_mean
from ..hashing import Draws

__all__ = ["CORPORA", "Corpus", "Draws", "check_index", "examples", "fingerprint", "open_corpus"]

Item = TypeVar("Item")
E_co = TypeVar("E_co", covariant=True)

_CLASSES = {
    "en-ko": (".enko", "EnKo"),
    "shapes": (".shapes", "Shapes"),
    "stdlib": (".stdlib_text", "Stdlib"),
    "repeats": (".repeats", "Repeats"),
}
CORPORA = tuple(_CLASSES)


class Corpus(Protocol[E_co]):
    """A named source of examples whose held-out splits are chosen by composition, not at random."""

    @property
    def name(self) -> str:
        """The name that selects this corpus: `en-ko`, `shapes`, `stdlib`, `repeats`."""

    @property
    def splits(self) -> tuple[str, ...]:
        """`train` first, then the held-out ones."""

    def size(self, split: str) -> int | None:
        """Number of examples of a split; None if it is endless."""

    def example(self, split: str, index: int) -> E_co:
        """The example at this index: a pure function of its two arguments."""


def open_corpus(name: str) -> Corpus[Any]:
    """The embedded corpus with this name and default settings. Its module is imported only now."""
    if name not in _CLASSES:
        raise ValueError(f"corpus={name!r} is not one of {', '.join(CORPORA)}{did_you_mean(name, CORPORA, cutoff=0.5)}")
    module, class_name = _CLASSES[name]
    corpus: Corpus[Any] = getattr(import_module(module, __package__), class_name)()
    return corpus


def check_index(corpus: Corpus[object], split: str, index: int) -> None:
    """Raise ValueError or IndexError for a split or an index that the corpus does not have."""
    if split not in corpus.splits:
        raise ValueError(f"split={split!r} is not one of {', '.join(corpus.splits)} of the corpus {corpus.name}")
    size = corpus.size(split)
    if index < 0 or (size is not None and index >= size):
        valid = "any number from 0" if size is None else f"0 to {size - 1}"
        raise IndexError(f"index={index} of split {split!r} in the corpus {corpus.name} is not {valid}")


def examples(corpus: Corpus[Item], split: str, start: int = 0) -> Iterator[Item]:
    """The examples of a split in order from `start` on; endless if the split is."""
    size = corpus.size(split)
    for index in count(start) if size is None else range(start, size):
        yield corpus.example(split, index)


def fingerprint(corpus: Corpus[object], n: int = 64) -> str:
    """SHA-256 over the first n examples of every split; a run records it to identify its data."""
    digest = hashlib.sha256(corpus.name.encode())
    for split in corpus.splits:
        for example in islice(examples(corpus, split), n):
            digest.update(f"\x1e{split}\x1f{example!r}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
