"""Structure → Korean eojeols: subject first, verb last, and everything between marked by its particle."""

from __future__ import annotations

from .adverbs import DEGREES, FREQUENCIES, MANNERS, NUMERALS, RELATIONS, SURNAMES, TIMES, TITLES
from .endings import Ending, Register, finish
from .hangul import particle
from .lexicon import ADJECTIVES, NOUNS, VERBS
from .predicates import honoured, predicate
from .words import Key, Node, Word

__all__ = ["korean"]

_ONE_SELF = {"polite": "저", "formal": "저", "plain": "나"}
_MY = {"polite": "제", "formal": "제", "plain": "내"}
_US = {"polite": "우리", "formal": "저희", "plain": "우리"}
_THIRD = {"he": "그", "she": "그녀", "they": "그들"}
# Before 가 the short pronouns change: 저 + 가 → 제가.
_BEFORE_GA = {"저": "제", "나": "내", "너": "네"}
_DEMONSTRATIVES = {"this": "이", "that": "그"}
_COUNTED_AS_MANY = ("person", "animal")
# Clauses whose subject may be a topic (은/는): those that stand on their own or in contrast.
_TOPICAL = ("statement", "question", "but", "and")
# Clauses in which Korean does not say the tense a second time.
_TENSELESS = ("so", "and", "hope")


def korean(sentence: Node) -> list[Word]:
    """The whole sentence with its full stop."""
    register: Register = sentence["register"]
    question = bool(sentence.get("question"))
    main = sentence["clause"]
    ending: Ending = "question" if question else "statement"
    joined = "join" in sentence
    words = _joined(sentence, register) if joined else _clause(main, main.get("subject"), register, ending)
    words[-1] = words[-1]._replace(text=words[-1].text + ("?" if question else "."))
    return words


def _joined(sentence: Node, register: Register) -> list[Word]:
    """Two clauses, the joining one first; a subject they share stands before both, as the topic."""
    first, main, ending, link = sentence["first"], sentence["clause"], sentence["join"], (id(sentence), "link")
    if not sentence.get("shared"):
        return [
            *_clause(first, first.get("subject"), register, ending, link=link),
            *_clause(main, main.get("subject"), register, "statement"),
        ]
    subject = main["subject"] if ending == "because" else first["subject"]
    opening = _subject(first if ending != "because" else main, subject, register, "statement")
    return [
        *_clause(first, subject, register, ending, link=link, opening=opening),
        *_clause(main, subject, register, "statement", opening=[]),
    ]


# ------------------------------------------------------------------------------------------------ clauses


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
    """One clause in Korean order: subject, time, company, place, recipient, object, manner, predicate.

    `opening` replaces the words of the subject, `gap` names the part that a relative clause lacks.
    """
    who = _subject(clause, subject, register, ending) if opening is None else opening
    time = _time(clause)
    return [
        *([*time, *who] if clause.get("front") else [*who, *time]),
        *_habit(clause),
        *_complements(clause, register, gap),
        *_adverbs(clause),
        *_predicate(clause, subject, register, ending, link),
    ]


def _honours(subject: Node | None, register: Register) -> bool:
    """Whether the verb carries -시-: for the people honoured, and for whoever is asked politely."""
    if subject is None:
        return False
    return honoured(subject) or (subject.get("noun") == "you" and register != "plain")


def _subject(clause: Node, node: Node | None, register: Register, ending: Ending) -> list[Word]:
    if node is None or (node.get("noun") == "you" and register != "plain"):
        return []  # it rains says its subject with the verb; whom one asks politely is not named
    if clause["predicate"] == "exist":
        return [*_where(clause, register), *_phrase(node, register, "이/가")]
    topical = ending in _TOPICAL and _definite(node) and not _thetic(clause)
    if honoured(node):
        return _phrase(node, register, "께서는" if topical else "께서")
    return _phrase(node, register, "은/는" if topical else "이/가")


def _thetic(clause: Node) -> bool:
    verb = VERBS.get(clause["predicate"])
    return verb is not None and "thetic" in verb.marks


def _definite(node: Node) -> bool:
    """What is known can be a topic: everything but `a cat` and `two cats`."""
    if "and" in node:
        return _definite(node["and"][-1])
    return node.get("det") != "a" and not isinstance(node.get("number"), int)


def _time(clause: Node) -> list[Word]:
    if "time" not in clause:
        return []
    return [Word(part, ((id(clause), "time"),)) for part in TIMES[clause["time"]][0].split(" ")]


def _complements(clause: Node, register: Register, gap: str) -> list[Word]:
    """Everything between the subject and the adverbs, each with its particle."""
    words: list[Word] = []
    if "companion" in clause:
        words += _phrase(clause["companion"], register, "과/와")
    if "tool" in clause:
        words += _phrase(clause["tool"], register, "으로/로")
    if "place" in clause:
        words += _phrase(clause["place"], register, "에서")
    if "where" in clause and clause["predicate"] != "exist":
        words += _where(clause, register)
    if "to" in clause:
        words += _phrase(clause["to"], register, "께" if honoured(clause["to"]) else "에게")
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
    return [*_phrase(where["of"], register, ""), Word(RELATIONS[where["relation"]], ((id(where), "relation"),))]


def _habit(clause: Node) -> list[Word]:
    """항상, 가끔, 보통 speak of the whole clause and come early; 자주 stays with the verb."""
    frequency = clause.get("frequency", "often")
    return [] if frequency == "often" else [Word(FREQUENCIES[frequency], ((id(clause), "frequency"),))]


def _adverbs(clause: Node) -> list[Word]:
    node = id(clause)
    words: list[Word] = []
    if clause.get("frequency") == "often":
        words.append(Word(FREQUENCIES["often"], ((node, "frequency"),)))
    if "manner" in clause:
        words.append(Word(MANNERS[clause["manner"]][1], ((node, "manner"),)))
    if "degree" in clause:
        words.append(Word(DEGREES[clause["degree"]], ((node, "degree"),)))
    return words


def _predicate(clause: Node, subject: Node | None, register: Register, ending: Ending, link: Key | None) -> list[Word]:
    """The verb and its helpers; the last eojeol carries the tense, and the joining of clauses where no word does."""
    honour = clause["predicate"] != "exist" and _honours(subject, register)
    built = predicate(clause, subject, honour)
    tense = "present" if ending in _TENSELESS else clause["tense"]
    finished = finish(built.stem, tense, ending, register)
    node = id(clause)
    words: list[Word] = []
    if "complement" in clause and "not" in clause:
        words += _phrase(clause["complement"], register, "이/가")
    words += [Word(text, tuple((node, role) for role in roles)) for text, *roles in built.before]
    for text, role in finished:
        if role == "verb":
            words.append(Word(text, tuple((node, each) for each in built.roles)))
        elif role == "tense":
            words.append(Word(text, ((node, "tense"),)))
        else:
            words.append(Word(text, (link,) if link else ()))
    last = len(words) - 1
    bearer = last - 1 if finished[-1][1] == "link" else last
    words[bearer] = words[bearer]._replace(sure=(*words[bearer].sure, (node, "tense")))
    if link and bearer == last:
        words[last] = words[last]._replace(sure=(*words[last].sure, link))
    if "complement" in clause and "not" not in clause:
        words[0] = words[0]._replace(sure=(*words[0].sure, (id(clause["complement"]), "noun")))
    return words


# ------------------------------------------------------------------------------------------------ noun phrases


def _phrase(node: Node, register: Register, pair: str) -> list[Word]:
    """A noun phrase with its particle on the last eojeol."""
    if "and" in node:
        first, second = node["and"]
        return [*_phrase(first, register, "과/와"), *_phrase(second, register, pair)]
    key: Key = (id(node), "noun")
    name = node["noun"]
    if (pronoun := _pronoun(name, register)) is not None:
        if pair == "이/가":
            pronoun = _BEFORE_GA.get(pronoun, pronoun)
        return [Word(particle(pronoun, pair), (key,))]
    if "title" in node:
        surname = Word(SURNAMES[name], ((id(node), "surname"),))
        return [surname, Word(particle(TITLES[node["title"]][0], pair), (key,))]
    return _common(node, register, pair, key)


def _common(node: Node, register: Register, pair: str, key: Key) -> list[Word]:
    noun, number = NOUNS[node["noun"]], node.get("number")
    words = _before_noun(node, register)
    if isinstance(number, int):
        counted = Word(particle(noun.counter, pair), (), (key, (id(node), "number")))
        return [*words, Word(noun.korean, (key,)), Word(NUMERALS[number][1], ((id(node), "number"),)), counted]
    # Only people and animals are marked as many; a plural thing is left to the context.
    several = number == "many" and ("det" in node or "owner" in node) and not noun.tags.isdisjoint(_COUNTED_AS_MANY)
    return [*words, Word(particle(noun.korean + ("들" if several else ""), pair), (key,))]


def _pronoun(name: str, register: Register) -> str | None:
    match name:
        case "I":
            return _ONE_SELF[register]
        case "we":
            return _US[register]
        case "you":
            return "너"
    return _THIRD.get(name)


def _before_noun(node: Node, register: Register) -> list[Word]:
    """Relative clause, owner, demonstrative, adjective: all before the noun."""
    words: list[Word] = []
    if "clause" in node:
        words += _relative(node, register)
    if "owner" in node:
        words += _phrase(node["owner"], register, "의")
    determiner = node.get("det")
    if determiner in _DEMONSTRATIVES:
        words.append(Word(_DEMONSTRATIVES[determiner], ((id(node), "det"),)))
    elif determiner in ("my", "our"):
        ours = determiner == "our" or "elder" in NOUNS[node["noun"]].tags  # Koreans share their mothers
        words.append(Word((_US if ours else _MY)[register], ((id(node), "det"),)))
    if "adjective" in node:
        adjective = ADJECTIVES[node["adjective"]]
        form = adjective.before or finish(adjective.stem, "present", "adnominal", register)[0][0]
        words.append(Word(form, ((id(node), "adjective"),)))
    return words


def _relative(node: Node, register: Register) -> list[Word]:
    clause = node["clause"]
    if clause["gap"] == "subject":
        return _clause(clause, node, register, "adnominal", opening=[])
    return _clause(clause, clause["subject"], register, "adnominal", gap=clause["gap"])
