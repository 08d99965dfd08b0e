"""A decoding engine: a model with its cache, behind the interface that all searches use.

logits = engine.prefill(prompts, copies)     all prompt tokens at once, logits after the last one
states = engine.prefill_part(tokens)         a long prompt part by part, the states after each of its tokens
logits = engine.logits_of(states)
logits = engine.decode_one_token(tokens)     one token per row
logits = engine.decode_tokens(tokens)        several tokens per row, logits after each of them
engine.truncate(length)                      drop the tokens from position ``length`` on
engine.select(rows)                          continue with the given rows, which may be reordered and repeated
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention, taps
from ..attention.biases import Bias
from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.edits import has_edits
from ..attention.mechanisms import Dot
from ..errors import BadOutput
from ..models import Memory, Model
from ..models.base_model import join_padding, mask_from_padding
from ..models.recurrent import RecurrentMemory
from .prompts import Prompts, Sources, max_text_length, rope_depends_on_length

CacheName = Literal["growing", "static", "static-bf16", "static-int8"]
_CACHE_DTYPES: dict[CacheName, CacheDtype] = {"static-bf16": "bf16", "static-int8": "int8"}  # others: the model's


class DecodingEngine:
    """A model with an empty cache; its encoder, if any, has encoded the sources.

    With a preallocated (``static``) cache, all steps have one shape and rows stay in place.
    """

    def __init__(self, model: Model, sources: Sources | None = None, cache: CacheName = "growing") -> None:
        if not model.is_decoder_only and (not model.is_encoder_decoder or sources is None):
            raise TypeError(f"a model with architecture={model.config.architecture!r} writes no text")
        if model.head is None:
            raise ValueError(f"this model has head={model.config.head!r}, but generating tokens needs head='lm'")
        self._check_mixer(model)
        self.model, self.head = model, model.head
        self.static, self._cache_dtype = cache != "growing", _CACHE_DTYPES.get(cache, "model")
        self._cache: ModelCache = model.new_cache()
        self._max_length: int | None = None  # set if finished rows may fill the cache while others are decoded
        self._memory: Memory | None = None  # the encoder's output
        self._padding_mask: Tensor | None = None  # (B, S) of the memory
        if sources is not None:
            self._padding_mask = None if sources.padding_mask is None else join_padding(sources.padding_mask)
            self._memory = model.encode(sources.values, padding_mask=sources.padding_mask)

    def _check_mixer(self, model: Model) -> None:
        if not model.decodes_by_token:
            have = f"mixer={model.config.mixer!r}" if model.config.model_class is None else type(model).__name__
            raise ValueError(f"{have} keeps no cache and cannot go token by token")

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        """Run the prompts; next-token logits (B · copies, V), the copies of a prompt side by side."""
        rows = torch.arange(len(prompts), device=prompts.tokens.device).repeat_interleave(copies)
        tokens, positions = prompts.tokens, prompts.positions
        if self.static:
            self._cache = self.model.new_cache(len(rows), self._cache_length(prompts), self._cache_dtype)
            tokens, positions = tokens[rows], None if positions is None else positions[rows]
            self._select_memory(rows)
        logits = self._logits(self._states(tokens, positions))
        if not self.static and copies > 1:  # computed once, then copied
            self.select(rows)
            logits = logits.index_select(0, rows)
        return check_logits(logits)

    def prefill_part(self, tokens: Tensor) -> Tensor:
        """Run the next part (B, T) of prompts of equal length; the states (B, T, M) after its tokens."""
        return self._states(tokens, None)

    def logits_of(self, states: Tensor) -> Tensor:
        """Next-token logits (B, T, V) after states (B, T, M), in float32 whatever the model's dtype."""
        return self.head(states, self.model.output_table).float()

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        """Run one token per row (R,); next-token logits (R, V)."""
        positions = None
        if self._max_length is not None:  # a full row gets padding
            lengths = self._cache.lengths.expand(len(tokens))
            positions = torch.where(lengths < self._max_length, lengths, -1)[:, None]
        return self._logits(self._states(tokens[:, None], positions))

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Run several tokens per row (R, T); next-token logits (R, T, V) after each."""
        return self.logits_of(self.prefill_part(tokens))

    def truncate(self, length: int) -> None:
        """Drop the tokens from position ``length`` on."""
        self._cache.truncate(length)

    def select(self, rows: Tensor) -> None:
        """Row r continues row rows[r]."""
        self._cache.reorder(rows)
        if self._memory is not None and self._padding_mask is not None:
            self._padding_mask = self._padding_mask.index_select(0, rows)
            self._memory = Memory(self._memory.states, mask_from_padding(self._padding_mask))

    def _select_memory(self, rows: Tensor) -> None:
        """Row r reads the source of row rows[r], while no keys of sources are in the cache."""
        if self._padding_mask is not None:
            self._padding_mask = self._padding_mask.index_select(0, rows)
        if isinstance(self._memory, RecurrentMemory):
            self._memory = self._memory.rows(rows)
        elif self._memory is not None:
            self._memory = Memory(self._memory.states.index_select(0, rows), mask_from_padding(self._padding_mask))

    def _cache_length(self, prompts: Prompts) -> int:
        """Length of a preallocated cache: the longest prompt plus the largest limit, possibly of different rows."""
        max_length = max_text_length(self.model.config, target=not self.model.is_decoder_only)
        length = max(len(row) for row in prompts.rows) + int(prompts.limit.max())
        self._max_length = max_length if length > max_length else None
        return min(length, max_length)

    def _logits(self, states: Tensor) -> Tensor:
        """Logits of the last state: (B, T, M) → (B, V)."""
        return self.logits_of(states[:, -1:])[:, 0]

    def _states(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if self._memory is None:
            return self.model.hidden(tokens, positions=positions, cache=self._cache)
        states = self.model.decode(tokens, self._memory, positions=positions, cache=self._cache)
        self._memory = Memory(self._memory.states[:0], self._memory.mask)  # the cache now has its keys and values
        return states


class RecomputingEngine(DecodingEngine):
    """An engine for causal mixers without a cache: every step runs the whole texts again, O(T) times the work.

    Rows of different lengths run one by one, so that no mixer sees padding.
    """

    def __init__(self, model: Model, sources: Sources | None = None, cache: CacheName = "growing") -> None:
        super().__init__(model, sources)
        self._texts: list[Tensor] = []  # the tokens (T,) of each row

    def _check_mixer(self, model: Model) -> None:
        if not (model.config.mixing.causal and model.config.causal):
            raise ValueError(
                f"mixer={model.config.mixer!r} mixes all tokens of a text, including later ones, so it cannot generate "
                "token by token"
            )

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        texts = [torch.tensor(row, device=prompts.tokens.device) for row in prompts.rows]
        self._texts = texts
        rows = torch.arange(len(texts), device=prompts.tokens.device).repeat_interleave(copies)
        logits = check_logits(self._logits(self._last_states(1))).index_select(0, rows)
        self.select(rows)
        return logits

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        return self.decode_tokens(tokens[:, None])[:, 0]

    def prefill_part(self, tokens: Tensor) -> Tensor:
        texts = self._texts or [tokens.new_empty(0)] * len(tokens)
        self._texts = [torch.cat(pair) for pair in zip(texts, tokens, strict=True)]
        return self._last_states(tokens.shape[1])

    def truncate(self, length: int) -> None:
        self._texts = [text[:length] for text in self._texts]

    def select(self, rows: Tensor) -> None:
        self._texts = [self._texts[row] for row in rows.tolist()]
        self._select_memory(rows)

    def _last_states(self, n: int) -> Tensor:
        """The states (R, n, M) of the last n tokens."""
        equal_lengths = len({len(text) for text in self._texts}) == 1
        groups = [list(range(len(self._texts)))] if equal_lengths else [[row] for row in range(len(self._texts))]
        return torch.cat([self._whole_states(group)[:, -n:] for group in groups])

    def _whole_states(self, group: list[int]) -> Tensor:
        tokens = torch.stack([self._texts[row] for row in group])
        if self._memory is None:
            return self.model.hidden(tokens)
        padding_mask = None if self._padding_mask is None else self._padding_mask[group]
        return self.model.decode(tokens, Memory(self._memory.states[group], mask_from_padding(padding_mask)))


def plain_engine(model: Model, sources: Sources | None = None, cache: CacheName = "growing") -> DecodingEngine:
    """The engine that calls the model's own forward pass: with its cache, or without one where it keeps none."""
    return (DecodingEngine if model.decodes_by_token else RecomputingEngine)(model, sources, cache)


def nan_error(what: str = "logits") -> BadOutput:
    return BadOutput(f"the model's {what} are NaN; its training may have diverged")


def check_logits(logits: Tensor, what: str = "logits") -> Tensor:
    """The logits, or ``what`` was computed from them, unless some are NaN."""
    if logits.isnan().any():
        raise nan_error(what)
    return logits


def likeliest_tokens(logits: Tensor) -> list[int]:
    """The argmax of each row of logits (R, V); -1 for a row with NaN."""
    best = logits.max(-1)  # NaN counts as the maximum
    tokens: list[int] = best.indices.masked_fill(best.values.isnan(), -1).tolist()
    return tokens


def step_obstacle(model: Model, takes_bias: Callable[[Bias], bool] = lambda bias: False) -> str | None:
    """Why a Transformer's decode step cannot bypass its modules' forward, in a few words; None if it can.

    ``takes_bias`` says whether the step supports a position bias that all layers share.
    """
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is enabled"
    if model.config.model_class is not None:
        return "its class is not built in"
    if taps.is_recording():
        return "its activations are being recorded"
    if has_edits(model):
        return "its activations are being edited"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "its modules have forward hooks"
    if model.config.text_model is not None:
        return "its language model has its own config"
    bias = model.decoder.position_bias
    if not model.decoder.causal or (bias is not None and not takes_bias(bias)):
        return "its decoder is not causal, or its position bias is not supported"
    if rope_depends_on_length(model.config):
        return "its rotary angles depend on the longest text of the batch"
    for block in model.decoder.blocks:
        for attention in (block.attention, block.cross_attention):
            if attention is not None and (obstacle := attention_obstacle(attention)) is not None:
                return obstacle
    return None


def attention_obstacle(attention: nn.Module) -> str | None:
    """Why an attention module is more than softmax(q kᵀ · scale) v, in a few words; None if it is not."""
    if type(attention) is not MultiHeadAttention or type(attention.mechanism) is not Dot:
        return "its attention is not the scaled dot product"
    if attention.position_bias is not None or attention.sinks is not None:
        return "its attention has a position bias or sinks"
    return None
