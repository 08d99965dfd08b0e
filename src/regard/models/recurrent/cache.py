"""What a recurrent decoder keeps between steps: its own state, and the memory it looks at, prepared once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.cache import Cache, CrossCache
from ...attention.cache.kv_cache import n_bytes
from .alignment import View
from .recurrence import State


class MemoryCache(CrossCache):
    """A view of the memory. As a cache it holds the encoder's states, of which maps make their keys."""

    def reset(self) -> None:
        super().reset()
        self.view: View | None = None

    def fill(self, view: View) -> View:
        self.view, self._kv = view, (view.v, view.v)
        return view

    def reorder(self, beam_index: Tensor) -> None:
        if self.view is not None:
            self.fill(self.view.rows(beam_index))

    def memory(self) -> int:
        view = self.view
        return 0 if view is None else n_bytes(view.v, None if view.k is view.v else view.k, view.real)


class StateCache(Cache):
    """A decoder's state after the tokens seen, and a few earlier ones, so that ``truncate`` can take tokens back.

    Its size does not depend on the length of the text. ``in_place`` writes always to the same memory, for captured
    graphs; gradients then do not pass.
    """

    kept = 17  # states: the present one and 16 before it

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place
        self._state = self._past = torch.empty(0)  # (B, W), all tensors of the state side by side, and (kept, B, W)
        self._lengths = torch.zeros(1, dtype=torch.int64)  # (B,)
        self._past_lengths = self._slot = self._lengths  # (kept, B), -1 where no state is, and the slot to write next
        self._widths: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.filled = False
        if not self.in_place:
            self._state = self._past = self._state.new_empty(0)

    @property
    def lengths(self) -> Tensor:
        return self._lengths if self.filled else torch.zeros(1, dtype=torch.int64, device=self._lengths.device)

    def start(self, state: State) -> None:
        """The state before the first token."""
        joined = torch.cat(state, dim=-1)
        zeros = torch.zeros(joined.shape[0], dtype=torch.int64, device=joined.device)
        self._widths = [part.shape[-1] for part in state]
        self._state, self._lengths = self._put(self._state, joined), self._put(self._lengths, zeros)
        self._past = self._put(self._past, torch.zeros_like(joined).repeat(self.kept, 1, 1))
        self._past_lengths = self._put(self._past_lengths, zeros.repeat(self.kept, 1) - 1)
        self._slot = self._put(self._slot, zeros[:1].clone())
        self.filled = True
        self._remember()

    def state(self) -> State:
        if not self.filled:
            raise ValueError("an empty StateCache has no state: start(state) has to come first")
        return self._state.split(self._widths, dim=-1)

    def push(self, state: State, real: Tensor | None = None) -> State:
        """The state after one more token, which was padding in the rows where ``real`` (B,) is False."""
        self._move(torch.cat(state, dim=-1), self._lengths + (1 if real is None else real))
        self._remember()
        return self.state()

    def _move(self, state: Tensor, lengths: Tensor) -> None:
        self._state, self._lengths = self._put(self._state, state), self._put(self._lengths, lengths)

    def _put(self, held: Tensor, new: Tensor) -> Tensor:
        if not self.in_place:
            return new
        fits = (held.shape, held.dtype, held.device) == (new.shape, new.dtype, new.device)
        return held.copy_(new.detach()) if fits else new.detach().clone()

    def _remember(self) -> None:
        self._past.index_copy_(0, self._slot, self._state.detach()[None])
        self._past_lengths.index_copy_(0, self._slot, self._lengths[None])
        self._slot.add_(1).remainder_(self.kept)

    def reorder(self, beam_index: Tensor) -> None:
        """Row b goes on from row beam_index[b]; the index may be longer than the batch, which then grows."""
        if self.filled:
            self._move(self._state.index_select(0, beam_index), self._lengths.index_select(0, beam_index))
            self._past = self._put(self._past, self._past.index_select(1, beam_index))
            self._past_lengths = self._put(self._past_lengths, self._past_lengths.index_select(1, beam_index))

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        if not self.filled:
            return
        lengths = self._lengths.clamp(max=length)
        slot = (self._past_lengths == lengths).byte().argmax(0)  # (B,)
        earlier = self._past[slot, torch.arange(len(slot), device=slot.device)]
        goes_back = lengths < self._lengths  # the state of other rows stays, and with it its history
        self._move(torch.where(goes_back[:, None], earlier, self._state), lengths)
        self._past_lengths.masked_fill_(self._past_lengths > lengths, -1)

    def check_truncate(self, length: int | Tensor) -> None:
        super().check_truncate(length)
        if not self.filled or torch.compiler.is_compiling():
            return
        lengths = self._lengths.clamp(max=length)
        if not (self._past_lengths == lengths).any(0).all():
            back = int((self._lengths - lengths).max())
            raise ValueError(f"length={length} takes back {back} tokens, but the last {self.kept - 1} states are kept")

    def memory(self) -> int:
        return n_bytes(self._state, self._past, self._lengths, self._past_lengths) if self.filled else 0
