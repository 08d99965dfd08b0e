"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, Conv1D weights stored (in, out)."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..hf_family import Family, ForeignFields, from_our_activation, write_head
from ..weight_steps import Drop, Rename, Step, Tie, Transpose

_HEADS = {"GPT2LMHeadModel": "lm", "GPT2Model": "none"}


def read(theirs: ForeignFields) -> ModelConfig:
    theirs.only("scale_attn_weights", True)
    theirs.only("scale_attn_by_inverse_layer_idx", False)
    theirs.only("add_cross_attention", False)
    theirs.only("pruned_heads", {})
    d_model = theirs.need("n_embd")
    return ModelConfig(
        architecture="decoder",
        head=theirs.head(_HEADS),
        vocab_size=theirs.need("vocab_size"),
        d_model=d_model,
        n_layers=theirs.need("n_layer"),
        n_heads=theirs.need("n_head"),
        d_ff=theirs.get("n_inner", 4 * d_model),
        max_len=theirs.need("n_positions"),
        positions="learned",
        norm_place="pre",
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        activation=theirs.activation("activation_function", "gelu_new"),
        tie_head=theirs.get("tie_word_embeddings", True),
        dropout=theirs.get("resid_pdrop", 0.1),
        attention_dropout=theirs.get("attn_pdrop", 0.1),
        embedding_dropout=theirs.get("embd_pdrop", 0.1),
        bos_id=theirs.get("bos_token_id"),
        eos_id=theirs.token_id("eos_token_id"),
        pad_id=theirs.get("pad_token_id", theirs.token_id("eos_token_id") or 0),
        init_std=theirs.get("initializer_range", 0.02),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": write_head(config, _HEADS)["architectures"],
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_len,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": from_our_activation(config.activation),
        "tie_word_embeddings": config.tie_head,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.embedding_dropout,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "initializer_range": 0.02 if config.init_std is None else config.init_std,
    }


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "transformer."
    theirs, ours = f"{prefix}h.{{i}}.", "decoder.blocks.{i}."
    renames = [
        (f"{prefix}wte.weight", "token.weight"),
        (f"{prefix}wpe.weight", "embeddings.position.weight"),
        *((f"{prefix}ln_f.{x}", f"decoder.norm.{x}") for x in ("weight", "bias")),
        *(
            (f"{theirs}{a}.{x}", f"{ours}{b}.{x}")
            for a, b in {
                "ln_1": "attention_norm",
                "attn.c_attn": "attention.w_qkv",
                "attn.c_proj": "attention.w_o",
                "ln_2": "ff_norm",
                "mlp.c_fc": "ff.w_in",
                "mlp.c_proj": "ff.w_out",
            }.items()
            for x in ("weight", "bias")
        ),
    ]
    head: Step = (
        Tie("lm_head.weight", f"{prefix}wte.weight") if config.tie_head else Rename("lm_head.weight", "head.weight")
    )
    return [
        Drop(f"{theirs}attn.bias"),
        Drop(f"{theirs}attn.masked_bias"),
        head,
        *(Rename(a, b) for a, b in renames),
        *(Transpose(f"{ours}{name}.weight") for name in ("attention.w_qkv", "attention.w_o", "ff.w_in", "ff.w_out")),
    ]


GPT2 = Family(("gpt2",), read, write, steps)
