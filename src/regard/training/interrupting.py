"""Ctrl-C and SIGTERM: the first one saves and leaves, the second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..errors import RegardError

__all__ = ["Interrupted", "Signals"]


class Interrupted(RegardError):
    """Training was asked to stop, and everything up to there is saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Signals:
    """While it is entered, ``asked`` is the exit code of the signal that came, or 0.

    Of several processes (``patient``) none leaves at once: their launcher passes on what they may have been told
    already, the others wait for them, and it ends them itself when they take too long.
    """

    def __init__(self, patient: bool = False) -> None:
        self.asked, self._patient = 0, patient
        self._before: dict[int, Any] = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if self.asked and not self._patient:
            os._exit(code)
        self.asked = self.asked or code

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python delivers no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
