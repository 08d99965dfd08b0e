"""Parts of a model built from its config: embeddings, attention, feed-forward, norms, and the heads that end it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers
from ..attention import MultiHeadAttention, attend
from ..attention.biases import Alibi, Bias, T5Bias, XLRelative
from ..attention.masks import Mask, bigbird, grid_windows, strided, window
from ..attention.mechanisms import Dot, Mechanism
from ..config import ModelConfig
from .experts import Experts


class TokenHead(nn.Module):
    """Logits over a vocabulary: scale · x Wᵀ + b, softly capped where asked.

    A tied head has no W of its own, it is handed the token table.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, tied: bool) -> None:
        super().__init__()
        width = config.d_model
        self.scale, self.cap = config.logit_scale, config.logit_cap
        self.fp8 = False  # whether a fused loss computes its product in eight bits; set from outside
        self.transform = self.norm = None
        if config.head_transform:
            width = config.d_model if config.d_embed is None else config.d_embed
            self.transform = nn.Linear(config.d_model, width)
            self.norm = norm(config, width)
            self.activation = layers.activation_function(config.head_activation or config.activation)
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.head_bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=width**-0.5)

    def hidden(self, x: Tensor) -> Tensor:
        """What the output matrix is applied to (B, T, M); a fused loss takes it from here."""
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        return x if self.scale == 1.0 else x * self.scale

    def cap_logits(self, logits: Tensor) -> Tensor:
        """The soft cap, cap · tanh(logit / cap), where there is one."""
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, T, M) → (B, T, V)."""
        return self.cap_logits(F.linear(self.hidden(x), table if self.weight is None else self.weight, self.bias))


class ClassHead(nn.Module):
    """Class logits (B, classes) from a sequence: pool it, optionally a dense layer, then a linear map."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(config.d_model, config.n_classes)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return self.out(self.dropout(self.pooler(x, mask)))


class TagHead(nn.Module):
    """Class logits of every token.   (B, T, M) → (B, T, classes)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(config.d_model, config.n_classes)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return self.out(self.dropout(x))


class Pooler(nn.Module):
    """A sequence (B, T, M) as one vector (B, M): its first token, its mean, or a learned query's attention over it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.pooling
        self.dense = None if config.pooler == "none" else nn.Linear(config.d_model, config.d_model)
        functions: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}
        self.activation = functions.get(config.pooler, F.relu)
        self.query = nn.Parameter(torch.empty(config.d_model)) if config.pooling == "attention" else None
        if self.query is not None:
            nn.init.normal_(self.query, std=config.d_model**-0.5)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        pooled = x[:, 0] if self.kind == "first" else self._gather(x, mask)
        return pooled if self.dense is None else self.activation(self.dense(pooled))

    def _gather(self, x: Tensor, mask: Mask | None) -> Tensor:
        """The mean is attention with equal scores; padding is kept out of both by the same mask."""
        states = x[:, None]  # (B, 1, T, M): one head
        query = torch.zeros_like(states[:, :, :1]) if self.query is None else self.query.expand_as(states[:, :, :1])
        return attend(query, states, states, mask=mask).output[:, 0, 0]


def stack_sizes(config: ModelConfig, cross: bool) -> tuple[int, int, int]:
    """Layers, heads and feed-forward width of a stack; a decoder beside an encoder (``cross``) may have its own."""
    if not cross:
        return config.n_layers, config.n_heads, config.d_ff
    n_layers, n_heads = config.n_decoder_layers or config.n_layers, config.n_decoder_heads or config.n_heads
    return n_layers, n_heads, config.d_decoder_ff or config.d_ff


def head_width(config: ModelConfig, n_heads: int) -> int:
    return config.d_model // n_heads if config.d_head is None else config.d_head


def norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    width = config.d_model if width is None else width
    return layers.make_norm(config.norm, width, config.norm_eps, bias=config.norm_bias, offset=config.norm_offset)


def feed_forward(config: ModelConfig, d_ff: int) -> layers.FeedForward | Experts:
    """With T5's bias between RMS norms, what it adds in fp16 is fp32, as in transformers."""
    is_t5 = config.positions == "t5" and config.norm == "rms" and config.norm_place == "pre"
    dropout, bias = config.activation_dropout, config.ff_bias
    if config.experts is not None:
        return Experts(
            *(config.d_model, d_ff, config.activation, dropout, bias),
            n_experts=config.experts,
            k=config.experts_per_token,
            n_shared=config.shared_experts,
            renormalise=config.renormalise_experts,
        )
    return layers.FeedForward(config.d_model, d_ff, config.activation, dropout, bias, fp32_output=is_t5)


def attention(
    config: ModelConfig, n_heads: int, rope: layers.Rope | None = None, cross: bool = False
) -> MultiHeadAttention:
    """Self-attention as the config describes it; cross-attention is the same without positions."""
    d_head = head_width(config, n_heads)
    n_kv_heads = n_heads if config.n_kv_heads is None else config.n_kv_heads
    relative = None
    if config.positions == "xl" and not cross:
        relative = XLRelative(n_heads, d_head, scale=config.attention_scale)
    return MultiHeadAttention(
        config.d_model,
        n_heads,
        n_kv_heads,
        d_head,
        cross=cross,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        dropout=config.attention_dropout,
        rope=None if cross else rope,
        qk_norm=(lambda width: norm(config, width)) if config.qk_norm else None,
        qk_norm_over=config.qk_norm_over,
        position_bias=relative,
        mechanism=mechanism(config, n_heads, d_head, cross),
        backend=config.attention_backend,
    )


def mechanism(config: ModelConfig, n_heads: int, d_head: int, cross: bool) -> Mechanism:
    """How a query scores a key. Cross-attention is plain where the mechanism only works within one text."""
    if cross and not config.mixing.cross:
        return Dot(config.attention_scale)
    mixer = _build_mixer(config, n_heads, d_head)
    if not isinstance(mixer, Mechanism):
        raise TypeError(f"mixer={config.mixer!r} is a {type(mixer).__name__}, not an attention.Mechanism")
    return mixer


def mixing(config: ModelConfig, n_heads: int, rope: layers.Rope | None) -> nn.Module:
    """What mixes a layer's tokens: attention, or the module that takes its place."""
    if config.mixing.weights:
        return attention(config, n_heads, rope)
    mixer = _build_mixer(config, n_heads, head_width(config, n_heads))
    if not isinstance(mixer, nn.Module):
        kind = type(mixer).__name__
        raise TypeError(f"mixer={config.mixer!r} is a {kind}, not a module that takes attention's place")
    return mixer


def _build_mixer(config: ModelConfig, n_heads: int, d_head: int) -> Any:
    family = config.mixing.family
    return getattr(family, "for_model", lambda _, *sizes: family(*sizes))(config, n_heads, d_head)


def ropes(config: ModelConfig, n_heads: int, n_layers: int) -> list[layers.Rope | None]:
    """The rotary table of each layer of a stack. It holds no parameters; layers alike share one."""
    if config.positions != "rope":
        return [None] * n_layers
    d_head = head_width(config, n_heads)
    shared = layers.Rope(d_head, config.rope_base, config.rope_scaling, config.rope_fraction, config.max_len)
    local = shared
    if config.window_rope_base is not None:
        local = layers.Rope(d_head, config.window_rope_base, None, config.rope_fraction, config.max_len)
    rotated = range(n_layers) if config.rope_layers is None else config.rope_layers
    windows = [window_of(config, layer) for layer in range(n_layers)]
    return [
        None if layer not in rotated else shared if window is None else local for layer, window in enumerate(windows)
    ]


def shared_bias(config: ModelConfig, n_heads: int, bidirectional: bool) -> Bias | None:
    """The position bias that all layers of a stack share."""
    if config.positions == "alibi":
        return Alibi(n_heads)
    if config.positions == "t5":
        return T5Bias(n_heads, config.t5_buckets, config.t5_max_distance, bidirectional)
    return None


def window_of(config: ModelConfig, layer: int) -> int | None:
    """How many keys a query of this layer sees; None for all."""
    return config.window if config.window_layers is None or layer in config.window_layers else None


def layer_mask(config: ModelConfig, layer: int, causal: bool, cross: bool) -> Mask | None:
    """What a layer's own pattern lets it see: a window or a sparse pattern over text, windows over an image.

    A decoder beside an encoder (``cross``) reads no image. A window that is not ``causal`` looks both ways.
    """
    if config.shifted_windows is not None and not cross:
        side = config.shifted_windows
        shift = side // 2 if layer % 2 else 0
        return grid_windows(config.image_size // config.patch_size, side, shift, n_before=1)
    if config.sparsity == "strided":
        return strided(config.sparsity_size, both_ways=not causal)
    if config.sparsity == "bigbird":
        return bigbird(config.sparsity_size, config.sparsity_size, config.sparsity_random, seed=layer)
    size = window_of(config, layer)
    return None if size is None else window(size, ahead=0 if causal else size - 1)


def token_table(config: ModelConfig, vocab_size: int) -> layers.TokenEmbedding:
    width = config.d_model if config.d_embed is None else config.d_embed
    return layers.TokenEmbedding(vocab_size, width, math.sqrt(width) if config.scale_embeddings else 1.0)


def embeddings(config: ModelConfig, max_len: int) -> layers.Embeddings:
    """Positions, segments, norm and dropout around token vectors; the table itself is the model's, it may be shared."""
    width = config.d_model if config.d_embed is None else config.d_embed
    position = _absolute_positions(config, max_len, width, config.position_offset)
    return layers.Embeddings(
        None,
        segment=layers.TokenEmbedding(config.n_segments, width) if config.n_segments else None,
        position=position,
        norm=norm(config, width) if config.embedding_norm else None,
        projection=None if config.d_embed is None else nn.Linear(config.d_embed, config.d_model),
        dropout=config.embedding_dropout,
    )


def _absolute_positions(
    config: ModelConfig, length: int, width: int, offset: int = 0
) -> layers.Sinusoidal | layers.Learned | None:
    if config.positions == "sinusoidal":
        return layers.Sinusoidal(width, layout=config.sinusoid_layout, offset=offset)
    return layers.Learned(length, width, offset) if config.positions == "learned" else None


def source_embeddings(config: ModelConfig) -> nn.Module:
    """The encoder's first part. Text brings vectors of the token table, which belongs to the model."""
    if config.source == "text":
        return embeddings(config, config.max_len)
    vision_norm = norm(config) if config.embedding_norm else None
    if config.source == "regions":
        d_model, d_box, dropout = config.d_model, config.d_box, config.embedding_dropout
        return layers.RegionEmbedding(config.d_region, d_model=d_model, d_box=d_box, norm=vision_norm, dropout=dropout)
    patches = layers.PatchEmbedding(config.image_size, config.patch_size, config.n_channels, config.d_model)
    position = _absolute_positions(config, (config.image_size // config.patch_size) ** 2 + 1, config.d_model)
    return layers.VisionEmbeddings(patches, position=position, norm=vision_norm, dropout=config.embedding_dropout)


def vision_inputs(config: ModelConfig, source: Tensor) -> tuple[Tensor, ...]:
    """What the embeddings of an image or its regions take: boxes come as the last d_box numbers of each region."""
    if config.source == "regions" and config.d_box:
        width = config.d_region + config.d_box
        if source.shape[-1] != width:
            raise ValueError(f"regions have width {source.shape[-1]}, but d_region + d_box = {width}")
        return source.split((config.d_region, config.d_box), dim=-1)
    size, side = tuple(source.shape[-2:]), config.image_size
    if config.shifted_windows is not None and size != (side, side):
        raise ValueError(f"shifted_windows={config.shifted_windows} fit image_size={side}, not images of {size}")
    return (source,)
