"""LLaMA, Mistral, Ministral, Qwen 2 and Qwen 3: logits equal to transformers', both ways, padded, causal and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from regard.config import ModelConfig, RopeScalingConfig
from regard.hub import write_config
from regard.hub.families import BY_TYPE
from regard.hub.families.llama import LLAMA
from regard.hub.hf_config import transformers_twin
from regard.hub.hf_family import ForeignFields
from regard.models import Decoder, build
from regard.presets import preset

from .common import close, ours_of, padded, refusal, same_tensors, theirs_of, tiny, twins
from .decoder_cases import LENGTHS, check_decoder, compare_both_cached, compare_padded

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 40, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
ORIGINAL = {"original_max_position_embeddings": 8, "rope_theta": 100.0}
LONG = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0]}
ROPES: dict[str, dict[str, Any]] = {
    "base": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn everything": {
        **{"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 3.0, "beta_slow": 0.5, **ORIGINAL},
    },
    "yarn mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, **ORIGINAL},
    "yarn untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
    "yarn without factor": {"rope_type": "yarn", "factor": None, **ORIGINAL},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}
# These two choose their frequencies by the length of the text: LENGTHS has texts beyond 8, and the prompt is shorter.
ROPES_BY_LENGTH: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", **LONG, **ORIGINAL}},
    "longrope factor": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, **LONG, **ORIGINAL}},
    "longrope attention": {"rope_parameters": {"rope_type": "longrope", "attention_factor": 1.3, **LONG, **ORIGINAL}},
}
FEATURES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama all key heads": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": None}),
    "llama one key head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama wide heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "llama eps": (LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 0.05}),
    "llama no ids": (LlamaForCausalLM, LlamaConfig, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
    "llama padding id": (LlamaForCausalLM, LlamaConfig, {"pad_token_id": 7}),
    "llama states": (LlamaModel, LlamaConfig, {}),
    **{
        f"llama {name}": (LlamaForCausalLM, LlamaConfig, {"hidden_act": name})
        for name in ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "swish")
    },
    **{f"llama {name}": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama yarn wide heads": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": ROPES["yarn"], "head_dim": 16}),
    "mistral window": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
    "mistral window of one": (MistralForCausalLM, MistralConfig, {"sliding_window": 1}),
    "mistral window longer than the text": (MistralForCausalLM, MistralConfig, {"sliding_window": 100}),
    "mistral no window": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral wide heads, tied": (
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": 5, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig,
        {
            "sliding_window": 4,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 windows from a layer on": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen2 windows everywhere": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen2 window unused": (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": False, "sliding_window": 4}),
    "qwen2 window in no layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    ),
    "qwen2 yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": ROPES["yarn"]}),
    "qwen2 states": (Qwen2Model, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "qwen3 biases, tied": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3 layer types": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", FEATURES.values(), ids=FEATURES)
def test_language_model(
    case: tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]], tmp_path: Path
) -> None:
    model_class, config_class, features = case
    check_decoder(model_class, config_class(**SIZES | features), tmp_path)


def test_heads_that_do_not_divide_the_width_open_there_under_a_type_that_allows_them() -> None:
    sizes: dict[str, Any] = {"d_model": 30, "n_heads": 4, "n_kv_heads": 2, "d_head": 8, "d_ff": 20, "n_layers": 1}
    config = preset("llama-1b").with_(**sizes, vocab_size=41, max_len=16, rope_scaling=None)
    assert write_config(config).model_type == "mistral"
    assert transformers_twin(config).config.hidden_size == 30
    gemma = config.with_(norm_offset=1.0, norm_place="both", activation="geglu_tanh", scale_embeddings=True)
    assert write_config(gemma).model_type == "regard"
    assert write_config(gemma.with_(d_model=32)).model_type == "gemma2"


def test_what_the_features_become(tmp_path: Path) -> None:
    """A case could pass because both sides pass a field over; what it is to change must be there."""

    def read(name: str) -> ModelConfig:
        model_class, config_class, features = FEATURES[name]
        fields = {**config_class(**SIZES | features).to_dict(), "architectures": [model_class.__name__]}
        return BY_TYPE[fields["model_type"]].read(ForeignFields(fields))

    assert (read("mistral window").window, read("mistral window").window_layers) == (4, None)
    assert read("ministral").window_layers == (0, 2)
    assert read("qwen2 windows from a layer on").window_layers == (1, 2)
    assert read("qwen2 windows everywhere").window_layers is None
    assert read("qwen2 window unused").window is None
    assert read("qwen2 window in no layer").window is None
    assert read("llama one key head").n_kv_heads == 1
    assert read("llama all key heads").n_kv_heads == 4
    assert read("llama wide heads").head_width == 16
    assert read("llama yarn untruncated").rope_scaling == RopeScalingConfig(
        kind="yarn", factor=4.0, original_max_len=8, truncate=False
    )


@pytest.mark.parametrize("features", ROPES_BY_LENGTH.values(), ids=ROPES_BY_LENGTH)
def test_frequencies_that_follow_the_length(features: dict[str, Any], tmp_path: Path) -> None:
    """Texts on both sides of the original length, whole and step by step (they remember the longest: a fresh model)."""
    config = LlamaConfig(**SIZES | features)
    pair = twins(tiny(LlamaForCausalLM, config), tmp_path)
    ours = pair.ours
    assert isinstance(ours, Decoder)
    fresh = theirs_of(ours, LLAMA, tmp_path / "back", LlamaForCausalLM)
    same_tensors(fresh.state_dict(), pair.theirs.state_dict())
    assert LLAMA.read(ForeignFields(LLAMA.write(ours.config))) == ours.config
    compare_both_cached(ours, fresh)
    for left in (False, True):
        compare_padded(ours, fresh, left)
    with torch.no_grad():
        tokens, _ = padded((6, 6), 41, 0, left=False)
        close(ours(tokens), pair.theirs(input_ids=tokens).logits)
        longer, _ = padded((LENGTHS[0],) * 2, 41, 0, left=False)
        assert not torch.allclose(ours(longer)[:, :6], ours(longer[:, :6]), atol=1e-3)


def test_the_automatic_classes_read_mistral_with_layer_types_as_we_do(tmp_path: Path) -> None:
    model_class, config_class, features = FEATURES["ministral"]
    tiny(model_class, config_class(**SIZES | features)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = ours_of(fields, load_file(tmp_path / "model.safetensors"))
    assert isinstance(ours, Decoder)
    compare_padded(ours, AutoModelForCausalLM.from_pretrained(tmp_path), left=False)


@pytest.mark.parametrize("rope", [*ROPES.values(), *(f["rope_parameters"] for f in ROPES_BY_LENGTH.values())], ids=str)
def test_ropes_as_older_versions_wrote_them(rope: dict[str, Any]) -> None:
    fields = {**LlamaConfig(**SIZES, rope_parameters=dict(rope)).to_dict(), "architectures": ["LlamaForCausalLM"]}
    now = LLAMA.read(ForeignFields(fields))
    fields = {name: value for name, value in fields.items() if name != "rope_parameters"}
    old = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    fields["rope_theta"] = rope.get("rope_theta", 10000.0)
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope["rope_type"], **old}
    read = LLAMA.read(ForeignFields(fields))
    if "original_max_position_embeddings" not in rope and now.rope_scaling is not None:
        read = read.with_(rope_scaling=read.rope_scaling.with_(original_max_len=now.rope_scaling.original_max_len))
    assert read == now


def test_rope_fields_that_mean_nothing_to_a_kind_are_passed_over() -> None:
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 3.0}
    read = LLAMA.read(
        ForeignFields({**LlamaConfig(**SIZES).to_dict(), "rope_parameters": None, "rope_scaling": scaling})
    )
    assert read.rope_scaling == RopeScalingConfig(kind="dynamic", factor=2.0)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    fields = {**LlamaConfig(**SIZES).to_dict(), "rope_parameters": None, "rope_scaling": scaling}
    read = LLAMA.read(ForeignFields({**fields, "original_max_position_embeddings": 16}))
    assert read.rope_scaling == RopeScalingConfig(kind="yarn", factor=2.0, original_max_len=16)


def test_an_old_file_with_buffers_and_the_tied_head_twice(tmp_path: Path) -> None:
    pair = twins(tiny(LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)), tmp_path)
    old = dict(pair.tensors)
    old |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(3)}
    old["lm_head.weight"] = old["model.embed_tokens.weight"].clone()
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())
    old["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are tied"):
        ours_of(pair.fields, old)


@pytest.mark.parametrize(
    ("fields", "model_class"),
    [
        ({}, LlamaForCausalLM),
        ({"window": 4}, MistralForCausalLM),
        ({"window": 4, "window_layers": (1,)}, MinistralForCausalLM),
        ({"qkv_bias": True}, Qwen2ForCausalLM),
        ({"qk_norm": True, "d_head": 8}, Qwen3ForCausalLM),
        ({"head": "none", "init_std": None}, LlamaModel),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_we_build_opens_there(fields: dict[str, Any], model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 40, "max_len": 16, "init_std": 0.3}
    ours = build("llama-7b", **sizes | fields).eval()
    assert isinstance(ours, Decoder)
    for left in (False, True):
        compare_padded(ours, theirs_of(ours, LLAMA, tmp_path / f"{left}", model_class), left)


@pytest.mark.parametrize("name", ["llama-7b", "llama-1b", "mistral-7b"])
def test_the_presets_have_a_twin(name: str) -> None:
    config = preset(name)
    said = {"n_kv_heads": config.n_kv_heads or config.n_heads, "d_head": config.head_width}
    assert LLAMA.read(ForeignFields(LLAMA.write(config))) == config.with_(**said)


LLAMA_FIELDS = {**LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]}
QWEN_FIELDS = {**Qwen3Config(**SIZES).to_dict(), "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (LLAMA_FIELDS | {"hidden_act": "mish"}, "hidden_act='mish'"),
        (LLAMA_FIELDS | {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
        (LLAMA_FIELDS | {"pretraining_tp": 2}, "pretraining_tp=2"),
        (LLAMA_FIELDS | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA_FIELDS | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (LLAMA_FIELDS | {"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        (LLAMA_FIELDS | {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type='su'"),
        (LLAMA_FIELDS | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (LLAMA_FIELDS | {"hidden_size": None}, "hidden_size"),
        (LLAMA_FIELDS | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (QWEN_FIELDS | {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (QWEN_FIELDS | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None"),
        (QWEN_FIELDS | {"head_dim": None}, "head_dim"),
        (QWEN_FIELDS | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layer"},
        {"norm_place": "post"},
        {"positions": "learned"},
        {"rope_fraction": 0.5},
        {"activation": "relu"},
        {"out_bias": True},
        {"embedding_norm": True},
        {"attention_scale": 1.0},
        {"logit_scale": 0.5},
        {"scale_embeddings": True},
        {"share_layers": True},
        {"architecture": "encoder", "head": "none"},
        {"window": 8, "qkv_bias": True, "out_bias": True},
        {"window": 8, "ff_bias": True},
    ],
    ids=str,
)
def test_what_llama_cannot_say_is_not_its_twin(change: dict[str, Any]) -> None:
    config = preset("llama-1b", d_head=64, **change)
    try:
        again = LLAMA.read(ForeignFields(LLAMA.write(config)))
    except ValueError:
        return
    assert again != config
