"""Interventions: change the inside of a model for the length of a ``with`` block.

    with switch_off(model, [("cross", 1, 0)]), attention_scale(model, 2.0):
        look = regard.look(model, "…")

Each change is a function call in the forward pass (``attention.edits``): no hooks, no
copies. After the block, also after an exception, the model is exactly what it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..attention import AttentionMap, Dot, XLRelative
from ..attention.attention_map import Pick, as_span
from ..attention.edits import Edit, use_edit
from ..attention.frame import span_length
from ..attention.mask import And, Or
from ..attention.masks import Causal, Mask, Window
from ..attention.score_matrix import AttentionCall
from ..models import Model
from ..models.block import Stack
from .capture import Head, attention_at, attention_modules, check_head, hook_site, resolve_kind

Change = Tensor | Callable[[Tensor], Tensor]  # a new activation, or a function of the old one
_WEIGHTS_AT_ONCE = 1 << 20  # weights of an edited head held at a time


class _LayerEdit(Edit):
    """An edit that knows which layer runs; where layers share a module, by counting its calls since the stack began."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._layers: dict[nn.Module, list[tuple[str, int]]] = {}
        for kind, modules in attention_modules(model).items():
            for layer, module in enumerate(modules):
                self._layers.setdefault(module, []).append((kind, layer))
        self._calls: dict[nn.Module, int] = {}

    def call(self, owner: nn.Module, call: AttentionCall) -> AttentionCall:
        self._calls[owner] = self._calls.get(owner, 0) + 1
        return self.edit_call(*self._layers[owner][self.call_index(owner)], call)

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        return self.edit_output(*self._layers[owner][self.call_index(owner)], call, output)

    def states(self, owner: nn.Module, x: Tensor) -> Tensor:
        if isinstance(owner, Stack):
            for module in owner.modules():
                self._calls.pop(module, None)
        return x

    def call_index(self, owner: nn.Module) -> int:
        """Which of its calls in this pass an attention is in: 0 unless layers share it."""
        return (self._calls.get(owner, 1) - 1) % len(self._layers[owner])

    def edit_call(self, kind: str, layer: int, call: AttentionCall) -> AttentionCall:
        return call

    def edit_output(self, kind: str, layer: int, call: AttentionCall, output: Tensor) -> Tensor:
        return output


# ---- heads

HeadChange = Callable[[AttentionCall, Tensor], Tensor]  # of the call and a head's output (B, T, D)


class _HeadEdit(_LayerEdit):
    """Replaces the outputs of single heads."""

    def __init__(self, model: Model, changes: Mapping[Head, HeadChange]) -> None:
        super().__init__(model)
        self._changes: dict[tuple[str, int], dict[int, HeadChange]] = {}
        for (kind, layer, head), change in changes.items():
            check_head(model, kind, layer, head)
            self._changes.setdefault((kind, layer), {})[head] = change

    def edit_output(self, kind: str, layer: int, call: AttentionCall, output: Tensor) -> Tensor:
        changes = self._changes.get((kind, layer))
        if not changes:
            return output
        heads = list(output.unbind(1))
        for head, change in changes.items():
            heads[head] = change(call, heads[head]).to(output.dtype)
        return torch.stack(heads, dim=1)


@contextmanager
def switch_off(model: Model, heads: Iterable[Head], by: str = "zero") -> Iterator[None]:
    """Ablate heads (kind, layer, head): their output is 0, or with by="mean" its mean over the text
    (Michel et al. 2019, §2.3: o = Σ_h ξ_h head_h W_o with ξ_h = 0)."""
    if by not in ("zero", "mean"):
        raise ValueError(f"by={by!r} is neither 'zero' nor 'mean'")

    def ablate(call: AttentionCall, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if by == "zero" else x.mean(1, keepdim=True).expand_as(x)

    with use_edit(_HeadEdit(model, dict.fromkeys(map(_check_head_name, heads), ablate))):
        yield


def _check_head_name(head: Iterable[object]) -> Head:
    match tuple(head):
        case (str() as kind, int() as layer, int() as number) if bool not in (type(layer), type(number)):
            return kind, layer, number
        case other:
            raise ValueError(f"a head is (kind, layer, number), such as ('self', 0, 3), got {other}")


@contextmanager
def edit_head(
    model: Model, kind: str, layer: int, head: int, weights: Tensor | AttentionMap, rows: Pick | None = None
) -> Iterator[None]:
    """Replace the attention weights of a head: its output is weights · V.

    weights  (T, S) or (B, T, S), or another map's head; with ``rows`` (R, S), for these queries only
    For passes over a whole text, with as many queries and keys as the weights. A map recorded meanwhile shows the
    head's own weights, those of its q and k.
    """

    def replace_output(call: AttentionCall, x: Tensor) -> Tensor:
        values = call.v[:, head * call.v.shape[1] // call.q.shape[1]]  # (B, S, D)
        if rows is None:
            return _apply_weights(weights, values, x.shape[1])
        span = as_span(rows, x.shape[1], "rows", x.device)
        x = x.clone()
        x[:, span] = _apply_weights(weights, values, span_length(span, x.shape[1])).to(x.dtype)
        return x

    with use_edit(_HeadEdit(model, {_check_head_name((kind, layer, head)): replace_output})):
        yield


def _apply_weights(weights: Tensor | AttentionMap, values: Tensor, n_rows: int) -> Tensor:
    """weights (T, S) · values (B, S, D), some rows at a time."""
    *lead, n_queries, n_keys = weights.shape
    if (n_queries, n_keys) != (n_rows, values.shape[1]):
        sizes = f"{n_queries} queries and {n_keys} keys, this pass {n_rows} and {values.shape[1]}"
        raise ValueError(f"weights have {sizes}; an edited head needs a pass over the whole text")
    if any(n not in (1, values.shape[0]) for n in lead[:1]) or (len(lead) == 2 and lead[1] != 1):
        raise ValueError(f"weights of shape {tuple(weights.shape)} are not one head's for a batch of {values.shape[0]}")
    step = max(1, _WEIGHTS_AT_ONCE // (values.shape[0] * n_keys))
    parts = []
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        tile = weights.tile(rows)[:, 0] if isinstance(weights, AttentionMap) else weights[..., rows, :]
        tile = tile[:, 0] if tile.dim() == 4 else tile
        parts.append(tile.to(values) @ values)
    return torch.cat(parts, dim=1)


# ---- activations


class _SiteEdit(_LayerEdit):
    """Replaces hidden states and outputs of heads at hook sites."""

    def __init__(self, model: Model, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(model)
        self._changes: dict[tuple[nn.Module, int], Callable[[Tensor], Tensor]] = {}
        for name, change in changes.items():
            site = hook_site(model, name)
            self._changes[site.owner, site.call] = change
        self._block_calls = {block: 0 for stack in model.stacks() for block in stack.blocks}

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        return self._apply(owner, self.call_index(owner), output)

    def states(self, owner: nn.Module, x: Tensor) -> Tensor:
        super().states(owner, x)
        if isinstance(owner, Stack):
            self._block_calls |= dict.fromkeys(owner.blocks, 0)
            return self._apply(owner, 0, x)
        index = self._block_calls[owner]
        self._block_calls[owner] = index + 1
        return self._apply(owner, index, x)

    def _apply(self, owner: nn.Module, index: int, x: Tensor) -> Tensor:
        change = self._changes.get((owner, index))
        return x if change is None else change(x)


@contextmanager
def patch(model: Model, activations: Mapping[str | Head, Change], positions: Pick | None = None) -> Iterator[None]:
    """Activation patching: activations of another run replace this run's (Vig et al. 2020, Meng et al. 2022).

    activations  by hook site, "decoder.blocks.3" or "encoder" (B, T, M), see ``capture.hook_site``, or by head
                 ("self", 3, 0) (B, T, D); a tensor, or a function of the activation it replaces
    positions    replace only these tokens; the tensor has as many, or is that of a whole text
    """
    sites = {
        name: _position_change(change, positions, name) for name, change in activations.items() if type(name) is str
    }
    heads: dict[Head, HeadChange] = {}
    for name, change in activations.items():
        if not isinstance(name, str):
            heads[_check_head_name(name)] = _ignore_call(_position_change(change, positions, str(name)))
    with use_edit(_SiteEdit(model, sites)), use_edit(_HeadEdit(model, heads)):
        yield


def _ignore_call(change: Callable[[Tensor], Tensor]) -> HeadChange:
    return lambda call, x: change(x)


def _position_change(change: Change, positions: Pick | None, name: str) -> Callable[[Tensor], Tensor]:
    """A change as a function of x (…, T, width), at all positions or at some."""

    def apply(x: Tensor) -> Tensor:
        n_tokens = x.shape[-2]
        span = slice(0, n_tokens) if positions is None else as_span(positions, n_tokens, "positions", x.device)
        old = x[..., span, :]
        if isinstance(change, Tensor):
            is_whole_text = positions is not None and change.shape[-2] == n_tokens
            new = (change[..., span, :] if is_whole_text else change).to(x)
        else:
            new = change(old)
        if new.shape != old.shape and (new.dim() > old.dim() or not _broadcasts(new.shape, old.shape)):
            shapes = f"has shape {tuple(new.shape)}, what passes there {tuple(old.shape)}"
            raise ValueError(f"the activation patched in at {name} {shapes}")
        if positions is None:
            return new.expand_as(x)
        x = x.clone()
        x[..., span, :] = new
        return x

    return apply


def _broadcasts(new: Sequence[int], old: Sequence[int]) -> bool:
    """Whether shapes differ in batch dimensions of 1 only: one run's activations may serve a whole batch."""
    lead = len(old) - len(new)
    return tuple(new[-2:]) == tuple(old[-2:]) and all(n in (1, m) for n, m in zip(new, old[lead:], strict=True))


@contextmanager
def watch(model: Model, places: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the activations of the last pass at some hook sites, as ``patch`` takes them."""
    activations: dict[str, Tensor] = {}

    def collector(name: str) -> Callable[[Tensor], Tensor]:
        def collect(x: Tensor) -> Tensor:
            activations[name] = x.detach()
            return x

        return collect

    with use_edit(_SiteEdit(model, {name: collector(name) for name in places})):
        yield activations


# ---- masks and scores


class _CallEdit(_LayerEdit):
    """Changes mask or scores of the attentions of some kinds and layers."""

    def __init__(
        self,
        model: Model,
        kinds: Iterable[str],
        layers: Iterable[int] | None,
        change: Callable[[AttentionCall], AttentionCall],
    ) -> None:
        super().__init__(model)
        self._kinds, self._layer_set, self._change = set(kinds), None if layers is None else set(layers), change
        for kind in self._kinds:
            for layer in self._layer_set or ():
                attention_at(model, kind, layer)  # raises where there is none

    def edit_call(self, kind: str, layer: int, call: AttentionCall) -> AttentionCall:
        is_selected = kind in self._kinds and (self._layer_set is None or layer in self._layer_set)
        return self._change(call) if is_selected else call


@contextmanager
def no_causal_mask(model: Model, layers: Iterable[int] | None = None) -> Iterator[None]:
    """Remove the causal mask (Vaswani et al. 2017, §3.2.3), so that a decoder sees later tokens.

    A window over the past becomes one over both sides. Padding stays hidden.
    """
    if not any(stack.causal for stack in model.stacks()):
        raise ValueError("this model has no causal mask to remove: none of its stacks hides the future")

    def unmask(call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None if call.mask is None else _without_causal(call.mask))

    with use_edit(_CallEdit(model, ("self",), layers, unmask)):
        yield


def _without_causal(mask: Mask) -> Mask | None:
    """The mask without what hides later keys; None where nothing is left of it."""
    if isinstance(mask, Causal):
        return None
    if isinstance(mask, Window):
        return Window(mask.size, max(mask.ahead, mask.size - 1))
    if isinstance(mask, And):
        a, b = _without_causal(mask.a), _without_causal(mask.b)
        return a if b is None else b if a is None else a & b
    if isinstance(mask, Or):
        a, b = _without_causal(mask.a), _without_causal(mask.b)
        return None if a is None or b is None else a | b
    return mask


@contextmanager
def attention_scale(
    model: Model, factor: float, kinds: Iterable[str] | None = None, layers: Iterable[int] | None = None
) -> Iterator[None]:
    """Scores times a factor: softmax(factor · q kᵀ / √D). 0 gives equal weights, √D undoes the paper's scaling, larger
    factors concentrate on one key. Position biases that are not part of q · k stay as they are."""
    if not math.isfinite(factor):
        raise ValueError(f"factor={factor} must be a finite number")
    resolve_kind(model, None)  # raises where the model has no attention
    modules = attention_modules(model)
    kinds = list(modules) if kinds is None else list(kinds)
    for kind in kinds:
        for module in modules.get(kind, [attention_at(model, kind, 0)]):
            if not isinstance(module.mechanism, Dot) or module.mechanism.kind != "dot":
                name = getattr(module.mechanism, "name", type(module.mechanism).__name__)
                raise ValueError(f"attention_scale is for dot products; the {kind} attention's scores are {name!r}")

    def scale(call: AttentionCall) -> AttentionCall:
        assert isinstance(call.mechanism, Dot)
        bias = call.bias
        if isinstance(bias, XLRelative):  # a part of q · k, with a scale of its own
            bias = copy.copy(bias)  # its parameters are shared
            bias.scale = bias.scale * factor
        return replace(call, mechanism=Dot(call.mechanism.factor(call.q.shape[-1]) * factor), bias=bias)

    with use_edit(_CallEdit(model, kinds, layers, scale)):
        yield
