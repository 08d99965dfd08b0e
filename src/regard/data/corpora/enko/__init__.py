"""`en-ko`: an endless corpus of sentence pairs from an English–Korean grammar, with their true alignment.

The lexicon is data (`*.tsv`, `words.json`); `sentences` draws a structure, `english` and `korean` realise it as words,
and `grammar` aligns them. `EnKo` is the corpus. `lookup_translate` is its baseline: a dictionary that knows every word
and no grammar. A sentence it translates correctly needs no attention, so compare a model's accuracy with its accuracy.
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

_EDITION = 1  # part of every random key; increase it when a change of the grammar gives an index another example


class AlignedPair(NamedTuple):
    """A sentence in both languages, the alignment of its words, and the structure that both express."""

    source: str  # English, beginning with its register tag
    target: str  # Korean
    alignment: Links  # sure links (i, j): word i of source.split() corresponds to eojeol j of target.split()
    possible: Links  # all links, including those of words such as articles that have no eojeol of their own
    structure: Node

    def __repr__(self) -> str:
        # Corpus fingerprints hash this text, so it keeps the name the class had when the first ones were recorded.
        return "Pair(" + ", ".join(f"{name}={value!r}" for name, value in self._asdict().items()) + ")"


def realise(structure: Node) -> AlignedPair:
    """The pair of sentences that expresses a structure."""
    if structure.get("register") not in REGISTERS:
        raise ValueError(f"register={structure.get('register')!r} is not one of {', '.join(REGISTERS)}")
    english, korean = english_words(structure), korean_words(structure)
    source, target = (" ".join([word.text for word in words]) for words in (english, korean))
    alignment, possible = align(english, korean)
    return AlignedPair(source, target, alignment, possible, structure)


class EnKo:
    """English–Korean sentence pairs.

    `train` never contains a held-out combination (`HELD_OUT`) and never exceeds `MAX_WORDS` words. Each example of
    `valid` and `combinations` contains a combination held out for its split, and none held out for the other. Each of
    `longer` has more words and deeper embedding than any training sentence, but only combinations that occur there.
    """

    name = "en-ko"
    splits = ("train", "valid", "combinations", "longer")

    def size(self, split: str) -> int | None:
        """None: the splits are endless."""
        return None

    def example(self, split: str, index: int) -> AlignedPair:
        check_index(self, split, index)
        pairs = (_draw_pair(Draws(self.name, _EDITION, split, index, attempt), split) for attempt in count())
        return next(pair for pair in pairs if pair is not None)


def _draw_pair(draws: Draws, split: str) -> AlignedPair | None:
    """Draw a pair; None if it does not belong to the split."""
    structure, complete = draw_sentence(draws, split)
    held_out = {split} & {"valid", "combinations"}
    if not complete or nouns_repeat(structure) or held_out_splits(structure) != held_out:
        return None
    pair = realise(structure)
    return pair if (pair.source.count(" ") >= MAX_WORDS) == (split == "longer") else None


@cache
def lookup_table(examples: int = 5000) -> dict[str, str]:
    """For each English word, the eojeol with the most sure links to it in the first training examples."""
    counts: dict[str, Counter[str]] = {}
    corpus = EnKo()
    for index in range(examples):
        pair = corpus.example("train", index)
        source, target = pair.source.split(), pair.target.split()
        for i, j in pair.alignment:
            counts.setdefault(source[i].rstrip(".,?").lower(), Counter())[target[j].rstrip(".?")] += 1
    # Ties are broken alphabetically, so that the table does not depend on the order of counting.
    return {word: min(forms, key=lambda form: (-forms[form], form)) for word, forms in counts.items()}


def lookup_translate(sentence: str) -> str:
    """Translate word by word, in English order; unknown words are left out, the final punctuation mark is kept."""
    table = lookup_table()
    words = (word.rstrip(".,?").lower() for word in sentence.split())
    return " ".join(table[word] for word in words if word in table) + ("?" if sentence.endswith("?") else ".")


def lookup_accuracy(split: str = "combinations", examples: int = 1000) -> float:
    """The share of sentences that the dictionary translates exactly."""
    corpus = EnKo()
    pairs = (corpus.example(split, index) for index in range(examples))
    return sum(lookup_translate(pair.source) == pair.target for pair in pairs) / examples
