"""The config as data: every field described, every impossible one refused in a sentence, to JSON and back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from regard.config import Config, ModelConfig, RopeScalingConfig
from regard.models import build
from regard.presets import PRESETS, preset

CONFIGS = (ModelConfig, RopeScalingConfig)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_line_that_describes_it(config: type[Config]) -> None:
    for name, field in config.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert "\n" not in field.description, name
        assert field.description[0].isupper() or field.description[0] == "ε" or field.description.startswith("relu")


def test_unknown_fields_offer_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"^ModelConfig has no field 'n_head'; did you mean 'n_heads'\?$"):
        ModelConfig(n_head=4)
    with pytest.raises(ValueError, match=r"did you mean 'd_model'"):
        preset("gpt2", dmodel=4)
    with pytest.raises(ValueError, match=r"did you mean 'dropout'"):
        ModelConfig().with_(drop_out=0.1)
    with pytest.raises(ValueError, match=r"^ModelConfig has no field 'zzzzzz'$"):
        ModelConfig(zzzzzz=1)
    with pytest.raises(ValueError, match=r"RopeScalingConfig has no field 'factr'; did you mean 'factor'"):
        RopeScalingConfig(kind="linear", factr=2.0)


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "d_model=10 is not divisible by n_heads=3": {"d_model": 10, "n_heads": 3},
    "d_model=10 is not divisible by n_decoder_heads=3": {"d_model": 10, "n_heads": 5, "n_decoder_heads": 3},
    "n_heads=8 is not divisible by n_kv_heads=3": {"n_kv_heads": 3},
    "n_decoder_heads=4 is not divisible by n_kv_heads=8": {"n_kv_heads": 8, "n_decoder_heads": 4},
    "positions='rope' needs an even head width, got 5": {"positions": "rope", "d_head": 5},
    "positions='rope' needs an even head width, got 3": {
        **{"positions": "rope", "d_model": 12, "n_heads": 2, "n_decoder_heads": 4},
    },
    "image_size=30 is not divisible by patch_size=16": {"source": "image", "image_size": 30},
    "architecture='decoder' reads text; source='image' needs an encoder": {
        **{"architecture": "decoder", "source": "image"},
    },
    "head='masked-lm' needs architecture='encoder', not 'decoder'": {
        **{"architecture": "decoder", "head": "masked-lm"},
    },
    "head='classify' needs architecture='encoder', not 'encoder-decoder'": {"head": "classify"},
    "head='lm' needs a decoder; architecture='encoder' has 'masked-lm', 'classify' or 'none'": {
        "architecture": "encoder",
    },
    "tie_head=True needs d_embed=64 to be as wide as d_model=512, or head_transform": {"d_embed": 64},
    "mixer='linformer' mixes all tokens at once, so it cannot hide the future from a decoder": {"mixer": "linformer"},
    "mixer='fourier' mixes all tokens at once, so it cannot hide the future from a decoder": {
        **{"architecture": "decoder", "mixer": "fourier"},
    },
    "mixer='linformer' mixes all tokens at once, so window cannot narrow it": {
        **{"architecture": "encoder", "head": "none", "mixer": "linformer", "window": 4},
    },
    "mixer='linformer' mixes all tokens at once, so sparsity cannot narrow it": {
        **{"architecture": "encoder", "head": "none", "mixer": "linformer", "sparsity": "bigbird"},
    },
    "sparsity='strided' cannot be combined with window=4": {"sparsity": "strided", "window": 4},
    "sparsity_size=0 must be at least 1": {"sparsity": "strided", "sparsity_size": 0},
    "sparsity_random=101.0 must lie between 0 and 100": {"sparsity": "bigbird", "sparsity_random": 101},
    "mixer='performr' is not one of dot, additive, sigmoid, differential, linear, performer, linformer, fourier, "
    "mamba, mamba2; did you mean 'performer'?": {"mixer": "performr"},
    "mixer='fourier' mixes all tokens at once, so shifted_windows cannot narrow it": {
        **{"architecture": "encoder", "head": "none", "source": "image", "mixer": "fourier", "shifted_windows": 2},
    },
    "positions='t5' is a bias on scores of token pairs, which mixer='linear' does not have": {
        **{"positions": "t5", "mixer": "linear"},
    },
    "positions='alibi' is a bias on scores of token pairs, which mixer='performer' does not have": {
        **{"positions": "alibi", "mixer": "performer"},
    },
    "positions='xl' is a bias on scores of token pairs, which mixer='linformer' does not have": {
        **{"architecture": "encoder", "head": "none", "positions": "xl", "mixer": "linformer"},
    },
    "positions='rope' acts inside attention, which mixer='fourier' does not have": {
        **{"architecture": "encoder", "head": "none", "positions": "rope", "mixer": "fourier"},
    },
    "shifted_windows=4 needs source='image', not 'text'": {"shifted_windows": 4},
    "window_layers=(1,) needs a window": {"window_layers": (1,)},
    "window_layers=(0, 6) must lie between 0 and 5": {"window": 4, "window_layers": (0, 6)},
    "share_layers=True gives all layers one pattern, but window_layers differs between layers": {
        **{"share_layers": True, "window": 4, "window_layers": (0,)},
    },
    "dropout=1.0 must lie in [0, 1)": {"dropout": 1.0},
    "attention_dropout=-0.1 must lie in [0, 1)": {"attention_dropout": -0.1},
    **{f"{name}=0 must be at least 1": {name: 0} for name in ("vocab_size", "d_model", "n_layers", "n_heads")},
    "d_ff=0 removes the feed-forward network, which needs mixer='mamba' or 'mamba2'": {"d_ff": 0},
    "d_ff=-1 must not be negative": {"d_ff": -1},
    **{f"{name}=0 must be at least 1": {name: 0} for name in ("max_len", "window", "n_kv_heads", "d_head", "d_region")},
    "n_decoder_layers=-1 must be at least 1": {"n_decoder_layers": -1},
}


@pytest.mark.parametrize(("sentence", "fields"), IMPOSSIBLE.items(), ids=IMPOSSIBLE)
def test_impossible_fields_are_refused_in_one_sentence(sentence: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"d_model": "wide"}, "d_model='wide'"),
        ({"d_model": 512.5}, "d_model=512.5"),
        ({"positions": "rotary"}, "positions='rotary'"),
        ({"norm": None}, "norm=None"),
        ({"rope_scaling": {"kind": "ntk"}}, "kind='ntk'"),
        ({"d_box": 3}, "d_box=3"),
    ],
    ids=str,
)
def test_values_of_a_wrong_kind_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        ModelConfig(**fields)
    assert not isinstance(refused.value, ValidationError)
    assert "\n" not in str(refused.value)


def test_what_only_a_model_can_check_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="activation"):
        build("gpt2", device="meta", activation="swish_glu")
    with pytest.raises(ValueError, match="'linear' needs factor"):
        build("llama-1b", device="meta", rope_scaling=RopeScalingConfig(kind="linear"))
    with pytest.raises(ValueError, match="t5_buckets=7 must be even"):
        build("t5-small", device="meta", t5_buckets=7)


def test_frozen() -> None:
    config = ModelConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.d_model = 4  # type: ignore[misc]
    assert config.d_model == 512
    assert hash(config) == hash(ModelConfig())
    assert {config: 1}[ModelConfig()] == 1


def test_with_changes_a_copy_and_checks_again() -> None:
    config = preset("gpt2")
    smaller = config.with_(n_layers=2, n_heads=4)
    assert (smaller.n_layers, smaller.n_heads, smaller.d_model) == (2, 4, 768)
    assert (config.n_layers, config.n_heads) == (12, 12)
    assert config.with_() == config
    assert smaller.with_(n_layers=12, n_heads=12) == config
    with pytest.raises(ValueError, match="d_model=768 is not divisible by n_heads=7"):
        config.with_(n_heads=7)
    scaled = config.with_(positions="rope", rope_scaling=RopeScalingConfig(kind="linear", factor=2.0))
    assert scaled.with_(n_layers=1).rope_scaling == RopeScalingConfig(kind="linear", factor=2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_back(name: str) -> None:
    config = preset(name)
    assert ModelConfig(**json.loads(config.model_dump_json())) == config
    assert ModelConfig(**json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    said = config.model_dump(mode="json", exclude_unset=True)
    assert ModelConfig(**said) == config
    assert set(said) == set(PRESETS[name])


def test_json_and_back_with_every_nested_field() -> None:
    scaling = RopeScalingConfig(kind="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 3.0), original_max_len=8)
    config = ModelConfig(positions="rope", d_head=4, rope_scaling=scaling, window=4, window_layers=(0, 3))
    again = ModelConfig(**json.loads(config.model_dump_json()))
    assert again == config
    assert again.rope_scaling == scaling
    assert again.window_layers == (0, 3)
    assert hash(again) == hash(config)


@settings(max_examples=300, deadline=None)
@given(
    n_heads=st.sampled_from([1, 2, 4, 6]),
    d_model=st.sampled_from([12, 24, 25, 36]),
    n_kv_heads=st.sampled_from([None, 1, 2, 3]),
    positions=st.sampled_from(["none", "sinusoidal", "learned", "rope", "alibi", "t5", "xl"]),
    mixer=st.sampled_from(["dot", "additive", "linear", "performer", "linformer", "fourier"]),
    window=st.none() | st.integers(1, 5),
    architecture=st.sampled_from(["encoder", "decoder", "encoder-decoder"]),
)
def test_whatever_is_accepted_runs(architecture: str, **fields: Any) -> None:
    """A config is refused, or a model of it works: nothing is left for the first batch to find out."""
    head = "none" if architecture == "encoder" else "lm"
    sizes = {"vocab_size": 7, "n_layers": 1, "d_ff": 8, "max_len": 8, "mixer_size": 4}
    try:
        config = ModelConfig(architecture=architecture, head=head, **sizes, **fields)
    except ValueError:
        return
    tokens = torch.tensor([[3, 4, 5, 6, 1], [3, 4, 0, 0, 0]])
    model, keep = build(config), tokens > 0
    if architecture == "encoder-decoder":
        out = model(tokens, tokens, source_padding_mask=keep, target_padding_mask=keep)
    else:
        out = model(tokens, padding_mask=keep)
    assert out.isfinite().all()
    out.sum().backward()


def test_derived_properties() -> None:
    config = ModelConfig(d_model=24, n_heads=4, vocab_size=10, target_vocab_size=20)
    assert (config.head_width, config.with_(d_head=9).head_width) == (6, 9)
    assert (config.output_vocab_size, config.with_(target_vocab_size=None).output_vocab_size) == (20, 10)
    assert config.has_encoder
    assert config.has_decoder
    decoder = config.with_(architecture="decoder", target_vocab_size=None)
    assert decoder.has_decoder
    assert not decoder.has_encoder
