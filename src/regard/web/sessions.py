"""The looks a server keeps: as many as fit in memory, the one not asked for the longest gone first."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from .request_limits import Limits, RequestRefused

if TYPE_CHECKING:
    from ..generation import Generated
    from ..lens import Look
    from .served_models import ServedModel

Answer = TypeVar("Answer")


@dataclass(eq=False)
class LookSession:
    """One look, what it was made with, and what has been worked out about it."""

    look: Look
    served: ServedModel
    # the changed attention it was made under; entered again where the model has to run again
    model_changes: Callable[[], AbstractContextManager[None]]
    n_bytes: int = 0
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    _known: dict[Any, _CachedAnswer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def search(self) -> Generated | None:
        """The beam search that wrote the text, if one did."""
        made = self.look.generated
        return None if made is None or made.steps is None else made

    def once(self, key: Any, work: Callable[[], Answer]) -> Answer:
        """What ``work`` says, asked only the first time. Of two who ask at once, the second waits for the first."""
        with self._lock:
            found = self._known.setdefault(key, _CachedAnswer())
        with found.lock:
            if not found.is_known:
                found.value, found.is_known = work(), True
        answer: Answer = found.value
        return answer


class _CachedAnswer:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_known = False
        self.value: Any = None


class SessionStore:
    """Looks by id. Reading one makes it the newest."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, LookSession] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        return sum(session.n_bytes for session in self._kept.values())

    def get(self, look_id: str) -> LookSession:
        with self._lock:
            if look_id not in self._kept:
                raise RequestRefused(404, f"there is no look {look_id[:40]!r}, or it is no longer kept: open it again")
            self._kept.move_to_end(look_id)
            return self._kept[look_id]

    def make_room(self, n_bytes: int) -> None:
        """Let go of old looks before a new one of this size is made, so that both never stand side by side."""
        if n_bytes > self._limits.kept_bytes:
            needed, most = n_bytes / 1e6, self._limits.kept_bytes / 1e6
            raise RequestRefused(
                413, f"q and k of this text take {needed:,.0f} MB, and the server keeps {most:,.0f} MB at most"
            )
        with self._lock:
            while self._kept and (
                self.n_bytes + n_bytes > self._limits.kept_bytes or len(self._kept) >= self._limits.kept_looks
            ):
                self._kept.popitem(last=False)

    def add(self, session: LookSession) -> LookSession:
        session.n_bytes = look_bytes(session.look)
        self.make_room(session.n_bytes)
        with self._lock:
            self._kept[session.id] = session
        return session


def look_bytes(look: Look) -> int:
    """The memory behind a look's maps and states; what several of them share counts once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(look)}
    return sum(storages.values())


def _tensors(look: Look) -> Iterator[Tensor]:
    for kind in look.kinds:
        for layer in range(look.layers(kind=kind)):
            sweep = look.map(kind=kind, layer=layer)._walk
            yield from (sweep.scoring.q, sweep.scoring.k, sweep.lse)
    states = look.hidden()
    if isinstance(states, Tensor):
        yield states


_END = object()


class WorkerPools:
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
            raise RequestRefused(422, f"this takes longer than {seconds:g} s; {hint}") from None

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
            raise RequestRefused(422, f"the text is not finished after {self._limits.stream_seconds:g} s") from None
        finally:
            unheard.set()
            running.cancel()

    def _enter(self) -> None:
        if self.stopping.is_set():
            raise RequestRefused(503, "the server is about to end")
        with self._counting:
            if self._waiting >= self._limits.waiting:
                raise RequestRefused(429, f"{self._waiting} requests are waiting already; ask again in a moment")
            self._waiting += 1

    def _leave(self, _: object) -> None:
        with self._counting:
            self._waiting -= 1

    def close(self) -> None:
        """Nothing new begins; what runs is left alone."""
        self.stopping.set()
        for pool in (self._models, self._maps):
            pool.shutdown(wait=False, cancel_futures=True)
