"""The parts of a layer as functions of rows (R, width): linear maps over prepared weights, and norms.

A product of one row with a matrix is bound by how fast the matrix is read; oneDNN's own order, in blocks, is read up to
twice as fast as rows are, and faster still by a few rows at once. The price is a second copy of the weights, so very
large models do without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from ..layers import LayerNorm
from ..layers.quantised_linear import Int8Linear

_MOST_BYTES = 2 * 2**30  # weights of a model that are worth a second copy

Map = Callable[[Tensor], Tensor]
"""From rows (R, in) to rows (R, out)."""


class PackedLinear:
    """x Wᵀ + b, W in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = None if bias is None else bias.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return out


class Packs:
    """The packed maps of one model, each as long as its weight is what it was."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[object, PackedLinear]] = {}

    def map(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        mark = (_mark(weight), None if bias is None else bias.data_ptr())
        held = self._maps.get(id(weight))
        if held is None or held[0] != mark:
            held = self._maps[id(weight)] = mark, PackedLinear(weight, bias)
        return held[1]


_packs: weakref.WeakKeyDictionary[nn.Module, Packs] = weakref.WeakKeyDictionary()


def packs_of(model: nn.Module) -> Packs | None:
    """What was packed for a model so far; None where its weights are better read as they are."""
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if n_bytes > _MOST_BYTES or not bool(torch.backends.mkldnn.enabled) or not _works():
        return None
    return _packs.setdefault(model, Packs())


@cache
def _works() -> bool:
    """Whether this build of torch has the packed product."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(8), torch.arange(8.0)[None]
    try:
        return torch.equal(PackedLinear(weight, None)(x), x)
    except (RuntimeError, AttributeError):
        return False


def fast_map(module: nn.Module, packs: Packs | None) -> Map:
    """A linear module as a function of rows: prepared if it is a plain one in float32 or int8, else as it is."""
    if type(module) is Int8Linear:
        return lambda x: module.product_rows(x, module.bias) if x.dtype == torch.float32 else module(x)
    if packs is None or type(module) is not nn.Linear or not can_pack(module.weight):
        return module
    return packs.map(module.weight, module.bias)


def fast_norm(norm: nn.Module) -> Map:
    """A norm as a function: layer norm without the way through its module, any other as it is."""
    if type(norm) is not LayerNorm:
        return norm
    shape, weight, bias, eps = [norm.d], norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def can_pack(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and type(weight) in (Tensor, nn.Parameter)


def _mark(weight: Tensor) -> tuple[int, int, float]:
    """Where a weight lies, how often it was changed, and some of its numbers: changes of ``.data`` are not counted."""
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, float(weight.detach().flatten()[::997].sum())
