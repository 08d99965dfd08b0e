"""Continuous batching: a thread that owns one model, and requests that join and leave its batches at every step.

In each round the thread drops cancelled requests, does one piece of other work, reads prompts up to a token budget in
one forward pass, and decodes one token of every running text, or on a GPU a block of tokens. The budget bounds how long
running texts wait for new prompts. A GPU decodes a block while the host starts texts. Greedy and sampled texts share a
batch; beam searches of equal width, or of one config where searches are captured, share another. A round synchronises
with the device once per batch.

No client waits forever after an error. An exception raised by one text fails only its request; one raised by a batch
fails the requests of that batch; an unexpected one fails all running requests, and the thread continues with new ones.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import RegardError
from ..generation.generate import inference
from ..generation.generation_config import GenerateConfig
from ..generation.prompt_reading import PromptReader, PromptReading, new_prefix_cache
from ..generation.prompts import ModelInputs
from ..models import Model
from .metrics import SchedulerStatistics
from .request_queue import QueueFull, RequestQueue
from .running_text import FailureEvent, TextEvent, TextRequest, TokenEvent
from .text_batches import TextBatches

_MAX_ROWS = {"cpu": 32, "elsewhere": 256}
_MAX_TEXTS = {"cpu": 32, "elsewhere": 64}  # in one batch; a captured step computes as many, whether or not they run
_PROMPT_TOKENS = {"cpu": 256, "elsewhere": 2048}  # read in one round while texts are running

Result = TypeVar("Result")


class SchedulerClosed(RegardError):
    """The scheduler accepts no more work."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Scheduler:
    """Runs the requests of one model. ``post`` runs a function in the thread that receives events, an event loop's.

    The first and the last event of a text are posted at once, all others at most every ``post_seconds``.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int | None = None,
        max_waiting: int = 256,
    ) -> None:
        kind = model.device.type if model.device.type in _MAX_ROWS else "elsewhere"
        self.model, self.max_rows = model, max_rows or _MAX_ROWS[kind]
        self.post: Callable[[Callable[[], None]], Any] = lambda call: call()
        self.statistics = SchedulerStatistics()
        self._prompt_tokens = _PROMPT_TOKENS[kind]
        writes_text = model.config.head == "lm" and model.config.architecture != "encoder"
        self._prefixes = new_prefix_cache(model) if writes_text else None
        self._reader = PromptReader(model) if writes_text else None
        self._waiting = RequestQueue(max_waiting)
        self._reading, self._running = deque[TextRequest](), set[TextRequest]()
        self.batches = TextBatches(model, self.max_rows, _MAX_TEXTS[kind], self)
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._events: list[tuple[TextRequest, TextEvent]] = []
        self._urgent: set[TextRequest] = set()  # requests whose events are posted at once
        self.post_seconds, self._last_post = 0.0, 0.0
        self._mean_seconds = 1.0  # duration of a request, a moving average
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._loop, name="regard-scheduler", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from any thread

    def new_reading(self, inputs: ModelInputs, config: GenerateConfig, **options: Any) -> PromptReading:
        """The prompt of a request; raises ValueError if it is too long. ``options`` are those of ``PromptReading``."""
        return PromptReading(self.model, inputs, config, self._prefixes, **options)

    def submit(self, *requests: TextRequest) -> None:
        """Add the requests of one client to the queue, all of them or none."""
        for request in requests:
            self.batches.check_size(request)
        with self._changed:
            self.check_room(len(requests))
            self._waiting.push(requests, self._mean_seconds)
            self.statistics.accepted += len(requests)
            self._changed.notify()

    def check_room(self, n_requests: int = 1) -> None:
        """Raise unless ``n_requests`` more requests would be accepted."""
        if self._closing:
            raise SchedulerClosed
        if n_requests > (most := self._waiting.max_waiting):  # however often the client tries again
            raise ValueError(f"the request has {n_requests} prompts; the queue of this server holds {most}")
        if not self._waiting.has_room(n_requests):
            self.statistics.refused += n_requests
            n_rounds = 1 + len(self._waiting) // max(1, len(self._running))
            raise QueueFull(len(self._waiting), max(1, round(n_rounds * self._mean_seconds)))

    def run(self, work: Callable[[], Result]) -> Future[Result]:
        """Run other work with the model, between two decode steps."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closing:
                raise SchedulerClosed
            if len(self._work) >= self._waiting.max_waiting:
                self.statistics.refused += 1
                raise QueueFull(len(self._work), 1)
            self._work.append((future, work))
            self._changed.notify()
        return future

    def wake(self) -> None:
        """Wake the thread so that it drops cancelled requests now."""
        with self._changed:
            self._changed.notify()

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not (self._waiting or self._reading or self._running or self._work)

    def close(self, seconds: float = 5.0) -> None:
        """Refuse new requests, fail those that wait or run, and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    # ------------------------------------------------------------------ in the thread

    def _loop(self) -> None:
        with inference(self.model):
            while self._wait_for_work():
                try:
                    self._do_round()
                except BaseException as error:  # unexpected, such as a panic in Rust: every client gets an answer
                    self._fail_all(error if isinstance(error, Exception) else RuntimeError(str(error)))
        self._refuse_pending()

    def _refuse_pending(self) -> None:
        """Fail everything that still waits or runs when the scheduler is closed."""
        with self._changed:
            while self._waiting:
                self._running.add(self._waiting.pop())
        self._fail_all(SchedulerClosed())
        while self._work:
            future, _ = self._work.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(SchedulerClosed())

    def _wait_for_work(self) -> bool:
        """Block until there is work (True) or the scheduler is closed (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self.is_idle)
            return not self._closing

    def _do_round(self) -> None:
        self._drop_cancelled()
        if self._work:
            _fulfil(*self._work[0])
            self._work.popleft()  # last: while it runs, the scheduler is not idle
        self._advance_texts()
        self._post_events()

    def _advance_texts(self) -> None:
        """Read the next parts of prompts, start the texts of those that are complete, and decode all texts."""
        requests = self._next_readings()
        wait = self._reader.start([request.reading for request in requests]) if self._reader is not None else dict
        draws = any(request.config.samples for request in requests)  # first tokens, which would wait for the block
        if self.batches.captures and not draws:  # the GPU decodes a block while the host starts texts
            self.batches.step()
            self._start_texts(requests, wait())
        else:
            self._start_texts(requests, wait())
            self.batches.step()

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._running if request.cancelled]:
            self.end(request)
        self._reading = deque(request for request in self._reading if request in self._running)
        with self._changed:
            self.statistics.cancelled += self._waiting.drop_cancelled()

    def _fail_all(self, error: Exception) -> None:
        """Fail all running requests and discard the batches, which may be in an inconsistent state."""
        self.batches.clear()
        self._reading.clear()
        for request in list(self._running):
            request.slots.clear()
            self.end(request, FailureEvent(error))
        self._post_events()

    def _start_texts(self, requests: list[TextRequest], errors: dict[PromptReading, Exception]) -> None:
        """Start the texts of requests whose prompts are complete now."""
        ready = []
        for request in requests:
            error = errors.get(request.reading)
            if error is None and not request.reading.is_read:
                continue
            self._reading.remove(request)
            if error is not None:
                self.end(request, FailureEvent(error))
            elif request.reading.limit == 0:  # it is only about the prompt
                for copy in range(request.copies):
                    self.report(request, TokenEvent(copy, (), finish="length"), is_urgent=True)
                self.end(request)
            else:
                ready.append(request)
        self.batches.start(ready)

    def _next_readings(self) -> list[TextRequest]:
        """The requests to prefill in this round, up to the budget: partly read prompts in turn, then new ones."""
        budget, chosen = self._prompt_tokens, list[TextRequest]()
        for request in self._reading:
            if chosen and request.reading.n_next_tokens > budget:  # the first may exceed it: a source is read whole
                break
            budget -= request.reading.n_next_tokens
            chosen.append(request)
        self._reading.rotate(-len(chosen))
        while (new := self._admit(budget if chosen else sys.maxsize)) is not None:
            budget -= new.reading.n_next_tokens
            chosen.append(new)
        return chosen

    def _admit(self, budget: int) -> TextRequest | None:
        """Take the next request out of the queue, if its first part is in the budget and the batches have room."""
        with self._changed:
            request = self._waiting.first()
            if request is None or request.reading.n_next_tokens > budget:
                return None
            if not self.batches.has_room([*self._reading, request]):
                return None
            self._waiting.pop()
            self._reading.append(request)
            self._running.add(request)
        self.statistics.prompt_tokens += request.n_prompt
        return request

    def end(self, request: TextRequest, failure: FailureEvent | None = None) -> None:
        """End a request that is finished, cancelled or failed."""
        if request not in self._running:
            return
        self.batches.leave(request)
        request.reading.release()
        request.finished = time.monotonic()
        if failure is not None:
            self.report(request, failure, is_urgent=True)
            self.statistics.failed += 1
        elif request.cancelled:
            self.statistics.cancelled += 1
        else:
            self.statistics.finished += 1
            seconds = request.finished - (request.started or request.finished)
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        self._running.discard(request)  # last: an idle scheduler has counted it and freed its rows

    def _count(self) -> None:
        """Update the gauges of the statistics."""
        statistics = self.statistics
        statistics.waiting, statistics.running = len(self._waiting), len(self._running)
        statistics.rows = self.batches.n_rows
        statistics.prefix_tokens = 0 if self._prefixes is None else self._prefixes.n_tokens_found

    def report(self, request: TextRequest, event: TextEvent, is_urgent: bool) -> None:
        self._events.append((request, event))
        if is_urgent:
            self._urgent.add(request)

    def _post_events(self) -> None:
        """Post the events of urgent requests, or all events if ``post_seconds`` have passed since the last time."""
        self._count()
        if not self._events:
            return
        now, events = time.monotonic(), self._events
        if now - self._last_post >= self.post_seconds:
            self._events, self._last_post = [], now
        elif self._urgent:
            events = [entry for entry in self._events if entry[0] in self._urgent]
            self._events = [entry for entry in self._events if entry[0] not in self._urgent]
        else:
            return
        self._urgent.clear()
        events = _join_tokens(events)

        def deliver() -> None:
            for request, event in events:
                request.deliver(event)

        with suppress(RuntimeError):  # the event loop is closed
            self.post(deliver)


def _join_tokens(events: list[tuple[TextRequest, TextEvent]]) -> list[tuple[TextRequest, TextEvent]]:
    """The events with consecutive tokens of a text in one: handling an event costs more than a token."""
    joined: list[tuple[TextRequest, TextEvent]] = []
    last: dict[tuple[TextRequest, int], int] = {}  # where the last tokens of a text are
    for request, event in events:
        if not isinstance(event, TokenEvent) or request.n_top is not None:
            joined.append((request, event))
            continue
        at = last.setdefault((request, event.copy), len(joined))
        if at == len(joined):
            joined.append((request, event))
        else:
            before = joined[at][1]
            assert isinstance(before, TokenEvent)
            joined[at] = request, event._replace(tokens=before.tokens + event.tokens)
    return joined


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    """Run the work of a future unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # a panic in Rust derives from BaseException; the caller must still hear of it
        future.set_exception(error)
