"""Configs drawn at random: refused with a sentence when they are made, or everything works.

REGARD_TRUST=1 draws 500 instead of a few dozen.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from models.small import shaken, small, source_of, target_of
from regard.attention.backends import CAPABILITIES
from regard.config import ModelConfig
from regard.config.mixers import MIXERS
from regard.models import Model, build

N = 500 if os.environ.get("REGARD_TRUST") else 36
LENGTH = 9
# Each field with what it is drawn from; the first is the likeliest.
CHOICES: dict[str, tuple[Any, ...]] = {
    "n_decoder_layers": (None, 1, 3),
    "n_heads": (4, 2, 3),
    "n_kv_heads": (None, 2, 1, 3),
    "d_head": (None, 8, 6, 5),
    "d_ff": (32, 20),
    "positions": ("sinusoidal", "none", "learned", "rope", "alibi", "t5", "xl", "rope"),
    "rope_fraction": (1.0, 0.5, 0.3),
    "rope_base": (10000.0, 500.0, 1.0),
    "rope_scaling": (
        *(None, None, {"kind": "linear", "factor": 2.0}, {"kind": "dynamic", "factor": 2.0}, {"kind": "yarn"}),
        {"kind": "yarn", "factor": 4.0, "original_max_len": 8},
        {"kind": "dynamic", "factor": 2.0, "original_max_len": 8},
        {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 8},
        {"kind": "longrope", "short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0], "original_max_len": 8},
    ),
    "t5_buckets": (32, 8, 2, 7),
    "t5_max_distance": (128, 6, 2),
    "scale_embeddings": (False, True),
    "d_embed": (None, 12),
    "n_segments": (0, 2),
    "embedding_norm": (False, True),
    "tie_head": (True, False),
    "norm": ("layer", "rms", "none"),
    "norm_place": ("post", "pre", "output", "both"),
    "norm_offset": (0.0, 0.0, 1.0),
    "parallel_residual": ("none", "none", "two-norms", "one-norm"),
    "score_cap": (None, None, 5.0),
    "attention_sinks": (False, False, True),
    "logit_cap": (None, 30.0),
    "qk_norm_over": ("head", "all"),
    "rope_layers": (None, None, (1,)),
    "window_rope_base": (None, None, 100.0),
    "norm_bias": (True, False),
    "residual": (True, True, False),
    "mixer": ("dot", "dot", "additive", "sigmoid", "differential", "linear", "performer", "linformer", "fourier"),
    "mixer_size": (None, None, 4),
    "attention_scale": (None, None, 1.0),
    "causal": (True, True, True, False),
    "window": (None, None, 3),
    "window_layers": (None, None, (0,), (5,)),
    "sparsity": ("none", "none", "strided", "bigbird"),
    "sparsity_size": (64, 2),
    "qkv_bias": (True, False),
    "qk_norm": (False, True),
    "attention_backend": ("auto", "auto", "reference", "sdpa", "tiled", "linear"),
    "activation": ("relu", "gelu", "swiglu", "relu2", "geglu_tanh"),
    "share_layers": (False, False, True),
    "attention_dropout": (0.0, 0.1),
    "dropout": (0.0, 0.1),
    "head_bias": (False, True),
    "head_transform": (False, False, True),
    "pooling": ("first", "mean", "attention"),
    "pooler": ("none", "tanh"),
    "target_vocab_size": (None, None, 29),
    "shifted_windows": (None, None, 2),
    "cell": ("lstm", "gru"),
    "alignment": ("additive", "none", "dot", "general", "concat"),
    "bidirectional": (True, False),
    "input_feeding": (True, False),
    "position_offset": (0, 2),
    "positions_skip_padding": (False, True),
}
HEADS = {"encoder": ("masked-lm", "classify", "tag", "none"), "decoder": ("lm",), "recurrent": ("lm",)}


def draw_fields(seed: int) -> dict[str, Any]:
    """Small sizes and a handful of fields away from their defaults: with all of them few configs would be valid."""
    chosen = random.Random(seed)
    architecture = chosen.choice(("encoder", "decoder", "decoder", "encoder-decoder", "encoder-decoder", "recurrent"))
    fields: dict[str, Any] = {
        **{"architecture": architecture, "head": chosen.choice(HEADS.get(architecture, ("lm",)))},
        **{"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 32, "max_len": 24, "n_classes": 3},
        **{"image_size": 16, "patch_size": 4, "d_region": 10},
    }
    if architecture in ("encoder", "encoder-decoder"):
        fields["source"] = chosen.choice(("text", "text", "text", "image", "regions"))
    for name in chosen.sample(sorted(CHOICES), chosen.randint(3, 14)):
        fields[name] = chosen.choice(CHOICES[name])
    return fields


def make_config(seed: int) -> ModelConfig | str:
    """A config, or the sentence that refuses it."""
    try:
        return ModelConfig(**draw_fields(seed))
    except ValueError as error:
        return str(error)


def inputs_of(config: ModelConfig) -> tuple[Tensor, ...]:
    source = source_of(config, 2, LENGTH)
    both = config.architecture in ("encoder-decoder", "recurrent")
    return (source, target_of(config, 2, LENGTH)) if both else (source,)


def assert_close(found: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """To a share of the largest; rotary angles are fp32 everywhere."""
    assert (found - wanted).abs().max() <= share * max(1.0, float(wanted.abs().max()))


def check_gradients(model: Model, inputs: tuple[Tensor, ...]) -> None:
    out = model.train()(*inputs)
    (out / out.detach().abs().max()).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)
    model.zero_grad()
    model.eval()


def check_formula(model: Model, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
    """The same model on the backend that is the formula."""
    if not model.config.mixing.weights:
        return
    twin = build(model.config.with_(attention_backend="reference")).double().eval()
    twin.load_state_dict(model.state_dict())
    assert_close(twin(*inputs), logits)


def check_cache(model: Model, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
    """Three tokens at once, then one at a time, give what the whole text gives; or a cache is refused."""
    config = model.config
    if config.architecture == "encoder" or not config.causal:
        return
    first, written = inputs[:-1], inputs[-1]
    if not config.mixing.by_token:
        with pytest.raises(ValueError, match="cache"):
            model(*inputs, cache=model.new_cache())
        return
    for cache in (model.new_cache(), model.new_cache(2, config.max_len)) if not model.is_recurrent else ():
        parts = [model(*first, part, cache=cache) for part in (written[:, :3], *written[:, 3:].split(1, 1))]
        assert_close(torch.cat(parts, 1), logits)


def check_look(model: Model, inputs: tuple[Tensor, ...]) -> None:
    """Rows of weights sum to 1, or to 0 where a query sees nothing."""
    source = inputs[0][0].tolist() if model.config.source == "text" else inputs[0][:1]
    texts, config = [x[0].tolist() for x in inputs[1:]], model.config
    without = config.alignment == "none" if model.is_recurrent else not config.mixing.weights
    if without and config.architecture != "encoder-decoder":
        with pytest.raises(ValueError, match="this model has no attention to look at: it is built with "):
            regard.look(model, source, *texts)
        return
    look = regard.look(model, source, *texts)
    for kind in look.kinds:
        total = look.weights(layer=-1, head=0, kind=kind).sum(-1)
        assert ((total - 1).abs().lt(1e-4) | total.abs().lt(1e-4)).all()


def check_saved(model: Model, inputs: tuple[Tensor, ...], logits: Tensor, folder: Path) -> None:
    loaded = regard.load(model.save(folder))
    assert loaded.config.architecture == model.config.architecture
    assert_close(loaded(*inputs), logits, 1e-6)


@pytest.mark.parametrize("seed", range(N))
def test_a_config_is_refused_or_everything_works(seed: int, tmp_path: Path) -> None:
    config = make_config(seed)
    if isinstance(config, str):
        assert config
        assert "\n" not in config
        return
    torch.manual_seed(seed)
    # In float64: without norms numbers grow to any size, and a sharp softmax multiplies what fp32 rounds.
    model = shaken(build(config)).double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs_of(config))
    with torch.no_grad():
        logits = model(*inputs)
        assert torch.isfinite(logits).all()
        check_formula(model, inputs, logits)
        check_cache(model, inputs, logits)
        check_look(model, inputs)
        check_saved(model, inputs, logits, tmp_path / "model")
    check_gradients(model, inputs)


def test_most_of_what_is_drawn_is_tried_and_some_is_refused() -> None:
    assert 60 < sum(isinstance(make_config(seed), str) for seed in range(300)) < 200


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"mixer": "additive", "attention_scale": 1.0},
            "attention_scale=1.0 is a factor on q·k, which mixer='additive'",
        ),
        ({"mixer": "linear", "attention_scale": 1.0}, "attention_scale=1.0 is a factor on q·k, which mixer='linear'"),
        ({"mixer_size": 8}, "mixer_size=8 is for performer, linformer, mamba and mamba2; mixer='dot' has no such size"),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2}},
            "rope_scaling needs positions='rope', not 'sinusoidal'",
        ),
        (
            {"target_vocab_size": 9},
            "target_vocab_size=9 is for architecture='encoder-decoder'; 'decoder' has one vocabulary",
        ),
        ({"positions": "t5", "t5_max_distance": 16}, "t5_max_distance=16 must exceed the 16 distances"),
        (
            {"positions": "t5", "t5_buckets": 2, "architecture": "encoder", "head": "none"},
            "t5_buckets=2 must be even and",
        ),
        ({"positions": "rope", "d_head": 6, "rope_fraction": 0.5}, "rope_fraction=0.5 of heads 6 wide rotates 3"),
        ({"positions": "rope", "rope_base": 1.0}, "rope_base=1.0 must be greater than 1"),
        (
            {"positions": "rope", "rope_scaling": {"kind": "dynamic", "factor": 2, "original_max_len": 8}},
            "rope scaling kind 'dynamic' does not take original_max_len",
        ),
        ({"mixer": "linear", "attention_backend": "tiled"}, "'tiled' cannot compute mixer='linear' as configured"),
        ({"positions": "xl", "attention_backend": "sdpa"}, "'sdpa' cannot compute mixer='dot' as configured"),
        ({"mixer": "linear", "attention_backend": "linear", "window": 2}, "these can: auto, reference"),
        ({"architecture": "encoder", "source": "image", "head": "masked-lm"}, "head='masked-lm' predicts tokens"),
    ],
)
def test_what_was_refused_late_or_passed_over_is_refused_when_the_config_is_made(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ModelConfig(**{"architecture": "decoder", **fields})


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if mixer.weights and mixer.backends])
def test_the_backends_of_a_mixer_are_those_that_compute_it(name: str) -> None:
    kind = MIXERS[name].family.kind
    assert set(MIXERS[name].backends or ()) == {row.backend for row in CAPABILITIES if row.kind == kind}


@pytest.mark.parametrize("mixer", ["fourier", "linformer"])
def test_a_mixer_of_whole_texts_takes_no_cache(mixer: str) -> None:
    config = ModelConfig(architecture="decoder", causal=False, mixer=mixer, d_model=24, d_ff=32, vocab_size=31)
    model = build(config).eval()
    with pytest.raises(ValueError, match=f"mixer='{mixer}' mixes all tokens at once, so a cache cannot replace"):
        model(torch.ones(1, 3, dtype=torch.long), cache=model.new_cache())


def test_t5_in_fp16_stays_finite_and_close() -> None:
    """The feed-forward network's last product exceeds 65,504, as in published checkpoints."""
    model = small("t5-small").float()
    for stack in model.stacks():
        for block in stack.blocks:
            block.ff.w_in.weight.data.mul_(20)
            block.ff.w_out.weight.data.mul_(2e4)
    inputs = inputs_of(model.config)
    with torch.no_grad():
        wanted, found = model(*inputs), model.half()(*inputs)
    assert found.dtype == torch.float16
    assert (found.float() - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert regard.look(model, inputs[0][0].tolist(), inputs[1][0].tolist()).weights(layer=1, head=0).isfinite().all()
