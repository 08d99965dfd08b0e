"""The looks that a server keeps, least recently used dropped first, and the threads that work on them."""

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

from ..foundation.cancellation import cancel_with
from .requests import Limits, RequestRefused

if TYPE_CHECKING:
    from ..generation import Generated
    from ..lens import Look
    from .served_models import ServedModel

Result = TypeVar("Result")


@dataclass(eq=False)
class LookSession:
    """One look, its model, and cached results about it."""

    look: Look
    served: ServedModel
    model_changes: Callable[[], AbstractContextManager[None]]  # the look's interventions, to run the model again
    look_bytes: int = 0
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    _results: dict[Any, Any] = field(default_factory=dict)
    _locks: dict[Any, threading.Lock] = field(default_factory=dict)  # one per result
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _result_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """The bytes of the look and of its cached results."""
        return self.look_bytes + self._result_bytes

    @property
    def search(self) -> Generated | None:
        """The beam search that generated the text; None if there was none."""
        generated = self.look.generated
        return None if generated is None or generated.steps is None else generated

    def cache(self, key: Any, work: Callable[[], Result]) -> Result:
        """The result of ``work``, computed once; another thread that needs it meanwhile waits.

        When the results together grow too large, all are dropped: they can be computed again.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            known: dict[Any, Result] = self._results
            result = known[key] if key in known else work()
        with self._lock:
            size = _size_of(result)
            if self._result_bytes + size > _MAX_RESULT_BYTES or len(self._results) >= _MAX_RESULTS:
                self._results, self._locks, self._result_bytes = {}, {}, 0
            if key not in self._results:
                self._results[key] = result
                self._result_bytes += size
        return result


_MAX_RESULTS, _MAX_RESULT_BYTES = 1000, 16_000_000  # per look
_LABEL_BYTES = 400  # memory of the label of a row or column


def _size_of(result: object) -> int:
    """The bytes of a tensor, of a file, or of a view's labels; other results are small and count as 0."""
    if isinstance(result, Tensor):
        return result.nbytes
    labels = len(getattr(result, "rows", ())) + len(getattr(result, "cols", ()))
    return len(result) if isinstance(result, bytes) else _LABEL_BYTES * labels


class SessionStore:
    """Looks by id, least recently used first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sessions: OrderedDict[str, LookSession] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def n_bytes(self) -> int:
        return sum(session.n_bytes for session in self._sessions.values())

    def get(self, look_id: str) -> LookSession:
        with self._lock:
            if look_id not in self._sessions:
                raise RequestRefused(404, f"look {look_id[:40]!r} does not exist or was dropped: open it again")
            self._sessions.move_to_end(look_id)
            while len(self._sessions) > 1 and self.n_bytes > self._limits.kept_bytes:  # cached results have grown
                self._sessions.popitem(last=False)
            return self._sessions[look_id]

    def evict_for(self, n_bytes: int) -> None:
        """Drop old looks before a new one of this size is computed, so that memory never holds both."""
        if n_bytes > self._limits.kept_bytes:
            needed, most = f"{n_bytes / 1e6:,.0f} MB", f"{self._limits.kept_bytes / 1e6:,.0f} MB"
            raise RequestRefused(413, f"q and k of this text take {needed}; the server keeps at most {most}")
        with self._lock:
            while self._sessions and (
                self.n_bytes + n_bytes > self._limits.kept_bytes or len(self._sessions) >= self._limits.kept_looks
            ):
                self._sessions.popitem(last=False)

    def add(self, session: LookSession) -> LookSession:
        look, storages = session.look, [x.untyped_storage() for x in _tensors(session.look)]
        session.look_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        if look.image is not None:
            session.look_bytes += look.image.width * look.image.height * len(look.image.getbands())
        labels = {id(x): len(x) for kind in look.kinds for x in (look.rows(kind=kind), look.cols(kind=kind))}
        session.look_bytes += _LABEL_BYTES * sum(labels.values())
        self.evict_for(session.look_bytes)
        with self._lock:
            self._sessions[session.id] = session
        return session


def _tensors(look: Look) -> Iterator[Tensor]:
    """The inputs, maps and states of a look; some share storage."""
    yield from look.inputs
    for kind in look.kinds:
        for layer in range(look.layers(kind=kind)):
            walk = look.map(kind=kind, layer=layer)._walk
            yield from (walk.scoring.q, walk.scoring.k, walk.lse)
    states = look.hidden()
    if isinstance(states, Tensor):
        yield states


_END = object()


class WorkerPools:
    """One thread that runs models and several that read maps, each kind with a queue and a time limit."""

    def __init__(self, limits: Limits, readers: int = 4) -> None:
        self._limits, self._readers = limits, readers
        self._n_waiting, self._count_lock = 0, threading.Lock()
        self.stopping = threading.Event()
        self.open()

    def open(self) -> None:
        """Accept work, also after ``close``; threads start with the first work."""
        self._models = ThreadPoolExecutor(1, "regard-model")
        self._maps = ThreadPoolExecutor(self._readers, "regard-map")
        self.stopping.clear()

    @property
    def is_busy(self) -> bool:
        return self._n_waiting > 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do work that runs a model."""
        return await self._submit(self._models, work, self._limits.model_seconds)

    async def read(self, work: Callable[[], Result]) -> Result:
        """Do work that only reads maps."""
        return await self._submit(self._maps, work, self._limits.request_seconds)

    async def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], Result], seconds: float) -> Result:
        self._count_in()
        abandoned = threading.Event()

        def run() -> Result:
            with cancel_with(abandoned):
                return work()

        running = pool.submit(run)
        running.add_done_callback(self._count_out)
        try:
            # A timeout cancels queued work; running work polls ``abandoned`` through ``cancel_with``.
            return await asyncio.wait_for(asyncio.wrap_future(running), seconds)
        except TimeoutError:
            hint = "request less, or use a shorter text"
            raise RequestRefused(422, f"this takes longer than {seconds:g} s; {hint}") from None
        finally:
            abandoned.set()

    async def stream(self, make: Callable[[], Iterator[Result]]) -> AsyncGenerator[Result, None]:
        """Yield the items of an iterator that runs a model, as they come; it stops when the client disconnects."""
        self._count_in()
        loop, items = asyncio.get_running_loop(), asyncio.Queue[object]()
        abandoned = threading.Event()

        def put(item: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        def work() -> None:
            try:
                with cancel_with(abandoned):
                    for item in make():
                        put(item)
                        if abandoned.is_set() or self.stopping.is_set():
                            break
                put(_END)
            except BaseException as failure:  # a panic in Rust derives from BaseException; the client waits for an end
                put(failure if isinstance(failure, Exception) else RuntimeError(str(failure)))

        running = self._models.submit(work)
        running.add_done_callback(self._count_out)
        until = loop.time() + self._limits.stream_seconds
        try:
            while (item := await asyncio.wait_for(items.get(), until - loop.time())) is not _END:
                if isinstance(item, Exception):
                    raise item
                yield cast(Result, item)
        except TimeoutError:
            raise RequestRefused(422, f"the text is not finished after {self._limits.stream_seconds:g} s") from None
        finally:
            abandoned.set()
            running.cancel()

    def _count_in(self) -> None:
        if self.stopping.is_set():
            raise RequestRefused(503, "the server is shutting down")
        with self._count_lock:
            if self._n_waiting >= self._limits.waiting:
                raise RequestRefused(429, f"{self._n_waiting} requests are already waiting; try again in a moment")
            self._n_waiting += 1

    def _count_out(self, _: object) -> None:
        with self._count_lock:
            self._n_waiting -= 1

    def close(self) -> None:
        """Refuse new work and cancel queued work; running work continues."""
        self.stopping.set()
        for pool in (self._models, self._maps):
            pool.shutdown(wait=False, cancel_futures=True)
