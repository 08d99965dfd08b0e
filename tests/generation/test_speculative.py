"""A draft decides how fast a text comes, never what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.small import DECODING, small, source_of
from regard.generation import DraftStatistics, GenerateConfig, generate, stream_tokens
from regard.models import Model

EOS = 2


def near(model: Model, noise: float, **fields: Any) -> Model:
    """The same model with its parameters moved a little: a draft that is often right."""
    made = type(model)(model.config.with_(**fields)).double().eval()
    made.load_state_dict(model.state_dict(), strict=not fields)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(noise * torch.randn(p.shape, generator=generator))
    return made


def same(model: Model, draft: Model, prompt: Any, draft_tokens: int = 4, **fields: Any) -> DraftStatistics:
    """Both ways are one text, in every respect."""
    alone = generate(model, prompt, **fields)
    helped = generate(model, prompt, draft=draft, draft_tokens=draft_tokens, **fields)
    assert helped.prompts == alone.prompts
    for one, other in zip(alone.hypotheses, helped.hypotheses, strict=True):
        assert [x.tokens for x in other] == [x.tokens for x in one]
        assert [(x.finish, x.n_ending) for x in other] == [(x.finish, x.n_ending) for x in one]
        assert [x.score for x in other] == pytest.approx([x.score for x in one], abs=1e-9)
    assert helped.drafted is not None
    assert alone.drafted is None
    assert 0 <= helped.drafted.accepted <= helped.drafted.proposed
    return helped.drafted


@pytest.fixture(scope="module")
def models() -> dict[float, Model]:
    model = small("gpt2").double()
    return {noise: near(model, noise) for noise in (0.0, 0.02, 0.2, 2.0)}


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(3, 30), min_size=1, max_size=23),
    noise=st.sampled_from([0.0, 0.02, 0.2, 2.0]),
    draft_tokens=st.integers(1, 9),
    max_new_tokens=st.integers(1, 30),
    eos_bias=st.sampled_from([-50.0, 0.0, 1.0, 3.0]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.just(1.3),
            "no_repeat_ngram": st.integers(1, 3),
            "prefix": st.lists(st.integers(3, 30), max_size=6),
            "stop": st.lists(st.lists(st.integers(3, 30), min_size=1, max_size=2), max_size=3),
            "min_new_tokens": st.just(1),
        },
    ),
)
@example(prompt=[5] * 23, noise=0.0, draft_tokens=9, max_new_tokens=30, eos_bias=0.0, fields={})  # room for one token
@example(prompt=[5] * 22, noise=0.0, draft_tokens=9, max_new_tokens=30, eos_bias=-50.0, fields={})
def test_the_text_is_the_one_without_a_draft(
    models: dict[float, Model],
    prompt: list[int],
    noise: float,
    draft_tokens: int,
    max_new_tokens: int,
    eos_bias: float,
    fields: dict[str, Any],
) -> None:
    bias = {EOS: eos_bias}
    same(models[0.0], models[noise], prompt, draft_tokens, max_new_tokens=max_new_tokens, logit_bias=bias, **fields)


@pytest.mark.parametrize("name", DECODING)
def test_every_kind_of_model(name: str) -> None:
    model = small(name).double()
    prompt = [[5, 6, 7], [8]] if model.config.architecture == "decoder" else source_of(model.config, batch=2)
    never = {EOS: -1e9}
    for noise in (0.0, 0.05):
        drafted = same(model, near(model, noise), prompt, max_new_tokens=14, logit_bias=never)
        if noise == 0:
            assert drafted.accepted == drafted.proposed > 0
            assert drafted.share == 1
            assert drafted.passes < 2 * 14


def test_a_draft_that_is_always_right_saves_passes(models: dict[float, Model]) -> None:
    model = models[0.0]
    drafted = same(model, model, [5], 4, max_new_tokens=16, logit_bias={EOS: -1e9})
    assert drafted.passes == 4  # 1, then 5 + 5 + 5: of four guesses each, all right
    assert (drafted.proposed, drafted.accepted) == (12, 12)
    wrong = same(model, models[2.0], [5], 4, max_new_tokens=16, logit_bias={EOS: -1e9})
    assert wrong.share < 0.5
    assert wrong.passes > 4


def test_a_shallow_draft_with_a_short_memory(models: dict[float, Model]) -> None:
    """Once the text is longer than the draft can read, the model goes on alone."""
    torch.manual_seed(4)
    draft = small("gpt2", n_layers=1, max_len=9).double()
    for prompt in ([5, 6], [7] * 8, [7] * 9, [7] * 20):
        drafted = same(models[0.0], draft, prompt, 3, max_new_tokens=20, logit_bias={EOS: -1e9})
        assert (drafted.proposed == 0) == (len(prompt) >= 9)


def test_several_prompts_and_a_stream(models: dict[float, Model]) -> None:
    model, draft = models[0.0], models[0.02]
    prompts = [[5, 6, 7], [8], [9, 10]]
    same(model, draft, prompts, max_new_tokens=12)
    told = generate(model, prompts[0], max_new_tokens=12).best[0].tokens
    assert list(stream_tokens(model, prompts[0], max_new_tokens=12, draft=draft)) == told


def test_both_models_are_left_as_they_were(models: dict[float, Model]) -> None:
    model, draft = near(models[0.0], 0.0).train(), near(models[0.0], 0.02).train()
    drawn = generate(model, [5], max_new_tokens=8, draft=draft)
    assert model.training
    assert draft.training
    assert drawn.tokens == generate(models[0.0], [5], max_new_tokens=8).tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beam": 2}, "draft needs greedy search with one text per prompt, got beam=2"),
        ({"temperature": 0.5}, "draft needs greedy search with one text per prompt, got sample=True"),
        ({"cache": "static"}, "draft needs cache='growing' to remove wrong guesses, but cache='static'"),
        ({"draft_tokens": 0}, "draft_tokens=0 must be at least 1"),
    ],
)
def test_what_a_draft_does_not_go_with(models: dict[float, Model], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        generate(models[0.0], [5], draft=models[0.02], **fields)


@pytest.mark.parametrize(
    ("name", "draft", "said"),
    [
        ("gpt2", small("gpt2", vocab_size=30), "the draft has vocab_size=30, but the model has 31"),
        ("gpt2", small("gpt2", eos_id=4), "the draft has eos_id=4, but the model has 2"),
        ("gpt2", small("transformer-base"), "the draft has architecture='encoder-decoder', but the model 'decoder'"),
        ("transformer-base", small("captioner"), "the draft has source='image', but the model has 'text'"),
        ("transformer-base", small("transformer-base", max_len=12), "the draft reads max_len=12 tokens, but the mod"),
        ("gpt2", small("gpt2", mixer="mamba2"), "draft does not work with a state-space model"),
    ],
)
def test_drafts_that_cannot_guess(name: str, draft: Model, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        generate(small(name), [5], GenerateConfig(), draft=draft)


def test_a_recurrent_model_goes_back_only_so_far() -> None:
    model = small("luong-lstm").double()
    same(model, near(model, 0.5), [5, 6], 16, max_new_tokens=20)
    with pytest.raises(ValueError, match="draft_tokens=17 is more than the 16 past states"):
        generate(model, [5], draft=model, draft_tokens=17)


def test_shares_add_up() -> None:
    assert DraftStatistics(4, 1, 2) + DraftStatistics(4, 3, 1) == DraftStatistics(8, 4, 3)
    assert (DraftStatistics(8, 4).share, DraftStatistics().share) == (0.5, 0.0)
