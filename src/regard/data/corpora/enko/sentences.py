"""Drawing whole sentences: one clause, a question, a clause in a clause, or two clauses joined.

Training sentences embed at most once and have at most `MOST_WORDS` words; the split `longer` begins where they end.
"""

from __future__ import annotations

from ..corpus import Draws
from .adverbs import NAMES
from .choices import CONTRASTED, FOR_OTHERS, MOODS
from .combinations import Keep
from .embedding import Embedding
from .grammar import REGISTERS
from .lexicon import NOUNS, VERBS, Verb
from .words import Node

__all__ = ["MOST_WORDS", "Sentences", "draw_longer", "draw_sentence", "nouns_repeat"]

MOST_WORDS = 13
"""English words of a training sentence at most, its tag included."""

_REPORTS = ("think that", "believe that", "know that", "hope that", "say that", "hear that")
_JOINS = ("because", "because", "so", "but", "and", "when", "if")
_NAMES = tuple(NAMES)
_GENDERED = ("boy", "girl", "man", "woman", "mother", "father", "grandmother", "grandfather", "prince", "princess")
_MOOD_NAMES = frozenset(mood.key for mood in MOODS)


def nouns_repeat(structure: object) -> bool:
    """Whether one noun stands twice in a sentence, which would ask for a pronoun or an explanation."""
    seen: set[str] = set()
    stack = [structure]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            noun = node.get("noun")
            if noun is not None:
                if noun in seen:
                    return True
                seen.add(noun)
            stack.extend(value for value in node.values() if isinstance(value, dict | list))
    return False


def draw_sentence(draws: Draws, keep: Keep) -> tuple[Node, bool]:
    """A structure, and whether it contains the held-out combination its split asks for."""
    sentences = Sentences(draws, keep)
    return sentences.sentence(), sentences.found


def draw_longer(draws: Draws) -> Node:
    """A structure that embeds at least twice, of words and combinations met in training."""
    return Sentences(draws, "train").deep()


def _is_deed(clause: Node) -> bool:
    """Whether something is done or happens, rather than being so."""
    return clause["predicate"] in VERBS and "state" not in VERBS[clause["predicate"]].marks


class Sentences(Embedding):
    """Sentences of every kind."""

    def sentence(self) -> Node:
        """A sentence as training has them."""
        register = self.draws.choice(REGISTERS)
        throw = self.draws.below(100)
        if throw < 46:
            return {"register": register, "clause": self.any_clause()}
        if throw < 56:
            return self.question(register)
        if throw < 69:
            return {"register": register, "clause": self.with_relative()}
        if throw < 80:
            return {"register": register, "clause": self.report()}
        return self.joined(register)

    def question(self, register: str) -> Node:
        """A yes-or-no question, to somebody or about somebody."""
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
            # `give the book that Minsu bought to the girl` could be read as buying it to her.
            parts = ["subject", "object"] if "object" in clause and "to" not in clause else ["subject"]
            chosen = parts if both else [self.draws.choice(parts)]
            if all(self._describe(clause, part) for part in chosen):
                return clause

    def _describe(self, clause: Node, part: str) -> bool:
        """Put a relative clause into one part of a clause, if that part can have one; say whether it could."""
        node = clause.get(part)
        if node is None or "and" in node or "title" in node or clause["predicate"] == "become":
            return False
        if node["noun"] not in NOUNS:  # a pronoun
            return False
        if NOUNS[node["noun"]].tags & {"name", "bare", "kin", "unique"} or isinstance(node.get("number"), int):
            return False
        for extra in ("owner", "adjective"):
            node.pop(extra, None)
        node["det"] = "the"
        if part == "object":  # what followed would be read as part of the relative clause
            for after in ("time", "manner"):
                clause.pop(after, None)
        return self.relative(node) and node["clause"]["predicate"] != clause["predicate"]

    def report(self) -> Node:
        """Somebody thinks, knows, says … that something is so."""
        verb = self.draws.choice(_REPORTS)
        subject = {"noun": "I"} if self.draws.chance(0.35) else self.person(plain=True)
        tense = "past" if verb in ("say that", "hear that") else "present"
        content = self._content(verb)
        while self._same(content["subject"], subject) if "subject" in content else False:
            content = self._content(verb)
        clause: Node = {"subject": subject, "predicate": verb, "tense": tense, "content": content}
        if verb in ("think that", "know that", "believe that") and self.draws.chance(0.15):
            clause["not"] = "short" if verb == "know that" and self.draws.chance(0.5) else "long"
        return clause

    def _content(self, verb: str) -> Node:
        """What is thought or said; what is hoped for is to come."""
        content = self.any_clause(embedded=True)
        if verb != "hope that":
            return content
        while not _is_deed(content):
            content = self.any_clause(embedded=True)
        for part in ("aspect", "time", "frequency"):
            content.pop(part, None)
        return {**content, "tense": "future"}

    # ---------------------------------------------------------------------------------- two clauses

    def joined(self, register: str, *, may_share: bool = True) -> Node:
        """Two clauses: a reason and what follows from it, or two deeds side by side; perhaps with one subject."""
        join = self.draws.choice(_JOINS)
        sentence: Node = {"register": register, "join": join}
        if join in ("but", "and"):
            return self._side_by_side(sentence, may_share)
        shared = may_share and self.draws.chance(0.45)
        tense = self.draws.choice(("past", "present")) if shared or join == "when" else "past"
        earlier, later = ("present", "future") if join == "if" else (tense, tense)
        if shared:
            reason, deed = self.mood_and_answer(earlier, later, self._who_is_said_again(join))
            (reason if join == "because" else deed).pop("subject")
            return {**sentence, "shared": True, "first": reason, "clause": deed}
        reason = self.reason(earlier)
        verb = self.draws.choice(FOR_OTHERS) if reason["predicate"] in _MOOD_NAMES else None
        return {**sentence, "first": reason, "clause": self._deed_of_another(later, reason, verb)}

    def _side_by_side(self, sentence: Node, may_share: bool) -> Node:
        """Two deeds in a row, or against each other: the second is not done, or is done in spite of a mood."""
        if sentence["join"] == "and":
            tense = self.draws.choice(("past", "past", "present", "future"))
            verbs: list[Verb | None] = [None, None]
        else:
            tense = self.draws.choice(("past", "past", "present"))
            verbs = [self.draws.choice(CONTRASTED)] * 2
        if may_share and self.draws.chance(0.5):
            subject = self._who_is_said_again(sentence["join"])
            sentence["shared"] = True
            if sentence["join"] == "but" and self.draws.chance(0.5):
                first, second = self.mood(self.draws.choice(MOODS), tense, subject), self.deed(tense, subject)
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
        """A deed by somebody who is not the subject before, and cannot be taken for it."""
        while True:
            deed = self.deed(tense, verb=verb, pronouns=False)
            if "subject" not in first or not self._same(deed["subject"], first["subject"]):
                return deed

    def _who_is_said_again(self, join: str) -> Node:
        """A subject that English can repeat as a pronoun; beside `when` and `if` only speakers themselves."""
        throw = self.draws.below(10)
        if join in ("when", "if") or throw < 3:
            return {"noun": "we" if throw & 1 else "I"}
        if throw < 6:
            return {"noun": self.draws.choice(_NAMES)}
        name = self.draws.choice(_GENDERED)
        return {"noun": name, "det": "my" if "kin" in NOUNS[name].tags else "the"}

    # ---------------------------------------------------------------------------------- longer

    def deep(self) -> Node:
        """Two or three embeddings in one sentence."""
        register = self.draws.choice(REGISTERS)
        throw = self.draws.below(3)
        if throw == 0:  # think that … who … the thing that …
            return {"register": register, "clause": self._report_of_relatives(both=self.draws.chance(0.8))}
        sentence = self.joined(register, may_share=False)
        if throw == 1 or sentence["join"] != "but":  # when …, somebody who … the thing that …
            main = self.with_relative(both=self.draws.chance(0.7))
            while not _is_deed(main):
                main = self.with_relative(both=self.draws.chance(0.7))
            main.pop("aspect", None)
            sentence["clause"] = {**main, "tense": sentence["clause"]["tense"]}
        else:  # …, but somebody thinks that … the thing that …
            sentence["clause"] = self._report_of_relatives(both=False)
        return sentence

    def _report_of_relatives(self, both: bool) -> Node:
        report = self.report()
        content = self.with_relative(both=both)
        if report["predicate"] == "hope that":
            while not _is_deed(content):
                content = self.with_relative(both=both)
            content.pop("aspect", None)
            content["tense"] = "future"
        return {**report, "content": content}
