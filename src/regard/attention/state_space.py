"""Mamba-2 (Dao & Gu 2024): a state-space model as the mixer of a layer, in time linear in the text.

h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ,   y_t = h_t C_t + D x_t       a state h (P, N) for each head, A < 0 a number

Unrolled, y = W x with W_ts = (C_t · B_s) exp(Σ_{s<r≤t} Δ_r A) Δ_s: attention without a softmax, whose queries are C,
keys B and values x. ``scan_recurrent`` is the recurrence, ``scan_chunked`` the same by matrices: W inside chunks of the
text, states between them (the paper's SSD). A cache holds h and the convolution's last inputs, whatever the length.
"""

from __future__ import annotations

import math

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
from .masks import Mask, causal, valid_keys
from .mechanisms import Mechanism, Operands, by_group, by_head
from .score_matrix import AttentionCall

CHUNK = 128  # tokens; the work inside a chunk grows with it, the number of states falls
_CARRIED = 32  # chunks whose states are carried over by one product
_NOTHING = -1e4  # logarithm of a decay that nothing survives


def scan_recurrent(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: the reference.

    x (B, T, H, P), dt (B, T, H), a (H,), b and c (B, T, G, N); ``state`` (B, H, P, N), else 0
    → y (B, T, H, P) without D x, and the state after the last token.
    """
    shared_by = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(shared_by, 2), c.repeat_interleave(shared_by, 2)  # (B, T, H, N)
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
    """``scan_recurrent`` by matrix products over chunks; ``documents`` (B, T) number texts that know nothing of each
    other. Decays and states are fp32, products in the dtype of x."""
    n_batch, length, n_heads, _ = x.shape
    n_groups, size = b.shape[2], min(chunk, length)
    missing = -length % size
    if missing:  # added tokens have Δ = 0: they change no state
        x, dt, b, c = (F.pad(part, (*(0, 0) * (part.dim() - 2), 0, missing)) for part in (x, dt, b, c))
        documents = None if documents is None else torch.cat([documents, documents[:, -1:].expand(-1, missing)], 1)
    shape = (n_batch, x.shape[1] // size, size)
    with torch.autocast(x.device.type, enabled=False):
        heads = x.view(*shape, n_groups, n_heads // n_groups, -1).permute(0, 1, 3, 4, 2, 5)  # (B, n, G, H/G, L, P)
        keys, queries = (part.view(*shape, n_groups, 1, -1).permute(0, 1, 3, 4, 2, 5) for part in (b, c))
        dt = dt.float().view(*shape, n_groups, -1).permute(0, 1, 3, 4, 2)  # (B, n, G, H/G, L)
        # Log of the decay since the chunk began. Differences of long sums lose digits, which bf16 has not anyway.
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        total = (dt.to(wide) * a.to(wide).view(n_groups, -1, 1)).cumsum(-1)
        allowed = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        own = None if documents is None else documents.view(shape)[:, :, None, None]  # (B, n, 1, 1, L)
        if own is not None:
            allowed = allowed & (own[..., :, None] == own[..., None, :])
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -math.inf)
        weights = (queries @ keys.mT) * torch.exp(between.float()) * dt[..., None, :]  # (B, n, G, H/G, L, L)
        y = (weights.to(x.dtype) @ heads).float()
        to_end = torch.exp((total[..., -1:] - total).float()) * dt
        if own is not None:
            to_end = to_end * (own == own[..., -1:])
        written = ((heads * to_end[..., None].to(x.dtype)).mT @ keys).float()  # (B, n, G, H/G, P, N)
        kept = total[..., -1].double()  # (B, n, G, H/G)
        before = own
        if own is not None:
            ends = own[..., -1]
            starts = torch.cat([own[:, :1, ..., 0], ends[:, :-1]], 1)  # the document that a carried state is of
            kept, before = kept.masked_fill(ends != starts, _NOTHING), own == starts[..., None]
        carried, state = _carry_states(written, kept, None if state is None else state.unflatten(1, (n_groups, -1)))
        seen = torch.exp(total.float()) if before is None else torch.exp(total.float()) * before
        y = y + (queries @ carried.to(x.dtype).mT).float() * seen[..., None]
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(n_batch, -1, n_heads, y.shape[-1])
    return y[:, :length].to(x.dtype), state.flatten(1, 2)


def _carry_states(written: Tensor, kept: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_{j+1} = exp(kept_j) S_j + written_j over chunks j: the state before each chunk, and that after the last.

    written (B, n, …, P, N), kept (B, n, …). As many chunks at once as one triangular matrix serves.
    """
    state = torch.zeros_like(written[:, 0]) if state is None else state.float()
    states = []
    for start in range(0, written.shape[1], _CARRIED):
        some, own = written[:, start : start + _CARRIED], kept[:, start : start + _CARRIED]
        total = F.pad(own.movedim(1, -1), (1, 0)).cumsum(-1)  # (B, …, n + 1)
        n = total.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=total.device).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -math.inf)
        parts = torch.cat([state[:, None], some], 1).movedim(1, -3).flatten(-2)  # (B, …, n + 1, P N)
        after = (torch.exp(between).float() @ parts).unflatten(-1, written.shape[-2:]).movedim(-3, 1)
        states.append(after[:, :-1])
        state = after[:, -1]
    return torch.cat(states, 1), state


class StateSpaceCache(Cache):
    """What a layer keeps of a text: the state (B, H, P, N) and the last inputs of the convolution (B, k - 1, C)."""

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
        """After so many more tokens, an int or (B,)."""
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
        if bool(
            (self._lengths > (length if not isinstance(length, Tensor) else length.to(self._lengths.device))).any()
        ):
            raise ValueError("a state cannot be taken back: it holds the text as one sum, not token by token")

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)

    def memory(self) -> int:
        return n_bytes(self.state, self.inputs, self._lengths)


class StateSpaceWeights(Mechanism):
    """W of a state-space model, from C with the logarithm of the decay so far as queries, and B Δ with it as keys.

    Weights may be negative, and a row has no sum in particular.
    """

    name = "state-space"
    kind = "shares"
    normaliser = "none"

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        products = by_head(by_group(q[..., :-1], k.shape[1]) @ k[..., :-1].mT, q.shape[1])
        return products * torch.exp((q[..., -1:] - k[..., -1:].mT).clamp(max=0))  # no key lies ahead


class Mamba2(nn.Module):
    """Mamba-2's layer: a short convolution, the state-space model, a gate, and maps into and out of them.

    ``n_heads`` heads of width ``d_head`` (P); ``n_groups`` of them share B and C of width ``d_state`` (N).
    (B, T, M) → (B, T, M)
    """

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
        super().__init__()
        self.n_heads, self.d_head, self.n_groups, self.d_state = n_heads, d_head, n_groups, d_state
        self.d_inner, self.d_shared = n_heads * d_head, n_groups * d_state
        width = self.d_inner + 2 * self.d_shared
        self.w_in = nn.Linear(d_model, self.d_inner + width + n_heads, bias=in_bias)
        self.conv_weight = nn.Parameter(torch.empty(width, conv_size).uniform_(-(conv_size**-0.5), conv_size**-0.5))
        self.conv_bias = nn.Parameter(torch.zeros(width))
        # Δ begins between 0.001 and 0.1, A between -1 and -16.
        dt = torch.exp(torch.empty(n_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is Δ
        self.log_a = nn.Parameter(torch.log(torch.empty(n_heads).uniform_(1, 16)))
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.norm = RMSNorm(self.d_inner, eps)
        self.w_out = nn.Linear(self.d_inner, d_model, bias=out_bias)
        self.mechanism = StateSpaceWeights()

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Mamba2:
        return cls(
            *(config.d_model, n_heads, d_head, config.mixing.size_of(config.mixer_size)),
            n_groups=config.n_kv_heads or 1,
            conv_size=config.conv_size,
            in_bias=config.qkv_bias,
            out_bias=config.out_bias,
            eps=config.norm_eps,
        )

    def forward(
        self,
        x: Tensor,
        *,
        cache: StateSpaceCache | None = None,
        real: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """``real`` (B, T) is False for padding; ``documents`` (B, T) numbers texts packed into one row."""
        gate, mixed, dt = self.w_in(x).split((self.d_inner, len(self.conv_bias), self.n_heads), -1)
        if real is not None:  # padding is as if it were not there
            mixed = mixed.masked_fill(~real[..., None], 0)
        mixed, last_inputs = self._convolve(mixed, None if cache is None else cache.inputs, real, documents)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        if real is not None:
            mixed, dt = mixed.masked_fill(~real[..., None], 0), dt.masked_fill(~real[..., None], 0)
        values, b, c = mixed.split((self.d_inner, self.d_shared, self.d_shared), -1)
        values = values.unflatten(-1, (self.n_heads, -1))
        b, c = (part.unflatten(-1, (self.n_groups, -1)) for part in (b, c))
        a, before = -torch.exp(self.log_a.float()), None if cache is None else cache.state
        scan = scan_recurrent if x.shape[1] == 1 else scan_chunked
        options = {} if documents is None or x.shape[1] == 1 else {"documents": documents}
        y, state = scan(values, dt, a, b, c, before, **options)
        if cache is not None:
            cache.store(state, last_inputs, x.shape[1] if real is None else real.sum(1))
        y = self._show(y.to(values.dtype), values, dt, a, b, c, real, cache)
        y = y + self.skip.to(y.dtype)[:, None] * values
        y = self.norm(y.flatten(2).float() * F.silu(gate.float()))
        return self.w_out(y.to(x.dtype))

    def _convolve(
        self, x: Tensor, before: Tensor | None, real: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """silu of the sum over the last k tokens, each channel by itself; and the last k - 1 inputs, for the next."""
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
        places = last[:, None] + torch.arange(k - 1, device=x.device)
        return F.silu(y), padded.gather(1, places[..., None].expand(-1, -1, width))

    def _show(
        self,
        y: Tensor,
        values: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        real: Tensor | None,
        cache: StateSpaceCache | None,
    ) -> Tensor:
        """y (B, T, H, P) as a recorder sees it and edits leave it; with a cache there are no keys to show."""
        if cache is not None or not (taps._recorder is not None or has_edits(self)):
            return y
        n_batch, length = dt.shape[:2]
        heads = (y.transpose(1, 2), values.transpose(1, 2))
        decay = (dt.double() * a.double()).cumsum(1).transpose(1, 2)[..., None]  # (B, H, T, 1)
        shared_by = self.n_heads // self.n_groups
        keys = b.repeat_interleave(shared_by, 2).double() * dt[..., None]
        q = torch.cat([c.repeat_interleave(shared_by, 2).transpose(1, 2).double(), decay], -1)
        frame = Frame.aligned(n_batch, self.n_heads, length, length, y.device)
        mask: Mask = causal() if real is None else causal() & valid_keys(real)
        k = torch.cat([keys.transpose(1, 2), decay], -1)
        call = AttentionCall(q, k, mask, None, self.mechanism, frame, heads[1])
        return apply_edits_to_heads(self, call, taps.tap_attention(self, call, heads[0])).transpose(1, 2)
