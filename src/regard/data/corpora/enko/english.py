"""English: a structure as English words, with articles, agreement, tense, do-support, relative and joined clauses."""

from __future__ import annotations

from functools import cache

from .grammar import Node, Word
from .lexicon import ADJECTIVES, MANNERS, NOUNS, NUMERALS, TITLES, VERBS

_OBJECT_FORMS = {"I": "me", "we": "us", "he": "him", "she": "her", "they": "them", "you": "you"}
_AGREEMENT = {"I": "I", "we": "they", "they": "they", "you": "they", "he": "he", "she": "he"}
_BE = {"I": ("am", "was"), "he": ("is", "was"), "they": ("are", "were")}
_CONTRACTED = {
    "do": "don't", "does": "doesn't", "did": "didn't", "will": "won't", "is": "isn't", "are": "aren't", "was": "wasn't",
    "were": "weren't", "can": "can't", "could": "couldn't",
}  # fmt: skip
_BE_LIKE = ("be", "be at", "exist")
_HELPER_FORMS = {"want": ("wanted", "wants"), "have": ("had", "has")}  # past, third person
# Words that begin with a vowel in spelling but a consonant in speech, and vice versa.
_SPOKEN_CONSONANT = ("uni", "use", "euro", "one")
_SPOKEN_VOWEL = ("honest", "hour")


@cache
def article(word: str) -> str:
    """`a` or `an`, by the sound the next word begins with."""
    vowel = word[0] in "aeiou" and not word.startswith(_SPOKEN_CONSONANT)
    return "an" if vowel or word.startswith(_SPOKEN_VOWEL) else "a"


def english_words(sentence: Node) -> list[Word]:
    """The words of a sentence: register tag, capitalised first word, final punctuation mark."""
    main = sentence["clause"]
    joined = "join" in sentence
    words = _joined_clauses(sentence, main) if joined else _clause(main, question=bool(sentence.get("question")))
    text, sure, weak = words[0]
    words[0] = Word(text[0].upper() + text[1:], sure, weak)
    words[-1] = words[-1].append("?" if sentence.get("question") else ".")
    return [Word(f"[{sentence['register']}]"), *words]


def _joined_clauses(sentence: Node, main: Node) -> list[Word]:
    join, first, link = sentence["join"], sentence["first"], ((id(sentence), "link"),)
    # A shared subject is in the first clause of the English sentence; the other clause refers to it by a pronoun.
    subject = main.get("subject") if join == "because" else first.get("subject")
    shared = subject if sentence.get("shared") else None
    match join:
        case "because":
            return [*_clause(main), Word("because", link), *_clause(first, shared=shared)]
        case "when" | "if":
            return [Word(join, link), *_append_comma(_clause(first)), *_clause(main, shared=shared)]
        case "and" if shared:
            return [*_clause(first), Word("and", link), *_clause(main, shared=shared, silent=True)]
        case "so" | "but" | "and":
            return [*_append_comma(_clause(first)), Word(join, link), *_clause(main, shared=shared)]
    raise ValueError(f"join={join!r} is not one of because, so, but, and, when, if")


def _append_comma(words: list[Word]) -> list[Word]:
    return [*words[:-1], words[-1].append(",")]


def _clause(
    clause: Node, *, shared: Node | None = None, silent: bool = False, question: bool = False, gap: str = ""
) -> list[Word]:
    """One clause. `shared` is the subject of another clause that it shares, as a pronoun or left out (`silent`);
    `gap` is the part that a relative clause lacks."""
    subject, agrees = _subject(clause, shared, silent)
    first, rest = _verb_group(clause, agrees, question)
    time = _time(clause)
    if clause["predicate"] == "exist":
        there = Word("there", (), ((id(clause), "verb"),))
        core = [*first, there, *rest] if question else [there, *first, *rest]
        return [*core, *subject, *_where(clause), *time]
    core = [*first, *subject, *rest] if question else [*subject, *first, *rest]
    if time and clause.get("front"):
        return [*_append_comma(time), *core, *_tail(clause, gap)]
    return [*core, *_tail(clause, gap), *time]


def _subject(clause: Node, shared: Node | None, silent: bool) -> tuple[list[Word], str]:
    if shared is not None:
        return ([] if silent else [Word(pronoun_for(shared))]), agreement(shared)
    node = clause.get("subject")
    if node is None:
        return [Word("it")], "he"
    agrees = agreement(node)
    if clause["predicate"] == "exist":
        return noun_phrase(node, "object"), agrees
    if node.get("noun") == "you":  # Korean may drop it; the honorific verb then corresponds to it
        return [Word("you", ((id(node), "noun"),), ((id(clause), "tense"),))], agrees
    return noun_phrase(node, "subject"), agrees


def agreement(node: Node) -> str:
    """The verb form that agrees with a subject, named by a pronoun: I, he or they."""
    if "and" in node or node.get("number"):
        return "they"
    noun = node["noun"]
    if noun in _AGREEMENT:
        return _AGREEMENT[noun]
    return "they" if "title" not in node and "plural" in NOUNS[noun].tags else "he"


def pronoun_for(node: Node) -> str:
    """The pronoun that refers back to a subject: he, she, they, I, we."""
    if "and" in node:
        return "we" if any(part.get("noun") == "I" for part in node["and"]) else "they"
    noun = node["noun"]
    if noun in _AGREEMENT:
        return str(noun)
    if agreement(node) == "they":
        return "they"
    gender = TITLES[node["title"]][1] if "title" in node else NOUNS[noun].gender
    if not gender:
        raise ValueError(f"noun={noun!r} has no gender, so no pronoun can refer to it")
    return "he" if gender == "m" else "she"


@cache
def _verb_texts(
    predicate: str, tense: str, aspect: str, negation: str, agrees: str, question: bool
) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """The verb group as (text, sure roles, weak roles); in a question the first word precedes the subject."""
    verb = None if predicate in _BE_LIKE or predicate in ADJECTIVES else VERBS[predicate]
    base = "be" if verb is None else verb.english
    group: list[tuple[str, str, str]]
    if tense == "future":
        group = [("will", "tense", ""), (base, "verb", "")]
    elif aspect == "can":
        group = [("could" if tense == "past" else "can", "aux", ""), (base, "verb", "")]
    elif verb is None:
        form = _BE[agrees][tense == "past"]
        group = [(form, "verb", "") if predicate in _BE_LIKE else (form, "", "verb")]
    elif aspect == "progressive":
        group = [(_BE[agrees][tense == "past"], "aux", ""), (verb.gerund, "verb", "aux")]
    else:
        helper = {"want": "want", "must": "have"}.get(aspect, "")
        finite = helper or base
        if negation or question:
            do = "did" if tense == "past" else "does" if agrees == "he" else "do"
            group = [(do, "", "tense"), (finite, "aux" if helper else "verb", "")]
        else:
            past, third_person = _HELPER_FORMS.get(helper, (verb.past, verb.third_person))
            form = past if tense == "past" else third_person if agrees == "he" else finite
            group = [(form, "aux" if helper else "verb", "")]
        if helper:
            group += [("to", "", "aux"), (base, "verb", "")]
    first, sure, weak = group[0]
    if negation == "short" and first not in _CONTRACTED:
        raise ValueError(f"not='short': {first!r} has no contracted form; use not='long'")
    if negation == "short" or (negation and first == "can"):
        text = _CONTRACTED[first] if negation == "short" else "cannot"
        group[0] = (text, f"{sure} neg".strip(), weak)
    elif negation:
        group.insert(1, ("not", "neg", ""))
    return tuple((text, tuple(sure.split()), tuple(weak.split())) for text, sure, weak in group)


def _verb_group(clause: Node, agrees: str, question: bool = False) -> tuple[list[Word], list[Word]]:
    """(first word, rest); a question puts its subject between them."""
    predicate, aspect = clause["predicate"], clause.get("aspect", "")
    texts = _verb_texts(predicate, clause["tense"], aspect, clause.get("not", ""), agrees, question)
    node = id(clause)
    words: list[Word] = []
    for text, sure, weak in texts:
        sure_keys, weak_keys = tuple([(node, role) for role in sure]), tuple([(node, role) for role in weak])
        words += [Word(part, sure_keys, weak_keys) for part in text.split(" ")]
    if frequency := clause.get("frequency"):
        # Before the main verb, that is first unless an auxiliary or a form of `be` precedes it.
        place = 0 if len(texts) == 1 and predicate not in _BE_LIKE and predicate not in ADJECTIVES else 1
        words.insert(place, Word(frequency, ((node, "frequency"),)))
    return words[:1], words[1:]


def _tail(clause: Node, gap: str) -> list[Word]:
    """The words after the verb: adjective, object, recipient, manner, companion, tool, place, content."""
    predicate, node = clause["predicate"], id(clause)
    words: list[Word] = []
    if predicate in ADJECTIVES:
        words += [Word(part, ((node, "degree"),)) for part in clause.get("degree", "").split()]
        *more, form = ADJECTIVES[predicate].comparative.split(" ") if "than" in clause else [predicate]
        words += [Word(part, ((node, "more"),)) for part in more]
        compared = ((node, "more"),) if "than" in clause and not more else ()
        words.append(Word(form, ((node, "verb"), *compared)))
    for part, preposition in (("than", "than"), ("complement", ""), ("object", ""), ("to", "to")):
        if part in clause and part != gap:
            words += _prepositional_phrase(preposition, clause[part])
    if "manner" in clause:
        words.append(Word(MANNERS[clause["manner"]][0], ((node, "manner"),)))
    if "where" in clause:
        words += _where(clause)
    if "companion" in clause:
        words += _prepositional_phrase("with", clause["companion"])
    if "tool" in clause:
        by = "vehicle" in NOUNS[clause["tool"]["noun"]].tags
        words += _prepositional_phrase("by" if by else "with", clause["tool"])
    if "place" in clause:
        words += _prepositional_phrase(_preposition(clause["place"]), clause["place"])
    if "content" in clause:
        words += [Word("that", (), ((id(clause["content"]), "link"),)), *_clause(clause["content"])]
    return words


def _preposition(place: Node) -> str:
    tags = NOUNS[place["noun"]].tags
    return next(preposition for preposition in ("in", "at", "on", "by") if preposition in tags)


def _where(clause: Node) -> list[Word]:
    """`in the park`, `under the table`; only the second has an eojeol for its relation."""
    where = clause["where"]
    if "relation" not in where:
        return _prepositional_phrase(_preposition(where["of"]), where["of"])
    words = [Word(part, ((id(where), "relation"),)) for part in where["relation"].split()]
    return [*words, *noun_phrase(where["of"], "object")]


def _time(clause: Node) -> list[Word]:
    return [Word(part, ((id(clause), "time"),)) for part in clause.get("time", "").split()]


def _prepositional_phrase(preposition: str, node: Node) -> list[Word]:
    """A noun phrase after its preposition, which may be empty."""
    key = (id(node["and"][-1] if "and" in node else node), "noun")
    return [*([Word(preposition, (), (key,))] if preposition else []), *noun_phrase(node, "object")]


def noun_phrase(node: Node, case: str) -> list[Word]:
    """A noun phrase with its determiner, modifiers and relative clause."""
    if "and" in node:
        first, second = node["and"]
        link = Word("and", (), ((id(first), "noun"),))
        return [*noun_phrase(first, case), link, *noun_phrase(second, case)]
    name, key = node["noun"], (id(node), "noun")
    if name in _AGREEMENT:
        return [Word(name if case == "subject" else _OBJECT_FORMS[name], (key,))]
    if "title" in node:
        return [Word(node["title"], (key,)), Word(name, ((id(node), "surname"),))]
    noun, number = NOUNS[name], node.get("number")
    words = [Word(part, (key,)) for part in (noun.plural if number else name).split(" ")]
    if "adjective" in node:
        words.insert(0, Word(node["adjective"], ((id(node), "adjective"),)))
    if isinstance(number, int):
        words.insert(0, Word(NUMERALS[number][0], ((id(node), "number"),)))
    words[:0] = _determiner(node, words[0].text, bool(number) or "plural" in noun.tags)
    if "clause" not in node:
        return words
    clause, gap = node["clause"], node["clause"]["gap"]
    words.append(Word("who" if gap == "subject" and "person" in noun.tags else "that", (), ((id(clause), "verb"),)))
    if gap != "subject":
        return words + _clause(clause, gap=gap)
    # The head noun is the subject of the relative clause, so the verb agrees with it.
    first, rest = _verb_group(clause, agreement(node))
    return [*words, *first, *rest, *_tail(clause, gap), *_time(clause)]


def _determiner(node: Node, next_word: str, is_plural: bool) -> list[Word]:
    if "owner" in node:
        *before, owner = noun_phrase(node["owner"], "subject")
        return [*before, owner.append("'s")]
    determiner = node.get("det", "")
    if determiner in ("a", "the"):
        return [Word(article(next_word) if determiner == "a" else "the", (), ((id(node), "noun"),))]
    form = {"this": "these", "that": "those"}.get(determiner, determiner) if is_plural else determiner
    return [Word(form, ((id(node), "det"),))] if form else []
