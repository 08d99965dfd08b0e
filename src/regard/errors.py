"""The failures callers may want to tell apart, each with the exit code the command line ends with.

A wrong argument is a ValueError or TypeError, in the library as in Python itself. These are the failures that a
caller may want to tell apart: a file that cannot be trusted, a training run that diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["BadData", "BadLine", "BadModelFile", "Diverged", "RegardError", "UsageError"]


class RegardError(Exception):
    """Something regard was asked to do failed, and the message says what."""

    exit_code = 1


class UsageError(RegardError, ValueError):
    """What was typed cannot be meant; nothing has been done yet."""

    exit_code = 2


class BadModelFile(RegardError):
    """A checkpoint or model directory is damaged, incomplete or not what its manifest says."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a data file that is no example, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class BadData(RegardError):
    """Data files that cannot be used as they are; ``lines`` holds the first of the ``n_bad`` bad lines."""

    def __init__(self, message: str, lines: tuple[BadLine, ...] = (), n_bad: int = 0) -> None:
        super().__init__(message)
        self.lines, self.n_bad = lines, n_bad


class Diverged(RegardError):
    """Training reached a loss or gradient that is not finite and could not recover."""

    exit_code = 4


@contextmanager
def silence_warnings(logger: str) -> Iterator[None]:
    """Inside the block, the named logger reports errors only: its warnings are no news here, or said another way."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
