"""Stateless random numbers: each value is a hash of a key and an index, so any one can be computed independently.

Counter-based random numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the finaliser of
splitmix64 (Steele et al. 2014): functions over arrays, and `Draws`, a stream of single choices. Unlike numpy's
generators, whose streams may change between versions, they are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_INT = int(_GOLDEN)
_MASK = (1 << 64) - 1


def stable_key(*parts: str | int | bytes) -> int:
    """A 64-bit hash of some strings and integers, the same in every process."""
    return next(stable_keys(parts[:-1], parts[-1:]))


def stable_keys(first: Iterable[str | int | bytes], last: Iterable[str | int | bytes]) -> Iterator[int]:
    """``stable_key(*first, x)`` for each x of ``last``."""
    prefix = hashlib.blake2b(digest_size=8)
    for part in first:
        prefix.update(_length_and_bytes(part))
    for part in last:
        digest = prefix.copy()
        digest.update(_length_and_bytes(part))
        yield int.from_bytes(digest.digest(), "little")


def _length_and_bytes(part: str | int | bytes) -> bytes:
    raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw


def stable_hash(*key: str | int) -> int:
    """Like ``stable_key``, with the older format on which the embedded corpora and their splits depend."""
    text = "\x1f".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(key: int, index: NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 random bits for each index: mix(key + (index + 1) · golden ratio)."""
    with np.errstate(over="ignore"):
        return _mix(np.uint64(key) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits_of(keys: NDArray[np.uint64], index: int) -> NDArray[np.int64]:
    """20 random bits for each key: element ``index`` of that key's sequence."""
    with np.errstate(over="ignore"):
        return (_mix(keys + np.uint64(index + 1) * _GOLDEN) >> np.uint64(44)).astype(np.int64)


def uniform(key: int, index: NDArray[np.integer]) -> NDArray[np.float64]:
    """A random number in [0, 1) for each index."""
    return (bits(key, index) >> np.uint64(11)).astype(np.float64) / 9007199254740992.0


def integers(key: int, index: NDArray[np.integer], n: int) -> NDArray[np.int64]:
    """A random integer in [0, n) for each index, n < 2³²; the bias is under n / 2⁵³."""
    return np.minimum((uniform(key, index) * n).astype(np.int64), n - 1)


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """A random permutation of 0 … n − 1 that depends only on the key."""
    return np.argsort(bits(key, np.arange(n)), kind="stable")


class Draws:
    """A stream of random choices that depends only on its key: state ← state + golden ratio, value = mix(state)."""

    __slots__ = ("_state",)

    def __init__(self, *key: str | int) -> None:
        self._state = stable_hash(*key)

    def bits(self) -> int:
        """The next 64 bits."""
        self._state = z = (self._state + _GOLDEN_INT) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """An integer in [0, n); the bias of the multiplication is under n / 2⁶⁴."""
        return (self.bits() * n) >> 64

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items, uniformly at random."""
        return items[(self.bits() * len(items)) >> 64]

    def chance(self, probability: float) -> bool:
        return self.bits() < probability * 18446744073709551616.0

    def uniform(self, low: float, high: float) -> float:
        """A real number in [low, high)."""
        return low + (high - low) * (self.bits() >> 11) / 9007199254740992.0

    def shuffle(self, items: Sequence[Item]) -> list[Item]:
        """A new list of the items in random order (Fisher–Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result
