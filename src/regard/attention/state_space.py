"""State-space models as the mixer of a layer, in time linear in the length; Mamba-2 (Dao & Gu 2024).

h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ,   y_t = h_t C_t + D x_t       with a state h (P, N) and a scalar A < 0 per head

Unrolled, y = W x with W_ts = (C_t · B_s) exp(Σ_{s<r≤t} Δ_r A) Δ_s: attention without a softmax, with queries C, keys B
and values x. ``scan_recurrent`` is the recurrence; ``scan_chunked`` computes the same by matrix products, with W inside
chunks of the sequence and states between them (the paper's SSD). A cache holds h and the last inputs of the
convolution, independent of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..layers import RMSNorm
from . import taps
from .cache import Cache
from .cache.kv_cache import CacheVersion, n_bytes
from .edits import apply_edits_to_heads, has_edits
from .frame import Frame
from .masks import causal, packed, valid_keys
from .mechanisms import Mechanism, Operands, by_group, by_head
from .score_matrix import AttentionCall

CHUNK = 128  # tokens per chunk; a larger chunk means more work inside chunks and fewer states between them
_CHUNKS_AT_ONCE = 32  # chunks whose states are computed by one matrix product
_LOG_ZERO = -1e4  # logarithm of a decay that is 0 in floating point


def scan_recurrent(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; the reference for ``scan_chunked``.

    x (B, T, H, P), dt (B, T, H), a (H,), b and c (B, T, G, N), ``state`` (B, H, P, N), by default 0
    → y (B, T, H, P) without D x, and the state after the last token.
    """
    group = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(group, 2), c.repeat_interleave(group, 2)  # (B, T, H, N)
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state @ c[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, 1), state


def scan_chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """``scan_recurrent`` by matrix products over chunks.

    ``documents`` (B, T) are the ids of documents packed into a row; states do not cross from one to the next. Decays
    and states are fp32, products have the dtype of x.
    """
    n_batch, length, n_heads, _ = x.shape
    n_groups, size = b.shape[2], min(chunk, length)
    missing = -length % size
    if missing:  # padding has Δ = 0 and leaves the state unchanged
        x, dt, b, c = (F.pad(part, (*(0, 0) * (part.dim() - 2), 0, missing)) for part in (x, dt, b, c))
        documents = None if documents is None else torch.cat([documents, documents[:, -1:].expand(-1, missing)], 1)
    shape = (n_batch, x.shape[1] // size, size)
    with torch.autocast(x.device.type, enabled=False):
        heads = x.view(*shape, n_groups, n_heads // n_groups, -1).permute(0, 1, 3, 4, 2, 5)  # (B, n, G, H/G, L, P)
        keys, queries = (part.view(*shape, n_groups, 1, -1).permute(0, 1, 3, 4, 2, 5) for part in (b, c))
        dt = dt.float().view(*shape, n_groups, -1).permute(0, 1, 3, 4, 2)  # (B, n, G, H/G, L)
        # The log of the decay since the start of the chunk. Differences of long sums lose precision, hence float64,
        # except for half precision, where fp32 is enough.
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        total = (dt.to(wide) * a.to(wide).view(n_groups, -1, 1)).cumsum(-1)
        allowed = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        docs = None if documents is None else documents.view(shape)[:, :, None, None]  # (B, n, 1, 1, L)
        if docs is not None:
            allowed = allowed & (docs[..., :, None] == docs[..., None, :])
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -math.inf)
        weights = (queries @ keys.mT) * torch.exp(between.float()) * dt[..., None, :]  # (B, n, G, H/G, L, L)
        y = (weights.to(x.dtype) @ heads).float()
        to_end = torch.exp((total[..., -1:] - total).float()) * dt
        if docs is not None:
            to_end = to_end * (docs == docs[..., -1:])
        added = ((heads * to_end[..., None].to(x.dtype)).mT @ keys).float()  # (B, n, G, H/G, P, N)
        log_kept = total[..., -1].double()  # (B, n, G, H/G)
        from_start = torch.exp(total.float())
        if docs is not None:
            ends = docs[..., -1]
            starts = torch.cat([docs[:, :1, ..., 0], ends[:, :-1]], 1)  # the document of the state carried into a chunk
            log_kept = log_kept.masked_fill(ends != starts, _LOG_ZERO)
            from_start = from_start * (docs == starts[..., None])
        carried, state = _carry_states(added, log_kept, None if state is None else state.unflatten(1, (n_groups, -1)))
        y = y + (queries @ carried.to(x.dtype).mT).float() * from_start[..., None]
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(n_batch, -1, n_heads, y.shape[-1])
    return y[:, :length].to(x.dtype), state.flatten(1, 2)


def _carry_states(added: Tensor, log_kept: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_{j+1} = exp(log_kept_j) S_j + added_j over chunks j: the state before each chunk, and after the last.

    added (B, n, …, P, N), log_kept (B, n, …). One triangular matrix computes up to _CHUNKS_AT_ONCE chunks.
    """
    state = torch.zeros_like(added[:, 0]) if state is None else state.float()
    states = []
    for start in range(0, added.shape[1], _CHUNKS_AT_ONCE):
        chunks = slice(start, start + _CHUNKS_AT_ONCE)
        total = F.pad(log_kept[:, chunks].movedim(1, -1), (1, 0)).cumsum(-1)  # (B, …, n + 1)
        n = total.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=total.device).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -math.inf)
        parts = torch.cat([state[:, None], added[:, chunks]], 1).movedim(1, -3).flatten(-2)  # (B, …, n + 1, P N)
        after = (torch.exp(between).float() @ parts).unflatten(-1, added.shape[-2:]).movedim(-3, 1)
        states.append(after[:, :-1])
        state = after[:, -1]
    return torch.cat(states, 1), state


class StateSpaceCache(Cache):
    """The state (B, H, P, N) of a layer and the last inputs of its convolution (B, k - 1, C)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.state: Tensor | None = None
        self.inputs: Tensor | None = None
        self._lengths = torch.zeros(1, dtype=torch.int64)
        self.version = CacheVersion()

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def store(self, state: Tensor, inputs: Tensor, n_tokens: int | Tensor) -> None:
        """Replace the content after ``n_tokens`` more tokens, an int or (B,)."""
        self.state, self.inputs = state, inputs
        self._lengths = self._lengths.to(state.device) + n_tokens

    def reorder(self, beam_index: Tensor) -> None:
        if self.state is None or self.inputs is None:
            return
        self.state, self.inputs = self.state.index_select(0, beam_index), self.inputs.index_select(0, beam_index)
        if len(self._lengths) > 1:
            self._lengths = self._lengths.index_select(0, beam_index)
        self.version = CacheVersion()

    def check_truncate(self, length: int | Tensor) -> None:
        super().check_truncate(length)
        most = length.to(self._lengths.device) if isinstance(length, Tensor) else length
        if bool((self._lengths > most).any()):
            raise ValueError("a state-space cache cannot be truncated: it holds one sum over all tokens")

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)

    def memory(self) -> int:
        return n_bytes(self.state, self.inputs, self._lengths)


class StateSpaceWeights(Mechanism):
    """W of a state-space model: the queries are C, the keys B Δ, both with the log of the decay so far appended.

    Weights may be negative, and rows do not sum to 1.
    """

    name = "state-space"
    kind = "shares"
    normaliser = "none"

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        products = by_head(by_group(q[..., :-1], k.shape[1]) @ k[..., :-1].mT, q.shape[1])
        return products * torch.exp((q[..., -1:] - k[..., -1:].mT).clamp(max=0))  # > 0 only for masked future keys


class StateSpaceMixer(nn.Module):
    """Base class of state-space layers: projection, short convolution, state-space model, gate, projection.

    Subclasses define the projections and the model. (B, T, M) → (B, T, M)
    """

    recurrence: Callable[..., tuple[Tensor, Tensor]]  # token by token, for a single one
    scan: Callable[..., tuple[Tensor, Tensor]]  # the same for many tokens
    n_heads: int
    mechanism: Mechanism
    dt_bias: nn.Parameter
    log_a: nn.Parameter  # A = -exp(log_a)
    skip: nn.Parameter  # D
    w_out: nn.Linear

    def __init__(self, width: int, conv_size: int) -> None:
        """The convolution has ``width`` channels and spans ``conv_size`` tokens."""
        super().__init__()
        self.conv_weight = nn.Parameter(torch.empty(width, conv_size).uniform_(-(conv_size**-0.5), conv_size**-0.5))
        self.conv_bias = nn.Parameter(torch.zeros(width))

    def forward(
        self,
        x: Tensor,
        *,
        cache: StateSpaceCache | None = None,
        real: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """``real`` (B, T) is False for padding; ``documents`` (B, T) are the ids of documents packed into a row."""
        inputs, gate, step = self._project(x)
        inputs = _zero_padding(inputs, real)
        inputs, last_inputs = self._convolve(inputs, None if cache is None else cache.inputs, real, documents)
        values, step, b, c = self._select(_zero_padding(inputs, real), step)
        dt = _zero_padding(F.softplus(step.float() + self.dt_bias.float()), real)
        a, state = -torch.exp(self.log_a.float()), None if cache is None else cache.state
        with torch.autocast(x.device.type, enabled=False):
            if x.shape[1] == 1:
                y, state = self.recurrence(values.float(), dt, a, b.float(), c.float(), state)
            else:
                y, state = self.scan(values, dt, a, b, c, state, documents)
        if cache is not None:
            cache.store(state, last_inputs, x.shape[1] if real is None else real.sum(1))
        y, values = (part.to(values.dtype).reshape(*x.shape[:2], self.n_heads, -1) for part in (y, values))
        if cache is None and (taps.is_recording() or has_edits(self)):  # a cache holds no earlier keys to show
            y = self._tap_and_edit(y, values, *self._implied_heads(dt, a, b, c), real, documents)
        y = (y + self.skip.to(y.dtype)[:, None] * values).flatten(2)
        return self.w_out(self._gate(y, gate).to(x.dtype))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs of the convolution, the gate and, if it does not depend on the convolution, Δ."""
        raise NotImplementedError

    def _select(self, inputs: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The values x, Δ before its bias and softplus, B and C, from the output of the convolution."""
        raise NotImplementedError

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * F.silu(gate)

    def _implied_heads(self, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, T, …) of the layer's mechanism."""
        raise NotImplementedError

    def _convolve(
        self, x: Tensor, before: Tensor | None, real: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The causal depthwise convolution over k tokens with SiLU, and the last k - 1 inputs, for the next tokens."""
        n_batch, length, width = x.shape
        k = self.conv_weight.shape[1]
        before = x.new_zeros(n_batch, k - 1, width) if before is None else before.to(x.dtype)
        padded = torch.cat([before, x], 1)
        y = self.conv_bias.to(x.dtype)
        for j, weight in enumerate(self.conv_weight.to(x.dtype).unbind(1)):
            part = padded[:, j : j + length] * weight
            ahead = k - 1 - j
            if documents is not None and ahead:
                same = documents == F.pad(documents, (ahead, 0), value=-1)[:, :length]
                part = part * same[..., None]
            y = y + part
        if real is None:
            return F.silu(y), padded[:, length:]
        last = torch.where(real, torch.arange(1, length + 1, device=x.device), 0).amax(1)  # one past the last token
        index = last[:, None] + torch.arange(k - 1, device=x.device)
        return F.silu(y), padded.gather(1, index[..., None].expand(-1, -1, width))

    def _tap_and_edit(
        self, y: Tensor, values: Tensor, q: Tensor, k: Tensor, real: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        """Record the heads' output y (B, T, H, P) with its mechanism's q and k (B, H, T, …); return y after edits."""
        mask = causal()
        if real is not None:
            mask = mask & valid_keys(real)
        if documents is not None:
            mask = mask & packed(documents)
        call = AttentionCall(q, k, mask, None, self.mechanism, Frame.of(q, k), values.transpose(1, 2))
        return apply_edits_to_heads(self, call, taps.tap_attention(self, call, y.transpose(1, 2))).transpose(1, 2)


def _zero_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """x (B, T, …) with 0 where ``real`` (B, T) is False, so that padding contributes nothing."""
    return x if real is None else x.masked_fill(~real[..., None], 0)


def initial_step_bias(width: int) -> Tensor:
    """The initial bias b of the step size Δ = softplus(… + b): softplus(b) is log-uniform between 0.001 and 0.1."""
    dt = torch.exp(torch.empty(width).uniform_(math.log(1e-3), math.log(1e-1)))
    return dt + torch.log(-torch.expm1(-dt))


class Mamba2(StateSpaceMixer):
    """Mamba-2's layer: ``n_heads`` heads of width ``d_head`` (P) in ``n_groups`` groups.

    The heads of a group share B and C, of width ``d_state`` (N).
    """

    recurrence, scan = staticmethod(scan_recurrent), staticmethod(scan_chunked)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        d_state: int,
        n_groups: int = 1,
        conv_size: int = 4,
        *,
        in_bias: bool = False,
        out_bias: bool = False,
        eps: float = 1e-5,
    ) -> None:
        width = n_heads * d_head + 2 * n_groups * d_state
        super().__init__(width, conv_size)
        self.n_heads, self.d_head, self.n_groups, self.d_state = n_heads, d_head, n_groups, d_state
        self.d_inner, self.d_shared = n_heads * d_head, n_groups * d_state
        self.w_in = nn.Linear(d_model, self.d_inner + width + n_heads, bias=in_bias)
        self.dt_bias = nn.Parameter(initial_step_bias(n_heads))
        self.log_a = nn.Parameter(torch.log(torch.empty(n_heads).uniform_(1, 16)))  # A between -1 and -16
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.norm = RMSNorm(self.d_inner, eps)
        self.w_out = nn.Linear(self.d_inner, d_model, bias=out_bias)
        self.mechanism = StateSpaceWeights()

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Mamba2:
        return cls(
            config.d_model,
            n_heads,
            d_head,
            config.mixing.size_of(config.mixer_size),
            n_groups=config.n_kv_heads or 1,
            conv_size=config.conv_size,
            in_bias=config.qkv_bias,
            out_bias=config.out_bias,
            eps=config.norm_eps,
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, inputs, step = self.w_in(x).split((self.d_inner, len(self.conv_bias), self.n_heads), -1)
        return inputs, gate, step

    def _select(self, inputs: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert step is not None
        values, b, c = inputs.split((self.d_inner, self.d_shared, self.d_shared), -1)
        b, c = (part.unflatten(-1, (self.n_groups, -1)) for part in (b, c))
        return values.unflatten(-1, (self.n_heads, -1)), step, b, c

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.norm(y.float() * F.silu(gate.float()))

    def _implied_heads(self, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, T, N + 1) of ``StateSpaceWeights``."""
        decay = (dt.double() * a.double()).cumsum(1).transpose(1, 2)[..., None]  # (B, H, T, 1)
        group = self.n_heads // self.n_groups
        keys = b.repeat_interleave(group, 2).double() * dt[..., None]
        q = torch.cat([c.repeat_interleave(group, 2).transpose(1, 2).double(), decay], -1)
        return q, torch.cat([keys.transpose(1, 2), decay], -1)
