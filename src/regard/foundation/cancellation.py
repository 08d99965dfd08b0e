"""Cancelling work from another thread: loops check once per step whether their result is still needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_event: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Cancelled(Exception):
    """The work was cancelled because its result is no longer needed."""


@contextmanager
def cancel_with(event: threading.Event) -> Iterator[None]:
    """A context in which ``check_cancelled`` raises once the event is set; other threads are not affected."""
    token = _event.set(event)
    try:
        yield
    finally:
        _event.reset(token)


def check_cancelled() -> None:
    """Raise ``Cancelled`` if the work of this thread was cancelled; called for every token or layer."""
    event = _event.get()
    if event is not None and event.is_set():
        raise Cancelled("the result is no longer needed")
