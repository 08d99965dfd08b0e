"""Which blocks of the score matrix have to be computed: the plan that sparse attention follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..frame import Frame
from .mask import Box, Mask, block_range

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Every block of queries × keys is empty (skipped), full (no mask needed) or partial (masked element by element).

    One plan serves all of the batch and all heads: a block is empty when it is so for all of them.
    """

    kinds: Tensor  # (query blocks, key blocks) of EMPTY, PARTIAL, FULL
    block: tuple[int, int]
    shape: tuple[int, int]  # queries, keys

    @property
    def density(self) -> float:
        """Share of the blocks that are computed at all."""
        return float((self.kinds != EMPTY).float().mean())

    def rows(self) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        """For each block of queries, its non-empty blocks of keys and whether each needs the mask."""
        (n_queries, n_keys), (height, width) = self.shape, self.block
        for a, kinds in enumerate(self.kinds.tolist()):
            rows = slice(a * height, min((a + 1) * height, n_queries))
            yield (
                rows,
                [
                    (slice(b * width, min((b + 1) * width, n_keys)), kind == PARTIAL)
                    for b, kind in enumerate(kinds)
                    if kind != EMPTY
                ],
            )


def plan(mask: Mask | None, frame: Frame, block: tuple[int, int]) -> BlockPlan:
    """The plan of a mask in a frame, from the ranges of positions in each block: O((T/block)²), nothing T × S."""
    height, width = block
    shape = (frame.n_queries, frame.n_keys)
    i_min, i_max = block_range(frame.q_pos, height)
    j_min, j_max = block_range(frame.k_pos, width)
    box = Box(i_min[:, None], i_max[:, None], j_min[None], j_max[None], block, frame)
    if mask is None:
        some = torch.ones(len(i_min), len(j_min), dtype=torch.bool)
        every = some.clone()
    else:
        some, every = mask.bounds(box)
    if frame.may_have_gaps:
        some, every = some & (box.j_max >= 0), every & (box.j_min >= 0)
    kinds = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
    return BlockPlan(kinds.expand(len(i_min), len(j_min)), block, shape)
