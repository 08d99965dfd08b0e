"""Checks of the fields of a ModelConfig against each other; an error is a ValueError that names the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model_config import ModelConfig

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "quick_geglu")
_BIASES = ("alibi", "t5", "xl", "window")


def _changed(config: ModelConfig, *names: str) -> str | None:
    """The first of these fields that differs from its default."""
    return next((name for name in names if getattr(config, name) != type(config).model_fields[name].default), None)


def _need(config: ModelConfig, what: str, **needed: Any) -> None:
    """Raise ValueError unless these fields have the values that ``what`` needs."""
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(f"{what} needs {name}={value!r}, not {getattr(config, name)!r}")


def check_sizes(config: ModelConfig) -> None:
    """Heads, inputs and outputs."""
    n_decoder_heads = config.n_decoder_heads or config.n_heads
    for name, heads in (("n_heads", config.n_heads), ("n_decoder_heads", n_decoder_heads)):
        if config.d_head is None and config.d_model % heads:
            raise ValueError(f"d_model={config.d_model} is not divisible by {name}={heads}")
        if heads % (config.n_kv_heads or heads):
            raise ValueError(f"{name}={heads} is not divisible by n_kv_heads={config.n_kv_heads}")
        if config.positions == "rope":
            _check_rope(config, config.d_model // heads if config.d_head is None else config.d_head)
    if config.target_vocab_size is not None and config.architecture != "encoder-decoder":
        raise ValueError(
            f"target_vocab_size={config.target_vocab_size} is for architecture='encoder-decoder'; "
            f"{config.architecture!r} has one vocabulary, vocab_size"
        )
    if config.source == "image" and config.image_size % config.patch_size:
        raise ValueError(f"image_size={config.image_size} is not divisible by patch_size={config.patch_size}")
    changed = _changed(config, "class_tokens", "register_tokens", "mask_token", "patch_bias")
    if config.source != "image" and changed is not None:
        raise ValueError(f"{changed}={getattr(config, changed)} is for source='image', not {config.source!r}")
    _check_pooling(config)
    _check_towers(config)
    _check_stages(config)
    if config.architecture == "decoder" and config.source != "text":
        raise ValueError(f"architecture='decoder' reads text; source={config.source!r} needs an encoder")
    if config.head in ("masked-lm", "classify", "tag", "span") and config.architecture != "encoder":
        raise ValueError(f"head={config.head!r} needs architecture='encoder', not {config.architecture!r}")
    if config.head == "replaced" and (config.architecture, config.source) != ("encoder", "text"):
        raise ValueError("head='replaced' detects replaced tokens: it needs architecture='encoder', source='text'")
    if config.generator_width is not None and config.head != "replaced":
        raise ValueError(f"generator_width={config.generator_width} needs head='replaced', not {config.head!r}")
    if config.head == "masked-lm" and config.source != "text":
        raise ValueError(f"head='masked-lm' predicts tokens; source={config.source!r} has none")
    if config.head == "lm" and not config.has_decoder:
        raise ValueError("head='lm' needs a decoder; architecture='encoder' has 'masked-lm', 'classify' or 'none'")
    narrow = config.d_embed not in (None, config.d_model) and not config.head_transform
    if config.head in ("lm", "masked-lm") and config.tie_head and narrow:
        raise ValueError(
            f"tie_head=True needs d_embed={config.d_embed} to be as wide as d_model={config.d_model}, or head_transform"
        )


def _check_pooling(config: ModelConfig) -> None:
    reads_patches = config.pooling in ("first-and-mean", "class-tokens")
    if reads_patches and (config.source != "image" or config.pooler != "none"):
        raise ValueError(f"pooling={config.pooling!r} needs source='image' and pooler='none'")
    if config.head == "classify" and config.pooling in ("end", "last"):
        raise ValueError(f"pooling={config.pooling!r} is for the text tower of architecture='two-tower'")
    reads_class_token = reads_patches or config.pooling == "first"
    if reads_class_token and config.source == "image" and config.head == "classify" and not config.class_tokens:
        raise ValueError(f"pooling={config.pooling!r} reads a class token, but class_tokens=0")


def _check_stages(config: ModelConfig) -> None:
    """Stages of a hierarchical image encoder, each with half the grid and twice the width of the one before."""
    if config.positions == "window" and config.shifted_windows is None:
        raise ValueError("positions='window' is a bias inside image windows: it needs shifted_windows=…")
    stages, heads = config.stages, config.stage_heads
    if stages is None:
        if heads is not None:
            raise ValueError(f"stage_heads={heads} needs stages=…, the layers of each stage")
        return
    if config.architecture != "encoder" or config.source != "image" or config.class_tokens or config.register_tokens:
        raise ValueError("stages are for architecture='encoder', source='image' and class_tokens=0")
    if not stages or min(stages) < 1 or sum(stages) != config.n_layers:
        raise ValueError(f"stages={stages} must be positive and sum to n_layers={config.n_layers}")
    if heads is None or len(heads) != len(stages) or heads[-1] != config.n_heads or min(heads) < 1:
        raise ValueError(f"stage_heads={heads} must have a number for each of stages={stages}, the last n_heads")
    times, side = 2 ** (len(stages) - 1), config.shifted_windows or 1
    for name in ("d_model", "d_ff"):
        if getattr(config, name) % times:
            raise ValueError(f"{name}={getattr(config, name)} must be divisible by {times} with {len(stages)} stages")
    for number, n_heads in enumerate(heads):
        grid = config.image_size // config.patch_size / 2**number
        width = config.d_model // 2 ** (len(heads) - 1 - number)
        if grid % side:
            raise ValueError(f"stage {number} has a grid of {grid:g} patches, not divisible by shifted_windows={side}")
        if width % n_heads:
            raise ValueError(f"stage {number} is {width} wide, not divisible by stage_heads={n_heads}")
    if config.norm_place != "pre" or config.share_layers or config.d_head is not None or config.n_kv_heads is not None:
        raise ValueError("stages need norm_place='pre', no share_layers, no d_head and no n_kv_heads")


def _check_towers(config: ModelConfig) -> None:
    """An image tower with the config's own fields, and a text tower with the fields of text_model."""
    text, is_captioner = config.text_model, config.architecture == "encoder-decoder" and config.source == "image"
    if config.resampler_tokens is not None and not is_captioner:
        raise ValueError(f"resampler_tokens={config.resampler_tokens} are for a captioner of images")
    if config.architecture != "two-tower":
        if name := _changed(config, *(() if is_captioner else ("text_model",)), "d_shared", "contrast"):
            shown = "…" if name == "text_model" else repr(getattr(config, name))
            raise ValueError(f"{name}={shown} is for architecture='two-tower', not {config.architecture!r}")
        if text is not None and (text.architecture, text.source, text.head) != ("decoder", "text", "lm"):
            raise ValueError("text_model of a captioner is a language model: architecture='decoder' and head='lm'")
        if text is not None and (text.norm_place != "pre" or text.parallel_residual != "none" or text.mixing.recurrent):
            raise ValueError("text_model of a captioner needs norm_place='pre', no parallel_residual, and attention")
        return
    if text is None:
        raise ValueError("architecture='two-tower' needs text_model={…}, the fields of its text tower")
    if config.source != "image" or config.head != "none":
        raise ValueError(f"architecture='two-tower' needs source='image' and head='none', not {config.head!r}")
    if config.pooling in ("end", "last", "first-and-mean", "class-tokens"):
        raise ValueError(f"pooling={config.pooling!r} is not for the images of architecture='two-tower'")
    if config.pooling == "first" and not config.class_tokens:
        raise ValueError("pooling='first' reads a class token, but class_tokens=0")
    if text.architecture not in ("encoder", "decoder") or text.source != "text" or text.head != "none":
        raise ValueError("text_model needs architecture='encoder' or 'decoder', source='text' and head='none'")
    if text.pooling == "end" and config.eos_id is None:
        raise ValueError("text_model.pooling='end' reads the token eos_id, but eos_id=none")


def _check_rope(config: ModelConfig, width: int) -> None:
    """The rotated part of a head of this width."""
    if width % 2:
        raise ValueError(f"positions='rope' needs an even head width, got {width}")
    rotated, scaling = int(width * config.rope_fraction), config.rope_scaling
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"rope_fraction={config.rope_fraction} of heads {width} wide rotates {rotated} dimensions, but they must "
            "form pairs"
        )
    if scaling is None:
        return
    if scaling.kind == "dynamic" and rotated <= 2:
        raise ValueError(f"rope_scaling kind 'dynamic' needs more than 2 rotated dimensions, not {rotated}")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != rotated // 2:
            raise ValueError(f"{name} has {len(factors)} numbers, but {rotated} rotated dimensions need {rotated // 2}")


def check_positions(config: ModelConfig) -> None:
    """Fields that belong to one kind of positions."""
    if config.rope_scaling is not None and config.positions != "rope":
        raise ValueError(f"rope_scaling needs positions='rope', not {config.positions!r}")
    if config.positions != "t5":
        return
    # A causal stack gives t5_buckets / 2 distances a bucket each, a bidirectional one t5_buckets / 4.
    divisors = [4] if config.has_encoder or not config.causal else []
    if config.causal and config.architecture != "encoder":
        divisors.append(2)
    if config.t5_buckets % 2 or config.t5_buckets < max(divisors):
        raise ValueError(f"t5_buckets={config.t5_buckets} must be even and at least {max(divisors)}")
    if config.t5_max_distance <= (n_exact := config.t5_buckets // min(divisors)):
        raise ValueError(
            f"t5_max_distance={config.t5_max_distance} must exceed the {n_exact} distances that have a bucket each "
            f"with t5_buckets={config.t5_buckets}"
        )


def check_backend(config: ModelConfig) -> None:
    """Fields that the mixer would ignore, and a backend that could not compute it."""
    mixing, mixer, backend = config.mixing, f"mixer={config.mixer!r}", config.attention_backend
    if config.attention_scale is not None and not mixing.scaled:
        raise ValueError(f"attention_scale={config.attention_scale} is a factor on q·k, which {mixer} does not have")
    if config.mixer_size is not None and mixing.size is None:
        raise ValueError(
            f"mixer_size={config.mixer_size} is for performer, linformer, mamba and mamba2; {mixer} has no such size"
        )
    if backend == "auto" or mixing.backends is None:
        return
    supported = set(mixing.backends)
    if config.positions == "xl":  # depends on q, so it cannot be passed to torch's kernels as a bias
        supported -= {"sdpa", "flex"}
    if config.score_cap is not None:
        supported -= {"sdpa", "flex", "triton"}
    if config.attention_sinks:
        supported -= {"triton"}
    if config.attention_dropout > 0:
        supported -= {"flex", "linear"}
    if config.window is not None or config.sparsity != "none" or config.shifted_windows is not None:
        supported -= {"linear"}
    if backend not in supported:
        names = ", ".join(("auto", *(name for name in mixing.backends if name in supported)))
        raise ValueError(f"attention_backend={backend!r} cannot compute {mixer} as configured; these can: {names}")


def check_mixing(config: ModelConfig) -> None:
    """The mixer, windows and sparsity."""
    mixing, positions, mixer = config.mixing, config.positions, f"mixer={config.mixer!r}"
    if not mixing.causal:
        if config.has_decoder and config.causal:
            raise ValueError(f"{mixer} mixes all tokens at once, so it cannot hide the future from a decoder")
        if name := _changed(config, "window", "shifted_windows", "sparsity"):
            raise ValueError(f"{mixer} mixes all tokens at once, so {name} cannot narrow it")
    for name in ("n_heads", "n_decoder_heads", "n_kv_heads"):
        if (getattr(config, name) or 0) % mixing.maps:
            raise ValueError(
                f"{mixer} has {mixing.maps} maps per head, so {name}={getattr(config, name)} must be divisible by it"
            )
    if mixing.recurrent:
        if config.architecture != "decoder" or not config.causal:
            raise ValueError(f"{mixer} reads a text from its beginning; it needs architecture='decoder', causal=True")
        if name := _changed(config, "window", "sparsity", "qk_norm", "attention_dropout"):
            raise ValueError(f"{name}={getattr(config, name)!r} is for attention, which {mixer} replaces")
    if config.d_ff == 0 and (not mixing.recurrent or config.experts or config.parallel_residual != "none"):
        raise ValueError("d_ff=0 removes the feed-forward network, which needs mixer='mamba' or 'mamba2'")
    if not mixing.weights and positions in ("rope", *_BIASES):
        raise ValueError(f"positions={positions!r} acts inside attention, which {mixer} does not have")
    if not mixing.pairs and positions in _BIASES:
        raise ValueError(f"positions={positions!r} is a bias on scores of token pairs, which {mixer} does not have")
    if config.attention_sinks and not mixing.softmax:
        raise ValueError(f"attention_sinks=True is part of attention's softmax, which {mixer} does not have")
    if config.shifted_windows is not None and config.source != "image":
        raise ValueError(f"shifted_windows={config.shifted_windows} needs source='image', not {config.source!r}")
    layers = config.window_layers
    if layers is not None and config.window is None:
        raise ValueError(f"window_layers={layers} needs a window")
    n_layers = max(config.n_layers, (config.n_decoder_layers or 0) if config.has_decoder else 0)
    if layers is not None and not all(0 <= layer < n_layers for layer in layers):
        raise ValueError(f"window_layers={layers} must lie between 0 and {n_layers - 1}")
    for name in ("window_layers", "shifted_windows"):
        if config.share_layers and getattr(config, name) is not None:
            raise ValueError(f"share_layers=True gives all layers one pattern, but {name} differs between layers")
    if config.global_tokens and (config.architecture != "encoder" or config.window is None):
        raise ValueError(f"global_tokens={config.global_tokens} needs architecture='encoder' and a window")
    if config.global_projections:
        _check_global_projections(config)
    if config.sparsity == "end-blocks" and (
        config.architecture != "encoder" or positions in _BIASES or not mixing.pairs
    ):
        raise ValueError(
            "sparsity='end-blocks' needs architecture='encoder', scores of token pairs, and positions without a bias"
        )
    if not 0 <= config.sparsity_random <= 100:
        raise ValueError(f"sparsity_random={config.sparsity_random} must lie between 0 and 100")
    for name in ("window", "shifted_windows"):
        if config.sparsity != "none" and getattr(config, name) is not None:
            raise ValueError(f"sparsity={config.sparsity!r} cannot be combined with {name}={getattr(config, name)}")


def _check_global_projections(config: ModelConfig) -> None:
    """Global tokens have their own keys, which are neither rotated, normalised nor shared."""
    _need(config, "global_projections=True", architecture="encoder", mixer="dot", qk_norm=False, n_kv_heads=None)
    if config.window is None or config.positions in ("rope", *_BIASES):
        raise ValueError("global_projections=True needs a window, and positions that are added to the embeddings")


def check_layers(config: ModelConfig) -> None:
    """The parts of a layer against each other, and fields that differ between layers."""
    if config.norm_offset and config.norm != "rms":
        raise ValueError(f"norm_offset={config.norm_offset} is added to the weight of norm='rms', not {config.norm!r}")
    if not config.first_norm:
        _need(config, "first_norm=False", norm_place="pre", architecture="encoder", share_layers=False)
    if config.parallel_residual != "none":
        _need(config, f"parallel_residual={config.parallel_residual!r}", norm_place="pre", residual=True)
        if config.architecture == "encoder-decoder":
            raise ValueError(f"parallel_residual={config.parallel_residual!r} does not support cross-attention")
    if config.layer_scale is not None:
        _need(config, f"layer_scale={config.layer_scale}", norm_place="pre", parallel_residual="none")
    if config.experts is not None and config.experts_per_token > config.experts:
        raise ValueError(f"experts_per_token={config.experts_per_token} is more than experts={config.experts}")
    if config.experts is None and config.shared_experts:
        raise ValueError(f"shared_experts={config.shared_experts} needs experts=…")
    if config.experts is None and config.router_bias:
        raise ValueError("router_bias=True needs experts=…")
    if config.gate_limit is not None and config.activation not in GATED_ACTIVATIONS:
        raise ValueError(f"gate_limit={config.gate_limit} is for a gated activation, not {config.activation!r}")
    if config.score_cap is not None and config.mixer != "dot":
        raise ValueError(f"score_cap={config.score_cap} caps the scores of mixer='dot', not {config.mixer!r}")
    for name in ("rope_layers", "window_rope_base"):
        value = getattr(config, name)
        if value is not None and config.positions != "rope":
            raise ValueError(f"{name}={value} needs positions='rope', not {config.positions!r}")
        if value is not None and config.share_layers:
            raise ValueError(f"share_layers=True gives all layers equal positions, but {name} differs between layers")
    if config.window_rope_base is not None and config.window is None:
        raise ValueError(f"window_rope_base={config.window_rope_base} needs a window")
    if config.rope_layers is not None and not all(0 <= layer < config.n_layers for layer in config.rope_layers):
        raise ValueError(f"rope_layers={config.rope_layers} must lie between 0 and {config.n_layers - 1}")


_NOT_RECURRENT = (
    *("mixer", "experts", "window", "sparsity", "causal", "residual", "share_layers", "embedding_norm", "n_segments"),
    *("head_transform", "parallel_residual", "score_cap", "norm_offset", "qk_norm", "rope_layers", "window_rope_base"),
    *("layer_scale", "attention_sinks", "drop_path"),
)


def check_recurrent(config: ModelConfig) -> None:
    """Recurrent models have no heads and no blocks; fields about them are rejected rather than ignored."""
    if name := _changed(config, *_NOT_RECURRENT):
        raise ValueError(f"{name}={getattr(config, name)!r} does not apply to architecture='recurrent'")
    if config.positions not in ("sinusoidal", "none"):  # "sinusoidal" is the default, and has no effect
        raise ValueError(f"positions={config.positions!r} does not apply to architecture='recurrent'")
    if config.source != "text":
        raise ValueError(f"architecture='recurrent' reads text, not source={config.source!r}")
    if config.head not in ("lm", "none"):
        raise ValueError(f"architecture='recurrent' has head='lm' or 'none', not {config.head!r}")
    if config.bidirectional and config.d_model % 2:
        raise ValueError(f"d_model={config.d_model} must be even: bidirectional=True gives each direction half of it")
    if config.alignment == "additive" and not config.input_feeding:
        raise ValueError("input_feeding=False needs alignment='dot', 'general' or 'concat', not 'additive'")
    if config.head == "lm" and config.tie_head and config.d_embed not in (None, config.d_model):
        raise ValueError(f"tie_head=True needs d_embed={config.d_embed} to be as wide as d_model={config.d_model}")
