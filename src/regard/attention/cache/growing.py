"""Caches that keep tensors as they come: one that grows with the text, one that is filled once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..frame import Frame
from .cache import Cache, Edition, View, as_rows, check_new, flat, n_bytes, take_back


class GrowingCache(Cache):
    """Concatenates. Positions run on without gap, so every fast path applies; gradients flow through what is held."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._pos: Tensor | None = None  # (1 or B, S), only once positions were given; until then 0 … S-1
        self._view, self.edition = None, Edition()

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_new(k, v, self._k, self._v)
        n_held, n_new = self._n_held, k.shape[2]
        if positions is not None or self._pos is not None:
            new = as_rows(self.next_positions(n_new, k.device) if positions is None else positions, k)
            old = self._rows(k.device)
            n_rows = max(new.shape[0], old.shape[0])
            new = new.expand(n_rows, -1)
            self._pos = torch.cat([old.expand(n_rows, -1), new], dim=1)
            self._view = View(k.shape[0], new, self._pos)
        else:
            k_pos = torch.arange(n_held + n_new, device=k.device)[None]
            self._view = View(k.shape[0], k_pos[:, n_held:], k_pos, steady=(n_held, 0))
        self._k = k if self._k is None else torch.cat([self._k, k], dim=2)
        self._v = v if self._v is None else torch.cat([self._v, v], dim=2)
        return self._k, self._v

    @property
    def _n_held(self) -> int:
        return 0 if self._k is None else self._k.shape[2]

    def _rows(self, device: torch.device) -> Tensor:
        """The positions of the held keys, (1 or B, S)."""
        return torch.arange(self._n_held, device=device)[None] if self._pos is None else self._pos

    @property
    def lengths(self) -> Tensor:
        if self._pos is not None:
            return self._pos.amax(-1) + 1
        return torch.tensor([self._n_held], device=None if self._k is None else self._k.device)

    @property
    def length(self) -> int:
        return self._n_held if self._pos is None else super().length

    def keys(self) -> tuple[Tensor, Tensor]:
        if self._k is None:
            raise ValueError("keys() of an empty GrowingCache: update(k, v) has to come first")
        return self._k, flat(self._rows(self._k.device))

    def held(self) -> tuple[Tensor, Tensor]:
        """All keys and values (B, G, S, D), for those who go on in their own way."""
        if self._k is None or self._v is None:
            raise ValueError("held() of an empty GrowingCache: update(k, v) has to come first")
        return self._k, self._v

    def reorder(self, beam_index: Tensor) -> None:
        """Row b goes on from row beam_index[b]; the index may be longer than the batch, which then grows."""
        if self._k is None or self._v is None:
            return
        self._k, self._v = self._k.index_select(0, beam_index), self._v.index_select(0, beam_index)
        if self._pos is not None and self._pos.shape[0] > 1:
            self._pos = self._pos.index_select(0, beam_index)
        self._view, self.edition = None, Edition()

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        self._view, self.edition = None, Edition()
        if self._k is None or self._v is None:
            return
        if self._pos is None and not isinstance(length, Tensor):
            self._k, self._v = self._k[:, :, :length], self._v[:, :, :length]
        else:
            pos = take_back(self._rows(self._k.device), length)
            used = (pos >= 0).any(0)  # columns that no row needs any more go
            self._pos = pos[:, used]
            self._k, self._v = self._k[:, :, used], self._v[:, :, used]
        if self._n_held == 0:
            self.reset()

    def memory(self) -> int:
        return n_bytes(self._k, self._v, self._pos)


class CrossCache(Cache):
    """Keys and values of an encoder's output, computed once: the first update fills it, later ones return what is held.

    Reading goes from the end of the memory (the last query at its last key), as it does without a cache. Positions may
    mark padding with -1. There is nothing to truncate: taking back decoded tokens leaves the memory as it is.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None
        self._pos: Tensor | None = None  # (1 or B, S), where positions were given

    @property
    def filled(self) -> bool:
        """Whether keys and values are there already and need not be computed."""
        return self._held is not None

    def update(
        self, k: Tensor | None = None, v: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._held is None:
            if k is None or v is None:
                raise ValueError("an empty CrossCache needs k and v of the memory in its first update")
            check_new(k, v)
            self._pos = None if positions is None else as_rows(positions, k)
            self._held = (k, v)
        return self._held

    def frame(self, n_heads: int, n_queries: int | None = None) -> Frame:
        k, _ = self.update()
        n_queries = 1 if n_queries is None else n_queries
        frame = Frame.aligned(k.shape[0], n_heads, n_queries, k.shape[2], k.device)
        if self._pos is None:
            return frame
        return Frame(k.shape[0], n_heads, frame.q_pos, flat(self._pos))

    @property
    def lengths(self) -> Tensor:
        if self._held is None:
            return torch.zeros(1, dtype=torch.int64)
        if self._pos is not None:
            return self._pos.amax(-1) + 1
        return torch.tensor([self._held[0].shape[2]], device=self._held[0].device)

    def keys(self) -> tuple[Tensor, Tensor]:
        k, _ = self.update()
        return k, torch.arange(k.shape[2], device=k.device) if self._pos is None else flat(self._pos)

    def reorder(self, beam_index: Tensor) -> None:
        """Row b goes on from row beam_index[b]; the index may be longer than the batch, which then grows."""
        if self._held is None:
            return
        k, v = self._held
        self._held = (k.index_select(0, beam_index), v.index_select(0, beam_index))
        if self._pos is not None and self._pos.shape[0] > 1:
            self._pos = self._pos.index_select(0, beam_index)

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)

    def memory(self) -> int:
        return n_bytes(*(self._held or ()), self._pos)
