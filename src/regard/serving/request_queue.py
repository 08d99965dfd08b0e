"""The queue of requests that wait for a model: first come, first served, with priorities and turns.

One step of priority is worth ``PRIORITY_SECONDS`` of waiting, so a low priority waits longer but never forever.
Requests that were submitted together are queued as if their client had sent them one after the other: a body of 256
prompts does not make a client with a single prompt wait for all 256.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import count

from ..errors import RegardError
from .running_text import TextRequest

PRIORITY_SECONDS = 5.0


class QueueFull(RegardError):
    """The queue accepts no more requests at the moment; ``retry_seconds`` estimates when it will."""

    def __init__(self, n_waiting: int, retry_seconds: int) -> None:
        super().__init__(f"{n_waiting} requests are already waiting; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class RequestQueue:
    """At most ``max_waiting`` requests. Not thread-safe: threads that share it hold a lock."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._heap: list[tuple[float, int, TextRequest]] = []  # (effective submission time, tie-breaker, request)
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def has_room(self, n_requests: int = 1) -> bool:
        return len(self._heap) + n_requests <= self.max_waiting

    def push(self, requests: Sequence[TextRequest], seconds_apart: float) -> None:
        """Add the requests of one client, each as if submitted ``seconds_apart`` after the previous one."""
        for position, request in enumerate(requests):
            effective = request.submitted + position * seconds_apart - PRIORITY_SECONDS * request.priority
            heapq.heappush(self._heap, (effective, next(self._numbers), request))

    def first(self) -> TextRequest | None:
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[TextRequest]:
        return [request for _, _, request in sorted(self._heap)]

    def pop(self) -> TextRequest:
        return heapq.heappop(self._heap)[2]

    def remove(self, requests: Collection[TextRequest]) -> None:
        self._keep([entry for entry in self._heap if entry[2] not in requests])

    def drop_cancelled(self) -> int:
        """Remove cancelled requests; returns how many there were."""
        n_before = len(self._heap)
        self._keep([entry for entry in self._heap if not entry[2].cancelled])
        return n_before - len(self._heap)

    def _keep(self, entries: list[tuple[float, int, TextRequest]]) -> None:
        if len(entries) < len(self._heap):
            heapq.heapify(entries)
            self._heap = entries
