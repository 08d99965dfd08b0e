"""Low-rank adaptation: fine-tune a few numbers beside frozen weights (Hu et al. 2021).

y = W x + b + (α/r) · B A x,   A (r, d_in) normal, B (d_out, r) zero: training starts from the model as it is

A joined weight (w_qkv: query, key, value; w_kv; a gated w_in: gate, up) is several matrices in one memory, and each of
them has its own A and B. The base's names stay as they were; ``w_qkv.lora_a.q`` and ``w_qkv.lora_b.q`` join them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..layers import FeedForward

M = TypeVar("M", bound=nn.Module)
# No model has all of these, so a list of targets may name one that is not there; any other must be found.
_ATTENTION_LAYERS = ("w_qkv", "w_query", "w_kv", "w_o", "w_q", "w_k", "w_v")
_WHOLE = "whole"


class LoraLinear(nn.Linear):
    """A Linear with frozen weights of its own and, for each of its ``parts`` that is adapted, a trained A and B.

    ``parts`` has the rows of the weight each joined matrix takes up; ``adapted`` the names of those that learn.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, parts: dict[str, slice], adapted: Collection[str]
    ) -> None:
        # On the meta device nothing is drawn or allocated; weight and bias are the base's own in a moment.
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.train(base.training)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.rows = {name: rows for name, rows in parts.items() if name in adapted}
        a, b = {}, {}
        for name, rows in self.rows.items():
            a[name] = nn.Parameter(base.weight.new_empty(rank, base.in_features))
            b[name] = nn.Parameter(base.weight.new_zeros(rows.stop - rows.start, rank))
            nn.init.normal_(a[name], std=base.in_features**-0.5)  # A x is then of x's own size
        self.lora_a, self.lora_b = nn.ParameterDict(a), nn.ParameterDict(b)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.weight, self.bias)
        return base + self.scale * self._addition(x)

    def _addition(self, x: Tensor) -> Tensor:
        """The B A x of every part side by side (…, d_out), zeros where a part is not adapted."""
        inner = F.linear(x, torch.cat([self.lora_a[name] for name in self.rows]))  # one product for all parts
        by_part = dict(zip(self.rows, inner.split(self.rank, dim=-1), strict=True))
        pieces, end = [], 0
        for name, rows in self.rows.items():
            if rows.start > end:
                pieces.append(inner.new_zeros(*x.shape[:-1], rows.start - end))
            pieces.append(F.linear(by_part[name], self.lora_b[name]))
            end = rows.stop
        if end < self.out_features:
            pieces.append(inner.new_zeros(*x.shape[:-1], self.out_features - end))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain Linear with W + (α/r) B A, computed in double precision and rounded once."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.weight.detach().clone()
        for name, rows in self.rows.items():
            addition = self.scale * (self.lora_b[name].double() @ self.lora_a[name].double())
            weight[rows] = (self.weight[rows].double() + addition).to(weight.dtype)
        plain.weight, plain.bias = nn.Parameter(weight), self.bias
        plain.train(self.training)
        return plain

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}, adapted={', '.join(self.rows)}"


def add_lora(
    model: M,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = _ATTENTION_LAYERS,
    keep: Sequence[str] = (),
) -> M:
    """Freeze the model, in place, and give the linear layers that ``targets`` name a trained low-rank addition.

    A target is the last part of a layer's name (``w_o``), a whole name, * for anything, or one matrix of a joined
    weight (``w_q``, ``w_v``, ``w_gate``). ``keep`` are the parameters that go on learning: a new head.
    """
    if rank < 1:
        raise ValueError(f"lora={rank} must be at least 1")
    found = _find(model, targets)
    kept = set(keep)
    unknown = sorted(kept - {name for name, _ in model.named_parameters()})
    if unknown:
        raise ValueError(f"keep names {unknown[0]!r}, which is no parameter of the model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    made: dict[int, LoraLinear] = {}
    for owner, attribute, layer, parts, adapted in found:
        if id(layer) not in made:  # a layer that stands in two places stays one
            made[id(layer)] = LoraLinear(layer, rank, 2.0 * rank if alpha is None else alpha, parts, adapted)
        setattr(owner, attribute, made[id(layer)])
    return model


def merge(model: M) -> M:
    """Fold every addition into its weights, in place: plain layers again, under the names the base had, to be saved.

    All parameters may learn again.
    """
    plain: dict[int, nn.Linear] = {}
    for owner in list(model.modules()):
        for attribute, layer in list(owner.named_children()):
            if isinstance(layer, LoraLinear):
                if id(layer) not in plain:
                    plain[id(layer)] = layer.merged()
                setattr(owner, attribute, plain[id(layer)])
    return model.requires_grad_(True)


def has_lora(model: nn.Module) -> bool:
    """Whether something is left to merge."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


def lora_names(model: nn.Module) -> list[str]:
    """The parameters of the additions: small enough to be kept and passed around without the base."""
    return [name for name, _ in model.named_parameters() if ".lora_a." in name or ".lora_b." in name]


_Found = tuple[nn.Module, str, nn.Linear, dict[str, slice], list[str]]


def _find(model: nn.Module, targets: Sequence[str]) -> list[_Found]:
    """Which layers are adapted, and which parts of them."""
    found: list[_Found] = []
    missed = set(targets)
    layers = list(_linear_layers(model))
    for name, owner, attribute, layer in layers:
        parts = _parts(owner, attribute, layer)
        adapted: set[str] = set()
        for target in targets:
            whole = fnmatchcase(attribute, target) or fnmatchcase(name, target)
            hit = set(parts) if whole else {part for part in parts if target == f"w_{part}"}
            adapted |= hit
            if hit:
                missed.discard(target)
        if adapted:
            found.append((owner, attribute, layer, parts, [part for part in parts if part in adapted]))
    strange = sorted(missed - set(_ATTENTION_LAYERS)) or (sorted(missed) if not found else [])
    if strange or not found:
        raise ValueError(_no_such_layer(strange, sorted({_word(name, attribute) for name, _, attribute, _ in layers})))
    return found


def _word(name: str, attribute: str) -> str:
    """What to call a layer in a list of targets: layers of a list have only their number for a last part."""
    return f"{name.rpartition('.')[0]}.*" if attribute.isdigit() else attribute


def _no_such_layer(strange: list[str], available: list[str]) -> str:
    if not available:
        return "lora needs linear layers, and this model has none"
    what = ", ".join(strange) or "nothing"
    near = difflib.get_close_matches(strange[0], available, 1) if strange else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"lora_targets={what} is no linear layer of this model, which has {', '.join(available)}{hint}"


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    for prefix, owner in model.named_modules():
        for attribute, layer in owner.named_children():
            if isinstance(layer, LoraLinear):
                raise ValueError(f"{prefix}.{attribute} already has a low-rank addition; merge it first")
            if isinstance(layer, nn.Linear):
                yield f"{prefix}.{attribute}".lstrip("."), owner, attribute, layer


def _parts(owner: nn.Module, attribute: str, layer: nn.Linear) -> dict[str, slice]:
    """The matrices a weight joins, by name, and their rows."""
    names: tuple[str, ...] = (_WHOLE,)
    sizes: tuple[int, ...] = (layer.out_features,)
    if isinstance(owner, MultiHeadAttention) and attribute in ("w_qkv", "w_kv", "w_query"):
        names = {"w_qkv": ("q", "k", "v"), "w_kv": ("k", "v"), "w_query": ("q",)}[attribute]
        width = {"q": owner.n_heads * owner.d_head, "k": owner.n_kv_heads * owner.d_head}
        sizes = tuple(width["q" if name == "q" else "k"] for name in names)
    elif isinstance(owner, FeedForward) and owner.gated and attribute == "w_in":
        names, sizes = ("gate", "up"), (owner.d_ff, owner.d_ff)
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}
