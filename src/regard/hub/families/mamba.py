"""Mamba (Gu & Dao 2023) and Mamba-2 (Dao & Gu 2024): a stack of state-space layers without attention."""

from __future__ import annotations

import math
from typing import Any

from ...config import ModelConfig
from ...foundation.jsonio import INFINITY
from .. import hf_family as hf
from ..weight_steps import Rename, Reshape, Step

_CLASSES = {"MambaForCausalLM": "lm", "MambaModel": "none"}
_CLASSES2 = {"Mamba2ForCausalLM": "lm", "Mamba2Model": "none"}
_FIELDS, _FIELDS2 = hf.field_names("mamba"), hf.field_names("mamba2")
_LAYER = {
    **{"norm.weight": "attention_norm.weight", "mixer.A_log": "attention.log_a", "mixer.D": "attention.skip"},
    **{"mixer.conv1d.weight": "attention.conv_weight", "mixer.conv1d.bias": "attention.conv_bias"},
}
_STEPS = {"mixer.dt_proj.weight": "attention.w_step.weight", "mixer.dt_proj.bias": "attention.dt_bias"}
_STEPS2 = {"mixer.dt_bias": "attention.dt_bias", "mixer.norm.weight": "attention.norm.weight"}
_PRODUCTS = {
    "mixer.in_proj": "attention.w_in",
    "mixer.out_proj": "attention.w_out",
    "mixer.x_proj": "attention.w_select",
}


def _read_common(theirs: hf.ForeignFields, classes: dict[str, str], ours: dict[str, Any]) -> dict[str, Any]:
    theirs.only("use_conv_bias", True)
    theirs.only("hidden_act", "silu")
    layers = {"architecture": "decoder", "positions": "none", "norm": "rms", "norm_place": "pre", "d_ff": 0}
    biases = dict.fromkeys(("qkv_bias", "out_bias"), theirs.get("use_bias", False))
    return {**layers, "head": theirs.head(classes), **biases, **ours, "pad_id": ours["pad_id"] or 0}


def _write_common(config: ModelConfig, model_type: str, classes: dict[str, str], fields: hf.Fields) -> dict[str, Any]:
    expand, rest = divmod(config.n_heads * config.head_width, config.d_model)
    if config.mixer != model_type or rest:
        raise ValueError(
            f"mixer={config.mixer!r} with {config.n_heads} heads of width {config.head_width} at d_model="
            f"{config.d_model} is not a {model_type}"
        )
    return {
        **hf.write_decoder(config, model_type, classes, fields, activation=None),
        "state_size": config.mixing.size_of(config.mixer_size),
        "expand": expand,
        "use_bias": config.qkv_bias,
    }


def read_mamba(theirs: hf.ForeignFields) -> ModelConfig:
    """Every channel is a head of width 1."""
    ours = hf.read_fields(theirs, _FIELDS)
    rank = theirs.get("time_step_rank", "auto")
    return ModelConfig(
        **_read_common(theirs, _CLASSES, ours),
        mixer="mamba",
        n_heads=theirs.get("expand", 2) * ours["d_model"],
        d_head=1,
        step_rank=-(-ours["d_model"] // 16) if rank == "auto" else rank,
    )


def write_mamba(config: ModelConfig) -> dict[str, Any]:
    fields = _write_common(config, "mamba", _CLASSES, _FIELDS)
    return {**fields, "time_step_rank": config.step_rank or -(-config.d_model // 16)}


def read_mamba2(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("time_step_limit", [0.0, math.inf], [0.0, INFINITY])
    ours = hf.read_fields(theirs, _FIELDS2)
    if ours["n_heads"] * ours["d_head"] != theirs.get("expand", 2) * ours["d_model"]:
        raise ValueError(
            f"config.json has expand={theirs.get('expand', 2)}, but num_heads={ours['n_heads']} times "
            f"head_dim={ours['d_head']} is not expand times hidden_size={ours['d_model']}"
        )
    return ModelConfig(**_read_common(theirs, _CLASSES2, ours), mixer="mamba2")


def write_mamba2(config: ModelConfig) -> dict[str, Any]:
    fields = _write_common(config, "mamba2", _CLASSES2, _FIELDS2)
    return {**fields, "head_dim": config.head_width, "n_groups": config.n_kv_heads or 1}


def mamba_steps(config: ModelConfig) -> list[Step]:
    """The steps of both types; those for tensors that a type does not have do nothing."""
    prefix = "" if config.head == "none" else "backbone."
    theirs, ours, table = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}.", f"{prefix}embeddings.weight"
    assert config.mixing.conv_width is not None
    width, names = config.mixing.conv_width(config), _LAYER | (_STEPS if config.mixer == "mamba" else _STEPS2)
    return [
        hf.token_head(config, table),
        Rename(table, "token.weight"),
        Rename(f"{prefix}norm_f.weight", "decoder.norm.weight"),
        *(Rename(f"{theirs}{a}", f"{ours}{b}") for a, b in names.items()),
        Reshape(f"{ours}attention.conv_weight", (width, 1, config.conv_size), (width, config.conv_size)),
        *hf.modules(_PRODUCTS, theirs, ours),
    ]


MAMBA = hf.Family(("mamba",), read_mamba, write_mamba, mamba_steps)
MAMBA2 = hf.Family(("mamba2",), read_mamba2, write_mamba2, mamba_steps)
