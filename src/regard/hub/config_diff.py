"""Which fields of a config determine what a model computes.

Two configs define the same model if their ``behaviour`` is equal. A field is left out if its feature is off (rope_base
without rotary positions), if only training or generation reads it (dropout), or if it only affects speed (the backend).
A field without a rule counts, so that a new one is never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..config import ModelConfig

Rule = Callable[[ModelConfig], bool]  # whether a field counts in this config


class Difference(NamedTuple):
    """A field in which the behaviour of two configs differs."""

    field: str
    one: Any
    other: Any


def _reads_tokens(config: ModelConfig) -> bool:
    return config.source == "text" or config.has_decoder or config.text_model is not None


def _has_heads(config: ModelConfig) -> bool:
    return config.architecture == "recurrent" or config.mixing.weights or config.mixing.recurrent


def _has_token_head(config: ModelConfig) -> bool:
    return config.head in ("lm", "masked-lm")


def _has_pooler(config: ModelConfig) -> bool:
    """A classifier always pools; other encoders only if the config has a pooler."""
    return config.head == "classify" or (config.head in ("none", "masked-lm") and config.pooler != "none")


_DROPOUTS = ("dropout", "attention_dropout", "embedding_dropout", "activation_dropout", "classifier_dropout")
_BLOCKS = (
    *("n_heads", "n_kv_heads", "d_head", "d_ff", "positions", "max_len", "attention_scale", "qkv_bias", "out_bias"),
    *("qk_norm", "norm", "norm_place", "norm_eps", "norm_bias", "activation", "ff_bias", "sinusoid_layout"),
    *("positions_skip_padding", "score_cap", "attention_sinks"),
)
# Settings of text embeddings, which are computed from the model's states and not part of the model.
_EMBEDDING = ("embed_pooling", "embed_normalise", "embed_len")
_GENERATION = ("more_eos_ids", "forbidden_ids")  # rules for generated texts
_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    ((*_DROPOUTS, "drop_path", "init_std", "attention_backend", *_GENERATION, *_EMBEDDING), lambda c: False),
    (("balance_loss", "router_z_loss"), lambda c: False),
    (("experts_per_token", "renormalise_experts", "router_bias"), lambda c: c.experts is not None),
    (("cell", "alignment", "bidirectional", "input_feeding"), lambda c: c.architecture == "recurrent"),
    (_BLOCKS, lambda c: c.architecture != "recurrent"),
    (("n_decoder_heads", "d_decoder_ff", "max_target_len"), lambda c: c.architecture == "encoder-decoder"),
    (("n_decoder_layers",), lambda c: c.architecture in ("encoder-decoder", "recurrent")),
    (("causal", "bos_id", "eos_id"), lambda c: c.architecture != "encoder"),
    (("vocab_size", "pad_id", "scale_embeddings", "d_embed", "n_segments", "positions_skip_padding"), _reads_tokens),
    (("target_vocab_size",), lambda c: c.architecture in ("encoder-decoder", "recurrent")),
    (("sinusoid_layout",), lambda c: c.positions == "sinusoidal"),
    (("positions_skip_padding",), lambda c: c.positions in ("sinusoidal", "learned")),
    (("position_offset",), lambda c: c.positions in ("sinusoidal", "learned") and _reads_tokens(c)),
    (("rope_base", "rope_fraction", "rope_scaling"), lambda c: c.positions == "rope"),
    (("n_heads", "n_kv_heads", "d_head", "qkv_bias", "out_bias", "qk_norm"), _has_heads),
    (("qk_norm_over",), lambda c: c.qk_norm),
    (("t5_buckets", "t5_max_distance"), lambda c: c.positions == "t5"),
    (("max_len", "max_target_len"), lambda c: _has_length(c)),
    (("norm_eps",), lambda c: c.norm != "none"),
    (("norm_bias",), lambda c: c.norm == "layer"),
    (("mixer_size",), lambda c: c.mixing.size is not None),
    (("conv_size",), lambda c: c.mixing.recurrent),
    (("step_rank",), lambda c: c.mixing.recurrent),
    (("d_ff", "activation", "ff_bias", "gate_limit"), lambda c: c.d_ff > 0),
    (("window_layers",), lambda c: c.window is not None),
    (("sparsity_size",), lambda c: c.sparsity != "none"),
    (("sparsity_repeats",), lambda c: c.sparsity == "end-blocks"),
    (("sparsity_random",), lambda c: c.sparsity == "bigbird"),
    (("tie_head", "head_bias", "head_transform", "logit_scale", "logit_cap"), _has_token_head),
    (("head_activation", "head_transform_bias"), lambda c: _has_token_head(c) and c.head_transform),
    (("generator_width",), lambda c: c.head == "replaced"),
    (("n_classes",), lambda c: c.head in ("classify", "tag")),
    (("problem_type",), lambda c: c.head == "classify"),
    (("pooling",), lambda c: c.architecture == "two-tower" or (c.architecture == "encoder" and _has_pooler(c))),
    (("pooler",), lambda c: c.architecture == "encoder" and c.head in ("classify", "none", "masked-lm")),
    (
        ("image_size", "patch_size", "n_channels", "class_tokens", "register_tokens", "mask_token", "patch_bias"),
        lambda c: c.source == "image",
    ),
    (("d_region", "d_box"), lambda c: c.source == "regions"),
)


def _has_length(config: ModelConfig) -> bool:
    """Whether a maximum length is built into the model; otherwise max_len is only a recommendation."""
    table = config.positions == "learned" and _reads_tokens(config)
    return table or config.rope_scaling is not None or config.mixing.built_for_length


def behaviour(config: ModelConfig) -> dict[str, Any]:
    """The fields that count; an explicit value equal to the default that None stands for becomes None."""
    ignored = {name for names, rule in _RULES for name in names if not rule(config)}
    fields = {name: getattr(config, name) for name in ModelConfig.model_fields if name not in ignored}
    if config.text_model is not None:
        fields["text_model"] = {**behaviour(config.text_model), "pooling": config.text_model.pooling}
    encoder_decoder = config.architecture == "encoder-decoder"
    heads = {config.n_heads, (config.n_decoder_heads or config.n_heads) if encoder_decoder else config.n_heads}
    n_layers = max(config.n_layers, (config.n_decoder_layers or 0) if encoder_decoder else 0)
    is_default = {  # optional fields whose value is the one that None stands for
        "n_decoder_layers": config.n_decoder_layers == config.n_layers,
        "n_decoder_heads": config.n_decoder_heads == config.n_heads,
        "d_decoder_ff": config.d_decoder_ff == config.d_ff,
        "max_target_len": config.max_target_len == config.max_len,
        "n_kv_heads": config.n_kv_heads == 1 if config.mixing.recurrent else heads == {config.n_kv_heads},
        "mixer_size": config.mixer_size is not None and config.mixer_size == config.mixing.size,
        "step_rank": config.step_rank == -(-config.d_model // 16),
        "d_head": config.d_head is not None and all(config.d_head * n == config.d_model for n in heads),
        "attention_scale": config.attention_scale == 1 / math.sqrt(config.head_width) and len(heads) == 1,
        "window_layers": len(set(config.window_layers or ())) == n_layers,
        "rope_layers": len(set(config.rope_layers or ())) == n_layers,
        "window_rope_base": config.window_rope_base == config.rope_base and config.rope_scaling is None,
        "head_activation": config.head_activation == config.activation,
        # Without source text there is only one vocabulary, given by either field.
        "target_vocab_size": config.source != "text" and config.target_vocab_size == config.vocab_size,
    }
    return {name: None if is_default.get(name) else value for name, value in fields.items()}


def differences(one: ModelConfig, other: ModelConfig) -> list[Difference]:
    """The fields in which the behaviour of two configs differs, in the order of the fields.

    A difference that follows from another one (the RoPE base if only one config has rotary positions) is left out.
    """
    a, b = behaviour(one), behaviour(other)
    shared = [Difference(name, a[name], b[name]) for name in a if name in b and a[name] != b[name]]
    return shared or [
        Difference(name, a.get(name), b.get(name)) for name in ModelConfig.model_fields if name in a.keys() ^ b
    ]
