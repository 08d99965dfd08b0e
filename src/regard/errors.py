"""What can go wrong beyond bad arguments, each with the exit code the command line ends with.

A wrong argument is a ValueError or TypeError, in the library as in Python itself. These are the failures that a
caller may want to tell apart: a file that cannot be trusted, a training run that left the road.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["BadModelFile", "Diverged", "RegardError"]


class RegardError(Exception):
    """Something regard was asked to do failed, and the message says what."""

    exit_code = 1


class BadModelFile(RegardError):
    """A checkpoint or model directory is damaged, incomplete or not what its manifest says."""

    exit_code = 3


class Diverged(RegardError):
    """Training reached a loss or gradient that is not finite and could not recover."""

    exit_code = 4


@contextmanager
def warnings_unsaid(logger: str) -> Iterator[None]:
    """Where what a room would warn of is no news, or said in another way."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
