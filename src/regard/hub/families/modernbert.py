"""ModernBERT (Warner et al. 2024): an encoder with rotary positions, gated feed-forward networks, and a window in two
of three layers, which have their own RoPE base."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Rename, Step

_CLASSES = {"ModernBertModel": "none", "ModernBertForMaskedLM": "masked-lm"}
_FIELDS = hf.field_names("encoder", "modernbert")
_GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}
_LAYER = {"attn.Wqkv": "attention.w_qkv", "attn.Wo": "attention.w_o", "attn_norm": "attention_norm"}
_LAYER |= {"mlp.Wi": "ff.w_in", "mlp.Wo": "ff.w_out", "mlp_norm": "ff_norm"}
_BASES = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


def read_modernbert(theirs: hf.ForeignFields) -> ModelConfig:
    ours = hf.read_fields(theirs, _FIELDS)
    activation, n_layers = theirs.activation("hidden_activation", "gelu"), ours["n_layers"]
    if activation not in _GATED:
        gates = ", ".join(_GATED)
        raise ValueError(f"config.json has hidden_activation={activation!r}; regard supports gates with {gates}")
    every = theirs.get("global_attn_every_n_layers", 3)
    default_kinds = ["sliding_attention" if layer % every else "full_attention" for layer in range(n_layers)]
    kinds = theirs.get("layer_types", default_kinds)
    if set(kinds) - set(_BASES) or len(kinds) != n_layers:
        known = " and ".join(_BASES)
        raise ValueError(f"config.json has layer_types={kinds}; regard reads {known}, one per layer ({n_layers})")
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    bases = {kind: _rope_base(theirs, kind) for kind in _BASES}
    head = theirs.head(_CLASSES)
    biases = dict.fromkeys(("qkv_bias", "out_bias"), theirs.get("attention_bias", False))
    if head == "masked-lm":
        ours |= {"head_transform": True, "head_bias": theirs.get("decoder_bias", True)}
        ours |= {"head_transform_bias": theirs.get("classifier_bias", False)}
        ours |= {"head_activation": theirs.activation("classifier_activation", "gelu")}
    return ModelConfig(
        **{"architecture": "encoder", "head": head, "positions": "rope", "norm_place": "pre", "first_norm": False},
        **{"embedding_norm": True, "activation": _GATED[activation], **ours, **biases},
        rope_base=bases["full_attention"] if len(windowed) < n_layers else bases["sliding_attention"],
        # local_attention counts the keys on both sides; our window counts one side and the token itself.
        window=theirs.get("local_attention", 128) // 2 + 1 if windowed else None,
        window_layers=windowed if 0 < len(windowed) < n_layers else None,
        window_rope_base=bases["sliding_attention"] if 0 < len(windowed) < n_layers else None,
    )


def _rope_base(theirs: hf.ForeignFields, kind: str) -> float:
    """The RoPE base of one kind of layer, from ``rope_parameters`` (transformers 5) or its own field (before)."""
    name, default = _BASES[kind]
    fields = (theirs.get("rope_parameters", {}).get(kind) or {}) | theirs.get("rope_scaling", {})
    if fields.get("rope_type", "default") != "default":
        raise ValueError(f"config.json has rope_type={fields['rope_type']!r}; regard supports 'default' for modernbert")
    return fields.get("rope_theta", theirs.get(name, default))


def write_modernbert(config: ModelConfig) -> dict[str, Any]:
    gates = {ours: theirs for theirs, ours in _GATED.items()}
    if config.activation not in gates:
        raise ValueError(f"activation={config.activation!r} is not one of ModernBERT's: {', '.join(gates)}")
    windowed = range(config.n_layers) if config.window_layers is None else config.window_layers
    kinds = {True: "sliding_attention", False: "full_attention"}
    bases = {"full_attention": config.rope_base, "sliding_attention": config.window_rope_base or config.rope_base}
    fields = {
        "model_type": "modernbert",
        **hf.write_head(config, _CLASSES),
        **hf.write_fields(config, _FIELDS),
        "hidden_activation": hf.from_our_activation(gates[config.activation]),
        "layer_types": [kinds[config.window is not None and layer in windowed] for layer in range(config.n_layers)],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "attention_bias": config.qkv_bias,
        "classifier_bias": config.head_transform_bias,
        "decoder_bias": config.head_bias,
    }
    if config.window is not None:
        fields["local_attention"] = 2 * (config.window - 1)
    if config.head == "masked-lm":
        activation = config.head_activation or config.activation
        fields["classifier_activation"] = hf.from_our_activation(activation)
    fields.pop("has_pooler", None)
    return fields


def modernbert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "model."
    table = f"{prefix}embeddings.tok_embeddings.weight"
    head: list[Step] = []
    if config.head == "masked-lm":
        head = [hf.token_head(config, table, "decoder.weight"), Rename("decoder.bias", "head.bias")]
        head += hf.modules({"head.dense": "head.transform", "head.norm": "head.norm"})
    return [
        *head,
        Rename(table, "token.weight"),
        *hf.modules({f"{prefix}embeddings.norm": "embeddings.norm", f"{prefix}final_norm": "encoder.norm"}),
        *hf.modules(_LAYER, f"{prefix}layers.{{i}}.", "encoder.blocks.{i}."),
    ]


MODERNBERT = hf.Family(("modernbert",), read_modernbert, write_modernbert, modernbert_steps)
