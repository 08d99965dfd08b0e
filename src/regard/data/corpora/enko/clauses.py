"""Drawing clauses: a predicate first, then the nouns it may have, then tense, negation and what surrounds it."""

from __future__ import annotations

from . import choices
from .lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Verb
from .phrases import Phrases
from .predicates import short_negation_allowed
from .to_english import agreement
from .words import Node

__all__ = ["Clauses"]


class Clauses(Phrases):
    """Clauses for one sentence. `embedded` ones stay short, and no pronoun of the third person is their subject."""

    # ---------------------------------------------------------------------------------- by kind

    def any_clause(self, *, embedded: bool = False) -> Node:
        """A clause of any kind."""
        throw = self.draws.below(100)
        if throw < 38:
            return self.activity(self.draws.choice(choices.FRAMES["transitive"]), embedded=embedded)
        if throw < 52:
            return self.activity(self.draws.choice(choices.FRAMES["intransitive"]), embedded=embedded)
        if throw < 61:
            return self.activity(self.draws.choice(choices.FRAMES["motion"]), embedded=embedded)
        if throw < 69:
            return self.activity(self.draws.choice(choices.FRAMES["ditransitive"]), embedded=embedded)
        if throw < 88:
            return self.description(self.draws.choice(choices.PREDICATIVE), embedded=embedded)
        if throw < 91:
            return self.identity(embedded=embedded)
        if throw < 95:
            return self.location(embedded=embedded)
        if throw < 97 or embedded:
            return self.weather()
        return self.existence()

    def activity(self, verb: Verb, *, embedded: bool = False, subject: Node | None = None) -> Node:
        """A verb with everything it asks for, done by somebody who does such things."""
        if embedded and verb.key in choices.MAIN_ONLY:
            verb = VERBS["like"]
        definite = embedded or "state" in verb.marks
        clause: Node = {"predicate": verb.key}
        if verb.frame == "intransitive":
            clause["subject"] = subject or self.subject_of(
                verb, definite=definite, pronouns=not embedded, plain=embedded
            )
        else:
            target = self._object(verb, embedded)
            clause["subject"] = subject or self._doer(verb, target, definite, embedded)
            clause["object"] = target if target is not None else self.other(clause["subject"])
            if verb.frame == "ditransitive":
                clause["to"] = self.other(clause["subject"])
        self._when(clause, verb)
        if not embedded:
            self._around(clause, verb)
        elif "state" not in verb.marks:
            if "not" not in clause and clause.get("aspect") not in ("must", "want") and self.draws.chance(0.15):
                self._adverb(clause, verb)
            self._time(clause, 0.1)
            clause.pop("front", None)
        return clause

    def _object(self, verb: Verb, embedded: bool) -> Node | None:
        """The object; None stands for a name or pronoun that has to wait for the subject."""
        if verb.takes_people and verb.key != "bite" and self.draws.chance(0.3):
            return None
        name = self.partner(verb.key)
        if verb.key == "become":
            return {"noun": name, "det": "a"}
        if verb.frame == "motion":
            return self.common(name, definite=True, plain=True)
        node = self.common(name, plain=embedded)
        if verb.key == "have" and node.get("det", "a") != "a":
            return {"noun": name, "det": "a"} if not NOUNS[name].tags & {"mass", "plural"} else {"noun": name}
        if verb.frame == "transitive" and not embedded and self.draws.chance(0.05) and not verb.takes_people:
            second = self.draws.choice(verb.partners)
            if second != name:
                return {
                    "and": [
                        self.common(name, definite=True, plain=True),
                        self.common(second, definite=True, plain=True),
                    ]
                }
        return node

    def _doer(self, verb: Verb, target: Node | None, definite: bool, embedded: bool) -> Node:
        name = target.get("noun") if target else None
        if verb.doers and (not verb.feeds or (name in verb.feeds and self.draws.chance(0.4))):
            doers = [doer for doer in verb.doers if doer != name and (not verb.feeds or "animal" in NOUNS[doer].tags)]
            return self.common(self.draws.choice(doers), definite=definite, plain=embedded)
        singular = verb.key == "become"
        subject = self.person(definite=definite or singular, pronouns=not embedded, plain=embedded or singular)
        while self._same(subject, target) or (singular and agreement(subject) == "they"):
            subject = self.person(definite=True, pronouns=not embedded, plain=embedded or singular)
        return subject

    @staticmethod
    def _same(subject: Node, target: Node | None) -> bool:
        """Nobody does it to himself here: that would need a reflexive."""
        if target is None:
            return False
        return target.get("noun") in [part["noun"] for part in subject.get("and", (subject,))]

    def description(self, adjective: Adjective, *, embedded: bool = False, subject: Node | None = None) -> Node:
        """An adjective said of something: the soup is hot, Minsu is busier than Yuna."""
        subject = subject or self.subject_of(adjective, definite=True, pronouns=not embedded, plain=True)
        subject.pop("adjective", None)
        clause: Node = {"subject": subject, "predicate": adjective.key}
        clause["tense"] = (
            self.draws.choice(("past", "present")) if "lasting" in adjective.marks else self._tense("present")
        )
        if not embedded and adjective.key in choices.COMPARED and "noun" in subject and self.draws.chance(0.2):
            other = self.subject_of(adjective, definite=True, pronouns=False, plain=True)
            if other["noun"] != subject["noun"] and clause["tense"] != "future":
                return {**clause, "than": other}
        if not self._negate(clause, adjective.key, 0.2) and not embedded and self.draws.chance(0.3):
            degree = self.draws.choice(choices.ALL_DEGREES)
            if degree in ("very", "really") or adjective.key in choices.SLIGHT:
                clause["degree"] = degree
        if "mood" in adjective.marks:
            self._time(clause, 0.25)
        return clause

    def identity(self, *, embedded: bool = False) -> Node:
        """Somebody is something: Minsu is a doctor."""
        subject = self.person(pronouns=not embedded, plain=True)
        while agreement(subject) == "they" or "job" in _tags(subject):
            subject = self.person(pronouns=not embedded, plain=True)
        tense = self.draws.choice(("past", "present", "present"))
        clause: Node = {"subject": subject, "predicate": "be", "tense": tense}
        clause["complement"] = {"noun": self.draws.choice(choices.JOBS), "det": "a"}
        if self.draws.chance(0.3):
            clause["not"] = "long" if agreement(subject) == "I" or self.draws.chance(0.5) else "short"
        return clause

    def location(self, *, embedded: bool = False) -> Node:
        """Somebody or something is somewhere."""
        throw = self.draws.below(10)
        if throw < 6:
            subject = self.person(pronouns=not embedded, plain=True)
            where: Node = {"of": self._spot(choices.SPOTS)}
        else:
            subject = self.common(
                self.draws.choice(choices.SMALL if throw < 8 else choices.LITTLE_ANIMALS), definite=True, plain=True
            )
            where = self._beside()
        clause: Node = {"subject": subject, "predicate": "be at", "where": where}
        clause["tense"] = self.draws.choice(("past", "present", "present"))
        if self.draws.chance(0.25):
            clause["not"] = "long" if agreement(subject) == "I" or self.draws.chance(0.5) else "short"
        return clause

    def existence(self) -> Node:
        """There is a cat under the table; there are two students in the classroom."""
        kinds = (
            (choices.SMALL, ()),
            (choices.SMALL, choices.WHERE_THINGS_ARE),
            (choices.LITTLE_ANIMALS, ()),
            (choices.ANIMALS, choices.WHERE_ANIMALS_ARE),
            (choices.GROUPS, choices.SPOTS),
        )
        names, spots = self.draws.choice(kinds)
        name = self.draws.choice(names)
        subject: Node = {"noun": name} if "plural" in NOUNS[name].tags else {"noun": name, "det": "a"}
        if NOUNS[name].counter and "det" in subject and self.draws.chance(0.6):
            subject = {"noun": name, "number": self.draws.choice((2, 3, 4, 5, 10))}
        clause: Node = {
            "subject": subject,
            "predicate": "exist",
            "tense": self.draws.choice(("past", "present", "present")),
        }
        clause["where"] = {"of": self._spot(spots)} if spots else self._beside()
        return clause

    def _spot(self, spots: tuple[str, ...]) -> Node:
        return self.common(self.draws.choice(spots), definite=True, plain=True)

    def _beside(self) -> Node:
        """Where something small is: on, under, behind, next to, in front of or inside something larger."""
        relation = self.draws.choice(choices.ALL_RELATIONS)
        things = (
            choices.ROOMY if relation == "inside" else choices.TOPS if relation in ("on", "under") else choices.SURFACES
        )
        return {"relation": relation, "of": self.common(self.draws.choice(things), definite=True, plain=True)}

    def weather(self) -> Node:
        """It rains, it will snow; the weather is warm."""
        if self.draws.chance(0.6):
            clause: Node = {"predicate": self.draws.choice(choices.FRAMES["weather"]).key, "tense": self._tense("past")}
            if clause["tense"] == "present" and self.draws.chance(0.6):
                clause["aspect"] = "progressive"
            elif not self._negate(clause, clause["predicate"], 0.2):
                self._time(clause, 0.4)
            return clause
        sky = self.draws.choice(choices.SKIES)
        return {"subject": {"noun": "weather", "det": "the"}, "predicate": sky.key, "tense": self._tense("past")}

    # ---------------------------------------------------------------------------------- tense and surroundings

    def _tense(self, likely: str) -> str:
        return self.draws.choice(("past", "present", "future", likely))

    def _when(self, clause: Node, verb: Verb) -> None:
        """Tense, aspect and negation of an activity or a state."""
        clause["tense"] = self._tense("past")
        throw = self.draws.below(100)
        human = "person" in _tags(clause["subject"])
        if "state" in verb.marks:
            pass
        elif throw < 12 and "quick" not in verb.marks and clause["tense"] != "future":
            clause["aspect"] = "progressive"
        elif throw < 27 and human and not verb.marks & {"thetic", "quick"} and clause["tense"] != "future":
            clause["aspect"] = ("can", "want", "must")[throw % 3]
        if self._ambiguous(clause, agreement(clause["subject"])):
            clause["tense"] = "past"
        asserted = "asserted" in verb.marks and clause.get("aspect") != "can"
        if clause.get("aspect") != "must" and not self._counted(clause) and not asserted:
            self._negate(clause, verb.key, 0.18)

    @staticmethod
    def _ambiguous(clause: Node, agrees: str) -> bool:
        """`I read` and `I cut` do not say whether it is over: they are taken as past."""
        verb = VERBS[clause["predicate"]]
        same = verb.past == verb.english and agrees != "he"
        return same and clause["tense"] == "present" and "aspect" not in clause

    @staticmethod
    def _counted(clause: Node) -> bool:
        return any(isinstance(clause.get(part, {}).get("number"), int) for part in ("subject", "object"))

    def _negate(self, clause: Node, predicate: str, probability: float) -> bool:
        if not self.draws.chance(probability) or clause.get("subject", {}).get("det") == "a":
            return False
        suppletive = predicate in VERBS and VERBS[predicate].negative is not None
        short = self.draws.chance(0.45) and (suppletive or short_negation_allowed(predicate))
        first_person = clause.get("subject", {}).get("noun") == "I" and clause["tense"] == "present"
        with_be = predicate in ADJECTIVES or clause.get("aspect") == "progressive"
        clause["not"] = "short" if short and not (first_person and with_be) else "long"
        return True

    def _around(self, clause: Node, verb: Verb) -> None:
        """Manner or frequency, then company, tool, place and time, few at once."""
        free = "not" not in clause and clause.get("aspect") not in ("must", "want")
        if free and self.draws.chance(0.35):
            self._adverb(clause, verb)
        throw = self.draws.below(100)
        if throw < 10 and "company" in verb.marks and "animal" not in _tags(clause["subject"]):
            if clause.get("manner") != "alone":
                clause["companion"] = self.other(clause["subject"])
        elif throw < 22 and verb.tools and "not" not in clause and "animal" not in _tags(clause["subject"]):
            clause["tool"] = {"noun": self.draws.choice(verb.tools), "det": "a"}
        elif (
            throw < 22
            and verb.key in ("go to", "come to", "return to", "arrive at", "visit")
            and "place" in _tags(clause["object"])
        ):
            far = "city" in _tags(clause["object"])
            clause["tool"] = {"noun": self.draws.choice(choices.FAR_RIDES if far else choices.NEAR_RIDES)}
        elif throw < 40 and verb.places:
            place = self.draws.choice(verb.places)
            clause["place"] = {"noun": place} if "bare" in NOUNS[place].tags else {"noun": place, "det": "the"}
        if "state" not in verb.marks and verb.key != "become":
            self._time(clause, 0.35)

    def _adverb(self, clause: Node, verb: Verb) -> None:
        if not verb.manners:
            return
        manner = self.draws.choice(verb.manners)
        if manner == "alone" and agreement(clause["subject"]) == "they":
            return
        if manner != "often":
            clause["manner"] = manner
        elif "aspect" not in clause and clause["tense"] != "future":
            clause["frequency"] = self.draws.choice(choices.ALL_FREQUENCIES)

    def _time(self, clause: Node, probability: float) -> None:
        if "frequency" in clause or not self.draws.chance(probability):
            return
        tense, aspect = clause["tense"], clause.get("aspect")
        if aspect in ("can", "want", "must"):
            return
        if tense == "present":
            tense = "now" if aspect == "progressive" else "present"
        elif aspect == "progressive":
            return
        if tense == "present" and "not" in clause:
            return
        time = self.draws.choice(choices.TIMES_OF[tense])
        verb = VERBS.get(clause["predicate"])
        if verb is not None and "thetic" in verb.marks and time not in choices.NEAR_TIMES:
            return
        clause["time"] = time
        if self.draws.chance(0.3):
            clause["front"] = True


def _tags(node: Node) -> frozenset[str]:
    """What a phrase speaks of; pronouns and titles speak of people."""
    noun = NOUNS.get(node.get("noun", ""))
    return noun.tags if noun is not None and "title" not in node else frozenset({"person"})
