"""The three Transformers (encoder-only, decoder-only, encoder-decoder): stacks between embeddings and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import masks
from ..attention.cache import ModelCache
from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .base_model import Model, SourceToTarget, join_padding, mask_from_padding
from .block import Memory, Stack
from .components import ClassHead, Pooler, ReplacedHead, SpanHead, TagHead, TokenHead, source_embeddings, vision_inputs
from .hierarchy import HierarchicalStack, stage_configs


class Decoder(Model):
    """A language model (GPT-2, LLaMA).   tokens (B, T) → next-token logits (B, T, V)"""

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

        ``padding_mask`` (B, T) is True at real tokens; ``positions`` (B, T) default to 0, 1, 2 …; ``documents`` (B, T)
        numbers the texts packed into one row, which do not attend to each other. Padding is not written to ``cache``.
        """
        real = None if padding_mask is None else padding_mask.bool()
        padding_mask, positions = _positions_in_cache(padding_mask, positions, cache)
        if real is None and positions is not None:  # -1 marks padding
            real = (positions >= 0).expand(tokens.shape)
        mask = mask_from_padding(padding_mask)
        if documents is not None:
            if not (self.config.mixing.weights or self.config.mixing.recurrent):
                raise ValueError(
                    f"mixer={self.config.mixer!r} has no mask that keeps packed texts apart; use data.packing=blocks"
                )
            packed = masks.packed(documents)
            mask = packed if mask is None else packed & mask
        x = self.embeddings(self.token(tokens), embedding_positions(self.config, tokens, positions, cache))
        return self.decoder(x, mask=mask, positions=positions, cache=cache, real=real, documents=documents)


class Encoder(Model):
    """Encodes a whole input at once (BERT, ViT), with a head for masked tokens, classes, tags or spans."""

    is_encoder_only = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token = components.token_table(config, config.vocab_size) if config.source == "text" else None
        self.embeddings = source_embeddings(stage_configs(config)[0])
        self.encoder: Stack | HierarchicalStack
        self.encoder = Stack(config, causal=False) if config.stages is None else HierarchicalStack(config)
        self.head = _token_head(config, config.vocab_size) if config.head == "masked-lm" else None
        heads: dict[str, type[nn.Module]] = {"classify": ClassHead, "tag": TagHead, "span": SpanHead}
        self.classifier = heads[config.head](config) if config.head in heads else None
        has_pooler = config.head in ("none", "masked-lm") and config.pooler != "none"
        self.pooler = Pooler(config) if has_pooler else None
        self.detector = ReplacedHead(config) if config.head == "replaced" else None
        self.generator = None if config.generator_width is None else self._new_generator(config.generator_width)
        self._initialise()

    def hidden(
        self,
        source: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        masked: Tensor | None = None,
    ) -> Tensor:
        """The last layer's states (B, T, M) of tokens (B, T), pixels (B, C, height, width) or regions (B, R, width).

        Patches where ``masked`` (B, patches) is True are replaced by the mask token.
        """
        x = self.embeddings(source, masked) if masked is not None else _embed(self, source, positions, segments)
        return self.encoder(x, mask=mask_from_padding(padding_mask), positions=positions)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """The head's logits: classes (B, classes), tags or spans (B, T, classes), tokens (B, T, V), replaced tokens
        (B, T); without a head, the states. Takes the arguments of ``hidden``.
        """
        if self.detector is not None:
            return self.detector(self.hidden(*inputs, **options))
        if self.classifier is None:
            return super().forward(*inputs, **options)
        return self.classifier(self.hidden(*inputs, **options), mask_from_padding(options.get("padding_mask")))

    def _new_generator(self, width: int) -> Encoder:
        """ELECTRA's smaller masked language model, which shares this model's token table (Clark et al. 2020, §3.1)."""
        config = self.config
        n_heads = max(1, config.n_heads * width // config.d_model)
        sizes = {"d_model": width, "n_heads": n_heads, "n_kv_heads": None, "d_head": None}
        sizes |= {"d_ff": max(1, config.d_ff * width // config.d_model), "d_embed": config.d_embed or config.d_model}
        head = {"head": "masked-lm", "head_transform": True, "head_bias": True, "generator_width": None}
        generator = Encoder(config.with_(**sizes, **head))
        del generator.token
        generator.__dict__["token"] = self.token  # not a submodule, so the table is counted, saved and moved once
        return generator

    def drop_generator(self) -> None:
        """Remove ELECTRA's generator, which only training needs."""
        self.generator, self.config = None, self.config.with_(generator_width=None)

    def pooled(self, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """One vector per input (B, M), by ``config.pooling`` (BERT: the first token's state)."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: config.pooler is 'none', or the pooler belongs to a classifier")
        return self.pooler(states, mask_from_padding(padding_mask))


class EncoderDecoder(SourceToTarget):
    """Sequence to sequence (the paper's Transformer, T5, BART, Marian; with images, a captioner)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token = components.token_table(config, config.vocab_size) if config.source == "text" else None
        shared = config.source == "text" and config.target_vocab_size is None
        text = config if config.text_model is None else config.text_tower  # a language model that reads images
        self.target_token = None if shared else components.token_table(text, config.output_vocab_size)
        self.embeddings = source_embeddings(config)
        self.target_embeddings = components.embeddings(text, config.max_target_len or config.max_len)
        self.encoder: Stack = Stack(config, causal=False)
        self.resampler = None if config.resampler_tokens is None else Resampler(config, config.resampler_tokens)
        d_memory = None if config.text_model is None else config.d_model
        self.decoder: Stack = Stack(text, causal=text.causal, cross=True, d_memory=d_memory)
        self.head = _token_head(text, config.output_vocab_size)
        self._initialise()

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Memory:
        """The memory of texts (B, S), images or regions; or of P passages per example (B, P, S), encoded one by one."""
        if self.token is not None and source.dim() == 3:
            return self._encode_passages(source, padding_mask)
        mask = mask_from_padding(padding_mask)
        x = self.encoder(_embed(self, source, positions), mask=mask, positions=positions)
        return Memory(x if self.resampler is None else self.resampler(x), mask)

    def _encode_passages(self, source: Tensor, padding_mask: Tensor | None) -> Memory:
        """Each passage is encoded independently; their states are concatenated to (B, P · S, M) with all padding last,
        and the decoder attends to them as to one source (Fusion-in-Decoder, Izacard & Grave 2021)."""
        real = torch.ones_like(source, dtype=torch.bool) if padding_mask is None else padding_mask.bool()
        states = self.encode(source.flatten(0, 1), padding_mask=real.flatten(0, 1)).states
        states = states.unflatten(0, source.shape[:2]).flatten(1, 2)
        order = real.flatten(1).int().argsort(dim=1, descending=True, stable=True)
        states = states.gather(1, order[..., None].expand_as(states))
        return Memory(states, mask_from_padding(join_padding(real)))

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


class Resampler(nn.Module):
    """Learned vectors z attend to the patches x and to each other, layer by layer (Flamingo; Jaegle et al. 2021).

    z ← z + Attention(norm z → [norm x; norm z]),   z ← z + FFN(norm z).       x (B, S, M) → (B, n, M)
    """

    def __init__(self, config: ModelConfig, n: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(n, config.d_model) * 0.02)
        self.layers = nn.ModuleList(_ResamplerLayer(config) for _ in range(config.resampler_layers))
        self.norm = components.norm(config)

    def forward(self, x: Tensor) -> Tensor:
        z = self.vectors.to(x.dtype).expand(len(x), -1, -1)
        for layer in self.layers:
            z = layer(z, x)
        return self.norm(z)


class _ResamplerLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.patch_norm, self.norm, self.ff_norm = (components.norm(config) for _ in range(3))
        self.attention = components.attention(config, config.n_heads, cross=True)
        self.ff = components.feed_forward(config, config.d_ff)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        normed = self.norm(z)
        z = z + self.attention(normed, torch.cat((self.patch_norm(x), normed), dim=1))
        return z + self.ff(self.ff_norm(z))


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
    """With a cache, mark padding by position -1 instead of a mask: a cache neither stores nor returns such tokens."""
    if padding_mask is None or cache is None:
        return padding_mask, positions
    padding_mask = padding_mask.bool()
    if positions is None:
        positions = cache.lengths.to(padding_mask.device)[:, None] + padding_mask.long().cumsum(-1) - 1
    return None, torch.where(padding_mask, positions, -1)


def embedding_positions(
    config: ModelConfig, tokens: Tensor, positions: Tensor | None = None, cache: ModelCache | None = None
) -> Tensor | None:
    """The positions (B, T) of the position embeddings; None for 0, 1, 2 …"""
    if positions is not None:
        return positions
    if cache is not None:
        return cache.next_positions(tokens.shape[1], tokens.device)
    if config.positions_skip_padding:  # RoBERTa counts tokens other than the pad token and ignores the mask
        real = tokens != config.pad_id
        return torch.where(real, real.long().cumsum(-1) - 1, -1)
    return None
