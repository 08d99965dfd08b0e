"""The three recurrent decoders. They differ in when they look at the source, and in what the next step gets to know.

    plain     s_t = RNN(y_t, s_t-1)                                                       (Sutskever et al. 2014)
    Bahdanau  c_t = attention(s_t-1),  s_t = RNN([y_t; c_t], s_t-1)                       (Bahdanau et al. 2015)
    Luong     s_t = RNN([y_t; h̃_t-1], s_t-1),  h̃_t = tanh(W_c [attention(s_t); s_t])      (Luong et al. 2015)

y is the embedding of the token before, s the top layer's state, c the context: what attention returns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...config import ModelConfig
from .alignment import Alignment, Glimpse, View
from .cache import MemoryCache, StateCache
from .recurrence import Recurrence, Rows, State


class Step(NamedTuple):
    state: State  # after the token
    h: Tensor  # (B, M) what the output is made of
    glimpse: Glimpse | None = None


class PlainDecoder(nn.Module):
    """No attention: the state it starts from is all it knows of the source."""

    def __init__(self, config: ModelConfig, d_fed: int = 0) -> None:
        super().__init__()
        n_layers = config.n_decoder_layers or config.n_layers
        self.d_embed = config.d_model if config.d_embed is None else config.d_embed
        self.top = n_layers - 1
        self.rnn = Recurrence(config.cell, self.d_embed + d_fed, config.d_model, n_layers, dropout=config.dropout)
        self.cross_attention = None if config.alignment == "none" else Alignment(config)

    def first(self, state: State) -> State:
        """The state before the first token, given the bridge's."""
        return state

    def forward(self, x: Tensor, state: State, view: View | None, real: Tensor | None = None) -> Tensor:
        """A whole target at once, x (B, T, d_embed) → (B, T, M); ``real`` (B, T) is False at padding."""
        return self.whole(x, state, real)

    def whole(self, x: Tensor, state: State, real: Tensor | None) -> Tensor:
        """The top layer's states through the fused kernel: possible where no step waits for what was seen before."""
        if real is None:
            return self.rnn(x, state)[0]
        rows = Rows.of(real)
        return rows.spread(self.rnn(rows.tight(x), state)[0])  # padding at the end reaches no real token

    def walk(
        self,
        x: Tensor,
        state: State,
        view: View | None,
        real: Tensor | None = None,
        states: StateCache | None = None,
        seen: MemoryCache | None = None,
    ) -> Tensor:
        """Token by token, the state put into a cache if there is one. At padding the state stays as it is."""
        closed = None if view is None else view.closed()
        steps: list[Step] = []
        for t, gates in enumerate(self.rnn.project(x).unbind(1)):
            step = self.step(gates, state, view, closed)
            here = None if real is None else real[:, t]
            state = step.state if here is None else _held(here, step.state, state)
            if states is not None:
                state = states.push(state, here)
            steps.append(step)
        h = torch.stack([step.h for step in steps], dim=1)
        glimpses = [step.glimpse for step in steps if step.glimpse is not None]
        if self.cross_attention is None or view is None:
            return h
        contexts = torch.stack([glimpse.context for glimpse in glimpses], dim=1)
        self.cross_attention.show(torch.cat([glimpse.q for glimpse in glimpses], dim=2), contexts, view, seen)
        return self.output(x, h, contexts)

    def step(self, gates: Tensor, state: State, view: View | None, closed: Tensor | None) -> Step:
        """One token, given the gates of its embedding and the state before it."""
        state = self.rnn.step(gates, state)
        return Step(state, state[self.top])

    def output(self, x: Tensor, h: Tensor, contexts: Tensor) -> Tensor:
        """What the head reads (B, T, M), of all steps together."""
        return h


class LuongDecoder(PlainDecoder):
    """Looks after each step; h̃_t is the output and, with input feeding (§3.3), a part of the next input.

    Without input feeding nothing waits for anything: one fused recurrence, then one attention of all states.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, d_fed=config.d_model if config.input_feeding else 0)
        self.feeds = config.input_feeding
        self.combine = linear(2 * config.d_model, config.d_model, bias=False)

    def first(self, state: State) -> State:
        return (*state, torch.zeros_like(state[0])) if self.feeds else state

    def forward(self, x: Tensor, state: State, view: View | None, real: Tensor | None = None) -> Tensor:
        if self.feeds:
            return self.walk(x, state, view, real)
        assert self.cross_attention is not None and view is not None
        h = self.whole(x, state, real)
        return self._attended(self.cross_attention.look_all(h, view), h)

    def step(self, gates: Tensor, state: State, view: View | None, closed: Tensor | None) -> Step:
        assert self.cross_attention is not None and view is not None
        if self.feeds:
            gates, state = self.rnn.feed(gates, state[-1]), state[:-1]
        state = self.rnn.step(gates, state)
        glimpse = self.cross_attention.look(state[self.top], view, closed)
        h = self._attended(glimpse.context, state[self.top])
        return Step((*state, h) if self.feeds else state, h, glimpse)

    def _attended(self, context: Tensor, h: Tensor) -> Tensor:
        """h̃ = tanh(W_c [c; h]), eq. 5."""
        return torch.tanh(self.combine(torch.cat([context, h], dim=-1)))


class BahdanauDecoder(PlainDecoder):
    """Looks before each step, from the state it is in. The output reads token, state and context through a maxout:
    t_i = max over pairs of W [y_i-1; s_i; c_i] (eq. 4 and A.2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, d_fed=config.d_model)
        self.readout = linear(self.d_embed + 2 * config.d_model, 2 * config.d_model)

    def forward(self, x: Tensor, state: State, view: View | None, real: Tensor | None = None) -> Tensor:
        return self.walk(x, state, view, real)

    def step(self, gates: Tensor, state: State, view: View | None, closed: Tensor | None) -> Step:
        assert self.cross_attention is not None and view is not None
        glimpse = self.cross_attention.look(state[self.top], view, closed)
        state = self.rnn.step(self.rnn.feed(gates, glimpse.context), state)
        return Step(state, state[self.top], glimpse)

    def output(self, x: Tensor, h: Tensor, contexts: Tensor) -> Tensor:
        return self.readout(torch.cat([x, h, contexts], dim=-1)).unflatten(-1, (-1, 2)).amax(-1)


def _held(real: Tensor, new: State, old: State) -> State:
    return tuple(torch.where(real[:, None], after, before) for after, before in zip(new, old, strict=True))


def linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    """A Linear with Xavier-uniform weights and no bias to begin with."""
    made = nn.Linear(d_in, d_out, bias=bias)
    nn.init.xavier_uniform_(made.weight)
    if bias:
        nn.init.zeros_(made.bias)
    return made
