"""Chance without state: a value is a hash of where it is used, so any of them can be had again without those before.

Counter-based random numbers (Salmon et al. 2011) with the finaliser of splitmix64 (Steele et al. 2014), over arrays.
Unlike numpy's generators, whose streams may change between versions, they are the same everywhere for good.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits", "bits_of", "integers", "order", "stable_key", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stable_key(*parts: str | int | bytes) -> int:
    """64 bits of some words and numbers, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def bits(key: int, index: NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 bits for each index: mix(key + (index + 1) · golden ratio)."""
    with np.errstate(over="ignore"):
        return _mix(np.uint64(key) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits_of(keys: NDArray[np.uint64], index: int) -> NDArray[np.int64]:
    """20 bits for each of many keys: number ``index`` of each one's own sequence."""
    with np.errstate(over="ignore"):
        z = keys + np.uint64(index + 1) * _GOLDEN
        return (_mix(z) >> np.uint64(44)).astype(np.int64)


def uniform(key: int, index: NDArray[np.integer]) -> NDArray[np.float64]:
    """A number in [0, 1) for each index."""
    return (bits(key, index) >> np.uint64(11)).astype(np.float64) / 9007199254740992.0


def integers(key: int, index: NDArray[np.integer], n: int) -> NDArray[np.int64]:
    """A whole number in [0, n) for each index, n < 2³²; the bias is under n / 2⁵³."""
    return np.minimum((uniform(key, index) * n).astype(np.int64), n - 1)


def order(key: int, n: int) -> NDArray[np.int64]:
    """The numbers 0 … n − 1 in an order that depends on the key alone."""
    return np.argsort(bits(key, np.arange(n)), kind="stable")
