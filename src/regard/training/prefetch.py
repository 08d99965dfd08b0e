"""Batches made ahead of time, in a thread, so that a GPU never waits for a tokenizer or a picture."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .batch import Batch

__all__ = ["Prefetch"]


class Prefetch:
    """``batch(number)`` as ``make(number)`` gives it, on the device; the next ones are already being made.

    A thread makes the same batches as no thread, since a batch is a pure function of its number.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device, ahead: int = 4, stride: int = 1) -> None:
        self._make, self._device, self._ahead, self._stride = make, device, ahead, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches") if device.type == "cuda" else None
        self._coming: dict[int, Future[Batch]] = {}

    def batch(self, number: int) -> Batch:
        """The batch on the device, its targets counted."""
        if self._pool is None:
            return self._make(number).to(self._device)
        for ahead in range(number, number + self._stride * self._ahead, self._stride):
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(self._ready, ahead)
        return self._coming.pop(number).result().to(self._device)

    def _ready(self, number: int) -> Batch:
        return self._make(number).pinned()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._coming.clear()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
