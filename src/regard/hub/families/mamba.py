"""Mamba-2 (Dao & Gu 2024): layers of a state-space model alone, without attention and feed-forward networks."""

from __future__ import annotations

import math
from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Rename, Reshape, Step

_CLASSES = {"Mamba2ForCausalLM": "lm", "Mamba2Model": "none"}
_FIELDS = hf.field_names("mamba2")
_LAYER = {
    **{"norm.weight": "attention_norm.weight", "mixer.norm.weight": "attention.norm.weight"},
    **{"mixer.dt_bias": "attention.dt_bias", "mixer.A_log": "attention.log_a", "mixer.D": "attention.skip"},
    **{"mixer.conv1d.weight": "attention.conv_weight", "mixer.conv1d.bias": "attention.conv_bias"},
}
_PRODUCTS = {"mixer.in_proj": "attention.w_in", "mixer.out_proj": "attention.w_out"}


def read_mamba2(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("use_conv_bias", True)
    theirs.only("hidden_act", "silu")
    limit = theirs.get("time_step_limit", [0.0, math.inf])
    if limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # JSON has no word for it
        raise ValueError(f"config.json has time_step_limit={limit}; regard supports [0.0, Infinity] for mamba2")
    ours = hf.read_fields(theirs, _FIELDS)
    if ours["n_heads"] * ours["d_head"] != theirs.get("expand", 2) * ours["d_model"]:
        raise ValueError(
            f"config.json has expand={theirs.get('expand', 2)}, but num_heads={ours['n_heads']} of "
            f"head_dim={ours['d_head']} are not so many times hidden_size={ours['d_model']}"
        )
    return ModelConfig(
        architecture="decoder",
        head=theirs.head(_CLASSES),
        mixer="mamba2",
        positions="none",
        norm="rms",
        norm_place="pre",
        d_ff=0,
        **dict.fromkeys(("qkv_bias", "out_bias"), theirs.get("use_bias", False)),
        **ours | {"eos_id": theirs.token_id("eos_token_id"), "pad_id": ours["pad_id"] or 0},
    )


def write_mamba2(config: ModelConfig) -> dict[str, Any]:
    expand, rest = divmod(config.n_heads * config.head_width, config.d_model)
    if config.mixer != "mamba2" or rest:
        raise ValueError(
            f"mixer={config.mixer!r} with heads {expand} and a part times as wide as the model is no Mamba 2"
        )
    return {
        "model_type": "mamba2",
        "architectures": hf.write_head(config, _CLASSES)["architectures"],
        **hf.write_fields(config, _FIELDS, nulls=True),
        "head_dim": config.head_width,
        "state_size": config.mixing.size_of(config.mixer_size),
        "n_groups": config.n_kv_heads or 1,
        "expand": expand,
        "use_bias": config.qkv_bias,
        "eos_token_id": config.eos_id,
    }


def mamba2_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "backbone."
    theirs, ours, table = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}.", f"{prefix}embeddings.weight"
    d_shared = (config.n_kv_heads or 1) * config.mixing.size_of(config.mixer_size)
    width = config.n_heads * config.head_width + 2 * d_shared
    return [
        hf.token_head(config, table),
        Rename(table, "token.weight"),
        Rename(f"{prefix}norm_f.weight", "decoder.norm.weight"),
        *(Rename(f"{theirs}{a}", f"{ours}{b}") for a, b in _LAYER.items()),
        Reshape(f"{ours}attention.conv_weight", (width, 1, config.conv_size), (width, config.conv_size)),
        *hf.modules(_PRODUCTS, theirs, ours),
    ]


MAMBA2 = hf.Family(("mamba2",), read_mamba2, write_mamba2, mamba2_steps)
