"""The base class of all models: the interface that training, generation, lens and export rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention, masks
from ..attention.cache import Cache, CrossCache, GrowingCache, ModelCache, RingCache, StaticCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.masks import Mask
from ..attention.state_space import StateSpaceCache, StateSpaceMixer
from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .block import Stack
from .components import ClassHead, TagHead, TokenHead
from .sites import HookSite, logits_site, stack_sites


class DecoderShape(NamedTuple):
    """Sizes of the stack that generates tokens, which determine its key-value cache."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int

    @classmethod
    def of(cls, config: ModelConfig) -> DecoderShape:
        n_layers, n_heads, _ = components.stack_sizes(config, cross=config.architecture == "encoder-decoder")
        if config.text_model is not None:
            config = config.text_model
            n_layers, n_heads = config.n_layers, config.n_heads
        return cls(n_layers, n_heads, config.n_kv_heads or n_heads, components.head_width(config, n_heads))


class AttentionSite(NamedTuple):
    """One attention module of a model; layers that share parameters share the module."""

    name: str  # "decoder.blocks.3.attention"
    kind: str  # "self", "cross" or "encoder"
    layer: int
    module: nn.Module


class Model(nn.Module):
    """Base class of all models.

    hidden(*inputs, **options)   the states before the head (B, T, M); takes the arguments of forward
    head, output_table           token logits are head(states, output_table); head is None in models without them
    classifier                   an encoder's class head, or None
    encode, decode               only in models with ``is_encoder_decoder``
    processor                    turns text or images into the model's inputs, or None
    """

    is_decoder_only = False  # a language model: continues one sequence
    is_encoder_only = False  # encodes a whole input and generates nothing
    is_encoder_decoder = False  # encodes a source and generates a target
    is_recurrent = False  # LSTM or GRU layers instead of Transformer blocks

    head: TokenHead | None
    token: TokenEmbedding | None
    encoder: Any  # a Stack or a recurrent network
    decoder: Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.processor: Any = None
        self.provenance: Any = None  # where the model was loaded from, and whether its manifest matched
        self.training_record: dict[str, Any] | None = None  # run, step, data, metrics, command and versions, if known

    def _initialise(self) -> None:
        """With ``init_std``, draw all matrices from a normal distribution; called at the end of each constructor.

        Unless post-norm, matrices that write to the residual stream are scaled by 1/√(2 · n_layers) (GPT-2).
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
        """Number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens one by one."""
        return self.head is not None and not self.is_encoder_only

    @property
    def decodes_by_token(self) -> bool:
        """Whether ``hidden`` or ``decode`` continues from a cache; otherwise generation reads the whole text each step.

        A class of one's own whose method takes ``cache`` overrides this.
        """
        return self.config.model_class is None and self.config.mixing.by_token

    @property
    def output_table(self) -> Tensor:
        """The token table (V, M) of the output vocabulary, which a tied head multiplies with."""
        assert self.token is not None
        return self.token.weight

    @property
    def decoder_shape(self) -> DecoderShape:
        return DecoderShape.of(self.config)

    @property
    def class_head(self) -> ClassHead | TagHead | None:
        head = getattr(self, "classifier", None)
        return None if self.config.head == "span" else head

    def hidden(self, *inputs: Any, **options: Any) -> Tensor:
        """The last layer's states (B, T, M), before the head."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Token logits (B, T, V), or the states of a model without a head; takes the arguments of ``hidden``."""
        x = self.hidden(*inputs, **options)
        return x if self.head is None else self.head(x, self.output_table)

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Any:
        """The memory that an encoder-decoder's decoder attends to."""
        raise NotImplementedError(f"architecture={self.config.architecture!r} is not an encoder-decoder")

    def decode(
        self,
        target: Tensor,
        memory: Any,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """An encoder-decoder's states (B, T, M) for target tokens, given the memory from ``encode``."""
        raise NotImplementedError(f"architecture={self.config.architecture!r} is not an encoder-decoder")

    def embed(self, source: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        """One vector per text (B, M), pooled from the states of the encoder, or of a decoder-only model."""
        if self.is_encoder_decoder:
            states = self.encode(source, padding_mask=padding_mask).states
        else:
            states = self.hidden(source, padding_mask=padding_mask)
        return components.embed_states(self.config, states, padding_mask)

    def stacks(self) -> list[Stack]:
        return [module for module in self.modules() if isinstance(module, Stack)]

    def sites(self) -> dict[str, HookSite]:
        """Every activation that can be captured, by name, in the order of the forward pass; all except derived sites
        can be replaced.

        See ``models.sites`` for the names and shapes. A recurrent model has no sites, only ``attention_sites``.
        """
        sites = [site for name in ("encoder", "decoder") for site in stack_sites(name, getattr(self, name, None))]
        head = self.class_head or self.head
        if sites and head is not None:
            last = next(site for site in reversed(sites) if not site.is_derived)
            sites.append(logits_site(head, last.name))
        return {site.name: site for site in sites}

    def attention_sites(self) -> list[AttentionSite]:
        """Every attention with weights: encoder before decoder, each stack's self-attention before cross-attention."""
        sites: list[AttentionSite] = []
        for name, own_kind, stack in self._named_stacks():
            blocks = [(layer, layer % len(stack.blocks)) for layer in range(stack.n_layers)]
            for part, kind in (("attention", own_kind), ("cross_attention", "cross")):
                for layer, index in blocks:
                    module = getattr(stack.blocks[index], part)
                    if isinstance(module, MultiHeadAttention | StateSpaceMixer):
                        sites.append(AttentionSite(f"{name}.blocks.{index}.{part}", kind, layer, module))
        return sites

    def _named_stacks(self) -> Iterator[tuple[str, str, Stack]]:
        """Each stack with its name and the kind of its self-attention; an image encoder may have several stages."""
        for name in ("encoder", "decoder"):
            stack = getattr(self, name, None)
            if isinstance(stack, Stack):
                yield name, "encoder" if name == "encoder" else "self", stack
            for number, stage in enumerate(getattr(stack, "stages", ())):
                yield f"{name}.stages.{number}", f"stage{number}", stage

    def use_checkpointing(self, on: bool = True) -> None:
        """Trade time for memory: keep only the layers' inputs and recompute each layer in the backward pass."""
        for stack in self.stacks():
            stack.checkpointing = on

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        """An empty cache for decoding: preallocated if ``batch`` and ``max_len`` are given, else growing.

        A preallocated cache may store its keys and values in bf16 or int8; those of cross-attention keep their dtype.
        """
        if (batch is None) != (max_len is None):
            raise ValueError(f"batch={batch} and max_len={max_len}: give both to preallocate, neither to grow")
        shape = self.decoder_shape
        if self.config.mixing.recurrent:
            return ModelCache([StateSpaceCache() for _ in range(shape.n_layers)])
        cross = [CrossCache() for _ in range(shape.n_layers)] if self.is_encoder_decoder else []
        if batch is None or max_len is None:
            if cache_dtype != "model":
                raise ValueError(f"cache_dtype={cache_dtype!r} needs a preallocated cache; give batch and max_len")
            return ModelCache([GrowingCache() for _ in range(shape.n_layers)], cross)
        dtype, heads = next(self.parameters()).dtype, shape.n_kv_heads
        layers: list[Cache] = []
        for layer in range(shape.n_layers):
            window = components.window_of(self.config.text_model or self.config, layer)
            if window is None or window >= max_len:
                layers.append(StaticCache(batch, heads, max_len, shape.d_head, dtype, self.device, cache_dtype))
            else:
                ring = RingCache(batch, heads, window, shape.d_head, dtype, self.device, cache_dtype=cache_dtype)
                layers.append(ring)
        return ModelCache(layers, cross)

    def save(self, path: str | Path) -> Path:
        """Write a directory that ``regard.load`` opens, and transformers too if it has the architecture."""
        from .. import io

        return io.save(self, path)


class SourceToTarget(Model):
    """Base class of encoder-decoders; subclasses define ``encode`` and ``decode``."""

    is_encoder_decoder = True
    target_token: TokenEmbedding | None

    @property
    def target_table(self) -> TokenEmbedding:
        """The token embedding of the target, which is the source's if they share a vocabulary."""
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


def join_padding(padding_mask: Tensor) -> Tensor:
    """The padding mask of an encoder's states: (B, S) unchanged; of passages (B, P, S) → (B, P · S), padding last."""
    if padding_mask.dim() < 3:
        return padding_mask
    return padding_mask.flatten(1).int().sort(1, descending=True).values.bool()


def mask_from_padding(padding_mask: Tensor | None) -> Mask | None:
    """A padding mask (B, T), True at real tokens, as an attention mask."""
    return None if padding_mask is None else masks.valid_keys(padding_mask.bool())
