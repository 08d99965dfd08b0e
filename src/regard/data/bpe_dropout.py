"""BPE-dropout (Provilkov et al. 2020): training texts are cut into other sub-words in every epoch.

Each time BPE looks for the next merge of a word, every possible one is left out with probability ``rate``, so that
"unrelated" is un·related, un·relat·ed or u·n·rel·ated. A model then learns what the parts of a word have in common,
which helps most where texts are few. Words have few ways to be cut: ``WAYS`` are drawn of each, once, and every place
of every epoch takes one of those. Which one is a pure function of seed, epoch and place.
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
_NEVER = 1 << 62  # the rank of what is no merge


class BpeDropout:
    """The training texts as words, and the ways to cut each word. ``tokenizer`` must have merges."""

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
        """The ids of the texts at ``index`` as they are cut in an epoch, without special tokens."""
        places = _ranges(self._words, np.asarray(index, dtype=np.int64))
        drawn = integers(stable_key("BPE-dropout", self._seed, epoch), places, WAYS)
        chosen = self._words.tokens[places].astype(np.int64) * WAYS + drawn
        tokens = self._ways.tokens[_ranges(self._ways, chosen)].tolist()
        ends = np.concatenate([[0], self._ways.sizes[chosen].cumsum()])[self._words.sizes[index].cumsum()].tolist()
        return [tokens[start:end] for start, end in pairwise([0, *ends])]


def cut_word(word: str, ranks: Mapping[tuple[str, str], int], rate: float, random: Random) -> list[str]:
    """A word cut by BPE, each possible merge left out with probability ``rate`` whenever the next one is looked for."""
    parts = list(word)
    found = [ranks.get(pair, _NEVER) for pair in pairwise(parts)]
    draw = random.random
    while True:
        best, place = _NEVER, 0
        for here, rank in enumerate(found):
            if rank < best and draw() >= rate:  # whether those after it are left out matters no longer
                best, place = rank, here
        if best == _NEVER:
            return parts
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del found[place]
        if place:
            found[place - 1] = ranks.get((parts[place - 1], parts[place]), _NEVER)
        if place < len(found):
            found[place] = ranks.get((parts[place], parts[place + 1]), _NEVER)


def _ranges(file: TokenFile, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the tokens of these documents are, one document after the other."""
    sizes = file.sizes[index]
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.repeat(file.starts[index] - (ends - sizes), sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
