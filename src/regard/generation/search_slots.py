"""Continuous batching of beam searches on a GPU: each search has a slot, and may begin at any step.

The decode step and the bookkeeping of all searches are captured together, as in ``captured_search``, several steps at a
time. What a search has found is copied to the host after every block; one that has ended keeps it until it leaves. The
searches of one batch share a config apart from the limit of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.device import upload
from ..models import Model
from .beam_search import BeamSearch, BeamStep, Hypothesis
from .captured_search import changing_tensors
from .cuda_graph import BLOCK_STEPS, CapturedStep, copy_to_host
from .generation_config import GenerateConfig
from .prompt_reading import PromptReading
from .prompts import Prompts
from .slot_engine import BlockDraws, GraphSlots, Slot


class SearchProgress(NamedTuple):
    """How far a search has come."""

    n_steps: int  # since its prompt was read
    found: list[Hypothesis] | None  # its texts once it is over


class SearchBlock(NamedTuple):
    """The state of the searches after a block of steps, on its way to the host."""

    slots: list[Slot]
    read: Callable[[], tuple[Tensor, ...]]
    rules: BeamSearch

    def wait(self) -> list[SearchProgress]:
        """The progress of the search in each slot."""
        table, is_open, n_done, *pools = self.read()
        still_open, n_steps, results = is_open.tolist(), n_done.tolist(), list[SearchProgress]()
        for slot in self.slots:
            found = None
            if not still_open[slot.index]:
                pool = [x[slot.index].flatten().tolist() for x in pools]
                n_before = max(pool[1], default=0)  # the steps before the last text of the pool ended
                steps = [(parents, tokens) for parents, tokens in table[:n_before, slot.index].tolist()]
                found = self.rules.hypotheses(pool, steps)
            results.append(SearchProgress(n_steps[slot.index], found))
        return results


class SearchSlots(GraphSlots):
    """The slots of searches with one config, ``config.beam`` rows each."""

    def __init__(self, model: Model, config: GenerateConfig, max_slots: int) -> None:
        self._config = config
        super().__init__(model, config.beam, max_slots)
        self.has_blocks = True

    def _capture(self) -> None:
        decoder, k = self._decoder, self.size
        n, n_steps, device = decoder.shape.prompts, len(decoder.state.history), decoder.device
        self.rules = BeamSearch(None, self._config, self.model.config.eos_id)
        self.rules.prepare_penalties(n_steps + 1, device)
        limit = torch.ones(n, dtype=torch.int64, device=device)
        self._beams = self.rules.initial_beams(Prompts([[]] * n, limit.new_zeros(n, 0), None, limit))
        self._beams.step = torch.zeros_like(limit)
        self._table = limit.new_zeros(n_steps + 1, n, 2, k)  # the parents and tokens of every step
        self._numbers = torch.arange(n, device=device)
        self._steps = CapturedStep(self._advance, device, BLOCK_STEPS)
        self._beams.open.zero_()
        self._beams.step.zero_()

    def _advance(self) -> None:
        """Decode one token of every beam, and choose the beams that go on."""
        decoder, beams = self._decoder, copy(self._beams)
        logits = decoder.logits()
        decoder.state.advance()
        was_open, step = beams.open.any(-1), beams.step
        result = self.rules.advance(beams, logits, step)
        self._table[step, self._numbers] = torch.stack([result.parent, result.token], 1)
        beams.step = step + was_open  # that of a search that has ended stays
        for buffer, x in zip(changing_tensors(self._beams), changing_tensors(beams), strict=True):
            buffer.copy_(x)
        decoder.keys.select((self._numbers[:, None] * self.size + result.parent).flatten(), decoder.state.lengths)
        decoder.state.tokens.copy_(result.token.flatten())

    def begin(self, slots: Sequence[Slot], readings: Sequence[PromptReading], logits: Tensor) -> None:
        """The first step of searches that have just joined, given the logits (n, V) after their prompts."""
        limit = upload([reading.limit for reading in readings], self._beams.limit)
        beams = self.rules.initial_beams(Prompts([[]] * len(slots), limit.new_zeros(len(slots), 0), None, limit))
        beams.step = torch.zeros_like(limit)
        result: BeamStep = self.rules.advance(beams, logits.repeat_interleave(self.size, 0), beams.step)
        index = upload([slot.index for slot in slots], limit)
        self._beams.limit[index] = limit
        for buffer, x in zip(changing_tensors(self._beams), changing_tensors(beams), strict=True):
            buffer[index] = x
        self._table[0, index] = torch.stack([result.parent, result.token], 1)
        rows = index[:, None] * self.size + torch.arange(self.size, device=index.device)
        self._decoder.state.tokens[rows] = result.token

    def leave(self, slot: Slot) -> None:
        super().leave(slot)
        self._beams.open[slot.index] = False

    def start_block(self, draws: Mapping[Slot, BlockDraws]) -> SearchBlock | None:  # type: ignore[override]  # texts, not tokens
        """Start ``BLOCK_STEPS`` steps of every search without waiting for them; None if no slot is taken."""
        if not self.taken:
            return None
        self._write_changes()
        self._steps()
        state = self._table, self._beams.open.any(-1), self._beams.step, *self._beams.pool
        return SearchBlock(list(self.taken), copy_to_host(state), self.rules)
