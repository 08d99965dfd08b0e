"""BPE-dropout (Provilkov et al. 2020): training texts are segmented into different sub-words in every epoch.

At each merge of a word, every candidate is skipped with probability ``rate``, so that "unrelated" becomes un·related,
un·relat·ed or u·n·rel·ated. The model learns how words are composed, which helps most with little data. To save time,
``WAYS`` segmentations of each word are drawn once, and every occurrence in every epoch uses one of them. The choice is
a pure function of seed, epoch and position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from ..text.tokenizer import Tokenizer
from .hashing import integers, stable_key
from .token_files import TokenFile

WAYS = 16
_NEVER = 1 << 62  # rank of a pair that is not a merge


class BpeDropout:
    """The training texts as words, and the segmentations of each word. ``tokenizer`` must have merges."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], rate: float, seed: int = 0) -> None:
        numbers: dict[str, int] = {}
        words = [[numbers.setdefault(word, len(numbers)) for word in tokenizer.split_words(text)] for text in texts]
        self._words, self._seed = TokenFile.of(words, max(1, len(numbers))), seed
        ranks, ids = tokenizer.merge_ranks, tokenizer.token_ids
        ways = []
        for word in numbers:
            random = Random(stable_key("BPE-dropout", seed, word))
            ways += [[ids[part] for part in cut_word(word, ranks, rate, random)] for _ in range(WAYS)]
        self._ways = TokenFile.of(ways, tokenizer.size)

    def rows(self, epoch: int, index: Sequence[int]) -> list[list[int]]:
        """The ids of the texts at ``index`` as segmented in an epoch, without special tokens."""
        positions = _ranges(self._words, np.asarray(index, dtype=np.int64))
        ways = integers(stable_key("BPE-dropout", self._seed, epoch), positions, WAYS)
        chosen = self._words.tokens[positions].astype(np.int64) * WAYS + ways
        tokens = self._ways.tokens[_ranges(self._ways, chosen)].tolist()
        ends = np.concatenate([[0], self._ways.sizes[chosen].cumsum()])[self._words.sizes[index].cumsum()].tolist()
        return [tokens[start:end] for start, end in pairwise([0, *ends])]


def cut_word(word: str, ranks: Mapping[tuple[str, str], int], rate: float, random: Random) -> list[str]:
    """Segment a word by BPE, skipping each candidate merge with probability ``rate`` at every step."""
    parts = list(word)
    pair_ranks = [ranks.get(pair, _NEVER) for pair in pairwise(parts)]
    draw = random.random
    while True:
        best, best_index = _NEVER, 0
        for index, rank in enumerate(pair_ranks):
            if rank < best and draw() >= rate:  # pairs of a higher rank need no draw: they would not be merged anyway
                best, best_index = rank, index
        if best == _NEVER:
            return parts
        parts[best_index : best_index + 2] = [parts[best_index] + parts[best_index + 1]]
        del pair_ranks[best_index]
        if best_index:
            pair_ranks[best_index - 1] = ranks.get((parts[best_index - 1], parts[best_index]), _NEVER)
        if best_index < len(pair_ranks):
            pair_ranks[best_index] = ranks.get((parts[best_index], parts[best_index + 1]), _NEVER)


def _ranges(file: TokenFile, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the tokens of these documents in ``file.tokens``, one document after the other."""
    sizes = file.sizes[index]
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.repeat(file.starts[index] - (ends - sizes), sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
