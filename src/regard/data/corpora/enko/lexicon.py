"""The lexicon of en-ko: the words, read from the tables beside this file, their combinations, and what is held out.

`nouns.tsv`: English, plural, Korean, counter, tags. Tags are the classes that predicates select (food, place …), m f
(gender), hon (takes 께서 and -시-), kin (always has an owner; includes friends), elder (the owner is 우리), mass
(uncountable), plural (always plural), bare (no article), unique (always `the`), nocount (no numeral), own (people and
places that can have `my` or `our`), name (of a person).

`verbs.tsv`: frame, four English forms, Korean stem, irregular class, objects (subjects of an intransitive verb), marks.
`@tag` means every noun with that tag, `-word` excludes one. Marks: by=… the subjects if they are not people; hon=… the
honorific stem; humble=… the stem if the object or recipient is honoured; not=… the stem of the negation; state (no
progressive, place or manner); noshort (no 안 before it); short (안 although it ends in 하다); quick (no progressive);
how=… its manners; with=… its tools; in=… its places; company (can have a companion); feeds=… the objects if the subject
is an animal; asserted (not negated: Korean would use 못); thetic (the whole event is new information, so the subject
takes 이/가 even if it is known); 가, 에, 로 (the particle of the object); says=… the Korean subject where English has
`it`.

`adjectives.tsv`: English, comparative, Korean stem, irregular class, the nouns it can describe, marks: hon, noshort,
mood (a temporary state, which can be a reason); lasting (not in the future); before=… the form before a noun if it is
irregular; only-before, only-after.

`words.json`: adverbs, times, numerals, titles, and lists of words for particular constructions.

A combination is a predicate and a noun: a verb and its object (the subject of an intransitive verb, the place of a verb
of motion), or an adjective and the noun it describes. A fixed few of each predicate's nouns, chosen by a hash, are held
out for the splits `valid` and `combinations`: training contains both words, but never the pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from ...hashing import stable_hash
from .conjugation import Stem, StemKind

Frame = Literal["transitive", "intransitive", "motion", "ditransitive", "reporting", "weather"]
Combination = tuple[str, str]  # (predicate, noun), such as ("eat", "apple")

_PARTICLES = {"가": "이/가", "에": "에", "로": "으로/로"}
_KEY_SUFFIXES = {"ditransitive": " to", "reporting": " that"}


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun in both languages with its grammatical properties."""

    english: str
    plural: str
    korean: str
    tags: frozenset[str]
    counter: str

    @property
    def gender(self) -> str:
        return "m" if "m" in self.tags else "f" if "f" in self.tags else ""


@dataclass(frozen=True, slots=True)
class Predicate:
    """The common fields of verbs and adjectives."""

    key: str
    stem: Stem
    nouns: tuple[str, ...]  # objects, places of verbs of motion, subjects of intransitive verbs and adjectives
    honorific: Stem | None
    marks: frozenset[str]
    takes_people: bool  # whether names and pronouns can replace its nouns
    takes_titles: bool  # whether honoured people can


@dataclass(frozen=True, slots=True)
class Verb(Predicate):
    """A verb: English forms, Korean stems, and its possible subjects, tools, places and manners."""

    english: str
    past: str
    third_person: str
    gerund: str
    frame: Frame
    doers: tuple[str, ...]  # possible subjects; empty: people
    feeds: frozenset[str]  # possible objects if the subject is an animal
    tools: tuple[str, ...]
    places: tuple[str, ...]
    manners: tuple[str, ...]
    humble: Stem | None
    negative: Stem | None
    particle: str  # particle of the object: 을/를, 이/가 (a thing needed), 에 or 으로/로 (a destination)
    weather: str  # 비가, 눈이: the Korean subject where English has `it`


@dataclass(frozen=True, slots=True)
class Adjective(Predicate):
    """An adjective; ``before`` is its form before a noun if that is irregular."""

    comparative: str
    before: str


_FILES = resources.files(__package__)


def _read_table(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (_FILES / name).read_text(encoding="utf-8").splitlines()[1:]]


NOUNS = {
    english: Noun(english, plural, korean, frozenset(tags.split()), counter)
    for english, plural, korean, counter, tags in _read_table("nouns.tsv")
}


def nouns_with(tag: str, without: str = "") -> tuple[str, ...]:
    """The nouns with a tag and none of the tags in ``without``."""
    excluded = without.split()
    return tuple(noun.english for noun in NOUNS.values() if tag in noun.tags and noun.tags.isdisjoint(excluded))


def _expand(words: str) -> tuple[str, ...]:
    """The nouns that a list such as `@food bread -rice` (separated by spaces or commas) stands for, sorted."""
    included: set[str] = set()
    excluded: set[str] = set()
    for word in words.replace(",", " ").split():
        name = word.removeprefix("-").replace("_", " ")
        members = nouns_with(name[1:], without="name") if name.startswith("@") else (NOUNS[name].english,)
        if not members:
            raise ValueError(f"no noun has the tag {name[1:]!r}")
        (excluded if word.startswith("-") else included).update(members)
    return tuple(sorted(included - excluded))


def _predicate_fields(key: str, stem: Stem, nouns: str, marks: dict[str, str]) -> dict[str, Any]:
    people = not {"@person", "@adult"}.isdisjoint(nouns.split())
    titles = people and "-@hon" not in nouns
    fields = {"key": key, "stem": stem, "marks": frozenset(marks), "takes_people": people, "takes_titles": titles}
    kind: StemKind = "adjective" if stem.kind == "adjective" else "verb"
    honorific = Stem(marks["hon"], "시", kind) if "hon" in marks else None
    return fields | {"nouns": _expand(nouns), "honorific": honorific}


def _parse_marks(text: str) -> dict[str, str]:
    """The last column of a table: flags, and values as name=a,b."""
    return {name: value for name, _, value in (mark.partition("=") for mark in text.split())}


def _load_verbs() -> dict[str, Verb]:
    verbs: dict[str, Verb] = {}
    for frame, english, past, third_person, gerund, stem, irregular, nouns, mark_text in _read_table("verbs.tsv"):
        key, marks = english + _KEY_SUFFIXES.get(frame, ""), _parse_marks(mark_text)
        kind: StemKind = "exist" if stem.endswith("있") else "adjective" if "adjective" in marks else "verb"
        negative = marks.get("not")
        verbs[key] = Verb(
            **_predicate_fields(key, Stem(stem, irregular, kind), nouns, marks),
            english=english,
            past=past,
            third_person=third_person,
            gerund=gerund,
            frame=frame,  # type: ignore[arg-type]  # the table has only valid frames
            doers=_expand(marks.get("by", "")),
            feeds=frozenset(_expand(marks.get("feeds", ""))),
            tools=_expand(marks.get("with", "")),
            places=_expand(marks.get("in", "")),
            manners=tuple(marks["how"].split(",")) if "how" in marks else (),
            humble=Stem(marks["humble"]) if "humble" in marks else None,
            negative=Stem(negative, "르" if negative == "모르" else "", kind) if negative else None,
            particle=next((pair for mark, pair in _PARTICLES.items() if mark in marks), "을/를"),
            weather=marks.get("says", ""),
        )
    return verbs


def _load_adjectives() -> dict[str, Adjective]:
    adjectives: dict[str, Adjective] = {}
    for english, comparative, korean, irregular, nouns, mark_text in _read_table("adjectives.tsv"):
        marks = _parse_marks(mark_text)
        stem = Stem(korean, irregular, "exist" if korean.endswith("있") else "adjective")
        fields = _predicate_fields(english, stem, nouns, marks)
        adjectives[english] = Adjective(**fields, comparative=comparative, before=marks.get("before", ""))
    return adjectives


VERBS: dict[str, Verb] = _load_verbs()
ADJECTIVES: dict[str, Adjective] = _load_adjectives()
PREDICATES: dict[str, Verb | Adjective] = {**VERBS, **ADJECTIVES}

# Adverbs, times, lists.
_WORDS: dict[str, Any] = json.loads((_FILES / "words.json").read_text(encoding="utf-8"))
MANNERS: dict[str, tuple[str, str]] = _WORDS["manners"]  # key in verbs.tsv → (English, Korean)
FREQUENCIES: dict[str, str] = _WORDS["frequencies"]  # before the verb in English
DEGREES: dict[str, str] = _WORDS["degrees"]  # before an adjective
TIMES: dict[str, tuple[str, list[str]]] = _WORDS["times"]  # (Korean, tenses); `now` is the present progressive
RELATIONS: dict[str, str] = _WORDS["relations"]  # in Korean a noun after the landmark
NUMERALS: dict[int, tuple[str, str]] = {int(number): words for number, words in _WORDS["numerals"].items()}
SURNAMES: dict[str, str] = _WORDS["surnames"]
TITLES: dict[str, tuple[str, str]] = _WORDS["titles"]  # (Korean, gender); in Korean they follow the surname
NAMES = nouns_with("name")
TIMES_OF = {
    tense: tuple(time for time, (_, tenses) in TIMES.items() if tense in tenses)
    for tense in ("past", "present", "future", "now")
}
MOMENTARY_TIMES = frozenset(_WORDS["momentary_times"])  # for momentary events: not "the water boiled last year"

_FRAMES: tuple[Frame, ...] = ("transitive", "intransitive", "motion", "ditransitive", "weather")
FRAMES: dict[Frame, tuple[Verb, ...]] = {
    frame: tuple(verb for verb in VERBS.values() if verb.frame == frame) for frame in _FRAMES
}
# Activities of people, and those that can be contrasted: done with one thing but not with another.
ACTIVITIES = tuple(
    verb for frame in _FRAMES[:-1] for verb in FRAMES[frame] if not verb.marks & {"state", "thetic"} and not verb.doers
)
_CHOICES = tuple(verb for verb in ACTIVITIES if verb.frame in ("transitive", "motion") and "asserted" not in verb.marks)
CONTRASTED = tuple(verb for verb in _CHOICES if len(verb.nouns) > 5)
# Activities for any occasion, activities because somebody else is sick or sad, and events that people react to.
EVERYDAY_VERBS, VERBS_FOR_OTHERS, NEWS_VERBS = (
    tuple(VERBS[key] for key in _WORDS[name]) for name in ("everyday_verbs", "verbs_for_others", "news_verbs")
)
# Not used in embedded clauses, where two phrases with 이/가 in a row would be ambiguous.
MAIN_CLAUSE_VERBS = frozenset(_WORDS["main_clause_verbs"])
MOOD_RESPONSES: dict[str, list[str]] = _WORDS["mood_responses"]  # mood → verbs of what people do about it

PREDICATIVE = tuple(word for word in ADJECTIVES.values() if "only-before" not in word.marks)
MOODS = tuple(word for word in PREDICATIVE if "mood" in word.marks)
WEATHER_ADJECTIVES = tuple(word for word in PREDICATIVE if "weather" in word.nouns)
COMPARABLE = frozenset(
    word.key for word in PREDICATIVE if not word.marks & {"mood", "only-after"} and word.key not in ("bad", "good")
)
COMPLAINTS = frozenset(_WORDS["complaint_adjectives"])  # adjectives that go with `a little` and `too`

PEOPLE = tuple(name for name in nouns_with("person", without="name") if name != "baby")
GENDERED_PEOPLE: list[str] = _WORDS["gendered_people"]
JOBS = nouns_with("job")
GROUPS = nouns_with("person", without="kin name royal")
SMALL_THINGS = nouns_with("kept", without="mass vehicle")
SMALL_ANIMALS: list[str] = _WORDS["small_animals"]
ANIMALS = nouns_with("animal")
ANIMAL_PLACES: list[str] = _WORDS["animal_places"]
THING_PLACES: list[str] = _WORDS["thing_places"]
PERSON_PLACES = nouns_with("place", without="by on city")
TOPS: list[str] = _WORDS["tops"]
LANDMARKS = [*TOPS, *_WORDS["beside_only"]]
CONTAINERS: list[str] = _WORDS["containers"]
LONG_RIDES: list[str] = _WORDS["long_distance_rides"]
SHORT_RIDES: list[str] = _WORDS["short_distance_rides"]


def lemmas() -> frozenset[str]:
    """Every lemma with its kind: `noun:cat`, `verb:read`, `adjective:big`, `time:yesterday` …"""
    manners, numerals = ([english for english, _ in table.values()] for table in (MANNERS, NUMERALS))
    kinds: dict[str, Iterable[str]] = {"noun": NOUNS, "verb": VERBS, "adjective": ADJECTIVES, "time": TIMES}
    kinds |= {"adverb": [*manners, *FREQUENCIES, *DEGREES], "numeral": numerals}
    kinds |= {"relation": RELATIONS, "title": [*TITLES, *SURNAMES]}
    return frozenset(f"{kind}:{word}" for kind, words in kinds.items() for word in words)


_MIN_NOUNS = 6  # a predicate with fewer nouns has none held out, as it could not be learned from the rest
_SHARE = 16  # one noun in 16 is held out for each of the two splits


def _hold_out() -> dict[Combination, str]:
    held_out: dict[Combination, str] = {}
    for key, word in PREDICATES.items():
        nouns = sorted(word.nouns, key=lambda noun: stable_hash("en-ko held out", key, noun))
        share = max(1, len(nouns) // _SHARE) if len(nouns) >= _MIN_NOUNS else 0
        held_out.update({(key, noun): "combinations" for noun in nouns[:share]})
        held_out.update({(key, noun): "valid" for noun in nouns[share : 2 * share]})
    return held_out


HELD_OUT: dict[Combination, str] = _hold_out()


def _noun_weights() -> dict[str, int]:
    """How often each noun is repeated in a predicate's list, so that all nouns are drawn about equally often.

    Without weights, a noun is drawn in proportion to Σ 1/|nouns| over its predicates; the smaller this is, the larger
    its weight, up to eight. People have weight 1, since they are also drawn as subjects.
    """
    share = dict.fromkeys(NOUNS, 0.0)
    for word in PREDICATES.values():
        for noun in word.nouns:
            share[noun] += (0.4 if isinstance(word, Adjective) else 1.0) / len(word.nouns)
    people = {noun for noun in NOUNS if "person" in NOUNS[noun].tags}
    things = sorted(share[noun] for noun in share if noun not in people)
    aim = 1.5 * things[len(things) // 2]
    return {noun: 1 if noun in people else max(1, min(8, round(aim / share[noun]))) for noun in share}


def _combination_tables() -> tuple[dict[tuple[str, str], list[str]], dict[tuple[str, str, str], list[str]]]:
    """Nouns by predicate and split, and predicates by noun, kind and split."""
    weights = _noun_weights()
    nouns: dict[tuple[str, str], list[str]] = {}
    predicates: dict[tuple[str, str, str], list[str]] = {}
    for key, word in PREDICATES.items():
        kind = word.frame if isinstance(word, Verb) else "adjective"
        for noun in word.nouns:
            split = HELD_OUT.get((key, noun), "train")
            nouns.setdefault((key, split), []).extend([noun] * weights[noun])
            predicates.setdefault((noun, kind, split), []).append(key)
    return nouns, predicates


_NOUNS_OF, _PREDICATES_OF = _combination_tables()


def nouns_of(predicate: str, split: str) -> list[str]:
    """The nouns of a predicate in one split, repeated by weight; may be empty."""
    return _NOUNS_OF.get((predicate, split), [])


def predicates_of(noun: str, kind: str, split: str) -> list[str]:
    """The predicates of one kind (`adjective` or a verb frame) that go with a noun in one split; may be empty."""
    return _PREDICATES_OF.get((noun, kind, split), [])
