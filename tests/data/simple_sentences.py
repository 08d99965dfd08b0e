"""How many sentences there are, by combinatorics: one family of simple sentences, counted exactly and listed by number.

The family is the plainest there is: somebody definite does something to one thing, in some tense, said or denied,
perhaps at some time. Its size is a lower bound for training; every other construction comes on top, and joined
clauses multiply.
"""

from __future__ import annotations

from functools import cached_property

from regard.data.corpora.enko.grammar import REGISTERS, Node
from regard.data.corpora.enko.lexicon import (
    ADJECTIVES,
    HELD_OUT,
    NAMES,
    NOUNS,
    SURNAMES,
    TIMES,
    TITLES,
    VERBS,
    Noun,
    Verb,
)

_TENSES = ("past", "present", "future")
_PRONOUNS = ("I", "we", "he", "she", "they")


class SimpleSentences:
    """Simple transitive sentences of training, as a sequence: `len(…)` counts them, `…[i]` is the structure of one.

    size = Σ over (verb, object phrase) of subjects · registers · Σ over tenses of 2 · (1 + 2 · times of that tense),
    where 2 is said or denied, and a time may be absent, first or last.
    """

    def __len__(self) -> int:
        return len(self._cores) * self._per_core

    def __getitem__(self, index: int) -> Node:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is not 0 to {len(self) - 1}")
        core, index = divmod(index, self._per_core)
        who, index = divmod(index, len(REGISTERS) * len(self._settings))
        register, setting = divmod(index, len(self._settings))
        verb, target = self._cores[core]
        clause: Node = {"subject": dict(self._subjects[who]), "predicate": verb, "object": dict(target)}
        return {"register": REGISTERS[register], "clause": {**clause, **self._settings[setting]}}

    @cached_property
    def _per_core(self) -> int:
        return len(self._subjects) * len(REGISTERS) * len(self._settings)

    @cached_property
    def _subjects(self) -> list[Node]:
        """Names, pronouns, titles: people who combine with everything."""
        people: list[Node] = [{"noun": noun} for noun in (*NAMES, *_PRONOUNS)]
        return people + [{"title": title, "noun": surname} for title in TITLES for surname in SURNAMES]

    @cached_property
    def _cores(self) -> list[tuple[str, Node]]:
        """Every (verb, object phrase) met in training."""
        return [(verb.key, target) for verb in VERBS.values() if _acts(verb) for target in _targets(verb)]

    @cached_property
    def _settings(self) -> list[Node]:
        """Tense, denial and time."""
        settings: list[Node] = []
        for tense in _TENSES:
            for denied in ({}, {"not": "long"}):
                times: list[Node] = [{}]
                for time, (_, when) in TIMES.items():
                    # Habits are not denied with a time in this grammar: it could be read either way.
                    if tense in when and not (tense == "present" and denied):
                        times += [{"time": time}, {"time": time, "front": True}]
                settings += [{"tense": tense, **denied, **time} for time in times]
        return settings


def _acts(verb: Verb) -> bool:
    """A verb for people that says its tense in every form (`I read` does not) and may be denied."""
    marks = verb.marks & {"state", "asserted"}
    return (
        verb.frame == "transitive"
        and not verb.doers
        and not marks
        and verb.past != verb.english
        and verb.key != "become"
    )


def _targets(verb: Verb) -> list[Node]:
    targets: list[Node] = []
    for name in verb.nouns:
        if (verb.key, name) in HELD_OUT:
            continue
        for node in _determined(NOUNS[name]):
            targets.append(node)
            targets += [{**node, "adjective": adjective} for adjective in _adjectives(NOUNS[name])]
    return targets


def _determined(noun: Noun) -> list[Node]:
    if noun.tags & {"kin", "bare"}:
        return []
    if noun.tags & {"mass", "unique", "plural", "nocount"}:
        return [{"noun": noun.english, "det": "the"}]
    return [{"noun": noun.english, "det": determiner} for determiner in ("the", "a", "this", "that")]


def _adjectives(noun: Noun) -> list[str]:
    return [
        adjective.key
        for adjective in ADJECTIVES.values()
        if "unique" not in noun.tags
        and "only-after" not in adjective.marks
        and noun.english in adjective.nouns
        and (adjective.key, noun.english) not in HELD_OUT
    ]
