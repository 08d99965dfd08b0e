"""The lexicon: the tables of words, read once into records that the grammar asks.

A verb or adjective knows the nouns it goes with, so that people eat food and read books; which of those pairs are held
out for testing is decided in `combinations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from . import adjectives, adverbs, nouns, verbs
from .conjugation import Kind, Stem
from .hangul import is_syllable
from .inflection import past_tense, plural

__all__ = ["ADJECTIVES", "NOUNS", "VERBS", "Adjective", "Frame", "Noun", "Verb", "lemmas"]

Frame = Literal["transitive", "intransitive", "motion", "ditransitive", "reporting", "weather"]


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun in both languages and what the grammar must know of it."""

    english: str
    korean: str
    tags: frozenset[str]
    counter: str

    @property
    def plural(self) -> str:
        return self.english if "plural" in self.tags else plural(self.english)

    @property
    def gender(self) -> str:
        return "m" if "m" in self.tags else "f" if "f" in self.tags else ""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: English forms, Korean stems, the nouns it goes with, and its marks (see `verbs.py`)."""

    key: str
    english: str
    past: str
    frame: Frame
    stem: Stem
    partners: tuple[str, ...]
    """Its objects; places for motion, subjects for intransitive verbs."""
    doers: tuple[str, ...]
    """Who does it, where it is not everybody: empty stands for people."""
    feeds: frozenset[str]
    tools: tuple[str, ...]
    places: tuple[str, ...]
    manners: tuple[str, ...]
    honorific: Stem | None
    humble: Stem | None
    negative: Stem | None
    marks: frozenset[str]
    particle: str
    """Of the object: 을/를, 이/가 (something is needed), 에 or 으로/로 (a place is gone to)."""
    weather: str
    """비가, 눈이: the subject Korean has where English says `it`."""
    takes_people: bool
    """Whether names and pronouns may stand for its nouns."""
    takes_titles: bool
    """Whether people spoken of with honour may."""


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective: both words, the nouns it describes, and its marks (see `adjectives.py`)."""

    key: str
    stem: Stem
    partners: tuple[str, ...]
    honorific: Stem | None
    before: str
    """The form before a noun, where it is not the regular one."""
    marks: frozenset[str]
    takes_people: bool
    """Whether names and pronouns may stand for its nouns."""
    takes_titles: bool
    """Whether people spoken of with honour may."""


_PARTICLES = {"가": "이/가", "에": "에", "로": "으로/로"}


def _read_nouns() -> dict[str, Noun]:
    found: dict[str, Noun] = {}
    for block_tags, block_counter, block in nouns.NOUN_BLOCKS:
        for entry in block.replace("\n", "/").split("/"):
            words = entry.split()
            if not words:
                continue
            split = next(place for place, word in enumerate(words) if is_syllable(word[0]))
            english, korean, rest = " ".join(words[:split]), words[split], words[split + 1 :]
            counter = next((word[:-1] for word in rest if word.endswith(":")), block_counter)
            taken = {word[1:] for word in rest if word.startswith("-")}
            tags = frozenset({*block_tags.split(), *rest} - taken)
            if english in found:
                raise ValueError(f"the noun {english!r} stands twice in the lexicon")
            found[english] = Noun(english, korean, tags, counter)
    for english, (korean, gender) in adverbs.NAMES.items():
        found[english] = Noun(english, korean, frozenset({"person", "name", "bare", gender}), "")
    return found


NOUNS: dict[str, Noun] = _read_nouns()


def _expand(words: list[str]) -> tuple[str, ...]:
    """`@food bread -rice` → the nouns meant, sorted."""
    chosen: set[str] = set()
    removed: set[str] = set()
    for word in words:
        group, name = (removed, word[1:]) if word.startswith("-") else (chosen, word)
        name = name.replace("_", " ")
        if name.startswith("@"):
            members = [noun.english for noun in NOUNS.values() if name[1:] in noun.tags and "name" not in noun.tags]
            if not members:
                raise ValueError(f"no noun has the tag {name[1:]!r}")
            group.update(members)
        elif name in NOUNS:
            group.add(name)
        else:
            raise ValueError(f"the lexicon has no noun {name!r}")
    return tuple(sorted(chosen - removed))


def _people(partners: str) -> bool:
    return not {"@person", "@adult"}.isdisjoint(partners.split())


def _rows(table: str) -> Iterator[list[str]]:
    """The rows of a table, cell by cell; an indented line goes on with the row above it."""
    for line in table.strip().replace("\n    ", " ").splitlines():
        yield [cell.strip() for cell in line.split("|")]


def _values(marks: list[str], name: str) -> list[str]:
    return next((mark.removeprefix(f"{name}=").split(",") for mark in marks if mark.startswith(f"{name}=")), [])


def _stem_of(marks: list[str], name: str, irregular: str = "", kind: Kind = "verb") -> Stem | None:
    values = _values(marks, name)
    return Stem(values[0], irregular, kind) if values else None


def _kind(stem: str, marks: list[str]) -> Kind:
    return "exist" if stem.endswith("있") else "adjective" if "adjective" in marks else "verb"


def _read_verbs() -> dict[str, Verb]:
    tables: list[tuple[Frame, str]] = [
        ("transitive", verbs.TRANSITIVE),
        ("intransitive", verbs.INTRANSITIVE),
        ("motion", verbs.MOTION),
        ("ditransitive", verbs.DITRANSITIVE),
        ("reporting", verbs.REPORTING),
        ("weather", verbs.WEATHER),
    ]
    suffix = {"ditransitive": " to", "reporting": " that"}
    found: dict[str, Verb] = {}
    for frame, table in tables:
        for english, past, stem, irregular, partners, flags in _rows(table):
            key, marks = english + suffix.get(frame, ""), flags.split()
            if key in found:
                raise ValueError(f"the verb {key!r} stands twice in the lexicon")
            kind = _kind(stem, marks)
            not_stem = _values(marks, "not")
            found[key] = Verb(
                key=key,
                english=english,
                past=past or past_tense(english),
                frame=frame,
                stem=Stem(stem, irregular, kind),
                partners=_expand(partners.split()),
                doers=_expand(_values(marks, "by")),
                feeds=frozenset(_expand(_values(marks, "feeds"))),
                tools=_expand(_values(marks, "with")),
                places=_expand(_values(marks, "in")),
                manners=tuple(_values(marks, "how")),
                honorific=_stem_of(marks, "hon", "시"),
                humble=_stem_of(marks, "humble"),
                negative=Stem(not_stem[0], "르" if not_stem[0] == "모르" else "", kind) if not_stem else None,
                marks=frozenset(mark for mark in marks if "=" not in mark),
                particle=next((pair for mark, pair in _PARTICLES.items() if mark in marks), "을/를"),
                weather="".join(_values(marks, "says")),
                takes_people=_people(partners),
                takes_titles=_people(partners) and "-@hon" not in partners,
            )
    return found


def _read_adjectives() -> dict[str, Adjective]:
    found: dict[str, Adjective] = {}
    for english, stem, irregular, partners, flags in _rows(adjectives.ADJECTIVES):
        marks = flags.split()
        kind: Kind = "exist" if stem.endswith("있") else "adjective"
        found[english] = Adjective(
            key=english,
            stem=Stem(stem, irregular, kind),
            partners=_expand(partners.split()),
            honorific=_stem_of(marks, "hon", "시", "adjective"),
            before="".join(_values(marks, "before")),
            marks=frozenset(mark for mark in marks if "=" not in mark),
            takes_people=_people(partners),
            takes_titles=_people(partners) and "-@hon" not in partners,
        )
    return found


VERBS: dict[str, Verb] = _read_verbs()
ADJECTIVES: dict[str, Adjective] = _read_adjectives()
if shared := VERBS.keys() & ADJECTIVES.keys():
    raise ValueError(f"{', '.join(sorted(shared))} is both a verb and an adjective, so a predicate could be either")


def lemmas() -> frozenset[str]:
    """Every lemma, marked by its kind: `noun:cat`, `verb:read`, `adjective:big`, `time:yesterday` …"""
    kinds: list[tuple[str, list[str]]] = [
        ("noun", list(NOUNS)),
        ("verb", list(VERBS)),
        ("adjective", list(ADJECTIVES)),
        ("adverb", [*(english for english, _ in adverbs.MANNERS.values()), *adverbs.FREQUENCIES, *adverbs.DEGREES]),
        ("time", list(adverbs.TIMES)),
        ("relation", list(adverbs.RELATIONS)),
        ("numeral", [english for english, _ in adverbs.NUMERALS.values()]),
        ("title", [*adverbs.TITLES, *adverbs.SURNAMES]),
    ]
    return frozenset(f"{kind}:{word}" for kind, words in kinds for word in words)
