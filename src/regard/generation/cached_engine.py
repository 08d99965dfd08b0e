"""Decoding engines: a model with its cache, as the searches use it.

    logits = engine.prefill(prompts, copies)     all prompt tokens at once, logits after the last one
    logits = engine.decode_one_token(tokens)     one token a row
    logits = engine.decode_tokens(tokens)        several tokens a row, logits after each of them
    engine.truncate(length)                      drop the tokens from position ``length`` on
    engine.select(rows)                          continue with some rows, in any order and number

A kind of model adds one method: from tokens to hidden states.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..models import Memory, Model
from ..models.base_model import mask_from_padding
from ..models.recurrent import RecurrentMemory
from .prompts import Prompts, Sources, max_text_length

CacheName = Literal["growing", "static", "static-bf16", "static-int8"]
_CACHE_DTYPES: dict[CacheName, CacheDtype] = {
    "growing": "model",
    "static": "model",
    "static-bf16": "bf16",
    "static-int8": "int8",
}


class DecodingEngine:
    """Base class. With a ``static`` cache, which is preallocated, every step has one shape and rows stay in place."""

    def __init__(self, model: Model, cache: CacheName = "growing") -> None:
        if model.head is None:
            raise ValueError(f"this model has head={model.config.head!r}; only with head='lm' does it know tokens")
        if not model.config.mixing.by_token:
            raise ValueError(f"mixer={model.config.mixer!r} mixes a whole text at once and cannot go token by token")
        self.model, self.head = model, model.head
        self.static, self._cache_dtype = cache != "growing", _CACHE_DTYPES[cache]
        self._cache: ModelCache = model.new_cache()
        self._max_length: int | None = None  # set where finished rows may fill the cache while others are decoded

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        """Read the prompts; logits (B · copies, V) of what follows, the copies of a prompt side by side."""
        rows = torch.arange(len(prompts), device=prompts.tokens.device).repeat_interleave(copies)
        tokens, positions = prompts.tokens, prompts.positions
        if self.static:
            self._cache = self.model.new_cache(len(rows), self._cache_length(prompts), self._cache_dtype)
            tokens, positions = tokens[rows], None if positions is None else positions[rows]
            self._repeat_source(rows)
        logits = self._logits(self._states(tokens, positions))
        if not self.static and copies > 1:  # computed once, then copied
            self.select(rows)
            logits = logits.index_select(0, rows)
        if logits.isnan().any():
            raise ValueError("the model's logits are not numbers (NaN); its weights may have diverged")
        return logits

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        """Read one token a row (R,); logits (R, V) of what follows."""
        positions = None
        if self._max_length is not None:  # a full row reads padding
            lengths = self._cache.lengths.expand(len(tokens))
            positions = torch.where(lengths < self._max_length, lengths, -1)[:, None]
        return self._logits(self._states(tokens[:, None], positions))

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Read several tokens a row (R, T); logits (R, T, V) of what follows each."""
        return self.head(self._states(tokens, None), self.model.output_table).float()

    def truncate(self, length: int) -> None:
        """Drop the tokens from position ``length`` on."""
        self._cache.truncate(length)

    def select(self, rows: Tensor) -> None:
        """Row r continues row rows[r]."""
        self._cache.reorder(rows)

    def _cache_length(self, prompts: Prompts) -> int:
        """Length of a preallocated cache: the longest prompt and the largest limit, which may be of different rows."""
        max_length = max_text_length(self.model.config, target=not self.model.is_decoder_only)
        length = max(len(row) for row in prompts.rows) + int(prompts.limit.max())
        self._max_length = max_length if length > max_length else None
        return min(length, max_length)

    def _logits(self, states: Tensor) -> Tensor:
        """Of the last state, in float32 whatever the model computes in: (B, T, M) → (B, V)."""
        return self.head(states[:, -1:], self.model.output_table)[:, 0].float()

    def _states(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _repeat_source(self, rows: Tensor) -> None:
        """Repeat encoder outputs before a static prefill; a decoder-only model has none."""


class DecoderEngine(DecodingEngine):
    """Decoder-only models."""

    def _states(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.model.hidden(tokens, positions=positions, cache=self._cache)


class EncoderDecoderEngine(DecodingEngine):
    """Models with an encoder, recurrent ones included. The encoder runs once a source."""

    def __init__(self, model: Model, sources: Sources, cache: CacheName = "growing") -> None:
        super().__init__(model, cache)
        self._padding_mask = sources.padding_mask
        self._memory: Memory = model.encode(sources.values, padding_mask=sources.padding_mask)

    def _states(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        states = self.model.decode(tokens, self._memory, positions=positions, cache=self._cache)
        self._memory = Memory(self._memory.states[:0], self._memory.mask)  # from now on the cache holds it
        return states

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self._padding_mask is not None:
            self._padding_mask = self._padding_mask.index_select(0, rows)
            self._memory = Memory(self._memory.states, mask_from_padding(self._padding_mask))

    def _repeat_source(self, rows: Tensor) -> None:
        memory = self._memory
        if self._padding_mask is not None:
            self._padding_mask = self._padding_mask.index_select(0, rows)
        if isinstance(memory, RecurrentMemory):
            self._memory = memory.rows(rows)
        else:
            self._memory = Memory(memory.states.index_select(0, rows), mask_from_padding(self._padding_mask))


def engine_for(model: Model, sources: Sources | None, cache: CacheName = "growing") -> DecodingEngine:
    """The engine for a model; a model with an encoder needs its sources."""
    if model.is_decoder_only:
        return DecoderEngine(model, cache)
    if model.is_encoder_decoder and sources is not None:
        return EncoderDecoderEngine(model, sources, cache)
    raise TypeError(f"a model with architecture={model.config.architecture!r} writes no text")
