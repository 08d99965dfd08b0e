"""The three Transformers: encoder-only, decoder-only, encoder-decoder. Stacks between embeddings and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import masks
from ..attention.cache import ModelCache
from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .base_model import Model, SourceToTarget, mask_from_padding
from .block import Memory, Stack
from .components import ClassHead, Pooler, TagHead, TokenHead, source_embeddings, vision_inputs


class Decoder(Model):
    """A language model (GPT-2, LLaMA): next-token logits from the tokens before.   tokens (B, T) → (B, T, V)"""

    is_decoder_only = True
    token: TokenEmbedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token = components.token_table(config, config.vocab_size)
        self.embeddings = components.embeddings(config, config.max_len)
        self.decoder: Stack = Stack(config, causal=config.causal)
        self.head = _token_head(config, config.vocab_size)
        self._initialise()

    def hidden(
        self,
        tokens: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The last layer's states (B, T, M), before the head.

        ``padding_mask`` (B, T) marks real tokens; ``positions`` (B, T) are 0, 1, 2 … unless given; ``documents``
        (B, T) numbers texts packed into one row, none of which sees another. Padding is not written to a ``cache``.
        """
        real = None if padding_mask is None else padding_mask.bool()
        padding_mask, positions = _positions_in_cache(padding_mask, positions, cache)
        if real is None and positions is not None:  # -1 marks padding
            real = (positions >= 0).expand(tokens.shape)
        mask = mask_from_padding(padding_mask)
        if documents is not None:
            packed = masks.packed(documents)
            mask = packed if mask is None else packed & mask
        x = self.embeddings(self.token(tokens), embedding_positions(self.config, tokens, positions, cache))
        seen: dict[str, Any] = {"real": real, "documents": documents} if self.config.mixing.recurrent else {}
        return self.decoder(x, mask=mask, positions=positions, cache=cache, **seen)


class Encoder(Model):
    """States of a whole input at once (BERT, ViT), and masked-token or class logits on top."""

    is_encoder_only = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token = components.token_table(config, config.vocab_size) if config.source == "text" else None
        self.embeddings = source_embeddings(config)
        self.encoder: Stack = Stack(config, causal=False)
        self.head = _token_head(config, config.vocab_size) if config.head == "masked-lm" else None
        heads: dict[str, type[ClassHead | TagHead]] = {"classify": ClassHead, "tag": TagHead}
        self.classifier = heads[config.head](config) if config.head in heads else None
        self.pooler = Pooler(config) if config.head == "none" and config.pooler != "none" else None
        self._initialise()

    def hidden(
        self,
        source: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The last layer's states (B, T, M) of tokens (B, T), pixels (B, C, height, width) or regions (B, R, width)."""
        x = _embed(self, source, positions, segments)
        return self.encoder(x, mask=mask_from_padding(padding_mask), positions=positions)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Class logits (B, classes) or (B, T, classes), token logits (B, T, V), or the states.

        The arguments are those of ``hidden``.
        """
        if self.classifier is None:
            return super().forward(*inputs, **options)
        return self.classifier(self.hidden(*inputs, **options), mask_from_padding(options.get("padding_mask")))

    def pooled(self, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """One vector for the input (B, M), as ``config.pooling`` says (BERT: the first token's state)."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: config.pooler is 'none', or a classifier holds it")
        return self.pooler(states, mask_from_padding(padding_mask))


class EncoderDecoder(SourceToTarget):
    """Sequence to sequence (the paper's Transformer, T5, BART, Marian; with images, a captioner)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token = components.token_table(config, config.vocab_size) if config.source == "text" else None
        shared = config.source == "text" and config.target_vocab_size is None
        self.target_token = None if shared else components.token_table(config, config.output_vocab_size)
        self.embeddings = source_embeddings(config)
        self.target_embeddings = components.embeddings(config, config.max_target_len or config.max_len)
        self.encoder: Stack = Stack(config, causal=False)
        self.decoder: Stack = Stack(config, causal=config.causal, cross=True)
        self.head = _token_head(config, config.output_vocab_size)
        self._initialise()

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Memory:
        mask = mask_from_padding(padding_mask)
        x = _embed(self, source, positions)
        return Memory(self.encoder(x, mask=mask, positions=positions), mask)

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        padding_mask, positions = _positions_in_cache(padding_mask, positions, cache)
        x = self.target_embeddings(
            self.target_table(target), embedding_positions(self.config, target, positions, cache)
        )
        return self.decoder(x, mask=mask_from_padding(padding_mask), positions=positions, memory=memory, cache=cache)


def _token_head(config: ModelConfig, vocab_size: int) -> TokenHead | None:
    return TokenHead(config, vocab_size, config.tie_head) if config.head in ("lm", "masked-lm") else None


def _embed(
    model: Encoder | EncoderDecoder, source: Tensor, positions: Tensor | None, segments: Tensor | None = None
) -> Tensor:
    if model.token is None:
        return model.embeddings(*vision_inputs(model.config, source))
    return model.embeddings(model.token(source), embedding_positions(model.config, source, positions), segments)


def _positions_in_cache(
    padding_mask: Tensor | None, positions: Tensor | None, cache: ModelCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Mark padding by position -1 instead of a mask: a cache neither writes nor shows such tokens."""
    if padding_mask is None or cache is None:
        return padding_mask, positions
    padding_mask = padding_mask.bool()
    if positions is None:
        positions = cache.lengths.to(padding_mask.device)[:, None] + padding_mask.long().cumsum(-1) - 1
    return None, torch.where(padding_mask, positions, -1)


def embedding_positions(
    config: ModelConfig, tokens: Tensor, positions: Tensor | None = None, cache: ModelCache | None = None
) -> Tensor | None:
    """The positions (B, T) that embeddings add; None for 0, 1, 2 …"""
    if positions is not None:
        return positions
    if cache is not None:
        return cache.next_positions(tokens.shape[1], tokens.device)
    if config.positions_skip_padding:  # RoBERTa goes by the pad token, not by a mask
        real = tokens != config.pad_id
        return torch.where(real, real.long().cumsum(-1) - 1, -1)
    return None
