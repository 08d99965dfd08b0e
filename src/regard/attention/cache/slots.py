"""What preallocated caches are made of: numbered places, written without a look at what lies in them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .cache import Cache, Edition, as_rows, check_new, flat, n_bytes, take_back


class Slots:
    """n places with a position each (-1: empty), holding the rows of one or more tensors (B, G, n, D).

    One more place lies behind them and is never read: padding is written there, so that no write depends on data.
    How numbers are stored is known to ``write`` and ``read`` alone, see ``RoundedSlots``.
    """

    def __init__(
        self,
        n_tensors: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.batch, n_kv_heads, self.n_slots, d_head = shape
        held = (self.batch, n_kv_heads, self.n_slots + 1, d_head)
        self.like = torch.empty(self.batch, n_kv_heads, 0, d_head, dtype=dtype, device=device)
        """What is written and read has this shape but for its length, this dtype and this device."""
        self.data = self._room(n_tensors, held)
        self.pos = torch.full((1, self.n_slots + 1), -1, device=device)  # (1 or B, n + 1)

    def _room(self, n_tensors: int, shape: tuple[int, ...]) -> list[Tensor]:
        return [self.like.new_zeros(shape) for _ in range(n_tensors)]

    def write(self, slots: Tensor, positions: Tensor, *new: Tensor) -> None:
        """Put tensors (B, G, T, D) at ``positions`` (1 or B, T) into ``slots``; slot n is the one never read."""
        for held, x in zip(self.data, new, strict=True):
            if slots.shape[0] == 1:
                held.index_copy_(2, slots[0], x.detach())
            else:
                held.scatter_(2, slots[:, None, :, None].expand_as(x), x.detach())
        self.pos.scatter_(1, slots, positions)

    def place(self, positions: Tensor) -> Tensor:
        """The slot of each position: its own number; for padding the one never read; past the end, none at all."""
        n = self.n_slots
        return torch.where(positions < 0, n, torch.where(positions < n, positions, n + 1))

    def read(self) -> list[Tensor]:
        return [x[:, :, : self.n_slots] for x in self.data]

    def positions(self) -> Tensor:
        return self.pos[:, : self.n_slots]

    def part_rows(self) -> None:
        """From here on every row of the batch has positions of its own."""
        self.pos = self.pos.repeat(self.batch, 1)

    def reorder(self, beam_index: Tensor) -> None:
        # Into the same memory: a compiled or captured step knows these tensors by their address.
        for x in self.data if self.pos.shape[0] == 1 else [*self.data, self.pos]:
            x.copy_(x.index_select(0, beam_index))

    def reset(self) -> None:
        for x in self.data:
            x.zero_()  # an infinity left behind would be NaN even with weight 0
        self.pos = self.pos[:1].fill_(-1)


class RoundedSlots(Slots):
    """The same in fewer bytes: bf16, or int8 with one scale a row, x ≈ s · q, s = max |x| / 127. Read as it came."""

    def __init__(
        self,
        n_tensors: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        numbers: Literal["bf16", "int8"],
    ) -> None:
        self.numbers = numbers
        super().__init__(n_tensors, shape, dtype, device)

    def _room(self, n_tensors: int, shape: tuple[int, ...]) -> list[Tensor]:
        if self.numbers == "bf16":
            return [self.like.new_zeros(shape, dtype=torch.bfloat16) for _ in range(n_tensors)]
        whole = [self.like.new_zeros(shape, dtype=torch.int8) for _ in range(n_tensors)]
        return whole + [self.like.new_zeros((*shape[:3], 1), dtype=torch.float32) for _ in range(n_tensors)]

    def write(self, slots: Tensor, positions: Tensor, *new: Tensor) -> None:
        if self.numbers == "bf16":
            super().write(slots, positions, *(x.bfloat16() for x in new))
            return
        scales = [(x.detach().float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30) for x in new]
        whole = [(x.detach() / scale).round().to(torch.int8) for x, scale in zip(new, scales, strict=True)]
        super().write(slots, positions, *whole, *scales)

    def read(self) -> list[Tensor]:
        held = super().read()
        if self.numbers == "bf16":
            return [x.to(self.like.dtype) for x in held]
        n = len(held) // 2
        return [(x * scale).to(self.like.dtype) for x, scale in zip(held[:n], held[n:], strict=True)]


Numbers = Literal["model", "bf16", "int8"]
"""In what a preallocated cache keeps keys and values: as the model computes them, or rounded."""


def slots_of(
    n_tensors: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    numbers: Numbers,
) -> Slots:
    if numbers == "model":
        return Slots(n_tensors, shape, dtype, device)
    return RoundedSlots(n_tensors, shape, dtype, device, numbers)


class SlotCache(Cache):
    """Base of preallocated caches: tokens are counted in a tensor, rows may part ways, everything happens in place.

    Nothing here reads a Python number that changes from step to step, so a compiled step is compiled once.
    """

    def __init__(self, slots: Slots, room: tuple[str, int] | None) -> None:
        self._slots = slots
        self._room = room  # (name, number) of positions there is place for; None: no end
        self._lengths = torch.zeros(1, dtype=torch.int64, device=slots.pos.device)
        self._fresh = True
        self._count: int | None = 0  # the longest row, where it is known without asking the device
        self.edition = Edition()

    def _all_slots(self) -> list[Slots]:
        return [self._slots]

    def _arrive(self, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Check new tokens, count them and return their positions (1 or B, T)."""
        check_new(k, v, self._slots.like, self._slots.like)
        given = None if positions is None else as_rows(positions, k)
        self._check_room(k.shape[2], given)
        rows = self._lengths[:, None] + torch.arange(k.shape[2], device=k.device) if given is None else given
        if rows.shape[0] > self._lengths.shape[0]:
            self._part_rows()
        rows = rows.expand(self._lengths.shape[0], -1)
        self._lengths.copy_(torch.maximum(self._lengths, rows.amax(-1) + 1))
        return rows

    def _check_room(self, n_new: int, given: Tensor | None) -> None:
        if torch.compiler.is_compiling():  # there it is the index out of range that stops the write
            self._count = None
            return
        before = self.length if self._count is None else self._count
        after = before + n_new if given is None else max(before, int(given.max()) + 1)
        if self._room is not None and after > self._room[1]:
            name, room = self._room
            raise ValueError(f"{n_new} new tokens would make {after}, but this cache has {name}={room}")
        self._count = after

    def _part_rows(self) -> None:
        self._lengths = self._lengths.repeat(self._slots.batch)
        for slots in self._all_slots():
            slots.part_rows()

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def keys(self) -> tuple[Tensor, Tensor]:
        return self._slots.read()[0], flat(self._slots.positions())

    def reset(self) -> None:
        for slots in self._all_slots():
            slots.reset()
        self._lengths = self._lengths[:1].zero_()
        self._fresh, self._count, self._view = True, 0, None
        self.edition = Edition()

    def reorder(self, beam_index: Tensor) -> None:
        if beam_index.shape != (self._slots.batch,):
            raise ValueError(f"beam_index of shape {tuple(beam_index.shape)} does not fit batch={self._slots.batch}")
        for slots in self._all_slots():
            slots.reorder(beam_index)
        if self._lengths.shape[0] > 1:
            self._lengths.copy_(self._lengths.index_select(0, beam_index))
            self._count = None
        self._view, self.edition = None, Edition()

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        if isinstance(length, Tensor) and length.dim() == 1 and self._lengths.shape[0] < self._slots.batch:
            self._part_rows()
        for slots in self._all_slots():
            slots.pos.copy_(take_back(slots.pos, length))
        self._lengths.copy_(self._lengths.clamp(max=length))
        self._count, self._view, self.edition = None, None, Edition()

    def memory(self) -> int:
        return n_bytes(self._lengths, *(x for slots in self._all_slots() for x in (*slots.data, slots.pos)))
