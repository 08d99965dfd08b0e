"""Interventions: change a model's activations or attention inside a ``with`` block.

    with switch_off(model, [("cross", 1, 0)]), attention_scale(model, 2.0):
        look = regard.look(model, "…")

Each change is a function call in the forward pass (``attention.edits``), without hooks or copies of the model. After
the block, also after an exception, the model computes exactly what it did before.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionMap, Dot, XLRelative
from ..attention.attention_map import Pick, as_span
from ..attention.edits import Edit, use_edit
from ..attention.frame import span_length
from ..attention.mask import And, Or
from ..attention.masks import Causal, Mask, Window
from ..attention.score_matrix import AttentionCall
from ..attention.state_space import StateSpaceMixer
from ..models import Model
from ..models.block import Stack
from ..models.sites import HookSite
from .capture import Head, attention_modules, attention_site, attention_sites, hook_site, resolve_kind

Change = Tensor | Callable[[Tensor], Tensor]  # a new activation, or a function of the old one
_WEIGHTS_AT_ONCE = 1 << 20  # weights of an edited head in memory at a time
OutputChange = Callable[[Any, Tensor], Tensor]  # (attention call, or None outside attention; activation) → activation
CallChange = Callable[[AttentionCall], AttentionCall]


class SiteEdit(Edit):
    """Changes activations or attention calls at hook sites; layers that share a module are told apart by its calls."""

    def __init__(
        self, model: Model, outputs: Mapping[HookSite, OutputChange], calls: Mapping[HookSite, CallChange] | None = None
    ) -> None:
        super().__init__(model)
        self._outputs = {(site.owner, site.call, site.point): change for site, change in outputs.items()}
        self._calls = {(site.owner, site.call): change for site, change in (calls or {}).items()}
        self._n_layers = Counter(module for modules in attention_modules(model).values() for module in modules)
        self._n_calls: Counter[nn.Module] = Counter()  # calls of each module since its stack started

    def call(self, owner: nn.Module, call: AttentionCall) -> AttentionCall:
        self._n_calls[owner] += 1
        for point in ("q", "k", "v"):
            change = self._outputs.get((*self._module_call(owner), point))
            if change is not None:
                changed: Any = {point: change(call, getattr(call, point))}
                call = replace(call, **changed)
        edit = self._calls.get(self._module_call(owner))
        return call if edit is None else edit(call)

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        if isinstance(owner, StateSpaceMixer):  # its heads are its only point
            self._n_calls[owner] += 1
        change = self._outputs.get((*self._module_call(owner), "heads"))
        return output if change is None else change(call, output)

    def states(self, owner: nn.Module, point: str, x: Tensor) -> Tensor:
        if isinstance(owner, Stack):
            for module in owner.modules():
                del self._n_calls[module]
        if point in ("input", "router"):  # the first point of a stack or block, and the only one of experts
            self._n_calls[owner] += 1
        change = self._outputs.get((*self._module_call(owner), point))
        return x if change is None else change(None, x)

    def _module_call(self, owner: nn.Module) -> tuple[nn.Module, int]:
        """A module and the index of its current call in this pass: 0 unless layers share it."""
        index = self._n_calls[owner] - 1
        return owner, index % self._n_layers[owner] if owner in self._n_layers else index


def _head_edit(model: Model, changes: Mapping[Head, OutputChange]) -> SiteEdit:
    """An edit that replaces the outputs (B, T, D) of single heads."""
    by_site: dict[HookSite, dict[int, OutputChange]] = {}
    for (kind, layer, head), change in changes.items():
        by_site.setdefault(attention_site(model, kind, layer, head), {})[head] = change

    def edit(changes: dict[int, OutputChange], call: AttentionCall, output: Tensor) -> Tensor:
        heads = list(output.unbind(1))
        for head, change in changes.items():
            heads[head] = change(call, heads[head]).to(output.dtype)
        return torch.stack(heads, dim=1)

    return SiteEdit(model, {site: partial(edit, changes) for site, changes in by_site.items()})


@contextmanager
def switch_off(model: Model, heads: Iterable[Head]) -> Iterator[None]:
    """Replace the output of heads (kind, layer, head) by 0 (Michel et al. 2019, §2.3: o = Σ_h ξ_h head_h W_o with
    ξ_h = 0). ``ablation.ablate`` replaces it by its mean over a data set or by that of another text.
    """
    with patch(model, dict.fromkeys(map(_check_head_name, heads), torch.zeros_like)):
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
    """Replace the attention weights of a head: its output becomes weights · V.

    weights  (T, S) or (B, T, S), or an attention map of one head; with ``rows``, (R, S) for these queries only

    For passes over a whole text with as many queries and keys as the weights. A map recorded inside the block still
    shows the head's own weights, those of its q and k.
    """

    def replace_output(call: AttentionCall, x: Tensor) -> Tensor:
        values = call.v[:, head * call.v.shape[1] // call.q.shape[1]]  # (B, S, D)
        if rows is None:
            return _apply_weights(weights, values, x.shape[1])
        span = as_span(rows, x.shape[1], "rows", x.device)
        x = x.clone()
        x[:, span] = _apply_weights(weights, values, span_length(span, x.shape[1])).to(x.dtype)
        return x

    with use_edit(_head_edit(model, {_check_head_name((kind, layer, head)): replace_output})):
        yield


def _apply_weights(weights: Tensor | AttentionMap, values: Tensor, n_rows: int) -> Tensor:
    """weights (T, S) · values (B, S, D), computed in chunks of rows."""
    *lead, n_queries, n_keys = weights.shape
    if (n_queries, n_keys) != (n_rows, values.shape[1]):
        sizes = f"{n_queries} queries and {n_keys} keys, this pass has {n_rows} and {values.shape[1]}"
        raise ValueError(f"the weights have {sizes}; an edited head needs a pass over the whole text")
    if any(n not in (1, values.shape[0]) for n in lead[:1]) or (len(lead) == 2 and lead[1] != 1):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)} do not fit one head and a batch of {values.shape[0]}"
        )
    step = max(1, _WEIGHTS_AT_ONCE // (values.shape[0] * n_keys))
    parts = []
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        tile = weights.tile(rows)[:, 0] if isinstance(weights, AttentionMap) else weights[..., rows, :]
        tile = tile[:, 0] if tile.dim() == 4 else tile
        parts.append(tile.to(values) @ values)
    return torch.cat(parts, dim=1)


@contextmanager
def patch(model: Model, activations: Mapping[str | Head, Change], positions: Pick | None = None) -> Iterator[None]:
    """Activation patching: replace activations by those of another run (Vig et al. 2020, Meng et al. 2022).

    activations  by hook site ("decoder.blocks.3.ff.neurons", see ``model.sites()``) or by head (("self", 3, 0), whose
                 output is (B, T, D)): a tensor, or a function of the activation that it replaces
    positions    replace only these tokens, by a tensor of as many tokens or of the whole text
    """
    sites: dict[HookSite, OutputChange] = {}
    heads: dict[Head, OutputChange] = {}
    for name, change in activations.items():
        new = _position_change(change, positions, str(name))
        if isinstance(name, str):
            sites[hook_site(model, name)] = new
        else:
            heads[_check_head_name(name)] = new
    with use_edit(SiteEdit(model, sites)), use_edit(_head_edit(model, heads)):
        yield


def _position_change(change: Change, positions: Pick | None, name: str) -> OutputChange:
    """A change as a function of x (…, T, width), at all positions or at some."""

    def apply(call: AttentionCall | None, x: Tensor) -> Tensor:
        n_tokens = x.shape[-2]
        span = slice(0, n_tokens) if positions is None else as_span(positions, n_tokens, "positions", x.device)
        old = x[..., span, :]
        if isinstance(change, Tensor):
            is_whole_text = positions is not None and change.shape[-2:-1] == (n_tokens,)
            new = change[..., span, :] if is_whole_text else change
        else:
            new = change(old)
        new = new.to(x)
        lead = old.dim() - new.dim()  # leading dimensions broadcast: one run's activations may patch a whole batch
        fits = lead >= 0 and new.shape[-2:] == old.shape[-2:]
        if not fits or any(n not in (1, m) for n, m in zip(new.shape, old.shape[lead:], strict=True)):
            shapes = f"has shape {tuple(new.shape)}, but the one it replaces has shape {tuple(old.shape)}"
            raise ValueError(f"the activation patched in at {name} {shapes}")
        if positions is None:
            return new.expand_as(x)
        x = x.clone()
        x[..., span, :] = new
        return x

    return apply


@contextmanager
def watch(model: Model, places: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the activations of the last pass at some hook sites, in the form that ``patch`` reads."""
    activations: dict[str, Tensor] = {}

    def collect(name: str, call: AttentionCall | None, x: Tensor) -> Tensor:
        activations[name] = x.detach()
        return x

    with use_edit(SiteEdit(model, {hook_site(model, name): partial(collect, name) for name in places})):
        yield activations


def _call_edit(model: Model, kinds: Iterable[str], layers: Iterable[int] | None, change: CallChange) -> SiteEdit:
    if layers is None:
        sites = attention_sites(model)
        selected = [site for kind in kinds for site in sites.get(kind, [])]
    else:
        selected = [attention_site(model, kind, layer) for layer in set(layers) for kind in kinds]
    return SiteEdit(model, {}, dict.fromkeys(selected, change))


@contextmanager
def no_causal_mask(model: Model, layers: Iterable[int] | None = None) -> Iterator[None]:
    """Remove the causal mask (Vaswani et al. 2017, §3.2.3), so that a decoder attends to later tokens.

    A window over the past becomes one over both sides. Padding stays masked.
    """
    if not any(stack.causal for stack in model.stacks()):
        raise ValueError("this model has no causal mask to remove: none of its stacks is causal")
    if any(isinstance(module, StateSpaceMixer) for module in attention_modules(model).get("self", ())):
        raise ValueError("a state space reads its text in order: it has no causal mask to remove")

    def unmask(call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None if call.mask is None else without_causal(call.mask))

    with use_edit(_call_edit(model, ("self",), layers, unmask)):
        yield


def without_causal(mask: Mask) -> Mask | None:
    """The mask without its causal part; None if nothing is left of it."""
    if isinstance(mask, Causal):
        return None
    if isinstance(mask, Window):
        return Window(mask.size, max(mask.ahead, mask.size - 1))
    if not isinstance(mask, And | Or):
        return mask
    a, b = without_causal(mask.a), without_causal(mask.b)
    if a is None or b is None:
        return a or b if isinstance(mask, And) else None
    return a & b if isinstance(mask, And) else a | b


@contextmanager
def attention_scale(
    model: Model, factor: float, kinds: Iterable[str] | None = None, layers: Iterable[int] | None = None
) -> Iterator[None]:
    """Multiply the scores by a factor: softmax(factor · q kᵀ / √D).

    0 gives equal weights, √D undoes the paper's scaling, larger factors concentrate on one key. Position biases that
    are not part of q · k are not scaled.
    """
    if not math.isfinite(factor):
        raise ValueError(f"factor={factor} must be a finite number")
    resolve_kind(model, None)  # raises where the model has no attention
    modules = attention_modules(model)
    kinds = list(modules) if kinds is None else list(kinds)
    for kind in kinds:
        for module in modules.get(kind, [attention_site(model, kind, 0).owner]):
            if not isinstance(module.mechanism, Dot) or module.mechanism.kind != "dot":
                name = getattr(module.mechanism, "name", type(module.mechanism).__name__)
                raise ValueError(f"attention_scale is for dot products; the {kind} attention has scores of {name!r}")

    def scale(call: AttentionCall) -> AttentionCall:
        assert isinstance(call.mechanism, Dot)
        bias = call.bias
        if isinstance(bias, XLRelative):  # part of q · k, with its own scale
            bias = copy.copy(bias)  # shallow: the parameters stay shared
            bias.scale = bias.scale * factor
        return replace(call, mechanism=Dot(call.mechanism.factor(call.q.shape[-1]) * factor), bias=bias)

    with use_edit(_call_edit(model, kinds, layers, scale)):
        yield
