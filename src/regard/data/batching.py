"""Which examples make up which batch: a pure function of (seed, epoch, position), so any batch can be computed again.

Examples are ordered by length and, where lengths are equal, by a hash of (seed, epoch, index); that order is cut into
batches of at most batch_tokens, and the batches are shuffled by another hash. The cuts depend on the lengths alone, so
every epoch has the same number of batches, and the step at which a run resumes says where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..foundation.checks import check_positive
from .hashing import bits, integers, permutation, stable_key, uniform
from .packing import IGNORE


class BatchPlan:
    """Batches by tokens, with padding counted: B × the longest of the batch is at most ``batch_tokens``.

    ``lengths`` is (n,) tokens of each example, or (n, 2) of pairs: then each side keeps to the limit. Examples longer
    than ``max_len`` are left out (``dropped``); a batch has at most ``max_examples``. Without ``shuffle`` (evaluation)
    batches run from short to long, the same in every epoch.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch_tokens: int,
        *,
        seed: int = 0,
        max_len: int | None = None,
        shuffle: bool = True,
        max_examples: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_tokens, self.seed, self.shuffle = batch_tokens, seed, shuffle
        if self.lengths.ndim not in (1, 2) or len(self.lengths) == 0:
            raise ValueError(f"lengths has shape {self.lengths.shape}, but (n,) or (n, sides) with n ≥ 1 is needed")
        check_positive(batch_tokens=batch_tokens, max_examples=max_examples, max_len=max_len)
        longest = self.lengths if self.lengths.ndim == 1 else self.lengths.max(axis=1)
        fits = longest <= (max_len or np.iinfo(np.int64).max)
        self._included, self.dropped = np.flatnonzero(fits), np.flatnonzero(~fits)
        if not len(self._included):
            raise ValueError(f"every example is longer than max_len={max_len}")
        sizes = longest[self._included]
        if sizes.max() > batch_tokens:
            hint = "raise it, or leave long examples out with max_len"
            raise ValueError(f"an example has {sizes.max()} tokens, but batch_tokens={batch_tokens}; {hint}")
        self._sort_key = sizes
        if self.lengths.ndim == 2:  # by the longer side, then, coarsely, by the other, so that both are padded little
            self._sort_key = sizes * (1 << 32) + self.lengths[self._included].min(axis=1) // 4
        cuts = [0]  # where batches end in the sorted order
        for index, size in enumerate(np.sort(sizes).tolist()):  # rising, so the last is the longest
            n = index - cuts[-1]
            if (n + 1) * max(size, 1) > batch_tokens or n >= (max_examples or len(sizes)):
                cuts.append(index)
        self._cuts = np.asarray([*cuts, len(sizes)], dtype=np.int64)

    @classmethod
    def by_examples(cls, n: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> BatchPlan:
        """Batches of ``batch_size`` examples that are all of one size, as images are."""
        return cls(np.ones(n), batch_size, seed=seed, shuffle=shuffle)

    def count(self, world: int = 1) -> int:
        """Batches of an epoch for each of ``world`` ranks; a remainder is left for another epoch."""
        n = (len(self._cuts) - 1) // world
        if n == 0:
            raise ValueError(f"there are {len(self._cuts) - 1} batches, too few for world={world}")
        return n

    def at(self, step: int, world: int = 1) -> tuple[int, int]:
        """(epoch, position) of the batch that is read at this step, counted from 0."""
        return divmod(step, self.count(world))

    def batch(self, epoch: int, position: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """The examples of a batch: rank r of n reads batches r, r + n, r + 2n … of the epoch."""
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must lie between 0 and {world - 1}, world={world}")
        if not 0 <= position < self.count(world):
            raise IndexError(f"position={position} is not one of the {self.count(world)} batches of an epoch")
        examples, batches = _epoch_order(self, epoch if self.shuffle else 0)
        which = batches[position * world + rank]
        return examples[self._cuts[which] : self._cuts[which + 1]]

    def padding(self) -> float:
        """Share of a batch that is padding, over an epoch."""
        examples, _ = _epoch_order(self, 0)
        sizes = self.lengths.reshape(len(self.lengths), -1)[examples]
        longest = np.maximum.reduceat(sizes, self._cuts[:-1], axis=0)
        padded = (longest * np.diff(self._cuts)[:, None]).sum()
        return float(1 - sizes.sum() / max(int(padded), 1))


@lru_cache(maxsize=4)
def _epoch_order(plan: BatchPlan, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the examples in order, the order of the batches); cached, because every batch of the epoch needs it."""
    n_batches = len(plan._cuts) - 1
    if not plan.shuffle:
        return plan._included[np.argsort(plan._sort_key, kind="stable")], np.arange(n_batches)
    ties = bits(stable_key("examples", plan.seed, epoch), plan._included)
    batches = permutation(stable_key("batches", plan.seed, epoch), n_batches)
    return plan._included[np.lexsort((ties, plan._sort_key))], batches


def balanced_rows(classes: ArrayLike) -> NDArray[np.int64]:
    """The examples of a balanced epoch: those of rarer classes come again until every class is as large as the largest.

    ``classes`` (n,) is the class of each example; the result (classes × the largest's size,) indexes them.
    """
    numbers = np.asarray(classes)
    size = int(np.bincount(numbers).max())
    return np.concatenate([np.resize(np.flatnonzero(numbers == c), size) for c in np.unique(numbers)])


def pad(rows: Sequence[Sequence[int]], value: int = 0, *, multiple: int = 1) -> Tensor:
    """tokens (B, T), shorter rows filled up at their end, T a multiple of ``multiple``."""
    longest = max((len(row) for row in rows), default=0)
    width = -(-longest // multiple) * multiple
    tokens = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return torch.from_numpy(tokens)


def pair_segments(tokens: Tensor, separator: int) -> Tensor:
    """BERT's sentence A and B: 0 up to the first separator, 1 after it.   tokens (B, T) → (B, T)"""
    is_separator = (tokens == separator).long()
    return ((is_separator.cumsum(1) - is_separator) > 0).long()


def cut_pair(row: list[int], separator: int, max_len: int) -> list[int]:
    """A pair of texts, each followed by a separator, in at most ``max_len`` tokens: the longer text is cut first."""
    start = row.index(separator)
    end = next((place for place in range(start, len(row)) if row[place] != separator), len(row))
    first, between, second = row[:start], row[start:end], row[end:-1]
    room = max_len - len(between) - 1
    n_second = min(len(second), max(room // 2, room - len(first)))
    return [*first[: room - n_second], *between, *second[:n_second], separator]


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """Token ids with some masked, and the targets: their original ids, IGNORE elsewhere."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


def mask_tokens(
    ids: Sequence[int] | NDArray[np.integer],
    *,
    vocab_size: int,
    mask_id: int,
    special: Iterable[int] = (0, 1, 2, 3, 4),
    share: float = 0.15,
    seed: int = 0,
    epoch: int = 0,
    index: int = 0,
) -> MaskedTokens:
    """BERT's task (Devlin et al. 2019): of 15 % of the tokens, 80 % become <mask>, 10 % another token, 10 % stay.

    A function of (seed, epoch, index) alone; special tokens are never chosen, and one token always is where any can be.
    """
    inputs = np.array(ids, dtype=np.int64)
    special_ids = np.asarray(sorted(special), dtype=np.int64)
    ordinary_ids = np.setdiff1d(np.arange(vocab_size), special_ids)
    key, positions = stable_key("mask", seed, epoch, index), np.arange(len(inputs))
    draws = np.where(np.isin(inputs, special_ids), 2.0, uniform(key, positions))
    chosen = draws < share
    if not chosen.any() and len(inputs) and draws.min() < 1.0:
        chosen[draws.argmin()] = True
    targets = np.where(chosen, inputs, IGNORE)
    action = uniform(stable_key(key, "what"), positions)
    n = len(ordinary_ids)
    random_ids = ordinary_ids[integers(stable_key(key, "which"), positions, n)] if n else inputs
    inputs = np.where(chosen & (action < 0.8), mask_id, np.where(chosen & (action >= 0.9), random_ids, inputs))
    return MaskedTokens(inputs, targets)


def has_partial_batch(plan: BatchPlan) -> bool:
    """Whether the last batch of an epoch of equal rows is smaller than the others."""
    return len(plan.lengths) > plan.batch_tokens and len(plan.lengths) % plan.batch_tokens > 0
