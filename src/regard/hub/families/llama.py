"""LLaMA (Touvron et al. 2023) and its descendants: rotary positions, RMSNorm, gated feed-forward, grouped key heads.

mistral      a window (Jiang et al. 2023); ministral: in some layers only
qwen2        biases on q, k and v; qwen3: a norm on each query and key head instead
smollm3      no positions in every fourth layer
olmo2        norms on the outputs of sub-layers, and over all query heads and all key heads; olmo3: with windows
exaone4      norms as in olmo2, but per head; layers without a window have no positions
eurobert     an encoder with the same layers
phi3         llama with q, k and v in one tensor, rotates a part of each head
mixtral      experts instead of one feed-forward network (Jiang et al. 2024)
qwen3_moe    experts in the layers of qwen3
olmoe        experts, and norms over all query heads and all key heads
gpt_oss      experts with biases and a clamped gate, a bias in the router, sinks, windows in every other layer
gemma        1 + w in the norms, scaled embeddings
gemma2       norms before and after sub-layers, capped scores and logits, a window in every other layer
gemma3_text  norms on query and key heads, another RoPE base in layers with a window
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config import ModelConfig, RopeScalingConfig
from .. import hf_family as hf
from ..weight_steps import Drop, HeadsTogether, Rename, StackExperts, Step, Transpose

_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
_GEMMA = {"norm_offset": 1.0, "scale_embeddings": True}
_OLMO = {"norm_place": "output", "qk_norm": True}
_OSS = {"attention_sinks": True, "router_bias": True, "activation": "quick_geglu"}
# One layer in this many has no window.
_DEFAULT_PATTERN = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4, "exaone4": 4, "gpt_oss": 2}
_TWO_ROPES = {"gemma3_text": (1e6, 10000.0), "olmo3": (500000.0, 500000.0)}  # default bases without and with a window


@dataclass(frozen=True)
class Member:
    """A model type of the LLaMA line."""

    causal_class: str
    base_class: str
    features: Mapping[str, Any] = field(default_factory=dict)  # our fields that all its models share
    defaults: str = "llama"  # a table of names.toml that overrides that of llama
    always_windowed: bool = False  # sliding_window alone switches the window on, without use_sliding_window
    can_have_window: bool = True

    @property
    def classes(self) -> dict[str, str]:
        return {self.causal_class: "lm", self.base_class: "none"}


def _member(name: str, features: Mapping[str, Any] | None = None, *, base: str = "", **options: Any) -> Member:
    return Member(f"{name}ForCausalLM", base or f"{name}Model", features or {}, **options)


_LINE = {
    "llama": _member("Llama", can_have_window=False),
    "mistral": _member("Mistral", always_windowed=True),
    "ministral": _member("Ministral", always_windowed=True),
    "qwen2": _member("Qwen2"),
    "qwen3": _member("Qwen3", {"qk_norm": True}),
    "smollm3": _member("SmolLM3", defaults="smollm3"),
    "olmo2": _member("Olmo2", {**_OLMO, "qk_norm_over": "all"}, defaults="olmo2", can_have_window=False),
    "olmo3": _member("Olmo3", {**_OLMO, "qk_norm_over": "all"}, defaults="olmo2", always_windowed=True),
    "exaone4": _member("Exaone4", _OLMO, defaults="olmo2", always_windowed=True),
    "mixtral": _member("Mixtral", defaults="mixtral", always_windowed=True),
    "qwen3_moe": _member("Qwen3Moe", {"qk_norm": True}, defaults="qwen3_moe", can_have_window=False),
    "olmoe": _member("Olmoe", {"qk_norm": True, "qk_norm_over": "all"}, defaults="olmoe", can_have_window=False),
    "gpt_oss": _member("GptOss", _OSS, defaults="gpt_oss", always_windowed=True),
    "gemma": _member("Gemma", _GEMMA, defaults="gemma", can_have_window=False),
    "gemma2": _member("Gemma2", {**_GEMMA, "norm_place": "both"}, defaults="gemma", always_windowed=True),
    "gemma3_text": _member(
        "Gemma3",
        {**_GEMMA, "norm_place": "both", "qk_norm": True},
        base="Gemma3TextModel",
        defaults="gemma",
        always_windowed=True,
    ),
}
_PHI3 = _member("Phi3", defaults="olmo2", always_windowed=True)
_CAPPED = ("gemma2", "gemma3_text")
_WITH_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
_EVEN_HEADS = (*_CAPPED, "eurobert")  # transformers refuses them, and llama, if n_heads does not divide d_model
_NAMED_HEAD_WIDTH = ("qwen3", "gpt_oss", "gemma", *_CAPPED)  # their default head_dim is not d_model / n_heads


def read_llama(theirs: hf.ForeignFields) -> ModelConfig:
    kind = theirs.model_type
    if kind in _WITH_EXPERTS:  # the name depends on the version of transformers
        number = theirs.get("num_local_experts", theirs.get("num_experts"))
        theirs = hf.ForeignFields(theirs.fields | {"num_local_experts": number, "num_experts": number})
    ours = _read_common(theirs, _LINE[kind]) | read_rope(theirs)
    if kind in _NAMED_HEAD_WIDTH:
        ours["d_head"] = theirs.need("head_dim")
    if kind in _CAPPED:
        scalar = theirs.get("query_pre_attn_scalar", 256)
        ours["attention_scale"] = None if scalar == ours["d_head"] else 1 / math.sqrt(scalar)
        if kind == "gemma3_text":
            theirs.only("attn_logit_softcapping", None)  # transformers has the field and does not compute it
        ours["score_cap"] = theirs.get("attn_logit_softcapping")
        ours["logit_cap"] = theirs.get("final_logit_softcapping")
    if kind == "smollm3":
        rotated = tuple(layer for layer, flag in enumerate(_rope_flags(theirs, ours["n_layers"])) if flag)
        ours["rope_layers"] = None if len(rotated) == ours["n_layers"] else rotated
    if kind == "exaone4" and theirs.get("sliding_window") is not None:
        ours["rope_layers"] = () if ours["window"] is None else ours["window_layers"]
    if kind in _WITH_EXPERTS:
        fixed: dict[str, Any] = {"router_jitter_noise": 0.0, "decoder_sparse_step": 1, "clip_qkv": None}
        for name, value in {**fixed, "mlp_only_layers": [], "use_sliding_window": False}.items():
            theirs.only(name, value)
        ours["router_z_loss"] = 0.0  # theirs have none
    if kind == "gpt_oss":
        theirs.only("hidden_act", "silu")  # in fact the gate given by swiglu_alpha and swiglu_limit
        theirs.only("swiglu_alpha", 1.702)
    bias = theirs.get("attention_bias", False)
    ours |= {"qkv_bias": kind == "qwen2" or bias, "out_bias": kind != "qwen2" and bias}
    return ModelConfig(**ours, ff_bias=kind == "gpt_oss" or theirs.get("mlp_bias", False))


def _read_common(theirs: hf.ForeignFields, member: Member) -> dict[str, Any]:
    """Our fields without positions, biases and those that only some members have."""
    theirs.only("pretraining_tp", 1)
    theirs.only("use_bidirectional_attention", False)
    ours = hf.read_fields(theirs, hf.field_names("llama", *({member.defaults} - {"llama"})))
    if ours["n_kv_heads"] is None:
        ours["n_kv_heads"] = ours["n_heads"]
    activation_field = "hidden_activation" if theirs.model_type in _CAPPED else "hidden_act"
    default = "gelu_pytorch_tanh" if member.features.get("norm_offset") else "silu"
    activation = theirs.activation(activation_field, default)
    if theirs.model_type == "gemma" and activation == "gelu":
        activation = "gelu_tanh"  # what its first files mean by gelu
    if activation not in _GATED:
        gates = ", ".join(_GATED)
        raise ValueError(f"config.json has {activation_field}={activation!r}; regard supports gates with {gates}")
    window, window_layers = _read_window(theirs, member, ours["n_layers"])
    return {
        **{"architecture": "decoder", "head": theirs.head(member.classes), "norm": "rms", "norm_place": "pre"},
        **ours,
        **{"d_head": theirs.get("head_dim", ours["d_model"] // ours["n_heads"]), "positions": "rope"},
        **{"window": window, "window_layers": window_layers, "activation": _GATED[activation]},
        **member.features,
    }


def _read_window(theirs: hf.ForeignFields, member: Member, n_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The sliding window and the layers that have it (None: all), which versions of transformers store in four ways.

    Mistral with layer_types is Ministral; the Auto classes of transformers read it that way, too.
    """
    if not member.can_have_window:
        return None, None
    window = theirs.get("sliding_window")
    if not (member.always_windowed or theirs.get("use_sliding_window", False)):
        window = None
    kinds = theirs.get("layer_types")
    alike = ["full_attention" if window is None else "sliding_attention"] * n_layers
    if theirs.model_type in ("mixtral", "phi3") and kinds != alike:
        theirs.only("layer_types", None)  # transformers does not read it
    if kinds is None and window is not None and theirs.model_type in _DEFAULT_PATTERN:
        default = _DEFAULT_PATTERN[theirs.model_type]
        if theirs.model_type not in ("gemma3_text", "exaone4"):
            theirs.only("sliding_window_pattern", default)  # transformers always has the default
        kinds = _kinds_of_pattern(theirs.get("sliding_window_pattern", default), n_layers)
    if kinds is None and window is not None and theirs.model_type == "smollm3":
        kinds = ["full_attention" if flag else "sliding_attention" for flag in _rope_flags(theirs, n_layers)]
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if kinds is not None and set(kinds) - known:
        unknown, options = sorted(set(kinds) - known)[0], " or ".join(sorted(known))
        raise ValueError(
            f"config.json has {unknown!r} in layer_types; with sliding_window={window}, regard reads {options}"
        )
    if window is None:
        return None, None
    if kinds is not None:
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        layers = tuple(range(0 if member.always_windowed else theirs.get("max_window_layers", 28), n_layers))
    if not layers:
        return None, None
    return window, None if len(layers) == n_layers else layers


def _rope_flags(theirs: hf.ForeignFields, n_layers: int) -> list[int]:
    """Which layers of a SmolLM3 have rotary positions."""
    interval = theirs.get("no_rope_layer_interval", 4)
    return theirs.get("no_rope_layers", [(layer + 1) % interval for layer in range(n_layers)])


def _kinds_of_pattern(pattern: Any, n_layers: int) -> list[str]:
    """The kinds of all layers. With n, every n-th layer has no window. Letters such as "LLLG" are repeated, L for a
    window and G for none; the last layer has none."""
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        windows = [(layer + 1) % pattern != 0 for layer in range(n_layers)]
    elif isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        windows = [pattern[layer % len(pattern)] == "L" and layer < n_layers - 1 for layer in range(n_layers)]
    else:
        raise ValueError(
            f"config.json has sliding_window_pattern={pattern!r}, neither a positive number nor letters L and G"
        )
    return ["sliding_attention" if has_window else "full_attention" for has_window in windows]


_ORIGINAL = "original_max_position_embeddings"
# The fields that each kind of scaling reads; others are ignored, as transformers does.
_SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}


def _our_name(field: str) -> str:
    return "original_max_len" if field == _ORIGINAL else field


def read_rope(theirs: hf.ForeignFields, fraction: float | None = None) -> dict[str, Any]:
    """Our RoPE fields, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    fraction  the default share of a head that is rotated; None: always the whole head
    """
    fields = dict(theirs.get("rope_scaling", {}) or theirs.get("rope_parameters", {}))
    local = None
    if theirs.model_type in _TWO_ROPES:
        default, default_local = _TWO_ROPES[theirs.model_type]
        nested, base = theirs.get("rope_parameters", {}), theirs.get("rope_theta", default)
        if theirs.model_type == "olmo3":
            default_local = base  # older files have one base for both
        local = nested.get("sliding_attention", {}).get("rope_theta", theirs.get("rope_local_base_freq", default_local))
        fields = {"rope_theta": base, **nested.get("full_attention", {}), **theirs.get("rope_scaling", {})}
    if theirs.model_type == "gpt_oss" and not fields:
        theirs.need("rope_parameters")  # required here: the default in transformers is a scaled RoPE
    nested_names = [name for name, value in fields.items() if isinstance(value, dict)]
    if nested_names:
        raise ValueError(
            f"config.json has separate rope_parameters for {nested_names[0]!r}; regard has one RoPE for all layers of"
            f" {theirs.model_type}"
        )
    share = fields.get("partial_rotary_factor", theirs.get("partial_rotary_factor", fraction or 1.0))
    if fraction is None and share != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor={share}; regard supports 1.0 for {theirs.model_type}")
    base = fields.get("rope_theta", theirs.get("rope_theta", 10000.0))
    ours = {"rope_base": base, "rope_fraction": share, "rope_scaling": _read_scaling(theirs, fields)}
    # Without windowed layers, their RoPE base is irrelevant.
    windowed = local is not None and _read_window(theirs, _LINE[theirs.model_type], theirs.need("num_hidden_layers"))[0]
    return {**ours, "window_rope_base": local if windowed else None}


def _read_scaling(theirs: hf.ForeignFields, fields: dict[str, Any]) -> RopeScalingConfig | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if theirs.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its names in the first files of Phi-3
    if kind == "default":
        return None
    if kind not in _SCALING_FIELDS:
        raise ValueError(f"config.json has rope_type={kind!r}; regard has {', '.join(_SCALING_FIELDS)}")
    fields[_ORIGINAL] = theirs.get(_ORIGINAL, fields.get(_ORIGINAL))  # the top-level field overrides the nested one
    known = {_our_name(name): fields[name] for name in _SCALING_FIELDS[kind] if fields.get(name) is not None}
    return RopeScalingConfig(kind=kind, **known)


def write_llama(config: ModelConfig) -> dict[str, Any]:
    kind = _kind(config)
    fields = _write_common(config, kind, _LINE[kind])
    if kind in ("llama", "qwen3", "smollm3", "olmo2", "olmo3", "gemma", "qwen3_moe", "olmoe", "gpt_oss", *_CAPPED):
        fields["attention_bias"] = config.qkv_bias
    if kind in _WITH_EXPERTS:
        fields |= hf.write_fields(config, hf.field_names(_LINE[kind].defaults))
    if kind in ("llama", "smollm3"):
        fields["mlp_bias"] = config.ff_bias
    if kind in ("qwen2", "qwen3", "smollm3"):
        windowed = _windowed_layers(config)
        fields["use_sliding_window"] = config.window is not None
        fields["max_window_layers"] = min(windowed, default=config.n_layers)
    if kind in ("qwen2", "qwen3", "smollm3", "ministral", *_DEFAULT_PATTERN):
        kinds = {True: "sliding_attention", False: "full_attention"}
        fields["layer_types"] = [kinds[layer in _windowed_layers(config)] for layer in range(config.n_layers)]
    if kind == "smollm3":
        rotated = range(config.n_layers) if config.rope_layers is None else config.rope_layers
        fields["no_rope_layers"] = [int(layer in rotated) for layer in range(config.n_layers)]
    if kind in _CAPPED:
        scale = config.attention_scale
        fields["query_pre_attn_scalar"] = config.head_width if scale is None else round(scale**-2)
        fields |= {"final_logit_softcapping": config.logit_cap}
        fields |= {"attn_logit_softcapping": config.score_cap} if kind == "gemma2" else {}
    if kind in _TWO_ROPES:
        local = {"rope_type": "default", "rope_theta": config.window_rope_base or config.rope_base}
        fields["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    return fields


def _write_common(config: ModelConfig, kind: str, member: Member) -> dict[str, Any]:
    gates = {ours: theirs for theirs, ours in _GATED.items()}
    if kind == "gpt_oss":
        gates = {"quick_geglu": "silu"}
    if config.activation not in gates or config.head == "classify":
        raise ValueError(f"no model of the LLaMA line has activation={config.activation!r} with head={config.head!r}")
    if kind in _EVEN_HEADS and config.d_model % config.n_heads:
        raise ValueError(f"d_model={config.d_model} is not a multiple of n_heads={config.n_heads}, as {kind} needs it")
    fields: dict[str, Any] = {
        "model_type": kind,
        "architectures": [member.causal_class if config.head == "lm" else member.base_class],
        **hf.write_fields(config, hf.field_names("llama"), nulls=True),
        "num_key_value_heads": config.n_kv_heads or config.n_heads,
        "head_dim": config.head_width,
        "hidden_activation" if kind in _CAPPED else "hidden_act": hf.from_our_activation(gates[config.activation]),
        "rope_parameters": write_rope(config),
    }
    if member.can_have_window:
        fields["sliding_window"] = config.window
        # These need a number even if no layer has a window; exaone4 has positions everywhere without a number.
        if config.window is None and (kind in ("gpt_oss", *_CAPPED) or config.rope_layers == ()):
            fields["sliding_window"] = 128
    return fields


def _windowed_layers(config: ModelConfig) -> tuple[int, ...]:
    if config.window is None:
        return ()
    return tuple(range(config.n_layers)) if config.window_layers is None else config.window_layers


def _kind(config: ModelConfig) -> str:
    """The model type that has the features of a config."""
    if config.norm_offset:
        return "gemma3_text" if config.qk_norm else "gemma2" if config.norm_place == "both" else "gemma"
    if config.norm_place == "output" and config.qk_norm_over == "all":
        return "olmo2" if config.window is None else "olmo3"
    if config.norm_place == "output":
        return "exaone4"
    if config.experts is not None and config.attention_sinks:
        return "gpt_oss"
    if config.experts is not None:
        return "mixtral" if not config.qk_norm else "qwen3_moe" if config.qk_norm_over == "head" else "olmoe"
    if config.rope_layers is not None:
        return "smollm3"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    if config.window is None and config.d_model % config.n_heads == 0:
        return "llama"
    return "mistral" if config.window_layers is None else "ministral"


def write_rope(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        fields["rope_type"] = scaling.kind
        for name in _SCALING_FIELDS[scaling.kind]:
            value = getattr(scaling, _our_name(name))
            if value is not None or name == "factor":  # transformers requires the field, even if it is null
                fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def llama_steps(config: ModelConfig) -> list[Step]:
    prefix, theirs, ours = _prefixes(config)
    q_rows = config.n_heads * config.head_width
    kv_rows = (config.n_kv_heads or config.n_heads) * config.head_width
    qkv, gates = [f"{theirs}self_attn.{x}_proj" for x in "qkv"], [f"{theirs}mlp.{x}_proj" for x in ("gate", "up")]
    norms = {"output": "olmo2", "both": "gemma"}.get(config.norm_place, "llama")
    return [
        Drop(f"{theirs}self_attn.rotary_emb.inv_freq"),
        *_outer_steps(config, prefix),
        *hf.modules(hf.layer_names("llama line") | hf.layer_names(norms), theirs, ours),
        *hf.join_modules(qkv, f"{ours}attention.w_qkv", (q_rows, kv_rows, kv_rows)),
        *(hf.join_modules(gates, f"{ours}ff.w_in", (config.d_ff,) * 2) if config.experts is None else []),
        *(_expert_steps(config, theirs, ours) if config.experts is not None else []),
    ]


def _expert_steps(config: ModelConfig, theirs: str, ours: str) -> list[Step]:
    """The steps of experts, which have one matrix each for gate, up and down; Mixtral names them w1, w3 and w2."""
    kind, n_experts = _kind(config), config.experts or 0
    if kind == "gpt_oss":
        return _oss_steps(config, theirs, ours)
    expert, names = "mlp.experts.{e}.", ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        expert, names = "block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")
    gate, up, down = (f"{theirs}{expert}{name}.weight" for name in names)
    return [
        *hf.modules(hf.layer_names(kind), theirs, ours),
        StackExperts((gate, up), f"{ours}ff.w_in.weight", n_experts),
        StackExperts((down,), f"{ours}ff.w_out.weight", n_experts),
    ]


def _oss_steps(config: ModelConfig, theirs: str, ours: str) -> list[Step]:
    """The steps of gpt-oss, which stores all experts in one tensor (E, in, out) with gate and up interleaved."""
    names = {"gate_up_proj": "w_in.weight", "down_proj": "w_out.weight"}
    names |= {"gate_up_proj_bias": "w_in.bias", "down_proj_bias": "w_out.bias"}
    return [
        *hf.modules(hf.layer_names("gpt_oss"), theirs, ours),
        Rename(f"{theirs}self_attn.sinks", f"{ours}attention.sinks.logits"),
        *(Rename(f"{theirs}mlp.experts.{a}", f"{ours}ff.{b}") for a, b in names.items()),
        *(Transpose(f"{ours}ff.{name}.weight") for name in ("w_in", "w_out")),
        *(HeadsTogether(f"{ours}ff.w_in.{kind}", config.d_ff, parts=2, axis=1) for kind in ("weight", "bias")),
    ]


def _prefixes(config: ModelConfig) -> tuple[str, str, str]:
    """The prefixes of their modules, of their layers and of ours."""
    prefix = "" if config.head == "none" else "model."
    return prefix, f"{prefix}layers.{{i}}.", f"{_stack(config)}.blocks.{{i}}."


def _stack(config: ModelConfig) -> str:
    return "decoder" if config.has_decoder else "encoder"


def _outer_steps(config: ModelConfig, prefix: str) -> list[Step]:
    return [
        hf.token_head(config, f"{prefix}embed_tokens.weight"),
        Rename(f"{prefix}embed_tokens.weight", "token.weight"),
        Rename(f"{prefix}norm.weight", f"{_stack(config)}.norm.weight"),
    ]


def read_phi3(theirs: hf.ForeignFields) -> ModelConfig:
    ours = _read_common(theirs, _PHI3) | read_rope(theirs, fraction=1.0)
    ours |= {"qkv_bias": False, "out_bias": False, "ff_bias": False}
    return ModelConfig(**ours, dropout=theirs.get("resid_pdrop", 0.0), embedding_dropout=theirs.get("embd_pdrop", 0.0))


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    fields = _write_common(config, "phi3", _PHI3)
    fields["rope_parameters"]["partial_rotary_factor"] = config.rope_fraction
    fields[_ORIGINAL] = fields["rope_parameters"].get(_ORIGINAL, 4096)  # transformers prefers it to the nested one
    return {**fields, "resid_pdrop": config.dropout, "embd_pdrop": config.embedding_dropout}


def phi3_steps(config: ModelConfig) -> list[Step]:
    prefix, theirs, ours = _prefixes(config)
    fused = {"self_attn.qkv_proj": "attention.w_qkv", "mlp.gate_up_proj": "ff.w_in"}
    names = hf.layer_names("llama line") | hf.layer_names("llama") | fused
    return [*_outer_steps(config, prefix), *hf.modules(names, theirs, ours)]


_EUROBERT = _member("EuroBert", defaults="olmo2", can_have_window=False)
_EUROBERT_CLASSES = {"EuroBertModel": "none", "EuroBertForMaskedLM": "masked-lm"}
_EUROBERT_CLASSES["EuroBertForTokenClassification"] = "tag"


def read_eurobert(theirs: hf.ForeignFields) -> ModelConfig:
    without_class = hf.ForeignFields({name: x for name, x in theirs.fields.items() if name != "architectures"})
    ours = _read_common(without_class, _EUROBERT) | read_rope(theirs)
    ours |= {"architecture": "encoder", **hf.read_head(theirs, _EUROBERT_CLASSES, "none", "none")}
    biases = dict.fromkeys(("qkv_bias", "out_bias"), theirs.get("attention_bias", False))
    ours |= {**biases, "ff_bias": theirs.get("mlp_bias", False), "head_transform": False}
    return ModelConfig(**ours | {"head_bias": ours["head"] == "masked-lm" and ours["ff_bias"]})


def write_eurobert(config: ModelConfig) -> dict[str, Any]:
    fields = _write_common(config, "eurobert", _EUROBERT) | hf.write_head(config, _EUROBERT_CLASSES)
    fields.pop("has_pooler", None)
    return {**fields, "attention_bias": config.qkv_bias, "mlp_bias": config.ff_bias}


def eurobert_steps(config: ModelConfig) -> list[Step]:
    classifier = hf.modules({"classifier": "classifier.out"}) if config.head == "tag" else []
    return [Rename("lm_head.bias", "head.bias"), *classifier, *llama_steps(config)]


LLAMA = hf.Family(tuple(_LINE), read_llama, write_llama, llama_steps)
PHI3 = hf.Family(("phi3",), read_phi3, write_phi3, phi3_steps)
EUROBERT = hf.Family(("eurobert",), read_eurobert, write_eurobert, eurobert_steps)
