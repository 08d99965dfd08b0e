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
    """Keys and values of all layers in one tensor (layers, B, 2G, columns, D), for B prompts of ``size`` beams."""

    def __init__(self, held: list[tuple[Tensor, Tensor]], real: Tensor | None, size: int, n_steps: int) -> None:
        """Begin with prompts: of each layer k and v (B, G, P, D); ``real`` (B, P) where some of it is padding."""
        k, _ = held[0]
        self.size, self.n_steps, self._n_heads = size, n_steps, k.shape[1]
        self._prefix = self.end = k.shape[2]
        self._held = torch.stack([torch.cat(pair, 1) for pair in held])
        self._mask: Tensor | None = None  # (B, size, columns), added to scores: 0 or -inf
        if real is not None or size > 1:
            nothing = k.new_zeros(len(k), size, self.end)
            self._mask = nothing if real is None else nothing.masked_fill(~real[:, None], -math.inf)
        self._resize(min(n_steps, _STEPS))

    def step(self) -> Tensor | None:
        """Make room for one more token of every row, whose keys each layer then gives to ``update``.

        The mask (B, 1, size, columns) that goes with them; None where all may be seen.
        """
        start = self.end
        if start + self.size > self._held.shape[3]:
            self._resize(2 * (start - self._prefix) // self.size)
        self.end = start + self.size
        seen = self._held[:, :, :, : self.end]
        self._new = self._held[:, :, :, start : self.end].unbind()
        self._k, self._v = (part.unbind() for part in seen.split(self._n_heads, 2))
        return None if self._mask is None else self._mask[:, None, :, : self.end]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, 2G, size, D) of the step; all keys and all values of the layer (B, G, columns, D)."""
        self._new[layer].copy_(new)
        return self._k[layer], self._v[layer]

    def select(self, rows: Tensor) -> Tensor | None:
        """Row r goes on from row rows[r]. The prompts that are left, (B',), where they are not all in their places."""
        n, k = self._held.shape[1], self.size
        if k == 1:
            return self._keep(rows)
        if len(rows) % k:
            return self._part(rows)
        home = rows.view(-1, k) // k  # (B', k)
        prompts = home[:, 0]
        if not bool((home == home[:, :1]).all()):
            return self._part(rows)
        if len(prompts) != n or not torch.equal(prompts, torch.arange(n)):
            self._keep(prompts)
        else:
            prompts = None
        assert self._mask is not None
        past = self._mask[:, :, : self.end]
        past.copy_(past.gather(1, (rows % k).view(-1, k, 1).expand(-1, -1, self.end)))
        return prompts

    def _keep(self, prompts: Tensor) -> Tensor:
        """Some prompts, in any order; only what is written is copied."""
        old = self._held
        self._held = old.new_empty(len(old), len(prompts), *old.shape[2:])
        self._held[:, :, :, : self.end] = old[:, :, :, : self.end].index_select(1, prompts)
        self._mask = None if self._mask is None else self._mask[prompts]
        return prompts

    def _part(self, rows: Tensor) -> Tensor:
        """Beams of a prompt no longer stay together: each becomes a prompt of its own, with its past as columns."""
        assert self._mask is not None
        prompts, n_rows, prefix = rows // self.size, len(rows), self._prefix
        mask = self._mask[prompts, rows % self.size, : self.end]  # (R, columns)
        later = torch.arange(prefix, self.end).expand(n_rows, -1)[mask[:, prefix:] == 0].view(n_rows, -1)
        columns = torch.cat([torch.arange(prefix).expand(n_rows, -1), later], 1)  # (R, n)
        held = self._held.index_select(1, prompts)
        self._held = held.gather(3, columns[None, :, None, :, None].expand(len(held), -1, held.shape[2], -1, held.shape[4]))
        self.size, self.end = 1, columns.shape[1]
        padded = bool(mask[:, :prefix].isinf().any())
        self._mask = mask.gather(1, columns)[:, None] if padded else None
        self._resize(min(max(2 * (self.end - prefix), _STEPS), self.n_steps))
        return prompts

    def _resize(self, n_steps: int) -> None:
        """Room for so many steps in all."""
        n_columns = self._prefix + n_steps * self.size
        old = self._held
        self._held = old.new_empty(*old.shape[:3], n_columns, old.shape[4])
        self._held[:, :, :, : self.end] = old[:, :, :, : self.end]
        if self._mask is not None:
            new = self._mask.new_zeros(*self._mask.shape[:2], n_columns)
            own = torch.eye(self.size, dtype=torch.bool).repeat(1, n_steps)  # of a step's columns, a beam's own
            new[:, :, self._prefix :].masked_fill_(~own, -math.inf)
            new[:, :, : self.end] = self._mask[:, :, : self.end]
            self._mask = new
