"""Who computes while the server listens: one thread runs models, a few read maps, and nobody waits for ever.

A recorder looks at one thread and there is one recorder at a time, so models run one after the other. Maps are
snapshots: any number of threads may read them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from .limits import Limits, Refused

Answer = TypeVar("Answer")
_END = object()


class Workers:
    """Two queues with a limit each."""

    def __init__(self, limits: Limits, readers: int = 4) -> None:
        self._limits, self._readers = limits, readers
        self._waiting, self._counting = 0, threading.Lock()
        self.stopping = threading.Event()
        self.open()

    def open(self) -> None:
        """Ready for work, also after ``close``: threads are started when there is some."""
        self._models = ThreadPoolExecutor(1, "regard-model")
        self._maps = ThreadPoolExecutor(self._readers, "regard-map")
        self.stopping.clear()

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """What runs a model."""
        return await self._do(self._models, work, self._limits.model_seconds)

    async def read(self, work: Callable[[], Answer]) -> Answer:
        """What reads a map."""
        return await self._do(self._maps, work, self._limits.request_seconds)

    async def _do(self, pool: ThreadPoolExecutor, work: Callable[[], Answer], seconds: float) -> Answer:
        self._enter()
        running = pool.submit(work)
        running.add_done_callback(self._leave)
        try:
            # Cancelled before it has started it never starts; a thread that computes cannot be stopped.
            return await asyncio.wait_for(asyncio.wrap_future(running), seconds)
        except TimeoutError:
            hint = "ask for less, or look at a shorter text"
            raise Refused(422, f"this takes longer than {seconds:g} s; {hint}") from None

    async def stream(self, make: Callable[[], Iterator[Answer]]) -> AsyncGenerator[Answer, None]:
        """What a model writes, as it writes it; it stops when nobody listens any more."""
        self._enter()
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[object]()
        unheard = threading.Event()

        def tell(piece: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> None:
            try:
                for piece in make():
                    tell(piece)
                    if unheard.is_set() or self.stopping.is_set():
                        break
                tell(_END)
            except Exception as failure:
                tell(failure)

        running = self._models.submit(work)
        running.add_done_callback(self._leave)
        until = loop.time() + self._limits.stream_seconds
        try:
            while (piece := await asyncio.wait_for(pieces.get(), until - loop.time())) is not _END:
                if isinstance(piece, Exception):
                    raise piece
                yield cast(Answer, piece)
        except TimeoutError:
            raise Refused(422, f"the text is not finished after {self._limits.stream_seconds:g} s") from None
        finally:
            unheard.set()
            running.cancel()

    def _enter(self) -> None:
        if self.stopping.is_set():
            raise Refused(503, "the server is about to end")
        with self._counting:
            if self._waiting >= self._limits.waiting:
                raise Refused(429, f"{self._waiting} requests are waiting already; ask again in a moment")
            self._waiting += 1

    def _leave(self, _: object) -> None:
        with self._counting:
            self._waiting -= 1

    def close(self) -> None:
        """Nothing new begins; what runs is left alone."""
        self.stopping.set()
        for pool in (self._models, self._maps):
            pool.shutdown(wait=False, cancel_futures=True)
