"""The Korean predicate before its ending: negation, aspect and honorification around the stem.

안 먹다 · 먹지 않다 · 먹고 있다 · 먹을 수 있다 · 먹고 싶다 · 먹어야 하다, and of somebody honoured 드시다, 먹지
않으시다, 드시고 계시다 …
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .conjugation import Stem, honorific, infinitive, join_eu, join_plain
from .lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Verb
from .words import Node

__all__ = ["Built", "honoured", "predicate", "short_negation_allowed"]

_EXISTS = Stem("있", "", "exist")
_LACKS = Stem("없", "", "exist")
_STAYS = Stem("계시", "시", "verb")
_DOES = Stem("하", "하", "verb")
_WISHES = Stem("싶", "", "adjective")
_IS_NOT = Stem("아니", "아니", "adjective")


class Built(NamedTuple):
    """A predicate up to its last stem: eojeols that are whole as (text, roles …), then the stem and its roles."""

    before: tuple[tuple[str, ...], ...]
    stem: Stem
    roles: tuple[str, ...]


def honoured(node: Node) -> bool:
    """Whether somebody is spoken of with -시- and 께서."""
    if "and" in node:
        return honoured(node["and"][-1])
    return "title" in node or (node["noun"] in NOUNS and "hon" in NOUNS[node["noun"]].tags)


def predicate(clause: Node, subject: Node | None, honour: bool) -> Built:
    """The predicate of a clause; `honour` says whether its subject is spoken of with -시-."""
    name, negation = clause["predicate"], clause.get("not", "")
    if name == "be":
        return _copula(NOUNS[clause["complement"]["noun"]].korean, bool(negation), honour)
    served = clause.get("to") or clause.get("object")
    humble = served is not None and honoured(served)
    # 싶다 tells one's own wish; of others one says that they show it: 싶어 하다.
    wisher = subject is not None and _speaks_for_itself(subject)
    return _build(name, negation, clause.get("aspect", ""), honour, humble, wisher)


def _speaks_for_itself(subject: Node) -> bool:
    if "and" in subject:
        return any(_speaks_for_itself(part) for part in subject["and"])
    return subject["noun"] in ("I", "we", "you")


def _copula(noun: str, negated: bool, honour: bool) -> Built:
    if negated:
        return Built((), honorific(_IS_NOT) if honour else _IS_NOT, ("verb", "neg"))
    return Built((), Stem(noun, "시" if honour else "", "copula"), ("verb",))


@cache
def short_negation_allowed(name: str) -> bool:
    """안 goes before short native stems; noun + 하다 and long adjectives are negated with -지 않다."""
    word: Verb | Adjective = VERBS[name] if name in VERBS else ADJECTIVES[name]
    if "short" in word.marks:
        return True
    return "noshort" not in word.marks and word.stem.irregular != "하" and len(word.stem.text) <= 3


@cache
def _build(name: str, negation: str, aspect: str, honour: bool, humble: bool, wisher: bool) -> Built:
    if name in ("be at", "exist"):
        return _existence(bool(negation), honour)
    word: Verb | Adjective = VERBS[name] if name in VERBS else ADJECTIVES[name]
    plain, respectful = word.stem, word.honorific
    before: tuple[tuple[str, ...], ...] = ()
    if isinstance(word, Verb):
        if humble and word.humble:
            plain, respectful = word.humble, None
        if word.weather:
            before = ((word.weather, "verb"),)
        if negation and word.negative:
            return Built(before, honorific(word.negative) if honour else word.negative, ("verb", "neg"))
    if negation == "short" and aspect != "can":
        if not short_negation_allowed(name):
            raise ValueError(f"predicate={name!r} takes not='long' only: 안 does not go before {plain.text}다")
        before = (*before, ("안", "neg"))
    inflected = (respectful or honorific(plain)) if honour else plain
    base = respectful if honour and respectful else plain
    if not aspect:
        if negation == "long":
            stem = Stem("않", "", "verb" if plain.kind == "verb" else "adjective")
            whole = (join_plain(base, "지"), "verb")
            return Built((*before, whole), honorific(stem) if honour else stem, ("neg",))
        return Built(before, inflected, ("verb",))
    return _with_aspect(before, base, inflected, aspect, negation, honour, wisher)


def _with_aspect(
    before: tuple[tuple[str, ...], ...],
    base: Stem,
    inflected: Stem,
    aspect: str,
    negation: str,
    honour: bool,
    wisher: bool,
) -> Built:
    long = negation == "long"
    match aspect:
        case "progressive":
            before = (*before, (join_plain(base, "고"), "verb"))
            return _perhaps_not(before, _STAYS if honour else _EXISTS, long, honour=False)
        case "can":
            before = (*before, (join_eu(inflected, "ㄹ"), "verb"), ("수", "aux"))
            return Built(before, _LACKS, ("aux", "neg")) if negation else Built(before, _EXISTS, ("aux",))
        case "want":
            before = (*before, (join_plain(base, "고"), "verb"))
            if wisher:
                return _perhaps_not(before, _WISHES, long, honour)
            return _perhaps_not((*before, ("싶어", "aux")), _DOES, long, honour)
        case "must" if not negation:
            return Built((*before, (infinitive(inflected) + "야", "verb")), _DOES, ("aux",))
    raise ValueError(f"aspect={aspect!r} with not={negation!r} is not in this grammar")


def _perhaps_not(before: tuple[tuple[str, ...], ...], stem: Stem, negated: bool, honour: bool) -> Built:
    """The helper itself, or -지 않다 after it."""
    if not negated:
        return Built(before, honorific(stem) if honour else stem, ("aux",))
    not_ = Stem("않", "", "verb" if stem.kind == "verb" else "adjective")
    return Built((*before, (join_plain(stem, "지"), "aux")), honorific(not_) if honour else not_, ("neg",))


def _existence(negated: bool, honour: bool) -> Built:
    if not honour:
        return Built((), _LACKS if negated else _EXISTS, ("verb", "neg") if negated else ("verb",))
    return Built((("안", "neg"),) if negated else (), _STAYS, ("verb",))
