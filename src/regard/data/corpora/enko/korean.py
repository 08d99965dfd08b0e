"""Korean: a structure as eojeols: the subject first, the verb last, and in between complements with their particles.

The predicate expresses negation, aspect and honorification: 안 먹다 · 먹지 않다 · 먹고 있다 · 먹을 수 있다 · 먹고
싶다 · 먹어야 하다, and with an honoured subject 드시다, 먹지 않으시다, 드시고 계시다 …
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from . import lexicon
from .conjugation import (
    Ending,
    Register,
    Stem,
    attach_particle,
    conjugate,
    honorific_stem,
    infinitive,
    join_consonant,
    join_eu,
)
from .grammar import Key, Node, Word
from .lexicon import ADJECTIVES, NOUNS, PREDICATES, VERBS, Verb

_EXISTS, _LACKS = Stem("있", "", "exist"), Stem("없", "", "exist")
_STAYS, _DOES = Stem("계시", "시", "verb"), Stem("하", "하", "verb")
_WISHES, _IS_NOT = Stem("싶", "", "adjective"), Stem("아니", "아니", "adjective")

WholeEojeols = tuple[tuple[str, ...], ...]  # (text, roles …) of each


class PredicateParts(NamedTuple):
    """A predicate without its ending: the eojeols before the last stem, the stem, and its roles."""

    before: WholeEojeols
    stem: Stem
    roles: tuple[str, ...]


def is_honoured(node: Node) -> bool:
    """Whether a noun phrase takes -시- and 께서."""
    if "and" in node:
        return is_honoured(node["and"][-1])
    return "title" in node or (node["noun"] in NOUNS and "hon" in NOUNS[node["noun"]].tags)


def build_predicate(clause: Node, subject: Node | None, honour: bool) -> PredicateParts:
    """The predicate of a clause; `honour`: whether its subject takes -시-."""
    name, negation = clause["predicate"], clause.get("not", "")
    if name == "be" and negation:
        return PredicateParts((), honorific_stem(_IS_NOT) if honour else _IS_NOT, ("verb", "neg"))
    if name == "be":
        noun = NOUNS[clause["complement"]["noun"]].korean
        return PredicateParts((), Stem(noun, "시" if honour else "", "copula"), ("verb",))
    served = clause.get("to") or clause.get("object")
    humble = served is not None and is_honoured(served)
    # 싶다 expresses the speaker's own wish; the wish of others is 싶어 하다.
    subjects = () if subject is None else subject.get("and", (subject,))
    speaker = any(part["noun"] in ("I", "we", "you") for part in subjects)
    return _build_word(name, negation, clause.get("aspect", ""), honour, humble, speaker)


@cache
def short_negation_allowed(name: str) -> bool:
    """Whether a predicate can be negated with 안, as short native stems can; noun + 하다 and long adjectives take
    -지 않다."""
    word = PREDICATES[name]
    if "short" in word.marks:
        return True
    return "noshort" not in word.marks and word.stem.irregular != "하" and len(word.stem.text) <= 3


@cache
def _build_word(name: str, negation: str, aspect: str, honour: bool, humble: bool, speaker: bool) -> PredicateParts:
    if name in ("be at", "exist"):
        if honour:
            return PredicateParts((("안", "neg"),) if negation else (), _STAYS, ("verb",))
        return PredicateParts((), _LACKS, ("verb", "neg")) if negation else PredicateParts((), _EXISTS, ("verb",))
    word = PREDICATES[name]
    plain, respectful = word.stem, word.honorific
    before: WholeEojeols = ()
    if isinstance(word, Verb):
        if humble and word.humble:
            plain, respectful = word.humble, None
        if word.weather:
            before = ((word.weather, "verb"),)
        if negation and word.negative:
            return PredicateParts(before, honorific_stem(word.negative) if honour else word.negative, ("verb", "neg"))
    if negation == "short" and aspect != "can":
        if not short_negation_allowed(name):
            raise ValueError(f"predicate={name!r} takes not='long' only: 안 does not go before {plain.text}다")
        before = (*before, ("안", "neg"))
    inflected = (respectful or honorific_stem(plain)) if honour else plain
    stem = respectful if honour and respectful else plain
    role = "aux" if aspect else "verb"
    match aspect:
        case "" if negation != "long":
            return PredicateParts(before, inflected, ("verb",))
        case "":
            pass
        case "progressive":
            before = (*before, (join_consonant(stem, "고"), "verb"))
            stem, honour = _STAYS if honour else _EXISTS, False
        case "can":
            before = (*before, (join_eu(inflected, "ㄹ"), "verb"), ("수", "aux"))
            return PredicateParts(before, _LACKS if negation else _EXISTS, ("aux", "neg") if negation else ("aux",))
        case "want":
            shown = () if speaker else (("싶어", "aux"),)
            before = (*before, (join_consonant(stem, "고"), "verb"), *shown)
            stem = _WISHES if speaker else _DOES
        case "must" if not negation:
            return PredicateParts((*before, (infinitive(inflected) + "야", "verb")), _DOES, ("aux",))
        case _:
            raise ValueError(f"aspect={aspect!r} with not={negation!r} is not in this grammar")
    if negation == "long":
        before, role = (*before, (join_consonant(stem, "지"), role)), "neg"
        stem = Stem("않", "", "verb" if stem.kind == "verb" else "adjective")
    return PredicateParts(before, honorific_stem(stem) if honour else stem, (role,))


_THIRD_PERSON = {"you": "너", "he": "그", "she": "그녀", "they": "그들"}
# `our` is the word for `we`.
_PRONOUNS: dict[Register, dict[str, str]] = {
    "polite": {"I": "저", "we": "우리", "my": "제", **_THIRD_PERSON},
    "formal": {"I": "저", "we": "저희", "my": "제", **_THIRD_PERSON},
    "plain": {"I": "나", "we": "우리", "my": "내", **_THIRD_PERSON},
}
# Before 가 the short pronouns change: 저 + 가 → 제가.
_BEFORE_GA = {"저": "제", "나": "내", "너": "네"}
_DEMONSTRATIVES = {"this": "이", "that": "그"}
_COUNTED_AS_MANY = ("person", "animal")
# Clauses whose subject can be a topic (은/는): independent or contrasted ones.
_TOPICAL = ("statement", "question", "but", "and")
# Clauses in which Korean does not mark the tense.
_TENSELESS = ("so", "and", "hope")


def korean_words(sentence: Node) -> list[Word]:
    """The words of a sentence, with its final punctuation mark."""
    register, main = sentence["register"], sentence["clause"]
    ending: Ending = "question" if sentence.get("question") else "statement"
    joined = "join" in sentence
    words = _joined_clauses(sentence, register) if joined else _clause(main, main.get("subject"), register, ending)
    words[-1] = words[-1].append("?" if ending == "question" else ".")
    return words


def _joined_clauses(sentence: Node, register: Register) -> list[Word]:
    """Two clauses, the subordinate one first; a shared subject comes before both, as the topic."""
    first, main, ending, link = sentence["first"], sentence["clause"], sentence["join"], (id(sentence), "link")
    if not sentence.get("shared"):
        words = _clause(first, first.get("subject"), register, ending, link=link)
        return words + _clause(main, main.get("subject"), register, "statement")
    owner = main if ending == "because" else first
    subject, opening = owner["subject"], _subject(owner, owner["subject"], register, "statement")
    words = _clause(first, subject, register, ending, link=link, opening=opening)
    return words + _clause(main, subject, register, "statement", opening=[])


def _clause(
    clause: Node,
    subject: Node | None,
    register: Register,
    ending: Ending,
    *,
    link: Key | None = None,
    opening: list[Word] | None = None,
    gap: str = "",
) -> list[Word]:
    """One clause in Korean order: subject, time, companion, place, recipient, object, manner, predicate.

    `opening` replaces the words of the subject; `gap` is the part that a relative clause lacks.
    """
    node = id(clause)
    topic = _subject(clause, subject, register, ending) if opening is None else opening
    texts = lexicon.TIMES[clause["time"]][0].split(" ") if "time" in clause else ()
    time = [Word(text, ((node, "time"),)) for text in texts]
    words = [*time, *topic] if clause.get("front") else [*topic, *time]
    complements = _complements(clause, register, gap)
    if frequency := clause.get("frequency"):
        adverb = Word(lexicon.FREQUENCIES[frequency], ((node, "frequency"),))
        # 항상, 가끔, 보통 modify the whole clause and come early; 자주 stays with the verb.
        complements.insert(len(complements) if frequency == "often" else 0, adverb)
    words += complements
    if "manner" in clause:
        words.append(Word(lexicon.MANNERS[clause["manner"]][1], ((node, "manner"),)))
    if "degree" in clause:
        words.append(Word(lexicon.DEGREES[clause["degree"]], ((node, "degree"),)))
    return words + _predicate(clause, subject, register, ending, link)


def _subject(clause: Node, node: Node | None, register: Register, ending: Ending) -> list[Word]:
    if node is None or (node.get("noun") == "you" and register != "plain"):
        return []  # weather verbs include their subject; polite questions omit `you`
    if clause["predicate"] == "exist":
        return [*_where(clause, register), *_phrase(node, register, "이/가")]
    verb = VERBS.get(clause["predicate"])
    last = node["and"][-1] if "and" in node else node
    known = last.get("det") != "a" and not isinstance(last.get("number"), int)  # everything but `a cat` and `two cats`
    topical = ending in _TOPICAL and known and (verb is None or "thetic" not in verb.marks)
    if is_honoured(node):
        return _phrase(node, register, "께서는" if topical else "께서")
    return _phrase(node, register, "은/는" if topical else "이/가")


def _complements(clause: Node, register: Register, gap: str) -> list[Word]:
    """The phrases between the subject and the adverbs, each with its particle."""
    words: list[Word] = []
    for part, particle in (("companion", "과/와"), ("tool", "으로/로"), ("place", "에서")):
        if part in clause:
            words += _phrase(clause[part], register, particle)
    if "where" in clause and clause["predicate"] != "exist":
        words += _where(clause, register)
    if "to" in clause:
        words += _phrase(clause["to"], register, "께" if is_honoured(clause["to"]) else "에게")
    if "object" in clause and gap != "object":
        words += _phrase(clause["object"], register, VERBS[clause["predicate"]].particle)
    if "than" in clause:
        words += [*_phrase(clause["than"], register, "보다"), Word("더", ((id(clause), "more"),))]
    if "content" in clause:
        marks = VERBS[clause["predicate"]].marks
        ending: Ending = "fact" if "fact" in marks else "hope" if "hope" in marks else "quote"
        content = clause["content"]
        words += _clause(content, content.get("subject"), register, ending, link=(id(content), "link"))
    return words


def _where(clause: Node, register: Register) -> list[Word]:
    where = clause["where"]
    if "relation" not in where:
        return _phrase(where["of"], register, "에")
    return [*_phrase(where["of"], register, ""), Word(lexicon.RELATIONS[where["relation"]], ((id(where), "relation"),))]


def _predicate(clause: Node, subject: Node | None, register: Register, ending: Ending, link: Key | None) -> list[Word]:
    """The verb and its auxiliaries; the last eojeol expresses the tense, and also the link between clauses unless a
    word of its own does."""
    # The verb takes -시- for honoured people and for the person asked in a polite question.
    asked = subject is not None and subject.get("noun") == "you" and register != "plain"
    honour = subject is not None and clause["predicate"] != "exist" and (asked or is_honoured(subject))
    parts = build_predicate(clause, subject, honour)
    tense = "present" if ending in _TENSELESS else clause["tense"]
    eojeols = conjugate(parts.stem, tense, ending, register)
    node = id(clause)
    words: list[Word] = []
    if "complement" in clause and "not" in clause:
        words += _phrase(clause["complement"], register, "이/가")
    words += [Word(text, tuple([(node, role) for role in roles])) for text, *roles in parts.before]
    keys: dict[str, tuple[Key, ...]] = {"tense": ((node, "tense"),), "link": (link,) if link else ()}
    keys["verb"] = tuple([(node, role) for role in parts.roles])
    words += [Word(text, keys[role]) for text, role in eojeols]
    last = len(words) - 1
    bearer = last - 1 if eojeols[-1][1] == "link" else last
    words[bearer] = words[bearer].express((node, "tense"))
    if link and bearer == last:
        words[last] = words[last].express(link)
    if "complement" in clause and "not" not in clause:
        words[0] = words[0].express((id(clause["complement"]), "noun"))
    return words


def _phrase(node: Node, register: Register, pair: str) -> list[Word]:
    """A noun phrase with its particle on the last eojeol."""
    if "and" in node:
        first, second = node["and"]
        return [*_phrase(first, register, "과/와"), *_phrase(second, register, pair)]
    key: Key = (id(node), "noun")
    name = node["noun"]
    if (pronoun := _PRONOUNS[register].get(name)) is not None:
        if pair == "이/가":
            pronoun = _BEFORE_GA.get(pronoun, pronoun)
        return [Word(attach_particle(pronoun, pair), (key,))]
    if "title" in node:
        surname = Word(lexicon.SURNAMES[name], ((id(node), "surname"),))
        return [surname, Word(attach_particle(lexicon.TITLES[node["title"]][0], pair), (key,))]
    noun, number = NOUNS[name], node.get("number")
    words = _before_noun(node, register)
    if isinstance(number, int):
        counted = Word(attach_particle(noun.counter, pair), (), (key, (id(node), "number")))
        return [*words, Word(noun.korean, (key,)), Word(lexicon.NUMERALS[number][1], ((id(node), "number"),)), counted]
    # Only people and animals are marked as plural (들); for things it is left to the context.
    several = number == "many" and ("det" in node or "owner" in node) and not noun.tags.isdisjoint(_COUNTED_AS_MANY)
    return [*words, Word(attach_particle(noun.korean + ("들" if several else ""), pair), (key,))]


def _before_noun(node: Node, register: Register) -> list[Word]:
    """The words before a noun: relative clause, owner, demonstrative or possessive, adjective."""
    words: list[Word] = []
    if "clause" in node:
        clause = node["clause"]
        if clause["gap"] == "subject":
            words += _clause(clause, node, register, "adnominal", opening=[])
        else:
            words += _clause(clause, clause["subject"], register, "adnominal", gap=clause["gap"])
    if "owner" in node:
        words += _phrase(node["owner"], register, "의")
    determiner = node.get("det")
    if determiner in _DEMONSTRATIVES:
        words.append(Word(_DEMONSTRATIVES[determiner], ((id(node), "det"),)))
    elif determiner in ("my", "our"):
        ours = determiner == "our" or "elder" in NOUNS[node["noun"]].tags  # `my mother` is 우리 어머니
        words.append(Word(_PRONOUNS[register]["we" if ours else "my"], ((id(node), "det"),)))
    if "adjective" in node:
        adjective = ADJECTIVES[node["adjective"]]
        form = adjective.before or conjugate(adjective.stem, "present", "adnominal", register)[0][0]
        words.append(Word(form, ((id(node), "adjective"),)))
    return words
