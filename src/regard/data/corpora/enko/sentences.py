"""Drawing whole sentences: one clause, a question, a clause in a clause, or two clauses joined.

Training sentences have at most one embedded clause and `MAX_WORDS` words; those of the split `longer` have more.
"""

from __future__ import annotations

from ...hashing import Draws
from . import lexicon
from .clauses import Clauses
from .english import agreement
from .grammar import REGISTERS, Node
from .korean import is_honoured
from .lexicon import MOODS, NAMES, NOUNS, VERBS, Verb, predicates_of

MAX_WORDS = 13  # maximum number of English words of a training sentence, including its tag

_REPORTS = ("think that", "believe that", "know that", "hope that", "say that", "hear that")
_JOINS = ("because", "because", "so", "but", "and", "when", "if")
_MOOD_KEYS = frozenset(mood.key for mood in MOODS)


def nouns_repeat(structure: object) -> bool:
    """Whether a noun occurs twice in a sentence, where a speaker would use a pronoun."""
    nouns: set[str] = set()
    stack = [structure]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if (noun := node.get("noun")) in nouns:
                return True
            if noun is not None:
                nouns.add(noun)
            stack += [part for part in node.values() if not isinstance(part, str)]
        elif isinstance(node, list):
            stack += node
    return False


def draw_sentence(draws: Draws, split: str) -> tuple[Node, bool]:
    """A structure, and whether it contains the held-out combination that its split requires.

    Those of `longer` have at least two embedded clauses, with words and combinations of the training split.
    """
    if split == "longer":
        return Sentences(draws, "train").longer_sentence(), True
    sentences = Sentences(draws, split)
    return sentences.sentence(), sentences.complete


def _is_deed(clause: Node) -> bool:
    """Whether the clause is an action or event, not a state."""
    return clause["predicate"] in VERBS and "state" not in VERBS[clause["predicate"]].marks


def _remove(node: Node, *parts: str) -> None:
    for part in parts:
        node.pop(part, None)


class Sentences(Clauses):
    """Draws sentences, and the clauses that occur only in sentences of several clauses."""

    def reason(self, tense: str) -> Node:
        """A reason for what people do: the weather, the beginning or end of something, a mood."""
        roll = self.draws.below(100)
        if 20 <= roll < 55:
            return {"predicate": self.draws.choice(lexicon.FRAMES["weather"]).key, "tense": tense}
        if roll < 20:
            mood = self.draws.choice(MOODS)
            predicate, subject = mood.key, self.subject_of(mood, definite=True, pronouns=False, plain=True)
        elif roll < 70:
            predicate, subject = self.draws.choice(lexicon.WEATHER_ADJECTIVES).key, {"noun": "weather", "det": "the"}
        else:
            predicate = self.draws.choice(lexicon.NEWS_VERBS).key
            subject = self.common(self.noun_for(predicate), definite=True, plain=True)
        return {"subject": subject, "predicate": predicate, "tense": tense}

    def mood_and_answer(self, earlier: str, later: str, subject: Node) -> tuple[Node, Node]:
        """A mood and what the same person does about it: I am tired, I sleep."""
        mood, honour = self.draws.choice(MOODS), is_honoured(subject)
        while honour and not mood.takes_titles:
            mood = self.draws.choice(MOODS)
        answer = VERBS[self.draws.choice(lexicon.MOOD_RESPONSES[mood.key])]
        while honour and answer.takes_people and not answer.takes_titles:
            answer = VERBS[self.draws.choice(lexicon.MOOD_RESPONSES[mood.key])]
        state = {"subject": subject, "predicate": mood.key, "tense": earlier}
        return state, self.deed(later, subject, verb=answer)

    def deed(self, tense: str, subject: Node | None = None, *, verb: Verb | None = None, pronouns: bool = True) -> Node:
        """A short clause about something that people do."""
        verb = verb or self.draws.choice(lexicon.EVERYDAY_VERBS)
        if verb.frame == "intransitive" and subject is not None and is_honoured(subject) and not verb.takes_titles:
            verb = VERBS["rest"]
        titles = verb.frame != "intransitive" or verb.takes_titles
        who = subject or self.person(pronouns=pronouns, titles=titles, plain=True)
        clause = self.activity(verb, embedded=True, subject=who)
        _remove(clause, "aspect", "not", "time", "frequency")
        return {**clause, "tense": tense}

    def relative(self, node: Node) -> bool:
        """Add a relative clause to a noun phrase if there is a suitable one; returns whether there was."""
        noun = NOUNS[node["noun"]]
        clause: Node | None = None
        if "person" in noun.tags and self.draws.chance(0.6):
            clause = self._relative_subject(node)
        elif predicates_of(noun.english, "transitive", "train"):
            clause = self._relative_object(noun.english)
        if clause is None:
            return False
        clause["tense"] = self.draws.choice(("past", "past", "past", "past", "present", "present", "present", "future"))
        lasts = VERBS[clause["predicate"]].marks.isdisjoint(("state", "quick"))
        if lasts and clause["tense"] == "present" and self.draws.chance(0.5):
            clause["aspect"] = "progressive"
        if self._is_tense_ambiguous(clause, agreement(node if clause["gap"] == "subject" else clause["subject"])):
            clause["tense"] = "past"
        plain = "aspect" not in clause and clause["tense"] != "future"
        if plain and not VERBS[clause["predicate"]].marks & {"state", "asserted"} and self.draws.chance(0.12):
            clause["not"] = "long"
        node["clause"] = clause
        return True

    def _relative_subject(self, node: Node) -> Node | None:
        verb = self.draws.choice(lexicon.ACTIVITIES)
        if verb.frame == "intransitive":
            known = predicates_of(node["noun"], "intransitive", "train")
            return {"gap": "subject", "predicate": self.draws.choice(known)} if known else None
        target = self._object(verb, embedded=True) or self.other(node)
        if self._is_same(node, target) or verb.frame == "ditransitive":
            return None
        return {"gap": "subject", "predicate": verb.key, "object": target}

    def _relative_object(self, noun: str) -> Node | None:
        held_out = () if self.complete else predicates_of(noun, "transitive", self.split)
        if held_out:
            self.complete = True
        verb = VERBS[self.draws.choice(held_out or predicates_of(noun, "transitive", "train"))]
        if verb.key in lexicon.MAIN_CLAUSE_VERBS or verb.key == "become":
            return None
        subject = self._doer(verb, {"noun": noun}, definite=True, embedded=True)
        return {"gap": "object", "predicate": verb.key, "subject": subject}

    def sentence(self) -> Node:
        """A sentence of any kind but those of `longer`."""
        register = self.draws.choice(REGISTERS)
        roll = self.draws.below(100)
        if roll >= 80:
            return self.joined_clauses(register)
        if 46 <= roll < 56:
            return self.question(register)
        draw_clause = self.any_clause if roll < 46 else self.with_relative if roll < 69 else self.report
        return {"register": register, "clause": draw_clause()}

    def question(self, register: str) -> Node:
        """A yes-or-no question, addressed to a person or about something."""
        clause = self.any_clause(embedded=True)
        while "subject" not in clause or "not" in clause or clause["predicate"] == "be":
            clause = self.any_clause(embedded=True)
        asks_you = clause["predicate"] in VERBS and VERBS[clause["predicate"]].frame != "intransitive"
        if asks_you and self.draws.chance(0.5) and not VERBS[clause["predicate"]].doers:
            clause["subject"] = {"noun": "you"}
        return {"register": register, "question": True, "clause": clause}

    def with_relative(self, *, both: bool = False) -> Node:
        """A clause with a relative clause in its subject or object, or in both."""
        while True:
            clause = self.any_clause(embedded=True)
            # Not with a recipient: `give the book that Minsu bought to the girl` is ambiguous.
            parts = ["subject", "object"] if "object" in clause and "to" not in clause else ["subject"]
            chosen = parts if both else [self.draws.choice(parts)]
            if all(self._add_relative(clause, part) for part in chosen):
                return clause

    def _add_relative(self, clause: Node, part: str) -> bool:
        """Add a relative clause to one part of a clause if possible; returns whether it was."""
        node = clause.get(part)
        if node is None or "and" in node or "title" in node or clause["predicate"] == "become":
            return False
        noun = NOUNS.get(node["noun"])  # None: a pronoun
        if noun is None or noun.tags & {"name", "bare", "kin", "unique"} or isinstance(node.get("number"), int):
            return False
        _remove(node, "owner", "adjective")
        node["det"] = "the"
        if part == "object":  # anything after the object would seem to belong to the relative clause
            _remove(clause, "time", "manner")
        return self.relative(node) and node["clause"]["predicate"] != clause["predicate"]

    def report(self) -> Node:
        """A report: Minsu thinks, knows, says … that …"""
        verb = self.draws.choice(_REPORTS)
        subject = {"noun": "I"} if self.draws.chance(0.35) else self.person(plain=True)
        tense = "past" if verb in ("say that", "hear that") else "present"
        content = self._content(verb)
        while "subject" in content and self._is_same(content["subject"], subject):
            content = self._content(verb)
        clause: Node = {"subject": subject, "predicate": verb, "tense": tense, "content": content}
        if verb in ("think that", "know that", "believe that") and self.draws.chance(0.15):
            clause["not"] = "short" if verb == "know that" and self.draws.chance(0.5) else "long"
        return clause

    def _content(self, verb: str) -> Node:
        """The content of a report; after `hope` it is an event in the future."""
        content = self.any_clause(embedded=True)
        if verb != "hope that":
            return content
        while not _is_deed(content):
            content = self.any_clause(embedded=True)
        _remove(content, "aspect", "time", "frequency")
        return {**content, "tense": "future"}

    def joined_clauses(self, register: str, *, may_share: bool = True) -> Node:
        """Two clauses, possibly with a shared subject: a reason and its consequence, or two coordinate actions."""
        join = self.draws.choice(_JOINS)
        sentence: Node = {"register": register, "join": join}
        if join in ("but", "and"):
            return self._coordinate(sentence, may_share)
        shared = may_share and self.draws.chance(0.45)
        tense = self.draws.choice(("past", "present")) if shared or join == "when" else "past"
        earlier, later = ("present", "future") if join == "if" else (tense, tense)
        if shared:
            reason, deed = self.mood_and_answer(earlier, later, self._repeatable_subject(join))
            (reason if join == "because" else deed).pop("subject")
            return {**sentence, "shared": True, "first": reason, "clause": deed}
        reason = self.reason(earlier)
        verb = self.draws.choice(lexicon.VERBS_FOR_OTHERS) if reason["predicate"] in _MOOD_KEYS else None
        return {**sentence, "first": reason, "clause": self._deed_of_another(later, reason, verb)}

    def _coordinate(self, sentence: Node, may_share: bool) -> Node:
        """Two actions joined by `and`, or contrasted by `but`: the second is negated, or done in spite of a mood."""
        if sentence["join"] == "and":
            tense = self.draws.choice(("past", "past", "present", "future"))
            verbs: list[Verb | None] = [None, None]
        else:
            tense = self.draws.choice(("past", "past", "present"))
            verbs = [self.draws.choice(lexicon.CONTRASTED)] * 2
        if may_share and self.draws.chance(0.5):
            subject = self._repeatable_subject(sentence["join"])
            sentence["shared"] = True
            if sentence["join"] == "but" and self.draws.chance(0.5):
                first: Node = {"subject": subject, "predicate": self.draws.choice(MOODS).key, "tense": tense}
                second = self.deed(tense, subject)
            else:
                first, second = (self.deed(tense, subject, verb=verb) for verb in verbs)
            del second["subject"]
        else:
            first = self.deed(tense, verb=verbs[0], pronouns=False)
            second = self._deed_of_another(tense, first, verbs[1])
        if first["predicate"] == second["predicate"]:
            second["not"] = "long"
        return {**sentence, "first": first, "clause": second}

    def _deed_of_another(self, tense: str, first: Node, verb: Verb | None = None) -> Node:
        """An action of a person other than the subject of the first clause."""
        while True:
            deed = self.deed(tense, verb=verb, pronouns=False)
            if "subject" not in first or not self._is_same(deed["subject"], first["subject"]):
                return deed

    def _repeatable_subject(self, join: str) -> Node:
        """A subject that English can repeat as a pronoun; with `when` and `if` only I or we."""
        roll = self.draws.below(10)
        if join in ("when", "if") or roll < 3:
            return {"noun": "we" if roll & 1 else "I"}
        if roll < 6:
            return {"noun": self.draws.choice(NAMES)}
        name = self.draws.choice(lexicon.GENDERED_PEOPLE)
        return {"noun": name, "det": "my" if "kin" in NOUNS[name].tags else "the"}

    def longer_sentence(self) -> Node:
        """A sentence with two or three embedded clauses."""
        register = self.draws.choice(REGISTERS)
        roll = self.draws.below(3)
        if roll == 0:  # think that … who … the thing that …
            return {"register": register, "clause": self._report_of_relatives(both=self.draws.chance(0.8))}
        sentence = self.joined_clauses(register, may_share=False)
        if roll == 2 and sentence["join"] == "but":  # …, but Minsu thinks that … the thing that …
            return {**sentence, "clause": self._report_of_relatives(both=False)}
        main = self.with_relative(both=self.draws.chance(0.7))  # when …, the girl who … the thing that …
        while not _is_deed(main):
            main = self.with_relative(both=self.draws.chance(0.7))
        main.pop("aspect", None)
        return {**sentence, "clause": {**main, "tense": sentence["clause"]["tense"]}}

    def _report_of_relatives(self, both: bool) -> Node:
        report = self.report()
        content = self.with_relative(both=both)
        if report["predicate"] == "hope that":
            while not _is_deed(content):
                content = self.with_relative(both=both)
            content.pop("aspect", None)
            content["tense"] = "future"
        return {**report, "content": content}
