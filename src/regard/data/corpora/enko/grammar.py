"""The structure of a sentence, the alignment of its words, and the predicate–noun combinations in it.

A structure is plain JSON. A **sentence** has `register` (polite, formal, plain), `clause`, and optionally `question`;
or it has two clauses: `join` (because, so, but, and, when, if), `first` (the first clause in Korean), `clause` (the
main clause), and `shared` if both have the same subject, which is then part of the first clause in English.

A **clause** has `predicate` (a verb or adjective of the lexicon, or `be`, `be at`, `exist`), `tense` and `subject`;
depending on the predicate `object`, `to`, `complement`, `content` (a clause), `than`, `where` {`relation`, `of`}; and
optionally `not` (short: 안, contracted in English; long: -지 않다, in full in English), `aspect` (progressive, can,
want, must), `manner`, `frequency`, `degree`, `companion`, `tool`, `place`, `time`, `front` (the time comes first).

A **noun phrase** has `noun` and optionally `det` (the, a, this, that, my, our), `number` (`many` or a numeral),
`adjective`, `owner`, `title`, `clause` (a relative clause whose `gap` is subject or object); or it is `and`: two noun
phrases.

English does not express the level of politeness, so a sentence begins with a tag, [polite], [formal] or [plain]: the
side constraint of Sennrich, Haddow and Birch (2016), "Controlling politeness in neural machine translation". With the
tag, the English sentence determines the Korean one.

Each word carries keys of the structure it expresses: (node, part of the node). Words of the two languages that share a
key are linked. The link is sure if both express the key, and possible if one of them only accompanies it (an article,
do-support, a counter), as in Och and Ney (2003).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from .lexicon import ADJECTIVES, HELD_OUT, NOUNS, VERBS, Combination

REGISTERS = ("polite", "formal", "plain")

Node = dict[str, Any]  # a sentence, a clause or a noun phrase
Key = tuple[int, str]  # (id of a node, a part of it)
Links = tuple[tuple[int, int], ...]  # pairs (source word, target word)


class Word(NamedTuple):
    """One written word, the keys it expresses (``sure``), and those it only accompanies (``weak``)."""

    text: str
    sure: tuple[Key, ...] = ()
    weak: tuple[Key, ...] = ()

    def append(self, text: str) -> Word:
        """The word with ``text`` appended."""
        return Word(self.text + text, self.sure, self.weak)

    def express(self, key: Key) -> Word:
        """The word with ``key`` added to those it expresses."""
        return Word(self.text, (*self.sure, key), self.weak)


def align(source: list[Word], target: list[Word]) -> tuple[Links, Links]:
    """(sure links, all links), sorted."""
    positions: defaultdict[Key, list[tuple[int, bool]]] = defaultdict(list)
    for i, (_, sure_keys, weak_keys) in enumerate(source):
        for key in sure_keys:
            positions[key].append((i, True))
        for key in weak_keys:
            positions[key].append((i, False))
    sure: set[tuple[int, int]] = set()
    possible: set[tuple[int, int]] = set()
    for j, (_, sure_keys, weak_keys) in enumerate(target):
        for key in sure_keys:
            for i, is_sure in positions.get(key, ()):
                (sure if is_sure else possible).add((i, j))
        for key in weak_keys:
            possible.update([(i, j) for i, _ in positions.get(key, ())])
    return tuple(sorted(sure)), tuple(sorted(sure | possible))


def held_out_splits(structure: Node) -> set[str]:
    """The splits for which a combination in this sentence is held out; empty if there is none."""
    return {HELD_OUT[pair] for pair in combinations_of(structure) if pair in HELD_OUT}


def combinations_of(structure: Node) -> Iterator[Combination]:
    """Every predicate–noun pair of a sentence, at any depth."""
    clauses = [structure["clause"]]
    shared: Node | None = None
    if "join" in structure:
        clauses.append(structure["first"])
        if structure.get("shared"):
            shared = next(clause["subject"] for clause in clauses if "subject" in clause)
    for clause in clauses:
        yield from _clause_combinations(clause, clause.get("subject", shared))


def _clause_combinations(clause: Node, subject: Node | None, head: Node | None = None) -> Iterator[Combination]:
    """The pairs of a clause; `head` is the noun phrase that fills the gap of a relative clause."""
    name = clause["predicate"]
    target = head if head is not None and clause["gap"] == "object" else clause.get("object")
    if name in ADJECTIVES or (name in VERBS and VERBS[name].frame == "intransitive"):
        target = subject
    if name in ADJECTIVES:
        yield from ((name, noun) for noun in _head_nouns(clause.get("than")))
    yield from ((name, noun) for noun in _head_nouns(target))
    for part in ("subject", "object", "to", "complement", "than", "place", "companion", "tool"):
        if part in clause:
            yield from _phrase_combinations(clause[part])
    if "where" in clause:
        yield from _phrase_combinations(clause["where"]["of"])
    if "content" in clause:
        yield from _clause_combinations(clause["content"], clause["content"].get("subject"))


def _phrase_combinations(node: Node) -> Iterator[Combination]:
    if "and" in node:
        for part in node["and"]:
            yield from _phrase_combinations(part)
        return
    if "adjective" in node:
        yield (node["adjective"], node["noun"])
    if "owner" in node:
        yield from _phrase_combinations(node["owner"])
    if "clause" in node:
        clause = node["clause"]
        yield from _clause_combinations(clause, node if clause["gap"] == "subject" else clause["subject"], node)


def _head_nouns(node: Node | None) -> Iterator[str]:
    """The common nouns at the head of a phrase; names, titles and pronouns do not count, since they go with any
    predicate."""
    if node is None:
        return
    for part in node.get("and", (node,)):
        if "title" not in part and part["noun"] in NOUNS and "name" not in NOUNS[part["noun"]].tags:
            yield part["noun"]
