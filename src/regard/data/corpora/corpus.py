"""What every embedded corpus is: a pure function from (split, index) to an example, and the dice it is thrown with.

Nothing is stored and nothing is remembered between calls: example 7 of a split is the same on every machine, on the
first call and on the last. The dice are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"): value n is a hash of (key, n), so an order of examples can be resumed or inspected anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

__all__ = ["Corpus", "Draws", "check_place", "examples", "fingerprint", "stable_hash"]

Item = TypeVar("Item")
E_co = TypeVar("E_co", covariant=True)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Corpus(Protocol[E_co]):
    """A named source of examples, held out by what they are made of, never by chance."""

    @property
    def name(self) -> str:
        """The word that selects this corpus: `en-ko`, `shapes`, `stdlib`."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """`train` first, then the held-out ones."""
        ...

    def size(self, split: str) -> int | None:
        """How many examples a split has; None where there is always a next one."""
        ...

    def example(self, split: str, index: int) -> E_co:
        """The example at this place: a pure function of its two arguments."""
        ...


class Draws:
    """A stream of choices that depends on its key alone (splitmix64, Steele et al. 2014).

    state ← state + golden ratio;  value = mix(state). The state is local to one example, so nothing leaks to the next.
    """

    __slots__ = ("_state",)

    def __init__(self, *key: str | int) -> None:
        self._state = stable_hash(*key)

    def bits(self) -> int:
        """The next 64 bits."""
        self._state = z = (self._state + _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """An integer in [0, n); the bias of the multiplication is under n / 2⁶⁴."""
        return (self.bits() * n) >> 64

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items, each as likely as the others."""
        return items[(self.bits() * len(items)) >> 64]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.bits() < probability * 18446744073709551616.0

    def uniform(self, low: float, high: float) -> float:
        """A real number in [low, high)."""
        return low + (high - low) * (self.bits() >> 11) / 9007199254740992.0

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The items in a drawn order (Fisher and Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result


def stable_hash(*key: str | int) -> int:
    """64 bits that are the same in every process and on every machine, unlike Python's own hash of strings."""
    text = "\x1f".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def check_place(corpus: Corpus[object], split: str, index: int) -> None:
    """Refuse a split or an index that the corpus does not have."""
    if split not in corpus.splits:
        raise ValueError(f"split={split!r} is not one of {', '.join(corpus.splits)} of the corpus {corpus.name}")
    size = corpus.size(split)
    if index < 0 or (size is not None and index >= size):
        most = "any number from 0" if size is None else f"0 to {size - 1}"
        raise IndexError(f"index={index} of split {split!r} in the corpus {corpus.name} is not {most}")


def examples(corpus: Corpus[Item], split: str, start: int = 0) -> Iterator[Item]:
    """The examples of a split in order, from `start`: without end where the split has none."""
    size = corpus.size(split)
    index = start
    while size is None or index < size:
        yield corpus.example(split, index)
        index += 1


def fingerprint(corpus: Corpus[object], n: int = 64) -> str:
    """SHA-256 over the first n examples of every split: what a run records to say which data it saw."""
    digest = hashlib.sha256(corpus.name.encode())
    for split in corpus.splits:
        for example in islice(examples(corpus, split), n):
            digest.update(f"\x1e{split}\x1f{example!r}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
