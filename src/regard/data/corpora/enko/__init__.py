"""`en-ko`: sentence pairs from an English–Korean grammar, without end, with their true alignment.

The lexicon is data (`*.tsv`, `words.json`); `sentences` draws a structure, `english` and `korean` say it, and `grammar`
aligns their words. `EnKo` is the corpus. `lookup_translate` is its baseline: a dictionary that knows every word and no
grammar. What it gets right needs no attention, so a translation model has to be measured against its accuracy.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import count
from typing import NamedTuple

from ...hashing import Draws
from .. import check_index
from .english import english_words
from .grammar import REGISTERS, Links, Node, align, combinations_of, held_out_splits
from .korean import korean_words
from .lexicon import HELD_OUT, lemmas
from .sentences import MAX_WORDS, draw_sentence, nouns_repeat

__all__ = ["HELD_OUT", "MAX_WORDS", "REGISTERS", "AlignedPair", "EnKo", "combinations_of", "lemmas"]
__all__ += ["lookup_accuracy", "lookup_table", "lookup_translate", "realise"]

_EDITION = 1  # part of every key: raised when the grammar changes what an index means


class AlignedPair(NamedTuple):
    """A sentence in both languages, how its words correspond, and the structure both say."""

    source: str  # English, its register tag first
    target: str  # Korean
    alignment: Links  # sure links (i, j): word i of source.split() is said by eojeol j of target.split()
    possible: Links  # all links: also words such as articles that have no eojeol of their own
    structure: Node

    def __repr__(self) -> str:
        # Corpus fingerprints hash this text, so it keeps the name the class had when the first ones were recorded.
        return "Pair(" + ", ".join(f"{name}={value!r}" for name, value in self._asdict().items()) + ")"


def realise(structure: Node) -> AlignedPair:
    """The pair of sentences that a structure says."""
    if structure.get("register") not in REGISTERS:
        raise ValueError(f"register={structure.get('register')!r} is not one of {', '.join(REGISTERS)}")
    english, korean = english_words(structure), korean_words(structure)
    source, target = (" ".join([word.text for word in words]) for words in (english, korean))
    alignment, possible = align(english, korean)
    return AlignedPair(source, target, alignment, possible, structure)


class EnKo:
    """English–Korean sentence pairs.

    `train` never contains a held-out combination (`HELD_OUT`) and never exceeds `MAX_WORDS` words; each example of
    `valid` and of `combinations` contains one held out for it and none of the other's; each of `longer` has more words
    than any of training and embeds deeper, but only combinations met there.
    """

    name = "en-ko"
    splits = ("train", "valid", "combinations", "longer")

    def size(self, split: str) -> int | None:
        """None: there is always a next one."""
        return None

    def example(self, split: str, index: int) -> AlignedPair:
        check_index(self, split, index)
        pairs = (_draw_pair(Draws(self.name, _EDITION, split, index, attempt), split) for attempt in count())
        return next(pair for pair in pairs if pair is not None)


def _draw_pair(draws: Draws, split: str) -> AlignedPair | None:
    """A pair of a split; None where the draw does not fit it."""
    structure, complete = draw_sentence(draws, split)
    held_out = {split} & {"valid", "combinations"}
    if not complete or nouns_repeat(structure) or held_out_splits(structure) != held_out:
        return None
    pair = realise(structure)
    return pair if (pair.source.count(" ") >= MAX_WORDS) == (split == "longer") else None


@cache
def lookup_table(examples: int = 5000) -> dict[str, str]:
    """For each English word the eojeol it is most often surely linked to in the first training examples."""
    counts: dict[str, Counter[str]] = {}
    corpus = EnKo()
    for index in range(examples):
        pair = corpus.example("train", index)
        source, target = pair.source.split(), pair.target.split()
        for i, j in pair.alignment:
            counts.setdefault(source[i].rstrip(".,?").lower(), Counter())[target[j].rstrip(".?")] += 1
    # Ties are broken by the alphabet, so that the table does not depend on the order of counting.
    return {word: min(forms, key=lambda form: (-forms[form], form)) for word, forms in counts.items()}


def lookup_translate(sentence: str) -> str:
    """The sentence word by word, in English order: unknown words are left out, the mark at the end is kept."""
    table = lookup_table()
    words = (word.rstrip(".,?").lower() for word in sentence.split())
    return " ".join(table[word] for word in words if word in table) + ("?" if sentence.endswith("?") else ".")


def lookup_accuracy(split: str = "combinations", examples: int = 1000) -> float:
    """The share of sentences that the dictionary translates exactly."""
    corpus = EnKo()
    pairs = (corpus.example(split, index) for index in range(examples))
    return sum(lookup_translate(pair.source) == pair.target for pair in pairs) / examples
