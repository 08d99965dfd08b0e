"""Linear attention: the weights are dot products of feature maps, so the output takes O(T) time.

    weight_ij = φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j)        o_i = φ(q_i) (Σ_j φ(k_j) v_jᵀ) / φ(q_i)·Σ_j φ(k_j)

The sum in parentheses is the same for every query, or a running sum with a causal mask (Katharopoulos et al. 2020,
eq. 4-12).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .frame import Frame, check_heads
from .mask import And
from .masks import Causal, Mask
from .mechanisms import Mechanism, Operands, Prepared, by_group, by_head
from .reference import reference
from .score_matrix import AttentionCall

CHUNK = 64  # tokens per chunk of the causal form; per token, scores cost O(chunk) and states O(D² / chunk)


class Kernel(Mechanism):
    """s_ij = φ(q_i)·φ(k_j) with φ > 0, and weights s / Σ s. ``queries`` and ``keys`` are φ."""

    normaliser = "linear"
    kind = "kernel"

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, frame: Frame) -> Prepared:
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q has head width {q.shape[-1]} but k has {k.shape[-1]}")
        return super().prepare(q, k, v, mask, frame)

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return by_head(by_group(q, k.shape[1]) @ k.transpose(-1, -2), q.shape[1])


class Linear(Kernel):
    """Katharopoulos et al. 2020, eq. 7: φ(x) = elu(x) + 1; not an approximation of softmax."""

    name = "linear"

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Linear:
        return cls()

    def queries(self, q: Tensor) -> Tensor:
        return _elu_plus_one(q)

    def keys(self, k: Tensor) -> Tensor:
        return _elu_plus_one(k)

    def __repr__(self) -> str:
        return "Linear()"


def _elu_plus_one(x: Tensor) -> Tensor:
    """e^x below 0, x + 1 above; F.elu(x) + 1 would round to 0 for very negative x."""
    return x.clamp(max=0).exp() + x.relu()


class Performer(nn.Module, Kernel):
    """FAVOR+ (Choromanski et al. 2021, §2.3-2.4): φ(x) = exp(ωᵀx - |x|²/2) / √m with m random orthogonal ω ~ N(0, I).

    An unbiased estimate of the softmax kernel: E[φ(q)·φ(k)] = exp(q·k), with q and k first multiplied by √scale. The
    relative standard deviation is at most √((exp(|q + k|²) - 1) / m) (lemma 2), so it is accurate only for small q and
    k: at D = 16 and m = 1024 the output is off by 90 % for unit-variance q and k, and by 10 % at half that size.
    """

    name = "performer"
    omega: Tensor

    # Factors that cancel in the weights keep φ in the range of fp32. The factor of the keys is a constant: with a
    # maximum over the keys, future tokens and padding would change earlier outputs. ωᵀx - |x|²/2 ≤ z²/2, where
    # z = ωᵀx/|x| is standard normal: the upper end of the range is 8 standard deviations, the lower end keys of rms 5
    # at D = 64.
    _key_shift = 20.0
    _key_range = 55.0
    _query_floor = 1e-7  # relative to a query's largest feature; bounds the gradients

    def __init__(self, d_head: int, n_features: int = 256, scale: float | None = None, seed: int = 0) -> None:
        super().__init__()
        if d_head < 1 or n_features < 1:
            raise ValueError(f"d_head={d_head} and n_features={n_features} must be at least 1")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale={scale} must be positive; q and k are multiplied by its square root")
        self.scale = 1 / math.sqrt(d_head) if scale is None else scale
        self.register_buffer("omega", torch.empty(n_features, d_head))
        self.redraw(seed)

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Performer:
        return cls(d_head, config.mixing.size_of(config.mixer_size), config.attention_scale)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw new features; the same seed gives the same features on every device."""
        n_features, d_head = self.omega.shape
        self.omega.copy_(orthogonal_gaussian(n_features, d_head, torch.Generator().manual_seed(seed)))

    def features(self, x: Tensor) -> Tensor:
        """φ(x) as in the paper, (B, H, T, m); may over- or underflow."""
        return self._log_features(x).exp()

    def queries(self, q: Tensor) -> Tensor:
        """φ(q) scaled so that each query's largest feature is 1; the factor cancels in the weights."""
        logs = self._log_features(q)
        return ((logs - logs.detach().amax(-1, keepdim=True)).exp() + self._query_floor).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        """φ(k) times a constant, clamped to the range of fp32."""
        logs = self._log_features(k) + self._key_shift
        return logs.clamp(-self._key_range, self._key_range).exp().to(k.dtype)

    def _log_features(self, x: Tensor) -> Tensor:
        n_features, d_head = self.omega.shape
        if x.shape[-1] != d_head:
            raise ValueError(f"Performer has d_head={d_head}, got head width {x.shape[-1]}")
        if x.dtype == torch.float16:
            raise TypeError("Performer's features exceed the range of float16; use bfloat16 or float32")
        x = x.to(torch.promote_types(x.dtype, torch.float32)) * math.sqrt(self.scale)
        with _full_precision(x):  # these are exponents: a rounding error becomes a factor of φ
            along = x @ self.omega.to(x.dtype).T
        return along - x.square().sum(-1, keepdim=True) / 2 - math.log(n_features) / 2

    def extra_repr(self) -> str:
        n_features, d_head = self.omega.shape
        return f"d_head={d_head}, n_features={n_features}, scale={self.scale:.4g}"


def orthogonal_gaussian(n_rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Rows ~ N(0, I), orthogonal within each block of ``width`` rows (Choromanski et al. 2021, §2.4)."""

    def gaussian() -> Tensor:
        return torch.randn(width, width, generator=generator, dtype=torch.float64)

    blocks = []
    for _ in range(-(-n_rows // width)):
        directions, r = torch.linalg.qr(gaussian())
        directions = directions * r.diagonal().sign()  # makes them uniformly distributed
        blocks.append(directions.T * gaussian().norm(dim=1, keepdim=True))
    return torch.cat(blocks)[:n_rows]


def linear(call: AttentionCall) -> Tensor:
    """The output (B, H, T, D) in O(T), for causal and padding masks.

    If positions are not consecutive (cache slots), a causal mask is computed by the reference.
    """
    causal, rest = _split_causal(call.mask)
    if causal and call.frame.steady is None:
        return reference(call)[0]
    exact = torch.promote_types(call.v.dtype, torch.float32)  # the sums run over the whole length
    q, k, v = call.q.to(exact), call.k.to(exact), with_ones(call.v.to(exact))
    visible = visible_keys(rest, call.frame)
    if visible is not None:
        k = k.masked_fill(~visible, 0)
    with _full_precision(q):
        if causal:
            assert call.frame.steady is not None
            sums = causal_sums(q, k, v, call.frame.steady[0] - call.frame.steady[1])
        else:
            sums = by_head(by_group(q, k.shape[1]) @ key_sums(k, v), q.shape[1])
    return divide(sums).to(call.v.dtype)


def _split_causal(mask: Mask | None) -> tuple[bool, Mask | None]:
    """Whether a mask has a causal part, and the rest of it."""
    if isinstance(mask, Causal):
        return True, None
    if isinstance(mask, And):
        (a_causal, a), (b_causal, b) = _split_causal(mask.a), _split_causal(mask.b)
        if a is None or b is None:
            return a_causal or b_causal, b if a is None else a
        return a_causal or b_causal, a & b
    return False, mask


def visible_keys(mask: Mask | None, frame: Frame) -> Tensor | None:
    """Which keys a padding mask leaves visible, (B or 1, 1, S, 1); None if all are visible."""
    if mask is not None:  # padding depends on the key only, so one query is enough
        return mask.tile(slice(0, 1), slice(None), frame).transpose(-1, -2)
    if not frame.may_have_gaps:
        return None
    present = frame.k_pos >= 0
    return present[None, None, :, None] if present.dim() == 1 else present[:, None, :, None]


def _full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast if it is on; otherwise a null context, which adds no region to a traced graph."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def with_ones(v: Tensor) -> Tensor:
    """v with a column of ones, so that Σ φ(k) is computed together with Σ φ(k) v."""
    return F.pad(v, (0, 1), value=1.0)


def divide(sums: Tensor) -> Tensor:
    """Weighted sums of (v, 1) → weighted means of v; 0 with gradient 0 if no key is visible."""
    values, total = sums[..., :-1], sums[..., -1:]
    return values / torch.where(total == 0, 1, total)


def key_sums(k: Tensor, v: Tensor) -> Tensor:
    """Σ_j φ(k_j) (v_j, 1)ᵀ, (B, G, D_φ, D_v + 1)."""
    return k.transpose(-1, -2) @ v


def causal_sums(q: Tensor, k: Tensor, v: Tensor, ahead: int) -> Tensor:
    """Σ_{j ≤ i + ahead} φ(q_i)·φ(k_j) (v_j, 1), (B, H, T, D_v + 1)."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    before = min(max(ahead, 0), n_keys)  # keys that are visible to every query
    n_empty = min(max(-ahead, 0), n_queries)  # queries without a visible key
    paired = min(n_keys - before, n_queries - n_empty)
    start = key_sums(k[:, :, :before], v[:, :, :before])
    # Align the last key visible to a query with that query, and pad with zeros.
    k, v = (_pad(x[:, :, before : before + paired], n_empty, n_queries - n_empty - paired) for x in (k, v))
    return running_sums(q, k, v, start)[0]


def running_sums(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Causal sums of T queries and T keys, starting from the state ``start`` (B, G, D_φ, D_v + 1); and the final state.

    Masked scores are computed inside each chunk; all earlier tokens are one state, a running sum over chunks.
    """
    n_heads, n_queries, (b, g) = q.shape[1], q.shape[2], k.shape[:2]
    size = min(CHUNK, n_queries)
    n_chunks, shared = -(-n_queries // size), n_heads // g
    q, k, v = (_pad(x, 0, n_chunks * size - n_queries) for x in (q, k, v))
    q = q.reshape(b, g, shared, n_chunks, size, -1).transpose(2, 3).reshape(b, g, n_chunks, shared * size, -1)
    k, v = k.reshape(b, g, n_chunks, size, -1), v.reshape(b, g, n_chunks, size, -1)
    states = torch.cat([start[:, :, None], key_sums(k, v)], dim=2).cumsum(2)  # (B, G, chunks + 1, D_φ, D_v + 1)
    scores = (q @ k.transpose(-1, -2)).reshape(b, g, n_chunks, shared, size, size).tril()
    sums = q @ states[:, :, :-1] + scores.reshape(b, g, n_chunks, shared * size, size) @ v
    sums = sums.reshape(b, g, n_chunks, shared, size, -1).transpose(2, 3).reshape(b, n_heads, n_chunks * size, -1)
    return sums[:, :, :n_queries], states[:, :, -1]


def _pad(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (0, 0, before, after)) if before or after else x


class LinearState:
    """Causal linear attention as a recurrent network (Katharopoulos et al. 2020, eq. 16-20), in O(1) memory.

    S_t = S_{t-1} + φ(k_t) v_tᵀ,  z_t = z_{t-1} + φ(k_t),  o_t = φ(q_t) S_t / φ(q_t)·z_t
    """

    def __init__(self, mechanism: Kernel) -> None:
        if not isinstance(mechanism, Kernel):
            raise TypeError(f"LinearState needs a linear mechanism (Linear, Performer), got {type(mechanism).__name__}")
        self.mechanism = mechanism
        self._sums: Tensor | None = None  # (B, G, D_φ, D_v + 1): S and z side by side

    @property
    def state(self) -> Tensor | None:
        """S, (B, G, D_φ, D_v); None before the first token."""
        return None if self._sums is None else self._sums[..., :-1]

    @property
    def normaliser(self) -> Tensor | None:
        """z, (B, G, D_φ); None before the first token."""
        return None if self._sums is None else self._sums[..., -1]

    def update(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output (B, H, T, D) of the next T tokens."""
        check_heads(q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"q has {q.shape[2]} tokens but k has {k.shape[2]}; LinearState needs one key per query")
        dtype, exact = v.dtype, torch.promote_types(v.dtype, torch.float32)
        q, k, v = self.mechanism.queries(q).to(exact), self.mechanism.keys(k).to(exact), with_ones(v.to(exact))
        shape = (*k.shape[:2], k.shape[3], v.shape[3])
        start = k.new_zeros(shape) if self._sums is None else self._sums
        if start.shape != shape:
            held = tuple(start.shape)
            raise ValueError(f"LinearState holds (batch, key heads, features, width + 1) = {held}, got {shape}")
        with _full_precision(q):
            sums, self._sums = running_sums(q, k, v, start)
        return divide(sums).to(dtype)
