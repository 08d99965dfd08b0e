"""Differential attention against the paper's formulas, head by head, and what the lens makes of its maps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.attention import MultiHeadAttention
from regard.attention.differential import Differential
from regard.config import ModelConfig, TrainConfig
from regard.lens.ablation import ablate
from regard.lens.circuit import find_circuit
from regard.models import Decoder

from .small import small, small_config

TEXT = [5, 9, 3, 17, 4, 22, 8]


def model_of(**fields: Any) -> Decoder:
    model = small("gpt2", mixer="differential", **fields)
    assert isinstance(model, Decoder)
    return model


def mechanism_of(model: Decoder, layer: int) -> Differential:
    found = model.decoder.blocks[layer].attention.mechanism
    assert isinstance(found, Differential)
    return found


def second_factor(model: Decoder, layer: int) -> float:
    """λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init of the layer, counted from 1 in the paper."""
    own = mechanism_of(model, layer)
    one, two = (float((q * k).sum()) for q, k in ((own.lambda_q1, own.lambda_k1), (own.lambda_q2, own.lambda_k2)))
    return math.exp(one) - math.exp(two) + 0.8 - 0.6 * math.exp(-0.3 * ((layer + 1) - 1))


def attention_by_the_paper(attention: MultiHeadAttention, x: Tensor, layer: int, factor: float) -> Tensor:
    """x (T, M) → (T, M): eq. 1 to 3 of Ye et al. 2024 for each head, with matrices cut out of the stored ones."""
    d, n_kv, length = attention.d_head, attention.n_kv_heads, len(x)
    q, k, v = F.linear(x, attention.w_qkv.weight, attention.w_qkv.bias).split(
        [attention.n_heads * d, n_kv * d, n_kv * d], -1
    )
    shared = attention.n_heads // n_kv
    first_factor = 0.8 - 0.6 * math.exp(-0.3 * layer)
    future = torch.ones(length, length).triu(1).bool()
    heads = []
    for head in range(attention.n_heads // 2):
        maps = []
        for number in (2 * head, 2 * head + 1):
            key = number // shared
            scores = q[:, number * d : (number + 1) * d] @ k[:, key * d : (key + 1) * d].T / math.sqrt(d)
            maps.append(scores.masked_fill(future, -math.inf).softmax(-1))
        own = head // shared
        values = v[:, own * 2 * d : (own + 1) * 2 * d]  # twice as wide
        mixed = (maps[0] - factor * maps[1]) @ values
        norm = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        heads.append((1 - first_factor) * norm * attention.mechanism.norm.weight)  # type: ignore[union-attr]
    return attention.w_o(torch.cat(heads, -1))


@pytest.mark.parametrize("n_kv_heads", [None, 2, 4])
@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sdpa"])
@torch.no_grad()
def test_a_layer_is_the_formula(n_kv_heads: int | None, backend: str) -> None:
    model = model_of(n_heads=8, n_kv_heads=n_kv_heads, attention_backend=backend).double()
    for layer, block in enumerate(model.decoder.blocks):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        wanted = attention_by_the_paper(block.attention, x, layer, second_factor(model, layer))
        torch.testing.assert_close(block.attention(x[None], mask=regard.attention.masks.causal())[0], wanted)


def test_every_parameter_has_a_gradient() -> None:
    model = model_of()
    tokens = torch.tensor([TEXT])
    F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_the_sizes_are_those_of_plain_attention() -> None:
    """Four vectors for λ and a norm's weight more in each layer; the cache is the same."""
    plain, own = small("gpt2"), model_of()
    assert own.n_parameters == plain.n_parameters + 2 * (4 * 6 + 2 * 6)
    costs = [regard.cost(model.config, batch=1, length=16) for model in (plain, own)]
    assert costs[0].kv_cache.total == costs[1].kv_cache.total
    pairs = [cost.flops_forward.parts["decoder attention"] for cost in costs]
    assert pairs[1] == 1.5 * pairs[0], "q·k as before, weight · v of twice the width"


def test_what_training_keeps_is_foretold() -> None:
    """Numbers that autograd saves in attention, more than for plain attention, as `regard cost` counts them."""
    kept = {mixer: saved_bytes(mixer) for mixer in ("dot", "differential")}
    foretold = {}
    for mixer in kept:
        config = small_config("gpt2", mixer=mixer, n_layers=1, d_model=64, max_len=64)
        cost = regard.cost(config, batch=2, length=64, train=TrainConfig(precision="fp32"))
        foretold[mixer] = cost.activations.parts["decoder attention"]
    assert foretold["differential"] - foretold["dot"] == pytest.approx(kept["differential"] - kept["dot"], rel=0.02)


def saved_bytes(mixer: str) -> int:
    model = small("gpt2", mixer=mixer, n_layers=1, d_model=64, max_len=64)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        x = torch.randn(2, 64, 64, requires_grad=True)
        out = model.decoder.blocks[0].attention(x, mask=regard.attention.masks.causal())
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() for place, x in saved.items() if place not in own)


@torch.no_grad()
def test_both_maps_and_their_difference_are_seen() -> None:
    model = model_of()
    look = regard.look(model, TEXT)
    assert look.heads() == 4
    for layer in range(2):
        for head in range(2):
            first, second = (look.weights(layer=layer, head=2 * head + map_) for map_ in (0, 1))
            wanted = first - second_factor(model, layer) * second
            torch.testing.assert_close(look.combined_weights(layer=layer, head=head), wanted, atol=1e-6, rtol=1e-5)
            part = look.combined_weights(layer=layer, head=head, rows=[4, 2], cols=slice(1, 3))
            torch.testing.assert_close(part, wanted[[4, 2], 1:3], atol=1e-6, rtol=1e-5)
    assert float(look.combined_weights(layer=0, head=0).min()) < 0, "a difference is no share"
    with pytest.raises(ValueError, match=r"head=2: this model has 2 heads, 0 … 1"):
        look.combined_weights(head=2)
    plain = regard.look(small("gpt2"), TEXT)
    torch.testing.assert_close(plain.combined_weights(layer=0, head=3), plain.weights(layer=0, head=3))


@torch.no_grad()
def test_a_map_can_be_taken_out() -> None:
    """Without its second maps a layer is plain attention with wide values, normalised."""
    model = model_of(n_layers=1)
    tokens = torch.tensor([TEXT])
    with ablate(model, [("self", 0, 1), ("self", 0, 3)]):
        without = model(tokens)
    own = mechanism_of(model, 0)
    own.lambda_q1.zero_()  # exp(0) − exp(λ_q2 · λ_k2) + 0.2 = 0
    own.lambda_k2.copy_(own.lambda_q2 / own.lambda_q2.square().sum() * math.log(1.2))
    torch.testing.assert_close(model(tokens), without, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_single_maps_write_is_refused_and_the_whole_adds_up() -> None:
    model = model_of()
    record = regard.capture(model, TEXT)
    with pytest.raises(ValueError, match="mechanism 'differential' changes the heads' sums before W_o"):
        record.head_results(layer=0)
    found = record.logit_attribution()
    assert found.logit == pytest.approx(float(model(torch.tensor([TEXT]))[0, -1].max()), abs=1e-4)
    total = sum(float(value) for _, value in found.writers())
    assert total == pytest.approx(found.logit, abs=1e-4)
    with pytest.raises(ValueError, match="circuits need a pre-norm model"):
        find_circuit(model, [TEXT], [TEXT[::-1]], lambda logits: logits[:, -1, 3])


@pytest.mark.parametrize("name", ["n_heads", "n_kv_heads"])
def test_heads_come_in_pairs(name: str) -> None:
    sizes = {"d_model": 24, "n_heads": 6, "vocab_size": 31, name: 3}
    with pytest.raises(
        ValueError, match=f"mixer='differential' has 2 maps per head, so {name}=3 must be divisible by it"
    ):
        ModelConfig(mixer="differential", **sizes)
