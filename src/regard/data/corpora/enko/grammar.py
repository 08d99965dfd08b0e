"""A sentence as a structure, and the pair of sentences it is.

A structure is plain JSON. A **sentence** has `register` (polite, formal, plain), `clause`, and perhaps `question`; or
it is two clauses: `join` (because, so, but, and, when, if), `first` (the clause Korean says first), `clause` (the
main one), `shared` when both have one subject, which then stands in the clause English says first.

A **clause** has `predicate` (a verb or adjective of the lexicon, or `be`, `be at`, `exist`), `tense` and `subject`;
where they apply `object`, `to`, `complement`, `content` (a clause), `than`, `where` {`relation`, `of`}; and perhaps
`not` (short: 안, English contracted; long: -지 않다, English in full), `aspect` (progressive, can, want, must),
`manner`, `frequency`, `degree`, `companion`, `tool`, `place`, `time`, `front` (the time said first).

A **noun phrase** has `noun` and perhaps `det` (the, a, this, that, my, our), `number` (`many` or a numeral),
`adjective`, `owner`, `title`, `clause` (a relative clause whose `gap` is subject or object); or it is `and`: two noun
phrases.

English does not say how politely it speaks, so the sentence begins with a tag, [polite], [formal] or [plain]: the side
constraint of Sennrich, Haddow and Birch (2016), "Controlling politeness in neural machine translation". With it English
determines the Korean.
"""

from __future__ import annotations

from typing import NamedTuple

from .to_english import english
from .to_korean import korean
from .words import Links, Node, align

__all__ = ["Pair", "REGISTERS", "realise"]

REGISTERS = ("polite", "formal", "plain")


class Pair(NamedTuple):
    """A sentence in both languages, how its words correspond, and the structure both say."""

    source: str
    """English, its register tag first."""
    target: str
    """Korean."""
    alignment: Links
    """Sure links (i, j): word i of `source.split()` is said by eojeol j of `target.split()`."""
    possible: Links
    """All links: the sure ones, and words such as articles that have no eojeol of their own."""
    structure: Node


def realise(structure: Node) -> Pair:
    """The pair of sentences that a structure is."""
    if structure.get("register") not in REGISTERS:
        raise ValueError(f"register={structure.get('register')!r} is not one of {', '.join(REGISTERS)}")
    source, target = english(structure), korean(structure)
    sure, possible = align(source, target)
    return Pair(
        " ".join([word.text for word in source]), " ".join([word.text for word in target]), sure, possible, structure
    )
