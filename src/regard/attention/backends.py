"""The backends: which ones can compute an attention call, and which one does.

``CAPABILITIES`` (backend × kind of mechanism × device × direction × feature) determines what ``auto`` may choose, what
error messages say and what the parity tests cover. ``choose`` picks the fastest capable backend; ``run`` calls it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.checks import nearest_name
from .fused import flex, flex_fits, is_square_causal, sdpa, sees_everything
from .linear_attention import linear
from .mask import And, Mask
from .masks import Causal, Padding
from .mechanisms import Dot
from .reference import reference
from .score_matrix import AttentionCall
from .tiled import tiled
from .triton_backend import constant_in_graphs, triton, triton_is_fast, triton_obstacle

MASKS = ("causal", "padding", "mask")  # "mask": any other mask
BIASES = ("bias", "trainable bias", "content bias")  # "content bias" reads q and k
SINKS = ("sinks",)  # a logit per head in the denominator of the softmax
DROPOUT = ("dropout", "seed")  # "seed": the dropout mask is determined by a seed
FEATURES = ("plain", *MASKS, *BIASES, *SINKS, "gqa", *DROPOUT, "weights")  # "weights": the weights are returned
KINDS = (  # values of ``Mechanism.kind``
    "dot",  # dot products
    "capped",  # dot products with a soft cap
    "additive",  # v · tanh(q + k)
    "scores",  # any other score under a softmax
    "kernel",  # dot products of feature maps, divided by their sum
    "shares",  # any other positive score, divided by the sum
    "sigmoid",  # scores under a sigmoid
    "summary",  # dot products with a summary of the keys
)
DEVICES = ("cpu", "cuda", "mps")
OTHER_DEVICE = "mps"  # unlisted devices (meta, xpu …) are treated like this one: torch's own operations only
DIRECTIONS = ("forward", "backward")
SMALL_MASK = 1 << 20  # up to this many pairs, sdpa's dense mask is cheap


class Capability(NamedTuple):
    backend: str
    kind: str
    device: str
    direction: str
    feature: str


_TILED = ("plain", *MASKS, *BIASES, "gqa", *DROPOUT)
_FUSED = ("plain", *MASKS, "bias", "trainable bias", "gqa")
_SUMMARY = ("plain", "padding", *SINKS, "gqa")
_TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("reference", ("dot", "capped", "additive", "scores"), DEVICES, DIRECTIONS, FEATURES),
    ("reference", ("kernel", "shares"), DEVICES, DIRECTIONS, ("plain", *MASKS, "gqa", *DROPOUT, "weights")),
    ("reference", ("sigmoid",), DEVICES, DIRECTIONS, (*_TILED, "weights")),
    ("tiled", ("sigmoid",), DEVICES, DIRECTIONS, _TILED),
    ("reference", ("summary",), DEVICES, DIRECTIONS, (*_SUMMARY, *DROPOUT, "weights")),
    ("tiled", ("dot", "capped", "additive", "scores"), DEVICES, DIRECTIONS, (*_TILED, *SINKS)),
    ("tiled", ("summary",), DEVICES, DIRECTIONS, (*_SUMMARY, *DROPOUT)),
    ("sdpa", ("dot",), DEVICES, DIRECTIONS, (*_FUSED, *SINKS, "dropout")),
    ("sdpa", ("summary",), DEVICES, DIRECTIONS, (*_SUMMARY, "dropout")),
    ("triton", ("dot", "capped"), ("cuda",), DIRECTIONS, _TILED),
    ("triton", ("additive",), ("cuda",), DIRECTIONS, ("plain", *MASKS, "gqa", *DROPOUT)),
    ("flex", ("dot",), ("cuda",), DIRECTIONS, (*_FUSED, *SINKS)),
    ("flex", ("dot",), ("cpu",), ("forward",), (*_FUSED, *SINKS)),
    ("linear", ("kernel",), DEVICES, DIRECTIONS, ("plain", "causal", "padding", "gqa")),
)
CAPABILITIES = frozenset(Capability(backend, *rest) for backend, *axes in _TABLE for rest in itertools.product(*axes))
BACKENDS = tuple(dict.fromkeys(row[0] for row in _TABLE))
_RUN = {"sdpa": sdpa, "flex": flex, "tiled": tiled, "linear": linear, "triton": triton}


class Attended(NamedTuple):
    output: Tensor  # (B, H, T, D)
    weights: Tensor | None  # (B, H, T, S), before dropout; None unless requested


def run(call: AttentionCall, backend: str = "auto", weights: bool = False) -> Attended:
    """Compute a prepared call on a backend."""
    name = choose(call, weights) if backend == "auto" else backend
    if name not in BACKENDS:
        near = nearest_name(name, BACKENDS)
        hint = "" if near is None else f"; did you mean {near!r}?"
        raise ValueError(f"backend={name!r} is not one of {', '.join(BACKENDS)}, auto{hint}")
    features, direction = features_of(call, weights), _direction(call)
    kind, device = call.mechanism.kind, call.q.device.type
    if missing := missing_features(name, kind, device, direction, features):
        capable = ", ".join(capable_backends(kind, device, direction, features)) or "none"
        raise ValueError(f"backend={name!r} does not support {_describe(call, missing, device)}; these do: {capable}")
    if name == "triton" and (obstacle := triton_obstacle(call)):
        raise ValueError(f"backend='triton' cannot compute this call ({obstacle}); 'auto' chooses a backend that can")
    if name == "reference":
        output, matrix = reference(call)
        return Attended(output, matrix if weights else None)
    if isinstance(call.mechanism, Dot) and call.k.shape[1] > call.v.shape[1]:
        # Fused kernels need as many value heads as key heads, and a mechanism may make more key heads.
        call = replace(call, v=call.v.repeat_interleave(call.k.shape[1] // call.v.shape[1], dim=1))
    return Attended(_RUN[name](call), None)


def choose(call: AttentionCall, weights: bool = False) -> str:
    """The fastest backend that supports a call."""
    features, device = features_of(call, weights), call.q.device.type
    capable = capable_backends(call.mechanism.kind, device, _direction(call), features)
    if not capable:
        raise ValueError(f"no backend supports {_describe(call, sorted(features), device)}")
    if "linear" in capable:
        return "linear"
    fused = call.bias is None and (sees_everything(call.mask, call.frame) or is_square_causal(call.mask, call.frame))
    if "sdpa" in capable and (fused or call.frame.n_queries * call.frame.n_keys <= SMALL_MASK):
        return "sdpa"
    if "triton" in capable and triton_is_fast(call):
        return "triton"
    if torch.compiler.is_compiling():  # tiled loops over a plan and flex compiles a kernel: neither can be traced
        return next(b for b in ("sdpa", "reference") if b in capable)
    if "flex" in capable and device == "cuda" and flex_fits(call):
        return "flex"
    by_speed = ("tiled", "sdpa", "reference") if device == "cpu" else ("sdpa", "tiled", "reference")
    return next(b for b in by_speed if b in capable)


@constant_in_graphs  # if traced, a compiled graph would guard on every entry of the table: 4 ms per call on a CPU
def missing_features(backend: str, kind: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The features a backend lacks for this kind of mechanism on this device, in the order of FEATURES."""
    device = device if device in DEVICES else OTHER_DEVICE
    needed = [f for f in FEATURES if f in features]
    return [f for f in needed if Capability(backend, kind, device, direction, f) not in CAPABILITIES]


@constant_in_graphs
def capable_backends(kind: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The backends that support all of the features."""
    return [b for b in BACKENDS if not missing_features(b, kind, device, direction, features | {"plain"})]


def features_of(call: AttentionCall, weights: bool) -> frozenset[str]:
    """The features of the capability table that a call needs."""
    features = {"plain"} | _mask_features(call.mask)
    if call.bias is not None:
        features.add("content bias" if call.bias.reads_content else "trainable bias" if call.bias.trainable else "bias")
    if call.sinks is not None:
        features.add("sinks")
    if call.q.shape[1] != call.v.shape[1]:  # v, not k: a mechanism may have projected k for every query head
        features.add("gqa")
    if call.dropout > 0:
        features |= {"dropout"} if call.seed is None else {"dropout", "seed"}
    return frozenset(features | {"weights"} if weights else features)


def _mask_features(mask: Mask | None) -> set[str]:
    if mask is None:
        return set()
    if isinstance(mask, And):
        return _mask_features(mask.a) | _mask_features(mask.b)
    return {"causal" if isinstance(mask, Causal) else "padding" if isinstance(mask, Padding) else "mask"}


def _direction(call: AttentionCall) -> str:
    inputs = (call.q, call.k, call.v, call.sinks)
    needs_grad = any(x is not None and x.requires_grad for x in inputs)
    if call.bias is not None:
        needs_grad = needs_grad or call.bias.trainable
    return "backward" if needs_grad and torch.is_grad_enabled() else "forward"


def _describe(call: AttentionCall, features: Iterable[str], device: str) -> str:
    listed = ", ".join(f for f in features if f != "plain") or "this mechanism"
    return f"{listed} (mechanism {call.mechanism.name!r} on {device}, {_direction(call)})"
