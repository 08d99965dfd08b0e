"""Decoder-only families: GPT-2, and LLaMA with its line.

GPT-2 (Radford et al. 2019) has learned positions and weights stored (in, out). LLaMA (Touvron et al. 2023) has rotary
positions, RMSNorm, gated feed-forward and grouped key heads; Mistral adds a window (Jiang et al. 2023), Ministral has
it in some layers only, Qwen 2 has biases on q, k and v, Qwen 3 a norm on each query and key head.
"""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig, RopeScalingConfig
from .. import hf_family as hf
from ..weight_steps import Drop, Rename, Step, Transpose

_GPT2_HEADS = {"GPT2LMHeadModel": "lm", "GPT2Model": "none"}
_GPT2_FIELDS, _GPT2_LAYER = hf.field_names("gpt2"), hf.layer_names("gpt2")
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
_LLAMA_FIELDS, _LLAMA_LAYER = hf.field_names("llama"), hf.layer_names("llama")


def read_gpt2(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("scale_attn_weights", True)
    theirs.only("scale_attn_by_inverse_layer_idx", False)
    theirs.only("add_cross_attention", False)
    theirs.only("pruned_heads", {})
    ours = hf.read_fields(theirs, _GPT2_FIELDS)
    ours["activation"] = theirs.activation("activation_function", "gelu_new")
    ours["eos_id"] = theirs.token_id("eos_token_id")
    if ours["d_ff"] is None:
        ours["d_ff"] = 4 * ours["d_model"]
    if ours["pad_id"] is None:
        ours["pad_id"] = ours["eos_id"] or 0
    return ModelConfig(
        architecture="decoder", head=theirs.head(_GPT2_HEADS), positions="learned", norm_place="pre", **ours
    )


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": hf.write_head(config, _GPT2_HEADS)["architectures"],
        **hf.write_fields(config, _GPT2_FIELDS, nulls=True),
        "activation_function": hf.from_our_activation(config.activation),
    }


def gpt2_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "transformer."
    theirs, ours = f"{prefix}h.{{i}}.", "decoder.blocks.{i}."
    return [
        Drop(f"{theirs}attn.bias"),
        Drop(f"{theirs}attn.masked_bias"),
        hf.token_head(config, f"{prefix}wte.weight"),
        Rename(f"{prefix}wte.weight", "token.weight"),
        Rename(f"{prefix}wpe.weight", "embeddings.position.weight"),
        *hf.modules({f"{prefix}ln_f": "decoder.norm"}),
        *hf.modules(_GPT2_LAYER, theirs, ours),
        *(Transpose(f"{ours}{name}.weight") for name in ("attention.w_qkv", "attention.w_o", "ff.w_in", "ff.w_out")),
    ]


def read_llama(theirs: hf.ForeignFields) -> ModelConfig:
    kind = theirs.model_type
    theirs.only("pretraining_tp", 1)
    ours = hf.read_fields(theirs, _LLAMA_FIELDS)
    if ours["n_kv_heads"] is None:
        ours["n_kv_heads"] = ours["n_heads"]
    heads = {f"{_CLASSES[kind]}ForCausalLM": "lm", f"{_CLASSES[kind]}Model": "none"}
    window, window_layers = _read_window(theirs, ours["n_layers"])
    base, scaling = _read_rope(theirs)
    width, activation = ours["d_model"] // ours["n_heads"], theirs.activation("hidden_act", "silu")
    if activation not in _GATED:
        raise ValueError(f"config.json has hidden_act={activation!r}; regard gates with {', '.join(_GATED)}")
    return ModelConfig(
        architecture="decoder",
        head=theirs.head(heads),
        **ours,
        d_head=theirs.need("head_dim") if kind == "qwen3" else theirs.get("head_dim", width),
        positions="rope",
        rope_base=base,
        rope_scaling=scaling,
        norm="rms",
        norm_place="pre",
        window=window,
        window_layers=window_layers,
        qkv_bias=kind == "qwen2" or theirs.get("attention_bias", False),
        out_bias=kind != "qwen2" and theirs.get("attention_bias", False),
        qk_norm=kind == "qwen3",
        activation=_GATED[activation],
        ff_bias=theirs.get("mlp_bias", False),
        eos_id=theirs.token_id("eos_token_id"),
    )


def _read_window(theirs: hf.ForeignFields, n_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The sliding window and the layers that have it; which layers do is written in three ways over the versions.

    Mistral with layer_types is what Ministral is; their automatic classes read it so too.
    """
    window, always = theirs.get("sliding_window"), theirs.model_type in ("mistral", "ministral")
    if theirs.model_type == "llama":
        return None, None
    if not (always or theirs.get("use_sliding_window", False)):
        window = None
    kinds = theirs.get("layer_types")
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if kinds is not None and set(kinds) - known:
        unknown, can = sorted(set(kinds) - known)[0], " or ".join(sorted(known))
        raise ValueError(f"config.json has layer_types with {unknown!r}; with sliding_window={window} it can be {can}")
    if window is None:
        return None, None
    if kinds is not None:
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        layers = tuple(range(0 if always else theirs.get("max_window_layers", 28), n_layers))
    if not layers:
        return None, None
    return window, None if len(layers) == n_layers else layers


_ORIGINAL = "original_max_position_embeddings"
_SCALING_LLAMA_FIELDS: dict[
    str, tuple[str, ...]
] = {  # what each kind reads; fields beside them mean nothing, there as here
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}


def _our_name(field: str) -> str:
    return "original_max_len" if field == _ORIGINAL else field


def _read_rope(theirs: hf.ForeignFields) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    fields = dict(theirs.get("rope_scaling", {}) or theirs.get("rope_parameters", {}))
    nested = [name for name, value in fields.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"config.json has rope_parameters for {nested[0]!r} alone; regard turns all layers alike")
    fraction = fields.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
    if fraction != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor={fraction}; regard reads 1.0 here")
    base = fields.get("rope_theta", theirs.get("rope_theta", 10000.0))
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return base, None
    if kind not in _SCALING_LLAMA_FIELDS:
        raise ValueError(f"config.json has rope_type={kind!r}; regard has {', '.join(_SCALING_LLAMA_FIELDS)}")
    fields[_ORIGINAL] = theirs.get(_ORIGINAL, fields.get(_ORIGINAL))  # a field of its own comes before the dict's
    known = {_our_name(name): fields[name] for name in _SCALING_LLAMA_FIELDS[kind] if fields.get(name) is not None}
    return base, RopeScalingConfig(kind=kind, **known)


def write_llama(config: ModelConfig) -> dict[str, Any]:
    kind = _kind(config)
    head = "ForCausalLM" if config.head == "lm" else "Model"
    gates = {ours: theirs for theirs, ours in _GATED.items()}
    if config.activation not in gates or config.head not in ("lm", "none"):
        raise ValueError(f"activation={config.activation!r} with head={config.head!r} is none of the LLaMA line")
    windowed = range(config.n_layers) if config.window_layers is None else config.window_layers
    fields: dict[str, Any] = {
        "model_type": kind,
        "architectures": [f"{_CLASSES[kind]}{head}"],
        **hf.write_fields(config, _LLAMA_FIELDS, nulls=True),
        "num_key_value_heads": config.n_kv_heads or config.n_heads,
        "head_dim": config.head_width,
        "hidden_act": hf.from_our_activation(gates[config.activation]),
        "eos_token_id": config.eos_id,
        "rope_parameters": _write_rope(config),
    }
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = config.ff_bias
    if kind != "llama":
        fields["sliding_window"] = config.window
    if kind in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = config.window is not None
        fields["max_window_layers"] = min(windowed, default=config.n_layers) if config.window else config.n_layers
    if kind in ("qwen2", "qwen3", "ministral"):
        fields["layer_types"] = [
            "sliding_attention" if config.window is not None and layer in windowed else "full_attention"
            for layer in range(config.n_layers)
        ]
    return fields


def _kind(config: ModelConfig) -> str:
    """Which member of the line has these features."""
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    if config.window is None:
        return "llama"
    return "mistral" if config.window_layers is None else "ministral"


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        fields["rope_type"] = scaling.kind
        for name in _SCALING_LLAMA_FIELDS[scaling.kind]:
            value = getattr(scaling, _our_name(name))
            if value is not None or name == "factor":  # they want to be told that there is no factor
                fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def llama_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "model."
    theirs, ours = f"{prefix}layers.{{i}}.", "decoder.blocks.{i}."
    q_rows = config.n_heads * config.head_width
    kv_rows = (config.n_kv_heads or config.n_heads) * config.head_width
    qkv, gates = [f"{theirs}self_attn.{x}_proj" for x in "qkv"], [f"{theirs}mlp.{x}_proj" for x in ("gate", "up")]
    return [
        Drop(f"{theirs}self_attn.rotary_emb.inv_freq"),
        hf.token_head(config, f"{prefix}embed_tokens.weight"),
        Rename(f"{prefix}embed_tokens.weight", "token.weight"),
        Rename(f"{prefix}norm.weight", "decoder.norm.weight"),
        *hf.modules(_LLAMA_LAYER, theirs, ours),
        *hf.join_modules(qkv, f"{ours}attention.w_qkv", (q_rows, kv_rows, kv_rows)),
        *hf.join_modules(gates, f"{ours}ff.w_in", (config.d_ff, config.d_ff)),
    ]


GPT2 = hf.Family(("gpt2",), read_gpt2, write_gpt2, gpt2_steps)
LLAMA = hf.Family(tuple(_CLASSES), read_llama, write_llama, llama_steps)
