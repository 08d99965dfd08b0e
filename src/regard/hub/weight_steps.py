"""Invertible steps between a Hugging Face state dict and ours.

Each family has a list of them: loading applies them in order, saving undoes them in reverse. Names are patterns:
``h.{i}.ln_1.weight`` stands for that tensor in every layer; placeholders match whole numbers.
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
        """Ours → theirs; by default unchanged."""
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
    """Transpose a matrix, or that of each expert (GPT-2's Conv1D stores (in, out), a Linear (out, in))."""

    name: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.mT.contiguous() if matches(name, self.name) else x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return self.apply(tensors)


@dataclass(frozen=True)
class Reshape(Step):
    """Change a tensor's shape (a bias stored as a matrix of one row)."""

    name: str
    theirs: tuple[int, ...]
    ours: tuple[int, ...]

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.reshape(self.ours) if matches(name, self.name) else x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return Reshape(self.name, self.ours, self.theirs).apply(tensors)


@dataclass(frozen=True)
class Join(Step):
    """Concatenate several tensors along their rows (q, k and v to w_qkv); ``sizes`` are their numbers of rows."""

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
class SplitRows(Step):
    """Split one tensor along its rows into several (a fused q, k and v): the inverse of ``Join``."""

    theirs: str
    ours: tuple[str, ...]
    sizes: tuple[int, ...]

    def apply(self, tensors: Tensors) -> Tensors:
        return Join(self.ours, self.theirs, self.sizes).undo(tensors)

    def undo(self, tensors: Tensors) -> Tensors:
        return Join(self.ours, self.theirs, self.sizes).apply(tensors)


@dataclass(frozen=True)
class StackExperts(Step):
    """Stack the matrices of all experts {e} to (E, rows, columns); several of one expert are concatenated first."""

    theirs: tuple[str, ...]
    ours: str
    n_experts: int

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name in tensors:
            match = _regex(self.theirs[0]).fullmatch(name)
            if match is None or match["e"] != "0":
                continue
            indices = match.groupdict()
            by_expert = [
                [pattern.format(**indices | {"e": e}) for pattern in self.theirs] for e in range(self.n_experts)
            ]
            if all(name in tensors for names in by_expert for name in names):
                parts = [torch.cat([out.pop(name) for name in names]) for names in by_expert]
                out[self.ours.format(**indices)] = torch.stack(parts)
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for name, x in tensors.items():
            match = _regex(self.ours).fullmatch(name)
            if match is None or x.dim() != 3:
                continue
            del out[name]
            for e, matrix in enumerate(x):
                for pattern, part in zip(self.theirs, matrix.chunk(len(self.theirs)), strict=True):
                    out[pattern.format(**match.groupdict(), e=e)] = part.contiguous()
        return out


@dataclass(frozen=True)
class HeadsTogether(Step):
    """Reorder rows stored head by head, (q, k, v) of each, to all queries, all keys, all values (GPT-NeoX).

    Likewise for other ``parts`` and axes: interleaved gate and up neurons to all gates, then all ups (gpt-oss).
    """

    name: str
    n_heads: int
    parts: int = 3
    axis: int = 0

    def apply(self, tensors: Tensors) -> Tensors:
        return self._swap(tensors, (self.n_heads, self.parts))

    def undo(self, tensors: Tensors) -> Tensors:
        return self._swap(tensors, (self.parts, self.n_heads))

    def _swap(self, tensors: Tensors, sizes: tuple[int, int]) -> Tensors:
        a = self.axis
        return {
            name: x.unflatten(a, (*sizes, -1)).transpose(a, a + 1).flatten(a, a + 2).contiguous()
            if matches(name, self.name)
            else x
            for name, x in tensors.items()
        }


@dataclass(frozen=True)
class Tie(Step):
    """A second name of a tensor that we store once; a file may hold either name or both."""

    theirs: str  # the second name
    kept: str
    checked: bool = True  # both must be equal
    written: bool = False  # saving also writes a copy under the second name

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        second = out.pop(self.theirs, None)
        if second is None:
            return out
        first = out.setdefault(self.kept, second)
        if self.checked and first is not second and not second.is_meta and not torch.equal(first, second):
            names = f"{self.theirs} and {self.kept}"
            if self.written:
                raise ValueError(f"{names} differ; regard has one table for source and target")
            raise ValueError(f"{names} are tied by the config, but differ")
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        return {**tensors, self.theirs: tensors[self.kept].clone()} if self.written else tensors


@dataclass(frozen=True)
class Drop(Step):
    """Drop a buffer that the model computes itself (a causal mask, position ids); it is not written back."""

    name: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if not matches(name, self.name)}


@dataclass(frozen=True)
class Fill(Step):
    """A constant tensor that we do not store (a bias of zeros); any other value is refused."""

    name: str
    shape: tuple[int, ...]
    value: float

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        constant = out.pop(self.name, None)
        if constant is not None and not bool((constant == self.value).all()):
            raise ValueError(f"every element of {self.name} must be {self.value} according to the config")
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        return {**tensors, self.name: torch.full(self.shape, self.value)}


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def matches(name: str, pattern: str) -> bool:
    return _regex(pattern).fullmatch(name) is not None


def translate(name: str, pattern: str, other: str) -> str | None:
    """``name`` rewritten from ``pattern`` to the pattern ``other``; None if it does not match."""
    match = _regex(pattern).fullmatch(name)
    return None if match is None else other.format(**match.groupdict())
