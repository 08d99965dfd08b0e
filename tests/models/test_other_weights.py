"""Attention whose weights are no plain softmax: against a loop, cached, compiled, looked at, priced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import MultiHeadAttention
from regard.attention.mechanisms import Sigmoid
from regard.config import ModelConfig
from regard.errors import UsageError
from regard.generation import generate
from regard.models import Decoder, Model

from .small import decode, inputs_of, small
from .test_compile import check

Weights = Callable[[MultiHeadAttention, Tensor, int], list[float]]


def with_sink(attention: MultiHeadAttention, scores: Tensor, head: int) -> list[float]:
    """exp(s_j) / (exp(sink) + Σ exp(s_j))"""
    assert attention.sinks is not None
    exponentials = [math.exp(s) for s in scores.tolist()]
    total = math.exp(float(attention.sinks.logits[head])) + sum(exponentials)
    return [x / total for x in exponentials]


def sigmoids(attention: MultiHeadAttention, scores: Tensor, head: int) -> list[float]:
    """1 / (1 + exp(-(s_j + b)))"""
    assert isinstance(attention.mechanism, Sigmoid)
    b = float(attention.mechanism.b[head])
    return [1 / (1 + math.exp(-(s + b))) for s in scores.tolist()]


def softmax(attention: MultiHeadAttention, scores: Tensor, head: int) -> list[float]:
    """exp(s_j) / Σ exp(s_j): each of the maps that are subtracted."""
    exponentials = [math.exp(s) for s in scores.tolist()]
    return [x / sum(exponentials) for x in exponentials]


CASES: dict[str, tuple[str, dict[str, Any], Weights]] = {
    "sinks": ("llama-1b", {"attention_sinks": True}, with_sink),
    "sinks in windows": ("mistral-7b", {"attention_sinks": True, "window_layers": (1,)}, with_sink),
    "sigmoid": ("llama-1b", {"mixer": "sigmoid"}, sigmoids),
    "differential": ("llama-1b", {"mixer": "differential"}, softmax),
}
ALL = pytest.mark.parametrize("name", CASES)


def model_of(name: str) -> Model:
    preset, fields, _ = CASES[name]
    return small(preset, **fields)


@ALL
@torch.no_grad()
def test_weights_are_the_formula(name: str) -> None:
    """Of the fused path, recomputed by the lens, against sums of numbers; the output is those weights' sum of v."""
    model, weigh = model_of(name), CASES[name][2]
    assert isinstance(model, Decoder)
    look = regard.look(model, [5, 9, 3, 17, 4, 22, 8])
    attention = model.decoder.blocks[0].attention
    with regard.attention.record(model) as seen:
        model(look.inputs[0])
    call = seen.attentions["decoder.blocks.0.attention"][0]
    assert call.k is not None
    assert call.v is not None
    assert call.output is not None
    shared = attention.n_heads // attention.n_kv_heads
    for head in range(attention.n_heads):
        found = look.weights(layer=0, head=head)
        keys, values = call.k[0, head // shared], call.v[0, head // shared]
        for i, q in enumerate(call.q[0, head]):
            wanted = weigh(attention, keys[: i + 1] @ q / math.sqrt(attention.d_head), head)
            torch.testing.assert_close(found[i, : i + 1], torch.tensor(wanted), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(torch.tensor(wanted) @ values[: i + 1], call.output[0, head, i])
            assert not found[i, i + 1 :].any()


@ALL
@torch.no_grad()
def test_token_by_token_is_the_whole_text(name: str) -> None:
    model = model_of(name).double()
    (tokens,) = inputs_of(model.config)
    for cache in (model.new_cache(), model.new_cache(3, 16)):
        torch.testing.assert_close(decode(model, (tokens,), cache), model(tokens))
    with regard.attention.record(model) as seen:
        decode(model, (tokens,), model.new_cache())
    with regard.attention.record(model) as whole:
        model(tokens)
    for place in whole.attentions:
        torch.testing.assert_close(seen.map(place).dense(), whole.map(place).dense())


@ALL
@torch.no_grad()
def test_texts_are_those_of_whole_calls(name: str) -> None:
    model, prompt = model_of(name), [5, 9, 3]
    for token in generate(model, prompt, max_new_tokens=6, min_new_tokens=6).tokens[0]:
        logits = model(torch.tensor([prompt]))[0, -1]
        logits[2] = -torch.inf  # the end
        assert token == int(logits.argmax())
        prompt = [*prompt, token]


@ALL
def test_it_compiles_to_one_graph_with_its_gradients(name: str) -> None:
    torch._dynamo.reset()
    check(model_of(name), "aot_eager", 1e-5)


@ALL
def test_its_cost_counts_every_parameter(name: str) -> None:
    model = model_of(name)
    cost = regard.cost(model.config, batch=1, length=8)
    assert cost.parameters.total == model.n_parameters
    assert cost.flops_forward.total > 0


def test_what_the_sink_takes_the_keys_lack() -> None:
    model = model_of("sinks")
    with torch.no_grad():
        look = regard.look(model, [5, 9, 3, 17, 4])
        seen = look.map(layer=1)
        torch.testing.assert_close(seen.sink_shares() + seen.dense().sum(-1), torch.ones(1, 4, 5))
        assert float(seen.sink_shares().min()) > 0.01
        sinks = model.decoder.blocks[1].attention.sinks.logits
        sinks.fill_(-1e4)  # a sink that takes nothing
        plain = small("llama-1b")
        plain.load_state_dict({n: p for n, p in model.state_dict().items() if "sinks" not in n})
        torch.testing.assert_close(seen.sink_shares(), look.map(layer=1).sink_shares())  # a look is a snapshot
        model.decoder.blocks[0].attention.sinks.logits.fill_(-1e4)
        (tokens,) = inputs_of(model.config)
        torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mixer": "linear"}, "mixer='linear'"),
        ({"mixer": "fourier", "architecture": "encoder", "head": "none"}, "mixer='fourier'"),
        ({"attention_backend": "triton"}, "attention_backend='triton'"),
        ({"architecture": "recurrent"}, "attention_sinks=True"),
    ],
)
def test_sinks_need_a_softmax(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, UsageError), match=named):
        ModelConfig(attention_sinks=True, **fields)


def test_sinks_are_one_for_each_head() -> None:
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match=r"sinks must be \(4,\) on cpu, one for each head of q; got \(2,\) on cpu"):
        regard.attend(q, q, q, sinks=torch.zeros(2))
