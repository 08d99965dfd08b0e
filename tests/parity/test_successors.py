"""Decoders that came after GPT-2 and LLaMA: logits equal to transformers', both ways, padded, causal and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

import regard
from regard.config import ModelConfig
from regard.errors import BadModelFile
from regard.generation import generate
from regard.hub import read_config, write_config
from regard.hub.families import BY_TYPE
from regard.hub.hf_family import ForeignFields
from regard.models import Decoder

from .common import check_round_trips, close, refusal, tiny, twins
from .decoder_cases import check_decoder, compare_padded
from .encoders import check

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40},
    **{"max_position_embeddings": 32, **IDS},
}
GROUPED = {"num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
NO_WINDOWS = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
OPT = {name: value for name, value in SIZES.items() if name != "intermediate_size"} | {"ffn_dim": 40}
OPT |= {"word_embed_proj_dim": 24}
MODERN = {**SIZES, "local_attention": 4}
WIDE = {**SIZES, "hidden_size": 32}  # heads of 8, of which a part can be rotated
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}}
MAMBA = {**IDS, "vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8}
MAMBA |= {"state_size": 12, "n_groups": 2, "chunk_size": 4}
MAMBA1 = {**IDS, "vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5, "time_step_rank": 4}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.02}
OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "swiglu_limit": 0.3}
NO_BIAS = {"attention_bias": False, "tie_word_embeddings": True}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
Case = tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]
CASES: dict[str, Case] = {
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {**WIDE, **PARTLY}),
    "gpt_neox one after the other": (
        hf.GPTNeoXForCausalLM,
        hf.GPTNeoXConfig,
        {**WIDE, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "gpt_neox states": (hf.GPTNeoXModel, hf.GPTNeoXConfig, {**WIDE, "pad_token_id": None}),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, {**WIDE, **PARTLY}),
    "phi grouped, tied": (hf.PhiForCausalLM, hf.PhiConfig, {**WIDE, **GROUPED, "tie_word_embeddings": True}),
    "phi states": (hf.PhiModel, hf.PhiConfig, WIDE),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**WIDE, **GROUPED, **PARTLY}),
    "phi3 window": (hf.Phi3ForCausalLM, hf.Phi3Config, {**WIDE, "sliding_window": 4, **PARTLY}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**SIZES, **GEMMA}),
    "gemma states": (hf.GemmaModel, hf.GemmaConfig, {**SIZES, **GEMMA}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**SIZES, **GEMMA, **WINDOWS, "query_pre_attn_scalar": 12}),
    "gemma2 caps": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {**SIZES, **GEMMA, "sliding_window": 4, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 0.7},
    ),
    "gemma2 without caps": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {**SIZES, **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2 no window": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {**SIZES, **GEMMA, "layer_types": ["full_attention"] * 3},
    ),
    "gemma3_text": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**SIZES, **GEMMA, **WINDOWS}),
    "gemma3_text turned by two bases": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {
            **{**SIZES, **GEMMA, **WINDOWS, "tie_word_embeddings": False},
            "rope_parameters": {
                "sliding_attention": LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            },
        },
    ),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, {**SIZES, **GROUPED, "num_hidden_layers": 4}),
    "smollm3 layers without positions": (
        hf.SmolLM3ForCausalLM,
        hf.SmolLM3Config,
        {**SIZES, **GROUPED, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, **WINDOWS},
    ),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, OPT),
    "opt post-norm": (hf.OPTForCausalLM, hf.OPTConfig, {**OPT, "do_layer_norm_before": False, "enable_bias": False}),
    "opt states": (hf.OPTModel, hf.OPTConfig, {**OPT, "activation_function": "gelu", "pad_token_id": 3}),
    "starcoder2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config, {**SIZES, **GROUPED, "sliding_window": 4}),
    "starcoder2 untied, no biases": (
        hf.Starcoder2ForCausalLM,
        hf.Starcoder2Config,
        {**SIZES, **GROUPED, "use_bias": False, "tie_word_embeddings": False},
    ),
    "stablelm": (hf.StableLmForCausalLM, hf.StableLmConfig, {**WIDE, **GROUPED, "use_qkv_bias": True}),
    "stablelm side by side": (
        hf.StableLmForCausalLM,
        hf.StableLmConfig,
        {**WIDE, "num_key_value_heads": 4, "use_parallel_residual": True},
    ),
    "exaone4": (hf.Exaone4ForCausalLM, hf.Exaone4Config, {**SIZES, **GROUPED, **WINDOWS}),
    "exaone4 no window": (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config,
        {**SIZES, **GROUPED, **NO_WINDOWS},
    ),
    "exaone4 window in no layer": (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config,
        {**SIZES, **GROUPED, **WINDOWS, "layer_types": ["full_attention"] * 3},
    ),
    "olmo3": (hf.Olmo3ForCausalLM, hf.Olmo3Config, {**SIZES, **GROUPED, **WINDOWS}),
    "olmo3 stretched": (
        hf.Olmo3ForCausalLM,
        hf.Olmo3Config,
        {
            **{**SIZES, **GROUPED, **WINDOWS},
            "rope_parameters": {
                "sliding_attention": LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            },
        },
    ),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, {**SIZES, **GROUPED}),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, MAMBA1),
    "mamba untied": (
        hf.MambaForCausalLM,
        hf.MambaConfig,
        {**MAMBA1, "tie_word_embeddings": False, "time_step_rank": "auto", "expand": 3, "conv_kernel": 3},
    ),
    "mamba states": (hf.MambaModel, hf.MambaConfig, MAMBA1),
    "mamba2": (hf.Mamba2ForCausalLM, hf.Mamba2Config, MAMBA),
    "mamba2 tied": (
        hf.Mamba2ForCausalLM,
        hf.Mamba2Config,
        {**MAMBA, "tie_word_embeddings": True, "n_groups": 1, "conv_kernel": 3},
    ),
    "mamba2 states": (hf.Mamba2Model, hf.Mamba2Config, MAMBA),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**SIZES, **GROUPED, **ROUTED}),
    "mixtral one expert, window": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {**SIZES, **GROUPED, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4},
    ),
    "mixtral states": (hf.MixtralModel, hf.MixtralConfig, {**SIZES, **GROUPED, "num_local_experts": 4}),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {**SIZES, **GROUPED, **ROUTED, "head_dim": 8, "norm_topk_prob": True, "moe_intermediate_size": 20},
    ),
    "qwen3_moe shares of all": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {**SIZES, **GROUPED, **ROUTED, "attention_bias": True, "moe_intermediate_size": 20},
    ),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig, {**SIZES, **GROUPED, **ROUTED}),
    "gpt_oss": (hf.GptOssForCausalLM, hf.GptOssConfig, {**SIZES, **GROUPED, **OSS, "sliding_window": 4}),
    "gpt_oss tied, no window": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {**SIZES, **GROUPED, **OSS, "layer_types": ["full_attention"] * 3, **NO_BIAS},
    ),
    "gpt_oss states": (hf.GptOssModel, hf.GptOssConfig, {**SIZES, **GROUPED, **OSS, **WINDOWS}),
    "olmo2 biases, tied": (
        hf.Olmo2ForCausalLM,
        hf.Olmo2Config,
        {**SIZES, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_language_model(case: Case, tmp_path: Path) -> None:
    model_class, config_class, fields = case
    check_decoder(model_class, config_class(**fields), tmp_path)


def read(name: str) -> ModelConfig:
    model_class, config_class, fields = CASES[name]
    theirs = {**config_class(**fields).to_dict(), "architectures": [model_class.__name__]}
    return BY_TYPE[theirs["model_type"]].read(ForeignFields(theirs))


@pytest.mark.parametrize(
    ("model_class", "features"),
    [
        (hf.EuroBertForMaskedLM, {}),
        (hf.EuroBertForMaskedLM, {"mlp_bias": True, "attention_bias": True}),
        (hf.EuroBertModel, {}),
        (hf.EuroBertForTokenClassification, {"num_labels": 3}),
    ],
)
def test_an_encoder_of_the_same_layers(
    model_class: type[PreTrainedModel], features: dict[str, Any], tmp_path: Path
) -> None:
    check(model_class, hf.EuroBertConfig(**SIZES, **GROUPED, mask_token_id=3, **features), tmp_path)


@pytest.mark.parametrize(
    ("model_class", "features"),
    [
        (hf.ModernBertForMaskedLM, {}),
        (hf.ModernBertForMaskedLM, {"classifier_bias": True, "decoder_bias": False, "norm_bias": True}),
        (hf.ModernBertModel, {"attention_bias": True, "layer_types": ["full_attention"] * 3}),
        (hf.ModernBertModel, {"layer_types": ["sliding_attention"] * 3, "hidden_activation": "silu"}),
    ],
)
def test_modernbert(model_class: type[PreTrainedModel], features: dict[str, Any], tmp_path: Path) -> None:
    model = check(model_class, hf.ModernBertConfig(**MODERN, **features), tmp_path)
    assert model.config.embedding_norm
    assert not model.config.first_norm


def test_a_modernbert_with_scaled_positions_is_refused() -> None:
    """Under the name that the field had before transformers 5, too."""
    fields = hf.ModernBertConfig(**MODERN).to_dict()
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert "rope_type='linear'" in refusal(fields | {"rope_scaling": scaled})
    assert "rope_type='linear'" in refusal(fields | {"rope_parameters": {"full_attention": scaled}})


def test_the_old_name_of_rope_parameters_means_both_kinds_of_layers() -> None:
    fields = hf.ModernBertConfig(**MODERN, rope_scaling={"rope_theta": 77.0}).to_dict()
    assert {kind["rope_theta"] for kind in fields["rope_parameters"].values()} == {77.0}
    fields = hf.ModernBertConfig(**MODERN).to_dict() | {"rope_scaling": {"rope_theta": 77.0}}
    config = read_config(fields).config
    assert (config.rope_base, config.window_rope_base) == (77.0, 77.0)


def test_what_the_features_become() -> None:
    """A case could pass because both sides pass a field over; what it is to change must be there."""
    neox, phi, phi3 = read("gpt_neox"), read("phi"), read("phi3")
    assert (neox.parallel_residual, neox.rope_fraction) == ("two-norms", 0.75)
    assert read("gpt_neox one after the other").parallel_residual == "none"
    assert (phi.parallel_residual, phi.head_bias, phi3.rope_fraction) == ("one-norm", True, 0.75)
    gemma2, capped, gemma3 = read("gemma2"), read("gemma2 caps"), read("gemma3_text turned by two bases")
    assert (gemma2.norm_offset, gemma2.norm_place, gemma2.window_layers) == (1.0, "both", (0, 2))
    assert (gemma2.scale_embeddings, gemma2.attention_scale) == (True, pytest.approx(12**-0.5))
    assert (capped.score_cap, capped.logit_cap, capped.window_layers) == (1.5, 0.7, (0, 2))
    assert (gemma3.rope_base, gemma3.window_rope_base, gemma3.rope_scaling.factor) == (300.0, 50.0, 4.0)
    assert (read("smollm3").rope_layers, read("smollm3 layers without positions").rope_layers) == ((0, 1, 2), (1,))
    assert (read("opt").position_offset, read("opt post-norm").norm_place) == (2, "post")
    assert (read("olmo2").norm_place, read("olmo2").qk_norm_over) == ("output", "all")
    assert (read("exaone4").rope_layers, read("exaone4").qk_norm_over) == ((0, 2), "head")
    assert (read("exaone4 no window").rope_layers, read("olmo3").window_layers) == (None, (0, 2))
    assert (read("stablelm").rope_fraction, read("stablelm side by side").parallel_residual) == (0.25, "one-norm")
    mixtral, qwen3_moe = read("mixtral"), read("qwen3_moe")
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.balance_loss) == (6, 3, 0.02)
    assert (qwen3_moe.experts, qwen3_moe.d_ff, qwen3_moe.renormalise_experts) == (6, 20, True)
    assert not read("qwen3_moe shares of all").renormalise_experts
    assert read("olmoe").qk_norm_over == "all"
    oss = read("gpt_oss")
    assert (oss.attention_sinks, oss.router_bias, oss.ff_bias, oss.gate_limit) == (True, True, True, 0.3)
    assert (oss.window_layers, oss.activation, oss.qkv_bias) == ((0, 2), "quick_geglu", True)
    assert (oss.rope_base, oss.rope_scaling.kind, oss.rope_scaling.truncate) == (150000.0, "yarn", False)
    mamba = read("mamba")
    assert (mamba.mixer, mamba.n_heads, mamba.d_head, mamba.mixer_size, mamba.step_rank) == ("mamba", 48, 1, 5, 4)
    mamba = read("mamba2")
    assert (mamba.mixer, mamba.d_ff, mamba.mixer_size, mamba.n_kv_heads, mamba.d_head) == ("mamba2", 0, 12, 2, 8)
    assert (read("starcoder2").window, read("starcoder2").norm) == (4, "layer")


def fields_of(name: str) -> dict[str, Any]:
    model_class, config_class, fields = CASES[name]
    return {**config_class(**fields).to_dict(), "architectures": [model_class.__name__]}


def test_older_spellings_mean_the_same() -> None:
    neox = fields_of("gpt_neox") | {"rope_parameters": None, "rotary_pct": 0.75, "rotary_emb_base": 100.0}
    assert BY_TYPE["gpt_neox"].read(ForeignFields(neox)) == read("gpt_neox")
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = fields_of("phi3") | {"original_max_position_embeddings": 8, "rope_parameters": None, "rope_theta": 10000.0}
    kinds = [phi3 | {"rope_scaling": {"type": kind, **factors}} for kind in ("longrope", "su", "yarn")]
    longrope, *older = (BY_TYPE["phi3"].read(ForeignFields(fields)) for fields in kinds)
    assert longrope.rope_scaling is not None
    assert longrope.rope_scaling.kind == "longrope"
    assert older == [longrope, longrope]
    assert BY_TYPE["gemma"].read(ForeignFields(fields_of("gemma") | {"hidden_act": "gelu"})) == read("gemma")
    gemma = fields_of("gemma3_text turned by two bases")
    gemma |= {"rope_parameters": None, "rope_theta": 300.0, "rope_local_base_freq": 50.0}
    gemma["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    assert BY_TYPE["gemma3_text"].read(ForeignFields(gemma)) == read("gemma3_text turned by two bases")
    gemma = {**gemma, "layer_types": None, "sliding_window_pattern": 2, "num_hidden_layers": 3}
    assert BY_TYPE["gemma3_text"].read(ForeignFields(gemma)).window_layers == (0, 2)
    smollm = fields_of("smollm3 layers without positions") | {"layer_types": None, "max_window_layers": 1}
    assert BY_TYPE["smollm3"].read(ForeignFields(smollm)).window_layers == (0, 2)
    exaone = fields_of("exaone4") | {"sliding_window": 4, "layer_types": None, "num_hidden_layers": 7}
    for pattern, layers in ((4, (0, 1, 2, 4, 5, 6)), ("LLLG", (0, 1, 2, 4, 5)), ("LG", (0, 2, 4))):
        fields = ForeignFields(exaone | {"sliding_window_pattern": pattern})
        assert BY_TYPE["exaone4"].read(fields).window_layers == layers


@pytest.mark.parametrize("original", [4, 4096])
def test_the_original_length_of_a_phi3(original: int, tmp_path: Path) -> None:
    """transformers has 4096 if config.json does not name it, whatever rope_parameters say."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    scaling |= {"original_max_position_embeddings": 4, "rope_theta": 100.0}
    config = hf.Phi3Config(**WIDE, rope_parameters=scaling, original_max_position_embeddings=original)
    pair = twins(tiny(hf.Phi3ForCausalLM, config), tmp_path / "theirs")
    assert isinstance(pair.ours, Decoder)
    for model in (pair.theirs, check_round_trips(pair, tmp_path)):
        compare_padded(pair.ours, model, left=False)
    if original == 4096:
        del pair.fields["original_max_position_embeddings"]
        assert BY_TYPE["phi3"].read(ForeignFields(pair.fields)) == pair.ours.config


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    """As their config class fills them in; without bos and eos tokens and the number of key heads."""
    full = hf.AutoConfig.for_model(model_type).to_dict()
    full |= {name: full.get(name) or 1 for name in ("eos_token_id", "bos_token_id", "decoder_start_token_id")}
    absent = {"sliding_window", "layer_types", "use_sliding_window", "rope_parameters", "scale_embedding"}
    absent |= {"pad_token_id"} & full.keys() if model_type in ("bart", "mbart", "m2m_100", "marian") else set()
    absent -= {"rope_parameters"} if model_type == "gpt_oss" else set()  # required: its default is a scaled RoPE
    family = BY_TYPE[model_type]
    whole = family.read(ForeignFields(full))
    assert family.read(ForeignFields({name: x for name, x in full.items() if name not in absent})) == whole


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim=12"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping=20.0"),
        ("gemma2", {"head_dim": None}, "head_dim"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma2", {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern='LX'"),
        ("gemma2", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern=3"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern='LX'"),
        ("mixtral", {"layer_types": ["full_attention"] * 3, "sliding_window": 4}, "layer_types="),
        ("phi3", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ("gemma2", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("olmo2", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("mamba2", {"time_step_limit": [0.0, 0.5]}, "time_step_limit=[0.0, 0.5]"),
        ("mamba2", {"expand": 3}, "expand=3"),
        ("mamba", {"use_conv_bias": False}, "use_conv_bias=False"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mamba", {"architectures": ["FalconMambaForCausalLM"]}, "FalconMambaForCausalLM"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("olmoe", {"clip_qkv": 5.0}, "clip_qkv=5.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gpt_oss", {"rope_parameters": None}, "rope_parameters"),
        ("gpt_neox", {"architectures": ["GPTNeoXForSequenceClassification"]}, "GPTNeoXForSequenceClassification"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case: str, change: dict[str, Any], named: str) -> None:
    assert named in refusal(fields_of(case) | change)


@pytest.mark.parametrize("case", ["mixtral", "phi3", "phi3 window"])
def test_kinds_of_layers_that_transformers_does_not_read_may_say_what_it_computes(case: str) -> None:
    fields = fields_of(case)
    kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
    assert read_config(fields | {"layer_types": [kind] * 3}).config == read_config(fields).config


def test_a_cap_that_transformers_does_not_compute_is_not_written() -> None:
    written = write_config(read("gemma3_text").with_(score_cap=20.0))
    assert written.obstacles == ("score_cap=20.0 (gemma3_text has None)",)


@torch.no_grad()
def test_a_state_space_model_with_biases(tmp_path: Path) -> None:
    """Compared without padding, whose bias their convolution reads."""
    for name, theirs in {
        "mamba": tiny(hf.MambaForCausalLM, hf.MambaConfig(**MAMBA1, use_bias=True)),
        "mamba2": tiny(hf.Mamba2ForCausalLM, hf.Mamba2Config(**MAMBA, use_bias=True)),
    }.items():
        ours, tokens = twins(theirs, tmp_path / name).ours, torch.randint(3, 41, (2, 11))
        close(ours(tokens), theirs(tokens).logits)


def test_no_limit_of_time_steps_in_either_spelling(tmp_path: Path) -> None:
    """Before version 5, transformers wrote Infinity, which is not JSON."""
    model_class, config_class, fields = CASES["mamba2"]
    theirs = tiny(model_class, config_class(**fields))
    theirs.save_pretrained(tmp_path)
    file, tokens = tmp_path / "config.json", torch.randint(3, 41, (2, 11))
    read = json.loads(file.read_text(encoding="utf-8"))
    for limit in ("Infinity", '{"__float__": "Infinity"}'):
        file.write_text(json.dumps(read | {"time_step_limit": [0.0, "x"]}).replace('"x"', limit), encoding="utf-8")
        with torch.no_grad():
            close(regard.load(tmp_path)(tokens), theirs(tokens).logits)
    file.write_text(json.dumps(read).replace("1e-05", "Infinity"), encoding="utf-8")
    with pytest.raises(BadModelFile, match="norm_eps"):
        regard.load(tmp_path)


def test_generation_is_theirs(tmp_path: Path) -> None:
    """Greedy and beam tokens, through the engine that a CPU uses."""
    names = ("gpt_neox", "phi", "gemma2 caps", "gemma3_text", "smollm3", "opt", "olmo2", "exaone4", "stablelm")
    for name in (*names, "mixtral", "gpt_oss", "mamba", "mamba2"):
        model_class, config_class, fields = CASES[name]
        theirs = tiny(model_class, config_class(**fields))
        theirs.save_pretrained(tmp_path / name)
        ours = regard.load(tmp_path / name)
        prompt = torch.tensor([[5, 9, 3, 17]])
        for beam in (1, 3):
            settings: dict[str, Any] = {"max_new_tokens": 8, "num_beams": beam, "do_sample": False}
            told = theirs.generate(prompt, **settings, length_penalty=1.0, early_stopping=False)[0, 4:].tolist()
            got = generate(ours, prompt.tolist(), max_new_tokens=8, beam=beam)
            assert got.hypotheses[0][0].tokens == told[: len(got.hypotheses[0][0].tokens)], f"{name}, beam {beam}"


PAIR: dict[str, Any] = {
    **{"vocab_size": 41, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
MT5 = {**IDS, "vocab_size": 41, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
OTHERS: dict[str, Case] = {
    "modernbert": (hf.ModernBertModel, hf.ModernBertConfig, MODERN),
    "electra": (hf.ElectraModel, hf.ElectraConfig, {**SIZES, "embedding_size": 12}),
    "eurobert": (hf.EuroBertModel, hf.EuroBertConfig, {**SIZES, **GROUPED, "mask_token_id": 3}),
    "mt5": (hf.MT5ForConditionalGeneration, hf.MT5Config, {**MT5, "decoder_start_token_id": 0}),
    "mbart": (hf.MBartForConditionalGeneration, hf.MBartConfig, PAIR),
    "m2m_100": (hf.M2M100ForConditionalGeneration, hf.M2M100Config, PAIR),
}
LOOKED_AT = {name: case for name, case in CASES.items() if name == case[1].model_type and "mamba" not in name} | OTHERS


@torch.no_grad()
@pytest.mark.parametrize("case", LOOKED_AT.values(), ids=LOOKED_AT)
def test_the_lens_shows_their_weights(case: Case, tmp_path: Path) -> None:
    """Recomputed from q and k on the fused path, against the weights of their eager attention."""
    model_class, config_class, fields = case
    theirs = tiny(model_class, config_class(**fields))
    theirs.set_attn_implementation("eager")
    ours = twins(theirs, tmp_path / "theirs").ours
    target = [6, 9, 4] if ours.is_encoder_decoder else None
    look = regard.look(ours, [5, 9, 3, 17, 4, 22, 8], target)
    names = ("input_ids", "decoder_input_ids")
    told = theirs(**dict(zip(names, look.inputs, strict=False)), output_attentions=True)
    kinds = dict.fromkeys(("self", "encoder"), "attentions")
    if ours.is_encoder_decoder:
        kinds = {"encoder": "encoder_attentions", "self": "decoder_attentions", "cross": "cross_attentions"}
    for kind in look.kinds:
        layers = getattr(told, kinds[kind])
        assert len(layers) == look.layers(kind=kind)
        for layer, weights in enumerate(layers):
            got = torch.stack([look.weights(layer=layer, head=h, kind=kind) for h in range(look.heads(kind=kind))])
            torch.testing.assert_close(got, weights[0], atol=1e-5, rtol=1e-5)
