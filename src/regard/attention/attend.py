"""``attend``: attention with any mechanism, mask and bias, on any backend."""

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
    sinks: Tensor | None = None,
    check: bool = False,
) -> Attended:
    """Attention of q (B, H, T, D) over k and v (B, G, S, D): softmax(scale · q kᵀ + bias) v under a mask.

    A tensor mask means the same as in torch's scaled_dot_product_attention: booleans, True = may attend, or floats
    added to the scores, -inf = may not attend. Its shape is (T, S), (B, T, S) for all heads, or any four axes that
    broadcast, such as (B, 1, 1, S) for padding.

    ``mechanism`` replaces the scaled dot product; ``frame`` gives the positions (default: the last query is at the last
    key); ``seed`` fixes the dropout mask; ``sinks`` (H,) are logits added to each row's softmax without a key, so that
    its weights sum to less than 1; ``check`` raises ValueError if an input contains NaN or infinity.
    """
    call = prepare(q, k, v, mask, bias, scale, mechanism, frame, dropout, seed, check, sinks)
    return run(call, backend, weights)


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
    sinks: Tensor | None = None,
) -> Steps:
    """The result of each step of the formula: scores, scaled, biased, masked, weights, output."""
    return compute_steps(prepare(q, k, v, mask, bias, scale, mechanism, frame, sinks=sinks))


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
    sinks: Tensor | None = None,
) -> AttentionCall:
    """Check the inputs, convert tensor masks and biases, and run the mechanism's O(T) part."""
    _check_types(q=q, k=k, v=v, mask=mask, bias=bias, mechanism=mechanism)
    if mechanism is None:
        mechanism = Dot(scale)
    elif scale is not None:
        raise ValueError(f"scale={scale} applies only to the scaled dot product, not to mechanism={mechanism.name!r}")
    if mechanism.normaliser not in NORMALISERS:
        known = " or ".join(map(repr, NORMALISERS))
        raise ValueError(f"mechanism {mechanism.name!r} has normaliser={mechanism.normaliser!r}, which is not {known}")
    check_heads(q, k, v, same_width=type(mechanism) is Dot)
    if check:
        _check_finite(q=q, k=k, v=v)
    check_probability(dropout=dropout)
    frame = Frame.of(q, k) if frame is None else frame
    if isinstance(bias, Tensor):
        bias = DenseBias(_expand(bias, frame))
    if isinstance(mask, Tensor):
        mask, mask_bias = _convert_mask(mask, frame)
        if mask_bias is not None:
            bias = mask_bias if bias is None else Sum(bias, mask_bias)
    frame.check(q, k)
    _check_device("mechanism", mechanism, q)
    if mask is not None:
        mask.check(frame)
    if bias is not None:
        _check_device("bias", bias, q)
        bias.check(frame)
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        expected = f"({q.shape[1]},) on {q.device}, one for each head of q"
        raise ValueError(f"sinks must be {expected}; got {tuple(sinks.shape)} on {sinks.device}")
    ready = mechanism.prepare(q, k, v, mask, frame)
    seed = None if seed is None or dropout == 0 else torch.as_tensor(seed, device=q.device)
    inputs = (ready.q, ready.k, ready.mask, bias, mechanism, ready.frame)
    return AttentionCall(*inputs, v=ready.v, dropout=dropout, seed=seed, sinks=sinks)


def _convert_mask(mask: Tensor, frame: Frame) -> tuple[Mask, Bias | None]:
    """The mask, and for a float mask the bias, equivalent to a tensor mask of scaled_dot_product_attention."""
    if mask.dim() == 3:
        mask = mask[:, None]  # (B, T, S), the same for all heads
    if mask.is_floating_point():
        allowed = mask != -torch.inf  # a mask, not a bias of -inf: a fully masked row must give 0, not NaN
        return from_dense(_expand(allowed, frame)), DenseBias(_expand(mask.masked_fill(~allowed, 0.0), frame))
    if mask.dtype == torch.bool and mask.shape[1:] == (1, 1, frame.n_keys) and mask.shape[0] in (1, frame.n_batch):
        return valid_keys(mask[:, 0, 0].expand(frame.n_batch, -1)), None
    return from_dense(_expand(mask, frame)), None


def _expand(x: Tensor, frame: Frame) -> Tensor:
    """A view with the last two axes broadcast to (T, S); a tensor that does not fit is left for ``check`` to reject."""
    sizes = (frame.n_queries, frame.n_keys)
    fits = 2 <= x.dim() <= 4 and all(n in (1, size) for n, size in zip(x.shape[-2:], sizes, strict=True))
    return x.expand(*x.shape[:-2], *sizes) if fits else x


def _check_types(**arguments: Any) -> None:
    for name, x in arguments.items():
        types = _TYPES.get(name, (Tensor,))
        if not isinstance(x, types) and (x is not None or name in "qkv"):
            expected = " or ".join("a tensor" if each is Tensor else f"a {each.__name__}" for each in types)
            hint = f"; call it: {x.__name__}()" if callable(x) and hasattr(x, "__name__") else ""
            raise TypeError(f"{name} must be {expected}, got {x if callable(x) else repr(x)}{hint}")


def _check_finite(**inputs: Tensor) -> None:
    for name, x in inputs.items():
        bad = ~torch.isfinite(x)
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"{name} has {int(bad.sum())} non-finite values; the first is {x[first]} at {first}")


def _check_device(argument: str, part: object, q: Tensor) -> None:
    """Raise if a tensor of a mechanism or bias is not on q's device."""
    if not isinstance(part, nn.Module):
        return
    for x in [*part.parameters(), *part.buffers()]:
        if x.device != q.device:
            owner = f"{argument} {type(part).__name__}"
            raise ValueError(f"q is on {q.device} but {owner} is on {x.device}; put them on one device")
