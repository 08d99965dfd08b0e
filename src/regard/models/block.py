"""One Transformer layer: self-attention, optional cross-attention, then a feed-forward network, each with a residual.

post-norm  x ← Norm(x + Drop(F(x)))              as in the paper (Vaswani et al. 2017, §3.1)
pre-norm   x ← x + Drop(F(Norm(x)))              as in GPT-2 and nearly all since (Xiong et al. 2020)
output     x ← x + Drop(Norm(F(x)))              OLMo 2 (2025)
both       x ← x + Drop(Norm'(F(Norm(x))))       Gemma 2 (2024)
parallel   x ← x + Drop(A(Norm(x))) + Drop(F(Norm'(x)))     GPT-NeoX (Black et al. 2022); Phi has one norm for both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import Frame, masks
from ..attention.biases import Bias
from ..attention.cache import Cache, ModelCache
from ..attention.edits import apply_edits_to_states, has_edits
from ..attention.masks import Mask
from ..attention.taps import tap
from ..config import ModelConfig
from ..layers import Rope, TanhGate
from . import components
from .experts import Experts


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's output (B, S, M) and the mask that hides its padding (None: no padding)."""

    states: Tensor
    mask: Mask | None = None


@dataclass(frozen=True, eq=False)
class LayerContext:
    """Inputs shared by all layers of a stack in one forward pass."""

    mask: Mask | None = None
    positions: Tensor | None = None
    position_bias: Bias | None = None
    memory: Memory | None = None
    real: Tensor | None = None  # (B, T), False at padding; for mixers without a mask
    documents: Tensor | None = None  # (B, T), document number of each token in a packed row


RowMap = Callable[[Tensor], Tensor]  # applied to states (B, T, M) or rows (R, M)


class SublayerNorms(NamedTuple):
    """The norms around one sub-layer; None for each that is absent."""

    before: RowMap | None = None  # on the sub-layer's input
    output: RowMap | None = None  # on its output, before the residual sum; or a layer scale or gate
    total: RowMap | None = None  # on the residual sum


class Residuals(NamedTuple):
    """How a layer combines its sub-layers. ``cross`` is used only with cross-attention."""

    attention: SublayerNorms
    cross: SublayerNorms
    ff: SublayerNorms
    residual: bool
    parallel: bool
    dropout: RowMap | None = None

    def run(
        self,
        x: Tensor,
        attend: RowMap,
        attend_memory: RowMap | None,
        feed_forward: RowMap | None,
        at: Callable[[str, Tensor], Tensor] = lambda point, x: x,
    ) -> Tensor:
        """The layer's output, given functions that compute its sub-layers.

        ``at(name, activation)`` is called with every activation and returns the tensor to use in its place.
        """
        if self.parallel and feed_forward is not None:
            normed = _apply(self.attention.before, x)
            y = attend(at("attention.input", normed))
            z = feed_forward(at("ff.input", normed if self.ff.before is None else self.ff.before(x)))
            y = at("attention.output", _apply(self.dropout, y))
            z = at("ff.output", _apply(self.dropout, z))
            return x + y + z
        x = at("after_attention", self._add(x, "attention", self.attention, attend, at))
        if attend_memory is not None:
            x = at("after_cross_attention", self._add(x, "cross_attention", self.cross, attend_memory, at))
        return x if feed_forward is None else self._add(x, "ff", self.ff, feed_forward, at)

    def _add(
        self, x: Tensor, name: str, norms: SublayerNorms, run: RowMap, at: Callable[[str, Tensor], Tensor]
    ) -> Tensor:
        y = _apply(norms.output, run(at(f"{name}.input", _apply(norms.before, x))))
        y = at(f"{name}.output", _apply(self.dropout, y))
        return _apply(norms.total, x + y if self.residual else y)


def _apply(run: RowMap | None, x: Tensor) -> Tensor:
    return x if run is None else run(x)


class DropPath(nn.Module):
    """Stochastic depth: zeroes a sub-layer's output for a share ``p`` of the examples in training, and scales the rest
    by 1 / (1 - p) (Huang et al. 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self.p
        return x * (kept / (1 - self.p)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Block(nn.Module):
    """One layer of a stack.

    ``mask`` restricts its self-attention (a window); ``cross`` adds cross-attention. With ``d_memory``, the width of
    a memory from another model, cross-attention passes a gate that is initially closed.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_heads: int,
        d_ff: int,
        *,
        cross: bool,
        mask: Mask | None,
        rope: Rope | None,
        layer: int = 0,
        drop_path: float = 0.0,
        d_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.norm_place, self.residual, self.mask = config.norm_place, config.residual, mask
        self.parallel = config.parallel_residual != "none"
        self.attention = components.mixing(config, n_heads, rope, layer)
        self.attends, self.recurrent = config.mixing.weights, config.mixing.recurrent
        self.attention_norm = components.norm(config) if config.first_norm or layer else None
        self.cross_attention = None
        if cross:
            self.cross_attention = components.attention(config, n_heads, cross=True, d_memory=d_memory, layer=layer)
        self.cross_norm = components.norm(config) if cross else None
        self.ff = components.feed_forward(config, d_ff) if d_ff else None
        has_ff_norm = self.ff is not None and config.parallel_residual != "one-norm"
        self.ff_norm = components.norm(config) if has_ff_norm else None
        has_both = config.norm_place == "both"
        self.attention_output_norm = components.norm(config) if has_both else None
        self.cross_output_norm = components.norm(config) if has_both and cross else None
        self.ff_output_norm = components.norm(config) if has_both and self.ff is not None else None
        self.attention_scale = components.layer_scale(config)
        self.cross_scale = components.layer_scale(config) if cross and d_memory is None else None
        self.cross_gate = TanhGate() if d_memory is not None else None
        self.ff_scale = components.layer_scale(config) if self.ff is not None else None
        self.dropout: nn.Module = nn.Dropout(config.dropout)
        if drop_path:
            self.dropout = nn.Sequential(self.dropout, DropPath(drop_path))

    def forward(
        self, x: Tensor, context: LayerContext, cache: Cache | None = None, cross_cache: Cache | None = None
    ) -> Tensor:
        """x (B, T, M) → (B, T, M)."""
        at = partial(apply_edits_to_states, self)
        attend = partial(self._attend, context=context, cache=cache)
        attend_memory = None
        if self.cross_attention is not None:
            attend_memory = partial(self._attend_memory, memory=context.memory, cache=cross_cache)
        feed_forward = None if self.ff is None else self._feed_forward
        x = self.residuals().run(at("input", x), attend, attend_memory, feed_forward, at)
        return tap("output", at("output", x), self)

    def residuals(self) -> Residuals:
        """How this layer combines its sub-layers."""
        attention = self._sublayer_norms(self.attention_norm, self.attention_output_norm or self.attention_scale)
        cross = self._sublayer_norms(self.cross_norm, self.cross_output_norm or self.cross_scale or self.cross_gate)
        ff = self._sublayer_norms(self.ff_norm, self.ff_output_norm or self.ff_scale)
        return Residuals(attention, cross, ff, self.residual, self.parallel, self.dropout)

    def _sublayer_norms(self, norm: nn.Module | None, output_norm: nn.Module | None) -> SublayerNorms:
        if self.norm_place == "post":
            return SublayerNorms(total=norm)
        if self.norm_place == "output":
            return SublayerNorms(output=norm)
        return SublayerNorms(before=norm, output=output_norm)

    def _attend(self, x: Tensor, context: LayerContext, cache: Cache | None) -> Tensor:
        if self.recurrent:
            return self.attention(x, cache=cache, real=context.real, documents=context.documents)
        if not self.attends:  # a mixer without a mask: zero the padding instead
            if context.mask is not None:
                n_batch, length, _ = x.shape
                frame = Frame.aligned(n_batch, 1, length, length, x.device)
                x = x.masked_fill(~context.mask.tile(slice(0, 1), slice(None), frame)[:, 0, 0, :, None], 0)
            return self.attention(x)
        mask = context.mask
        if self.mask is not None:
            layer_mask = self.mask.for_length(x.shape[1])
            mask = layer_mask if mask is None else mask & layer_mask
        positions, bias = context.positions, context.position_bias
        return self.attention(x, mask=mask, positions=positions, cache=cache, position_bias=bias)

    def _feed_forward(self, x: Tensor) -> Tensor:
        assert self.ff is not None
        if not has_edits(self) or isinstance(self.ff, Experts):
            return self.ff(x)
        return self.ff.project(apply_edits_to_states(self, "ff.neurons", self.ff.neurons(x)))

    def _attend_memory(self, x: Tensor, memory: Memory | None, cache: Cache | None) -> Tensor:
        assert self.cross_attention is not None
        states, mask = (None, None) if memory is None else (memory.states, memory.mask)
        return self.cross_attention(x, states, mask=mask, cache=cache)


class Stack(nn.Module):
    """n layers and, unless post-norm, a final norm. ``causal`` hides the future; ``cross`` adds cross-attention.

    A stage of a longer stack starts after ``n_before`` of ``n_total`` layers and has no final norm. ``d_memory``: see
    ``Block``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        causal: bool,
        cross: bool = False,
        n_before: int = 0,
        n_total: int | None = None,
        d_memory: int | None = None,
    ) -> None:
        super().__init__()
        n_layers, n_heads, d_ff = components.stack_sizes(config, cross)
        self.n_layers, self.causal, self.mixer = n_layers, causal, config.mixer
        self.takes_cache, self.attends = config.mixing.by_token, config.mixing.weights
        self.checkpointing = False  # recompute each layer in the backward pass; set by Model.use_checkpointing
        ropes = components.ropes(config, n_heads, n_layers)
        depth = max(1, (n_layers if n_total is None else n_total) - 1)
        self.blocks = nn.ModuleList(
            Block(
                config,
                n_heads,
                d_ff,
                cross=cross,
                mask=components.layer_mask(config, layer, causal, cross),
                rope=ropes[layer],
                layer=n_before + layer,
                drop_path=config.drop_path * (n_before + layer) / depth,
                d_memory=d_memory,
            )
            for layer in range(1 if config.share_layers else n_layers)
        )
        self.position_bias: Bias | None = components.shared_bias(config, n_heads, bidirectional=not causal)
        self.norm = components.norm(config) if config.norm_place != "post" and n_total is None else None

    @property
    def layers(self) -> list[Block]:
        """The block of each layer; layers that share their weights have the same block."""
        return [cast(Block, self.blocks[layer % len(self.blocks)]) for layer in range(self.n_layers)]

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        memory: Memory | None = None,
        cache: ModelCache | None = None,
        real: Tensor | None = None,
        documents: Tensor | None = None,
        first: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """x (B, T, M) → (B, T, M). ``mask`` hides padding and other documents; the stack adds the causal mask itself.

        ``real`` and ``documents`` (B, T) carry the same information for mixers without a mask. Runs the layers from
        ``first`` to before ``stop``, with x the input of layer ``first``; with ``stop`` there is no final norm.
        """
        if cache is not None and not self.takes_cache:
            raise ValueError(
                f"mixer={self.mixer!r} mixes all tokens at once, so a cache cannot replace the earlier ones; "
                "pass the whole text without a cache"
            )
        if self.causal and self.attends:  # other mixers are causal by themselves
            mask = masks.causal() if mask is None else masks.causal() & mask
        context = LayerContext(mask, positions, self.position_bias, memory, real, documents)
        x = apply_edits_to_states(self, "input", x)
        for layer, block in enumerate(self.layers[first:stop], first):
            layer_cache = None if cache is None else cache.layers[layer]
            cross_cache = cache.cross[layer] if cache is not None and cache.cross else None
            if self.checkpointing and self.training:
                x = checkpoint(block, x, context, layer_cache, cross_cache, use_reentrant=False)
            else:
                x = block(x, context, layer_cache, cross_cache)
        return x if self.norm is None or stop is not None else self.norm(x)
