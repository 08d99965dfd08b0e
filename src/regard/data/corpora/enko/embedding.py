"""Drawing the clauses that stand in or beside others: reasons, deeds and relative clauses."""

from __future__ import annotations

from .choices import ACTIVITIES, ANSWERS, EVERYDAY, FRAMES, MAIN_ONLY, MOODS, NEWS, SKIES
from .clauses import Clauses
from .combinations import predicates_for
from .lexicon import NOUNS, VERBS, Adjective, Verb
from .predicates import honoured
from .to_english import agreement
from .words import Node

__all__ = ["Embedding"]


class Embedding(Clauses):
    """Clauses for sentences of more than one."""

    # ---------------------------------------------------------------------------------- for joined sentences

    def reason(self, tense: str) -> Node:
        """A state of things that explains what people do: the weather, the beginning or end of something, a mood."""
        throw = self.draws.below(100)
        if throw < 20:
            mood = self.draws.choice(MOODS)
            return self.mood(mood, tense, self.subject_of(mood, definite=True, pronouns=False, plain=True))
        if throw < 55:
            return {"predicate": self.draws.choice(FRAMES["weather"]).key, "tense": tense}
        if throw < 70:
            sky = self.draws.choice(SKIES).key
            return {"subject": {"noun": "weather", "det": "the"}, "predicate": sky, "tense": tense}
        verb = self.draws.choice(NEWS)
        subject = self.common(self.partner(verb.key), definite=True, plain=True)
        return {"subject": subject, "predicate": verb.key, "tense": tense}

    def mood(self, mood: Adjective, tense: str, subject: Node) -> Node:
        """Somebody is tired, happy, lonely …"""
        return {"subject": subject, "predicate": mood.key, "tense": tense}

    def mood_and_answer(self, earlier: str, later: str, subject: Node) -> tuple[Node, Node]:
        """A mood, and what is done about it by the same person: I am tired, I sleep."""
        mood, honour = self.draws.choice(MOODS), honoured(subject)
        while honour and not mood.takes_titles:
            mood = self.draws.choice(MOODS)
        answer = VERBS[self.draws.choice(ANSWERS[mood.key])]
        while honour and answer.takes_people and not answer.takes_titles:
            answer = VERBS[self.draws.choice(ANSWERS[mood.key])]
        return self.mood(mood, earlier, subject), self.deed(later, subject, verb=answer)

    def deed(self, tense: str, subject: Node | None = None, *, verb: Verb | None = None, pronouns: bool = True) -> Node:
        """Something that people do, said briefly."""
        verb = verb or self.draws.choice(EVERYDAY)
        if verb.frame == "intransitive" and subject is not None and honoured(subject) and not verb.takes_titles:
            verb = VERBS["rest"]
        titles = verb.frame != "intransitive" or verb.takes_titles
        who = subject or self.person(pronouns=pronouns, titles=titles, plain=True)
        clause = self.activity(verb, embedded=True, subject=who)
        for part in ("aspect", "not", "time", "frequency"):
            clause.pop(part, None)
        return {**clause, "tense": tense}

    # ---------------------------------------------------------------------------------- relative clauses

    def relative(self, node: Node) -> bool:
        """Give a noun phrase a relative clause, if there is one for it; say whether there was."""
        noun = NOUNS[node["noun"]]
        clause: Node | None = None
        if "person" in noun.tags and self.draws.chance(0.6):
            clause = self._relative_subject(node)
        elif predicates_for(noun.english, "transitive", "train"):
            clause = self._relative_object(noun.english)
        if clause is None:
            return False
        clause["tense"] = self.draws.choice(("past", "past", "past", "past", "present", "present", "present", "future"))
        lasts = VERBS[clause["predicate"]].marks.isdisjoint(("state", "quick"))
        if lasts and clause["tense"] == "present" and self.draws.chance(0.5):
            clause["aspect"] = "progressive"
        if self._ambiguous(clause, agreement(node if clause["gap"] == "subject" else clause["subject"])):
            clause["tense"] = "past"
        plain = "aspect" not in clause and clause["tense"] != "future"
        if plain and not VERBS[clause["predicate"]].marks & {"state", "asserted"} and self.draws.chance(0.12):
            clause["not"] = "long"
        node["clause"] = clause
        return True

    def _relative_subject(self, node: Node) -> Node | None:
        verb = self.draws.choice(ACTIVITIES)
        if verb.frame == "intransitive":
            known = predicates_for(node["noun"], "intransitive", "train")
            return {"gap": "subject", "predicate": self.draws.choice(known)} if known else None
        target = self._object(verb, embedded=True) or self.other(node)
        if self._same(node, target) or verb.frame == "ditransitive":
            return None
        return {"gap": "subject", "predicate": verb.key, "object": target}

    def _relative_object(self, noun: str) -> Node | None:
        held = () if self.found else predicates_for(noun, "transitive", self.keep)
        if held:
            self.found = True
        verb = VERBS[self.draws.choice(held or predicates_for(noun, "transitive", "train"))]
        if verb.key in MAIN_ONLY or verb.key == "become":
            return None
        subject = self._doer(verb, {"noun": noun}, definite=True, embedded=True)
        return {"gap": "object", "predicate": verb.key, "subject": subject}
