"""The looks a server keeps: as many as fit in memory, the one not asked for the longest gone first."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from .limits import Limits, Refused

if TYPE_CHECKING:
    from ..generation import Generated
    from ..lens import Look
    from .served import Served

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Session:
    """One look, what it was made with, and what has been worked out about it."""

    look: Look
    served: Served
    under: Callable[[], AbstractContextManager[None]]
    """The changed attention it was made under; entered again where the model has to run again."""
    n_bytes: int = 0
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    _known: dict[Any, _Found] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def search(self) -> Generated | None:
        """The beam search that wrote the text, if one did."""
        made = self.look.generated
        return None if made is None or made.steps is None else made

    def once(self, key: Any, work: Callable[[], Answer]) -> Answer:
        """What ``work`` says, asked only the first time. Of two who ask at once, the second waits for the first."""
        with self._lock:
            found = self._known.setdefault(key, _Found())
        with found.lock:
            if not found.is_known:
                found.value, found.is_known = work(), True
        answer: Answer = found.value
        return answer


class _Found:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_known = False
        self.value: Any = None


class Sessions:
    """Looks by id. Reading one makes it the newest."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        return sum(session.n_bytes for session in self._kept.values())

    def get(self, look_id: str) -> Session:
        with self._lock:
            if look_id not in self._kept:
                raise Refused(404, f"there is no look {look_id[:40]!r}, or it is no longer kept: open it again")
            self._kept.move_to_end(look_id)
            return self._kept[look_id]

    def make_room(self, n_bytes: int) -> None:
        """Let go of old looks before a new one of this size is made, so that both never stand side by side."""
        if n_bytes > self._limits.kept_bytes:
            needed, most = n_bytes / 1e6, self._limits.kept_bytes / 1e6
            raise Refused(
                413, f"q and k of this text take {needed:,.0f} MB, and the server keeps {most:,.0f} MB at most"
            )
        with self._lock:
            while self._kept and (
                self.n_bytes + n_bytes > self._limits.kept_bytes or len(self._kept) >= self._limits.kept_looks
            ):
                self._kept.popitem(last=False)

    def add(self, session: Session) -> Session:
        session.n_bytes = bytes_of(session.look)
        self.make_room(session.n_bytes)
        with self._lock:
            self._kept[session.id] = session
        return session


def bytes_of(look: Look) -> int:
    """The memory behind a look's maps and states; what several of them share counts once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(look)}
    return sum(storages.values())


def _tensors(look: Look) -> Iterator[Tensor]:
    for kind in look.kinds:
        for layer in range(look.layers(kind)):
            sweep = look.map(kind, layer)._sweep
            yield from (sweep.scoring.q, sweep.scoring.k, sweep.lse)
    states = look.hidden()
    if isinstance(states, Tensor):
        yield states
