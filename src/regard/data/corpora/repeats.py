"""The corpus `repeats`: random words followed by the same words again, from which a model learns induction.

The first half of a text cannot be predicted, the second half can: find the previous occurrence of the current word and
copy the word after it. A two-layer decoder does this with a previous-token head and an induction head (Elhage et al.
2021; Olsson et al. 2022), which makes the corpus suitable for the study of circuits.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..hashing import Draws
from . import check_index

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprst"
WORDS = tuple(first + second for first in _CONSONANTS for second in _VOWELS)  # 60 of them
# Number of words before the repetition: varied so that positions do not help, small enough for a text of 64 tokens.
MIN_WORDS, MAX_WORDS = 8, 24


class Repeats:
    """Texts like "ba ko re … ba ko re …"; `train` and `valid` are independent draws."""

    name = "repeats"  # the value of ``data.source``
    splits = ("train", "valid")

    def size(self, split: str) -> int | None:
        """None: the splits are endless."""
        return None

    def example(self, split: str, index: int) -> str:
        """Some distinct words, then the same words again."""
        check_index(self, split, index)
        draws = Draws(self.name, split, index)
        words = draws.shuffle(WORDS)[: MIN_WORDS + draws.below(MAX_WORDS - MIN_WORDS + 1)]
        return " ".join([*words, *words])


def induction_pairs(n: int) -> Iterator[dict[str, str]]:
    """Clean and corrupted prompts from `valid`, in the format of ``regard circuit``.

    clean      ends in a word that occurred before
    corrupted  the same with the earlier occurrence replaced, so that the next word cannot be predicted
    answer     the word after the earlier occurrence
    wrong      a word that is not in the prompt
    """
    corpus = Repeats()
    for index in range(n):
        words = corpus.example("valid", index).split()
        half = len(words) // 2
        at = half // 2  # position of the repeated word in the first half
        prompt = words[: half + at + 1]
        unused = [word for word in WORDS if word not in words]
        corrupted = [*prompt[:at], unused[0], *prompt[at + 1 :]]
        yield {
            "clean": " ".join(prompt),
            "corrupted": " ".join(corrupted),
            "answer": words[at + 1],
            "wrong": unused[1],
        }
