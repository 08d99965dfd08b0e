"""``attend``: scaled dot-product attention and every other mechanism, mask and bias, on any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..foundation.checks import check_probability
from .backends import Attended, run
from .biases import Bias, DenseBias, Sum
from .frame import Frame, check_heads
from .mask import Mask
from .masks import from_dense, valid_keys
from .mechanisms import NORMALISERS, Dot, Mechanism
from .reference import Steps, compute_steps
from .score_matrix import AttentionCall

_TYPES: dict[str, tuple[type, ...]] = {"mask": (Mask, Tensor), "bias": (Bias, Tensor), "mechanism": (Mechanism,)}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    weights: bool = False,
    mechanism: Mechanism | None = None,
    frame: Frame | None = None,
    seed: int | Tensor | None = None,
    check: bool = False,
) -> Attended:
    """Attention of q (B, H, T, D) over k and v (B, G, S, D): softmax(scale · q kᵀ + bias) v under a mask.

    A mask given as a tensor means what it means to torch's scaled_dot_product_attention: booleans, True = may look, or
    numbers added to the scores, -inf = may not. Its shape is (T, S), (B, T, S) for all heads, or four axes that
    broadcast, such as the padding mask (B, 1, 1, S).

    ``mechanism`` replaces the scaled dot product; ``frame`` gives the positions (default: the last query at the last
    key); ``seed`` fixes the dropout; ``check`` refuses NaN and infinity in the inputs.
    """
    return run(prepare(q, k, v, mask, bias, scale, mechanism, frame, dropout, seed, check), backend, weights)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    mechanism: Mechanism | None = None,
    frame: Frame | None = None,
) -> Steps:
    """Every step of the formula by name: scores, scaled, biased, masked, weights, output."""
    return compute_steps(prepare(q, k, v, mask, bias, scale, mechanism, frame))


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    mechanism: Mechanism | None = None,
    frame: Frame | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    check: bool = False,
) -> AttentionCall:
    """Check the inputs and run the mechanism's O(T) part."""
    _check_types(q=q, k=k, v=v, mask=mask, bias=bias, mechanism=mechanism)
    if mechanism is None:
        mechanism = Dot(scale)
    elif scale is not None:
        raise ValueError(f"scale={scale} goes with the scaled dot product; mechanism={mechanism.name!r} has its own")
    if mechanism.normaliser not in NORMALISERS:
        known = " or ".join(map(repr, NORMALISERS))
        raise ValueError(f"mechanism {mechanism.name!r} has normaliser={mechanism.normaliser!r}, which is not {known}")
    check_heads(q, k, v, same_width=type(mechanism) is Dot)
    for name, x in zip("qkv", (q, k, v), strict=True) if check else ():
        bad = ~torch.isfinite(x)
        if bad.any():
            first, count = tuple(bad.nonzero()[0].tolist()), int(bad.sum())
            raise ValueError(f"{name} holds {count} values that are not finite, the first, {x[first]}, at {first}")
    check_probability(dropout=dropout)
    frame = Frame.of(q, k) if frame is None else frame
    if isinstance(bias, Tensor):
        bias = DenseBias(_expand(bias, frame))
    if isinstance(mask, Tensor):
        mask, added = _read_mask(mask, frame)
        bias = added if bias is None else bias if added is None else Sum(bias, added)
    frame.check(q, k)
    _check_device("mechanism", mechanism, q)
    if mask is not None:
        mask.check(frame)
    if bias is not None:
        _check_device("bias", bias, q)
        bias.check(frame)
    ready = mechanism.prepare(q, k, v, mask, frame)
    seed = None if seed is None or dropout == 0 else torch.as_tensor(seed, device=q.device)
    return AttentionCall(ready.q, ready.k, ready.mask, bias, mechanism, ready.frame, ready.v, dropout, seed)


def _read_mask(mask: Tensor, frame: Frame) -> tuple[Mask, Bias | None]:
    """A mask of torch's scaled_dot_product_attention as ours, and what it adds to the scores."""
    if mask.dim() == 3:
        mask = mask[:, None]  # (B, T, S), the same for all heads
    if mask.is_floating_point():
        may_look = mask != -torch.inf  # apart from the numbers, so that a row without keys gives 0 and not NaN
        return from_dense(_expand(may_look, frame)), DenseBias(_expand(mask.masked_fill(~may_look, 0.0), frame))
    if mask.dtype == torch.bool and mask.shape[1:] == (1, 1, frame.n_keys) and mask.shape[0] in (1, frame.n_batch):
        return valid_keys(mask[:, 0, 0].expand(frame.n_batch, -1)), None
    return from_dense(_expand(mask, frame)), None


def _expand(x: Tensor, frame: Frame) -> Tensor:
    """A view with all queries and keys where those axes have one entry; what does not fit is left to be named later."""
    sizes = (frame.n_queries, frame.n_keys)
    fits = 2 <= x.dim() <= 4 and all(n in (1, wanted) for n, wanted in zip(x.shape[-2:], sizes, strict=True))
    return x.expand(*x.shape[:-2], *sizes) if fits else x


def _check_types(**arguments: Any) -> None:
    for name, x in arguments.items():
        types = _TYPES.get(name, (Tensor,))
        if not isinstance(x, types) and (x is not None or name in "qkv"):
            expected = " or ".join("a tensor" if each is Tensor else f"a {each.__name__}" for each in types)
            hint = f"; call it: {x.__name__}()" if callable(x) and hasattr(x, "__name__") else ""
            raise TypeError(f"{name} must be {expected}, got {x if callable(x) else repr(x)}{hint}")


def _check_device(what: str, part: object, q: Tensor) -> None:
    """Raise when the tensors of a mechanism or bias are on another device than q."""
    for x in [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else []:
        if x.device != q.device:
            owner = f"{what} {type(part).__name__}"
            raise ValueError(f"q is on {q.device} but {owner} is on {x.device}; put them on one device")
