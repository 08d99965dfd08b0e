"""The corpus `en-ko`: four splits of sentence pairs, each a pure function of its index."""

from __future__ import annotations

from ..corpus import Draws, check_place
from .combinations import Keep, kept_for
from .grammar import Pair, realise
from .sentences import MOST_WORDS, draw_longer, draw_sentence, nouns_repeat

__all__ = ["EnKo"]

# Part of every key: raised when the grammar changes what an index means.
_EDITION = 1


class EnKo:
    """English–Korean sentence pairs.

    `train` never contains a held-out combination (`combinations.py`) and never exceeds `MOST_WORDS` words; each
    example of `valid` and of `combinations` contains one held out for it and none of the other's; each of `longer`
    has more words than any of training and embeds deeper, but only combinations met there.
    """

    name = "en-ko"
    splits = ("train", "valid", "combinations", "longer")

    def size(self, split: str) -> int | None:
        """None: there is always a next one."""
        return None

    def example(self, split: str, index: int) -> Pair:
        """The pair at this place."""
        check_place(self, split, index)
        attempt = 0
        while True:
            draws = Draws(self.name, _EDITION, split, index, attempt)
            pair = _longer(draws) if split == "longer" else _usual(draws, split)  # type: ignore[arg-type]  # check_place knows the splits
            if pair is not None:
                return pair
            attempt += 1


def _usual(draws: Draws, keep: Keep) -> Pair | None:
    structure, found = draw_sentence(draws, keep)
    if not found or nouns_repeat(structure) or kept_for(structure) != ({keep} if keep != "train" else set()):
        return None
    pair = realise(structure)
    return pair if pair.source.count(" ") < MOST_WORDS else None


def _longer(draws: Draws) -> Pair | None:
    structure = draw_longer(draws)
    if nouns_repeat(structure) or kept_for(structure):
        return None
    pair = realise(structure)
    return pair if pair.source.count(" ") >= MOST_WORDS else None
