"""Batches of examples as a pure function of (seed, epoch, position), so that any batch can be recomputed.

Examples are sorted by length, with ties broken by a hash of (seed, epoch, index). This order is cut into batches of at
most batch_tokens, and the batches are shuffled by another hash. The cuts depend only on the lengths, so every epoch
has the same number of batches, and the step number is all a run needs to resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """Batches limited by tokens including padding: B × the longest example is at most ``batch_tokens``.

    ``lengths`` is (n,), the number of tokens of each example, or (n, 2) for pairs, where each side respects the limit.
    Examples longer than ``max_len`` are left out; a batch has at most ``max_examples``.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch_tokens: int,
        *,
        seed: int = 0,
        max_len: int | None = None,
        max_examples: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_tokens, self.seed = batch_tokens, seed
        check_positive(batch_tokens=batch_tokens, max_examples=max_examples, max_len=max_len)
        longest = self.lengths if self.lengths.ndim == 1 else self.lengths.max(axis=1)
        self._included = np.flatnonzero(longest <= (max_len or np.iinfo(np.int64).max))
        if not len(self._included):
            raise ValueError(
                f"every example is longer than max_len={max_len}" if len(longest) else "there is no example"
            )
        sizes = longest[self._included]
        if sizes.max() > batch_tokens:
            hint = "raise it, or leave long examples out with max_len"
            raise ValueError(f"an example has {sizes.max()} tokens, but batch_tokens={batch_tokens}; {hint}")
        self._sort_key = sizes
        if self.lengths.ndim == 2:  # by the longer side, then roughly by the other, so that both need little padding
            self._sort_key = sizes * (1 << 32) + self.lengths[self._included].min(axis=1) // 4
        cuts = [0]  # batch boundaries in the sorted order
        for index, size in enumerate(np.sort(sizes).tolist()):  # ascending, so the last of a batch is its longest
            n = index - cuts[-1]
            if (n + 1) * max(size, 1) > batch_tokens or n >= (max_examples or len(sizes)):
                cuts.append(index)
        self._cuts = np.asarray([*cuts, len(sizes)], dtype=np.int64)

    def count(self) -> int:
        return len(self._cuts) - 1

    def at(self, number: int) -> tuple[int, int]:
        """(epoch, position) of a batch by its number in the whole run; all three count from 0."""
        return divmod(number, self.count())

    def batch(self, epoch: int, position: int) -> NDArray[np.int64]:
        examples, batches = _epoch_order(self, epoch)
        number = batches[position]
        return examples[self._cuts[number] : self._cuts[number + 1]]


@lru_cache(maxsize=4)
def _epoch_order(plan: BatchPlan, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(examples in sorted order, order of the batches); cached, because every batch of the epoch needs both."""
    ties = bits(stable_key("examples", plan.seed, epoch), plan._included)
    batches = permutation(stable_key("batches", plan.seed, epoch), plan.count())
    return plan._included[np.lexsort((ties, plan._sort_key))], batches


def balanced_rows(classes: ArrayLike) -> NDArray[np.int64]:
    """Indices of a balanced epoch: the examples of rarer classes repeat until every class is as large as the largest.

    ``classes`` (n,) is the class of each example; the result has (number of classes × size of the largest) indices.
    """
    numbers = np.asarray(classes)
    size = int(np.bincount(numbers).max())
    return np.concatenate([np.resize(np.flatnonzero(numbers == c), size) for c in np.unique(numbers)])


def pad(rows: Sequence[Sequence[int]], value: int = 0, min_width: int = 0) -> Tensor:
    """Tokens (B, T), padded at the end with ``value``; T is the longest row or, if that is more, ``min_width``."""
    tokens = np.full((len(rows), max(min_width, *map(len, rows), 0)), value, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return torch.from_numpy(tokens)


def pair_segments(tokens: Tensor, separator: int) -> Tensor:
    """BERT's segment ids: 0 up to and including the first separator, 1 after it.   tokens (B, T) → (B, T)"""
    is_separator = (tokens == separator).long()
    return ((is_separator.cumsum(1) - is_separator) > 0).long()


def cut_pair(row: list[int], separator: int, max_len: int) -> list[int]:
    """Cut a pair of texts, each followed by a separator, to at most ``max_len`` tokens, the longer text first."""
    if len(row) <= max_len:
        return row
    start, last = row.index(separator), len(row) - 1
    end = next((position for position in range(start, last) if row[position] != separator), last)
    first, between, second = row[:start], row[start:end], row[end:last]
    room = max_len - len(between) - 1
    n_second = min(len(second), max(room // 2, room - len(first)))
    return [*first[: room - n_second], *between, *second[:n_second], separator]


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """Token ids, some of them masked, and the targets: the original ids at masked positions, IGNORE elsewhere."""

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
    """BERT's masking (Devlin et al. 2019): of a ``share`` of the tokens, 80 % become <mask>, 10 % a random token, and
    10 % stay unchanged.

    Depends only on (seed, epoch, index). Special tokens are never chosen; of the others, at least one is.
    """
    inputs = np.array(ids, dtype=np.int64)
    special_ids = frozenset(special)
    ordinary_ids = _ordinary_ids(vocab_size, special_ids)
    key, positions = stable_key("mask", seed, epoch, index), np.arange(len(inputs))
    draws = np.where(np.isin(inputs, list(special_ids)), 2.0, uniform(key, positions))
    chosen = draws < share
    if not chosen.any() and len(inputs) and draws.min() < 1.0:
        chosen[draws.argmin()] = True
    targets = np.where(chosen, inputs, IGNORE)
    action = uniform(stable_key(key, "what"), positions)
    n = len(ordinary_ids)
    random_ids = ordinary_ids[integers(stable_key(key, "which"), positions, n)] if n else inputs
    inputs = np.where(chosen & (action < 0.8), mask_id, np.where(chosen & (action >= 0.9), random_ids, inputs))
    return MaskedTokens(inputs, targets)


@lru_cache(maxsize=2)
def _ordinary_ids(vocab_size: int, special: frozenset[int]) -> NDArray[np.int64]:
    """All ids but the special ones; cached, because every row needs them and a vocabulary may be large."""
    return np.setdiff1d(np.arange(vocab_size), np.asarray(sorted(special), dtype=np.int64))


def has_partial_batch(plan: BatchPlan) -> bool:
    """Whether the last batch of an epoch of equal rows is smaller than the others."""
    return len(plan.lengths) > plan.batch_tokens and len(plan.lengths) % plan.batch_tokens > 0


def index_groups(n: int, size: int) -> Iterator[list[int]]:
    """0 … n - 1 in order, in lists of ``size``."""
    return (list(range(first, min(first + size, n))) for first in range(0, n, size))


def group_by_length(sizes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, longest first; a group has at most ``max_tokens`` including padding."""
    order = np.argsort(np.asarray(sizes), kind="stable")[::-1].tolist()
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * sizes[group[0]] > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def truncate(rows: list[list[int]], max_len: int) -> tuple[list[list[int]], int]:
    """Rows cut to ``max_len`` tokens, keeping their last token (the end of the text), and how many were cut."""
    n_longer = sum(len(row) > max_len for row in rows)
    return [row if len(row) <= max_len else [*row[: max_len - 1], row[-1]] for row in rows], n_longer
