"""Progress of long work before the first training step: reading and tokenising.

Silent except inside ``show_progress``, since a library should not print by itself. Quick work is never shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from .language import localise

Item = TypeVar("Item")

_AFTER_S = 1.0  # seconds after which work is shown
_EVERY = 256  # items between two checks of the clock
_shown: ContextVar[bool] = ContextVar("progress is shown", default=False)


@contextmanager
def show_progress(shown: bool = True) -> Iterator[None]:
    """A context in which ``track`` reports on stderr, on a terminal with a progress bar."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


def track(items: Iterable[Item], activity: str, total: int, size_of: Callable[[Item], int]) -> Iterator[Item]:
    """Yield the items and report progress as ``activity``; their sizes add up to about ``total``."""
    if not _shown.get():
        yield from items
        return
    done, started, bar = 0, time.monotonic(), None
    try:
        for number, item in enumerate(items):
            yield item
            done += size_of(item)
            if number % _EVERY == 0 and time.monotonic() - started > _AFTER_S:
                bar = bar or _Bar(activity, total, started)
                bar.move(done)
    finally:
        if bar is not None:
            bar.close()


class _Bar:
    """A progress bar on a terminal, elsewhere a line at the start; at the end a line with the time it took."""

    _moving: _Bar | None = None  # a terminal shows only one bar, the first

    def __init__(self, activity: str, total: int, started: float) -> None:
        from rich.console import Console
        from rich.progress import Progress  # imported here, because most work ends before it needs a bar

        self._activity, self._started = activity, started
        self._progress = Progress(console=Console(stderr=True, highlight=False, markup=False), transient=True)
        self._task = self._progress.add_task(localise(activity), total=total)
        if not sys.stderr.isatty():
            self._say("…")
        elif _Bar._moving is None:
            _Bar._moving = self
            self._progress.start()

    def move(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        if _Bar._moving is self:
            self._progress.stop()
            _Bar._moving = None
        self._say(f"took {time.monotonic() - self._started:.0f} s")

    def _say(self, words: str) -> None:
        print(localise(f"{self._activity} {words}"), file=sys.stderr, flush=True)
