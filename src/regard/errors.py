"""Exceptions that callers may want to handle, each with the exit code of the command line.

A wrong argument raises ValueError or TypeError, as in Python itself. The classes here are for other failures, such as a
damaged file or a training run that diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["BadData", "BadLine", "BadModelFile", "BadOutput", "Diverged", "RegardError", "UsageError"]


class RegardError(Exception):
    """Base class of all errors of regard; the message says what failed."""

    exit_code = 1


class UsageError(RegardError, ValueError):
    """A command or call with invalid arguments; nothing has been done yet."""

    exit_code = 2


class BadModelFile(RegardError):
    """A checkpoint or model directory that is damaged, incomplete or differs from its manifest."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a data file that is not a valid example, with the reason."""

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


class BadOutput(RegardError, ValueError):
    """A model whose output is NaN or infinite, whatever its input."""


class Diverged(RegardError):
    """Training reached a loss, gradient or weight that is not finite."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error message; the name of the class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def silence_warnings(logger: str) -> Iterator[None]:
    """A context in which the named logger reports errors only."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
