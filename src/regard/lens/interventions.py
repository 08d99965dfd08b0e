"""Interventions: change one thing inside a model for the length of a ``with`` block, and see what its answers do.

    with switch_off(model, [("cross", 1, 0)]), attention_scale(model, 2.0):
        look = regard.look(model, "…")

Everything is done where the model computes, as a function call in its forward pass (``attention.edits``): no hooks, no
copies, nothing to put back. Afterwards, and after an exception, the model is exactly what it was.
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
from ..attention.biases import Bias
from ..attention.edits import Edit, use_edit
from ..attention.frame import span_length
from ..attention.mask import And, Or
from ..attention.masks import Causal, Mask, Window
from ..attention.score_matrix import AttentionCall
from ..models import Model
from ..models.block import Stack
from .capture import Head, attention_at, attention_modules, check_head, hook_site, resolve_kind

# what takes an activation's place: a tensor, or a function of what would have passed
Change = Tensor | Callable[[Tensor], Tensor]
_STRIPE = 1 << 20  # weights of an edited head held at a time


class _ByLayer(Edit):
    """An edit that knows which layer runs, also where several share a module: it counts calls since the stack began."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._layers: dict[nn.Module, list[tuple[str, int]]] = {}
        for kind, modules in attention_modules(model).items():
            for layer, module in enumerate(modules):
                self._layers.setdefault(module, []).append((kind, layer))
        self._calls: dict[nn.Module, int] = {}

    def call(self, owner: nn.Module, call: AttentionCall) -> AttentionCall:
        self._calls[owner] = self._calls.get(owner, 0) + 1
        return self.attention(*self._layers[owner][self.turn(owner)], call)

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        return self.output(*self._layers[owner][self.turn(owner)], call, output)

    def states(self, owner: nn.Module, x: Tensor) -> Tensor:
        if isinstance(owner, Stack):
            for module in owner.modules():
                self._calls.pop(module, None)
        return x

    def turn(self, owner: nn.Module) -> int:
        """Which of its calls in this pass an attention is in: always the first where layers do not share it."""
        return (self._calls.get(owner, 1) - 1) % len(self._layers[owner])

    def attention(self, kind: str, layer: int, call: AttentionCall) -> AttentionCall:
        return call

    def output(self, kind: str, layer: int, call: AttentionCall, output: Tensor) -> Tensor:
        return output


# ---- heads


class _Heads(_ByLayer):
    """Replaces the outputs of single heads, (B, T, D) each."""

    def __init__(self, model: Model, changes: Mapping[Head, Callable[[AttentionCall, Tensor], Tensor]]) -> None:
        super().__init__(model)
        self._changes: dict[tuple[str, int], dict[int, Callable[[AttentionCall, Tensor], Tensor]]] = {}
        for (kind, layer, head), change in changes.items():
            check_head(model, kind, layer, head)
            self._changes.setdefault((kind, layer), {})[head] = change

    def output(self, kind: str, layer: int, call: AttentionCall, output: Tensor) -> Tensor:
        changes = self._changes.get((kind, layer))
        if not changes:
            return output
        heads = list(output.unbind(1))
        for head, change in changes.items():
            heads[head] = change(call, heads[head]).to(output.dtype)
        return torch.stack(heads, dim=1)


@contextmanager
def switch_off(model: Model, heads: Iterable[Head], by: str = "zero") -> Iterator[None]:
    """Heads (kind, layer, head) that say nothing: 0 in the place of their output, or with by="mean" always the same,
    their mean over the text (Michel et al. 2019, §2.3: o = Σ_h ξ_h head_h W_o with ξ_h = 0)."""
    if by not in ("zero", "mean"):
        raise ValueError(f"by={by!r} is neither 'zero' nor 'mean'")

    def silent(call: AttentionCall, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if by == "zero" else x.mean(1, keepdim=True).expand_as(x)

    with use_edit(_Heads(model, dict.fromkeys(_heads(heads), silent))):
        yield


def _heads(heads: Iterable[Head]) -> list[Head]:
    found: list[Head] = []
    for head in map(tuple, heads):
        match head:
            case (str() as kind, int() as layer, int() as number) if bool not in (type(layer), type(number)):
                found.append((kind, layer, number))
            case _:
                raise ValueError(f"a head is (kind, layer, number), such as ('self', 0, 3), got {head}")
    return found


@contextmanager
def edit_head(
    model: Model, kind: str, layer: int, head: int, weights: Tensor | AttentionMap, rows: Pick | None = None
) -> Iterator[None]:
    """A head that looks where it is told: its output is weights · V.

    weights  (T, S) or (B, T, S), or another map's head; with ``rows`` (R, S), for these queries alone
    It is for passes over a whole text, where queries and keys are as many as the weights. A map recorded meanwhile
    shows where q and k would have had this head look.
    """

    def told(call: AttentionCall, x: Tensor) -> Tensor:
        values = call.v[:, head * call.v.shape[1] // call.q.shape[1]]  # (B, S, D)
        if rows is None:
            return _weighted(weights, values, x.shape[1])
        some = as_span(rows, x.shape[1], "rows", x.device)
        x = x.clone()
        x[:, some] = _weighted(weights, values, span_length(some, x.shape[1])).to(x.dtype)
        return x

    with use_edit(_Heads(model, {_heads([(kind, layer, head)])[0]: told})):
        yield


def _weighted(weights: Tensor | AttentionMap, values: Tensor, n_rows: int) -> Tensor:
    """weights (T, S) · values (B, S, D), a stripe of rows at a time."""
    *lead, n_queries, n_keys = weights.shape
    if (n_queries, n_keys) != (n_rows, values.shape[1]):
        sizes = f"{n_queries} queries and {n_keys} keys, this pass {n_rows} and {values.shape[1]}"
        raise ValueError(f"weights have {sizes}; an edited head needs a pass over the whole text")
    if any(n not in (1, values.shape[0]) for n in lead[:1]) or (len(lead) == 2 and lead[1] != 1):
        raise ValueError(f"weights of shape {tuple(weights.shape)} are not one head's for a batch of {values.shape[0]}")
    step = max(1, _STRIPE // (values.shape[0] * n_keys))
    parts = []
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        tile = weights.tile(rows)[:, 0] if isinstance(weights, AttentionMap) else weights[..., rows, :]
        tile = tile[:, 0] if tile.dim() == 4 else tile
        parts.append(tile.to(values) @ values)
    return torch.cat(parts, dim=1)


# ---- activations


class _Patch(_ByLayer):
    """Replaces states and outputs of heads at named places."""

    def __init__(self, model: Model, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(model)
        self._changes: dict[tuple[nn.Module, int], Callable[[Tensor], Tensor]] = {}
        for name, change in changes.items():
            site = hook_site(model, name)
            self._changes[site.owner, site.call] = change
        self._block_turns = {block: 0 for stack in model.stacks() for block in stack.blocks}

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        return self._changed(owner, self.turn(owner), output)

    def states(self, owner: nn.Module, x: Tensor) -> Tensor:
        super().states(owner, x)
        if isinstance(owner, Stack):
            self._block_turns |= dict.fromkeys(owner.blocks, 0)
            return self._changed(owner, 0, x)
        turn = self._block_turns[owner]
        self._block_turns[owner] = turn + 1
        return self._changed(owner, turn, x)

    def _changed(self, owner: nn.Module, turn: int, x: Tensor) -> Tensor:
        change = self._changes.get((owner, turn))
        return x if change is None else change(x)


@contextmanager
def patch(model: Model, activations: Mapping[str | Head, Change], positions: Pick | None = None) -> Iterator[None]:
    """Activations of another run in the place of this one's (Vig et al. 2020, Meng et al. 2022).

    activations  by place: "decoder.blocks.3" or "encoder" (B, T, M) as in ``places.place_of``, or a head
                 ("self", 3, 0) (B, T, D); a tensor, or a function of what would have passed. ``watch`` collects them
    positions    only these tokens are replaced; the tensor has as many, or is that of a whole text
    """
    states = {name: _put(change, positions, name) for name, change in activations.items() if isinstance(name, str)}
    heads = {name: change for name, change in activations.items() if not isinstance(name, str)}
    told = {head: _of_output(_put(heads[head], positions, str(head))) for head in _heads(heads)}
    with use_edit(_Patch(model, states)), use_edit(_Heads(model, told)):
        yield


def _of_output(change: Callable[[Tensor], Tensor]) -> Callable[[AttentionCall, Tensor], Tensor]:
    return lambda call, x: change(x)


def _put(change: Change, positions: Pick | None, name: str) -> Callable[[Tensor], Tensor]:
    """A change as a function of x (…, T, width), at all positions or at some."""

    def put(x: Tensor) -> Tensor:
        n_tokens = x.shape[-2]
        at = slice(0, n_tokens) if positions is None else as_span(positions, n_tokens, "positions", x.device)
        here = x[..., at, :]
        if isinstance(change, Tensor):
            whole = positions is not None and change.shape[-2] == n_tokens
            new = (change[..., at, :] if whole else change).to(x)
        else:
            new = change(here)
        if new.shape != here.shape and (new.dim() > here.dim() or not _fits(new.shape, here.shape)):
            shapes = f"has shape {tuple(new.shape)}, what passes there {tuple(here.shape)}"
            raise ValueError(f"the activation patched in at {name} {shapes}")
        if positions is None:
            return new.expand_as(x)
        x = x.clone()
        x[..., at, :] = new
        return x

    return put


def _fits(new: Sequence[int], here: Sequence[int]) -> bool:
    """One run's activations serve a whole batch; nothing else is stretched."""
    lead = len(here) - len(new)
    return tuple(new[-2:]) == tuple(here[-2:]) and all(n in (1, m) for n, m in zip(new, here[lead:], strict=True))


@contextmanager
def watch(model: Model, places: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collect what passes at some places, that of the last pass: ``patch(model, seen)`` puts it into another."""
    seen: dict[str, Tensor] = {}

    def shown(name: str) -> Callable[[Tensor], Tensor]:
        def show(x: Tensor) -> Tensor:
            seen[name] = x.detach()
            return x

        return show

    with use_edit(_Patch(model, {name: shown(name) for name in places})):
        yield seen


# ---- how attention is computed


class _Calls(_ByLayer):
    """Changes mask or scores of the attentions of some layers."""

    def __init__(
        self,
        model: Model,
        kinds: Iterable[str],
        layers: Iterable[int] | None,
        change: Callable[[AttentionCall], AttentionCall],
    ) -> None:
        super().__init__(model)
        some = None if layers is None else list(layers)
        for kind in kinds:
            for layer in some or ():
                attention_at(model, kind, layer)
        self._kinds, self._some, self._change = set(kinds), some, change

    def attention(self, kind: str, layer: int, call: AttentionCall) -> AttentionCall:
        wanted = kind in self._kinds and (self._some is None or layer in self._some)
        return self._change(call) if wanted else call


@contextmanager
def no_causal_mask(model: Model, layers: Iterable[int] | None = None) -> Iterator[None]:
    """A decoder that sees the future: what the mask of §3.2.3 (Vaswani et al. 2017) is there to prevent.

    A window over the past becomes one over both sides. Padding stays hidden.
    """
    if not any(stack.causal for stack in model.stacks()):
        raise ValueError("this model has no causal mask to remove: none of its stacks hides the future")

    def open_(call: AttentionCall) -> AttentionCall:
        return replace(call, mask=None if call.mask is None else _seeing_ahead(call.mask))

    with use_edit(_Calls(model, ("self",), layers, open_)):
        yield


def _seeing_ahead(mask: Mask) -> Mask | None:
    """The mask without what hides later keys; None where nothing is left of it."""
    if isinstance(mask, Causal):
        return None
    if isinstance(mask, Window):
        return Window(mask.size, max(mask.ahead, mask.size - 1))
    if isinstance(mask, And):
        a, b = _seeing_ahead(mask.a), _seeing_ahead(mask.b)
        return a if b is None else b if a is None else a & b
    if isinstance(mask, Or):
        a, b = _seeing_ahead(mask.a), _seeing_ahead(mask.b)
        return None if a is None or b is None else a | b
    return mask


@contextmanager
def attention_scale(
    model: Model, factor: float, kinds: Iterable[str] | None = None, layers: Iterable[int] | None = None
) -> Iterator[None]:
    """Scores times a factor: softmax(factor · q kᵀ / √D). 0 looks everywhere alike, √D undoes the paper's scaling,
    more looks at one key alone. Position biases that are no part of q · k stay as they are."""
    if not math.isfinite(factor):
        raise ValueError(f"factor={factor} must be a finite number")
    resolve_kind(model, None)  # or there is nothing to scale
    own = attention_modules(model)
    some = list(own) if kinds is None else list(kinds)
    for kind in some:
        for module in own.get(kind, [attention_at(model, kind, 0)]):
            if not isinstance(module.mechanism, Dot) or module.mechanism.kind != "dot":
                name = getattr(module.mechanism, "name", type(module.mechanism).__name__)
                raise ValueError(f"attention_scale is for dot products; the {kind} attention's scores are {name!r}")

    def scaled(call: AttentionCall) -> AttentionCall:
        assert isinstance(call.mechanism, Dot)
        dot = Dot(call.mechanism.factor(call.q.shape[-1]) * factor)
        return replace(call, mechanism=dot, bias=_scaled(call.bias, factor))

    with use_edit(_Calls(model, some, layers, scaled)):
        yield


def _scaled(bias: Bias | None, factor: float) -> Bias | None:
    """Transformer-XL's bias is a part of q · k that has its own copy of the scale."""
    if not isinstance(bias, XLRelative):
        return bias
    bias = copy.copy(bias)  # its parameters are shared
    bias.scale = bias.scale * factor
    return bias
