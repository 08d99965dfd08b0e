"""Export to CTranslate2: a model's weights written directly as a CTranslate2 model specification.

A spec is a tree of named tensors that the C++ runtime reads (``model.bin``, vocabularies, ``config.json``). Config
fields that the runtime does not support are reported as obstacles; nothing is approximated.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..config import ModelConfig
from ..foundation.plugins import import_optional
from ..layers import Embeddings, FeedForward
from ..layers.quantised_linear import Int8Linear
from ..layers.rope import rotated_width
from ..models import Model, Stack
from ..models.build import check_has_numbers
from ..text import Processor

FOLDER = "ctranslate2"  # the subfolder of an exported directory with the runtime's files
_GATED = {"swiglu": "SWISH", "geglu": "GELU", "geglu_tanh": "GELUTanh", "reglu": "RELU"}
_PLAIN = {"relu": "RELU", "gelu_tanh": "GELUTanh", "silu": "SWISH", "gelu": "GELU", "quick_gelu": "GELUSigmoid"}
_ACTIVATIONS = _GATED | _PLAIN
_REQUIRED = {  # the only values that CTranslate2 supports
    "source": "text",
    "head": "lm",
    "d_embed": None,
    "n_segments": 0,
    "positions_skip_padding": False,
    "residual": True,
    "mixer": "dot",
    "sparsity": "none",
    "causal": True,
    "head_transform": False,
    "parallel_residual": "none",
    "score_cap": None,
    "attention_sinks": False,
    "gate_limit": None,
    "logit_cap": None,
    "norm_offset": 0.0,
    "qk_norm_over": "head",
    "rope_layers": None,
    "window_rope_base": None,
    "experts": None,
}


def obstacles(config: ModelConfig) -> list[str]:
    """The fields that CTranslate2 does not support, each as ``field=value``; empty if it can run the model."""
    if config.architecture not in ("encoder-decoder", "decoder"):
        return [f"architecture={config.architecture!r}"]
    both = config.architecture == "encoder-decoder"
    scaling = config.rope_scaling if config.positions == "rope" else None
    unsupported = {
        "positions": config.positions in ("xl", "alibi" if both else "t5"),  # its language models have no T5 bias
        "activation": config.activation not in _ACTIVATIONS,
        "qk_norm": config.qk_norm and config.norm != "rms",
        "norm": config.norm == "none" or (config.qk_norm and config.norm != "rms"),
        "norm_place": config.norm_place not in ("pre", "post"),
        # Its sliding window drops keys from the cache but does not mask them in a prompt.
        "window": config.window is not None and config.window < max(config.max_len, config.max_target_len or 0),
        "rope_scaling": scaling is not None and scaling.kind != "linear",
        "eos_id": config.eos_id is None,
        "bos_id": config.bos_id is None and both,
    }
    wrong = [name for name, value in _REQUIRED.items() if getattr(config, name) != value]
    wrong += [name for name, is_wrong in unsupported.items() if is_wrong]
    return [f"{name}={getattr(config, name)!r}" for name in wrong]


def export_ctranslate2(model: Model, folder: Path) -> None:
    """Write the model with float32 weights; their precision is chosen when it is opened (``compute_type``)."""
    import_ctranslate2()
    if fields := obstacles(model.config):
        raise ValueError(f"CTranslate2 cannot run a model with {', '.join(fields)}")
    check_has_numbers(model, "export")
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("this model is quantised already; export the model it was made from")
    with torch.no_grad():
        spec = _model_spec(model)
        spec.validate()
        spec.optimize(quantization=None)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def vocabulary(tokenizer: Any, size: int) -> list[str]:
    """The tokens of the first ``size`` ids, all distinct; an id without a token is named like ``<17>``."""
    tokens = [None if tokenizer is None else tokenizer.token(index) for index in range(size)]
    used, names = {token for token in tokens if token is not None}, []
    for index, token in enumerate(tokens):
        name = f"<{index}>" if token is None else token
        while token is None and name in used:
            name = f"<{name}>"
        names.append(name)
    return names


def vocabularies(config: ModelConfig, processor: Processor | None) -> tuple[list[str], list[str]]:
    processor = processor or Processor()
    shared = vocabulary(processor.tokenizer_of("source"), config.vocab_size)
    if config.target_vocab_size is None:
        return shared, shared
    return shared, vocabulary(processor.tokenizer_of("target"), config.target_vocab_size)


def import_ctranslate2() -> Any:
    return import_optional("ctranslate2", "the ctranslate2 engine", "export")


def _model_spec(model: Any) -> Any:
    from ctranslate2 import specs

    config, table, both = model.config, model.output_table, model.is_encoder_decoder
    embeddings, n_heads, max_len = model.embeddings, config.n_heads, config.max_len
    if both:
        embeddings, n_heads = model.target_embeddings, config.n_decoder_heads or n_heads
        max_len = config.max_target_len or max_len
    fields = _stack_fields(config, n_heads) | {"with_encoder_attention": both, "alibi": config.positions == "alibi"}
    decoder = specs.TransformerDecoderSpec(model.decoder.n_layers, n_heads, **fields)
    _embed(decoder, decoder.embeddings, table, embeddings, config, max_len)
    _stack(decoder, model.decoder)
    _set(decoder.projection, table if model.head.weight is None else model.head.weight, model.head.bias)
    if model.head.scale != 1.0:
        decoder.scale_outputs = float(model.head.scale)
    source, target = vocabularies(config, model.processor)
    if both:
        fields = _stack_fields(config, config.n_heads)
        encoder = specs.TransformerEncoderSpec(model.encoder.n_layers, config.n_heads, **fields)
        _embed(encoder, encoder.embeddings[0], model.token.weight, model.embeddings, config, config.max_len)
        _stack(encoder, model.encoder)
        spec = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        spec.config.decoder_start_token = target[config.bos_id]
    else:
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(target)
    # CTranslate2 would add a missing special token to the vocabulary, without a row in the embedding table.
    spec.config.eos_token = target[config.eos_id]
    spec.config.bos_token = target[config.eos_id if config.bos_id is None else config.bos_id]
    spec.config.unk_token = "<unk>" if "<unk>" in target else spec.config.eos_token
    spec.config.layer_norm_epsilon = config.norm_eps
    return spec


def _stack_fields(config: ModelConfig, n_heads: int) -> dict[str, Any]:
    """Options of CTranslate2's encoder and decoder specs."""
    from ctranslate2 import specs
    from ctranslate2.specs import attention_spec

    width = config.d_model // n_heads if config.d_head is None else config.d_head
    n_kv_heads = config.n_kv_heads or n_heads
    fields: dict[str, Any] = {
        "pre_norm": config.norm_place == "pre",
        "activation": getattr(specs.Activation, _ACTIVATIONS[config.activation]),
        "ffn_glu": config.activation in _GATED,
        "rms_norm": config.norm == "rms",
        "layernorm_embedding": config.embedding_norm,
        "relative_attention_bias": config.positions == "t5",
        "num_heads_kv": None if n_kv_heads == n_heads else n_kv_heads,
        "head_dim": config.d_head,
        "qk_norm": config.qk_norm,
    }
    if config.positions == "rope":
        scaling = config.rope_scaling
        fields |= {
            "rotary_dim": rotated_width(width, config.rope_fraction),
            "rotary_interleave": False,
            "rotary_base": config.rope_base,
            "rotary_scaling_type": None if scaling is None else attention_spec.RotaryScalingType.Linear,
            "rotary_scaling_factor": 1 if scaling is None else scaling.factor,
        }
    return fields


def _embed(spec: Any, table: Any, weight: Tensor, embeddings: Embeddings, config: ModelConfig, max_len: int) -> None:
    table.weight = _float32_copy(weight)
    spec.scale_embeddings = math.sqrt(config.d_model) if config.scale_embeddings else False
    if hasattr(spec, "position_encodings") and config.positions in ("sinusoidal", "learned", "none"):
        # Always an explicit table: the runtime's default sinusoids differ from regard's.
        encodings = torch.zeros(max_len, config.d_model)
        if embeddings.position is not None:
            encodings = embeddings.position(torch.arange(max_len, device=weight.device), torch.float32)
        spec.position_encodings.encodings = _float32_copy(encodings)
    if embeddings.norm is not None:
        _norm(spec.layernorm_embedding, embeddings.norm)


def _stack(spec: Any, stack: Stack) -> None:
    for block, block_spec in zip(stack.layers, spec.layer, strict=True):
        attention = block_spec.self_attention
        _attention(attention, cast(MultiHeadAttention, block.attention), cast(nn.Module, block.attention_norm))
        if hasattr(attention, "relative_attention_bias"):
            import numpy as np

            bias = cast(Any, stack.position_bias)
            attention.relative_attention_bias = _float32_copy(bias.w)
            attention.relative_attention_max_distance = np.int32(bias.max_distance)
        if block.cross_attention is not None:
            _attention(block_spec.attention, block.cross_attention, cast(nn.Module, block.cross_norm))
        assert isinstance(block.ff, FeedForward)
        ff, d_ff = block.ff, block.ff.d_ff
        weight, bias = ff.w_in.weight, cast(Tensor | None, ff.w_in.bias)
        if ff.gated:
            _set(block_spec.ffn.linear_0, weight[:d_ff], None if bias is None else bias[:d_ff])
            _set(block_spec.ffn.linear_0_noact, weight[d_ff:], None if bias is None else bias[d_ff:])
        else:
            _set(block_spec.ffn.linear_0, weight, bias)
        _set(block_spec.ffn.linear_1, ff.w_out.weight, ff.w_out.bias)
        _norm(block_spec.ffn.layer_norm, cast(nn.Module, block.ff_norm))
    if stack.norm is not None:
        _norm(spec.layer_norm, stack.norm)


def _attention(spec: Any, attention: MultiHeadAttention, norm: nn.Module) -> None:
    maps = (attention.w_query, attention.w_kv) if attention.cross else (attention.w_qkv,)
    for part, linear in zip(spec.linear, (*maps, attention.w_o), strict=True):
        _set(part, linear.weight, linear.bias)
    scale = getattr(attention.mechanism, "scale", None)
    if scale is not None:
        spec.queries_scale = float(scale)
    if attention.q_norm is not None and attention.k_norm is not None:
        _norm(spec.q_norm, attention.q_norm)
        _norm(spec.k_norm, attention.k_norm)
    _norm(spec.layer_norm, norm)


def _norm(spec: Any, norm: nn.Module) -> None:
    weight = cast(Tensor, norm.weight)
    spec.gamma = _float32_copy(weight)
    if hasattr(spec, "beta"):
        bias = cast(Tensor | None, norm.bias)
        spec.beta = _float32_copy(torch.zeros_like(weight) if bias is None else bias)


def _set(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _float32_copy(weight)
    if bias is not None:
        spec.bias = _float32_copy(bias)


def _float32_copy(x: Tensor) -> Tensor:
    """A contiguous float32 copy: CTranslate2 writes the file from its data pointer."""
    return x.detach().float().cpu().contiguous().clone()
