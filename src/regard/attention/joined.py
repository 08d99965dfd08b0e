"""What was seen of an attention, and the steps of one decoding joined to a single score matrix."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .biases import Bias
from .cache import Cache, CrossCache
from .cache.cache import Edition
from .call import Scoring
from .frame import Frame, Site
from .masks import Mask
from .masks.mask import Bounds, Box, block_range
from .scores import Mechanism


class Seen(NamedTuple):
    """One attention as it was computed: q and k as the mechanism prepared them, and what its weights follow from.

    While decoding with a cache, k, v and frame are None: the cache has them, and to keep them for every step would be
    O(T²). ``edition`` says what the cache held then. A memory is the same at every step and kept: ``memory`` has the
    keys of a CrossCache and their positions. A recorder without ``values`` leaves out v and output.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    output: Tensor | None
    mask: Mask | None
    bias: Bias | None
    mechanism: Mechanism
    q_pos: Tensor
    frame: Frame | None
    cache: Cache | None
    edition: Edition | None
    memory: tuple[Tensor, Tensor] | None


def keys_now(cache: Cache) -> tuple[Tensor, Tensor]:
    """The keys of a cache and their positions, without history."""
    k, positions = cache.keys()
    return k.detach(), positions


def same_memory(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Whether two memories are alike; beams of one source are, however they were reordered."""
    return a is b or all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def join(steps: list[Seen], cache: Cache, keys: tuple[Tensor, Tensor]) -> Scoring:
    """One Scoring for all steps. While decoding only queries are kept: the keys are the cache's, asked for once."""
    first, (k, k_pos) = steps[0], keys
    if first.mechanism.kind == "summary":
        raise ValueError(
            f"mechanism {first.mechanism.name!r} sums up its keys anew at every step; there is no map of them all"
        )
    if any(step.bias is not first.bias for step in steps):
        raise ValueError(f"the bias is not the same in all {len(steps)} steps; say which step to look at")
    q_pos = _beside([step.q_pos for step in steps])
    frame = Frame(first.q.shape[0], first.q.shape[1], q_pos, k_pos)
    sizes = [step.q.shape[2] for step in steps]
    mask = _mask_of([step.mask for step in steps], sizes)
    if not isinstance(cache, CrossCache):
        _check_complete(q_pos, k_pos)
        written = _beside([step.q_pos.amax(-1, keepdim=True).expand_as(step.q_pos) for step in steps])
        mask = Written(written) if mask is None else mask & Written(written)
    if mask is not None:
        mask.check(frame)
    return Scoring(
        torch.cat([step.q for step in steps], dim=2),
        first.mechanism.keys(k),
        mask,
        first.bias,
        first.mechanism,
        frame,
    )


def _beside(parts: list[Tensor]) -> Tensor:
    """(T,) and (B, T) side by side."""
    n_rows = max((x.shape[0] for x in parts if x.dim() == 2), default=None)
    return torch.cat(parts if n_rows is None else [x.expand(n_rows, -1) for x in parts], dim=-1)


def _check_complete(q_pos: Tensor, k_pos: Tensor) -> None:
    """Weights are shares of a whole: with some of the keys gone, those of the others cannot be known."""
    last = int(q_pos.max())
    there = torch.zeros(*k_pos.shape[:-1], last + 2, dtype=torch.bool, device=k_pos.device)
    there.scatter_(-1, torch.where((k_pos >= 0) & (k_pos <= last), k_pos, last + 1), True)  # the rest, out of the way
    wanted = torch.arange(last + 1, device=k_pos.device) <= q_pos.amax(-1, keepdim=True)
    gone = int((wanted & ~there[..., :-1]).sum(-1).max())
    if gone:
        raise ValueError(f"{gone} of the {last + 1} keys are no longer in the cache; RingCache(keep_keys=…) keeps them")


@dataclass(frozen=True, eq=False)
class Written(Mask):
    """Keys that were in the cache when the query was asked: up to the last position of its step."""

    until: Tensor  # (T,) or (B, T)

    def allows(self, at: Site) -> Tensor:
        return at.j <= (self.until[at.row] if self.until.dim() == 1 else self.until[at.b, at.row])

    def bounds(self, box: Box) -> Bounds:
        low, high = block_range(self.until, box.block[0])
        return box.j_min <= high[:, None], box.j_max <= low[:, None]


@dataclass(frozen=True, eq=False)
class ByStep(Mask):
    """Each step's queries under the mask that step was given; None: they see everything."""

    masks: tuple[Mask | None, ...]
    ends: tuple[int, ...]  # the row after each step's last

    def allows(self, at: Site) -> Tensor:
        allowed = (at.row >= 0) & (at.j >= 0)
        start = 0
        for mask, end in zip(self.masks, self.ends, strict=True):
            here = (at.row >= start) & (at.row < end)
            if mask is not None and here.any():
                allowed = torch.where(here, mask.allows(at), allowed)
            start = end
        return allowed

    def check(self, frame: Frame) -> None:
        for mask in self.masks:
            if mask is not None:
                mask.check(frame)


def _mask_of(masks: list[Mask | None], sizes: list[int]) -> Mask | None:
    """The one mask of all steps; where they differ, each for its own rows."""
    if all(_same(mask, masks[0]) for mask in masks):
        return masks[0]
    return ByStep(tuple(masks), tuple(torch.tensor(sizes).cumsum(0).tolist()))


def _same(a: object, b: object) -> bool:
    """Whether two masks say the same; models build theirs anew with every step."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if a is b or not isinstance(a, Mask) or type(a) is not type(b) or not is_dataclass(a):
        return a is b or (not isinstance(a, Mask) and a == b)
    return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
