"""Splitting a text into words, and reading entities from the tags of words (B-PER, I-PER, O)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+(?:[.'’-]\w+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Words and punctuation marks: ``It's in Paris.`` → ``["It's", "in", "Paris", "."]``."""
    return _WORD.findall(text)


def has_entities(tags: Iterable[str]) -> bool:
    """Whether all tags are O or an entity tag such as B-PER, and not all are O."""
    distinct = set(tags)
    return distinct != {"O"} and all(tag == "O" or tag[:2] in ("B-", "I-", "E-", "S-") for tag in distinct)


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, last word) of each entity, as conlleval and seqeval read B, I, E, S and O tags.

    An I tag after O, or after a tag of another type, also begins an entity.
    """
    spans: list[tuple[str, int, int]] = []
    first = 0
    prefix_before, kind_before = "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        changes = kind != kind_before
        if prefix_before != "O" and (prefix in ("B", "S", "O") or prefix_before in ("E", "S") or changes):
            spans.append((kind_before, first, position - 1))
        if prefix in ("B", "S") or (prefix in ("I", "E") and (prefix_before in ("E", "S", "O") or changes)):
            first = position
        prefix_before, kind_before = prefix, kind
    return spans
