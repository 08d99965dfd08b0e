"""Keys and values of texts that branch: what beams share is held once, and choosing among beams copies none of it.

The k beams of a prompt lie in one block. Its columns are the prompt's tokens, then k for every step, one a beam; each
beam has a row of a mask that says which columns are its own past. When beam i goes on from beam j, row i becomes row j
of the mask, a few numbers, where a cache by rows would copy every key and value of every layer at every step. Beams
soon have most of their past in common; columns that are nobody's past any more go, every few steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEPS = 64  # steps there is room for at a time
_STEPS_OF_BEAMS = 16  # the same for several beams, who then drop what is nobody's past


class BranchKeys:
    """Keys and values of all layers in one tensor (layers, 2, B, G, columns, D), for B prompts of ``size`` beams."""

    def __init__(self, held: list[tuple[Tensor, Tensor]], real: Tensor | None, size: int) -> None:
        """Begin with prompts: of each layer k and v (B, G, P, D); ``real`` (B, P) where some of it is padding."""
        k, _ = held[0]
        self.size, self.end = size, k.shape[2]
        self._held = torch.stack([torch.stack(pair) for pair in held])
        self._mask: Tensor | None = None  # (B, size, columns), added to scores: 0 or -inf
        if real is not None or size > 1:
            nothing = k.new_zeros(len(k), size, self.end)
            self._mask = nothing if real is None else nothing.masked_fill(~real[:, None], -math.inf)

    def step(self) -> Tensor | None:
        """Make room for one more token of every row, whose keys each layer then gives to ``update``.

        The mask (B, 1, size, columns) that goes with them; None where all may be seen.
        """
        if self.end + self.size > self._held.shape[4]:
            if self._mask is not None and self.size > 1:
                self._gather((self._mask[:, :, : self.end] == 0).any(1))
            self._make_room(_STEPS if self.size == 1 else _STEPS_OF_BEAMS)
        start, self.end = self.end, self.end + self.size
        self._new = self._held[..., start : self.end, :].unbind()
        self._k, self._v = (part.unbind() for part in self._held[..., : self.end, :].unbind(1))
        return None if self._mask is None else self._mask[:, None, :, : self.end]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values (B, 2G, size, D); all of the layer's, each (B, G, columns, D)."""
        self._new[layer].copy_(new.unflatten(1, (2, -1)).transpose(0, 1))
        return self._k[layer], self._v[layer]

    def select(self, rows: Tensor) -> Tensor | None:
        """Row r goes on from row rows[r]. The prompts that are left, (B',), where they are not all in their places."""
        n, k = self._held.shape[2], self.size
        if k == 1:
            return self._keep(rows)
        if len(rows) % k:
            return self._part(rows)
        home = rows.view(-1, k) // k  # (B', k)
        prompts = home[:, 0]
        if not bool((home == home[:, :1]).all()):
            return self._part(rows)
        moved = len(prompts) != n or not torch.equal(prompts, torch.arange(n))
        if moved:
            self._keep(prompts)
        assert self._mask is not None
        past = self._mask[:, :, : self.end]
        past.copy_(past.gather(1, (rows % k).view(-1, k, 1).expand(-1, -1, self.end)))
        return prompts if moved else None

    def _keep(self, prompts: Tensor) -> Tensor:
        """Some prompts, in any order; only what is written is copied."""
        old = self._held
        self._held = old.new_empty(*old.shape[:2], len(prompts), *old.shape[3:])
        self._held[..., : self.end, :] = old[..., : self.end, :].index_select(2, prompts)
        self._mask = None if self._mask is None else self._mask[prompts]
        return prompts

    def _part(self, rows: Tensor) -> Tensor:
        """Beams of a prompt no longer stay together: each becomes a prompt of its own, with its past as columns."""
        assert self._mask is not None
        prompts = rows // self.size
        self._mask = self._mask[prompts, rows % self.size, None]  # (R, 1, columns)
        self._held, self.size = self._held.index_select(2, prompts), 1
        self._gather(self._mask[:, 0, : self.end] == 0)
        if not self._mask.isinf().any():
            self._mask = None
        return prompts

    def _gather(self, alive: Tensor) -> None:
        """Keep each prompt's columns that are ``alive`` (B, columns), in order, and masked ones up to the longest's."""
        assert self._mask is not None
        n_columns = int(alive.sum(1).max())
        columns = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :n_columns]  # (B, n)
        *sizes, room, width = self._held.shape
        first = torch.arange(math.prod(sizes)).view(*sizes, 1) * room  # of each head's rows
        rows = (first + columns[:, None]).flatten()
        self._held = self._held.view(-1, width).index_select(0, rows).view(*sizes, n_columns, width)
        self._mask = self._mask.gather(2, columns[:, None].expand(-1, self._mask.shape[1], -1))
        self.end = n_columns

    def _make_room(self, n_steps: int) -> None:
        """For so many steps more."""
        old, n_columns = self._held, self.end + n_steps * self.size
        self._held = old.new_empty(*old.shape[:4], n_columns, old.shape[5])
        self._held[..., : self.end, :] = old[..., : self.end, :]
        if self._mask is not None:
            others = ~torch.eye(self.size, dtype=torch.bool).repeat(1, n_steps)  # of a step's columns, not a beam's own
            later = self._mask.new_zeros(*self._mask.shape[:2], n_steps * self.size).masked_fill_(others, -math.inf)
            self._mask = torch.cat([self._mask[:, :, : self.end], later], 2)
