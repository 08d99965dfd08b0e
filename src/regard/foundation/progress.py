"""How far long work before the first step has come: reading, and turning texts into tokens.

Silent unless a caller asks with ``show_progress``: a library says nothing by itself. Quick work is never shown.
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

_AFTER_S = 1.0  # work that takes longer is shown
_EVERY = 256  # items between two looks at the clock
_shown: ContextVar[bool] = ContextVar("progress is shown", default=False)


@contextmanager
def show_progress(shown: bool = True) -> Iterator[None]:
    """Inside the block, ``track`` says on stderr what is being done; on a terminal with a bar."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


def track(items: Iterable[Item], what: str, total: int, size_of: Callable[[Item], int]) -> Iterator[Item]:
    """The items as they are; ``what`` is done to them, and their sizes add up to about ``total``."""
    if not _shown.get():
        yield from items
        return
    done, started, bar = 0, time.monotonic(), None
    try:
        for number, item in enumerate(items):
            yield item
            done += size_of(item)
            if number % _EVERY == 0 and time.monotonic() - started > _AFTER_S:
                bar = bar or _Bar(what, total, started)
                bar.move(done)
    finally:
        if bar is not None:
            bar.close()


class _Bar:
    """On a terminal a bar on stderr while it lasts, elsewhere a line when it begins; then a line with the time."""

    _moving: _Bar | None = None  # a terminal has room for one: of two files read side by side the first is shown

    def __init__(self, what: str, total: int, started: float) -> None:
        from rich.console import Console
        from rich.progress import Progress  # only now: most work ends before it is worth a bar

        self._what, self._started = what, started
        self._progress = Progress(console=Console(stderr=True, highlight=False, markup=False), transient=True)
        self._task = self._progress.add_task(localise(what), total=total)
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
        print(localise(f"{self._what} {words}"), file=sys.stderr, flush=True)
