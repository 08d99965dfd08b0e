"""The corpus `repeats`: random words, and then the same words again. What is learnt from it is induction.

The first half of a text cannot be predicted, the second half can: find the last place of the current word, and write
the word that followed it there. A decoder of two layers does it with a head that looks at the previous token and one
that looks for where it was (Elhage et al. 2021; Olsson et al. 2022), so this is where circuits are studied.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..hashing import Draws
from . import check_index

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprst"
WORDS = tuple(first + second for first in _CONSONANTS for second in _VOWELS)  # 60 of them
# How many words are said twice: enough that counting places does not help, few enough for a text of 64 tokens.
MIN_WORDS, MAX_WORDS = 8, 24


class Repeats:
    """Texts like "ba ko re … ba ko re …"; those of `valid` are other draws than those of `train`."""

    name = "repeats"  # as ``data.source`` names it
    splits = ("train", "valid")

    def size(self, split: str) -> int | None:
        """None: there is always another text."""
        return None

    def example(self, split: str, index: int) -> str:
        """Some words, none of them twice, and then all of them again."""
        check_index(self, split, index)
        draws = Draws(self.name, split, index)
        words = draws.shuffle(WORDS)[: MIN_WORDS + draws.below(MAX_WORDS - MIN_WORDS + 1)]
        return " ".join([*words, *words])


def induction_pairs(n: int) -> Iterator[dict[str, str]]:
    """Clean and corrupted prompts of `valid`, as ``regard circuit`` reads them.

    clean      ends in a word that was said before
    corrupted  the same with another word at the earlier place, so that nothing says what comes next
    answer     the word that followed the earlier place
    wrong      a word that the prompt does not have
    """
    corpus = Repeats()
    for index in range(n):
        words = corpus.example("valid", index).split()
        half = len(words) // 2
        at = half // 2  # the place of the repeated word in the first half
        prompt = words[: half + at + 1]
        unused = [word for word in WORDS if word not in words]
        corrupted = [*prompt[:at], unused[0], *prompt[at + 1 :]]
        yield {
            "clean": " ".join(prompt),
            "corrupted": " ".join(corrupted),
            "answer": words[at + 1],
            "wrong": unused[1],
        }
