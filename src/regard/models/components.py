"""The parts of a model, built from its config: embeddings, attention, feed-forward, norms and output heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers
from ..attention import MultiHeadAttention, attend
from ..attention.biases import Alibi, Bias, FirstBlockBias, T5Bias, WindowBias, XLRelative
from ..attention.masks import Mask, bigbird, end_blocks, global_tokens, grid_windows, strided, window
from ..attention.mechanisms import Dot, Mechanism
from ..config import ModelConfig
from .experts import Experts


class TokenHead(nn.Module):
    """Logits over a vocabulary: scale · x Wᵀ + b, optionally soft-capped.

    A tied head has no W of its own; the token table is passed to ``forward``.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, tied: bool) -> None:
        super().__init__()
        width = config.d_model
        self.scale, self.cap = config.logit_scale, config.logit_cap
        self.fp8 = False  # whether a fused loss computes its matrix product in fp8; set by training
        self.transform = self.norm = None
        if config.head_transform:
            width = config.d_model if config.d_embed is None else config.d_embed
            self.transform = nn.Linear(config.d_model, width, bias=config.head_transform_bias)
            self.norm = norm(config, width)
            self.activation = layers.activation_function(config.head_activation or config.activation)
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.head_bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=width**-0.5)

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the output matrix (B, T, M); a fused loss starts from it."""
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        return x if self.scale == 1.0 else x * self.scale

    def cap_logits(self, logits: Tensor) -> Tensor:
        """The soft cap, cap · tanh(logit / cap), if the config has one."""
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, T, M) → (B, T, V)."""
        return self.cap_logits(F.linear(self.hidden(x), table if self.weight is None else self.weight, self.bias))


class ClassHead(nn.Module):
    """Class logits from a pooled sequence; with several class tokens, the mean of their logits (DeiT).

    (B, T, M) → (B, classes)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(self.pooler.width, config.n_classes)
        n_others = config.class_tokens - 1 if config.pooling == "class-tokens" else 0
        self.others = nn.ModuleList(nn.Linear(config.d_model, config.n_classes) for _ in range(n_others))

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        logits = self.out(self.dropout(self.pooler(x, mask)))
        for token, out in enumerate(self.others, start=1):  # the other class tokens
            logits = logits + out(self.dropout(x[:, token]))
        return logits / (1 + len(self.others)) if len(self.others) else logits


class TagHead(nn.Module):
    """Class logits of every token.   (B, T, M) → (B, T, classes)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(config.d_model, config.n_classes)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return self.out(self.dropout(x))


class SpanHead(nn.Module):
    """Start and end logits of an answer at every token.   (B, T, M) → (B, T, 2)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.out = nn.Linear(config.d_model, 2)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return self.out(x)


class ReplacedHead(nn.Module):
    """A logit per token that it was replaced (ELECTRA, Clark et al. 2020).   (B, T, M) → (B, T)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.activation = layers.activation_function(config.activation)
        self.out = nn.Linear(config.d_model, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.dense(x)))[..., 0]


class Pooler(nn.Module):
    """A sequence (B, T, M) as one vector (B, M): one of its tokens, its mean, or a learned query's attention over it.

    "first-and-mean" gives (B, 2 M): the first token, and the mean of all tokens after the class tokens and registers.
    "end" is the state at the first end-of-text token in ``tokens`` (B, T); "map" (Zhai et al. 2022) is y + FFN(norm y),
    where y is the multi-head attention of a learned query over the states.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.pooling
        self.prefix = config.prefix_tokens
        self.width = 2 * config.d_model if self.kind == "first-and-mean" else config.d_model
        self.dense = None if config.pooler == "none" else nn.Linear(config.d_model, config.d_model)
        functions: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}
        self.activation = functions.get(config.pooler, F.relu)
        self.query = nn.Parameter(torch.empty(config.d_model)) if config.pooling in ("attention", "map") else None
        self.attention = attention(config, config.n_heads, cross=True) if self.kind == "map" else None
        self.norm = norm(config) if self.kind == "map" else None
        self.ff = feed_forward(config, config.d_ff) if self.kind == "map" else None
        self.eos_id = config.eos_id
        if self.query is not None:
            nn.init.normal_(self.query, std=config.d_model**-0.5)

    def forward(self, x: Tensor, mask: Mask | None = None, tokens: Tensor | None = None) -> Tensor:
        if self.kind == "end":
            assert tokens is not None
            ends: Tensor = tokens.eq(-1 if self.eos_id is None else self.eos_id)
            pooled = x[torch.arange(len(x), device=x.device), ends.int().argmax(-1)]
        elif self.kind == "last":
            pooled = x[:, -1]
        else:
            pooled = x[:, 0] if self.kind in ("first", "class-tokens") else self._pool_all(x, mask)
        return pooled if self.dense is None else self.activation(self.dense(pooled))

    def _pool_all(self, x: Tensor, mask: Mask | None) -> Tensor:
        """A mean or an attention over all tokens. The mean is attention with equal scores, so the mask hides padding
        in both."""
        if self.kind == "first-and-mean":  # only for images, which have no padding
            return torch.cat((x[:, 0], x[:, self.prefix :].mean(1)), dim=-1)
        if self.attention is not None and self.query is not None and self.norm is not None and self.ff is not None:
            y = self.attention(self.query.expand(len(x), 1, -1), x, mask=mask)[:, 0]
            return y + self.ff(self.norm(y))
        states = x[:, None]  # (B, 1, T, M): one head
        query = torch.zeros_like(states[:, :, :1]) if self.query is None else self.query.expand_as(states[:, :, :1])
        return attend(query, states, states, mask=mask).output[:, 0, 0]


def embed_states(config: ModelConfig, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """One vector per text (B, M) from its states (B, T, M), by ``embed_pooling`` and ``embed_normalise``.

    Reimers & Gurevych 2019, §3. ``padding_mask`` (B, T) is True at real tokens.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    real = states.new_ones(states.shape[:2]) if padding_mask is None else padding_mask.to(states.dtype)
    match config.embed_pooling:
        case "first":
            vectors = states[:, 0]
        case "last":
            index = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).argmax(1)
            vectors = states.gather(1, index[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        case _:
            vectors = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
    return F.normalize(vectors, dim=-1) if config.embed_normalise else vectors


def stack_sizes(config: ModelConfig, cross: bool) -> tuple[int, int, int]:
    """Layers, heads and feed-forward width of a stack; an encoder-decoder's decoder (``cross``) may have its own."""
    if not cross:
        return config.n_layers, config.n_heads, config.d_ff
    n_layers, n_heads = config.n_decoder_layers or config.n_layers, config.n_decoder_heads or config.n_heads
    return n_layers, n_heads, config.d_decoder_ff or config.d_ff


def head_width(config: ModelConfig, n_heads: int) -> int:
    return config.d_model // n_heads if config.d_head is None else config.d_head


def norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    width = config.d_model if width is None else width
    return layers.make_norm(config.norm, width, config.norm_eps, bias=config.norm_bias, offset=config.norm_offset)


def layer_scale(config: ModelConfig) -> layers.LayerScale | None:
    return None if config.layer_scale is None else layers.LayerScale(config.d_model, config.layer_scale)


def feed_forward(config: ModelConfig, d_ff: int) -> layers.FeedForward | Experts:
    """A layer's feed-forward network or its experts. In fp16, T5's output projection runs in fp32 (transformers)."""
    is_t5 = config.positions == "t5" and config.norm == "rms" and config.norm_place == "pre"
    dropout, bias, limit = config.activation_dropout, config.ff_bias, config.gate_limit
    if config.experts is not None:
        return Experts(
            *(config.d_model, d_ff, config.activation, dropout, bias),
            n_experts=config.experts,
            k=config.experts_per_token,
            n_shared=config.shared_experts,
            renormalise=config.renormalise_experts,
            router_bias=config.router_bias,
            gate_limit=limit,
        )
    sizes = (config.d_model, d_ff, config.activation)
    return layers.FeedForward(*sizes, dropout, bias, fp32_output=is_t5, gate_limit=limit)


def attention(
    config: ModelConfig,
    n_heads: int,
    rope: layers.Rope | None = None,
    cross: bool = False,
    d_memory: int | None = None,
    layer: int = 0,
) -> MultiHeadAttention:
    """A layer's self-attention; cross-attention is the same without positions."""
    d_head = head_width(config, n_heads)
    n_kv_heads = n_heads if config.n_kv_heads is None else config.n_kv_heads
    relative: Bias | None = None
    if config.positions == "window" and config.shifted_windows is not None and not cross:
        relative = WindowBias(n_heads, config.image_size // config.patch_size, config.shifted_windows)
    if config.positions == "xl" and not cross:
        relative = XLRelative(n_heads, d_head, scale=config.attention_scale)
    return MultiHeadAttention(
        config.d_model,
        n_heads,
        n_kv_heads,
        d_head,
        cross=cross,
        d_memory=d_memory,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        dropout=config.attention_dropout,
        rope=None if cross else rope,
        qk_norm=(lambda width: norm(config, width)) if config.qk_norm else None,
        qk_norm_over=config.qk_norm_over,
        position_bias=relative,
        mechanism=mechanism(config, n_heads, d_head, cross, layer),
        sinks=config.attention_sinks and not cross,
        backend=config.attention_backend,
        n_global=config.global_tokens if config.global_projections and not cross else None,
    )


def mechanism(config: ModelConfig, n_heads: int, d_head: int, cross: bool, layer: int = 0) -> Mechanism:
    """How a query scores a key. Cross-attention falls back to the dot product if the mechanism does not support it."""
    if cross and not config.mixing.cross:
        return Dot(config.attention_scale)
    if config.global_projections and config.attention_scale is None:  # scored heads are twice as wide as d_head
        config = config.with_(attention_scale=d_head**-0.5)
    mixer = _build_mixer(config, n_heads, d_head, layer)
    if not isinstance(mixer, Mechanism):
        raise TypeError(f"mixer={config.mixer!r} is a {type(mixer).__name__}, not an attention.Mechanism")
    return mixer


def mixing(config: ModelConfig, n_heads: int, rope: layers.Rope | None, layer: int = 0) -> nn.Module:
    """The module that mixes a layer's tokens: attention, or its replacement."""
    if config.mixing.weights:
        return attention(config, n_heads, rope, layer=layer)
    mixer = _build_mixer(config, n_heads, head_width(config, n_heads), layer)
    if not isinstance(mixer, nn.Module):
        kind = type(mixer).__name__
        raise TypeError(f"mixer={config.mixer!r} is a {kind}, not a module that can replace attention")
    return mixer


def _build_mixer(config: ModelConfig, n_heads: int, d_head: int, layer: int) -> Any:
    family = config.mixing.family
    sizes = (n_heads, d_head, layer) if config.mixing.by_layer else (n_heads, d_head)
    for_model = getattr(family, "for_model", None)
    return family(*sizes) if for_model is None else for_model(config, *sizes)


def ropes(config: ModelConfig, n_heads: int, n_layers: int) -> list[layers.Rope | None]:
    """The rotary table of each layer of a stack. Tables have no parameters; equal layers share one."""
    if config.positions != "rope":
        return [None] * n_layers
    d_head = head_width(config, n_heads)
    shared = layers.Rope(d_head, config.rope_base, config.rope_scaling, config.rope_fraction, config.max_len)
    local = shared
    if config.window_rope_base is not None:
        local = layers.Rope(d_head, config.window_rope_base, None, config.rope_fraction, config.max_len)
    by_layer = [shared if window_of(config, layer) is None else local for layer in range(n_layers)]
    rotated = range(n_layers) if config.rope_layers is None else config.rope_layers
    return [rope if layer in rotated else None for layer, rope in enumerate(by_layer)]


def shared_bias(config: ModelConfig, n_heads: int, bidirectional: bool) -> Bias | None:
    """The position bias that all layers of a stack share."""
    if config.positions == "alibi":
        return Alibi(n_heads)
    if config.positions == "t5":
        return T5Bias(n_heads, config.t5_buckets, config.t5_max_distance, bidirectional)
    if config.sparsity == "end-blocks" and config.sparsity_repeats:
        return FirstBlockBias(config.sparsity_size, config.sparsity_repeats)
    return None


def window_of(config: ModelConfig, layer: int) -> int | None:
    """The window of this layer in keys; None: the layer attends to all keys."""
    return config.window if config.window_layers is None or layer in config.window_layers else None


def layer_mask(config: ModelConfig, layer: int, causal: bool, cross: bool) -> Mask | None:
    """The mask of a layer's own pattern: a window or a sparse pattern over text, windows over an image; or None.

    Image windows do not apply to an encoder-decoder's decoder (``cross``). A window that is not ``causal`` extends to
    both sides.
    """
    if config.shifted_windows is not None and not cross:
        side, grid = config.shifted_windows, config.image_size // config.patch_size
        shift = side // 2 if layer % 2 else 0
        if config.positions == "window":  # Swin rolls the image by side // 2; a single window is not shifted
            shift = side - side // 2 if layer % 2 and grid > side else 0
        return grid_windows(grid, side, shift, n_before=config.prefix_tokens)
    if config.sparsity == "strided":
        return strided(config.sparsity_size, both_ways=not causal)
    if config.sparsity == "bigbird":
        return bigbird(config.sparsity_size, config.sparsity_size, config.sparsity_random, seed=layer)
    if config.sparsity == "end-blocks":
        return end_blocks(config.sparsity_size, whole=(5 + 2 * config.sparsity_repeats) * config.sparsity_size)
    if (size := window_of(config, layer)) is None:
        return None
    near = window(size, ahead=0 if causal else size - 1)
    return near | global_tokens(config.global_tokens) if config.global_tokens else near


def token_table(config: ModelConfig, vocab_size: int) -> layers.TokenEmbedding:
    width = config.d_model if config.d_embed is None else config.d_embed
    return layers.TokenEmbedding(vocab_size, width, math.sqrt(width) if config.scale_embeddings else 1.0)


def embeddings(config: ModelConfig, max_len: int) -> layers.Embeddings:
    """Positions, segments, norm and dropout around token vectors. The token table, which may be tied, is separate."""
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
    """The encoder's input embeddings; for text, they take vectors from the model's token table."""
    if config.source == "text":
        return embeddings(config, config.max_len)
    vision_norm = norm(config) if config.embedding_norm else None
    if config.source == "regions":
        d_model, d_box, dropout = config.d_model, config.d_box, config.embedding_dropout
        return layers.RegionEmbedding(config.d_region, d_model=d_model, d_box=d_box, norm=vision_norm, dropout=dropout)
    sizes = (config.image_size, config.patch_size, config.n_channels, config.d_model)
    patches = layers.PatchEmbedding(*sizes, bias=config.patch_bias)
    position = _absolute_positions(config, patches.n_patches + config.class_tokens, config.d_model)
    return layers.VisionEmbeddings(
        patches,
        position=position,
        n_class_tokens=config.class_tokens,
        n_registers=config.register_tokens,
        mask_token=config.mask_token,
        norm=vision_norm,
        dropout=config.embedding_dropout,
    )


def vision_inputs(config: ModelConfig, source: Tensor) -> tuple[Tensor, ...]:
    """The inputs of ``source_embeddings`` for images or regions; boxes are the last d_box numbers of each region."""
    if config.source == "regions" and config.d_box:
        width = config.d_region + config.d_box
        if source.shape[-1] != width:
            raise ValueError(f"regions have width {source.shape[-1]}, but d_region + d_box = {width}")
        return source.split((config.d_region, config.d_box), dim=-1)
    size, side = tuple(source.shape[-2:]), config.image_size
    if config.shifted_windows is not None and size != (side, side):
        raise ValueError(f"shifted_windows={config.shifted_windows} needs images of image_size={side}, got {size}")
    return (source,)
