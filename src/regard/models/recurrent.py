"""The recurrent encoder-decoder and its three decoders, which differ in when they attend and what they feed back.

    plain     s_t = RNN(y_t, s_t-1)                                                       (Sutskever et al. 2014)
    Bahdanau  c_t = attention(s_t-1),  s_t = RNN([y_t; c_t], s_t-1)                       (Bahdanau et al. 2015)
    Luong     s_t = RNN([y_t; h̃_t-1], s_t-1),  h̃_t = tanh(W_c [attention(s_t); s_t])      (Luong et al. 2015)

y is the embedding of the previous token, s the top layer's state, c the context: the output of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..attention import masks
from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .base_model import AttentionSite, SourceToTarget, mask_from_padding
from .block import Memory
from .components import TokenHead
from .recurrent_cells import Alignment, MemoryCache, MemoryView, Recurrence, Rows, State, StateCache, real_keys


class RecurrentStep(NamedTuple):
    state: State  # after the token
    h: Tensor  # (B, M) the output is computed from
    q: Tensor | None = None  # (B, 1, 1, D) the query
    context: Tensor | None = None  # (B, M) the output of attention


class PlainDecoder(nn.Module):
    """A decoder without attention: only its initial state depends on the source."""

    def __init__(self, config: ModelConfig, d_fed: int = 0) -> None:
        super().__init__()
        n_layers = config.n_decoder_layers or config.n_layers
        self.d_embed = config.d_model if config.d_embed is None else config.d_embed
        self.top = n_layers - 1
        self.rnn = Recurrence(config.cell, self.d_embed + d_fed, config.d_model, n_layers, dropout=config.dropout)
        self.cross_attention = None if config.alignment == "none" else Alignment(config)

    def first_state(self, state: State) -> State:
        """The state before the first token, from the bridge's output."""
        return state

    def forward(self, x: Tensor, state: State, view: MemoryView | None, real: Tensor | None = None) -> Tensor:
        """A whole target at once, x (B, T, d_embed) → (B, T, M); ``real`` (B, T) is False at padding."""
        return self.run_fused(x, state, real)

    def run_fused(self, x: Tensor, state: State, real: Tensor | None) -> Tensor:
        """The top layer's states from the fused kernel, for decoders whose steps do not depend on attention."""
        if real is None:
            return self.rnn(x, state)[0]
        rows = Rows.of(real)
        return rows.unpack(self.rnn(rows.pack(x), state)[0])  # padding at the end does not affect real tokens

    def run_steps(
        self,
        x: Tensor,
        state: State,
        view: MemoryView | None,
        real: Tensor | None = None,
        states: StateCache | None = None,
        seen: MemoryCache | None = None,
    ) -> Tensor:
        """Token by token; each state is written to the cache ``states``, if given. Padding leaves the state unchanged.

        ``seen``: the cache of the memory. Returns (B, T, M).
        """
        padding_bias = None if view is None else view.padding_bias()
        steps: list[RecurrentStep] = []
        for t, gates in enumerate(self.rnn.project(x).unbind(1)):
            step = self.step(gates, state, view, padding_bias)
            steps.append(step)
            is_real = None if real is None else real[:, t]
            if is_real is None:
                state = step.state
            else:
                pairs = zip(step.state, state, strict=True)
                state = tuple(torch.where(is_real[:, None], after, before) for after, before in pairs)
            if states is not None:
                state = states.push(state, is_real)
        h = torch.stack([step.h for step in steps], dim=1)
        if self.cross_attention is None or view is None:
            return h
        q = torch.cat([step.q for step in steps if step.q is not None], dim=2)
        contexts = torch.stack([step.context for step in steps if step.context is not None], dim=1)
        self.cross_attention.record_attention(q, contexts, view, seen)
        return self.output(x, h, contexts)

    def step(self, gates: Tensor, state: State, view: MemoryView | None, padding_bias: Tensor | None) -> RecurrentStep:
        """One token, given the projected gates of its embedding and the state before it."""
        state = self.rnn.step(gates, state)
        return RecurrentStep(state, state[self.top])

    def output(self, x: Tensor, h: Tensor, contexts: Tensor) -> Tensor:
        """The head's input (B, T, M), for all steps at once."""
        return h


class LuongDecoder(PlainDecoder):
    """Attends after each step; h̃_t is the output and, with input feeding (§3.3), part of the next input.

    Without input feeding, all steps run in one fused recurrence and one attention.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, d_fed=config.d_model if config.input_feeding else 0)
        self.feeds = config.input_feeding
        self.combine = linear(2 * config.d_model, config.d_model, bias=False)

    def first_state(self, state: State) -> State:
        return (*state, torch.zeros_like(state[0])) if self.feeds else state

    def forward(self, x: Tensor, state: State, view: MemoryView | None, real: Tensor | None = None) -> Tensor:
        if self.feeds:
            return self.run_steps(x, state, view, real)
        assert self.cross_attention is not None and view is not None
        h = self.run_fused(x, state, real)
        return self._combine(self.cross_attention.attend_all(h, view), h)

    def step(self, gates: Tensor, state: State, view: MemoryView | None, padding_bias: Tensor | None) -> RecurrentStep:
        assert self.cross_attention is not None and view is not None
        if self.feeds:
            gates, state = self.rnn.feed(gates, state[-1]), state[:-1]
        state = self.rnn.step(gates, state)
        q, context = self.cross_attention.attend_one(state[self.top], view, padding_bias)
        h = self._combine(context, state[self.top])
        return RecurrentStep((*state, h) if self.feeds else state, h, q, context)

    def _combine(self, context: Tensor, h: Tensor) -> Tensor:
        """h̃ = tanh(W_c [c; h]), eq. 5."""
        return torch.tanh(self.combine(torch.cat([context, h], dim=-1)))


class BahdanauDecoder(PlainDecoder):
    """Attends before each step. The output is a maxout of token, state and context: t_i = max over pairs of
    W [y_i-1; s_i; c_i] (eq. 4 and A.2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, d_fed=config.d_model)
        self.readout = linear(self.d_embed + 2 * config.d_model, 2 * config.d_model)

    def forward(self, x: Tensor, state: State, view: MemoryView | None, real: Tensor | None = None) -> Tensor:
        return self.run_steps(x, state, view, real)

    def step(self, gates: Tensor, state: State, view: MemoryView | None, padding_bias: Tensor | None) -> RecurrentStep:
        assert self.cross_attention is not None and view is not None
        q, context = self.cross_attention.attend_one(state[self.top], view, padding_bias)
        state = self.rnn.step(self.rnn.feed(gates, context), state)
        return RecurrentStep(state, state[self.top], q, context)

    def output(self, x: Tensor, h: Tensor, contexts: Tensor) -> Tensor:
        return self.readout(torch.cat([x, h, contexts], dim=-1)).unflatten(-1, (-1, 2)).amax(-1)


def linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    """A Linear with Xavier-uniform weights and zero bias."""
    layer = nn.Linear(d_in, d_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True, eq=False)
class RecurrentMemory(Memory):
    """The encoder's states (B, S, M), 0 at padding, and the last state of each layer."""

    final: State = ()

    def rows(self, index: Tensor) -> RecurrentMemory:
        """The rows of the batch selected by ``index``, which may reorder and repeat them."""
        real = real_keys(self)
        mask = None if real is None else masks.valid_keys(real.index_select(0, index))
        final = tuple(part.index_select(0, index) for part in self.final)
        return RecurrentMemory(self.states.index_select(0, index), mask, final)


class Bridge(nn.Module):
    """From the encoder's last state to the decoder's first: h₀ = tanh(W h + b) (Bahdanau et al. 2015), c₀ = W c + b.

    Layers are paired from the top; if the decoder has more layers, several of them start from the encoder's lowest.
    """

    def __init__(self, cell: str, d_model: int, n_from: int, n_to: int) -> None:
        super().__init__()
        kinds = range(2 if cell == "lstm" else 1)  # h and, for an LSTM, c
        self.n_layers = n_to
        self.source = [kind * n_from + max(0, layer + n_from - n_to) for kind in kinds for layer in range(n_to)]
        self.maps = nn.ModuleList(linear(d_model, d_model) for _ in self.source)

    def forward(self, final: State) -> State:
        mapped = [linear(final[part]) for linear, part in zip(self.maps, self.source, strict=True)]
        return *(torch.tanh(h) for h in mapped[: self.n_layers]), *mapped[self.n_layers :]


class Recurrent(SourceToTarget):
    """Sequence to sequence with LSTM or GRU layers.   source (B, S), target (B, T) → (B, T, V)

    ``alignment`` chooses the decoder: none, Bahdanau's additive, or Luong's dot, general and concat. Each direction of
    a ``bidirectional`` encoder has d_model / 2 units. ``positions`` matter only where they are -1, at padding.
    """

    is_recurrent = True
    token: TokenEmbedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        cell, d_model, n_layers, dropout = config.cell, config.d_model, config.n_layers, config.dropout
        self.token = components.token_table(config, config.vocab_size)
        shared = config.target_vocab_size is None
        self.target_token = None if shared else components.token_table(config, config.output_vocab_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        both_ways, d_embed = config.bidirectional, self.token.d_model
        self.encoder = Recurrence(cell, d_embed, d_model, n_layers, bidirectional=both_ways, dropout=dropout)
        self.bridge = Bridge(cell, d_model, n_layers, config.n_decoder_layers or n_layers)
        decoder = {"none": PlainDecoder, "additive": BahdanauDecoder}.get(config.alignment, LuongDecoder)
        self.decoder = decoder(config)
        self.dropout = nn.Dropout(dropout)
        self.head = TokenHead(config, config.output_vocab_size, config.tie_head) if config.head == "lm" else None
        self._initialise()

    def attention_sites(self) -> list[AttentionSite]:
        module = self.decoder.cross_attention
        return [] if module is None else [AttentionSite("decoder.cross_attention", "cross", 0, module)]

    def use_checkpointing(self, on: bool = True) -> None:
        """Trade time for memory: recompute each step's scores, S · M numbers per row, in the backward pass."""
        if self.decoder.cross_attention is not None:
            self.decoder.cross_attention.checkpointing = on

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        """An empty cache for decoding. Its size does not depend on the length of the text; with ``batch`` and
        ``max_len``, the state is updated in place."""
        if cache_dtype != "model":
            raise ValueError(
                f"cache_dtype={cache_dtype!r} does not apply to a recurrent model, whose state is not rounded"
            )
        return ModelCache([StateCache(in_place=batch is not None and max_len is not None)], [MemoryCache()])

    def encode(
        self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> RecurrentMemory:
        padding_mask = _real_tokens("source", source, padding_mask, positions)
        x = self.embedding_dropout(self.token(source))
        if padding_mask is None:
            states, final = self.encoder(x)
        else:
            rows = Rows.of(padding_mask)
            states, final = self.encoder.forward_padded(rows.pack(x), rows.real)
            states = rows.unpack(states)
        return RecurrentMemory(states, mask_from_padding(padding_mask), final)

    def decode(
        self,
        target: Tensor,
        memory: Memory | None,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The decoder's states (B, T, M) for target tokens. Once a cache is filled, the memory may be None."""
        if cache is not None and padding_mask is not None:
            padding_mask = padding_mask[:, -target.shape[1] :]  # a mask of the whole text: keep the new tokens
        padding_mask = _real_tokens("target", target, padding_mask, positions)
        x = self.embedding_dropout(self.target_table(target))
        if cache is None:
            view, state = self._start(memory, len(target))
            return self.dropout(self.decoder(x, state, view, padding_mask))
        states, seen = cache.layers[0], cache.cross[0] if cache.cross else None
        if not isinstance(states, StateCache) or not isinstance(seen, MemoryCache):
            raise TypeError("this is not a recurrent model's cache; new_cache() makes one")
        if not states.filled:
            view, state = self._start(memory, len(target))
            states.start(state)
            if view is not None:
                seen.fill(view)
        return self.dropout(self.decoder.run_steps(x, states.state(), seen.view, padding_mask, states, seen))

    def _start(self, memory: Memory | None, n_batch: int) -> tuple[MemoryView | None, State]:
        """The memory as keys and values (None without attention), and the decoder's state before the first token."""
        if not isinstance(memory, RecurrentMemory):
            kind = type(memory).__name__
            raise TypeError(f"memory must come from encode(), which adds the encoder's last state, got {kind}")
        if len(memory.states) != n_batch:
            raise ValueError(f"target has batch size {n_batch} but memory has {len(memory.states)}")
        attention = self.decoder.cross_attention
        view = None if attention is None else attention.view(memory)
        return view, self.decoder.first_state(self.bridge(memory.final))


def _real_tokens(name: str, tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """(B, T) booleans, False at padding; None if nothing marks padding."""
    if tokens.dim() != 2 or 0 in tokens.shape:
        raise ValueError(f"{name} must be (batch, length) with at least one token, got shape {tuple(tokens.shape)}")
    real = None
    for argument, values in (("padding_mask", padding_mask), ("positions", positions)):
        if values is None:
            continue
        if values.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(f"{name} {argument} has shape {tuple(values.shape)}, but {name} has {tuple(tokens.shape)}")
        mask = (values.bool() if argument == "padding_mask" else values >= 0).expand_as(tokens)
        real = mask if real is None else real & mask
    return real
