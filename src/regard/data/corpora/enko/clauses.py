"""Drawing clauses: a predicate first, then the nouns it may have, then tense, negation and what surrounds it."""

from __future__ import annotations

from .adverbs import DEGREES, FREQUENCIES, RELATIONS, TIMES
from .combinations import predicates_for
from .lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Frame, Verb
from .phrases import Phrases
from .predicates import short_negation_allowed
from .to_english import agreement
from .to_korean import honoured
from .words import Node

__all__ = ["CONTRASTED", "FOR_OTHERS", "MOODS", "Clauses"]


def _of_frame(*frames: Frame) -> tuple[Verb, ...]:
    return tuple(verb for verb in VERBS.values() if verb.frame in frames)


_FRAMES: dict[Frame, tuple[Verb, ...]] = {
    frame: _of_frame(frame) for frame in ("transitive", "intransitive", "motion", "ditransitive", "weather")
}
_ACTIVITIES = tuple(
    verb
    for verb in _of_frame("transitive", "intransitive", "motion", "ditransitive")
    if not verb.marks & {"state", "thetic"} and not verb.doers
)
CONTRASTED = tuple(verb for verb in _ACTIVITIES if verb.frame in ("transitive", "motion") and len(verb.partners) > 5 and "asserted" not in verb.marks)
_PREDICATIVE = tuple(word for word in ADJECTIVES.values() if "only-before" not in word.marks)
MOODS = tuple(word for word in ADJECTIVES.values() if "mood" in word.marks)
_COMPARED = tuple(word for word in _PREDICATIVE if not word.marks & {"mood", "only-after"} and word.key not in ("bad", "good"))
_SKIES = tuple(word for word in _PREDICATIVE if "weather" in word.partners)
_NEWS = tuple(verb for verb in VERBS.values() if verb.key in ("begin", "end", "arrive", "depart", "ring", "stop"))
_TIMES = {tense: tuple(time for time, (_, when) in TIMES.items() if tense in when.split()) for tense in
          ("past", "present", "future", "now")}  # fmt: skip
_JOBS = tuple(noun.english for noun in NOUNS.values() if "job" in noun.tags)
_SMALL = tuple(noun.english for noun in NOUNS.values() if "kept" in noun.tags and not noun.tags & {"mass", "vehicle"})
_LITTLE_ANIMALS = ("cat", "dog", "puppy", "rabbit", "mouse", "bird", "turtle", "frog")
_ANIMALS = tuple(noun.english for noun in NOUNS.values() if "animal" in noun.tags)
_WHERE_ANIMALS_ARE = ("farm", "zoo", "garden", "park", "forest", "village", "island", "mountain")
_WHERE_THINGS_ARE = ("room", "office", "classroom", "kitchen", "house", "store", "library", "hotel")
_GROUPS = tuple(noun.english for noun in NOUNS.values() if "person" in noun.tags and not noun.tags & {"kin", "name", "royal"})
_SURFACES = ("desk", "table", "bed", "chair", "sofa", "box", "piano", "door", "window", "tree", "car", "mirror")
_TOPS = ("desk", "table", "bed", "chair", "sofa", "box", "piano", "car")
_ROOMY = ("box", "bag", "basket")
_SPOTS = tuple(n.english for n in NOUNS.values() if "place" in n.tags and not n.tags & {"by", "on", "city"})
_NEAR_TIMES = frozenset({"yesterday", "last night", "this morning", "an hour ago", "today", "now", "tomorrow", "tonight", "soon"})
# What people do about a mood.
_ANSWERS = {
    "tired": ("sleep", "rest", "lie on", "sit on", "return to"),
    "busy": ("run to", "work", "ride", "call", "drive", "finish"),
    "sick": ("rest", "sleep", "cough", "lie on", "call", "wait for"),
    "happy": ("sing", "dance", "laugh", "hug", "invite", "praise", "give to", "bake"),
    "sad": ("cry", "listen to", "drink", "walk", "read", "leave", "hug"),
    "hungry": ("eat", "cook", "bake", "make", "wash", "cut", "prepare"),
    "lonely": ("cry", "call", "meet", "visit", "raise", "send to", "invite", "wait for"),
}
# What may be `a little` or `too` so: saying it is a complaint.
_SLIGHT = frozenset(
    "tired busy sick sad hungry lonely difficult expensive heavy spicy salty boring dark noisy far dirty slow strange long "
    "short narrow cold hot big small thick thin".split()
)
_EVERYDAY = tuple(
    VERBS[key]
    for key in (
        "eat,drink,cook,make,bake,buy,read,write,watch,listen to,clean up,wash,wear,fix,draw,ride,drive,study,play,meet,help,"
        "call,wait for,visit,open,close,turn on,turn off,leave,cross,carry,move,plant,pick up,sleep,run,walk,laugh,sing,dance,"
        "work,rest,exercise,get up,go to,come to,return to,walk to,run to,enter,climb,sit on,lie on,stay at,give to,send to,"
        "lend to,bring to,read to,borrow,lose,finish,prepare,learn,teach"
    ).split(",")
)
FOR_OTHERS = tuple(
    VERBS[key] for key in "call,cook,bake,make,prepare,clean up,bring to,give to,send to,buy,wait for".split(",")
)
_DEGREES, _FREQUENCIES, _RELATIONS = tuple(DEGREES), tuple(FREQUENCIES), tuple(RELATIONS)
_FAR_RIDES, _NEAR_RIDES = ("train", "bus", "airplane", "car"), ("bus", "taxi", "bicycle", "car")
# What embedded clauses leave out: two phrases with 이/가 in a row can be read either way.
_MAIN_ONLY = frozenset({"need", "have"})


class Clauses(Phrases):
    """Clauses for one sentence. `embedded` clauses stay short and have subjects that are not pronouns of the third person."""

    # ---------------------------------------------------------------------------------- by kind

    def any_clause(self, *, embedded: bool = False) -> Node:
        """A clause of any kind."""
        throw = self.draws.below(100)
        if throw < 38:
            return self.activity(self.draws.choice(_FRAMES["transitive"]), embedded=embedded)
        if throw < 52:
            return self.activity(self.draws.choice(_FRAMES["intransitive"]), embedded=embedded)
        if throw < 61:
            return self.activity(self.draws.choice(_FRAMES["motion"]), embedded=embedded)
        if throw < 69:
            return self.activity(self.draws.choice(_FRAMES["ditransitive"]), embedded=embedded)
        if throw < 88:
            return self.description(self.draws.choice(_PREDICATIVE), embedded=embedded)
        if throw < 91:
            return self.identity(embedded=embedded)
        if throw < 95:
            return self.location(embedded=embedded)
        if throw < 97 or embedded:
            return self.weather()
        return self.existence()

    def activity(self, verb: Verb, *, embedded: bool = False, subject: Node | None = None) -> Node:
        """A verb with everything it asks for, done by somebody who does such things."""
        if embedded and verb.key in _MAIN_ONLY:
            verb = VERBS["like"]
        definite = embedded or "state" in verb.marks
        clause: Node = {"predicate": verb.key}
        if verb.frame == "intransitive":
            clause["subject"] = subject or self.subject_of(verb, definite=definite, pronouns=not embedded, plain=embedded)
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
                return {"and": [self.common(name, definite=True, plain=True), self.common(second, definite=True, plain=True)]}
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
        clause["tense"] = self.draws.choice(("past", "present")) if "lasting" in adjective.marks else self._tense("present")
        if not embedded and adjective in _COMPARED and "noun" in subject and self.draws.chance(0.2):
            other = self.subject_of(adjective, definite=True, pronouns=False, plain=True)
            if other["noun"] != subject["noun"] and clause["tense"] != "future":
                return {**clause, "than": other}
        if not self._negate(clause, adjective.key, 0.2) and not embedded and self.draws.chance(0.3):
            degree = self.draws.choice(_DEGREES)
            if degree in ("very", "really") or adjective.key in _SLIGHT:
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
        clause["complement"] = {"noun": self.draws.choice(_JOBS), "det": "a"}
        if self.draws.chance(0.3):
            clause["not"] = "long" if agreement(subject) == "I" or self.draws.chance(0.5) else "short"
        return clause

    def location(self, *, embedded: bool = False) -> Node:
        """Somebody or something is somewhere."""
        throw = self.draws.below(10)
        if throw < 6:
            subject = self.person(pronouns=not embedded, plain=True)
            where: Node = {"of": self._spot(_SPOTS)}
        else:
            subject = self.common(self.draws.choice(_SMALL if throw < 8 else _LITTLE_ANIMALS), definite=True, plain=True)
            where = self._beside()
        clause: Node = {"subject": subject, "predicate": "be at", "where": where}
        clause["tense"] = self.draws.choice(("past", "present", "present"))
        if self.draws.chance(0.25):
            clause["not"] = "long" if agreement(subject) == "I" or self.draws.chance(0.5) else "short"
        return clause

    def existence(self) -> Node:
        """There is a cat under the table; there are two students in the classroom."""
        kinds = ((_SMALL, ()), (_SMALL, _WHERE_THINGS_ARE), (_LITTLE_ANIMALS, ()), (_ANIMALS, _WHERE_ANIMALS_ARE), (_GROUPS, _SPOTS))
        names, spots = self.draws.choice(kinds)
        name = self.draws.choice(names)
        subject: Node = {"noun": name} if "plural" in NOUNS[name].tags else {"noun": name, "det": "a"}
        if NOUNS[name].counter and "det" in subject and self.draws.chance(0.6):
            subject = {"noun": name, "number": self.draws.choice((2, 3, 4, 5, 10))}
        clause: Node = {"subject": subject, "predicate": "exist", "tense": self.draws.choice(("past", "present", "present"))}
        clause["where"] = {"of": self._spot(spots)} if spots else self._beside()
        return clause

    def _spot(self, spots: tuple[str, ...]) -> Node:
        return self.common(self.draws.choice(spots), definite=True, plain=True)

    def _beside(self) -> Node:
        """Where something small is: on, under, behind, next to, in front of or inside something larger."""
        relation = self.draws.choice(_RELATIONS)
        things = _ROOMY if relation == "inside" else _TOPS if relation in ("on", "under") else _SURFACES
        return {"relation": relation, "of": self.common(self.draws.choice(things), definite=True, plain=True)}

    def weather(self) -> Node:
        """It rains, it will snow; the weather is warm."""
        if self.draws.chance(0.6):
            clause: Node = {"predicate": self.draws.choice(_FRAMES["weather"]).key, "tense": self._tense("past")}
            if clause["tense"] == "present" and self.draws.chance(0.6):
                clause["aspect"] = "progressive"
            elif not self._negate(clause, clause["predicate"], 0.2):
                self._time(clause, 0.4)
            return clause
        sky = self.draws.choice(_SKIES)
        return {"subject": {"noun": "weather", "det": "the"}, "predicate": sky.key, "tense": self._tense("past")}

    # ---------------------------------------------------------------------------------- for joined sentences

    def reason(self, tense: str) -> Node:
        """A state of things that explains what people do: the weather, the beginning or end of something, a mood."""
        throw = self.draws.below(100)
        if throw < 20:
            mood = self.draws.choice(MOODS)
            return self.mood(mood, tense, self.subject_of(mood, definite=True, pronouns=False, plain=True))
        if throw < 55:
            return {"predicate": self.draws.choice(_FRAMES["weather"]).key, "tense": tense}
        if throw < 70:
            sky = self.draws.choice(_SKIES).key
            return {"subject": {"noun": "weather", "det": "the"}, "predicate": sky, "tense": tense}
        verb = self.draws.choice(_NEWS)
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
        answer = VERBS[self.draws.choice(_ANSWERS[mood.key])]
        while honour and answer.takes_people and not answer.takes_titles:
            answer = VERBS[self.draws.choice(_ANSWERS[mood.key])]
        return self.mood(mood, earlier, subject), self.deed(later, subject, verb=answer)

    def deed(self, tense: str, subject: Node | None = None, *, verb: Verb | None = None, pronouns: bool = True) -> Node:
        """Something that people do, said briefly."""
        verb = verb or self.draws.choice(_EVERYDAY)
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
        if "state" not in VERBS[clause["predicate"]].marks and "quick" not in VERBS[clause["predicate"]].marks:
            if clause["tense"] == "present" and self.draws.chance(0.5):
                clause["aspect"] = "progressive"
        if self._ambiguous(clause, agreement(node if clause["gap"] == "subject" else clause["subject"])):
            clause["tense"] = "past"
        plain = "aspect" not in clause and clause["tense"] != "future"
        if plain and not VERBS[clause["predicate"]].marks & {"state", "asserted"} and self.draws.chance(0.12):
            clause["not"] = "long"
        node["clause"] = clause
        return True

    def _relative_subject(self, node: Node) -> Node | None:
        verb = self.draws.choice(_ACTIVITIES)
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
        if verb.key in _MAIN_ONLY or verb.key == "become":
            return None
        subject = self._doer(verb, {"noun": noun}, definite=True, embedded=True)
        return {"gap": "object", "predicate": verb.key, "subject": subject}

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
        elif throw < 22 and verb.key in ("go to", "come to", "return to", "arrive at", "visit") and "place" in _tags(clause["object"]):
            far = "city" in _tags(clause["object"])
            clause["tool"] = {"noun": self.draws.choice(_FAR_RIDES if far else _NEAR_RIDES)}
        elif throw < 40 and verb.places:
            place = self.draws.choice(verb.places)
            clause["place"] = {"noun": place} if "bare" in NOUNS[place].tags else {"noun": place, "det": "the"}
        if "state" not in verb.marks:
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
            clause["frequency"] = self.draws.choice(_FREQUENCIES)

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
        time = self.draws.choice(_TIMES[tense])
        verb = VERBS.get(clause["predicate"])
        if verb is not None and "thetic" in verb.marks and time not in _NEAR_TIMES:
            return
        clause["time"] = time
        if self.draws.chance(0.3):
            clause["front"] = True


def _tags(node: Node) -> frozenset[str]:
    """What a phrase speaks of; pronouns and titles speak of people."""
    noun = NOUNS.get(node.get("noun", ""))
    return noun.tags if noun is not None and "title" not in node else frozenset({"person"})
