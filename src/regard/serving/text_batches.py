"""The running texts of a model, in batches: one of greedy and sampled texts, and one of searches for each beam width.

Texts join a batch after prefill and leave it at any step, when they are finished, cancelled or failed. If a batch
cannot be decoded, for example for lack of memory, its requests fail and the other batches continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..generation.generation_config import GenerateConfig
from ..generation.joint_search import JointSearch, SearchStep
from ..generation.prompts import max_text_length
from ..generation.slot_engine import SeparateSlots, Slot, open_slots
from ..models import Model
from .metrics import SchedulerStatistics
from .running_text import (
    FailureEvent,
    SearchedText,
    SearchEvent,
    TextEvent,
    TextRequest,
    TokenEvent,
    choose_tokens,
    new_texts,
)


class TextReporter(Protocol):
    """Receives the events of texts: the scheduler."""

    statistics: SchedulerStatistics

    def report(self, request: TextRequest, event: TextEvent, is_urgent: bool) -> None: ...

    def end(self, request: TextRequest, failure: FailureEvent | None = None) -> None: ...  # calls ``leave``


class TextBatches:
    """The running texts of one model, in at most ``max_rows`` rows; a search has one row per beam."""

    def __init__(self, model: Model, max_rows: int, reporter: TextReporter) -> None:
        self.model, self.max_rows, self._reporter = model, max_rows, reporter
        self.slots: dict[int, SeparateSlots] = {}  # batches, by the number of rows per slot
        self._searches: dict[str, JointSearch] = {}  # by config, ignoring max_new_tokens

    @property
    def n_rows(self) -> int:
        return sum(slots.size * len(slots.taken) for slots in self.slots.values())

    def clear(self) -> None:
        """Discard all batches and searches."""
        self.slots.clear()
        self._searches.clear()

    def leave(self, request: TextRequest) -> None:
        """Free the slots of a request that has ended."""
        for slot in request.slots:
            self._leave(self.slots[request.size], slot)
        request.slots.clear()

    def step(self) -> None:
        """Decode one token of every text."""
        for size in list(self.slots):
            self._step(size)

    def start(self, requests: list[TextRequest]) -> None:
        """Give the texts of prefilled requests their slots and first tokens, one batch at a time."""
        by_size: dict[int, list[Slot]] = {}
        for request in requests:
            try:
                by_size.setdefault(request.size, []).extend(self._join(request))
            except Exception as error:  # out of memory
                self._reporter.end(request, FailureEvent(error))
        for size, joined in by_size.items():
            new = [slot for slot in joined if slot in slot.owner.request.slots]
            if not new:
                continue
            readings = [slot.owner.request.reading for slot in new]
            logits = torch.cat([reading.logits for reading in readings])
            if size == 1:
                self._write_tokens(self.slots[1], new, logits, [reading.likeliest for reading in readings])
            else:
                self._start_searches(self.slots[size], new, logits)
        for request in requests:
            request.reading.release()

    def _join(self, request: TextRequest) -> list[Slot]:
        """Take slots for the texts of a prefilled request."""
        size = request.size
        if size not in self.slots:
            self.slots[size] = open_slots(self.model, size, self.max_rows // size)
        request.started = time.monotonic()
        for text in new_texts(request, self.model.config.eos_id):
            slot = self.slots[size].join(request.reading)
            slot.owner = text
            request.slots.append(slot)
        return list(request.slots)

    def _start_searches(self, slots: SeparateSlots, new: list[Slot], logits: Tensor) -> None:
        """Take the first step of searches, from the logits (n, V) after their prompts."""
        groups: dict[JointSearch, list[int]] = {}
        for row, slot in enumerate(new):
            text: SearchedText = slot.owner
            if text.joins:
                text.group = self._joint_search(text.request.config)
                groups.setdefault(text.group, []).append(row)
            else:
                first = logits[row : row + 1].expand(text.request.size, -1)
                self._search(slots, [slot], partial(text.steps, first))
        for group, rows in groups.items():
            texts = [new[row].owner for row in rows]
            self._search(slots, [new[row] for row in rows], partial(_begin_together, group, texts, logits, rows))

    def _joint_search(self, config: GenerateConfig) -> JointSearch:
        """The joint search of all texts with this config, whatever their ``max_new_tokens``."""
        key = config.with_(max_new_tokens=1).model_dump_json()
        if key not in self._searches:
            max_tokens = max_text_length(self.model.config, target=not self.model.is_decoder_only)
            self._searches[key] = JointSearch(config, self.model.config.eos_id, max_tokens, self.model.device)
        return self._searches[key]

    def _step(self, size: int) -> None:
        """Decode one token of every text of a batch."""
        slots = self.slots[size]
        if not slots.taken:
            return
        start = time.monotonic()
        try:
            tokens = [token for slot in slots.taken for token in slot.next_tokens]
            logits = slots.decode(torch.tensor(tokens, device=self.model.device))
            likeliest = logits.argmax(-1).tolist() if size == 1 else []
        except Exception as error:  # out of memory: the other batches may still fit
            self._fail_batch(size, error)
            return
        if size == 1:
            self._write_tokens(slots, list(slots.taken), logits, likeliest)
        else:
            self._step_searches(slots, logits.unflatten(0, (-1, size)))
        self._reporter.statistics.steps += 1
        self._reporter.statistics.step_seconds += time.monotonic() - start

    def _fail_batch(self, size: int, error: Exception) -> None:
        """Fail the requests of a batch and discard it; later requests get a new one."""
        for slot in self.slots.pop(size).taken:
            request = slot.owner.request
            self._leave_search(slot)
            request.slots.clear()  # they all belong to this batch
            self._reporter.end(request, FailureEvent(error))

    def _step_searches(self, slots: SeparateSlots, logits: Tensor) -> None:
        """Take one step of every search, from logits (n, size, V); searches with the same config advance together."""
        row_of = {slot.owner: row for row, slot in enumerate(slots.taken)}
        slot_of = {slot.owner: slot for slot in slots.taken}
        for group in list(self._searches.values()):
            if members := [text for text in group.members if text in slot_of]:
                rows = [row_of[text] for text in members]
                group_logits = logits if rows == list(range(len(logits))) else logits[rows]
                advance = partial(group.advance, group_logits.flatten(0, 1))
                self._search(slots, [slot_of[text] for text in members], advance)
        for text, slot in slot_of.items():
            if not text.joins:
                self._search(slots, [slot], partial(text.steps, logits[row_of[text]]))

    def _search(self, slots: SeparateSlots, members: list[Slot], advance: Callable[[], list[SearchStep]]) -> None:
        """Take one step of the searches in ``members``; ``advance`` returns their steps in the same order."""
        try:
            steps = advance()
        except Exception as error:
            for slot in members:
                self._reporter.end(slot.owner.request, FailureEvent(error))
            return
        unfinished = [(slot, step) for slot, step in zip(members, steps, strict=True) if step.finished is None]
        if unfinished:
            parents = torch.tensor([step.parents for _, step in unfinished], device=self.model.device)
            slots.select_all([slot for slot, _ in unfinished], parents)
        for slot, step in zip(members, steps, strict=True):
            if step.finished is None:
                slot.next_tokens = step.tokens
            else:
                self._reporter.report(slot.owner.request, SearchEvent(step.finished), is_urgent=True)
            self._count_token(slots, slot, is_finished=step.finished is not None)

    def _write_tokens(self, slots: SeparateSlots, members: list[Slot], logits: Tensor, likeliest: list[int]) -> None:
        """Choose and report the next tokens of greedy and sampled texts; finished texts leave the batch."""
        events = choose_tokens([slot.owner for slot in members], logits, likeliest)
        for slot, event in zip(members, events, strict=True):
            request = slot.owner.request
            if slot not in request.slots:  # another text of the request has failed
                continue
            if not isinstance(event, TokenEvent):
                self._reporter.end(request, FailureEvent(event))
                continue
            is_finished = event.finish is not None
            self._reporter.report(request, event, is_urgent=is_finished or len(slot.owner.tokens) == 1)
            if not is_finished:
                slot.next_tokens = [slot.owner.tokens[-1]]
            self._count_token(slots, slot, is_finished)

    def _count_token(self, slots: SeparateSlots, slot: Slot, is_finished: bool) -> None:
        """Count a token. A finished text leaves the batch; the request ends with its last text."""
        request = slot.owner.request
        request.n_tokens += 1
        self._reporter.statistics.written_tokens += 1
        if is_finished:
            self._leave(slots, slot)
            request.slots.remove(slot)
            if not request.slots:
                self._reporter.end(request)

    def _leave(self, slots: SeparateSlots, slot: Slot) -> None:
        slots.leave(slot)
        self._leave_search(slot)

    def _leave_search(self, slot: Slot) -> None:
        """Remove a text from its joint search, if it is in one; a search without members is dropped."""
        if not isinstance(slot.owner, SearchedText) or (group := slot.owner.group) is None:
            return
        group.remove(slot.owner)
        if not group.members:
            self._searches = {key: other for key, other in self._searches.items() if other is not group}


def _begin_together(
    group: JointSearch, texts: Sequence[SearchedText], logits: Tensor, rows: list[int]
) -> list[SearchStep]:
    return group.begin(texts, [text.request.reading.prompts for text in texts], logits[rows])
