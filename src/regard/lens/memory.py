"""Freed memory goes back at once while a long text is looked at.

glibc puts tensors of up to 32 MB side by side into one heap. What a look keeps then stands between what passes, and the
holes stay the process's for good: 100 MB and more at 4,096 tokens. Mapped each for itself, what is freed is gone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_FROM = 1 << 20
_USUAL = 32 << 20  # where glibc ends up by itself after the first large tensors: tiles are read faster from a heap


@contextmanager
def giving_back(n_tokens: int) -> Iterator[None]:
    """While it lasts, large tensors are mapped one by one; for short texts, and without glibc, nothing changes."""
    tell = _mallopt() if n_tokens >= 1024 else None
    if tell is None:
        yield
        return
    tell(_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        yield
    finally:
        tell(_TRIM_THRESHOLD, 2 * _USUAL)
        tell(_MMAP_THRESHOLD, _USUAL)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 — other libraries give these numbers other meanings, or none
        found: Callable[[int, int], int] = library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
    return found
