"""Ctrl-C and SIGTERM in a run: the first saves and exits, the second exits at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..errors import RegardError


class Interrupted(RegardError):
    """Training was stopped by a signal or at ``train.stop_at``; progress up to there is saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Signals:
    """A context in which ``exit_code`` is the exit code of the first signal received, or 0.

    ``patient``: a second signal is ignored. In a distributed run the launcher may forward a signal that the process has
    already received, the other processes wait for it, and the launcher kills processes that take too long.
    """

    def __init__(self, patient: bool = False) -> None:
        self.exit_code = 0
        self._patient = patient
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if self.exit_code and not self._patient:
            os._exit(code)
        self.exit_code = self.exit_code or code

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only it may set signal handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
