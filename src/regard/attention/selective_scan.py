"""Mamba (Gu & Dao 2023): a state-space model with N states per channel, each with its own decay.

h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_t,   y_t = h_t · C_t + D x_t       with h (N) and A (N) < 0 per channel

Unrolled, y = W x with W_ts = Σ_n C_tn B_sn exp(Σ_{s<r≤t} Δ_r A_n) Δ_s, one matrix per channel; here a channel is a head
of width 1. ``scan_selective_recurrent`` is the recurrence; ``scan_selective`` computes the same in √T steps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .mechanisms import Mechanism, Operands
from .state_space import StateSpaceMixer, initial_step_bias


def scan_selective_recurrent(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; the reference for ``scan_selective``.

    x and dt (B, T, C), a (C, N), b and c (B, T, N), ``state`` (B, C, N), by default 0
    → y (B, T, C) without D x, and the state after the last token.
    """
    state = x.new_zeros(x.shape[0], *a.shape) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * a)
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append((state @ c[:, t, :, None])[..., 0])
    return torch.stack(outputs, 1), state


def scan_selective(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``scan_selective_recurrent`` in fp32 and √T steps.

    All chunks of √T tokens advance together, each from a zero state; then the states of earlier chunks are added.
    ``documents`` (B, T) are the ids of documents packed into a row; states do not cross from one to the next.
    """
    n_batch, length, width = x.shape
    size = math.isqrt(length - 1) + 1
    x, dt, b, c = (part.float() for part in (x, dt, b, c))
    decay, added = torch.exp(dt[..., None] * a.float()), (dt * x)[..., None] * b[:, :, None]  # (B, T, C, N)
    if documents is not None:  # reset the state at the first token of a document
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        decay = decay.masked_fill(starts[..., None, None], 0)
    if missing := -length % size:  # padding leaves the state unchanged
        decay = F.pad(decay, (0, 0, 0, 0, 0, missing), value=1.0)
        added, c = (F.pad(part, (*(0, 0) * (part.dim() - 2), 0, missing)) for part in (added, c))
    decay, added = (part.unflatten(1, (-1, size)) for part in (decay, added))  # (B, chunks, L, C, N)
    c = c.unflatten(1, (-1, size))[..., None]  # (B, chunks, L, N, 1)
    own = torch.zeros_like(added[:, :, 0])  # the state of each chunk, from its own tokens
    kept = torch.ones_like(decay[:, :, 0])  # the factor of the state before the chunk
    outputs, factors = [], []
    for t in range(size):
        own, kept = decay[:, :, t] * own + added[:, :, t], decay[:, :, t] * kept
        outputs.append((own @ c[:, :, t])[..., 0])
        factors.append(kept)
    state = torch.zeros_like(own[:, 0]) if state is None else state.float()
    before = []
    for chunk in range(own.shape[1]):
        before.append(state)
        state = kept[:, chunk] * state + own[:, chunk]
    carried = torch.stack(factors, 2) * torch.stack(before, 1)[:, :, None]  # (B, chunks, L, C, N)
    y = torch.stack(outputs, 2) + (carried @ c)[..., 0]
    return y.reshape(n_batch, -1, width)[:, :length], state


class SelectiveWeights(Mechanism):
    """W of each channel: the queries are C, the keys B Δ, both with the logs of the decays so far appended.

    Weights may be negative, and rows do not sum to 1.
    """

    name = "selective"
    kind = "shares"
    normaliser = "none"

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        (c, later), (b, earlier) = q.chunk(2, -1), k.chunk(2, -1)
        weights = q.new_zeros(*q.shape[:-1], k.shape[2])
        for n in range(c.shape[-1]):  # one state at a time, instead of N matrices in memory
            between = (later[..., n, None] - earlier[..., None, :, n]).clamp(max=0)  # > 0 only for masked future keys
            weights = weights + c[..., n, None] * b[..., None, :, n] * torch.exp(between)
        return weights


class Mamba(StateSpaceMixer):
    """Mamba's layer: ``d_inner`` channels, each recorded as a head, with ``d_state`` states (N).

    Δ, B and C are projections of the convolution's output; that of Δ has rank ``step_rank``.
    """

    recurrence, scan = staticmethod(scan_selective_recurrent), staticmethod(scan_selective)

    def __init__(
        self,
        d_model: int,
        d_inner: int,
        d_state: int = 16,
        step_rank: int | None = None,
        conv_size: int = 4,
        *,
        in_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        super().__init__(d_inner, conv_size)
        self.n_heads, self.d_head, self.d_inner, self.d_state = d_inner, 1, d_inner, d_state
        self.step_rank = -(-d_model // 16) if step_rank is None else step_rank
        self.w_in = nn.Linear(d_model, 2 * d_inner, bias=in_bias)
        self.w_select = nn.Linear(d_inner, self.step_rank + 2 * d_state, bias=False)
        self.w_step = nn.Linear(self.step_rank, d_inner, bias=False)
        self.dt_bias = nn.Parameter(initial_step_bias(d_inner))
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(d_inner, 1))
        self.skip = nn.Parameter(torch.ones(d_inner))
        self.w_out = nn.Linear(d_inner, d_model, bias=out_bias)
        self.mechanism = SelectiveWeights()

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Mamba:
        return cls(
            config.d_model,
            n_heads * d_head,
            config.mixing.size_of(config.mixer_size),
            config.step_rank,
            conv_size=config.conv_size,
            in_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, gate = self.w_in(x).chunk(2, -1)
        return inputs, gate, None

    def _select(self, inputs: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        low_rank, b, c = self.w_select(inputs).split((self.step_rank, self.d_state, self.d_state), -1)
        return inputs, self.w_step(low_rank), b, c

    def _implied_heads(self, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, C, T, 2 N) of ``SelectiveWeights``."""
        decay = (dt.double()[..., None] * a.double()).cumsum(1).transpose(1, 2)  # (B, C, T, N)
        keys = dt.double().transpose(1, 2)[..., None] * b.double()[:, None]
        queries = c.double()[:, None].expand_as(decay)
        return torch.cat([queries, decay], -1), torch.cat([keys, decay], -1)
