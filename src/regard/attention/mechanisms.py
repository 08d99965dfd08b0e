"""Mechanisms: how a query scores a key, and how a row of scores becomes weights.

The O(T) part (``prepare``: projections, feature maps) runs once; the O(T · S) part is ``tile(q, k)`` for any rows and
columns. Attention maps keep the prepared q and k and recompute weights from them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .frame import Frame
from .masks import Mask

Operands = tuple[Tensor, ...]


class Prepared(NamedTuple):
    """q, k and v after a mechanism's O(T) part, and the mask and frame that apply to them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    frame: Frame


NORMALISERS = ("softmax", "linear", "sigmoid")  # exp(s) / Σ exp(s), s / Σ s, elementwise 1 / (1 + exp(-s))
_KIND_OF_NORMALISER = {"softmax": "scores", "sigmoid": "sigmoid"}  # every other normaliser: "shares"


class Mechanism:
    """Base class of all mechanisms; a mechanism with parameters is also an ``nn.Module``.

    If a subclass overrides ``tile`` or ``normaliser`` but not ``kind``, its kind becomes "scores", "shares" or
    "sigmoid". If it overrides ``tile`` but not ``tile_backward``, its gradients are computed by autograd.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "scores"  # one of ``backends.KINDS``; decides which backends can compute it
    normaliser: ClassVar[str] = "softmax"  # one of NORMALISERS
    maps: ClassVar[int] = 1  # attention maps that ``combine`` merges into one head; n_heads counts maps
    largest_tile: ClassVar[int] = 1 << 20  # most (query, key) pairs per tile, over batch and heads: fits the CPU cache

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        base = cls._defining_class("kind")
        if any(getattr(cls, name) != getattr(base, name, getattr(cls, name)) for name in ("tile", "normaliser")):
            cls.kind = _KIND_OF_NORMALISER.get(cls.normaliser, "shares")
        order = cls.__mro__.index
        if order(cls._defining_class("tile")) < order(cls._defining_class("tile_backward")):
            # The inherited tile_backward differentiates the overridden tile.
            cls.tile_backward = Mechanism.tile_backward  # type: ignore[method-assign]  # of this class

    @classmethod
    def _defining_class(cls, name: str) -> Any:
        """The class in the MRO that defines an attribute."""
        return next(base for base in cls.__mro__ if name in base.__dict__)

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Mechanism:
        """Build the mechanism of one layer of a model; by default ``cls(n_heads, d_head)`` with the config's scale."""
        takes_sizes = cls.__init__ not in (object.__init__, nn.Module.__init__, Dot.__init__)
        mechanism = cls(n_heads, d_head) if takes_sizes else cls()  # type: ignore[call-arg]
        if config.attention_scale is not None:
            if not isinstance(mechanism, Dot):
                raise ValueError(f"attention_scale={config.attention_scale} is not read by {cls.__name__}.for_model")
            mechanism.scale = config.attention_scale
        return mechanism

    def queries(self, q: Tensor) -> Tensor:
        """Project or feature-map the queries, (B, H, T, D)."""
        return q

    def keys(self, k: Tensor) -> Tensor:
        """Project or feature-map the keys, (B, G, S, D)."""
        return k

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, frame: Frame) -> Prepared:
        """The O(T) part."""
        return Prepared(self.queries(q), self.keys(k), v, mask, frame)

    def combine(self, sums: Tensor) -> Tensor:
        """Merge each map's weighted sum of values (B, H, T, …) into the heads that W_o projects."""
        return sums

    def combine_weights(self, weights: Tensor) -> Tensor:
        """Merge the weights of the maps (B, H, R, C) into those applied to each head's values, (B, H / maps, R, C)."""
        return weights

    def operands(self, frame: Frame) -> Operands:
        """The parameters that ``tile`` reads, for the frame's heads; ``tile_backward`` returns their gradients."""
        return ()

    def tile(self, q: Tensor, k: Tensor, operands: Operands) -> Tensor:
        """Scores (B, H, R, C) of q (B, H, R, D) against k (B, G, C, D)."""
        raise NotImplementedError

    def tile_backward(
        self, q: Tensor, k: Tensor, operands: Operands, d_scores: Tensor
    ) -> tuple[Tensor, Tensor, Operands]:
        """Gradients of q, k and the operands from the gradient of the tile. Default: autograd."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, *operands)]
            scores = self.tile(inputs[0], inputs[1], tuple(inputs[2:]))
            d_q, d_k, *d_operands = tile_gradients(self, scores, inputs, d_scores)
        return d_q, d_k, tuple(d_operands)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The full score matrix of unprepared q and k, in O(T · S) memory."""
        return self.tile(self.queries(q), self.keys(k), self.operands(Frame.of(q, k)))


def tile_gradients(part: object, tile: Tensor, inputs: list[Tensor], d_tile: Tensor) -> list[Tensor]:
    """Gradients of the inputs of a mechanism's or bias's tile; raises if it also reads parameters of its own."""
    own = [p for p in part.parameters() if p.requires_grad] if isinstance(part, nn.Module) else []
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(tile, [*inputs, *own], d_tile, allow_unused=True)
    if any(grad is not None for grad in grads[len(inputs) :]):
        name = type(part).__name__
        raise ValueError(f"{name}.tile reads a parameter that {name}.operands does not return: it would not be trained")
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=False)]


def by_group(x: Tensor, n_groups: int) -> Tensor:
    """(B, H, R, D) → (B, G, H/G · R, D): stack the query heads that share a key head instead of repeating k."""
    b, h, r, d = x.shape
    return x.reshape(b, n_groups, h // n_groups * r, d)


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """The inverse of ``by_group``."""
    b, g, rows, d = x.shape
    return x.reshape(b, n_heads, g * rows // n_heads, d)


class Dot(Mechanism):
    """Scaled dot product (Vaswani et al. 2017, eq. 1; with scale 1, "dot" of Luong et al. 2015).

    s_ij = scale · q_i · k_j, scale 1/√D by default, since Var(q · k) = D for unit-variance q and k.
    """

    name = "dot"
    kind = "dot"
    scale: float | None = None

    def __init__(self, scale: float | None = None) -> None:
        if scale is not None:  # otherwise the class attribute, which a subclass may set
            self.scale = scale

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Mechanism:
        if cls is Dot and config.score_cap is not None:
            return CappedDot(config.score_cap, config.attention_scale)
        return super().for_model(config, n_heads, d_head)

    def factor(self, d_head: int) -> float:
        return 1.0 / math.sqrt(d_head) if self.scale is None else self.scale

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        scaled = by_group(q * self.factor(q.shape[-1]), k.shape[1])
        return by_head(scaled @ k.transpose(-1, -2), q.shape[1])

    def tile_backward(
        self, q: Tensor, k: Tensor, operands: Operands, d_scores: Tensor
    ) -> tuple[Tensor, Tensor, Operands]:
        scale, groups = self.factor(q.shape[-1]), k.shape[1]
        d_scores = by_group(d_scores, groups)
        d_q = by_head(d_scores @ k, q.shape[1]) * scale
        d_k = d_scores.transpose(-1, -2) @ (by_group(q, groups) * scale)
        return d_q, d_k, ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(scale={self.scale})"


class CappedDot(Dot):
    """Scaled dot product with a soft cap (Gemma 2, 2024): s_ij = cap · tanh(scale · q_i · k_j / cap)."""

    name = "capped-dot"
    kind = "capped"

    def __init__(self, cap: float, scale: float | None = None) -> None:
        super().__init__(scale)
        self.cap = cap

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return torch.tanh(super().tile(q, k) / self.cap) * self.cap

    def tile_backward(
        self, q: Tensor, k: Tensor, operands: Operands, d_scores: Tensor
    ) -> tuple[Tensor, Tensor, Operands]:
        slope = 1 - torch.tanh(super().tile(q, k) / self.cap).square()
        return super().tile_backward(q, k, operands, d_scores * slope)

    def __repr__(self) -> str:
        return f"CappedDot(cap={self.cap}, scale={self.scale})"


class Sigmoid(nn.Module, Dot):
    """Sigmoid attention (Ramapuram et al. 2024): A_ij = σ(scale · q_i · k_j + b), not normalised over the keys.

    b is learned, one number per head, and initialised to -log(length), so that rows initially sum to about 1.
    """

    name = "sigmoid"
    kind = "sigmoid"
    normaliser = "sigmoid"

    def __init__(self, n_heads: int, length: int, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.b = nn.Parameter(torch.full((n_heads,), -math.log(length)))

    @classmethod
    def for_model(cls, config: ModelConfig, n_heads: int, d_head: int) -> Sigmoid:
        return cls(n_heads, config.max_len, config.attention_scale)

    def operands(self, frame: Frame) -> Operands:
        return (self.b[frame.heads],)

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return super().tile(q, k) + operands[0].to(q.dtype)[:, None, None]

    def tile_backward(
        self, q: Tensor, k: Tensor, operands: Operands, d_scores: Tensor
    ) -> tuple[Tensor, Tensor, Operands]:
        d_q, d_k, _ = super().tile_backward(q, k, operands, d_scores)
        return d_q, d_k, (d_scores.sum((0, 2, 3)),)


class General(nn.Module, Dot):
    """Luong et al. 2015, "general": s_ij = q_i · W k_j, computed as (Wᵀ q_i) · k_j."""

    name = "general"

    def __init__(self, n_heads: int, d_query: int, d_key: int | None = None, scale: float | None = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.w = nn.Parameter(torch.empty(n_heads, d_query, d_query if d_key is None else d_key))
        _initialise(self.w)

    def queries(self, q: Tensor) -> Tensor:
        _check_projection(self.name, "q", q, self.w)
        return q @ self.w


class Additive(nn.Module, Mechanism):
    """Bahdanau et al. 2015, eq. 6: s_ij = v · tanh(W_q q_i + W_k k_j)."""

    name = "additive"
    kind = "additive"
    largest_tile = 1 << 14  # a tile holds D numbers per pair before the sum over D

    def __init__(self, n_heads: int, d_query: int, d_key: int | None = None, d_hidden: int | None = None) -> None:
        super().__init__()
        d_key = d_query if d_key is None else d_key
        d_hidden = d_query if d_hidden is None else d_hidden
        self.w_q = nn.Parameter(torch.empty(n_heads, d_query, d_hidden))
        self.w_k = nn.Parameter(torch.empty(n_heads, d_key, d_hidden))
        self.v = nn.Parameter(torch.empty(n_heads, d_hidden))
        for weight in (self.w_q, self.w_k, self.v[:, None]):
            _initialise(weight)

    def queries(self, q: Tensor) -> Tensor:
        _check_projection(self.name, "q", q, self.w_q)
        return q @ self.w_q

    def keys(self, k: Tensor) -> Tensor:
        n_heads = self.w_k.shape[0]
        if k.shape[1] != n_heads:  # each query head has its own projection of a shared key head
            k = k.repeat_interleave(n_heads // k.shape[1], dim=1)
        _check_projection(self.name, "k", k, self.w_k)
        return k @ self.w_k

    def operands(self, frame: Frame) -> Operands:
        return (self.v[frame.heads],)

    def tile(self, q: Tensor, k: Tensor, operands: Operands) -> Tensor:
        return torch.einsum("bhrcd,hd->bhrc", torch.tanh(q[:, :, :, None] + k[:, :, None]), operands[0].to(q.dtype))


class Concat(Additive):
    """Luong et al. 2015, "concat": s_ij = v · tanh(W [q_i; k_j]), W = [W_q; W_k]."""

    name = "concat"

    @property
    def w(self) -> Tensor:
        """The paper's W, (H, d_query + d_key, d_hidden)."""
        return torch.cat([self.w_q, self.w_k], dim=1)


class Sinks(nn.Module):
    """A learned logit per head in the denominator of every row's softmax (gpt-oss, 2025).

    A_ij = exp(s_ij) / (exp(sink) + Σ_j exp(s_ij)), so a head may attend to nothing. Sink 0 is Miller's softmax₁ (2023).
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n_heads))

    def extra_repr(self) -> str:
        return f"{len(self.logits)} heads"


def _check_projection(mechanism: str, name: str, x: Tensor, w: Tensor) -> None:
    """Raise unless heads x (B, H, T, D) can be projected by w (H, D, …)."""
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"mechanism {mechanism!r} has n_heads={w.shape[0]}, but {name} has {x.shape[1]} heads")
    if x.shape[3] != w.shape[1]:
        raise ValueError(f"mechanism {mechanism!r} expects {name} of head width {w.shape[1]}, got {x.shape[3]}")
    if x.dtype != w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} is {x.dtype} but mechanism {mechanism!r} is {w.dtype}; give them one dtype")


def _initialise(weight: Tensor) -> None:
    """Xavier-uniform for each head's matrix; torch would treat (H, in, out) as a convolution's weight."""
    for matrix in weight:
        nn.init.xavier_uniform_(matrix)
