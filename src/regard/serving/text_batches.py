"""The running texts of a model, in batches: one of greedy and sampled texts, and one of searches for each beam width.

Texts join a batch after prefill and leave it at any step, when they are finished, cancelled or failed. If a batch
cannot be decoded, for example for lack of memory, its requests fail and the other batches continue.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import BadOutput, first_line
from ..generation.beam_search import NO_TEXT, Hypothesis
from ..generation.cached_engine import likeliest_tokens
from ..generation.cuda_graph import BLOCK_STEPS, can_choose_captured
from ..generation.generation_config import GenerateConfig
from ..generation.joint_search import JointSearch, SearchStep, can_join
from ..generation.prompts import max_text_length
from ..generation.search_slots import SearchSlots
from ..generation.slot_engine import BlockDraws, SeparateSlots, Slot, can_capture_slots, open_slots
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

_MAX_SEARCH_BATCHES = 2  # batches of captured searches; other configs are searched step by step
_MAX_WIDTHS = 2  # batches of searches step by step that keep their captures while no search uses them
_N_RECENT = 64  # configs among which one that recurs is captured in place of one that is not in use


class TextReporter(Protocol):
    """Receives the events of texts: the scheduler."""

    statistics: SchedulerStatistics

    def report(self, request: TextRequest, event: TextEvent, is_urgent: bool) -> None: ...

    def end(self, request: TextRequest, failure: FailureEvent | None = None) -> None: ...  # calls ``leave``


class TextBatches:
    """The running texts of one model, in at most ``max_rows`` rows; a search has one row per beam.

    Texts and searches of one width form a batch of at most ``max_texts``, however many rows are left. Where searches
    are captured, those of one config form a batch.
    """

    def __init__(self, model: Model, max_rows: int, max_texts: int, reporter: TextReporter) -> None:
        self.model, self.max_rows, self.max_texts, self._reporter = model, max_rows, max_texts, reporter
        self.slots: dict[int | str, SeparateSlots] = {}  # batches, by rows per slot or by the config of a search
        self.captures = can_capture_slots(model)
        self._most_captured = _MAX_SEARCH_BATCHES
        self._recent: deque[str] = deque(maxlen=_N_RECENT)  # the last configs that had no batch
        self._searches: dict[str, JointSearch] = {}  # by config

    @property
    def n_rows(self) -> int:
        return sum(slots.size * len(slots.taken) for slots in self.slots.values())

    def has_room(self, requests: Sequence[TextRequest]) -> bool:
        """Whether all these requests can join the running texts."""
        n_texts = Counter[int]()  # by width
        for slots in self.slots.values():
            n_texts[slots.size] += len(slots.taken)
        for request in requests:
            n_texts[request.size] += request.copies
        n_rows = sum(size * n for size, n in n_texts.items())
        return n_rows <= self.max_rows and all(n <= self._n_slots(size) for size, n in n_texts.items())

    def check_size(self, request: TextRequest) -> None:
        """Refuse a request that could never join."""
        n_rows, n_slots = request.size * request.copies, self._n_slots(request.size)
        if n_rows > self.max_rows or request.copies > n_slots:
            most = n_slots if request.size == 1 else self.max_rows
            raise ValueError(f"the request needs {n_rows} texts or beams at once; this server runs {most}")

    def _n_slots(self, size: int) -> int:
        return min(self.max_texts, self.max_rows // size)

    def clear(self) -> None:
        """Discard all batches and searches."""
        self.slots.clear()
        self._searches.clear()

    def leave(self, request: TextRequest) -> None:
        """Free the slots of a request that has ended."""
        for slot in request.slots:
            self._leave(slot)
        request.slots.clear()

    def step(self) -> None:
        """Decode one token of every text; on a GPU, a block of tokens of greedy texts and of captured searches."""
        for slots in list(self.slots.values()):
            start = time.monotonic()
            try:
                n_steps = self._step_in_blocks(slots) or self._step_once(slots)
            except Exception as error:  # out of memory: the other batches may still fit
                self._fail_batch(slots, error)
                continue
            if n_steps:
                self._reporter.statistics.steps += n_steps
                self._reporter.statistics.step_seconds += time.monotonic() - start

    def start(self, requests: list[TextRequest]) -> None:
        """Give the texts of prefilled requests their slots and first tokens, one batch at a time."""
        joined: dict[SeparateSlots, list[Slot]] = {}
        for request in requests:
            try:
                slots = self._open(request)
                joined.setdefault(slots, []).extend(self._join(request, slots))
            except Exception as error:  # out of memory
                self._reporter.end(request, FailureEvent(error))
        for slots, new in joined.items():
            new = [slot for slot in new if slot in slot.owner.request.slots]
            try:
                if new:
                    self._begin(slots, new)
            except Exception as error:  # out of memory
                self._fail_batch(slots, error)
        for request in requests:
            request.reading.release()

    def _begin(self, slots: SeparateSlots, new: list[Slot]) -> None:
        """Take the first step of texts that have joined a batch, from the logits after their prompts."""
        readings = [slot.owner.request.reading for slot in new]
        logits = torch.cat([reading.logits for reading in readings])
        if isinstance(slots, SearchSlots):
            slots.begin(new, readings, logits)
        elif slots.size == 1:
            self._write_tokens(new, logits, [reading.likeliest for reading in readings])
        else:
            self._start_searches(slots, new, logits)

    def _open(self, request: TextRequest) -> SeparateSlots:
        """The batch of a request."""
        size, config = request.size, request.config
        if self.captures and size > 1 and request.strings is None and can_join(config):
            slots = self._open_captured(config) if can_choose_captured(config, self.model.config.eos_id) else None
            if slots is not None:
                return slots
        if size not in self.slots:
            widths = [key for key in self.slots if isinstance(key, int) and key > 1]
            if size > 1 and len(widths) >= _MAX_WIDTHS:
                self._drop_unused(widths)
            self._free_dropped()
            self.slots[size] = open_slots(self.model, size, self._n_slots(size))
        return self.slots[size]

    def _open_captured(self, config: GenerateConfig) -> SeparateSlots | None:
        """The batch of captured searches with this config.

        None if as many others are captured as may be. A config that recurs takes the place of one that is not in use:
        a capture takes seconds, which a config that occurs once is not worth.
        """
        key = _search_key(config)
        if key in self.slots:
            return self.slots[key]
        captured = [name for name in self.slots if isinstance(name, str)]
        recurs = key in self._recent
        self._recent.append(key)
        if len(captured) >= self._most_captured and not (recurs and self._drop_unused(captured)):
            return None
        self._free_dropped()
        try:
            self.slots[key] = SearchSlots(self.model, config, self._n_slots(config.beam))
        except Exception as error:  # out of memory, or an operation that cannot be captured
            self._most_captured = sum(isinstance(name, str) for name in self.slots)
            warnings.warn(f"searches are decoded step by step: {first_line(error)[:300]}", stacklevel=2)
            return None
        return self.slots[key]

    def _drop_unused(self, keys: Iterable[int | str]) -> bool:
        """Drop one of these batches that no text uses; returns whether there was one."""
        unused = next((key for key in keys if not self.slots[key].taken), None)
        if unused is None:
            return False
        del self.slots[unused]
        return True

    def _free_dropped(self) -> None:
        """Free the memory of batches that were dropped, whose steps refer to themselves, before another is captured."""
        if self.captures:
            gc.collect()

    def _join(self, request: TextRequest, slots: SeparateSlots) -> list[Slot]:
        """Take slots for the texts of a prefilled request."""
        request.started = time.monotonic()
        for text in new_texts(request, self.model.config):
            slot = slots.join(request.reading)
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
            members = [new[row] for row in rows]
            prompts = [slot.owner.request.reading.prompts for slot in members]
            self._search(slots, members, partial(group.begin, [slot.owner for slot in members], prompts, logits[rows]))

    def _joint_search(self, config: GenerateConfig) -> JointSearch:
        """The joint search of all texts with this config."""
        key = _search_key(config)
        if key not in self._searches:
            max_tokens = max_text_length(self.model.config, target=not self.model.is_decoder_only)
            self._searches[key] = JointSearch(config, self.model.config.eos_id, max_tokens, self.model.device)
        return self._searches[key]

    def _step_in_blocks(self, slots: SeparateSlots) -> int:
        """Start the next block of steps and handle the previous one; returns the number of steps started.

        The device computes a block while the host handles the one before it. So texts that end leave one block late,
        and what the device computed for them in the meantime is dropped. 0 if the texts are decoded step by step.
        """
        if not slots.has_blocks:
            return 0
        previous = slots.block
        in_blocks = all(slot.owner.takes_blocks for slot in slots.taken)
        slots.block = slots.start_block(_draws(slots) if slots.size == 1 else {}) if in_blocks else None
        if previous is not None:
            for slot, result in zip(previous.slots, previous.wait(), strict=True):
                if slot in slot.owner.request.slots:
                    self._write_block(slot, result)
        return 0 if slots.block is None else BLOCK_STEPS

    def _write_block(self, slot: Slot, result: Any) -> None:
        """Report the tokens of a block of one text, or the result of a search if it has ended."""
        if isinstance(slot.batch, SearchSlots):
            self._count_steps(slot, result.n_steps - slot.owner.request.n_tokens, result.found)
            return
        try:
            event: TokenEvent | Exception = slot.owner.add_block(result)
        except Exception as error:
            event = error
        self._write_event(slot, event)

    def _step_once(self, slots: SeparateSlots) -> int:
        """Decode one token of every text of a batch; returns the number of steps."""
        if not slots.taken:
            return 0
        tokens = [token for slot in slots.taken for token in slot.next_tokens]
        logits = slots.decode(torch.tensor(tokens, device=self.model.device))
        if slots.size == 1:
            self._write_tokens(list(slots.taken), logits, likeliest_tokens(logits))
        else:
            self._step_searches(slots, logits.unflatten(0, (-1, slots.size)))
        return 1

    def _fail_batch(self, slots: SeparateSlots, error: Exception) -> None:
        """Fail the requests of a batch and discard it; later requests get a new one."""
        self.slots = {key: other for key, other in self.slots.items() if other is not slots}
        for slot in slots.taken:
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
            slot.next_tokens = step.tokens
            self._count_steps(slot, 1, step.finished)

    def _write_tokens(self, members: list[Slot], logits: Tensor, likeliest: list[int]) -> None:
        """Choose and report the next tokens of greedy and sampled texts; finished texts leave the batch."""
        events = choose_tokens([slot.owner for slot in members], logits, likeliest)
        for slot, event in zip(members, events, strict=True):
            if slot in slot.owner.request.slots:  # else another text of the request has failed
                self._write_event(slot, event)

    def _write_event(self, slot: Slot, event: TokenEvent | Exception) -> None:
        """Report the next tokens of a text; an exception ends its request."""
        request = slot.owner.request
        if isinstance(event, Exception):
            self._reporter.end(request, FailureEvent(event))
            return
        is_finished = event.finish is not None
        self._reporter.report(request, event, is_urgent=is_finished or len(slot.owner.tokens) == 1)
        slot.next_tokens = [event.tokens[-1]]
        self._count_tokens(slot, len(event.tokens), is_finished)

    def _count_steps(self, slot: Slot, n: int, found: list[Hypothesis] | None) -> None:
        """Count n steps of a search, one token each, and report the texts that it has found once it is over."""
        if found == []:
            self._reporter.end(slot.owner.request, FailureEvent(BadOutput(NO_TEXT)))
            return
        if found is not None:
            self._reporter.report(slot.owner.request, SearchEvent(found), is_urgent=True)
        self._count_tokens(slot, n, is_finished=found is not None)

    def _count_tokens(self, slot: Slot, n: int, is_finished: bool) -> None:
        """Count n tokens. A finished text leaves the batch; the request ends with its last text."""
        request = slot.owner.request
        request.n_tokens += n
        self._reporter.statistics.written_tokens += n
        if is_finished:
            self._leave(slot)
            request.slots.remove(slot)
            if not request.slots:
                self._reporter.end(request)

    def _leave(self, slot: Slot) -> None:
        slot.batch.leave(slot)
        self._leave_search(slot)

    def _leave_search(self, slot: Slot) -> None:
        """Remove a text from its joint search, if it is in one; a search without members is dropped."""
        if not isinstance(slot.owner, SearchedText) or (group := slot.owner.group) is None:
            return
        group.remove(slot.owner)
        if not group.members:
            self._searches = {key: other for key, other in self._searches.items() if other is not group}


def _draws(slots: SeparateSlots) -> dict[Slot, BlockDraws]:
    """How the next block of tokens is sampled, for the texts that are not greedy."""
    running = set() if slots.block is None else set(slots.block.slots)  # their last tokens are still being computed
    draws = {slot: slot.owner.next_draws(BLOCK_STEPS * (slot in running), BLOCK_STEPS) for slot in slots.taken}
    return {slot: each for slot, each in draws.items() if each is not None}


def _search_key(config: GenerateConfig) -> str:
    """Equal for configs that differ only in ``max_new_tokens``."""
    return config.with_(max_new_tokens=1).model_dump_json()
