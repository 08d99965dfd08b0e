"""Words of a text, and the entities that their tags spell (B-PER, I-PER, O)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+(?:[.'’-]\w+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Words and punctuation marks: ``It's in Paris.`` → It's, in, Paris, and the full stop."""
    return _WORD.findall(text)


def has_entities(tags: Iterable[str]) -> bool:
    """Whether tags are those of entities: O, or a place in an entity and its type."""
    distinct = set(tags)
    return distinct != {"O"} and all(tag == "O" or tag[:2] in ("B-", "I-", "E-", "S-") for tag in distinct)


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, last word) of each entity, as conlleval and seqeval read B, I, E, S and O.

    An I after another type, or after none, begins an entity too.
    """
    spans, first, before, kind_before = list[tuple[str, int, int]](), 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        changes = kind != kind_before
        if before != "O" and (mark in ("B", "S", "O") or before in ("E", "S") or changes):
            spans.append((kind_before, first, place - 1))
        if mark in ("B", "S") or (mark in ("I", "E") and (before in ("E", "S", "O") or changes)):
            first = place
        before, kind_before = mark, kind
    return spans
