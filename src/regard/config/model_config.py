"""ModelConfig: every size and every choice of a model as a checked field.

Features decide behaviour, never a model's name: GPT-2, BERT or T5 are rows of values (presets.yaml), not classes.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from ..foundation.checks import nearest_name
from .base import Config
from .data_config import ProblemType
from .mixers import Mixer, get_mixer
from .rope_scaling import RopeScalingConfig

Architecture = Literal["encoder", "decoder", "encoder-decoder", "recurrent"]
Source = Literal["text", "image", "regions"]
Head = Literal["none", "lm", "masked-lm", "classify", "tag"]
Positions = Literal["none", "sinusoidal", "learned", "rope", "alibi", "t5", "xl"]
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu2", "swiglu", "geglu", "geglu_tanh", "reglu")
Backend = Literal["auto", "reference", "sdpa", "flex", "tiled", "triton", "linear"]
Sparsity = Literal["none", "strided", "bigbird"]


class ModelConfig(Config):
    """A Transformer (or a recurrent encoder-decoder with attention) as data."""

    architecture: Architecture = "encoder-decoder"
    """Which stacks there are: an encoder, a decoder, both, or a recurrent pair."""
    source: Source = "text"
    """What the encoder reads: token ids, an image cut into patches, or given region features."""
    head: Head = "lm"
    """What comes out: logits of next or masked tokens, of classes (of the text or of each token), or hidden states."""

    vocab_size: int = 37000
    """Tokens in the (source) vocabulary."""
    target_vocab_size: int | None = None
    """Tokens in the target vocabulary where it is another one; None: source and target share vocabulary and table."""
    d_model: int = 512
    """Model width M."""
    n_layers: int = 6
    """Layers of the encoder, or of the only stack."""
    n_decoder_layers: int | None = None
    """Layers of the decoder beside an encoder; None: as many as n_layers."""
    n_heads: int = 8
    """Query heads H."""
    n_decoder_heads: int | None = None
    """Query heads of the decoder beside an encoder; None: as many as n_heads."""
    n_kv_heads: int | None = None
    """Key and value heads G: fewer than n_heads is grouped-query attention, 1 multi-query; None: n_heads."""
    d_head: int | None = None
    """Width of a head D; None: d_model / n_heads."""
    d_ff: int = 2048
    """Inner width of the feed-forward network; with mixer=mamba2, 0 leaves layers without one."""
    d_decoder_ff: int | None = None
    """The same in the decoder beside an encoder; None: d_ff."""
    max_len: int = 1024
    """Longest text; learned positions end there."""
    max_target_len: int | None = None
    """The same for the decoder beside an encoder; None: max_len."""

    positions: Positions = "sinusoidal"
    """How order is encoded: added to embeddings (sinusoidal, learned), rotated (rope), or a bias (alibi, t5, xl)."""
    sinusoid_layout: Literal["interleaved", "halves", "fairseq"] = "interleaved"
    """Sines and cosines alternating as in the paper, all sines first (Marian), or that with other wavelengths (M2M)."""
    position_offset: int = 0
    """Added to positions before they are looked up in a table or turned into sinusoids (BART and RoBERTa: 2)."""
    positions_skip_padding: bool = False
    """Count positions over tokens other than pad_id only (RoBERTa); otherwise padding takes up places too."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated."""
    rope_scaling: RopeScalingConfig | None = None
    """Stretching of rotary positions to longer texts."""
    rope_layers: tuple[int, ...] | None = None
    """Layers with rotary positions (SmolLM 3: three of four); the others have none. None: every layer."""
    window_rope_base: float | None = None
    """Base of the rotary wavelengths, unscaled, in layers with a window (Gemma 3); None: as in the others."""
    t5_buckets: int = 32
    """Distance buckets of the T5 bias."""
    t5_max_distance: int = 128
    """Distance from which on the T5 bias has one last bucket."""

    scale_embeddings: bool = False
    """Multiply token embeddings by √d_model (the paper, Marian)."""
    d_embed: int | None = None
    """Width of the token table where it is narrower than the model (ALBERT); None: d_model."""
    n_segments: int = 0
    """Segment embeddings (BERT's sentence A and B); 0: none."""
    embedding_norm: bool = False
    """Normalise the summed embeddings (BERT, BART)."""
    tie_head: bool = True
    """The output matrix is the (target's) token table; with one vocabulary that is the paper's three-way tying."""

    norm: Literal["layer", "rms", "none"] = "layer"
    """LayerNorm, RMSNorm, or nothing (an ablation)."""
    norm_place: Literal["pre", "post", "output", "both"] = "post"
    """On each sub-layer's input (pre), output (output: OLMo 2), both (Gemma 2), or on each residual sum (post)."""
    norm_eps: float = 1e-5
    """ε inside the norms."""
    norm_offset: float = 0.0
    """Added to RMSNorm's weight (Gemma: 1)."""
    norm_bias: bool = True
    """Whether LayerNorm has a bias."""
    residual: bool = True
    """Residual connections around sub-layers; without them is an ablation."""
    parallel_residual: Literal["none", "two-norms", "one-norm"] = "none"
    """Attention and feed-forward side by side, x + A(norm x) + F(norm x), with a norm each (GPT-NeoX) or one (Phi)."""

    mixer: str = "dot"
    """What mixes tokens: dot, additive, linear, performer, linformer, fourier, mamba2, or your own, module:Class."""
    mixer_size: int | None = None
    """Random features of Performer, rank of Linformer, state of Mamba 2; None: the mechanism's own default."""
    conv_size: int = 4
    """Tokens that the convolution before a state-space model (mamba2) sees."""
    attention_scale: float | None = None
    """Factor on q·k; None: 1/√D. T5 has 1."""
    score_cap: float | None = None
    """Soft cap c of the scores: c · tanh(score / c) (Gemma 2); None: no cap."""
    causal: bool = True
    """Whether a decoder hides the future; without it is an ablation that trains on what it must predict."""
    window: int | None = None
    """Keys each query sees, itself included (Mistral), and in an encoder as many after it; None: all."""
    window_layers: tuple[int, ...] | None = None
    """Layers whose attention has that window; None: every layer."""
    sparsity: Sparsity = "none"
    """A sparse pattern in every layer: strided (Sparse Transformer) or bigbird (neighbours, global tokens, chance)."""
    sparsity_size: int = 64
    """The stride, or the tokens in one of BigBird's blocks; the first block sees all and is seen by all."""
    sparsity_random: float = 10.0
    """Per cent of BigBird's other pairs of blocks that are open, drawn anew in each layer."""
    qkv_bias: bool = True
    """Bias on the query, key and value projections."""
    out_bias: bool = True
    """Bias on attention's output projection."""
    qk_norm: bool = False
    """Normalise queries and keys."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Each head by itself (Qwen 3), or all heads of a token together (OLMo 2)."""
    attention_backend: Backend = "auto"
    """The backend of ``regard.attend``."""

    activation: str = "relu"
    """relu, gelu, gelu_tanh, silu, quick_gelu, relu2, or gated: swiglu, geglu, geglu_tanh, reglu."""
    ff_bias: bool = True
    """Bias in the feed-forward network."""
    experts: int | None = None
    """Feed-forward networks, d_ff wide, in a layer, to a few of which a router sends each token; None: one for all."""
    experts_per_token: int = 2
    """How many of the experts each token goes through."""
    shared_experts: int = 0
    """Further experts, which every token goes through."""
    renormalise_experts: bool = True
    """The weights of a token's experts sum to 1 (Mixtral), or are the router's probabilities among all (OLMoE)."""
    balance_loss: float = 0.01
    """Factor on the loss that wants all experts used alike, E Σ f P (Switch Transformer)."""
    router_z_loss: float = 0.001
    """Factor on the loss that wants small router logits, (log Σ exp)² (ST-MoE)."""
    share_layers: bool = False
    """One set of weights for all layers (ALBERT)."""

    dropout: float = 0.0
    """On the output of each sub-layer, before it is added (the paper: 0.1)."""
    attention_dropout: float = 0.0
    """On the attention weights."""
    embedding_dropout: float = 0.0
    """On the sum of embeddings and positions."""
    activation_dropout: float = 0.0
    """Inside the feed-forward network, after the activation."""

    head_bias: bool = False
    """A bias on the output logits (BERT, Marian, BART)."""
    head_transform: bool = False
    """A dense layer, activation and norm before the masked-token logits (BERT)."""
    head_activation: str | None = None
    """The activation there where it is another one (RoBERTa: always gelu); None: activation."""
    logit_scale: float = 1.0
    """Factor on the hidden state before the logits (tied T5: d_model^-0.5)."""
    logit_cap: float | None = None
    """Soft cap c of the logits: c · tanh(logit / c) (Gemma 2); None: no cap."""
    n_classes: int = 2
    """Classes of a classifier or tagger."""
    problem_type: ProblemType = "single_label"
    """What its logits mean: classes of which one holds, labels each of which may hold, or a number."""
    pooling: Literal["first", "mean", "attention"] = "first"
    """How a classifier reads a sequence: its first token, the mean, or a learned attention over it."""
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"
    """A dense layer with this activation on the pooled vector (BERT: tanh, DistilBERT: relu, ELECTRA: gelu)."""
    classifier_dropout: float = 0.0
    """On the pooled vector."""

    image_size: int = 224
    """Side of the square image."""
    patch_size: int = 16
    """Side of a patch."""
    n_channels: int = 3
    """Colour channels."""
    shifted_windows: int | None = None
    """Side, in patches, of local image windows that shift every other layer (Swin); None: global attention."""
    d_region: int = 2048
    """Width of given region features."""
    d_box: Literal[0, 4, 5] = 0
    """Numbers of box geometry after each region's features: none, corners, corners and area."""

    cell: Literal["lstm", "gru"] = "lstm"
    """The recurrent cell."""
    alignment: Literal["none", "additive", "dot", "general", "concat"] = "additive"
    """Attention of the recurrent decoder: Bahdanau's additive, Luong's dot, general or concat, or none."""
    bidirectional: bool = True
    """Whether the recurrent encoder reads both ways."""
    input_feeding: bool = True
    """Whether what Luong's decoder attended to joins its next input; without it, training needs no loop over time."""

    pad_id: int = 0
    """Token id of padding."""
    bos_id: int | None = 1
    """Token id that starts a target text."""
    eos_id: int | None = 2
    """Token id that ends a text."""
    more_eos_ids: tuple[int, ...] = ()
    """Further token ids that end a text when one is generated (Llama 3 and Qwen, as tuned for chats)."""
    init_std: float | None = None
    """Spread of normally distributed initial weights; None: Xavier-uniform, as the tutorials do."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_at_least(1, _POSITIVE)
        for most, names in _LARGEST.items():
            self.check_at_most(most, names)
        self.check_at_least(
            0, ("n_segments", "position_offset", "pad_id", "bos_id", "eos_id", "shared_experts", "d_ff")
        )
        self.check_at_least(0, ("balance_loss", "router_z_loss"))
        self.check_shares(
            ("dropout", "attention_dropout", "embedding_dropout", "activation_dropout", "classifier_dropout")
        )
        for name in ("activation", "head_activation"):
            value = getattr(self, name)
            if value is not None and value not in ACTIVATIONS:
                nearest = nearest_name(value, ACTIVATIONS)
                hint = f"; did you mean {nearest!r}?" if nearest else ""
                raise ValueError(f"{name}={value!r} is none of {', '.join(ACTIVATIONS)}{hint}")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be greater than 0")
        for name, least in {"score_cap": 0, "logit_cap": 0, "rope_base": 1, "window_rope_base": 1}.items():
            if (value := getattr(self, name)) is not None and not value > least:
                raise ValueError(f"{name}={value} must be greater than {least}")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} must lie in (0, 1]")
        if self.architecture == "recurrent":
            _check_recurrent(self)
        else:
            _check_sizes(self)
            _check_positions(self)
            _check_mixing(self)
            _check_layers(self)
            _check_backend(self)
        return self

    @property
    def mixing(self) -> Mixer:
        """What the mixer is able to do."""
        return get_mixer(self.mixer)

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder", "encoder-decoder")

    @property
    def has_decoder(self) -> bool:
        return self.architecture in ("decoder", "encoder-decoder")

    @property
    def output_vocab_size(self) -> int:
        """Tokens among which the model chooses."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size


_POSITIVE = (
    *("vocab_size", "target_vocab_size", "d_model", "n_layers", "n_decoder_layers", "n_heads", "n_decoder_heads"),
    *(
        "n_kv_heads",
        "d_head",
        "d_decoder_ff",
        "max_len",
        "max_target_len",
        "d_embed",
        "window",
        "n_classes",
        "conv_size",
    ),
    *("image_size", "patch_size", "n_channels", "shifted_windows", "d_region", "mixer_size", "t5_buckets"),
    *("sparsity_size", "experts", "experts_per_token"),
)
# No model is larger; what a damaged file says would take forever to build, or overflow.
_LARGEST = {
    1000: ("n_layers", "n_decoder_layers", "experts", "experts_per_token", "shared_experts", "conv_size"),
    2**20: (
        *("d_model", "d_head", "d_ff", "d_decoder_ff", "d_embed", "d_region", "n_heads", "n_decoder_heads"),
        *("n_kv_heads", "n_channels", "image_size", "patch_size", "mixer_size", "t5_buckets"),
    ),
    2**31 - 1: (*_POSITIVE, "d_ff", "n_segments", "position_offset", "t5_max_distance", "pad_id", "bos_id", "eos_id"),
}
_BIASES = ("alibi", "t5", "xl")


def _check_sizes(config: ModelConfig) -> None:
    """Heads, and what goes in and comes out."""
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
            f"target_vocab_size={config.target_vocab_size} is for source and target; architecture="
            f"{config.architecture!r} has one vocabulary, vocab_size"
        )
    if config.source == "image" and config.image_size % config.patch_size:
        raise ValueError(f"image_size={config.image_size} is not divisible by patch_size={config.patch_size}")
    if config.architecture == "decoder" and config.source != "text":
        raise ValueError(f"architecture='decoder' reads text; source={config.source!r} needs an encoder")
    if config.head in ("masked-lm", "classify", "tag") and config.architecture != "encoder":
        raise ValueError(f"head={config.head!r} goes with architecture='encoder', not {config.architecture!r}")
    if config.head == "masked-lm" and config.source != "text":
        raise ValueError(f"head='masked-lm' predicts tokens; source={config.source!r} has none")
    if config.head == "lm" and not config.has_decoder:
        raise ValueError("head='lm' needs a decoder; architecture='encoder' has 'masked-lm', 'classify' or 'none'")
    narrow = config.d_embed not in (None, config.d_model) and not config.head_transform
    if config.head in ("lm", "masked-lm") and config.tie_head and narrow:
        raise ValueError(
            f"tie_head=True needs d_embed={config.d_embed} to be as wide as d_model={config.d_model}, or head_transform"
        )


def _check_rope(config: ModelConfig, width: int) -> None:
    """The rotated part of a head of this width."""
    if width % 2:
        raise ValueError(f"positions='rope' needs an even head width, got {width}")
    rotated, scaling = int(width * config.rope_fraction), config.rope_scaling
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"rope_fraction={config.rope_fraction} of heads {width} wide rotates {rotated} dimensions; they are "
            "rotated in pairs"
        )
    if scaling is None:
        return
    if scaling.kind == "dynamic" and rotated <= 2:
        raise ValueError(f"rope_scaling kind 'dynamic' needs more than 2 rotated dimensions, not {rotated}")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != rotated // 2:
            raise ValueError(f"{name} has {len(factors)} numbers, but {rotated} rotated dimensions need {rotated // 2}")


def _check_positions(config: ModelConfig) -> None:
    """What belongs to one kind of positions only."""
    if config.rope_scaling is not None and config.positions != "rope":
        raise ValueError(f"rope_scaling stretches positions='rope', not {config.positions!r}")
    if config.positions != "t5":
        return
    # Half of the buckets, or a quarter where both directions have their own, hold one distance each.
    exact = (
        {4} if config.architecture == "encoder" or not config.causal else {2} | ({4} if config.has_encoder else set())
    )
    if config.t5_buckets % 2 or config.t5_buckets < max(exact):
        raise ValueError(f"t5_buckets={config.t5_buckets} must be even and at least {max(exact)}")
    if config.t5_max_distance <= (most := config.t5_buckets // min(exact)):
        raise ValueError(
            f"t5_max_distance={config.t5_max_distance} must exceed the {most} distances that have a bucket each "
            f"with t5_buckets={config.t5_buckets}"
        )


def _check_backend(config: ModelConfig) -> None:
    """Fields that the mixer would pass over, and a backend that could not compute it."""
    mixing, mixer, backend = config.mixing, f"mixer={config.mixer!r}", config.attention_backend
    if config.attention_scale is not None and not mixing.scaled:
        raise ValueError(f"attention_scale={config.attention_scale} is a factor on q·k, which {mixer} has not")
    if config.mixer_size is not None and mixing.size is None:
        raise ValueError(
            f"mixer_size={config.mixer_size} is for performer, linformer and mamba2; {mixer} has no such size"
        )
    if backend == "auto" or mixing.backends is None:
        return
    able = set(mixing.backends)
    if config.positions == "xl":  # reads q, so it is no bias that torch's kernels could be given
        able -= {"sdpa", "flex"}
    if config.score_cap is not None:
        able -= {"sdpa", "flex", "triton"}
    if config.attention_dropout > 0:
        able -= {"flex", "linear"}
    if config.window is not None or config.sparsity != "none" or config.shifted_windows is not None:
        able -= {"linear"}
    if backend not in able:
        names = ", ".join(("auto", *(name for name in mixing.backends if name in able)))
        raise ValueError(f"attention_backend={backend!r} cannot compute {mixer} as configured; these can: {names}")


def _check_mixing(config: ModelConfig) -> None:
    """The mixer, windows and sparsity."""
    mixing, positions, mixer = config.mixing, config.positions, f"mixer={config.mixer!r}"
    if not mixing.causal:
        if config.has_decoder and config.causal:
            raise ValueError(f"{mixer} mixes all tokens at once, so it cannot hide the future from a decoder")
        for name in ("window", "shifted_windows", "sparsity"):
            if getattr(config, name) != ModelConfig.model_fields[name].default:
                raise ValueError(f"{mixer} mixes all tokens at once, so {name} cannot narrow it")
    if mixing.recurrent:
        if config.architecture != "decoder" or not config.causal:
            raise ValueError(f"{mixer} reads a text from its beginning; it needs architecture='decoder', causal=True")
        for name in ("window", "sparsity", "qk_norm", "attention_dropout"):
            if getattr(config, name) != ModelConfig.model_fields[name].default:
                raise ValueError(f"{name}={getattr(config, name)!r} is for attention, in whose place {mixer} stands")
    if config.d_ff == 0 and (not mixing.recurrent or config.experts or config.parallel_residual != "none"):
        raise ValueError("d_ff=0 leaves layers without a feed-forward network; that is for mixer='mamba2' alone")
    if not mixing.weights and positions in ("rope", *_BIASES):
        raise ValueError(f"positions={positions!r} acts inside attention, which {mixer} has not")
    if not mixing.pairs and positions in _BIASES:
        raise ValueError(f"positions={positions!r} is a bias on scores of token pairs, which {mixer} has not")
    if config.shifted_windows is not None and config.source != "image":
        raise ValueError(f"shifted_windows={config.shifted_windows} needs source='image', not {config.source!r}")
    layers = config.window_layers
    if layers is not None and config.window is None:
        raise ValueError(f"window_layers={layers} needs a window")
    most = max(config.n_layers, (config.n_decoder_layers or 0) if config.has_decoder else 0)
    if layers is not None and not all(0 <= layer < most for layer in layers):
        raise ValueError(f"window_layers={layers} must lie between 0 and {most - 1}")
    for name in ("window_layers", "shifted_windows"):
        if config.share_layers and getattr(config, name) is not None:
            raise ValueError(f"share_layers=True gives all layers one pattern, but {name} tells them apart")
    if not 0 <= config.sparsity_random <= 100:
        raise ValueError(f"sparsity_random={config.sparsity_random} must lie between 0 and 100")
    for name in ("window", "shifted_windows"):
        if config.sparsity != "none" and getattr(config, name) is not None:
            raise ValueError(f"sparsity={config.sparsity!r} and {name}={getattr(config, name)} both say who is seen")


def _check_layers(config: ModelConfig) -> None:
    """What a layer's parts need of each other, and fields that tell layers apart."""
    if config.norm_offset and config.norm != "rms":
        raise ValueError(f"norm_offset={config.norm_offset} is added to the weight of norm='rms', not {config.norm!r}")
    if config.parallel_residual != "none":
        for name, needed in (("norm_place", "pre"), ("residual", True)):
            if getattr(config, name) != needed:
                raise ValueError(f"parallel_residual={config.parallel_residual!r} needs {name}={needed!r}")
        if config.architecture == "encoder-decoder":
            raise ValueError(f"parallel_residual={config.parallel_residual!r} leaves no place for cross-attention")
    if config.experts is not None and config.experts_per_token > config.experts:
        raise ValueError(f"experts_per_token={config.experts_per_token} is more than experts={config.experts}")
    if config.experts is None and config.shared_experts:
        raise ValueError(f"shared_experts={config.shared_experts} needs experts=…, among which a router chooses")
    if config.score_cap is not None and config.mixer != "dot":
        raise ValueError(f"score_cap={config.score_cap} caps the scores of mixer='dot', not {config.mixer!r}")
    for name in ("rope_layers", "window_rope_base"):
        value = getattr(config, name)
        if value is not None and config.positions != "rope":
            raise ValueError(f"{name}={value} needs positions='rope', not {config.positions!r}")
        if value is not None and config.share_layers:
            raise ValueError(f"share_layers=True gives all layers one set of positions, but {name} tells them apart")
    if config.window_rope_base is not None and config.window is None:
        raise ValueError(f"window_rope_base={config.window_rope_base} is for layers with a window, and there is none")
    if config.rope_layers is not None and not all(0 <= layer < config.n_layers for layer in config.rope_layers):
        raise ValueError(f"rope_layers={config.rope_layers} must lie between 0 and {config.n_layers - 1}")


_NOT_RECURRENT = (
    *("mixer", "experts", "window", "sparsity", "causal", "residual", "share_layers", "embedding_norm", "n_segments"),
    *("head_transform", "parallel_residual", "score_cap", "norm_offset", "qk_norm", "rope_layers", "window_rope_base"),
)


def _check_recurrent(config: ModelConfig) -> None:
    """Recurrent models have no heads and no blocks: what cannot be meant is refused rather than passed over."""
    for name in _NOT_RECURRENT:
        if getattr(config, name) != ModelConfig.model_fields[name].default:
            raise ValueError(f"{name}={getattr(config, name)!r} means nothing to architecture='recurrent'")
    if config.positions not in ("sinusoidal", "none"):  # the first is the default, and not looked at
        raise ValueError(f"positions={config.positions!r} means nothing to architecture='recurrent'")
    if config.source != "text":
        raise ValueError(f"architecture='recurrent' reads text, not source={config.source!r}")
    if config.head not in ("lm", "none"):
        raise ValueError(f"architecture='recurrent' has head='lm' or 'none', not {config.head!r}")
    if config.bidirectional and config.d_model % 2:
        raise ValueError(f"d_model={config.d_model} must be even: bidirectional=True gives each direction half of it")
    if config.alignment == "additive" and not config.input_feeding:
        raise ValueError("input_feeding=False goes with alignment='dot', 'general' or 'concat', not with 'additive'")
    if config.head == "lm" and config.tie_head and config.d_embed not in (None, config.d_model):
        raise ValueError(f"tie_head=True needs d_embed={config.d_embed} to be as wide as d_model={config.d_model}")
