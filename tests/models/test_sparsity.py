"""Strided and BigBird models: every layer looks where the pattern says, nowhere else, and its cost is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.attention import masks, record
from regard.config import ModelConfig
from regard.config.mixers import keys_per_query
from regard.generation import generate
from regard.hub.config_diff import behaviour
from regard.models import build
from regard.models.components import layer_mask

from .small import SIZES, inputs_of, shaken, target_of

PATTERNS: dict[str, dict[str, Any]] = {
    "strided": {"sparsity": "strided", "sparsity_size": 3},
    "bigbird": {"sparsity": "bigbird", "sparsity_size": 2, "sparsity_random": 20.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "encoder": {"architecture": "encoder", "head": "masked-lm"},
    "decoder": {"architecture": "decoder"},
    "encoder-decoder": {"architecture": "encoder-decoder"},
}


def by_hand(name: str, i: int, j: int) -> bool | None:
    """Whether a query at i sees a key at j, as the papers have it; None where chance decides."""
    if name == "strided":  # Child et al. 2019, eq. 4, and the same after the query
        return abs(i - j) < 3 or (i - j) % 3 == 0
    return True if min(i, j) < 2 or abs(i // 2 - j // 2) <= 1 else None  # Zaheer et al. 2020, figure 1


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_weights_are_where_the_pattern_is(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = shaken(build(ModelConfig(**SIZES | KINDS[kind] | PATTERNS[name]))).eval()
    inputs = inputs_of(model.config)
    with record(model) as seen:
        model(*inputs)
    chances = []
    for place in (x for x in seen.attentions if x.endswith(".attention")):
        weights = seen.map(place).tile()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
        hidden = place.startswith("decoder")
        for i in range(weights.shape[2]):
            for j in range(weights.shape[3]):
                sees = bool((weights[:, :, i, j] > 0).all())
                assert sees or bool((weights[:, :, i, j] == 0).all())
                wanted = by_hand(name, i, j) if j <= i or not hidden else False
                if wanted is None:
                    chances.append(sees)
                else:
                    assert sees == wanted, (place, i, j)
    assert (name == "bigbird") == bool(chances)
    if chances:
        assert 0 < sum(chances) < len(chances), "some blocks are open by chance, others are not"


def test_every_layer_draws_its_own_blocks() -> None:
    config = ModelConfig(**SIZES | KINDS["encoder"] | PATTERNS["bigbird"])
    drawn = [layer_mask(config, layer, False, False) for layer in range(2)]
    one, two = (mask.dense(64) for mask in drawn if mask is not None)
    assert not torch.equal(one, two)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["growing", "static", "static-bf16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_written_is_what_the_whole_text_says(name: str, cache: Any) -> None:
    torch.manual_seed(0)
    model = shaken(build(ModelConfig(**SIZES | KINDS["decoder"] | PATTERNS[name] | {"max_len": 40}))).eval().double()
    prompt = target_of(model.config, 1)[0].tolist()
    written = generate(model, prompt, max_new_tokens=20, min_new_tokens=20, cache=cache).tokens[0]
    text = list(prompt)
    for token in written:
        logits = model(torch.tensor([text]))[0, -1]
        logits[model.config.eos_id] = -torch.inf  # min_new_tokens
        if cache == "static-bf16":  # rounded keys: near the best is enough
            assert logits[token] > logits.max() - 0.1
        else:
            assert token == int(logits.argmax())
        text.append(token)


@pytest.mark.parametrize("length", [1, 5, 64, 100])
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"window": 7}, {"window": 7, "window_layers": (1,)}, {"sparsity": "strided", "sparsity_size": 8}),
        {"sparsity": "bigbird", "sparsity_size": 8, "sparsity_random": 0.0},
    ],
    ids=str,
)
def test_keys_are_counted(fields: dict[str, Any], hidden: bool, length: int) -> None:
    config = ModelConfig(**SIZES | KINDS["decoder" if hidden else "encoder"] | fields)
    mask = layer_mask(config, 0, hidden, False) or masks.everything()
    met = (mask & masks.causal() if hidden else mask).dense(length).double().sum(-1).mean().item()
    assert keys_per_query(config, 0, length, causal=hidden) == pytest.approx(met)


def test_chance_is_counted_on_average() -> None:
    config = ModelConfig(**SIZES | KINDS["decoder"] | {"sparsity": "bigbird", "sparsity_size": 4})
    layers = [layer_mask(config, layer, True, False) for layer in range(12)]
    met = torch.stack([(mask & masks.causal()).dense(512).double().sum(-1).mean() for mask in layers if mask]).mean()
    assert keys_per_query(config, 0, 512, causal=True) == pytest.approx(met.item(), rel=0.05)


def test_sizes_count_only_where_a_pattern_reads_them() -> None:
    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return behaviour(ModelConfig(**SIZES | one)) == behaviour(ModelConfig(**SIZES | other))

    assert same({"sparsity_size": 8}, {"sparsity_size": 9})
    assert not same({"sparsity": "strided", "sparsity_size": 8}, {"sparsity": "strided", "sparsity_size": 9})
    assert same({"sparsity": "strided"}, {"sparsity": "strided", "sparsity_random": 3.0})
    assert not same({"sparsity": "bigbird"}, {"sparsity": "bigbird", "sparsity_random": 3.0})
    assert not same({}, {"sparsity": "strided"})
