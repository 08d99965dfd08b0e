"""Words with what they mean: how the two sides of a sentence pair are aligned.

Each word carries keys of the structure it expresses: (which node, which part of it). Words of the two languages that
share a key are linked; the link is sure when both carry it outright, and possible when one of them has it only in
passing (an article, a do-support, a counter). Sure and possible are those of Och and Ney (2003).
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Key", "Links", "Node", "Word", "align"]

Node = dict[str, Any]
"""One part of a structure: a sentence, a clause or a noun phrase (see `grammar.py`)."""
Key = tuple[int, str]
Links = tuple[tuple[int, int], ...]


class Word(NamedTuple):
    """One word as it is written, the keys it expresses, and those it only touches."""

    text: str
    sure: tuple[Key, ...] = ()
    weak: tuple[Key, ...] = ()


def align(source: list[Word], target: list[Word]) -> tuple[Links, Links]:
    """(sure links, all links): pairs (source word, target word), sorted."""
    places: dict[Key, list[tuple[int, bool]]] = {}
    for i, word in enumerate(source):
        for key in word.sure:
            places.setdefault(key, []).append((i, True))
        for key in word.weak:
            places.setdefault(key, []).append((i, False))
    sure: set[tuple[int, int]] = set()
    every: set[tuple[int, int]] = set()
    for j, word in enumerate(target):
        for key in word.sure:
            for i, outright in places.get(key, ()):
                every.add((i, j))
                if outright:
                    sure.add((i, j))
        for key in word.weak:
            every.update((i, j) for i, _ in places.get(key, ()))
    return tuple(sorted(sure)), tuple(sorted(every))
