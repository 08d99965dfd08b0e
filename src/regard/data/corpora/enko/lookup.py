"""The baseline that knows every word and no grammar: a dictionary, word by word, in English order.

What it gets right needs no attention: its exact match is what a translation model has to be measured against.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from .corpus import EnKo

__all__ = ["lookup_accuracy", "lookup_table", "lookup_translate"]


def _bare(word: str) -> str:
    return word.rstrip(".,?").lower()


@cache
def lookup_table(examples: int = 5000) -> dict[str, str]:
    """For each English word the eojeol it is most often surely linked to in the first training examples."""
    counts: dict[str, Counter[str]] = {}
    corpus = EnKo()
    for index in range(examples):
        pair = corpus.example("train", index)
        source, target = pair.source.split(), pair.target.split()
        for i, j in pair.alignment:
            counts.setdefault(_bare(source[i]), Counter())[target[j].rstrip(".?")] += 1
    # Ties are broken by the alphabet, so that the table does not depend on the order of counting.
    return {word: min(found, key=lambda form: (-found[form], form)) for word, found in counts.items()}


def lookup_translate(sentence: str) -> str:
    """The sentence word by word: unknown words are left out, the mark at the end is kept."""
    table = lookup_table()
    words = [table[_bare(word)] for word in sentence.split() if _bare(word) in table]
    return " ".join(words) + ("?" if sentence.endswith("?") else ".")


def lookup_accuracy(split: str = "combinations", examples: int = 1000) -> float:
    """The share of sentences that the dictionary translates exactly."""
    corpus = EnKo()
    pairs = (corpus.example(split, index) for index in range(examples))
    return sum(lookup_translate(pair.source) == pair.target for pair in pairs) / examples
