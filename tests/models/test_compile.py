"""Every choice of a preset traces into one graph, forward and backward, and computes there what it computes outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from regard.attention import record
from regard.config import ModelConfig
from regard.models import Model
from regard.presets import PRESETS

from .small import inputs_of, small, small_config

# Presets, some with a field of another preset, that together have every choice any preset makes.
TRACED: dict[str, dict[str, Any]] = {
    "transformer-tiny": {},
    "mistral-7b": {},
    "bert-base-masked": {},
    "sentiment": {},
    "t5-small": {"activation": "geglu_tanh", "d_head": 8},
    "swin-tiny": {"n_layers": 2, "pooler": "tanh"},  # layers take turns
    "captioner-regions": {"activation": "gelu_tanh", "head": "none"},
}


def traced_config(name: str) -> ModelConfig:
    """One layer shows all there is to trace, except where layers differ."""
    return small_config(name, **{"n_layers": 1, **TRACED.get(name, {})})


def choices(config: ModelConfig) -> set[tuple[str, Any]]:
    """What a config chooses; of numbers, whether there is one."""
    fields = config.model_dump(exclude={"dropout", "embedding_dropout", "attention_dropout", "init_std"})
    return {
        (field, value if isinstance(value, str | bool | None) else "a number")
        for field, value in fields.items()
        if not isinstance(value, dict | list | tuple)
    }


def test_every_choice_of_a_preset_is_traced() -> None:
    """Those of recurrent presets in test_recurrent."""
    traced = set().union(*(choices(traced_config(name)) for name in TRACED))
    for name, fields in PRESETS.items():
        if fields["architecture"] != "recurrent":
            assert choices(small_config(name, n_layers=1)) <= traced, name


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model: Model, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: Model, backend: str, tolerance: float) -> None:
    inputs = inputs_of(model.config)
    plain = model(*inputs)
    wanted = gradients(model, plain)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(compiled, plain, atol=tolerance, rtol=tolerance)
    found = gradients(model, compiled)
    assert set(found) == set(wanted)
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("name", TRACED)
def test_one_graph(name: str) -> None:
    check(small(name, **{"n_layers": 1, **TRACED[name]}), "aot_eager", 1e-5)


@pytest.mark.slow
def test_inductor() -> None:
    """An encoder of images with the layers of Llama. tests/training trains a decoder so compiled, and tests/export
    compares an encoder-decoder."""
    llama = {"norm": "rms", "activation": "swiglu", "n_kv_heads": 2, "qkv_bias": False, "out_bias": False}
    check(small("vit-tiny", n_layers=1, **llama), "inductor", 1e-4)


def test_training_with_dropout_everywhere_is_one_graph() -> None:
    rates = {"dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    model = small("gpt2", n_layers=1, **rates).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(model.config)
    one, two = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(one, two)
    assert all(grad.isfinite().all() for grad in gradients(model, one).values())


@torch.no_grad()
def test_the_table_of_backends_is_not_compared_before_every_call() -> None:
    model = small("gpt2", n_layers=1)
    guards = torch._dynamo.explain(model)(*inputs_of(model.config)).out_guards
    assert 0 < len(guards) < 1000
    assert not [guard.name for guard in guards if "CAPABILITIES" in guard.name]


@torch.no_grad()
def test_one_graph_serves_every_step_of_decoding() -> None:
    """A static cache has the same shapes at every step: compiled once, for a window's ring as well."""
    model = small("mistral-7b", n_layers=2, window_layers=(1,))
    (tokens,) = inputs_of(model.config)
    whole = model(tokens)
    cache = model.new_cache(3, 12)
    parts = [model(tokens[:, :3], cache=cache)]
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    parts += [step(tokens[:, i : i + 1], cache=cache) for i in range(3, 9)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


@torch.no_grad()
def test_padding_and_another_length_are_one_graph_each() -> None:
    model = small("bert-base-masked", n_layers=1)
    (tokens,) = inputs_of(model.config)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
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
