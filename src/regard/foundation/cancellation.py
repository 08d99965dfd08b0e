"""Work that can be stopped from another thread: its loops ask, once a step, whether anybody still wants the result."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_event: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Cancelled(Exception):
    """Nobody waits for the result any more."""


@contextmanager
def cancel_with(event: threading.Event) -> Iterator[None]:
    """Inside the block ``check_cancelled`` raises once the event is set; other threads are not concerned."""
    token = _event.set(event)
    try:
        yield
    finally:
        _event.reset(token)


def check_cancelled() -> None:
    """Raise ``Cancelled`` where the work of this thread is no longer wanted; called for every token, or layer."""
    event = _event.get()
    if event is not None and event.is_set():
        raise Cancelled("nobody waits for this any more")
