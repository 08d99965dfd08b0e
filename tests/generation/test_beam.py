"""Beam search beyond what transformers has: against the same told in lists, against trying everything, and by hand."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from regard.generation import PAPER, BeamSearch, GenerateConfig
from regard.generation.generate import generate

from .scripted import Script, ScriptEngine, by_hand, prompts, search
from .spoken import translator

EOS = 2


def close(found: list[Any], told: list[tuple[tuple[int, ...], float]]) -> None:
    assert [tuple(text.tokens) for text in found] == [text for text, _ in told]
    assert [text.score for text in found] == pytest.approx([score for _, score in told], abs=1e-4)


def cases(n: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    made = []
    for _ in range(n):
        groups = chance.choice((1, 1, 2, 3))
        beam = groups * chance.randint(1 if groups > 1 else 2, 2)
        made.append(
            {
                **{"beam": beam, "n_best": beam, "groups": groups, "limit": chance.randint(1, 7)},
                **{"diversity_penalty": 0.0 if groups == 1 else chance.choice((0.2, 1.0, 5.0))},
                **{
                    "penalty_form": chance.choice(("hf", "gnmt")),
                    "length_penalty": chance.choice((-0.5, 0.0, 0.6, 1.5)),
                },
                **{"early_stopping": chance.choice((True, False, "never")), "ended_first": chance.random() < 0.3},
                **{"stop": chance.choice(((), ((3,),), ((4, 5), (1, 1, 6)), ((3,), (5, 4))))},
            }
        )
    return made


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_groups_stops_and_penalties_against_the_same_in_lists(static: bool) -> None:
    texts = [[1, 4], [3], [5, 5, 6]]
    for number, fields in enumerate(cases(150, seed=1)):
        script = Script(number, eos_bias=(number % 3) * 1.0)
        for prompt, found in zip(texts, search(script, texts, static=static, **fields), strict=True):
            close(found, by_hand(script, prompt, **fields))


@pytest.mark.parametrize("forbidden", [(), (3, 7), tuple(range(16, 0, -2))])
def test_a_gpu_leaves_forbidden_tokens_out_of_the_best(
    forbidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not filter the scores of the whole vocabulary for them: every published Marian forbids its padding."""
    search = BeamSearch(None, GenerateConfig(beam=3, logit_bias=dict.fromkeys(forbidden, -math.inf)), EOS)
    torch.manual_seed(0)
    logits, texts, past = torch.randn(2, 3, 40), torch.zeros(2, 3, 0, dtype=torch.int64), torch.randn(2, 3)
    logits[..., list(forbidden)] += 3
    whole = search._topk(logits, texts, past, None, 0)
    for one, other in zip(search._topk_by_parts(logits, past), whole, strict=True):
        torch.testing.assert_close(one, other)
    monkeypatch.setattr(search, "_topk", None)
    best = search._candidates(*(x.to("meta") for x in (logits, texts, past)), None, 0, 0)
    assert best.token.shape == whole[2].shape


def test_never_stops_too_early_where_short_texts_score_better() -> None:
    """Below 0 the penalty grows with the length, so the best that can still come is a text of today's length."""
    fields = {"beam": 3, "n_best": 3, "length_penalty": -0.5, "early_stopping": "never"}
    for seed in range(120):
        script = Script(seed, eos_bias=2.0)
        close(search(script, [[1]], 7, **fields)[0], by_hand(script, [1], 7, **fields))


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_the_vocabulary_misses_nothing(seed: int) -> None:
    script = Script(seed, eos_bias=1.0)
    (found,) = search(script, [[1]], 2, beam=7, n_best=7, early_stopping="never", length_penalty=0.7)
    every = [(EOS,), *(pair for pair in itertools.product(range(7), repeat=2) if pair[0] != EOS)]
    scored = []
    for text in every:
        total = sum(script.log_probs((1, *text[:i]))[token] for i, token in enumerate(text))
        scored.append((text, total / len(text) ** 0.7))
    close(found, sorted(scored, key=lambda entry: -entry[1])[:7])


class _Told(Script):
    """Next tokens with given chances after given texts; otherwise 4 and 5 are equally likely."""

    def __init__(self, chances: dict[tuple[int, ...], dict[int, float]]) -> None:
        super().__init__(0)
        self.chances = chances

    def logits(self, text: tuple[int, ...]) -> list[float]:
        chances = self.chances.get(text[1:], {4: 0.5, 5: 0.5})
        rest = (1 - sum(chances.values())) / (self.n_tokens - len(chances))
        return torch.tensor([chances.get(token, rest) for token in range(self.n_tokens)]).clamp(min=1e-9).log().tolist()


def test_a_finished_text_is_not_pushed_out_by_unfinished_ones() -> None:
    """[3, EOS] has 0.25 at step 2, as second best; at step 3 two others have 0.3 each, and 0.15 from step 4 on."""
    script = _Told({(): {4: 0.6, 3: 0.4}, (4,): {4: 1.0}, (3,): {EOS: 0.625, 5: 0.375}})
    (found,) = search(script, [[1]], 8, beam=2, n_best=2, length_penalty=0.0, early_stopping="never")
    assert found[0].tokens == [3, EOS]
    assert found[0].score == pytest.approx(torch.tensor(0.25).log().item(), abs=1e-4)


def test_texts_that_ended_may_be_put_before_those_cut_off() -> None:
    n_changed = 0
    for seed in range(40):
        script = Script(seed, eos_bias=-0.5)
        fields = {"beam": 4, "n_best": 4, "early_stopping": "never"}
        (plain,), (ended,) = search(script, [[1]], 5, **fields), search(script, [[1]], 5, ended_first=True, **fields)
        by_itself = [text.tokens[-1] == EOS for text in ended]
        assert by_itself == sorted(by_itself, reverse=True)
        for kind in (True, False):
            scores = [text.score for text, own in zip(ended, by_itself, strict=True) if own is kind]
            assert scores == sorted(scores, reverse=True)
        assert sum(by_itself) >= sum(text.tokens[-1] == EOS for text in plain)
        n_changed += [text.tokens for text in plain] != [text.tokens for text in ended]
    assert n_changed >= 10


def test_the_papers_penalty() -> None:
    script = Script(3, eos_bias=1.5)
    (found,) = search(script, [[1]], 6, n_best=4, **PAPER)
    for text in found:
        log_prob = sum(script.log_probs((1, *text.tokens[:i]))[token] for i, token in enumerate(text.tokens))
        assert text.score == pytest.approx(log_prob / ((5 + len(text.tokens)) / 6) ** 0.6, abs=1e-4)
    assert [text.score for text in found] == sorted((text.score for text in found), reverse=True)


def test_groups_begin_differently() -> None:
    script = Script(1)
    fields = {"beam": 4, "n_best": 4, "groups": 4}
    (far,) = search(script, [[1]], 4, diversity_penalty=100.0, **fields)
    assert len({text.tokens[0] for text in far}) == 4
    (near,) = search(script, [[1]], 4, diversity_penalty=1e-6, **fields)
    assert len({tuple(text.tokens) for text in near}) == 1  # four times greedy


def test_limits_are_each_rows_own() -> None:
    texts, limits = [[1, 4], [3], [5, 5, 6]], [6, 2, 4]
    for number, fields in enumerate(cases(15, seed=2)):
        script = Script(number)
        config = GenerateConfig(max_new_tokens=6, **{name: x for name, x in fields.items() if name != "limit"})
        for static in (False, True):
            found = BeamSearch(ScriptEngine(script, static), config, EOS).run(prompts(texts, limits))
            for text, limit, got in zip(texts, limits, found, strict=True):
                close(got, by_hand(script, text, **{**fields, "limit": limit}))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_steps_hold_all_that_the_search_had(groups: int) -> None:
    """Every text is found again in the steps, with its score; so is what was given up, of which there is more."""
    model, texts = translator(), [[5, 9, 4], [7]]
    apart = 0.5 if groups > 1 else 0.0
    config = GenerateConfig(beam=4, n_best=4, max_new_tokens=6, groups=groups, diversity_penalty=apart)
    made = generate(model, texts, config)
    assert made.steps is not None
    for prompt, hypotheses in enumerate(made.hypotheses):
        reached: dict[tuple[int, ...], float] = {}
        beams: dict[int, tuple[int, ...]] = {}
        for step in made.steps:
            kept = list(step.of(prompt))
            texts_now = [(*beams.get(parent, ()), token) for _, parent, token, _ in kept]
            reached |= {text: score for text, (*_, score) in zip(texts_now, kept, strict=True)}
            beams = {beam: text for text, (beam, *_) in zip(texts_now, kept, strict=True) if beam is not None}
        for text in hypotheses:
            whole = reached[tuple(text.tokens)]
            assert whole / config.length_penalty_at(len(text.tokens)) == pytest.approx(text.score, abs=1e-5)
        ways = {tuple(text.tokens[:n]) for text in hypotheses for n in range(1, len(text.tokens) + 1)}
        assert ways < set(reached)
