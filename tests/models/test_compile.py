"""Every preset traces into one graph, forward and backward, and computes there what it computes outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from regard.attention import record
from regard.config import ModelConfig
from regard.models import Model
from regard.presets import PRESETS

from .small import inputs_of, small, small_config
from .tiny_recurrent import LSTM_TRACES, NO_LSTM_TRACE

TRAINING_ONLY = {
    **dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "classifier_dropout"), 0.0),
    "init_std": None,
}


def layers_for(name: str) -> int:
    """One layer shows all there is to trace, except where layers take turns."""
    return 2 if PRESETS[name].get("shifted_windows") else 1


def distinct_presets() -> list[str]:
    """Presets that are one graph at this size (GPT-2 and its larger sisters) are traced once, as the first."""
    first: dict[ModelConfig, str] = {}
    for name in PRESETS:
        first.setdefault(small_config(name, n_layers=layers_for(name)).with_(**TRAINING_ONLY), name)
    return list(first.values())


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def short(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fewer target tokens: a recurrent decoder is one graph as long as its text."""
    return (*inputs[:-1], inputs[-1][:, :4]) if len(inputs) == 2 else inputs


def gradients(model: Model, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(name: str, backend: str, tolerance: float) -> None:
    model = small(name, n_layers=layers_for(name))
    inputs = short(inputs_of(model.config))
    plain = model(*inputs)
    wanted = gradients(model, plain)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(compiled, plain, atol=tolerance, rtol=tolerance)
    found = gradients(model, compiled)
    assert set(found) == set(wanted)
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("name", distinct_presets())
def test_one_graph(name: str) -> None:
    if "lstm" in name and not LSTM_TRACES:
        pytest.skip(NO_LSTM_TRACE)
    check(name, "aot_eager", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer-tiny", "llama-1b", "vit-tiny"])
def test_inductor(name: str) -> None:
    check(name, "inductor", 1e-4)


def test_training_with_dropout_everywhere_is_one_graph() -> None:
    rates = {"dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    model = small("gpt2", n_layers=1, **rates).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(model.config)
    one, two = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(one, two)
    assert all(grad.isfinite().all() for grad in gradients(model, one).values())


@torch.no_grad()
def test_one_graph_serves_every_step_of_decoding() -> None:
    """A static cache has the same shapes at every step: compiled once, for a window's ring as well."""
    model = small("mistral-7b", n_layers=2, window_layers=(1,))
    (tokens,) = inputs_of(model.config)
    whole = model(tokens)
    cache = model.new_cache(3, 12)
    parts = [model(tokens[:, :3], cache=cache)]
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    parts += [step(tokens[:, i : i + 1], cache=cache) for i in range(3, 9)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


@torch.no_grad()
def test_padding_and_another_length_are_one_graph_each() -> None:
    model = small("bert-base-masked", n_layers=1)
    (tokens,) = inputs_of(model.config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (9, 6):
        keep = torch.arange(length) < torch.tensor([length, 4, 1])[:, None]
        plain = model(tokens[:, :length], padding_mask=keep)
        torch.testing.assert_close(
            compiled(tokens[:, :length], padding_mask=keep)[keep], plain[keep], atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_a_compiled_model_can_be_looked_into() -> None:
    model = small("gpt2", n_layers=1)
    (tokens,) = inputs_of(model.config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(tokens)
    with record(compiled) as seen:
        compiled(tokens)
    with record(model) as plain:
        model(tokens)
    place = "decoder.blocks.0.attention"
    torch.testing.assert_close(seen.map(place).dense(), plain.map(place).dense(), atol=1e-6, rtol=1e-5)
