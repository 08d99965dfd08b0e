"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, Conv1D weights stored (in, out)."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Drop, Rename, Step, Transpose

_HEADS = {"GPT2LMHeadModel": "lm", "GPT2Model": "none"}
_FIELDS, _LAYER = hf.field_names("gpt2"), hf.layer_names("gpt2")


def read(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("scale_attn_weights", True)
    theirs.only("scale_attn_by_inverse_layer_idx", False)
    theirs.only("add_cross_attention", False)
    theirs.only("pruned_heads", {})
    ours = hf.read_fields(theirs, _FIELDS)
    ours["activation"] = theirs.activation("activation_function", "gelu_new")
    ours["eos_id"] = theirs.token_id("eos_token_id")
    if ours["d_ff"] is None:
        ours["d_ff"] = 4 * ours["d_model"]
    if ours["pad_id"] is None:
        ours["pad_id"] = ours["eos_id"] or 0
    return ModelConfig(architecture="decoder", head=theirs.head(_HEADS), positions="learned", norm_place="pre", **ours)


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": hf.write_head(config, _HEADS)["architectures"],
        **hf.write_fields(config, _FIELDS, nulls=True),
        "activation_function": hf.from_our_activation(config.activation),
    }


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "transformer."
    theirs, ours = f"{prefix}h.{{i}}.", "decoder.blocks.{i}."
    return [
        Drop(f"{theirs}attn.bias"),
        Drop(f"{theirs}attn.masked_bias"),
        hf.token_head(config, f"{prefix}wte.weight"),
        Rename(f"{prefix}wte.weight", "token.weight"),
        Rename(f"{prefix}wpe.weight", "embeddings.position.weight"),
        *hf.modules({f"{prefix}ln_f": "decoder.norm"}),
        *hf.modules(_LAYER, theirs, ours),
        *(Transpose(f"{ours}{name}.weight") for name in ("attention.w_qkv", "attention.w_o", "ff.w_in", "ff.w_out")),
    ]


GPT2 = hf.Family(("gpt2",), read, write, steps)
