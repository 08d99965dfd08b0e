"""Each filter against transformers' own, on the same logits: random, tied, extreme, half forbidden."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regard.generation import GenerateConfig, sampling

VOCAB, EOS = 29, 2


def logits(kind: str, seed: int = 0, n_rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, VOCAB, generator=generator) * 3
    if kind == "tied":
        return x.round()
    if kind == "equal":
        return torch.zeros(n_rows, VOCAB)
    if kind == "extreme":
        return x * 1e4
    if kind == "tiny":
        return x * 1e-7
    if kind == "forbidden":
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.6, -math.inf)
    return x


def texts(seed: int, length: int, n_tokens: int = VOCAB, n_rows: int = 5) -> Tensor:
    return torch.randint(n_tokens, (n_rows, length), generator=torch.Generator().manual_seed(seed))


Filter = Callable[[Tensor, Tensor], Tensor]
PAIRS: dict[str, tuple[LogitsProcessor, Filter]] = {
    **{
        f"temperature {t}": (
            TemperatureLogitsWarper(t),
            lambda x, text, t=t: sampling.filter_logits(x, text, 0, GenerateConfig(temperature=t), None),
        )
        for t in (0.3, 2.0)
    },
    **{f"top_k {k}": (TopKLogitsWarper(k), lambda x, _, k=k: sampling.top_k(x, k)) for k in (1, 4, 29, 100)},
    **{
        f"top_p {p}": (TopPLogitsWarper(p), lambda x, _, p=p: sampling.top_p(x, p))
        for p in (1e-9, 0.01, 0.5, 0.9, 0.999)
    },
    **{f"min_p {p}": (MinPLogitsWarper(p), lambda x, _, p=p: sampling.min_p(x, p)) for p in (0.0, 0.05, 0.5, 1.0)},
    **{
        f"repetition_penalty {p}": (
            RepetitionPenaltyLogitsProcessor(p),
            lambda x, text, p=p: sampling.repetition_penalty(x, text, p),
        )
        for p in (0.5, 1.2, 3.0)
    },
    **{
        f"no_repeat_ngram {n}": (
            NoRepeatNGramLogitsProcessor(n),
            lambda x, text, n=n: sampling.no_repeat_ngram(x, text, n),
        )
        for n in (1, 2, 3, 9)
    },
    "logit_bias": (
        SequenceBiasLogitsProcessor({(3,): 2.5, (7,): -1.0, (8,): -math.inf}),
        lambda x, _: x + sampling.bias_vector({3: 2.5, 7: -1.0, 8: -math.inf}, x),
    ),
    "forbidden": (MinNewTokensLengthLogitsProcessor(0, 99, EOS), lambda x, _: sampling.forbid_token(x, EOS)),
    "forced": (PrefixConstrainedLogitsProcessor(lambda *_: [11], 1), lambda x, _: sampling.force_token(x, 11)),
}


@pytest.mark.parametrize("kind", ["random", "tied", "equal", "extreme", "tiny", "forbidden"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_filter_is_theirs(name: str, kind: str) -> None:
    theirs, ours = PAIRS[name]
    for seed in range(4):
        x, text = logits(kind, seed), texts(seed, 12, n_tokens=6)
        before = x.clone()
        got = ours(x, text)
        assert torch.equal(x, before), "the scores that came in must stay as they were"
        assert torch.equal(got, theirs(text, x.clone()))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5), length=st.integers(1, 14), n_tokens=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_ngrams_of_any_size(n: int, length: int, n_tokens: int, seed: int) -> None:
    x, text = logits("random", seed), texts(seed, length, n_tokens)
    assert torch.equal(sampling.no_repeat_ngram(x, text, n), NoRepeatNGramLogitsProcessor(n)(text, x))


@pytest.mark.parametrize("pad", [1, 4])
def test_padding_counts_for_nothing(pad: int) -> None:
    x, text = logits("random"), texts(3, 9, n_tokens=5)
    longer = torch.nn.functional.pad(text, (pad, 0), value=-1)
    assert torch.equal(sampling.repetition_penalty(x, longer, 1.7), sampling.repetition_penalty(x, text, 1.7))
    for n in (1, 2, 3):
        assert torch.equal(sampling.no_repeat_ngram(x, longer, n), sampling.no_repeat_ngram(x, text, n))
    empty = torch.full((5, 4), -1)
    assert torch.equal(sampling.no_repeat_ngram(x, empty, 2), x)
    assert torch.equal(sampling.repetition_penalty(x, empty, 1.7), x)


def test_all_together_in_their_order() -> None:
    config = GenerateConfig(
        **{"logit_bias": {3: 2.0, 5: -1.0}, "repetition_penalty": 1.4, "no_repeat_ngram": 2, "min_new_tokens": 4},
        **{"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    )
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(3,): 2.0, (5,): -1.0}),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoRepeatNGramLogitsProcessor(2),
            MinNewTokensLengthLogitsProcessor(6, 4, EOS),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
        ]
    )
    for step in (0, 3, 4, 6):
        x, text = logits("random", step), texts(step, 6 + step, n_tokens=6)
        assert torch.equal(sampling.filter_logits(x, text, step, config, EOS), processors(text, x))


def test_a_prefix_is_forced_for_as_long_as_it_is() -> None:
    config = GenerateConfig(prefix=(4, 9), logit_bias={9: -math.inf})
    x, text = logits("random"), texts(0, 6)
    first, second, third = (sampling.filter_logits(x, text, step, config, EOS) for step in range(3))
    assert first.argmax(-1).eq(4).all()
    assert torch.equal(first[:, 4], x[:, 4])
    assert second.argmax(-1).eq(9).all()  # though it is forbidden
    assert second[:, 9].eq(0).all()
    assert torch.equal(first.isfinite().sum(-1), torch.ones(5, dtype=torch.int64))
    assert third[:, 9].isneginf().all()
    assert third.isfinite().sum() == 5 * (VOCAB - 1)


def test_where_everything_is_forbidden_the_text_ends() -> None:
    config = GenerateConfig(no_repeat_ngram=1)
    x = logits("random", n_rows=2)
    text = torch.stack([torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.int64)])
    got = sampling.filter_logits(x, text, 0, config, EOS)
    assert got[0].argmax() == EOS
    assert got[0].isfinite().sum() == 1
    assert got[1].isfinite().sum() == VOCAB - 1
    with pytest.raises(ValueError, match="no eos_id to end with"):
        sampling.filter_logits(x, text, 0, config, None)


# ---- the draw


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    scores = torch.tensor([[0.0, 1.0, -math.inf, 2.0, -1.0, -math.inf]])
    n = 200_000
    chance = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = sampling.draw_tokens(scores.expand(n, -1), chance)
    share = torch.bincount(drawn, minlength=6) / n
    torch.testing.assert_close(share, scores[0].softmax(-1), atol=0.004, rtol=0)


@pytest.mark.parametrize("scores", [[[-math.inf, 3.0, -math.inf]], [[1e4, -1e4, 1e4]], [[0.0, -math.inf, -math.inf]]])
def test_nothing_impossible_is_drawn(scores: list[list[float]]) -> None:
    x = torch.tensor(scores)
    for chance in (0.0, 0.5, 1 - 2**-53):
        token = int(sampling.draw_tokens(x, torch.tensor([chance], dtype=torch.float64)))
        assert x.softmax(-1)[0, token] > 0


def test_a_device_without_float64_draws_a_token_for_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "widest_float", lambda device: torch.float32)
    scores = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    scores[:, -1] = -math.inf
    tokens = sampling.draw_tokens(scores, torch.full((200,), 1 - 2**-53, dtype=torch.float64))
    assert int(tokens.max()) < 49


def test_what_is_drawn_from_nan_is_a_token() -> None:
    """Any: the number after the last would end the texts of the whole batch, and on a GPU the process."""
    tokens = sampling.draw_tokens(torch.full((2, 9), math.nan), torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 9


def test_numbers_to_draw_with_depend_on_seed_and_copy_alone() -> None:
    """Nor on how many are needed: a limit far above the model's length costs nothing."""
    config, limit = GenerateConfig(sample=True, seed=5, max_new_tokens=10**12), torch.tensor([40])
    many, alone = sampling.uniform_draws(config, limit.repeat(3), 4), sampling.uniform_draws(config, limit, 2)
    assert torch.equal(many[4:6], alone)
    assert torch.equal(alone[:, :7], sampling.uniform_draws(config, torch.tensor([7]), 2))
    assert len({tuple(row.tolist()) for row in many[:4]}) == 4
    assert not torch.equal(alone, sampling.uniform_draws(config.with_(seed=6), limit, 2))
    torch.manual_seed(1)
    first = sampling.uniform_draws(config.with_(seed=None), limit.repeat(2), 1)
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(1)
    assert torch.equal(first, sampling.uniform_draws(config.with_(seed=None), limit.repeat(2), 1))
    for seed in (-3, 2**64 + 1):
        assert sampling.uniform_draws(config.with_(seed=seed), limit, 1).shape == (1, 40)
