"""Greedy and beam search equal transformers' ``generate`` on the same random weights, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from regard.generation import Generated, generate

from .twins import EOS, FAMILIES, WRITERS, asked, pair, rows, same

CASES = range(24, 52)  # of each of the five families: beams and ends vary most in these
LENGTHS = (1, 2, 5, 8)


def draw(family: str, case: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Some ragged texts and some fields: beams 1 to 8 in turn, everything else by chance."""
    chance = random.Random(f"{family} {case}")
    texts = rows(case, tuple(chance.choice(LENGTHS) for _ in range(chance.choice((1, 2, 3)))))
    beam = case % 8 + 1
    fields: dict[str, Any] = {"beam": beam, "n_best": chance.choice((1, beam)), "max_new_tokens": chance.randint(1, 14)}
    fields["logit_bias"] = chance.choice(({}, {EOS: 1.0}, {EOS: 2.0}, {EOS: 3.5}))  # ends come early, late or never
    if beam > 1:
        fields["length_penalty"] = chance.choice((-1.0, 0.0, 0.6, 1.0, 2.0))
        fields["early_stopping"] = chance.choice((False, True, "never"))
    filters = {
        **{"repetition_penalty": 1.3, "no_repeat_ngram": 2, "prefix": (5, 9)},
        "min_new_tokens": min(3, fields["max_new_tokens"]),
    }
    if family not in WRITERS or len(texts) == 1:  # their filters take padding in prompts for tokens
        fields |= {name: value for name, value in filters.items() if chance.random() < 0.25}
    return texts, fields


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_scores_and_ways_through_the_beam_are_theirs(family: str) -> None:
    made: list[tuple[int, Generated]] = []
    for case in CASES:
        texts, fields = draw(family, case)
        both = pair(family, seed=case % 5)
        got = generate(both.ours, texts, **fields)
        try:
            same(got, asked(both.theirs, texts, **fields))
        except AssertionError as error:
            raise AssertionError(f"case {case} of {family}, {fields}: {error}") from error
        made.append((fields["beam"], got))
    _varied(made)


def _varied(made: list[tuple[int, Generated]]) -> None:
    """The cases are worth comparing: beams end in many ways and lengths, and texts are not all of one token."""
    texts = [text for _, got in made for some in got.hypotheses for text in some]
    finishes = [text.finish for text in texts]
    assert min(finishes.count("end"), finishes.count("length")) > 0.2 * len(texts)
    assert sum(len({len(text.tokens) for text in some}) > 1 for _, got in made for some in got.hypotheses) >= 6
    assert sum(len(set(text.tokens)) > 2 for text in texts) > 0.3 * len(texts)
    assert sum(len(set(text.beams)) > 1 for text in texts) >= 18
    assert {beam for beam, _ in made} == set(range(1, 9))


@pytest.mark.parametrize("family", FAMILIES)
def test_long_greedy_texts(family: str) -> None:
    for seed in range(3):
        both, texts = pair(family, seed), rows(seed, (7, 1, 4))
        same(generate(both.ours, texts, max_new_tokens=30), asked(both.theirs, texts, max_new_tokens=30))
