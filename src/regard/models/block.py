"""One Transformer layer: attention (to itself, and to a memory), then a feed-forward network, each in a residual.

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
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import Frame, masks
from ..attention.biases import Bias
from ..attention.cache import Cache, ModelCache
from ..attention.edits import apply_edits_to_states, has_edits
from ..attention.masks import Mask
from ..attention.taps import tap
from ..config import ModelConfig
from ..layers import Rope
from . import components
from .experts import Experts


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's output (B, S, M), and the mask that hides its padding; None where there is none."""

    states: Tensor
    mask: Mask | None = None


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What all layers of a stack share in one forward pass."""

    mask: Mask | None = None
    positions: Tensor | None = None
    position_bias: Bias | None = None
    memory: Memory | None = None
    real: Tensor | None = None  # (B, T), False for padding; mixers that are no attention have no mask
    documents: Tensor | None = None  # (B, T), texts packed into one row


RowMap = Callable[[Tensor], Tensor]


class SublayerNorms(NamedTuple):
    """The norms around one sub-layer: of its input, of its output, of the residual sum; None where there is none."""

    before: RowMap | None = None
    output: RowMap | None = None
    total: RowMap | None = None


class Residuals(NamedTuple):
    """How the sub-layers of a layer are added up. ``cross`` has norms where there is cross-attention."""

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
        """The layer's output, from functions that compute its sub-layers.

        ``at`` is shown every activation by name and returns what takes its place.
        """
        if self.parallel and feed_forward is not None:
            shared = None if self.ff.before is not None else _apply(self.attention.before, x)
            y = attend(at("attention.input", _apply(self.attention.before, x) if shared is None else shared))
            z = feed_forward(at("ff.input", _apply(self.ff.before, x) if shared is None else shared))
            y, z = at("attention.output", _apply(self.dropout, y)), at("ff.output", _apply(self.dropout, z))
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


class Block(nn.Module):
    """A layer of a stack. ``mask`` narrows its self-attention (a window); ``cross`` adds attention to a memory."""

    def __init__(
        self, config: ModelConfig, n_heads: int, d_ff: int, *, cross: bool, mask: Mask | None, rope: Rope | None
    ) -> None:
        super().__init__()
        self.norm_place, self.residual, self.mask = config.norm_place, config.residual, mask
        self.parallel = config.parallel_residual != "none"
        self.attention = components.mixing(config, n_heads, rope)
        self.attends, self.recurrent = config.mixing.weights, config.mixing.recurrent
        self.attention_norm = components.norm(config)
        self.cross_attention = components.attention(config, n_heads, cross=True) if cross else None
        self.cross_norm = components.norm(config) if cross else None
        self.ff = components.feed_forward(config, d_ff) if d_ff else None
        has_ff_norm = self.ff is not None and config.parallel_residual != "one-norm"
        self.ff_norm = components.norm(config) if has_ff_norm else None
        has_both = config.norm_place == "both"
        self.attention_output_norm = components.norm(config) if has_both else None
        self.cross_output_norm = components.norm(config) if has_both and cross else None
        self.ff_output_norm = components.norm(config) if has_both and self.ff is not None else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, context: LayerContext, cache: Cache | None = None, cross_cache: Cache | None = None
    ) -> Tensor:
        """x (B, T, M) → (B, T, M)."""
        attend_memory = None
        if self.cross_attention is not None:
            attend_memory = lambda y: self._attend_memory(y, context.memory, cross_cache)  # noqa: E731
        at = partial(apply_edits_to_states, self)
        attend = lambda y: self._attend(y, context, cache)  # noqa: E731
        feed_forward = None if self.ff is None else self._feed_forward
        x = self.residuals().run(at("input", x), attend, attend_memory, feed_forward, at)
        return tap("output", at("output", x), self)

    def residuals(self) -> Residuals:
        """How the sub-layers are added up."""
        attention = self._norms_at_place(self.attention_norm, self.attention_output_norm)
        cross = self._norms_at_place(self.cross_norm, self.cross_output_norm)
        ff = self._norms_at_place(self.ff_norm, self.ff_output_norm)
        return Residuals(attention, cross, ff, self.residual, self.parallel, self.dropout)

    def _norms_at_place(self, norm: nn.Module | None, output_norm: nn.Module | None) -> SublayerNorms:
        if self.norm_place == "post":
            return SublayerNorms(total=norm)
        return SublayerNorms(output=norm) if self.norm_place == "output" else SublayerNorms(norm, output_norm)

    def _attend(self, x: Tensor, context: LayerContext, cache: Cache | None) -> Tensor:
        if self.recurrent:
            return self.attention(x, cache=cache, real=context.real, documents=context.documents)
        if not self.attends:  # mixing without weights: padding is left out by zeros
            if context.mask is not None:
                n_batch, length, _ = x.shape
                frame = Frame.aligned(n_batch, 1, length, length, x.device)
                x = x.masked_fill(~context.mask.tile(slice(0, 1), slice(None), frame)[:, 0, 0, :, None], 0)
            return self.attention(x)
        mask = context.mask if self.mask is None else self.mask if context.mask is None else context.mask & self.mask
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
    """n layers and, unless post-norm, one last norm. ``causal`` hides the future, ``cross`` looks at a memory."""

    def __init__(self, config: ModelConfig, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        n_layers, n_heads, d_ff = components.stack_sizes(config, cross)
        self.n_layers, self.causal, self.mixer = n_layers, causal, config.mixer
        self.takes_cache = config.mixing.by_token
        self.checkpointing = False  # recompute each layer in the backward pass; set from outside
        ropes = components.ropes(config, n_heads, n_layers)
        layer_masks = [components.layer_mask(config, layer, causal, cross) for layer in range(n_layers)]
        self.blocks = nn.ModuleList(
            Block(config, n_heads, d_ff, cross=cross, mask=mask, rope=rope)
            for mask, rope in list(zip(layer_masks, ropes, strict=True))[: 1 if config.share_layers else n_layers]
        )
        self.position_bias: Bias | None = components.shared_bias(config, n_heads, bidirectional=not causal)
        self.norm = components.norm(config) if config.norm_place != "post" else None

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
    ) -> Tensor:
        """x (B, T, M) → (B, T, M). ``mask`` says what is padding; the stack itself knows whether it is causal.

        ``real`` and ``documents`` (B, T) say the same as the mask to mixers that have none.
        """
        if cache is not None and not self.takes_cache:
            raise ValueError(
                f"mixer={self.mixer!r} mixes all tokens at once, so a cache cannot stand for the earlier ones; "
                "give it the whole text without a cache"
            )
        if self.causal:
            mask = masks.causal() if mask is None else masks.causal() & mask
        context = LayerContext(mask, positions, self.position_bias, memory, real, documents)
        x = apply_edits_to_states(self, "input", x)
        for layer in range(self.n_layers):
            block = self.blocks[layer % len(self.blocks)]
            own = None if cache is None else cache.layers[layer]
            cross = cache.cross[layer] if cache is not None and cache.cross else None
            if self.checkpointing and self.training:
                x = checkpoint(block, x, context, own, cross, use_reentrant=False)
            else:
                x = block(x, context, own, cross)
        return x if self.norm is None else self.norm(x)
