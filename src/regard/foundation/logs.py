"""Control over what other rooms log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
