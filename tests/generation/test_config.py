"""What can be asked for, and what is refused in one sentence."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from regard.generation import PAPER, GenerateConfig


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be a positive number"),
        ({"temperature": 0, "sample": True}, "temperature=0.0 must be a positive number"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a positive number"),
        ({"temperature": math.nan}, "temperature=nan must be a positive number"),
        ({"temperature": math.inf}, "temperature=inf must be a positive number"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must lie in (0, 1]"),
        ({"top_p": 1.1}, "top_p=1.1 must lie in (0, 1]"),
        ({"min_p": -0.1}, "min_p=-0.1 must lie in [0, 1]"),
        ({"sample": False, "top_p": 0.9}, "top_p=0.9 applies only to sampling, but sample=False"),
        ({"beam": 3, "sample": True}, "beam=3 searches for the best text and sample=True draws one"),
        ({"beam": 3, "temperature": 0.5}, "beam=3 searches for the best text and temperature=0.5 draws one"),
        ({"beam": 0}, "beam=0 must be at least 1"),
        ({"beam": 2, "n_best": 3}, "n_best=3 texts need beam=3 or more"),
        ({"n_best": 2}, "n_best=2 texts need beam=2 or more, or sample=True"),
        ({"beam": 5, "groups": 2, "diversity_penalty": 1.0}, "beam=5 is not divisible by groups=2"),
        ({"beam": 4, "groups": 2}, "groups above 1 need a positive penalty"),
        ({"beam": 4, "diversity_penalty": 1.0}, "groups above 1 need a positive penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 exceeds max_new_tokens=3"),
        ({"length_penalty": math.nan}, "length_penalty=nan must be a finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a positive number"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram=-1 must be at least 0"),
        ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 is inf"),
        ({"logit_bias": {5: -1e300}}, "logit_bias of token 5 is -1e+300"),
        ({"stop": [[]]}, "stop contains an empty sequence"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"penalty_form": "other"}, "penalty_form='other'"),
        ({"cache": "huge"}, "cache='huge'"),
        ({"num_beams": 4}, "GenerateConfig has no field 'num_beams'"),
        ({"lenght_penalty": 1.0}, "did you mean 'length_penalty'?"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        GenerateConfig(**fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "samples"),
    [({}, False), ({"sample": True}, True), ({"temperature": 1.0}, True), ({"top_k": 5}, True), ({"seed": 3}, False)],
)
def test_sampling_is_asked_for_by_name_or_by_its_fields(fields: dict[str, Any], samples: bool) -> None:
    assert GenerateConfig(**fields).samples is samples


def test_early_stopping_is_one_of_three() -> None:
    assert [GenerateConfig(early_stopping=x).early_stopping for x in (True, False, "never")] == [True, False, "never"]


def test_a_single_stop_token_is_a_sequence_of_one() -> None:
    assert GenerateConfig(stop=[3, (4, 5)]).stop == ((3,), (4, 5))


def test_penalties() -> None:
    assert GenerateConfig(length_penalty=2.0).length_penalty_at(3) == 9.0
    assert GenerateConfig(**PAPER).length_penalty_at(13) == pytest.approx(3.0**0.6)
    assert GenerateConfig(**PAPER).length_penalty_at(1) == 1.0
    for alpha in (-500.0, 500.0):  # beyond float32, and some beyond float64: ranked by length alone
        short, long = (torch.tensor(GenerateConfig(length_penalty=alpha).length_penalty_at(n)) for n in (2, 4096))
        assert 0 < short < math.inf
        assert 0 < long < math.inf


def test_a_config_is_frozen_and_changed_by_copy() -> None:
    config = GenerateConfig(beam=4)
    with pytest.raises(ValueError, match="frozen"):
        config.beam = 5  # type: ignore[misc]
    assert config.with_(length_penalty=0.5) == GenerateConfig(beam=4, length_penalty=0.5)
