"""English word forms by rule; what no rule gives stands in the lexicon."""

from __future__ import annotations

from functools import cache

__all__ = ["article", "comparative", "gerund", "past_tense", "plural", "third_person"]

_VOWELS = "aeiou"
# Spelled with a vowel but spoken with a consonant, and the other way round.
_SPOKEN_CONSONANT = ("uni", "use", "euro", "one")
_SPOKEN_VOWEL = ("honest", "hour")
_IRREGULAR_PLURALS = {
    "child": "children", "man": "men", "woman": "women", "mouse": "mice", "sheep": "sheep",
    "wife": "wives", "knife": "knives", "leaf": "leaves", "wolf": "wolves", "thief": "thieves", "scarf": "scarves",
    "tomato": "tomatoes", "potato": "potatoes", "fisherman": "fishermen",
}  # fmt: skip
_DOUBLED = {"sit", "swim", "run", "get", "stop", "cut", "hug", "put", "win", "begin", "forget", "plan"}
_COMPARATIVES = {"good": "better", "bad": "worse", "far": "farther"}
# Two syllables, and yet English says more: more honest, not honester.
_WITH_MORE = {"honest", "famous", "boring", "tired", "handsome", "friendly", "lonely", "polite", "comfortable"}


@cache
def article(word: str) -> str:
    """`a` or `an`, by the sound the next word begins with."""
    vowel = word[0] in _VOWELS and not word.startswith(_SPOKEN_CONSONANT)
    return "an" if vowel or word.startswith(_SPOKEN_VOWEL) else "a"


def _es(word: str) -> str:
    """The -s of plurals and of the third person."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in _VOWELS:
        return word[:-1] + "ies"
    return word + "s"


@cache
def plural(noun: str) -> str:
    """The plural of a noun: cities, knives, children."""
    return _IRREGULAR_PLURALS.get(noun) or _es(noun)


@cache
def third_person(verb: str) -> str:
    """he … goes, watches, carries, waits for: only the first word of a phrasal verb changes."""
    head, *rest = verb.split(" ")
    form = {"go": "goes", "do": "does", "have": "has", "be": "is"}.get(head) or _es(head)
    return " ".join([form, *rest])


@cache
def gerund(verb: str) -> str:
    """The -ing form: writing, sitting, lying down."""
    head, *rest = verb.split(" ")
    if head in _DOUBLED:
        form = head + head[-1] + "ing"
    elif head.endswith("ie"):
        form = head[:-2] + "ying"
    elif head.endswith("e") and not head.endswith(("ee", "oe", "ye")):
        form = head[:-1] + "ing"
    else:
        form = head + "ing"
    return " ".join([form, *rest])


@cache
def past_tense(verb: str) -> str:
    """The regular past: opened, liked, carried, stopped, waited for."""
    head, *rest = verb.split(" ")
    if head in _DOUBLED:
        form = head + head[-1] + "ed"
    elif head.endswith("e"):
        form = head + "d"
    elif head.endswith("y") and head[-2] not in _VOWELS:
        form = head[:-1] + "ied"
    else:
        form = head + "ed"
    return " ".join([form, *rest])


@cache
def comparative(adjective: str) -> str:
    """bigger, heavier, more expensive: one syllable or a final -y takes -er, the rest takes more."""
    if adjective in _COMPARATIVES:
        return _COMPARATIVES[adjective]
    syllables = sum(
        c in "aeiouy" and (i == 0 or adjective[i - 1] not in "aeiouy") for i, c in enumerate(adjective.rstrip("e"))
    )
    if adjective in _WITH_MORE or syllables > 2 or (syllables == 2 and not adjective.endswith(("y", "ow"))):
        return f"more {adjective}"
    if adjective.endswith("y") and adjective[-2] not in _VOWELS:
        return adjective[:-1] + "ier"
    if adjective.endswith("e"):
        return adjective + "r"
    if adjective[-1] in "gdtnm" and adjective[-2] in _VOWELS and adjective[-3] not in _VOWELS:
        return adjective + adjective[-1] + "er"
    return adjective + "er"
