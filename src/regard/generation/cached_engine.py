"""A decoding engine: a model with its cache, as the searches use it.

logits = engine.prefill(prompts, copies)     all prompt tokens at once, logits after the last one
logits = engine.decode_one_token(tokens)     one token a row
logits = engine.decode_tokens(tokens)        several tokens a row, logits after each of them
engine.truncate(length)                      drop the tokens from position ``length`` on
engine.select(rows)                          continue with some rows, in any order and number
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..attention import MultiHeadAttention, taps
from ..attention.biases import Bias
from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.edits import has_edits
from ..attention.mechanisms import Dot
from ..models import Memory, Model
from ..models.base_model import mask_from_padding
from ..models.recurrent import RecurrentMemory
from .prompts import Prompts, Sources, max_text_length, rope_depends_on_length

CacheName = Literal["growing", "static", "static-bf16", "static-int8"]
_CACHE_DTYPES: dict[CacheName, CacheDtype] = {"static-bf16": "bf16", "static-int8": "int8"}  # others: the model's


class DecodingEngine:
    """A model that has read its sources, if it has an encoder, and no token yet; the encoder runs once a source.

    With a ``static`` cache, which is preallocated, every step has one shape and rows stay in place.
    """

    def __init__(self, model: Model, sources: Sources | None = None, cache: CacheName = "growing") -> None:
        if not model.is_decoder_only and (not model.is_encoder_decoder or sources is None):
            raise TypeError(f"a model with architecture={model.config.architecture!r} writes no text")
        if model.head is None:
            raise ValueError(f"this model has head={model.config.head!r}; only with head='lm' does it know tokens")
        if not model.config.mixing.by_token:
            raise ValueError(f"mixer={model.config.mixer!r} mixes a whole text at once and cannot go token by token")
        self.model, self.head = model, model.head
        self.static, self._cache_dtype = cache != "growing", _CACHE_DTYPES.get(cache, "model")
        self._cache: ModelCache = model.new_cache()
        self._max_length: int | None = None  # set where finished rows may fill the cache while others are decoded
        self._memory: Memory | None = None  # of a model with an encoder
        self._padding_mask: Tensor | None = None  # of the sources
        if sources is not None:
            self._padding_mask = sources.padding_mask
            self._memory = model.encode(sources.values, padding_mask=sources.padding_mask)

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        """Read the prompts; logits (B · copies, V) of what follows, the copies of a prompt side by side."""
        rows = torch.arange(len(prompts), device=prompts.tokens.device).repeat_interleave(copies)
        tokens, positions = prompts.tokens, prompts.positions
        if self.static:
            self._cache = self.model.new_cache(len(rows), self._cache_length(prompts), self._cache_dtype)
            tokens, positions = tokens[rows], None if positions is None else positions[rows]
            if self._padding_mask is not None:
                self._padding_mask = self._padding_mask.index_select(0, rows)
            if isinstance(self._memory, RecurrentMemory):
                self._memory = self._memory.rows(rows)
            elif self._memory is not None:
                self._memory = Memory(self._memory.states.index_select(0, rows), mask_from_padding(self._padding_mask))
        logits = self._logits(self._states(tokens, positions))
        if not self.static and copies > 1:  # computed once, then copied
            self.select(rows)
            logits = logits.index_select(0, rows)
        return check_logits(logits)

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
        if self._memory is not None and self._padding_mask is not None:
            self._padding_mask = self._padding_mask.index_select(0, rows)
            self._memory = Memory(self._memory.states, mask_from_padding(self._padding_mask))

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
        if self._memory is None:
            return self.model.hidden(tokens, positions=positions, cache=self._cache)
        states = self.model.decode(tokens, self._memory, positions=positions, cache=self._cache)
        self._memory = Memory(self._memory.states[:0], self._memory.mask)  # from now on the cache holds it
        return states


def check_logits(logits: Tensor) -> Tensor:
    if logits.isnan().any():
        raise ValueError("the model's logits are not numbers (NaN); its weights may have diverged")
    return logits


def step_obstacle(model: Model, takes_bias: Callable[[Bias], bool] = lambda bias: False) -> str | None:
    """Why a Transformer's decode step cannot be computed past its modules, in a few words; None where it can.

    ``takes_bias`` says which position bias of all layers the step can add.
    """
    if torch.is_autocast_enabled(model.device.type):
        return "autocast says in which numbers each layer computes"
    if taps._recorder is not None:
        return "what passes through its layers is recorded"
    if has_edits(model):
        return "what passes through its layers is changed on its way"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "hooks wait for its modules to be called"
    bias = model.decoder.position_bias
    if not model.decoder.causal or (bias is not None and not takes_bias(bias)):
        return "its layers share a position bias, or look ahead"
    if rope_depends_on_length(model.config):
        return "its angles follow the longest text of the batch"
    for block in model.decoder.blocks:
        for attention in (block.attention, block.cross_attention):
            if attention is None:
                continue
            if type(attention) is not MultiHeadAttention or type(attention.mechanism) is not Dot:
                return "its attention is not the scaled dot product"
            if attention.position_bias is not None:
                return "its attention has a position bias"
    return None
