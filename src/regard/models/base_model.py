"""The base of all models: the interface that training, generation, lens and export use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention, masks
from ..attention.cache import CrossCache, GrowingCache, ModelCache, RingCache, StaticCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.masks import Mask
from ..attention.state_space import Mamba2, StateSpaceCache
from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .block import Stack
from .components import ClassHead, TagHead, TokenHead
from .sites import HookSite, stack_sites


class DecoderShape(NamedTuple):
    """Sizes of the stack that writes tokens: the shape of its key-value cache."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int

    @classmethod
    def of(cls, config: ModelConfig) -> DecoderShape:
        n_layers, n_heads, _ = components.stack_sizes(config, cross=config.architecture == "encoder-decoder")
        return cls(n_layers, n_heads, config.n_kv_heads or n_heads, components.head_width(config, n_heads))


class AttentionSite(NamedTuple):
    """One attention of a model; layers that share parameters share the module."""

    name: str  # "decoder.blocks.3.attention"
    kind: str  # "self", "cross" or "encoder"
    layer: int
    module: nn.Module


class Model(nn.Module):
    """Base of all models.

    hidden(*inputs, **options)   the states before the head (B, T, M); the inputs are those of forward
    head, output_table           token logits are head(states, output_table); head is None where there are none
    classifier                   class logits of an encoder, or None
    encode, decode               of models with ``is_encoder_decoder``
    processor                    turns text or images into the model's inputs, where there is one
    """

    is_decoder_only = False  # a language model: reads and continues one sequence
    is_encoder_only = False  # reads a whole input, writes nothing
    is_encoder_decoder = False  # reads a source, writes a target
    is_recurrent = False  # LSTM or GRU layers instead of Transformer blocks

    head: TokenHead | None
    token: TokenEmbedding | None
    encoder: Any  # a Stack or a recurrent network, in models that have one
    decoder: Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.processor: Any = None
        self.provenance: Any = None  # where it was loaded from, and whether its manifest matched
        self.training_record: dict[str, Any] | None = None  # run, step, data, metrics, command and versions, if known

    def _initialise(self) -> None:
        """Called at the end of each constructor: with ``init_std``, normal weights of that spread.

        What adds to the residual of deep pre-norm stacks starts smaller (GPT-2).
        """
        config, std = self.config, self.config.init_std
        if std is None:
            return
        for name, p in self.named_parameters():
            if p.dim() >= 2 and not name.endswith((".bias", ".conv_weight")):
                adds_to_residual = config.norm_place != "post" and name.endswith(("w_o.weight", "w_out.weight"))
                nn.init.normal_(p, std=std / (2 * config.n_layers) ** 0.5 if adds_to_residual else std)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def n_parameters(self) -> int:
        """Number of trained values; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def generates(self) -> bool:
        """Whether it writes tokens one by one."""
        return self.head is not None and not self.is_encoder_only

    @property
    def output_table(self) -> Tensor:
        """The token table (V, M) of what is written, which a tied head multiplies with."""
        assert self.token is not None
        return self.token.weight

    @property
    def decoder_shape(self) -> DecoderShape:
        return DecoderShape.of(self.config)

    @property
    def class_head(self) -> ClassHead | TagHead | None:
        return getattr(self, "classifier", None)

    def hidden(self, *inputs: Any, **options: Any) -> Tensor:
        """The last layer's states (B, T, M), before the head."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Next-token logits (B, T, V), or the states where there is no head; the arguments are those of ``hidden``."""
        x = self.hidden(*inputs, **options)
        return x if self.head is None else self.head(x, self.output_table)

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Any:
        """What an encoder-decoder's decoder attends to."""
        raise NotImplementedError(f"architecture={self.config.architecture!r} has no encoder beside a decoder")

    def decode(
        self,
        target: Tensor,
        memory: Any,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """An encoder-decoder's states (B, T, M) for target tokens, given what ``encode`` returned."""
        raise NotImplementedError(f"architecture={self.config.architecture!r} has no encoder beside a decoder")

    def stacks(self) -> list[Stack]:
        return [module for module in self.modules() if isinstance(module, Stack)]

    def sites(self) -> dict[str, HookSite]:
        """Every activation that can be captured and replaced, by name, in the order of the forward pass.

        See ``models.sites`` for the names and shapes. A recurrent model has none but its attention.
        """
        stacks = ((name, getattr(self, name, None)) for name in ("encoder", "decoder"))
        found = (site for name, stack in stacks if isinstance(stack, Stack) for site in stack_sites(name, stack))
        return {site.name: site for site in found}

    def attention_sites(self) -> list[AttentionSite]:
        """Every attention with weights, encoder first, each stack's own before its cross-attention."""
        sites: list[AttentionSite] = []
        for name in ("encoder", "decoder"):
            stack = getattr(self, name, None)
            if not isinstance(stack, Stack):
                continue
            blocks = [(layer, layer % len(stack.blocks)) for layer in range(stack.n_layers)]
            for part, kind in (("attention", "encoder" if name == "encoder" else "self"), ("cross_attention", "cross")):
                for layer, index in blocks:
                    module = getattr(stack.blocks[index], part)
                    if isinstance(module, MultiHeadAttention | Mamba2):
                        sites.append(AttentionSite(f"{name}.blocks.{index}.{part}", kind, layer, module))
        return sites

    def use_checkpointing(self, on: bool = True) -> None:
        """Trade time for memory: keep only the layers' inputs and compute each layer again in the backward pass."""
        for stack in self.stacks():
            stack.checkpointing = on

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        """An empty cache for decoding: growing, or preallocated where batch and max_len are given.

        A preallocated one may round its keys and values to bf16 or int8; an encoder's are never rounded.
        """
        if (batch is None) != (max_len is None):
            raise ValueError(f"batch={batch} and max_len={max_len}: give both to preallocate, neither to grow")
        shape = self.decoder_shape
        if self.config.mixing.recurrent:
            return ModelCache([StateSpaceCache() for _ in range(shape.n_layers)])
        cross = [CrossCache() for _ in range(shape.n_layers)] if self.is_encoder_decoder else []
        if batch is None or max_len is None:
            if cache_dtype != "model":
                raise ValueError(f"cache_dtype={cache_dtype!r} is for a preallocated cache; give batch and max_len")
            return ModelCache([GrowingCache() for _ in range(shape.n_layers)], cross)
        dtype = next(self.parameters()).dtype
        layers = [
            StaticCache(batch, shape.n_kv_heads, max_len, shape.d_head, dtype, self.device, cache_dtype)
            if size is None or size >= max_len
            else RingCache(batch, shape.n_kv_heads, size, shape.d_head, dtype, self.device, cache_dtype=cache_dtype)
            for size in (components.window_of(self.config, layer) for layer in range(shape.n_layers))
        ]
        return ModelCache(layers, cross)

    def save(self, path: str | Path) -> Path:
        """Write a directory that ``regard.load`` and, where the architecture exists there, transformers opens."""
        from .. import io

        return io.save(self, path)


class SourceToTarget(Model):
    """Base of the encoder-decoders: a subclass defines ``encode`` and ``decode``."""

    is_encoder_decoder = True
    target_token: TokenEmbedding | None

    @property
    def target_table(self) -> TokenEmbedding:
        """The target's token embedding; the source's where the two share a vocabulary."""
        table = self.token if self.target_token is None else self.target_token
        assert table is not None
        return table

    @property
    def output_table(self) -> Tensor:
        return self.target_table.weight

    def hidden(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
        source_positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The decoder's states (B, T, M), before the head."""
        memory = self.encode(source, padding_mask=source_padding_mask, positions=source_positions)
        return self.decode(target, memory, padding_mask=target_padding_mask, positions=target_positions, cache=cache)


def mask_from_padding(padding_mask: Tensor | None) -> Mask | None:
    """Which tokens are real, (B, T) booleans, as a mask."""
    return None if padding_mask is None else masks.valid_keys(padding_mask.bool())
