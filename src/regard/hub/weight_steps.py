"""Invertible steps between a foreign state dict and ours.

A family has a list of them: loading applies it, saving undoes it in reverse order. Names are patterns:
``h.{i}.ln_1.weight`` stands for that tensor of every layer; placeholders match whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Step:
    """One change of names or layout. ``undo(apply(x)) == x`` and ``apply(undo(y)) == y``, bit for bit."""

    def apply(self, tensors: Tensors) -> Tensors:
        """Theirs → ours."""
        raise NotImplementedError

    def undo(self, tensors: Tensors) -> Tensors:
        """Ours → theirs; by default nothing is written back."""
        return tensors


def to_ours(steps: Iterable[Step], tensors: Tensors) -> Tensors:
    for step in steps:
        tensors = step.apply(tensors)
    return tensors


def to_theirs(steps: Sequence[Step], tensors: Tensors) -> Tensors:
    for step in reversed(steps):
        tensors = step.undo(tensors)
    return tensors


@dataclass(frozen=True)
class Rename(Step):
    """Another name for the same tensor."""

    theirs: str
    ours: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {translate(name, self.theirs, self.ours) or name: x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return Rename(self.ours, self.theirs).apply(tensors)


@dataclass(frozen=True)
class Transpose(Step):
    """A matrix stored the other way round (GPT-2's Conv1D keeps (in, out), a Linear (out, in))."""

    name: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.T.contiguous() if matches(name, self.name) else x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return self.apply(tensors)


@dataclass(frozen=True)
class Reshape(Step):
    """The same numbers under another shape (a bias kept as one row of a matrix)."""

    name: str
    theirs: tuple[int, ...]
    ours: tuple[int, ...]

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.reshape(self.ours) if matches(name, self.name) else x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return Reshape(self.name, self.ours, self.theirs).apply(tensors)


@dataclass(frozen=True)
class Join(Step):
    """Several tensors laid one below the other into one (q, k and v into w_qkv); ``sizes`` are their rows."""

    theirs: tuple[str, ...]
    ours: str
    sizes: tuple[int, ...]

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name in list(tensors):
            ours = translate(name, self.theirs[0], self.ours)
            parts = [] if ours is None else [translate(name, self.theirs[0], other) for other in self.theirs]
            if ours is not None and all(part in tensors for part in parts):
                out[ours] = torch.cat([out.pop(part) for part in parts if part is not None])
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name, x in tensors.items():
            if matches(name, self.ours) and x.shape[0] == sum(self.sizes):
                del out[name]
                for theirs, part in zip(self.theirs, x.split(self.sizes), strict=True):
                    out[translate(name, self.ours, theirs) or name] = part.contiguous()
        return out


@dataclass(frozen=True)
class StackExperts(Step):
    """A matrix of each expert {e} as one tensor (E, rows, columns); several of one expert lie one below the other."""

    theirs: tuple[str, ...]
    ours: str
    n_experts: int

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name in tensors:
            match = _regex(self.theirs[0]).fullmatch(name)
            if match is None or match["e"] != "0":
                continue
            places = [match.groupdict() | {"e": e} for e in range(self.n_experts)]
            names = [[pattern.format(**place) for pattern in self.theirs] for place in places]
            if all(one in tensors for own in names for one in own):
                parts = [torch.cat([out.pop(one) for one in own]) for own in names]
                out[self.ours.format(**match.groupdict())] = torch.stack(parts)
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name, x in tensors.items():
            match = _regex(self.ours).fullmatch(name)
            if match is None or x.dim() != 3:
                continue
            del out[name]
            for e, own in enumerate(x):
                for pattern, part in zip(self.theirs, own.chunk(len(self.theirs)), strict=True):
                    out[pattern.format(**match.groupdict(), e=e)] = part.contiguous()
        return out


@dataclass(frozen=True)
class HeadsTogether(Step):
    """Rows stored head by head, (q, k, v) of each, as all queries, then all keys, then all values (GPT-NeoX)."""

    name: str
    n_heads: int

    def apply(self, tensors: Tensors) -> Tensors:
        return {
            name: self._swap(x, (self.n_heads, 3)) if matches(name, self.name) else x for name, x in tensors.items()
        }

    def undo(self, tensors: Tensors) -> Tensors:
        return {
            name: self._swap(x, (3, self.n_heads)) if matches(name, self.name) else x for name, x in tensors.items()
        }

    @staticmethod
    def _swap(x: Tensor, sizes: tuple[int, int]) -> Tensor:
        return x.unflatten(0, (*sizes, -1)).transpose(0, 1).flatten(0, 2).contiguous()


@dataclass(frozen=True)
class Tie(Step):
    """A second name for a tensor that we keep once; a file may hold both or either of the two."""

    theirs: str
    kept: str
    checked: bool = True  # both must hold the same numbers
    written: bool = False  # saving writes a copy under the second name too

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        second = out.pop(self.theirs, None)
        if second is None:
            return out
        first = out.setdefault(self.kept, second)
        if self.checked and first is not second and not second.is_meta and not torch.equal(first, second):
            names = f"{self.theirs} and {self.kept}"
            if self.written:
                raise ValueError(f"{names} hold different numbers; regard has one table for both texts")
            raise ValueError(f"{names} are tied by the config, but hold different numbers")
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        return {**tensors, self.theirs: tensors[self.kept].clone()} if self.written else tensors


@dataclass(frozen=True)
class Drop(Step):
    """A buffer that the model makes itself (a causal mask, position ids); nothing is written back."""

    name: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if not matches(name, self.name)}


@dataclass(frozen=True)
class Fill(Step):
    """A tensor of one constant that we do without (a bias of zeros); any other value there is refused."""

    name: str
    shape: tuple[int, ...]
    value: float

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        constant = out.pop(self.name, None)
        if constant is not None and not bool((constant == self.value).all()):
            raise ValueError(f"{self.name} should be {self.value} throughout by the config, but is not")
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        return {**tensors, self.name: torch.full(self.shape, self.value)}


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def matches(name: str, pattern: str) -> bool:
    return _regex(pattern).fullmatch(name) is not None


def translate(name: str, pattern: str, other: str) -> str | None:
    """``name``, which matches ``pattern``, as ``other`` would write it; None when it does not match."""
    match = _regex(pattern).fullmatch(name)
    return None if match is None else other.format(**match.groupdict())
