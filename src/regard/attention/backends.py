"""``attend``: one door to every mechanism and every backend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .biases import Bias, DenseBias
from .call import Call
from .capabilities import BACKENDS, able, missing
from .checks import check_finite, check_frame, check_heads, check_parameters
from .frame import Frame
from .fused import flex, flex_fits, is_square_causal, sdpa, sees_everything
from .linear import linear
from .masks import Mask, from_dense
from .masks.basic import Causal, Padding
from .masks.mask import And
from .reference import Steps, reference, steps
from .scores import Dot, Mechanism
from .tiled import tiled

_RUN = {"sdpa": sdpa, "flex": flex, "tiled": tiled, "linear": linear}


class Attended(NamedTuple):
    output: Tensor  # (B, H, T, D)
    weights: Tensor | None  # (B, H, T, S), before dropout; only when asked for


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
    """Attention of q (B, H, T, D) over k and v (B, G, S, D), softmax(scale · q kᵀ + bias) v under a mask.

    ``mechanism`` replaces the scaled dot product; ``frame`` says where queries and keys stand (by default the last
    query at the last key); ``seed`` fixes the dropout; ``check`` looks for NaN and infinity in the inputs.
    """
    return run(prepare(q, k, v, mask, bias, scale, mechanism, frame, dropout, seed, check), backend, weights)


def run(call: Call, backend: str = "auto", weights: bool = False) -> Attended:
    """Compute a prepared call."""
    name = choose(call, weights) if backend == "auto" else backend
    _require(name, call, weights)
    if name == "reference":
        output, matrix = reference(call)
        return Attended(output, matrix if weights else None)
    return Attended(_RUN[name](call), None)


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
    return steps(prepare(q, k, v, mask, bias, scale, mechanism, frame))


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
) -> Call:
    """Check the inputs and do the mechanism's O(T) work; what is left is for a backend."""
    check_kinds(q=q, k=k, v=v, mask=mask, bias=bias, mechanism=mechanism)
    if mechanism is None:
        mechanism = Dot(scale)
    elif scale is not None:
        raise ValueError(f"scale={scale} goes with the scaled dot product; mechanism={mechanism.name!r} has its own")
    check_heads(q, k, v, same_width=type(mechanism) is Dot)
    if check:
        check_finite(q, k, v)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must lie in [0, 1)")
    frame = Frame.of(q, k) if frame is None else frame
    mask = from_dense(mask) if isinstance(mask, Tensor) else mask
    bias = DenseBias(bias) if isinstance(bias, Tensor) else bias
    check_frame(frame, q, k)
    check_parameters("mechanism", mechanism, q)
    if mask is not None:
        mask.check(frame)
    if bias is not None:
        check_parameters("bias", bias, q)
        bias.check(frame)
    ready = mechanism.prepare(q, k, v, mask, frame)
    given = None if seed is None or dropout == 0 else torch.as_tensor(seed, device=q.device)
    return Call(ready.q, ready.k, ready.mask, bias, mechanism, ready.frame, ready.v, dropout, given)


def check_kinds(**given: Any) -> None:
    """Raise where an argument is not the kind of thing that goes there."""
    for name, x in given.items():
        kinds = _KINDS[name]
        if not isinstance(x, kinds) and (x is not None or name in "qkv"):
            wanted = " or ".join("a tensor" if kind is Tensor else f"a {kind.__name__}" for kind in kinds)
            hint = f"; call it: {x.__name__}()" if callable(x) and hasattr(x, "__name__") else ""
            raise TypeError(f"{name} must be {wanted}, got {x if callable(x) else repr(x)}{hint}")


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys("qkv", (Tensor,)),
    "mask": (Mask, Tensor),
    "bias": (Bias, Tensor),
    "mechanism": (Mechanism,),
}


def features_of(call: Call, weights: bool) -> frozenset[str]:
    """What a call asks of a backend, in the words of the capability table."""
    wanted = {"plain"} | _mask_features(call.mask)
    if call.bias is not None:
        wanted.add("content bias" if call.bias.reads_content else "trainable bias" if call.bias.trainable else "bias")
    if call.q.shape[1] != call.v.shape[1]:  # not k's: a mechanism may have projected it for every head
        wanted.add("gqa")
    if call.dropout > 0:
        wanted |= {"dropout"} if call.seed is None else {"dropout", "seed"}
    if weights:
        wanted.add("weights")
    return frozenset(wanted)


def _mask_features(mask: Mask | None) -> set[str]:
    if mask is None:
        return set()
    if isinstance(mask, Causal):
        return {"causal"}
    if isinstance(mask, Padding):
        return {"padding"}
    if isinstance(mask, And):
        return _mask_features(mask.a) | _mask_features(mask.b)
    return {"mask"}


def _direction(call: Call) -> str:
    trains = call.bias is not None and call.bias.trainable
    needs_grad = trains or any(x.requires_grad for x in (call.q, call.k, call.v))
    return "backward" if needs_grad and torch.is_grad_enabled() else "forward"


def choose(call: Call, weights: bool = False) -> str:
    """The fastest backend that can do what is asked."""
    wanted, device = features_of(call, weights), call.q.device.type
    can = able(call.mechanism.kind, device, _direction(call), wanted)
    if not can:
        raise ValueError(f"no backend can do {_asked(call, sorted(wanted), device)}")
    if "linear" in can:
        return "linear"
    if "sdpa" in can and _sdpa_is_best(call):
        return "sdpa"
    if torch.compiler.is_compiling():  # neither tiled's loop over a plan nor a compiled kernel is for tracing
        return next(b for b in ("sdpa", "reference") if b in can)
    if "flex" in can and device == "cuda" and flex_fits(call):
        return "flex"
    in_order = ("tiled", "sdpa", "reference") if device == "cpu" else ("sdpa", "tiled", "reference")
    return next(b for b in in_order if b in can)


def _sdpa_is_best(call: Call) -> bool:
    """Fused without a dense mask, or small enough that making the mask dense costs nothing worth saving."""
    if call.bias is None and (sees_everything(call.mask, call.frame) or is_square_causal(call.mask, call.frame)):
        return True
    return call.frame.n_queries * call.frame.n_keys <= 1 << 20


def _require(backend: str, call: Call, weights: bool) -> None:
    if backend not in BACKENDS:
        near = difflib.get_close_matches(backend, BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}, auto{hint}")
    wanted, device = features_of(call, weights), call.q.device.type
    lacking = missing(backend, call.mechanism.kind, device, _direction(call), wanted)
    if lacking:
        can = able(call.mechanism.kind, device, _direction(call), wanted)
        asked = _asked(call, lacking, device)
        raise ValueError(f"backend={backend!r} cannot do {asked}; these can: {', '.join(can) or 'none'}")


def _asked(call: Call, features: Iterable[str], device: str) -> str:
    what = ", ".join(f for f in features if f != "plain") or "this mechanism"
    return f"{what} (mechanism {call.mechanism.name!r} on {device}, {_direction(call)})"
