"""Preallocated caches: ``StaticCache`` holds a whole sequence, ``RingCache`` a sliding window.

Both write in place, and no Python number changes from step to step, so that a decode step is compiled or captured only
once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...foundation.checks import check_not_negative, check_positive
from .kv_cache import Cache, CacheVersion, CacheView, check_new_keys, drop_positions_from, position_rows, squeeze_rows

CacheDtype = Literal["model", "bf16", "int8"]  # number format of the stored keys and values
Device = torch.device | str | None


class Slots:
    """n slots, each with a position (-1 if empty), for one or more tensors (B, G, n, D).

    Padding is written to an extra slot that is never read, so that control flow does not depend on data. int8 stores
    x ≈ s · q with one scale s = max |x| / 127 per vector.
    """

    def __init__(self, n_tensors: int, n_slots: int, like: Tensor, cache_dtype: CacheDtype) -> None:
        """``like`` (B, G, 0, D) defines the sizes, dtype and device of the tensors."""
        self.n_slots, self.like, self.cache_dtype = n_slots, like, cache_dtype
        stored = {"model": like.dtype, "bf16": torch.bfloat16, "int8": torch.int8}[cache_dtype]
        batch, n_kv_heads, _, d_head = like.shape
        sizes = (batch, n_kv_heads, n_slots + 1)
        self.data = [like.new_zeros((*sizes, d_head), dtype=stored) for _ in range(n_tensors)]
        if cache_dtype == "int8":
            self.data += [like.new_zeros((*sizes, 1), dtype=torch.float32) for _ in range(n_tensors)]
        self.pos = torch.full((1, n_slots + 1), -1, device=like.device)  # (1 or B, n + 1)

    def write(self, slots: Tensor, positions: Tensor, *new: Tensor) -> None:
        """Write tensors (B, G, T, D) at ``positions`` (1 or B, T) into ``slots``."""
        if self.cache_dtype == "bf16":
            new = tuple(x.bfloat16() for x in new)
        elif self.cache_dtype == "int8":
            scales = [(x.detach().float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30) for x in new]
            quantised = [(x.detach() / scale).round().to(torch.int8) for x, scale in zip(new, scales, strict=True)]
            new = (*quantised, *scales)
        for held, x in zip(self.data, new, strict=True):
            if slots.shape[0] == 1:
                held.index_copy_(2, slots[0], x.detach())
            else:
                held.scatter_(2, slots[:, None, :, None].expand_as(x), x.detach())
        self.pos.scatter_(1, slots, positions)

    def read(self) -> list[Tensor]:
        held = [x[:, :, : self.n_slots] for x in self.data]
        if self.cache_dtype == "bf16":
            return [x.to(self.like.dtype) for x in held]
        if self.cache_dtype == "int8":
            n = len(held) // 2
            return [(x * scale).to(self.like.dtype) for x, scale in zip(held[:n], held[n:], strict=True)]
        return held

    def slots_of(self, positions: Tensor) -> Tensor:
        """The slot of each position p: p itself, n for padding, and n + 1 (out of range) past the end."""
        n = self.n_slots
        return torch.where(positions < 0, n, torch.where(positions < n, positions, n + 1))

    def positions(self) -> Tensor:
        return self.pos[:, : self.n_slots]

    def reorder(self, beam_index: Tensor) -> None:
        # In place, because a captured graph refers to these tensors by address.
        for x in self.data if self.pos.shape[0] == 1 else [*self.data, self.pos]:
            x.copy_(x.index_select(0, beam_index))

    def reset(self) -> None:
        for x in self.data:
            x.zero_()  # a stale infinity times weight 0 would be NaN
        self.pos = self.pos[:1].fill_(-1)


class SlotCache(Cache):
    """Base class of the preallocated caches; token counts are a tensor that is updated in place."""

    def __init__(self, slots: Slots, archive: Slots | None = None, capacity: tuple[str, int] | None = None) -> None:
        self._slots, self._archive = slots, archive
        self._all_slots = [slots] if archive is None else [slots, archive]
        self._capacity = capacity  # (argument name, number of positions); None if unlimited
        self._batch = slots.like.shape[0]
        self._lengths = torch.zeros(1, dtype=torch.int64, device=slots.pos.device)
        self._empty = True
        self._count: int | None = 0  # length of the longest row; None if it is known on the device only
        self.version = CacheVersion()

    def _add_tokens(self, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Check and count new tokens; return their positions (1 or B, T)."""
        check_new_keys(k, v, self._slots.like, self._slots.like)
        rows = None if positions is None else position_rows(positions, k)
        self._check_capacity(k.shape[2], rows)
        if rows is None:
            rows = self._lengths[:, None] + torch.arange(k.shape[2], device=k.device)
        if rows.shape[0] > self._lengths.shape[0]:
            self._split_rows()
        rows = rows.expand(self._lengths.shape[0], -1)
        self._lengths.copy_(torch.maximum(self._lengths, rows.amax(-1) + 1))
        return rows

    def _check_capacity(self, n_new: int, positions: Tensor | None) -> None:
        if torch.compiler.is_compiling():  # a compiled step raises on the out-of-range slot instead
            self._count = None
            return
        before = self.length if self._count is None else self._count
        after = before + n_new if positions is None else max(before, int(positions.max()) + 1)
        if self._capacity is not None and after > self._capacity[1]:
            name, capacity = self._capacity
            raise ValueError(f"{n_new} new tokens would make {after} in total, but the cache has {name}={capacity}")
        self._count = after

    def _split_rows(self) -> None:
        """Give every row of the batch its own length and positions."""
        self._lengths = self._lengths.repeat(self._batch)
        for slots in self._all_slots:
            slots.pos = slots.pos.repeat(self._batch, 1)

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def _read(self) -> tuple[Tensor, Tensor]:
        k, v = self._slots.read()
        return k, v

    def keys(self) -> tuple[Tensor, Tensor]:
        """All keys in slot order; with an archive, those of the whole sequence."""
        slots = self._all_slots[-1]
        return slots.read()[0], squeeze_rows(slots.positions())

    def reset(self) -> None:
        for slots in self._all_slots:
            slots.reset()
        self._lengths = self._lengths[:1].zero_()
        self._empty, self._count, self._view = True, 0, None
        self.version = CacheVersion()

    def reorder(self, beam_index: Tensor) -> None:
        if beam_index.shape != (self._batch,):
            raise ValueError(f"beam_index of shape {tuple(beam_index.shape)} does not fit batch={self._batch}")
        for slots in self._all_slots:
            slots.reorder(beam_index)
        if self._lengths.shape[0] > 1:
            self._lengths.copy_(self._lengths.index_select(0, beam_index))
            self._count = None
        self._view, self.version = None, CacheVersion()

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        if isinstance(length, Tensor) and length.dim() == 1 and self._lengths.shape[0] < self._batch:
            self._split_rows()
        for slots in self._all_slots:
            slots.pos.copy_(drop_positions_from(slots.pos, length))
        self._lengths.copy_(self._lengths.clamp(max=length))
        self._count, self._view, self.version = None, None, CacheVersion()

    def memory(self) -> int:
        return self._lengths.nbytes + sum(x.nbytes for slots in self._all_slots for x in (*slots.data, slots.pos))


class StaticCache(SlotCache):
    """Preallocated for ``max_len`` tokens, with position p in slot p; for torch.compile and CUDA graphs.

    The first update of an empty cache (the prompt) returns only the new keys; every later update returns max_len keys.
    """

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        max_len: int,
        d_head: int,
        dtype: torch.dtype | None = None,
        device: Device = None,
        cache_dtype: CacheDtype = "model",
    ) -> None:
        check_positive(batch=batch, n_kv_heads=n_kv_heads, max_len=max_len, d_head=d_head)
        like = torch.empty(batch, n_kv_heads, 0, d_head, dtype=dtype, device=device)
        super().__init__(Slots(2, max_len, like, cache_dtype), capacity=("max_len", max_len))
        self.max_len = max_len

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if requires_gradient(k, v):
            hint = "decode under torch.no_grad() or use GrowingCache()"
            raise ValueError(f"k or v requires a gradient, but StaticCache is written in place; {hint}")
        new = self._add_tokens(k, v, positions)
        self._slots.write(self._slots.slots_of(new), new, k, v)
        if self._empty:
            self._empty = False
            self._view = CacheView(k.shape[0], new, new, (0, 0) if positions is None else None, self.max_len)
            return k, v
        self._view = CacheView(k.shape[0], new, self._slots.positions(), None, self.max_len)
        return self._read()


class RingCache(SlotCache):
    """The ``window`` newest keys, for windowed masks: position p is in slot p mod window, O(window) memory.

    Gradients flow through new tokens but not through stored ones, as in Transformer-XL (Dai et al. 2019, §3.2).
    ``spare`` extra slots let ``truncate`` remove up to spare + 1 tokens. ``keep_keys`` archives the keys (not the
    values) of that many positions, so that attention maps include evicted keys.
    """

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        window: int,
        d_head: int,
        dtype: torch.dtype | None = None,
        device: Device = None,
        spare: int = 0,
        keep_keys: int = 0,
        cache_dtype: CacheDtype = "model",
    ) -> None:
        check_positive(batch=batch, n_kv_heads=n_kv_heads, window=window, d_head=d_head)
        check_not_negative(spare=spare, keep_keys=keep_keys)
        like = torch.empty(batch, n_kv_heads, 0, d_head, dtype=dtype, device=device)
        archive = Slots(1, keep_keys, like, cache_dtype) if keep_keys else None
        capacity = ("keep_keys", keep_keys) if keep_keys else None
        super().__init__(Slots(2, window + spare, like, cache_dtype), archive, capacity)
        self.window, self.spare = window, spare
        self._has_gaps = False  # whether there may be empty slots between filled ones

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        new = self._add_tokens(k, v, positions)
        self._has_gaps = self._has_gaps or positions is not None
        n_batch, _, n_new, _ = k.shape
        # An upper bound of the distance between query and slot; unknown if empty slots (-1) are between filled ones.
        limit = None if self._has_gaps else self._slots.n_slots + n_new
        if self._empty:
            self._empty = False
            self._view = CacheView(n_batch, new, new, None if self._has_gaps else (0, 0), limit)
            self._store(new, k, v)
            return k, v
        if n_new == 1 and not requires_gradient(k, v):
            self._store(new, k, v)
            self._view = CacheView(n_batch, new, self._slots.positions(), None, limit)
            return self._read()
        # Concatenate before writing, since the first new token still attends to the oldest key.
        k_all, v_all = (torch.cat([old, x], dim=2) for old, x in zip(self._read(), (k, v), strict=True))
        self._view = CacheView(n_batch, new, torch.cat([self._slots.positions(), new], dim=1), None, limit)
        self._store(new, k, v)
        return k_all, v_all

    def _store(self, new: Tensor, k: Tensor, v: Tensor) -> None:
        n_slots = self._slots.n_slots
        stays = (new >= 0) & (new > new.amax(-1, keepdim=True) - n_slots)  # of a long prompt, only the end
        self._slots.write(torch.where(stays, new % n_slots, n_slots), new, k, v)
        if self._archive is not None:
            self._archive.write(self._archive.slots_of(new), new, k)

    def reset(self) -> None:
        super().reset()
        self._has_gaps = False

    def truncate(self, length: int | Tensor) -> None:
        super().truncate(length)
        self._has_gaps = True

    def check_truncate(self, length: int | Tensor) -> None:
        """Raise if the tokens to remove have overwritten keys of the next token's window."""
        super().check_truncate(length)
        if torch.compiler.is_compiling():
            return
        last = self._lengths.clamp(max=length)
        first = (last - self.window + 1).clamp(min=0)
        pos = self._slots.positions()
        n_held = ((pos >= first[:, None]) & (pos < last[:, None])).sum(-1)
        if (n_held < last - first).any():
            n_removed = int((self._lengths - last).max())
            most = f"spare={self.spare} allows {self.spare + 1}"
            raise ValueError(f"length={length} removes {n_removed} tokens from a full RingCache, but {most}")


def requires_gradient(k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
