"""Caches of a fixed size: one that holds a whole text, one that holds a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor

from ...foundation.checks import check_positive
from .cache import View, flat
from .slots import Numbers, SlotCache, Slots, slots_of


class StaticCache(SlotCache):
    """Preallocated for ``max_len`` tokens; the key at position p lies in slot p. For torch.compile and captured graphs.

    Every step has the same shapes, but for the first update of an empty cache, which returns the new keys alone: a
    prompt does not look at max_len empty slots.
    """

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        max_len: int,
        d_head: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        numbers: Numbers = "model",
    ) -> None:
        check_positive(batch=batch, n_kv_heads=n_kv_heads, max_len=max_len, d_head=d_head)
        slots = slots_of(2, (batch, n_kv_heads, max_len, d_head), dtype, device, numbers)
        super().__init__(slots, ("max_len", max_len))
        self.max_len = max_len

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if carries_gradient(k, v):
            raise ValueError(
                "k or v requires a gradient, which StaticCache, written in place, cannot carry;"
                " decode under torch.no_grad() or use GrowingCache()"
            )
        new = self._arrive(k, v, positions)
        self._slots.write(self._slots.place(new), new, k, v)
        if self._fresh:
            self._fresh = False
            self._view = View(k.shape[0], new, new, (0, 0) if positions is None else None, self.max_len)
            return k, v
        self._view = View(k.shape[0], new, self._slots.positions(), None, self.max_len)
        k_all, v_all = self._slots.read()
        return k_all, v_all


class RingCache(SlotCache):
    """The ``window`` newest keys, for masks that see no further: position p in slot p mod window, memory O(window).

    Several tokens at once see the keys held before them and each other; then the newest stay. The new ones carry
    gradients, those held before do not: the recurrence of Transformer-XL (Dai et al. 2019, §3.2).
    ``spare`` slots more let ``truncate`` take back spare + 1 tokens. ``keep_keys`` makes room for that many positions
    at which every key is kept, without its value, for looking: the weight of an evicted key can still be asked for.
    """

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        window: int,
        d_head: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        spare: int = 0,
        keep_keys: int = 0,
        numbers: Numbers = "model",
    ) -> None:
        check_positive(batch=batch, n_kv_heads=n_kv_heads, window=window, d_head=d_head)
        for name, value in (("spare", spare), ("keep_keys", keep_keys)):
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        ring = slots_of(2, (batch, n_kv_heads, window + spare, d_head), dtype, device, numbers)
        super().__init__(ring, ("keep_keys", keep_keys) if keep_keys else None)
        self.window, self.spare = window, spare
        archived = (batch, n_kv_heads, keep_keys, d_head)
        self._archive = slots_of(1, archived, dtype, device, numbers) if keep_keys else None
        self._holes = False  # whether slots may be empty among later ones

    def _all_slots(self) -> list[Slots]:
        return [self._slots] if self._archive is None else [self._slots, self._archive]

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        new = self._arrive(k, v, positions)
        self._holes = self._holes or positions is not None
        n_batch, _, n_new, _ = k.shape
        # How far a query and a slot can stand apart; an empty slot (-1) among later ones is farther off.
        limit = None if self._holes else self._slots.n_slots + n_new
        if self._fresh:
            self._fresh = False
            self._view = View(n_batch, new, new, None if self._holes else (0, 0), limit)
            self._store(new, k, v)
            return k, v
        if n_new == 1 and not carries_gradient(k, v):
            self._store(new, k, v)
            self._view = View(n_batch, new, self._slots.positions(), None, limit)
            k_all, v_all = self._slots.read()
            return k_all, v_all
        # Joined before anything is overwritten: the first of the new tokens still sees the oldest key.
        k_all, v_all = (torch.cat([old, x], dim=2) for old, x in zip(self._slots.read(), (k, v), strict=True))
        self._view = View(n_batch, new, torch.cat([self._slots.positions(), new], dim=1), None, limit)
        self._store(new, k, v)
        return k_all, v_all

    def _store(self, new: Tensor, k: Tensor, v: Tensor) -> None:
        n_slots = self._slots.n_slots
        stays = (new >= 0) & (new > new.amax(-1, keepdim=True) - n_slots)  # of a long prompt, the end
        self._slots.write(torch.where(stays, new % n_slots, n_slots), new, k, v)
        if self._archive is not None:
            self._archive.write(self._archive.place(new), new, k)

    def keys(self) -> tuple[Tensor, Tensor]:
        """With ``keep_keys`` all keys since the reset, else those of the ring, in the order of their slots."""
        if self._archive is None:
            return super().keys()
        return self._archive.read()[0], flat(self._archive.positions())

    def reset(self) -> None:
        super().reset()
        self._holes = False

    def truncate(self, length: int | Tensor) -> None:
        super().truncate(length)
        self._holes = True

    def check_truncate(self, length: int | Tensor) -> None:
        """The next token must find its whole window: what was overwritten by tokens now rejected is gone."""
        super().check_truncate(length)
        if torch.compiler.is_compiling():
            return
        last = self._lengths.clamp(max=length)
        first = (last - self.window + 1).clamp(min=0)
        pos = self._slots.positions()
        found = ((pos >= first[:, None]) & (pos < last[:, None])).sum(-1)
        if (found < last - first).any():
            back = int((self._lengths - last).max())
            most = f"spare={self.spare} allows {self.spare + 1}"
            raise ValueError(f"length={length} takes back {back} tokens of a full RingCache, where {most}")


def carries_gradient(k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
