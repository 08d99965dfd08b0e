"""GPT-2: logits and states equal to transformers', both ways, padded, causal and cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from regard.hub.families import BY_TYPE
from regard.hub.hf_family import ForeignFields
from regard.models import build
from regard.presets import preset

from .common import ours_of, refusal, same_tensors, theirs_of, tiny, twins
from .decoder_cases import check_decoder, compare_padded

SIZES: dict[str, Any] = {"vocab_size": 41, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "inner width": {"n_inner": 40},
    "eps": {"layer_norm_epsilon": 0.05},
    "one head": {"n_head": 1},
    "padding id": {"pad_token_id": 7},
    "no ids": {"bos_token_id": None, "eos_token_id": None},
    **{name: {"activation_function": name} for name in ("relu", "gelu", "silu", "gelu_pytorch_tanh", "gelu_fast")},
    "upcast": {"reorder_and_upcast_attn": True},  # the same formula, for half precision
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_language_model(features: dict[str, Any], tmp_path: Path) -> None:
    check_decoder(GPT2LMHeadModel, GPT2Config(**SIZES | IDS | features), tmp_path)


def test_states_without_a_head(tmp_path: Path) -> None:
    assert check_decoder(GPT2Model, GPT2Config(**SIZES, **IDS), tmp_path).head is None


def test_dropouts_are_read_and_written(tmp_path: Path) -> None:
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.3}
    ours = check_decoder(GPT2LMHeadModel, GPT2Config(**SIZES, **IDS, **rates), tmp_path).config
    assert (ours.dropout, ours.attention_dropout, ours.embedding_dropout) == (0.1, 0.2, 0.3)


def test_an_old_file_with_buffers_and_the_tied_head_twice(tmp_path: Path) -> None:
    pair = twins(tiny(GPT2LMHeadModel, GPT2Config(**SIZES, **IDS)), tmp_path)
    old = dict(pair.tensors)
    old |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    old |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    old["lm_head.weight"] = old["transformer.wte.weight"].clone()
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())
    old["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight and transformer.wte.weight are tied"):
        ours_of(pair.fields, old)


def test_our_preset_opens_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = build("gpt2", vocab_size=41, d_model=24, n_layers=2, n_heads=3, d_ff=40, max_len=16, pad_id=0, init_std=0.3)
    compare_padded(ours.eval(), theirs_of(ours, BY_TYPE["gpt2"], tmp_path / "ours", GPT2LMHeadModel), left=True)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_the_presets_have_a_twin(name: str) -> None:
    config = preset(name)
    assert BY_TYPE["gpt2"].read(ForeignFields(BY_TYPE["gpt2"].write(config))) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("activation_function", "mish"),
        ("activation_function", "swiglu"),
        ("n_embd", None),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert field in refusal({**GPT2Config(**SIZES).to_dict(), "architectures": ["GPT2LMHeadModel"], field: value})


@pytest.mark.parametrize("name", ["GPT2DoubleHeadsModel", "GPT2ForSequenceClassification"])
def test_other_heads_are_refused_by_name(name: str) -> None:
    assert name in refusal({**GPT2Config(**SIZES).to_dict(), "architectures": [name]})


@pytest.mark.parametrize(
    "change",
    [
        {"norm_place": "post"},
        {"norm": "rms"},
        {"positions": "rope"},
        {"activation": "swiglu"},
        {"qkv_bias": False},
        {"ff_bias": False},
        {"n_kv_heads": 4},
        {"window": 8},
        {"d_head": 32},
        {"architecture": "encoder", "head": "none"},
        {"causal": False},
        {"mixer": "linear"},
    ],
    ids=str,
)
def test_what_gpt2_cannot_say_is_not_its_twin(change: dict[str, Any]) -> None:
    config = preset("gpt2", **change)
    try:
        again = BY_TYPE["gpt2"].read(ForeignFields(BY_TYPE["gpt2"].write(config)))
    except ValueError:
        return
    assert again != config
