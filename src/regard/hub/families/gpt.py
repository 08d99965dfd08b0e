"""GPT-2 and similar decoders: learned or rotary positions, LayerNorm, mostly plain feed-forward networks, biases.

gpt2         learned positions, weights stored (in, out) (Radford et al. 2019)
opt          learned positions after two unused rows (Zhang et al. 2022)
gpt_neox     rotates a quarter of each head, parallel attention and feed-forward (Black et al. 2022; Pythia)
phi          parallel with one norm for both, a bias on the logits (Phi 1, 1.5 and 2)
starcoder2   rotary positions, grouped key heads, a window (Lozhkov et al. 2024)
stablelm     rotates a quarter of each head, gated feed-forward, few biases
"""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Drop, HeadsTogether, Rename, Step, Transpose
from .llama import read_rope, write_rope

_DECODER: dict[str, Any] = {"architecture": "decoder", "norm_place": "pre"}
_BIASES = ("qkv_bias", "out_bias", "ff_bias")
_GPT2_HEADS = {"GPT2LMHeadModel": "lm", "GPT2Model": "none"}
_GPT2_FIELDS, _GPT2_LAYER = hf.field_names("gpt2"), hf.layer_names("gpt2")


def read_gpt2(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("scale_attn_weights", True)
    theirs.only("scale_attn_by_inverse_layer_idx", False)
    theirs.only("add_cross_attention", False)
    theirs.only("pruned_heads", {})
    ours = hf.read_fields(theirs, _GPT2_FIELDS)
    ours["activation"] = theirs.activation("activation_function", "gelu_new")
    if ours["d_ff"] is None:
        ours["d_ff"] = 4 * ours["d_model"]
    return ModelConfig(**_DECODER, head=theirs.head(_GPT2_HEADS), positions="learned", **_with_padding(ours))


def _with_padding(ours: dict[str, Any]) -> dict[str, Any]:
    """Fill in a missing padding token with the end token."""
    return ours | {"pad_id": (ours["eos_id"] or 0) if ours["pad_id"] is None else ours["pad_id"]}


def _write_rotary(
    config: ModelConfig, kind: str, heads: dict[str, str], fields: hf.Fields, activation: str | None = "hidden_act"
) -> dict[str, Any]:
    """The fields shared by models with rotary positions; the rotated share is always written, as defaults differ."""
    rope = write_rope(config) | {"partial_rotary_factor": config.rope_fraction}
    written = hf.write_decoder(config, kind, heads, fields, activation) | {"rope_parameters": rope}
    if "num_key_value_heads" in fields:
        written["num_key_value_heads"] = config.n_kv_heads or config.n_heads
    return written


def _outer_steps(config: ModelConfig, table: str, norm: str, head: str = "lm_head.weight") -> list[Step]:
    """The token table, the output matrix and the last norm."""
    return [hf.token_head(config, table, head), Rename(table, "token.weight"), *hf.modules({norm: "decoder.norm"})]


def _join_qkv(config: ModelConfig, theirs: str, ours: str) -> list[Step]:
    kv_rows = (config.n_kv_heads or config.n_heads) * config.head_width
    qkv = [f"{theirs}self_attn.{x}_proj" for x in "qkv"]
    return hf.join_modules(qkv, f"{ours}attention.w_qkv", (config.n_heads * config.head_width, kv_rows, kv_rows))


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return hf.write_decoder(config, "gpt2", _GPT2_HEADS, _GPT2_FIELDS, "activation_function")


def gpt2_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "transformer."
    theirs, ours = f"{prefix}h.{{i}}.", "decoder.blocks.{i}."
    return [
        Drop(f"{theirs}attn.bias"),
        Drop(f"{theirs}attn.masked_bias"),
        *_outer_steps(config, f"{prefix}wte.weight", f"{prefix}ln_f"),
        Rename(f"{prefix}wpe.weight", "embeddings.position.weight"),
        *hf.modules(_GPT2_LAYER, theirs, ours),
        *(Transpose(f"{ours}{name}.weight") for name in ("attention.w_qkv", "attention.w_o", "ff.w_in", "ff.w_out")),
    ]


_OPT_HEADS = {"OPTForCausalLM": "lm", "OPTModel": "none"}
_OPT_FIELDS = hf.field_names("opt")


def read_opt(theirs: hf.ForeignFields) -> ModelConfig:
    """Positions count only real tokens: OPT recognises them by the mask, we by the padding token."""
    theirs.only("word_embed_proj_dim", theirs.need("hidden_size"))
    theirs.only("_remove_final_layer_norm", False)
    theirs.only("layer_norm_elementwise_affine", True)
    return ModelConfig(
        architecture="decoder",
        head=theirs.head(_OPT_HEADS),
        positions="learned",
        position_offset=2,
        positions_skip_padding=True,
        norm_place="pre" if theirs.get("do_layer_norm_before", True) else "post",
        **dict.fromkeys(_BIASES, theirs.get("enable_bias", True)),
        activation=theirs.activation("activation_function", "relu"),
        **hf.read_fields(theirs, _OPT_FIELDS),
    )


def write_opt(config: ModelConfig) -> dict[str, Any]:
    return {
        **hf.write_decoder(config, "opt", _OPT_HEADS, _OPT_FIELDS, "activation_function"),
        "word_embed_proj_dim": config.d_model,
        "do_layer_norm_before": config.norm_place == "pre",
        "enable_bias": config.ff_bias,
    }


def opt_steps(config: ModelConfig) -> list[Step]:
    prefix = "decoder." if config.head == "none" else "model.decoder."
    theirs, ours = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}."
    return [
        *_outer_steps(config, f"{prefix}embed_tokens.weight", f"{prefix}final_layer_norm"),
        Rename(f"{prefix}embed_positions.weight", "embeddings.position.weight"),
        *hf.modules(hf.layer_names("opt"), theirs, ours),
        *_join_qkv(config, theirs, ours),
    ]


_NEOX_HEADS = {"GPTNeoXForCausalLM": "lm", "GPTNeoXModel": "none"}
_NEOX_FIELDS = hf.field_names("gpt_neox")


def read_neox(theirs: hf.ForeignFields) -> ModelConfig:
    old = {"rope_theta": theirs.get("rotary_emb_base", 10000.0)}  # its name in older versions
    theirs = hf.ForeignFields(old | {name: x for name, x in theirs.fields.items() if x is not None})
    ours = hf.read_fields(theirs, _NEOX_FIELDS) | read_rope(theirs, fraction=theirs.get("rotary_pct", 0.25))
    return ModelConfig(
        **_DECODER,
        head=theirs.head(_NEOX_HEADS),
        positions="rope",
        parallel_residual="two-norms" if theirs.get("use_parallel_residual", True) else "none",
        **dict.fromkeys(("qkv_bias", "out_bias"), theirs.get("attention_bias", True)),
        activation=theirs.activation("hidden_act", "gelu"),
        **_with_padding(ours),
        embedding_dropout=ours["dropout"],
    )


def write_neox(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_rotary(config, "gpt_neox", _NEOX_HEADS, _NEOX_FIELDS),
        "use_parallel_residual": config.parallel_residual != "none",
        "attention_bias": config.qkv_bias,
    }


def neox_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "gpt_neox."
    theirs, ours = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}."
    return [
        *(Drop(f"{theirs}attention.{x}") for x in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        *_outer_steps(config, f"{prefix}embed_in.weight", f"{prefix}final_layer_norm", "embed_out.weight"),
        *hf.modules(hf.layer_names("gpt_neox"), theirs, ours),
        *(HeadsTogether(f"{ours}attention.w_qkv.{kind}", config.n_heads) for kind in ("weight", "bias")),
    ]


_PHI_HEADS = {"PhiForCausalLM": "lm", "PhiModel": "none"}
_PHI_FIELDS = hf.field_names("phi")


def read_phi(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("qk_layernorm", False)
    ours = hf.read_fields(theirs, _PHI_FIELDS) | read_rope(theirs, fraction=0.5)
    ours["n_kv_heads"] = ours["n_kv_heads"] or ours["n_heads"]
    head = theirs.head(_PHI_HEADS)
    return ModelConfig(
        **_DECODER,
        head=head,
        positions="rope",
        parallel_residual="one-norm",
        head_bias=head == "lm",
        activation=theirs.activation("hidden_act", "gelu_new"),
        **_with_padding(ours),
    )


def write_phi(config: ModelConfig) -> dict[str, Any]:
    return _write_rotary(config, "phi", _PHI_HEADS, _PHI_FIELDS)


def phi_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "model."
    theirs, ours = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}."
    return [
        Drop(f"{theirs}self_attn.rotary_emb.inv_freq"),
        *_outer_steps(config, f"{prefix}embed_tokens.weight", f"{prefix}final_layernorm"),
        Rename("lm_head.bias", "head.bias"),
        *hf.modules(hf.layer_names("phi"), theirs, ours),
        *_join_qkv(config, theirs, ours),
    ]


_STARCODER_HEADS = {"Starcoder2ForCausalLM": "lm", "Starcoder2Model": "none"}
_STARCODER_FIELDS = hf.field_names("starcoder2")


def read_starcoder2(theirs: hf.ForeignFields) -> ModelConfig:
    ours = hf.read_fields(theirs, _STARCODER_FIELDS) | read_rope(theirs)
    return ModelConfig(
        **_DECODER,
        head=theirs.head(_STARCODER_HEADS),
        positions="rope",
        **dict.fromkeys(_BIASES, theirs.get("use_bias", True)),
        activation=theirs.activation("hidden_act", "gelu_pytorch_tanh"),
        **_with_padding(ours),
    )


def write_starcoder2(config: ModelConfig) -> dict[str, Any]:
    return _write_rotary(config, "starcoder2", _STARCODER_HEADS, _STARCODER_FIELDS) | {"use_bias": config.ff_bias}


_STABLELM_HEADS = {"StableLmForCausalLM": "lm", "StableLmModel": "none"}
_STABLELM_FIELDS = hf.field_names("stablelm")


def read_stablelm(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("qk_layernorm", False)
    theirs.only("hidden_act", "silu")
    ours = hf.read_fields(theirs, _STABLELM_FIELDS) | read_rope(theirs, fraction=0.25)
    return ModelConfig(
        **_DECODER,
        head=theirs.head(_STABLELM_HEADS),
        positions="rope",
        parallel_residual="one-norm" if theirs.get("use_parallel_residual", False) else "none",
        qkv_bias=theirs.get("use_qkv_bias", False),
        out_bias=False,
        ff_bias=False,
        activation="swiglu",
        **_with_padding(ours),
    )


def write_stablelm(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_rotary(config, "stablelm", _STABLELM_HEADS, _STABLELM_FIELDS, activation=None),
        "use_parallel_residual": config.parallel_residual != "none",
        "use_qkv_bias": config.qkv_bias,
    }


def rotary_steps(config: ModelConfig) -> list[Step]:
    """The steps of StarCoder 2 and StableLM: named like LLaMA's, except for the feed-forward network and biases."""
    prefix = "" if config.head == "none" else "model."
    theirs, ours = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}."
    gates = [f"{theirs}mlp.{x}_proj" for x in ("gate", "up")]
    feed_forward = hf.modules(hf.layer_names("starcoder2"), theirs, ours)
    if config.activation == "swiglu":
        joined = hf.join_modules(gates, f"{ours}ff.w_in", (config.d_ff,) * 2)
        feed_forward = [*joined, *hf.modules({"mlp.down_proj": "ff.w_out"}, theirs, ours)]
    return [
        *_outer_steps(config, f"{prefix}embed_tokens.weight", f"{prefix}norm"),
        *hf.modules({"self_attn.o_proj": "attention.w_o", **hf.layer_names("llama")}, theirs, ours),
        *_join_qkv(config, theirs, ours),
        *feed_forward,
    ]


GPT2 = hf.Family(("gpt2",), read_gpt2, write_gpt2, gpt2_steps)
OPT = hf.Family(("opt",), read_opt, write_opt, opt_steps)
GPT_NEOX = hf.Family(("gpt_neox",), read_neox, write_neox, neox_steps)
PHI = hf.Family(("phi",), read_phi, write_phi, phi_steps)
STARCODER2 = hf.Family(("starcoder2",), read_starcoder2, write_starcoder2, rotary_steps)
STABLELM = hf.Family(("stablelm",), read_stablelm, write_stablelm, rotary_steps)
