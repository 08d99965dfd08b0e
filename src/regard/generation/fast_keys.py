"""Keys and values of texts that branch: what beams share is held once, and choosing among beams copies none of it.

The k beams of a prompt lie in one block. Its columns are the prompt's tokens, then k for every step, one a beam; each
beam has a row of a mask that says which columns are its own past. When beam i goes on from beam j, row i becomes row j
of the mask, a few numbers, where a cache by rows would copy every key and value of every layer at every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEPS = 64  # steps there is room for at first; doubled when they are full


class BranchKeys:
    """The caches of all layers, each (B, G, columns, D) twice, for B prompts of ``size`` beams."""

    def __init__(self, k: list[Tensor], v: list[Tensor], real: Tensor | None, size: int, n_steps: int) -> None:
        """Begin with prompts: k and v (B, G, P, D) a layer; ``real`` (B, P) where some of it is padding."""
        self.size, self.n_steps = size, n_steps
        self._prefix = self.end = k[0].shape[2]
        self._k, self._v = k, v
        self._mask: Tensor | None = None  # (B, size, columns), added to scores: 0 or -inf
        if real is not None or size > 1:
            first = torch.zeros(len(k[0]), size, self.end, dtype=k[0].dtype)
            self._mask = first if real is None else first.masked_fill(~real[:, None], -math.inf)
        self._resize(min(n_steps, _STEPS))

    def __len__(self) -> int:
        """Rows, which are beams of prompts."""
        return len(self._k[0]) * self.size

    @property
    def mask(self) -> Tensor | None:
        """(B, 1, size, columns) for the columns there are, the next step's included; None where all may be seen."""
        return None if self._mask is None else self._mask[:, None, :, : self.end]

    def step(self) -> None:
        """Make room for one more token of every row; ``update`` then writes each layer's."""
        n_done = (self.end - self._prefix) // self.size
        if self.end + self.size > self._k[0].shape[2]:
            self._resize(max(2 * n_done, 1))
        self.end += self.size

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, G, size, D) of the step; all keys and values of the layer (B, G, columns, D)."""
        start, end = self.end - self.size, self.end
        held_k, held_v = self._k[layer], self._v[layer]
        held_k[:, :, start:end] = k
        held_v[:, :, start:end] = v
        return held_k[:, :, :end], held_v[:, :, :end]

    def select(self, rows: Tensor) -> Tensor | None:
        """Row r goes on from row rows[r]. The prompts that are left, (B',), where they are not all in their places."""
        n, k = len(self._k[0]), self.size
        if len(rows) % k == 0:
            home = rows.view(-1, k) // k  # (B', k)
            if (home == home[:, :1]).all():
                prompts = home[:, 0]
                if self._mask is not None:
                    parent = (rows.view(-1, k) % k)[..., None].expand(-1, -1, self.end)
                    self._mask = self._mask[prompts]
                    self._mask[:, :, : self.end] = self._mask[:, :, : self.end].gather(1, parent)
                if len(prompts) == n and (prompts == torch.arange(n)).all():
                    return None
                self._k, self._v = ([self._rows(x, prompts) for x in held] for held in (self._k, self._v))
                return prompts
        return self._part(rows)

    def _part(self, rows: Tensor) -> Tensor:
        """Beams of a prompt no longer stay together: each becomes a prompt of its own, with its past as columns."""
        prompts, k = rows // self.size, self.size
        n_columns = self._prefix + (self.end - self._prefix) // k
        if self._mask is not None:
            mask = self._mask[prompts, rows % k, : self.end]  # (R, columns)
            mine = torch.arange(self._prefix, self.end).expand(len(rows), -1)[mask[:, self._prefix :] == 0]
            before = torch.arange(self._prefix).expand(len(rows), -1)
            columns = torch.cat([before, mine.view(len(rows), -1)], 1)  # (R, n_columns)
            padding = mask[:, : self._prefix]
            hidden = bool(padding.isinf().any())
            later = padding.new_zeros(len(rows), n_columns - self._prefix)
            self._mask = torch.cat([padding, later], 1)[:, None] if hidden else None
            index = columns[:, None, :, None]
            self._k, self._v = ([_columns(x, prompts, index) for x in held] for held in (self._k, self._v))
        else:
            self._k, self._v = ([self._rows(x, prompts) for x in held] for held in (self._k, self._v))
        self.size, self.end = 1, n_columns
        self._resize(min(max(2 * (self.end - self._prefix), _STEPS), self.n_steps))
        return prompts

    def _rows(self, held: Tensor, prompts: Tensor) -> Tensor:
        """Some prompts of a layer, with the same room; only what is written is copied."""
        new = held.new_empty(len(prompts), *held.shape[1:])
        new[:, :, : self.end] = held[:, :, : self.end].index_select(0, prompts)
        return new

    def _resize(self, n_steps: int) -> None:
        """Room for so many steps in all."""
        n_columns = self._prefix + n_steps * self.size

        def grown(held: Tensor) -> Tensor:
            new = held.new_empty(*held.shape[:2], n_columns, held.shape[3])
            new[:, :, : self.end] = held[:, :, : self.end]
            return new

        self._k, self._v = [grown(x) for x in self._k], [grown(x) for x in self._v]
        if self._mask is not None:
            own = torch.eye(self.size, dtype=torch.bool).repeat(1, n_steps)  # of a step's columns, a beam's own
            new = self._mask.new_zeros(*self._mask.shape[:2], n_columns)
            new[:, :, self._prefix :].masked_fill_(~own, -math.inf)
            new[:, :, : self.end] = self._mask[:, :, : self.end]
            self._mask = new


def _columns(held: Tensor, prompts: Tensor, index: Tensor) -> Tensor:
    """Each row's columns (R, 1, n, 1) of its prompt's block, (R, G, n, D)."""
    return held.index_select(0, prompts).gather(2, index.expand(-1, held.shape[1], -1, held.shape[3]))
