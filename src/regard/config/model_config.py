"""ModelConfig: every size and every choice of a model as a checked field.

Features determine behaviour, never a model's name: GPT-2, BERT and T5 are sets of values (presets.yaml), not classes.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from ..foundation.checks import did_you_mean
from .base import Config
from .data_config import ProblemType
from .mixers import Mixer, get_mixer
from .model_checks import (
    GATED_ACTIVATIONS,
    check_backend,
    check_layers,
    check_mixing,
    check_positions,
    check_recurrent,
    check_sizes,
)
from .rope_scaling import RopeScalingConfig

Architecture = Literal["encoder", "decoder", "encoder-decoder", "recurrent", "two-tower"]
Source = Literal["text", "image", "regions"]
Head = Literal["none", "lm", "masked-lm", "classify", "tag", "replaced", "span"]
Positions = Literal["none", "sinusoidal", "learned", "rope", "alibi", "t5", "xl", "window"]
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu2", *GATED_ACTIVATIONS)
# One token: the first, the last, or the first end token (end: CLIP). All tokens: their mean, a learned query's
# attention over them, the same with several heads and a feed-forward network (map: SigLIP), or the first token next to
# the mean of the patches (DINOv2). class-tokens: a classifier for each class token, with averaged logits (DeiT).
Pooling = Literal["first", "mean", "attention", "first-and-mean", "class-tokens", "end", "last", "map"]
Backend = Literal["auto", "reference", "sdpa", "flex", "tiled", "triton", "linear"]
Sparsity = Literal["none", "strided", "bigbird", "end-blocks"]


class ModelConfig(Config):
    """A Transformer (or a recurrent encoder-decoder with attention) as data."""

    architecture: Architecture = "encoder-decoder"
    """Which stacks there are: an encoder, a decoder, both, a recurrent pair, or two towers, for images and texts."""
    model_class: str | None = None
    """Your own subclass of regard.Model for this architecture, as module:Class; None: the built-in class."""
    source: Source = "text"
    """What the encoder reads: token ids, an image cut into patches, or given region features."""
    head: Head = "lm"
    """The output: logits of next or masked tokens, of classes (per text or per token), or hidden states."""

    vocab_size: int = 37000
    """Tokens in the (source) vocabulary."""
    target_vocab_size: int | None = None
    """Tokens in a separate target vocabulary; None: source and target share vocabulary and table."""
    d_model: int = 512
    """Model width M."""
    n_layers: int = 6
    """Layers of the encoder, or of the only stack."""
    n_decoder_layers: int | None = None
    """Layers of an encoder-decoder's decoder; None: n_layers."""
    n_heads: int = 8
    """Query heads H."""
    n_decoder_heads: int | None = None
    """Query heads of an encoder-decoder's decoder; None: n_heads."""
    n_kv_heads: int | None = None
    """Key and value heads G: fewer than n_heads is grouped-query attention, 1 multi-query; None: n_heads."""
    d_head: int | None = None
    """Width of a head D; None: d_model / n_heads."""
    d_ff: int = 2048
    """Inner width of the feed-forward network; with mixer=mamba or mamba2, 0 removes it."""
    d_decoder_ff: int | None = None
    """The same in an encoder-decoder's decoder; None: d_ff."""
    max_len: int = 1024
    """Maximum length of a text; learned positions end there."""
    max_target_len: int | None = None
    """The same for an encoder-decoder's target; None: max_len."""

    positions: Positions = "sinusoidal"
    """How order is encoded: added to embeddings (sinusoidal, learned), rotated (rope), or a bias (the others)."""
    sinusoid_layout: Literal["interleaved", "halves", "fairseq"] = "interleaved"
    """Sines and cosines alternating as in the paper, all sines first (Marian), or that with other wavelengths (M2M)."""
    position_offset: int = 0
    """Added to positions before they are looked up in a table or turned into sinusoids (BART and RoBERTa: 2)."""
    positions_skip_padding: bool = False
    """Count positions only over tokens other than pad_id (RoBERTa); otherwise padding takes up positions too."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of rotary positions to longer texts."""
    rope_layers: tuple[int, ...] | None = None
    """Layers with rotary positions (SmolLM 3: three of four); the others have none. None: every layer."""
    window_rope_base: float | None = None
    """Base of the rotary wavelengths, unscaled, in layers with a window (Gemma 3); None: as in other layers."""
    t5_buckets: int = 32
    """Distance buckets of the T5 bias."""
    t5_max_distance: int = 128
    """Distance from which the T5 bias uses its last bucket."""

    scale_embeddings: bool = False
    """Multiply token embeddings by √d_model (the paper, Marian)."""
    d_embed: int | None = None
    """Width of a token table narrower than the model (ALBERT); None: d_model."""
    n_segments: int = 0
    """Segment embeddings (BERT's sentence A and B); 0: none."""
    embedding_norm: bool = False
    """Normalise the summed embeddings (BERT, BART)."""
    tie_head: bool = True
    """Use the (target's) token table as output matrix; with one vocabulary, this is the paper's three-way tying."""

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
    first_norm: bool = True
    """Whether the first layer normalises its attention's input (not in ModernBERT, where embedding_norm does)."""
    layer_scale: float | None = None
    """Initial value of a learned factor per channel on each sub-layer's output (CaiT, DINOv2); None: no factor."""
    drop_path: float = 0.0
    """Share of examples that skip a sub-layer in training, rising from 0 in the first layer to this (Swin)."""
    residual: bool = True
    """Residual connections around sub-layers; false is an ablation."""
    parallel_residual: Literal["none", "two-norms", "one-norm"] = "none"
    """Attention and feed-forward side by side, x + A(norm x) + F(norm x), with a norm each (GPT-NeoX) or one (Phi)."""

    mixer: str = "dot"
    """The token mixer: dot, additive, sigmoid, differential, linear, mamba2 … (docs/research.md), or module:Class."""
    mixer_size: int | None = None
    """Random features of Performer, rank of Linformer, state of Mamba; None: the mechanism's default."""
    conv_size: int = 4
    """Width in tokens of the convolution before a state-space model (mamba, mamba2)."""
    step_rank: int | None = None
    """Rank of the projection from which mixer=mamba computes its step sizes; None: d_model / 16, rounded up."""
    attention_scale: float | None = None
    """Factor on q·k; None: 1/√D. T5 has 1."""
    score_cap: float | None = None
    """Soft cap c of the scores: c · tanh(score / c) (Gemma 2); None: no cap."""
    attention_sinks: bool = False
    """A learned logit per head in the softmax denominator of self-attention, so that a head can attend to nothing."""
    causal: bool = True
    """Whether a decoder hides the future; false is an ablation that sees the tokens it must predict."""
    window: int | None = None
    """Keys each query sees, including itself (Mistral), and in an encoder as many after it; None: all."""
    window_layers: tuple[int, ...] | None = None
    """Layers whose attention has that window; None: every layer."""
    global_tokens: int = 0
    """Number of first tokens that see all and are seen by all, in an encoder with a window (Longformer)."""
    global_projections: bool = False
    """Separate query, key and value projections for the attention of global tokens (Longformer)."""
    sparsity: Sparsity = "none"
    """A sparse pattern: strided (Sparse Transformer), bigbird, or end-blocks (BigBird without random blocks)."""
    sparsity_size: int = 64
    """The stride, or the block size; the first block (with end-blocks also the last) sees all and is seen by all."""
    sparsity_repeats: int = 0
    """Extra times that end-blocks counts the first block; texts of up to 5 + 2 × as many blocks are seen whole."""
    sparsity_random: float = 10.0
    """Percentage of BigBird's other block pairs that are open, drawn separately in each layer."""
    qkv_bias: bool = True
    """Bias on the query, key and value projections."""
    out_bias: bool = True
    """Bias on attention's output projection."""
    qk_norm: bool = False
    """Normalise queries and keys."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Normalise each head separately (Qwen 3), or all heads of a token together (OLMo 2)."""
    attention_backend: Backend = "auto"
    """The backend of ``regard.attend``."""

    activation: str = "relu"
    """relu, gelu, gelu_tanh, silu, quick_gelu, relu2, or gated: swiglu, geglu, geglu_tanh, reglu, quick_geglu."""
    gate_limit: float | None = None
    """Limit c of a gated activation, f(min(gate, c)) · (1 + up), up clamped to [-c, c] (gpt-oss); None: no limit."""
    ff_bias: bool = True
    """Bias in the feed-forward network."""
    experts: int | None = None
    """Feed-forward networks per layer, d_ff wide, a few of which a router chooses for each token; None: one network."""
    experts_per_token: int = 2
    """Number of experts that process each token."""
    shared_experts: int = 0
    """Additional experts that process every token."""
    renormalise_experts: bool = True
    """Whether the weights of a token's experts sum to 1 (Mixtral), or are the router's probabilities (OLMoE)."""
    router_bias: bool = False
    """A bias on the router's logits (gpt-oss)."""
    balance_loss: float = 0.01
    """Factor on the loss that balances the use of experts, E Σ f P (Switch Transformer)."""
    router_z_loss: float = 0.001
    """Factor on the loss that keeps router logits small, (log Σ exp)² (ST-MoE)."""
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
    head_transform_bias: bool = True
    """Whether that dense layer has a bias (not in ModernBERT)."""
    head_activation: str | None = None
    """The activation of that dense layer if it differs (RoBERTa: always gelu); None: activation."""
    logit_scale: float = 1.0
    """Factor on the hidden state before the logits (tied T5: d_model^-0.5)."""
    logit_cap: float | None = None
    """Soft cap c of the logits: c · tanh(logit / c) (Gemma 2); None: no cap."""
    n_classes: int = 2
    """Classes of a classifier or tagger."""
    problem_type: ProblemType = "single_label"
    """What its logits mean: exclusive classes, independent labels, or a number."""
    pooling: Pooling = "first"
    """How a sequence becomes one vector: first token, mean, attention, or as in DINOv2, DeiT, CLIP and SigLIP."""
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"
    """A dense layer with this activation on the pooled vector (BERT: tanh, DistilBERT: relu, ELECTRA: gelu)."""
    classifier_dropout: float = 0.0
    """On the pooled vector."""
    generator_width: int | None = None
    """Width of the generator that proposes tokens when head='replaced' is trained (ELECTRA); None: no generator."""
    embed_pooling: Literal["mean", "first", "last"] | None = None
    """How `regard embed` pools a text's states: their mean, the first token's or the last's; None: the mean."""
    embed_normalise: bool = True
    """Whether these vectors are scaled to length 1, so that their dot products are cosines."""
    embed_len: int | None = None
    """Maximum number of tokens of a text to embed; None: max_len."""

    image_size: int = 224
    """Side of the square image."""
    patch_size: int = 16
    """Side of a patch."""
    n_channels: int = 3
    """Colour channels."""
    patch_bias: bool = True
    """Bias on the projection of patches."""
    class_tokens: int = 1
    """Learned vectors before the patches, with positions of their own (ViT: 1, DeiT: one more, for distillation)."""
    register_tokens: int = 0
    """Learned vectors without positions between class tokens and patches (DINOv2 with registers)."""
    mask_token: bool = False
    """A learned vector that replaces hidden patches (DINOv2 in pretraining)."""
    shifted_windows: int | None = None
    """Side, in patches, of local image windows that shift every other layer (Swin); None: global attention."""
    stages: tuple[int, ...] | None = None
    """Layers of each stage of an image tower that halves its grid and doubles its width between stages (Swin)."""
    stage_heads: tuple[int, ...] | None = None
    """Query heads of each stage; those of the last are n_heads."""
    d_region: int = 2048
    """Width of given region features."""
    d_box: Literal[0, 4, 5] = 0
    """Numbers of box geometry after each region's features: none, corners, corners and area."""

    text_model: ModelConfig | None = None
    """Fields of the text tower of architecture=two-tower, or of a captioner's language model, but tokens and length."""
    resampler_tokens: int | None = None
    """Learned vectors that summarise the patches for a captioner (Flamingo); None: it attends to the patches."""
    resampler_layers: int = 2
    """Layers of the resampler."""
    d_shared: int | None = None
    """Width to which both towers are projected (CLIP); None: only texts are, to the image tower's width (SigLIP)."""
    contrast: Literal["softmax", "sigmoid"] = "softmax"
    """The contrastive loss: softmax over all pairs of a row (CLIP), or sigmoid of each pair, with a bias (SigLIP)."""

    cell: Literal["lstm", "gru"] = "lstm"
    """The recurrent cell."""
    alignment: Literal["none", "additive", "dot", "general", "concat"] = "additive"
    """Attention of the recurrent decoder: Bahdanau's additive, Luong's dot, general or concat, or none."""
    bidirectional: bool = True
    """Whether the recurrent encoder reads in both directions."""
    input_feeding: bool = True
    """Whether the attention output of Luong's decoder joins its next input; if not, training has no loop over time."""

    pad_id: int = 0
    """Token id of padding."""
    bos_id: int | None = 1
    """Token id that starts a target text."""
    eos_id: int | None = 2
    """Token id that ends a text."""
    more_eos_ids: tuple[int, ...] = ()
    """Additional token ids that end a generated text (Llama 3 and Qwen, as tuned for chats)."""
    forbidden_ids: tuple[int, ...] = ()
    """Token ids that no generated text contains (Marian's padding, whose logit was never trained)."""
    init_std: float | None = None
    """Standard deviation of normally distributed initial weights; None: Xavier-uniform, as in most tutorials."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_at_least(1, _POSITIVE)
        for most, names in _LARGEST.items():
            self.check_at_most(most, names)
        self.check_at_least(0, _NOT_NEGATIVE)
        self.check_shares(_SHARES)
        for name in ("activation", "head_activation"):
            value = getattr(self, name)
            if value is not None and value not in ACTIVATIONS:
                hint = did_you_mean(value, ACTIVATIONS, quoted=True)
                raise ValueError(f"{name}={value!r} is not one of {', '.join(ACTIVATIONS)}{hint}")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be greater than 0")
        more_than = {"score_cap": 0, "logit_cap": 0, "gate_limit": 0, "rope_base": 1, "window_rope_base": 1}
        for name, least in more_than.items():
            if (value := getattr(self, name)) is not None and not value > least:
                raise ValueError(f"{name}={value} must be greater than {least}")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} must lie in (0, 1]")
        if self.architecture == "recurrent":
            check_recurrent(self)
        else:
            check_sizes(self)
            check_positions(self)
            check_mixing(self)
            check_layers(self)
            check_backend(self)
        return self

    @property
    def mixing(self) -> Mixer:
        """The capabilities of the mixer."""
        return get_mixer(self.mixer)

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder", "encoder-decoder", "two-tower")

    @property
    def has_decoder(self) -> bool:
        return self.architecture in ("decoder", "encoder-decoder")

    @property
    def text_tower(self) -> ModelConfig:
        """``text_model`` with the tokens and the maximum length of this config."""
        if self.text_model is None:
            raise ValueError(f"architecture={self.architecture!r} has no text tower")
        tokens = {name: getattr(self, name) for name in ("vocab_size", "pad_id", "bos_id", "eos_id")}
        return self.text_model.with_(**tokens, max_len=self.max_target_len or self.max_len)

    @property
    def prefix_tokens(self) -> int:
        """Vectors before the patches of an image."""
        return self.class_tokens + self.register_tokens

    @property
    def output_vocab_size(self) -> int:
        """Size of the vocabulary that the model generates from."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size


_POSITIVE = (
    *("vocab_size", "target_vocab_size", "d_model", "n_layers", "n_decoder_layers", "n_heads", "n_decoder_heads"),
    *("n_kv_heads", "d_head", "d_decoder_ff", "max_len", "max_target_len", "d_embed", "window", "n_classes"),
    *("conv_size", "step_rank", "embed_len", "generator_width"),
    *("image_size", "patch_size", "n_channels", "shifted_windows", "d_region", "mixer_size", "t5_buckets"),
    *("sparsity_size", "experts", "experts_per_token", "d_shared", "resampler_tokens", "resampler_layers"),
)
_NOT_NEGATIVE = (
    *("n_segments", "position_offset", "pad_id", "bos_id", "eos_id", "shared_experts", "d_ff", "global_tokens"),
    *("sparsity_repeats", "class_tokens", "register_tokens", "balance_loss", "router_z_loss", "init_std"),
)
_SHARES = (
    *("dropout", "attention_dropout", "embedding_dropout", "activation_dropout", "classifier_dropout", "drop_path"),
)
# No model is larger. Without limits, the sizes in a damaged file could take forever to build, or overflow.
_LARGEST = {
    1000: ("n_layers", "n_decoder_layers", "experts", "experts_per_token", "shared_experts", "conv_size"),
    2**16: ("class_tokens", "register_tokens", "resampler_tokens", "resampler_layers"),
    2**20: (
        *("d_model", "d_head", "d_ff", "d_decoder_ff", "d_embed", "d_region", "n_heads", "n_decoder_heads"),
        *("d_shared", "n_kv_heads", "n_channels", "image_size", "patch_size", "mixer_size", "t5_buckets"),
    ),
    2**31 - 1: (*_POSITIVE, "d_ff", "n_segments", "position_offset", "t5_max_distance", "pad_id", "bos_id", "eos_id"),
}
