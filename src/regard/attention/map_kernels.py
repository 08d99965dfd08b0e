"""The statistics of an attention map on a GPU, by the kernels in ``kernels.map_walk``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..foundation.device import H200_SHARED_MEMORY, TRITON_INTERPRETED, shared_memory
from .score_matrix import AttentionCall, TileWalk
from .triton_backend import options, triton_obstacle

if TYPE_CHECKING:
    from ..kernels.flash_ops import Options

_SMALL = 1 << 21  # up to this many scores, torch's own operations are faster than a kernel's first launch
_SMALLEST_CELL = 16  # queries and keys per cell; with smaller cells a tile would have too many of them
MOST_KEPT = 64  # largest k of ``top``
_WIDEST_IN_LESS = 128  # widest heads on GPUs with less shared memory than an H200
_MOST_PUSHED = 256  # largest N of ``push``


@dataclass(frozen=True, eq=False)
class MapKernels:
    """The kernels for one map; each stores the lse it computes in the walk."""

    walk: TileWalk
    options: Options

    @classmethod
    def of(cls, walk: TileWalk) -> MapKernels | None:
        """None if the kernels do not support this map, or torch is as fast."""
        matrix, (b, h, n_queries, n_keys) = walk.scoring, walk.shape
        fits = matrix.q.shape[3] <= _WIDEST_IN_LESS or shared_memory(matrix.q.device) >= H200_SHARED_MEMORY
        usable = (TRITON_INTERPRETED or matrix.q.is_cuda) and matrix.sinks is None and fits
        if not usable or matrix.mechanism.kind not in ("dot", "capped") or b * h * n_queries * n_keys <= _SMALL:
            return None
        content_bias = matrix.bias is not None and matrix.bias.reads_content
        call = AttentionCall(matrix.q, matrix.k, matrix.mask, matrix.bias, matrix.mechanism, matrix.frame, v=matrix.k)
        return None if content_bias or triton_obstacle(call) is not None else cls(walk, options(call))

    def takes(self, rows: slice) -> bool:
        """Whether these rows are enough to be worth a kernel launch."""
        b, h, _, n_keys = self.walk.shape
        return b * h * (rows.stop - rows.start) * n_keys > _SMALL

    def entropy(self, rows: slice) -> Tensor:
        """The entropy (B, H, R) of some rows."""
        from ..kernels.map_walk import row_statistics

        matrix = self.walk.scoring
        self.walk.lse[:, :, rows], entropy = row_statistics(matrix.q, matrix.k, self.options, rows)
        return entropy

    def compute_lse(self, rows: slice) -> None:
        """Compute lse of these rows unless it is known."""
        if self.walk.lse[:, :, rows].isnan().any():
            self.entropy(rows)

    def top(self, k: int, rows: slice) -> tuple[Tensor, Tensor]:
        """The k largest weights of some rows, in descending order, and their keys, both (B, H, R, k)."""
        from ..kernels.map_walk import row_statistics

        matrix = self.walk.scoring
        lse, _, best, keys = row_statistics(matrix.q, matrix.k, self.options, rows, k)
        self.walk.lse[:, :, rows] = lse
        weights = torch.exp(best - lse[..., None])
        return weights, keys.masked_fill_(weights == 0, -1)

    def push(self, x: Tensor) -> Tensor | None:
        """x A for x (B, H, N, T); None if N is too large."""
        from ..kernels.map_walk import push_columns

        if x.shape[2] > _MOST_PUSHED:
            return None
        matrix = self.walk.scoring
        self.compute_lse(slice(0, x.shape[3]))
        return push_columns(matrix.q, matrix.k, self.walk.lse, x.to(self.walk.lse.dtype), self.options)

    def cells(self, h: int, w: int, largest: bool) -> Tensor | None:
        """The sum or the largest of the weights in each of h × w cells, (B, H, h, w); None if cells are too small."""
        from ..kernels.map_walk import pool_cells

        matrix, (_, _, n_queries, n_keys) = self.walk.scoring, self.walk.shape
        if n_queries // h < _SMALLEST_CELL or n_keys // w < _SMALLEST_CELL:
            return None
        self.compute_lse(slice(0, n_queries))
        return pool_cells(matrix.q, matrix.k, self.walk.lse, self.options, h, w, largest)
