"""What the attention tests share: inputs, mechanisms by name, and the formula written a second time, independently."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Additive, Concat, Dot, Frame, General, Linear, Linformer, Mechanism, Performer
from regard.attention.biases import Bias
from regard.attention.masks import Mask
from regard.attention.mechanisms import CappedDot, Sigmoid

DEVICES_HERE = ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *(["mps"] if torch.mps.is_available() else [])]


@dataclass(frozen=True)
class Sizes:
    """(B, H, G, T, S, D), small unless a test says otherwise."""

    b: int = 2
    h: int = 4
    g: int = 4
    t: int = 5
    s: int = 5
    d: int = 3


def inputs(
    sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu", grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, G, S, D); the same numbers on every device."""
    draw = torch.Generator().manual_seed(seed)

    def heads(n_heads: int, length: int) -> Tensor:
        x = torch.randn(sizes.b, n_heads, length, sizes.d, generator=draw, dtype=torch.float64)
        return x.to(device=device, dtype=dtype).requires_grad_(grad)

    return heads(sizes.h, sizes.t), heads(sizes.g, sizes.s), heads(sizes.g, sizes.s)


class Distance(nn.Module, Mechanism):
    """A mechanism as a reader would write one: s_ij = -t |q_i - k_j|², t learned, one for each head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.rand(n_heads) + 0.5)

    def keys(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(len(self.t) // k.shape[1], dim=1)

    def operands(self, frame: Frame) -> tuple[Tensor, ...]:
        return (self.t[frame.heads],)

    def tile(self, q: Tensor, k: Tensor, operands: tuple[Tensor, ...]) -> Tensor:
        return -operands[0][:, None, None] * (q[:, :, :, None] - k[:, :, None]).square().sum(-1)


class Squares(Dot):
    """Another: weights s / Σ s of s_ij = (q_i · k_j)² / D. Its own tile makes it a sharer, whatever it derives from."""

    normaliser = "linear"

    def tile(self, q: Tensor, k: Tensor, operands: tuple[Tensor, ...] = ()) -> Tensor:
        return super().tile(q, k, operands).square()


MECHANISMS: dict[str, Callable[[Sizes], Mechanism]] = {
    "dot": lambda n: Dot(),
    "capped-dot": lambda n: CappedDot(1.5),
    "sigmoid": lambda n: Sigmoid(n.h, n.s),
    "general": lambda n: General(n.h, n.d),
    "additive": lambda n: Additive(n.h, n.d),
    "concat": lambda n: Concat(n.h, n.d),
    "linear": lambda n: Linear(),
    "performer": lambda n: Performer(n.d, n_features=16),
    "linformer": lambda n: Linformer(n.s, rank=max(1, n.s // 2)),
    "distance": lambda n: Distance(n.h),
    "squares": lambda n: Squares(),
}


def mechanism_named(name: str, sizes: Sizes, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Mechanism:
    torch.manual_seed(7)
    made = MECHANISMS[name](sizes)
    return made.to(device=device, dtype=dtype) if isinstance(made, nn.Module) else made


def parameters_of(*parts: object) -> list[Tensor]:
    """The parameters of those parts that are modules."""
    return [p for part in parts if isinstance(part, nn.Module) for p in part.parameters()]


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one ``attend``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mechanism: Mechanism
    mask: Mask | None = None
    bias: Bias | None = None
    frame: Frame | None = None
    dropout: float = 0.0
    seed: int | None = None
    sinks: Tensor | None = None
    weights: bool = False

    def with_(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    @property
    def options(self) -> dict[str, Any]:
        """All but q, k and v."""
        named = ("mechanism", "mask", "bias", "frame", "dropout", "seed", "sinks", "weights")
        return {name: getattr(self, name) for name in named}

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that gets a gradient."""
        sinks = [] if self.sinks is None else [self.sinks]
        return [self.q, self.k, self.v, *sinks, *parameters_of(self.mechanism, self.bias)]


def formula(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and weights as the papers write them, every key head repeated, every matrix whole, no shared code."""
    p, mechanism = problem, problem.mechanism
    frame = Frame.of(p.q, p.k) if p.frame is None else p.frame
    shared = p.q.shape[1] // p.k.shape[1]
    q, k, v = p.q, p.k.repeat_interleave(shared, 1), p.v.repeat_interleave(shared, 1)
    allowed = torch.ones(p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2], dtype=torch.bool, device=q.device)
    if p.mask is not None:
        allowed = allowed & p.mask.tile(slice(None), slice(None), frame)
    if isinstance(mechanism, Linformer):
        there = allowed[:, :, :1].transpose(-1, -2)  # padding only: the same for every query
        k, v = (w @ torch.where(there, x, 0) for w, x in ((mechanism.e, k), (mechanism.f, v)))
        allowed = torch.ones(1, dtype=torch.bool, device=q.device)
    scores = naive_scores(mechanism, q, k)
    if p.bias is not None:
        scores = scores + p.bias.dense(frame, mechanism.queries(p.q), mechanism.keys(p.k))  # those a score is made of
    if mechanism.normaliser == "sigmoid":
        weights = torch.where(allowed, 1 / (1 + torch.exp(-scores)), 0)
        return weights @ v, weights
    shift = scores.detach().amax()
    positive = scores if mechanism.normaliser == "linear" else torch.exp(scores - shift)
    positive = torch.where(allowed, positive, 0)
    total = positive.sum(-1, keepdim=True)
    if p.sinks is not None:
        total = total + torch.exp(p.sinks - shift)[:, None, None]
    weights = positive / total.clamp(min=1e-300 if q.dtype == torch.float64 else 1e-38)
    return weights @ v, weights


def naive_scores(mechanism: Mechanism, q: Tensor, k: Tensor) -> Tensor:
    """s(q_i, k_j) for all pairs, from raw q and k with as many heads."""
    if isinstance(mechanism, General):
        return torch.einsum("bhid,hde,bhje->bhij", q, mechanism.w, k)
    if isinstance(mechanism, Concat):
        t, s = q.shape[2], k.shape[2]
        both = torch.cat([q[:, :, :, None].expand(-1, -1, -1, s, -1), k[:, :, None].expand(-1, -1, t, -1, -1)], -1)
        hidden = torch.tanh(torch.einsum("bhijd,hde->bhije", both, mechanism.w))
        return torch.einsum("bhije,he->bhij", hidden, mechanism.v)
    if isinstance(mechanism, Additive):
        hidden = torch.einsum("bhid,hde->bhie", q, mechanism.w_q)[:, :, :, None]
        hidden = hidden + torch.einsum("bhjd,hde->bhje", k, mechanism.w_k)[:, :, None]
        return torch.einsum("bhije,he->bhij", hidden.tanh(), mechanism.v)
    if isinstance(mechanism, Linear):
        return torch.einsum("bhid,bhjd->bhij", nn.functional.elu(q) + 1, nn.functional.elu(k) + 1)
    if isinstance(mechanism, Performer):
        of_q, of_k = _favor(mechanism, q), _favor(mechanism, k)
        of_q = of_q / of_q.detach().amax(-1, keepdim=True) + mechanism._query_floor  # the one liberty it takes
        return torch.einsum("bhim,bhjm->bhij", of_q, of_k)
    if isinstance(mechanism, Distance):
        return -torch.einsum("h,bhij->bhij", mechanism.t, torch.cdist(q, k).square())
    if isinstance(mechanism, Squares):
        return torch.einsum("bhid,bhjd->bhij", q, k).square() / q.shape[-1]
    assert isinstance(mechanism, Dot)
    scale = 1 / math.sqrt(q.shape[-1]) if mechanism.scale is None else mechanism.scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if isinstance(mechanism, Sigmoid):
        return scores + mechanism.b[:, None, None]
    return torch.tanh(scores / mechanism.cap) * mechanism.cap if isinstance(mechanism, CappedDot) else scores


def _favor(mechanism: Performer, x: Tensor) -> Tensor:
    """exp(ω·x - |x|²/2) / √m, x having taken the root of the scale (Choromanski et al. 2021, eq. 5)."""
    x = x * math.sqrt(mechanism.scale)
    m = mechanism.omega.shape[0]
    return torch.exp(x @ mechanism.omega.T - (x * x).sum(-1, keepdim=True) / 2) / math.sqrt(m)
