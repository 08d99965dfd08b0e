"""The best few of many: the maxima of blocks say where to look, and the rest is never sorted."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_WORTH_IT = 8  # blocks for each one that is looked into


def top(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """What ``scores.topk(n)`` gives for (R, V): the n best of each row, best first, and where they stand.

    Each of the n best lies in one of the n blocks with the largest maxima. On a CPU finding those is one pass at the
    speed of memory, where topk over a vocabulary is many times that.
    """
    n_rows, n_all = scores.shape
    n_blocks = n_all // _BLOCK
    if scores.device.type != "cpu" or n_blocks < _WORTH_IT * n:
        return scores.topk(n)
    whole = n_blocks * _BLOCK
    blocks = scores[:, :whole].unflatten(1, (n_blocks, _BLOCK))  # (R, blocks, 64)
    where = blocks.amax(-1).topk(n).indices  # (R, n)
    few = blocks.gather(1, where[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    place = (where[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    if whole < n_all:
        few = torch.cat([few, scores[:, whole:]], 1)
        place = torch.cat([place, torch.arange(whole, n_all).expand(n_rows, -1)], 1)
    best, index = few.topk(n)
    return best, place.gather(1, index)
