"""Drawing noun phrases: who speaks, who acts, and what it is done to, with determiners, numerals and adjectives."""

from __future__ import annotations

from ..corpus import Draws
from .adverbs import NAMES, NUMERALS, SURNAMES, TITLES
from .choices import PEOPLE
from .combinations import Keep, partners, predicates_for
from .lexicon import ADJECTIVES, NOUNS, Adjective, Noun, Verb
from .words import Node

__all__ = ["Phrases"]

_NAMES = tuple(NAMES)
_SURNAMES = tuple(SURNAMES)
_TITLES = tuple(TITLES)
_NUMERALS = tuple(NUMERALS)
_PRONOUNS = ("I", "I", "I", "we", "he", "she", "they")
_OTHERS = ("me", "us", "him", "her", "them")
_SUBJECT_OF = {"me": "I", "us": "we", "him": "he", "her": "she", "them": "they"}
_BEFORE = {key: "only-after" not in adjective.marks for key, adjective in ADJECTIVES.items()}
# math, the moon, my mother: an adjective before them would say more than it means.
_UNDESCRIBED = frozenset({"bare", "unique", "kin"})
_LESSER = frozenset({"mass", "bare", "unique", "plural", "nocount"})


def _may_be_owned(noun: Noun) -> bool:
    """my dog, my friend, our house; but not my tiger, my thief or my mountain."""
    if noun.tags & {"person", "place", "event", "nature", "travels", "wild", "food", "pleasure"}:
        return "own" in noun.tags
    return True


class Phrases:
    """Noun phrases for one sentence: they share its dice and its duty to contain a held-out combination."""

    def __init__(self, draws: Draws, keep: Keep) -> None:
        self.draws = draws
        self.keep = keep
        self.found = keep == "train"
        """Whether the held-out combination that the split asks for is already in the sentence."""

    # ---------------------------------------------------------------------------------- combinations

    def partner(self, predicate: str) -> str:
        """A noun for a predicate: one held out, if the sentence still lacks it, else one of training."""
        if not self.found and self.draws.chance(0.6):
            held = partners(predicate, self.keep)
            if held:
                self.found = True
                return self.draws.choice(held)
        return self.draws.choice(partners(predicate, "train"))

    def adjective_for(self, noun: str) -> str | None:
        """An adjective that may stand before a noun."""
        if not self.found and self.draws.chance(0.6):
            held = [key for key in predicates_for(noun, "adjective", self.keep) if _BEFORE[key]]
            if held:
                self.found = True
                return self.draws.choice(held)
        known = predicates_for(noun, "adjective", "train")
        chosen = self.draws.choice(known) if known else None
        return chosen if chosen is not None and _BEFORE[chosen] else None

    # ---------------------------------------------------------------------------------- phrases

    def common(self, name: str, *, definite: bool = False, plain: bool = False) -> Node:
        """A noun with a determiner it may have; `definite` leaves out `a` and numerals, `plain` everything else."""
        noun, draws = NOUNS[name], self.draws
        node: Node = {"noun": name}
        if "kin" in noun.tags:
            self._possess(node, noun)
        elif noun.tags & _LESSER:
            self._determine_lesser(node, noun, definite)
        else:
            self._determine(node, noun, definite, plain)
        if not noun.tags & _UNDESCRIBED and draws.chance(0.1 if plain else 0.3):
            adjective = self.adjective_for(name)
            if adjective is not None:
                node["adjective"] = adjective
        return node

    def _possess(self, node: Node, noun: Noun) -> None:
        """Relatives are always somebody's: mine, ours, Minsu's."""
        throw = self.draws.below(10)
        if throw < 2 and "spouse" not in noun.tags:
            node["owner"] = {"noun": self.draws.choice(_NAMES)}
        else:
            node["det"] = "our" if throw < 4 and not noun.tags & {"plural", "spouse"} else "my"

    def _determine_lesser(self, node: Node, noun: Noun, definite: bool) -> None:
        if "bare" in noun.tags:
            return
        throw = self.draws.below(10)
        if "unique" in noun.tags or definite or throw < 5 or "nocount" in noun.tags:
            node["det"] = "the" if throw < 8 or "unique" in noun.tags or "mass" in noun.tags else "this"
        elif throw < 7 and "worn" in noun.tags:
            node["det"] = "my"

    def _determine(self, node: Node, noun: Noun, definite: bool, plain: bool) -> None:
        throw = self.draws.below(100)
        living, ownable = "person" in noun.tags or "animal" in noun.tags, _may_be_owned(noun)
        if throw < 38 or (plain and throw < 60):
            node["det"] = "the"
        elif throw < 58 and not definite:
            node["det"] = "a"
        elif throw < 68 and not definite and noun.counter:
            node["number"] = self.draws.choice(_NUMERALS)
        elif throw < 74:
            node["det"] = "this" if throw & 1 else "that"
        elif throw < 84 and living:
            node["det"] = ("the", "my", "our", "the")[throw & 3] if ownable else "the"
            node["number"] = "many"
        elif throw < 84 and not definite and "goods" in noun.tags:
            node["number"] = "many"
        elif throw < 92 and ownable:
            node["det"] = "our" if throw & 3 == 0 else "my"
        elif not plain and not living and "goods" in noun.tags:
            node["owner"] = self._owner()
        else:
            node["det"] = "the"

    def _owner(self) -> Node:
        throw = self.draws.below(3)
        if throw == 0:
            return {"noun": self.draws.choice(_NAMES)}
        owner = self.draws.choice(PEOPLE)
        if "plural" in NOUNS[owner].tags:
            return {"noun": "teacher", "det": "the"}
        return {"noun": owner, "det": "my" if "kin" in NOUNS[owner].tags else "the"}

    def title(self) -> Node:
        """Mr. Kim, Professor Park."""
        return {"title": self.draws.choice(_TITLES), "noun": self.draws.choice(_SURNAMES)}

    def person(self, *, definite: bool = True, titles: bool = True, pronouns: bool = True, plain: bool = False) -> Node:
        """Somebody as a subject."""
        throw = self.draws.below(100)
        if throw < 22 and pronouns:
            return {"noun": self.draws.choice(_PRONOUNS)}
        if throw < 38:
            return {"noun": self.draws.choice(_NAMES)}
        if throw < 46 and titles:
            return self.title()
        if throw < 50 and not plain:
            return self._pair()
        name = self.draws.choice(PEOPLE)
        while not titles and "hon" in NOUNS[name].tags:
            name = self.draws.choice(PEOPLE)
        return self.common(name, definite=definite, plain=plain)

    def _pair(self) -> Node:
        """the boy and the girl, Minsu and I."""
        if self.draws.chance(0.5):
            return {"and": [{"noun": self.draws.choice(_NAMES)}, {"noun": "I"}]}
        first, second = self.draws.shuffled(("boy", "girl", "child", "student", "man", "woman"))[:2]
        return {"and": [{"noun": first, "det": "the"}, {"noun": second, "det": "the"}]}

    def other(self, subject: Node | None, *, titles: bool = True) -> Node:
        """Somebody to whom something is done: not the subject again, not a pronoun that could be."""
        throw = self.draws.below(100)
        own = {part.get("noun") for part in subject.get("and", (subject,))} if subject else set()
        if throw < 16:
            pronoun = _SUBJECT_OF[self.draws.choice(_OTHERS)]
            if not own & ({"I", "we"} if pronoun in ("I", "we") else {pronoun}):
                return {"noun": pronoun}
        if throw < 40:
            name = self.draws.choice(_NAMES)
            if name not in own:
                return {"noun": name}
        if throw < 52 and titles:
            return self.title()
        name = self.draws.choice(PEOPLE)
        while name in own or (not titles and "hon" in NOUNS[name].tags):
            name = self.draws.choice(PEOPLE)
        return self.common(name, definite=True, plain=True)

    def subject_of(self, word: Verb | Adjective, *, definite: bool, pronouns: bool = True, plain: bool = False) -> Node:
        """The subject of an intransitive verb or an adjective: one of its nouns, or a name, which goes with all."""
        if word.takes_people and self.draws.chance(0.35):
            throw = self.draws.below(10)
            if throw < 5 and pronouns:
                return {"noun": self.draws.choice(_PRONOUNS)}
            if throw < 8 or not word.takes_titles:
                return {"noun": self.draws.choice(_NAMES)}
            return self.title()
        name = self.partner(word.key)
        return self.common(name, definite=definite or bool(NOUNS[name].tags & _LESSER), plain=plain)
