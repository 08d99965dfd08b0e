"""Recurrent encoder-decoders: from source tokens through LSTM or GRU layers and attention to next-token logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...attention import masks
from ...attention.cache import ModelCache
from ...attention.cache.static_cache import CacheDtype
from ...config import ModelConfig
from .. import parts
from ..block import Memory
from ..heads import TokenHead
from ..model import padding_mask
from ..translating import SourceToTarget
from .alignment import View, real_keys
from .cache import MemoryCache, StateCache
from .decoder import BahdanauDecoder, LuongDecoder, PlainDecoder, linear
from .recurrence import Recurrence, Rows, State

_DECODERS: dict[str, type[PlainDecoder]] = {
    "none": PlainDecoder,
    "additive": BahdanauDecoder,
    "dot": LuongDecoder,
    "general": LuongDecoder,
    "concat": LuongDecoder,
}


@dataclass(frozen=True, eq=False)
class RecurrentMemory(Memory):
    """The encoder's states (B, S, M), 0 at padding, and the last state of each layer, where the decoder starts."""

    final: State = ()

    def rows(self, index: Tensor) -> RecurrentMemory:
        """Some rows of the batch, in any order and number."""
        real = real_keys(self)
        mask = None if real is None else masks.valid_keys(real.index_select(0, index))
        final = tuple(part.index_select(0, index) for part in self.final)
        return RecurrentMemory(self.states.index_select(0, index), mask, final)


class Bridge(nn.Module):
    """From the encoder's last state to the decoder's first: h₀ = tanh(W h + b) (Bahdanau et al. 2015), c₀ = W c + b.

    Layers are paired from the top; where the decoder has more of them, the encoder's lowest serves several.
    """

    def __init__(self, cell: str, d_model: int, n_from: int, n_to: int) -> None:
        super().__init__()
        kinds = range(2 if cell == "lstm" else 1)  # h, and c
        self.n_layers = n_to
        self.source = [kind * n_from + max(0, layer + n_from - n_to) for kind in kinds for layer in range(n_to)]
        self.maps = nn.ModuleList(linear(d_model, d_model) for _ in self.source)

    def forward(self, final: State) -> State:
        mapped = [to_part(final[part]) for to_part, part in zip(self.maps, self.source, strict=True)]
        return *(torch.tanh(h) for h in mapped[: self.n_layers]), *mapped[self.n_layers :]


class Recurrent(SourceToTarget):
    """Sequence to sequence with LSTM or GRU layers.   source (B, S), target (B, T) → (B, T, V)

    ``alignment`` chooses the decoder: none, Bahdanau's additive, or Luong's dot, general and concat. The encoder reads
    both ways where ``bidirectional``, each with half of d_model. Order is all that tells where a token stands:
    ``positions`` are taken, as by the other models, for their -1, which marks padding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        cell, d_model = config.cell, config.d_model
        self.token = parts.token_table(config, config.vocab_size)
        shared = config.target_vocab_size is None
        self.target_token = None if shared else parts.token_table(config, config.output_vocab_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.encoder = Recurrence(
            cell,
            self.token.d_model,
            d_model,
            config.n_layers,
            bidirectional=config.bidirectional,
            dropout=config.dropout,
        )
        self.bridge = Bridge(cell, d_model, config.n_layers, config.n_decoder_layers or config.n_layers)
        self.decoder = _DECODERS[config.alignment](config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = TokenHead(config, config.output_vocab_size, config.tie_head) if config.head == "lm" else None
        self._finish()

    @property
    def output_table(self) -> Tensor:
        """The target's token table, which a tied head uses too."""
        return (self.token if self.target_token is None else self.target_token).weight

    def use_checkpointing(self, on: bool = True) -> None:
        """Trade time for memory: compute each step's scores, S · M numbers a row, again in the backward pass."""
        if self.decoder.cross_attention is not None:
            self.decoder.cross_attention.checkpointing = on

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        """An empty cache for decoding. A state has one size for any length; batch and max_len keep it in place."""
        if cache_dtype != "model":
            raise ValueError(f"cache_dtype={cache_dtype!r}: a recurrent model keeps one state, which is not rounded")
        return ModelCache([StateCache(in_place=batch is not None and max_len is not None)], [MemoryCache()])

    def encode(self, source: Tensor, *, keep: Tensor | None = None, positions: Tensor | None = None) -> RecurrentMemory:
        """What the decoder starts from and looks at."""
        keep = _real("source", source, keep, positions)
        x = self.embedding_dropout(self.token(source))
        if keep is None:
            states, final = self.encoder(x)
        else:
            rows = Rows.of(keep)
            states, final = self.encoder.ragged(rows.tight(x), rows.real)
            states = rows.spread(states)
        return RecurrentMemory(states, padding_mask(keep), final)

    def decode(
        self,
        target: Tensor,
        memory: Memory | None,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The decoder's states (B, T, M) for target tokens. Once a cache is filled, the memory may be left out."""
        if cache is not None and keep is not None:
            keep = keep[:, -target.shape[1] :]  # of a mask over all of the text, the new tokens' part
        keep = _real("target", target, keep, positions)
        x = self.embedding_dropout((self.token if self.target_token is None else self.target_token)(target))
        if cache is None:
            view, state = self._start(memory, len(target))
            return self.dropout(self.decoder(x, state, view, keep))
        states, seen = _parts_of(cache)
        if not states.filled:
            view, state = self._start(memory, len(target))
            states.start(state)
            if view is not None:
                seen.fill(view)
        return self.dropout(self.decoder.walk(x, states.state(), seen.view, keep, states, seen))

    def _start(self, memory: Memory | None, n_batch: int) -> tuple[View | None, State]:
        """What the decoder sees, and its state before the first token."""
        if not isinstance(memory, RecurrentMemory):
            got = type(memory).__name__
            raise TypeError(f"memory must come from encode(), with the encoder's last state in it, got {got}")
        if len(memory.states) != n_batch:
            raise ValueError(f"target has batch size {n_batch} but memory has {len(memory.states)}")
        attention = self.decoder.cross_attention
        view = None if attention is None else attention.view(memory)
        return view, self.decoder.first(self.bridge(memory.final))


def _real(name: str, tokens: Tensor, keep: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Which tokens are no padding, (B, T) booleans; None for all."""
    if tokens.dim() != 2 or 0 in tokens.shape:
        raise ValueError(f"{name} must be (batch, length) with at least one token, got shape {tuple(tokens.shape)}")
    real = None
    for what, given in (("keep", keep), ("positions", positions)):
        if given is None:
            continue
        if given.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(f"{name} {what} has shape {tuple(given.shape)}, but {name} has {tuple(tokens.shape)}")
        here = (given.bool() if what == "keep" else given >= 0).expand_as(tokens)
        real = here if real is None else real & here
    return real


def _parts_of(cache: ModelCache) -> tuple[StateCache, MemoryCache]:
    states, seen = cache.layers[0], cache.cross[0] if cache.cross else None
    if not isinstance(states, StateCache) or not isinstance(seen, MemoryCache):
        raise TypeError("this cache is no recurrent model's; new_cache() makes one that is")
    return states, seen
