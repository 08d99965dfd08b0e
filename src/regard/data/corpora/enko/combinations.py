"""Which words have met: predicate–argument pairs, and which of them are kept from training.

A combination is a predicate and the noun it goes with: a verb and its object (its subject where it has none, its
place where it is a motion), an adjective and the noun it describes. Of the nouns of each predicate a fixed few are
held out for `valid` and for `combinations`, in the order of a hash: each word is met in training, the pair never. No
chance is involved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..corpus import stable_hash
from .lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Verb
from .words import Node

__all__ = ["COMPANY", "HELD_OUT", "Combination", "Keep", "combinations_of", "kept_for", "partners", "predicates_for"]

Combination = tuple[str, str]
"""(predicate, noun), such as ("eat", "apple")."""
Keep = Literal["train", "valid", "combinations"]

_PREDICATES: tuple[Verb | Adjective, ...] = (*VERBS.values(), *ADJECTIVES.values())
# Below this many nouns a predicate keeps them all: it could not be learned from fewer.
_FEWEST = 6
# One noun in so many is held out for each of the two splits.
_SHARE = 16


def _hold_out() -> dict[Combination, Keep]:
    held: dict[Combination, Keep] = {}
    for word in _PREDICATES:
        nouns = sorted(word.partners, key=lambda noun: stable_hash("en-ko held out", word.key, noun))
        if len(nouns) < _FEWEST:
            continue
        share = max(1, len(nouns) // _SHARE)
        held.update({(word.key, noun): "combinations" for noun in nouns[:share]})
        held.update({(word.key, noun): "valid" for noun in nouns[share : 2 * share]})
    return held


HELD_OUT: dict[Combination, Keep] = _hold_out()
COMPANY: tuple[Keep, ...] = ("train", "valid", "combinations")


def _tickets() -> dict[str, int]:
    """How often each noun stands in a predicate's list, so that words few predicates ask for are drawn about as often.

    A noun would be drawn Σ 1/|partners| over its predicates; the rarer that is, the more tickets it has, up to eight.
    People need none: they are also the subjects.
    """
    share = dict.fromkeys(NOUNS, 0.0)
    for word in _PREDICATES:
        for noun in word.partners:
            share[noun] += (0.4 if word.key in ADJECTIVES else 1.0) / len(word.partners)
    things = sorted(share[noun] for noun in share if "person" not in NOUNS[noun].tags)
    aim = 1.5 * things[len(things) // 2]
    people = {noun for noun in NOUNS if "person" in NOUNS[noun].tags}
    return {noun: 1 if noun in people else max(1, min(8, round(aim / share[noun]))) for noun in share}


def _tables() -> tuple[dict[tuple[str, Keep], tuple[str, ...]], dict[tuple[str, str, Keep], tuple[str, ...]]]:
    by_predicate: dict[tuple[str, Keep], list[str]] = {}
    by_noun: dict[tuple[str, str, Keep], list[str]] = {}
    tickets = _tickets()
    for word in _PREDICATES:
        kind = "adjective" if word.key in ADJECTIVES else VERBS[word.key].frame
        for noun in word.partners:
            keep: Keep = HELD_OUT.get((word.key, noun), "train")
            by_predicate.setdefault((word.key, keep), []).extend([noun] * tickets[noun])
            by_noun.setdefault((noun, kind, keep), []).append(word.key)
    return {k: tuple(v) for k, v in by_predicate.items()}, {k: tuple(v) for k, v in by_noun.items()}


_BY_PREDICATE, _BY_NOUN = _tables()


def partners(predicate: str, keep: Keep) -> tuple[str, ...]:
    """The nouns of a predicate in one split, the rare ones repeated; perhaps none."""
    return _BY_PREDICATE.get((predicate, keep), ())


def predicates_for(noun: str, kind: str, keep: Keep) -> tuple[str, ...]:
    """The predicates of one kind (`adjective`, or a verb's frame) that go with a noun in one split; perhaps none."""
    return _BY_NOUN.get((noun, kind, keep), ())


def kept_for(structure: Node) -> set[Keep]:
    """The splits whose held-out combinations a sentence contains; empty where it has none."""
    return {HELD_OUT[pair] for pair in combinations_of(structure) if pair in HELD_OUT}


def combinations_of(structure: Node) -> Iterator[Combination]:
    """Every predicate–argument pair of a sentence, wherever it stands."""
    clauses = [structure["clause"]]
    shared: Node | None = None
    if "join" in structure:
        clauses.append(structure["first"])
        if structure.get("shared"):
            shared = next(clause["subject"] for clause in clauses if "subject" in clause)
    for clause in clauses:
        yield from _of_clause(clause, clause.get("subject", shared))


def _of_clause(clause: Node, subject: Node | None, head: Node | None = None) -> Iterator[Combination]:
    """The pairs of a clause; `head` is the noun phrase that fills the gap of a relative clause."""
    name = clause["predicate"]
    target = clause.get("object")
    if head is not None and clause["gap"] == "object":
        target = head
    verb = VERBS.get(name)
    if verb is not None and verb.frame == "intransitive":
        target = subject
    if name in ADJECTIVES:
        target = subject
        yield from ((name, noun) for noun in _nouns(clause.get("than")))
    yield from ((name, noun) for noun in _nouns(target))
    for part in ("subject", "object", "to", "complement", "than", "place", "companion", "tool"):
        if part in clause:
            yield from _of_phrase(clause[part])
    if "where" in clause:
        yield from _of_phrase(clause["where"]["of"])
    if "content" in clause:
        yield from _of_clause(clause["content"], clause["content"].get("subject"))


def _of_phrase(node: Node) -> Iterator[Combination]:
    if "and" in node:
        for part in node["and"]:
            yield from _of_phrase(part)
        return
    if "adjective" in node:
        yield (node["adjective"], node["noun"])
    if "owner" in node:
        yield from _of_phrase(node["owner"])
    if "clause" in node:
        clause = node["clause"]
        yield from _of_clause(clause, node if clause["gap"] == "subject" else clause["subject"], node)


def _nouns(node: Node | None) -> Iterator[str]:
    """The common nouns at the head of a phrase: names, titles and pronouns combine with everything."""
    if node is None:
        return
    for part in node.get("and", (node,)):
        if "title" not in part and part["noun"] in NOUNS and "name" not in NOUNS[part["noun"]].tags:
            yield part["noun"]
