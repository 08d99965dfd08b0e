"""Drawing clauses: first a predicate, then its nouns, then tense, negation and modifiers.

`Phrases` draws noun phrases with determiners, numerals and adjectives; `Clauses` draws the clauses around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...hashing import Draws
from . import lexicon
from .english import agreement
from .grammar import Node
from .korean import short_negation_allowed
from .lexicon import ADJECTIVES, NAMES, NOUNS, PEOPLE, VERBS, Adjective, Noun, Verb, nouns_of, predicates_of

_SURNAMES, _TITLES, _NUMERALS = tuple(lexicon.SURNAMES), tuple(lexicon.TITLES), tuple(lexicon.NUMERALS)
_DEGREES, _FREQUENCIES, _RELATIONS = tuple(lexicon.DEGREES), tuple(lexicon.FREQUENCIES), tuple(lexicon.RELATIONS)
# A clause is an activity of the first frame whose limit is above a random number below 100.
_ACTIVITY_LIMITS: dict[lexicon.Frame, int] = {"transitive": 38, "intransitive": 52, "motion": 61, "ditransitive": 69}
_PRONOUNS = ("I", "I", "I", "we", "he", "she", "they")
_OBJECT_PRONOUNS = ("I", "we", "he", "she", "they")  # nodes hold the subject form
_TRAVEL_VERBS = ("go to", "come to", "return to", "arrive at", "visit")
# math, the moon, my mother: an adjective before them would sound odd.
_UNDESCRIBED = frozenset({"bare", "unique", "kin"})
_UNCOUNTABLE = frozenset({"mass", "bare", "unique", "plural", "nocount"})
# my dog, my friend, our house; but not my tiger, my thief or my mountain, unless tagged as own.
_SELDOM_OWNED = frozenset({"person", "place", "event", "nature", "travels", "wild", "food", "pleasure"})
# Nouns of "there is" and their places; without places, they are next to something.
_EXISTING: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    *((lexicon.SMALL_THINGS, ()), (lexicon.SMALL_THINGS, lexicon.THING_PLACES), (lexicon.SMALL_ANIMALS, ())),
    *((lexicon.ANIMALS, lexicon.ANIMAL_PLACES), (lexicon.GROUPS, lexicon.PERSON_PLACES)),
)
_BEFORE_NOUNS = frozenset(key for key, adjective in ADJECTIVES.items() if "only-after" not in adjective.marks)


class Phrases:
    """Draws the noun phrases of one sentence, and keeps track of whether it has a held-out combination yet."""

    def __init__(self, draws: Draws, split: str) -> None:
        self.draws, self.split = draws, split
        self.complete = split == "train"  # whether the sentence has the held-out combination that its split requires

    def noun_for(self, predicate: str) -> str:
        return self._draw_held_out(nouns_of(predicate, self.split)) or self.draws.choice(nouns_of(predicate, "train"))

    def _draw_held_out(self, words: Sequence[str]) -> str | None:
        """With probability 0.6, one of the held-out words, if the sentence still lacks a held-out combination."""
        if self.complete or not self.draws.chance(0.6) or not words:
            return None
        self.complete = True
        return self.draws.choice(words)

    def adjective_for(self, noun: str) -> str | None:
        held_out = [key for key in predicates_of(noun, "adjective", self.split) if key in _BEFORE_NOUNS]
        if (adjective := self._draw_held_out(held_out)) is not None:
            return adjective
        known = predicates_of(noun, "adjective", "train")
        chosen = self.draws.choice(known) if known else None
        return chosen if chosen in _BEFORE_NOUNS else None

    def common(self, name: str, *, definite: bool = False, plain: bool = False) -> Node:
        """A noun with a random determiner; `definite` excludes `a` and numerals, `plain` makes the phrase short."""
        noun = NOUNS[name]
        node: Node = {"noun": name}
        if "kin" in noun.tags:  # relatives always have an owner: my, our, Minsu's
            roll = self.draws.below(10)
            if roll < 2 and "spouse" not in noun.tags:
                node["owner"] = {"noun": self.draws.choice(NAMES)}
            else:
                node["det"] = "our" if roll < 4 and not noun.tags & {"plural", "spouse"} else "my"
        elif not noun.tags & _UNCOUNTABLE:
            self._determine(node, noun, definite, plain)
        elif "bare" not in noun.tags:
            roll = self.draws.below(10)
            if "unique" in noun.tags or definite or roll < 5 or "nocount" in noun.tags:
                node["det"] = "the" if roll < 8 or "unique" in noun.tags or "mass" in noun.tags else "this"
            elif roll < 7 and "worn" in noun.tags:
                node["det"] = "my"
        described = not noun.tags & _UNDESCRIBED and self.draws.chance(0.1 if plain else 0.3)
        if described and (adjective := self.adjective_for(name)) is not None:
            node["adjective"] = adjective
        return node

    def _determine(self, node: Node, noun: Noun, definite: bool, plain: bool) -> None:
        roll = self.draws.below(100)
        living = "person" in noun.tags or "animal" in noun.tags
        ownable = "own" in noun.tags or not noun.tags & _SELDOM_OWNED
        if roll < 38 or (plain and roll < 60):
            node["det"] = "the"
        elif roll < 58 and not definite:
            node["det"] = "a"
        elif roll < 68 and not definite and noun.counter:
            node["number"] = self.draws.choice(_NUMERALS)
        elif roll < 74:
            node["det"] = "this" if roll & 1 else "that"
        elif roll < 84 and living:
            node["det"] = ("the", "my", "our", "the")[roll & 3] if ownable else "the"
            node["number"] = "many"
        elif roll < 84 and not definite and "goods" in noun.tags:
            node["number"] = "many"
        elif roll < 92 and ownable:
            node["det"] = "our" if roll & 3 == 0 else "my"
        elif not plain and not living and "goods" in noun.tags:
            node["owner"] = self._owner()
        else:
            node["det"] = "the"

    def _owner(self) -> Node:
        if self.draws.below(3) == 0:
            return {"noun": self.draws.choice(NAMES)}
        drawn = self.draws.choice(PEOPLE)
        owner = "teacher" if "plural" in NOUNS[drawn].tags else drawn
        return {"noun": owner, "det": "my" if "kin" in NOUNS[owner].tags else "the"}

    def title(self) -> Node:
        """Mr. Kim, Professor Park."""
        return {"title": self.draws.choice(_TITLES), "noun": self.draws.choice(_SURNAMES)}

    def person(self, *, definite: bool = True, titles: bool = True, pronouns: bool = True, plain: bool = False) -> Node:
        roll = self.draws.below(100)
        if roll < 22 and pronouns:
            return {"noun": self.draws.choice(_PRONOUNS)}
        if roll < 38:
            return {"noun": self.draws.choice(NAMES)}
        if roll < 46 and titles:
            return self.title()
        if roll < 50 and not plain:  # the boy and the girl, Minsu and I
            if self.draws.chance(0.5):
                return {"and": [{"noun": self.draws.choice(NAMES)}, {"noun": "I"}]}
            pair = self.draws.shuffle(("boy", "girl", "child", "student", "man", "woman"))[:2]
            return {"and": [{"noun": noun, "det": "the"} for noun in pair]}
        name = self.draws.choice(PEOPLE)
        while not titles and "hon" in NOUNS[name].tags:
            name = self.draws.choice(PEOPLE)
        return self.common(name, definite=definite, plain=plain)

    def other(self, subject: Node | None) -> Node:
        """A person other than the subject, and not a pronoun that could refer to it."""
        roll = self.draws.below(100)
        subjects = {part.get("noun") for part in subject.get("and", (subject,))} if subject else set()
        if roll < 16:
            pronoun = self.draws.choice(_OBJECT_PRONOUNS)
            if not subjects & ({"I", "we"} if pronoun in ("I", "we") else {pronoun}):
                return {"noun": pronoun}
        if roll < 40:
            name = self.draws.choice(NAMES)
            if name not in subjects:
                return {"noun": name}
        if roll < 52:
            return self.title()
        name = self.draws.choice(PEOPLE)
        while name in subjects:
            name = self.draws.choice(PEOPLE)
        return self.common(name, definite=True, plain=True)

    def subject_of(self, word: Verb | Adjective, *, definite: bool, pronouns: bool = True, plain: bool = False) -> Node:
        """The subject of an intransitive verb or an adjective: one of its nouns, or a name, pronoun or title."""
        if word.takes_people and self.draws.chance(0.35):
            roll = self.draws.below(10)
            if roll < 5 and pronouns:
                return {"noun": self.draws.choice(_PRONOUNS)}
            if roll < 8 or not word.takes_titles:
                return {"noun": self.draws.choice(NAMES)}
            return self.title()
        name = self.noun_for(word.key)
        return self.common(name, definite=definite or bool(NOUNS[name].tags & _UNCOUNTABLE), plain=plain)


class Clauses(Phrases):
    """Draws the clauses of one sentence. `embedded` clauses are short and have no pronoun as subject."""

    def any_clause(self, *, embedded: bool = False) -> Node:
        roll = self.draws.below(100)
        for frame, limit in _ACTIVITY_LIMITS.items():
            if roll < limit:
                return self.activity(self.draws.choice(lexicon.FRAMES[frame]), embedded=embedded)
        if roll < 88:
            return self.description(self.draws.choice(lexicon.PREDICATIVE), embedded=embedded)
        if roll < 95:
            return self.identity(embedded=embedded) if roll < 91 else self.location(embedded=embedded)
        return self.weather() if roll < 97 or embedded else self.existence()

    def activity(self, verb: Verb, *, embedded: bool = False, subject: Node | None = None) -> Node:
        """A verb with its arguments and a suitable subject."""
        if embedded and verb.key in lexicon.MAIN_CLAUSE_VERBS:
            verb = VERBS["like"]
        definite = embedded or "state" in verb.marks
        clause: Node = {"predicate": verb.key}
        if verb.frame == "intransitive":
            pronouns = not embedded
            clause["subject"] = subject or self.subject_of(verb, definite=definite, pronouns=pronouns, plain=embedded)
        else:
            target = self._object(verb, embedded)
            clause["subject"] = subject or self._doer(verb, target, definite, embedded)
            clause["object"] = target if target is not None else self.other(clause["subject"])
            if verb.frame == "ditransitive":
                clause["to"] = self.other(clause["subject"])
        self._add_tense(clause, verb)
        if not embedded:
            self._add_modifiers(clause, verb)
        elif "state" not in verb.marks:
            if "not" not in clause and clause.get("aspect") not in ("must", "want") and self.draws.chance(0.15):
                self._add_adverb(clause, verb)
            self._add_time(clause, 0.1)
            clause.pop("front", None)
        return clause

    def _object(self, verb: Verb, embedded: bool) -> Node | None:
        """The object; None means a person, drawn after the subject."""
        if verb.takes_people and verb.key != "bite" and self.draws.chance(0.3):
            return None
        name = self.noun_for(verb.key)
        if verb.key == "become":
            return {"noun": name, "det": "a"}
        if verb.frame == "motion":
            return self.common(name, definite=True, plain=True)
        node = self.common(name, plain=embedded)
        if verb.key == "have" and node.get("det", "a") != "a":
            return {"noun": name, "det": "a"} if not NOUNS[name].tags & {"mass", "plural"} else {"noun": name}
        if verb.frame == "transitive" and not embedded and self.draws.chance(0.05) and not verb.takes_people:
            second = self.draws.choice(verb.nouns)
            if second != name:
                return {"and": [self.common(noun, definite=True, plain=True) for noun in (name, second)]}
        return node

    def _doer(self, verb: Verb, target: Node | None, definite: bool, embedded: bool) -> Node:
        name = target.get("noun") if target else None
        if verb.doers and (not verb.feeds or (name in verb.feeds and self.draws.chance(0.4))):
            doers = [doer for doer in verb.doers if doer != name and (not verb.feeds or "animal" in NOUNS[doer].tags)]
            return self.common(self.draws.choice(doers), definite=definite, plain=embedded)
        singular = verb.key == "become"
        subject = self.person(definite=definite or singular, pronouns=not embedded, plain=embedded or singular)
        while self._is_same(subject, target) or (singular and agreement(subject) == "they"):
            subject = self.person(definite=True, pronouns=not embedded, plain=embedded or singular)
        return subject

    @staticmethod
    def _is_same(subject: Node, target: Node | None) -> bool:
        """Whether the target is the subject itself, which would need a reflexive; this grammar has none."""
        nouns = [part["noun"] for part in subject.get("and", (subject,))]
        return target is not None and target.get("noun") in nouns

    def description(self, adjective: Adjective, *, embedded: bool = False) -> Node:
        """An adjective as predicate: the soup is hot, Minsu is busier than Yuna."""
        subject = self.subject_of(adjective, definite=True, pronouns=not embedded, plain=True)
        subject.pop("adjective", None)
        lasting = "lasting" in adjective.marks
        tense = self.draws.choice(("past", "present")) if lasting else self._tense("present")
        clause: Node = {"subject": subject, "predicate": adjective.key, "tense": tense}
        if not embedded and adjective.key in lexicon.COMPARABLE and "noun" in subject and self.draws.chance(0.2):
            other = self.subject_of(adjective, definite=True, pronouns=False, plain=True)
            if other["noun"] != subject["noun"] and tense != "future":
                return {**clause, "than": other}
        if not self._negate(clause, adjective.key, 0.2) and not embedded and self.draws.chance(0.3):
            degree = self.draws.choice(_DEGREES)
            if degree in ("very", "really") or adjective.key in lexicon.COMPLAINTS:
                clause["degree"] = degree
        if "mood" in adjective.marks:
            self._add_time(clause, 0.25)
        return clause

    def identity(self, *, embedded: bool = False) -> Node:
        """The occupation of a person: Minsu is a doctor."""
        subject: Node = {"noun": "they"}
        while agreement(subject) == "they" or "job" in _tags(subject):
            subject = self.person(pronouns=not embedded, plain=True)
        tense = self.draws.choice(("past", "present", "present"))
        job = {"noun": self.draws.choice(lexicon.JOBS), "det": "a"}
        return self._negate_be({"subject": subject, "predicate": "be", "tense": tense, "complement": job}, 0.3)

    def location(self, *, embedded: bool = False) -> Node:
        """The location of a person or thing: the cat is under the table."""
        roll = self.draws.below(10)
        if roll < 6:
            subject = self.person(pronouns=not embedded, plain=True)
            where: Node = {"of": self._definite_one_of(lexicon.PERSON_PLACES)}
        else:
            subject = self._definite_one_of(lexicon.SMALL_THINGS if roll < 8 else lexicon.SMALL_ANIMALS)
            where = self._beside()
        tense = self.draws.choice(("past", "present", "present"))
        return self._negate_be({"subject": subject, "predicate": "be at", "where": where, "tense": tense}, 0.25)

    def _negate_be(self, clause: Node, probability: float) -> Node:
        """Negate a form of `be` with some probability; `am` has no contracted negation."""
        if self.draws.chance(probability):
            clause["not"] = "long" if agreement(clause["subject"]) == "I" or self.draws.chance(0.5) else "short"
        return clause

    def existence(self) -> Node:
        """There is a cat under the table; there are two students in the classroom."""
        names, places = self.draws.choice(_EXISTING)
        name = self.draws.choice(names)
        subject: Node = {"noun": name} if "plural" in NOUNS[name].tags else {"noun": name, "det": "a"}
        if NOUNS[name].counter and "det" in subject and self.draws.chance(0.6):
            subject = {"noun": name, "number": self.draws.choice((2, 3, 4, 5, 10))}
        tense = self.draws.choice(("past", "present", "present"))
        where = {"of": self._definite_one_of(places)} if places else self._beside()
        return {"subject": subject, "predicate": "exist", "tense": tense, "where": where}

    def _definite_one_of(self, nouns: Sequence[str]) -> Node:
        return self.common(self.draws.choice(nouns), definite=True, plain=True)

    def _beside(self) -> Node:
        """The location of a small thing: on, under, behind, next to, in front of or inside a larger one."""
        relation = self.draws.choice(_RELATIONS)
        special = {"inside": lexicon.CONTAINERS, "on": lexicon.TOPS, "under": lexicon.TOPS}
        return {"relation": relation, "of": self._definite_one_of(special.get(relation, lexicon.LANDMARKS))}

    def weather(self) -> Node:
        """It rains, it will snow; the weather is warm."""
        if self.draws.chance(0.6):
            clause: Node = {"predicate": self.draws.choice(lexicon.FRAMES["weather"]).key, "tense": self._tense("past")}
            if clause["tense"] == "present" and self.draws.chance(0.6):
                clause["aspect"] = "progressive"
            elif not self._negate(clause, clause["predicate"], 0.2):
                self._add_time(clause, 0.4)
            return clause
        sky = self.draws.choice(lexicon.WEATHER_ADJECTIVES)
        return {"subject": {"noun": "weather", "det": "the"}, "predicate": sky.key, "tense": self._tense("past")}

    def _tense(self, likely: str) -> str:
        return self.draws.choice(("past", "present", "future", likely))

    def _add_tense(self, clause: Node, verb: Verb) -> None:
        clause["tense"] = self._tense("past")
        roll = self.draws.below(100)
        if "state" not in verb.marks and "quick" not in verb.marks and clause["tense"] != "future":
            if roll < 12:
                clause["aspect"] = "progressive"
            elif roll < 27 and "person" in _tags(clause["subject"]) and "thetic" not in verb.marks:
                clause["aspect"] = ("can", "want", "must")[roll % 3]
        if self._is_tense_ambiguous(clause, agreement(clause["subject"])):
            clause["tense"] = "past"
        asserted = "asserted" in verb.marks and clause.get("aspect") != "can"
        counted = any(isinstance(clause.get(part, {}).get("number"), int) for part in ("subject", "object"))
        if clause.get("aspect") != "must" and not counted and not asserted:
            self._negate(clause, verb.key, 0.18)

    @staticmethod
    def _is_tense_ambiguous(clause: Node, agrees: str) -> bool:
        """Whether present and past look the same, as in `I read` and `I cut`; such clauses become past."""
        verb = VERBS[clause["predicate"]]
        in_present = clause["tense"] == "present" and "aspect" not in clause
        return in_present and verb.past == verb.english and agrees != "he"

    def _negate(self, clause: Node, predicate: str, probability: float) -> bool:
        if not self.draws.chance(probability) or clause.get("subject", {}).get("det") == "a":
            return False
        suppletive = predicate in VERBS and VERBS[predicate].negative is not None
        short = self.draws.chance(0.45) and (suppletive or short_negation_allowed(predicate))
        first_person = clause.get("subject", {}).get("noun") == "I" and clause["tense"] == "present"
        with_be = predicate in ADJECTIVES or clause.get("aspect") == "progressive"
        clause["not"] = "short" if short and not (first_person and with_be) else "long"
        return True

    def _add_modifiers(self, clause: Node, verb: Verb) -> None:
        """Add manner or frequency, at most one of companion, tool and place, and a time."""
        free = "not" not in clause and clause.get("aspect") not in ("must", "want")
        if free and self.draws.chance(0.35):
            self._add_adverb(clause, verb)
        roll = self.draws.below(100)
        if roll < 10 and "company" in verb.marks and "animal" not in _tags(clause["subject"]):
            if clause.get("manner") != "alone":
                clause["companion"] = self.other(clause["subject"])
        elif roll < 22 and verb.tools and "not" not in clause and "animal" not in _tags(clause["subject"]):
            clause["tool"] = {"noun": self.draws.choice(verb.tools), "det": "a"}
        elif roll < 22 and verb.key in _TRAVEL_VERBS and "place" in _tags(clause["object"]):
            far = "city" in _tags(clause["object"])
            clause["tool"] = {"noun": self.draws.choice(lexicon.LONG_RIDES if far else lexicon.SHORT_RIDES)}
        elif roll < 40 and verb.places:
            place = self.draws.choice(verb.places)
            clause["place"] = {"noun": place} if "bare" in NOUNS[place].tags else {"noun": place, "det": "the"}
        if "state" not in verb.marks and verb.key != "become":
            self._add_time(clause, 0.35)

    def _add_adverb(self, clause: Node, verb: Verb) -> None:
        manner = self.draws.choice(verb.manners) if verb.manners else None
        if manner == "often":
            if "aspect" not in clause and clause["tense"] != "future":
                clause["frequency"] = self.draws.choice(_FREQUENCIES)
        elif manner and (manner != "alone" or agreement(clause["subject"]) != "they"):
            clause["manner"] = manner

    def _add_time(self, clause: Node, probability: float) -> None:
        if "frequency" in clause or not self.draws.chance(probability):
            return
        tense, aspect = clause["tense"], clause.get("aspect")
        if aspect == "progressive" and tense == "present":
            tense = "now"
        elif aspect or (tense == "present" and "not" in clause):
            return
        time = self.draws.choice(lexicon.TIMES_OF[tense])
        verb = VERBS.get(clause["predicate"])
        if verb is None or "thetic" not in verb.marks or time in lexicon.MOMENTARY_TIMES:
            clause["time"] = time
            if self.draws.chance(0.3):
                clause["front"] = True


def _tags(node: Node) -> frozenset[str]:
    """The tags of a phrase's noun; pronouns and titles have the tag "person"."""
    noun = NOUNS.get(node.get("noun", ""))
    return noun.tags if noun is not None and "title" not in node else frozenset({"person"})
