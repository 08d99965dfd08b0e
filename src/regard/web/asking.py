"""What every route is given: the server's models and looks, the look that is asked about, and the way to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response
from torch import Tensor

from . import answers
from .limits import Limits
from .reading import MEAN, Place
from .served import Served
from .sessions import Session, Sessions
from .workers import Workers


@dataclass(eq=False)
class Explorer:
    """What stands behind the routes."""

    models: list[Served]
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.sessions, self.workers = Sessions(self.limits), Workers(self.limits)


def _explorer(request: Request) -> Explorer:
    found: Explorer = request.app.state.explorer
    return found


Here = Annotated[Explorer, Depends(_explorer)]


@dataclass(frozen=True, eq=False)
class Question:
    """A question about one look. Answers do not change: what a browser has already is not worked out again."""

    here: Explorer
    session: Session
    request: Request

    @property
    def limits(self) -> Limits:
        return self.here.limits

    async def floats(self, work: Callable[[], Tensor]) -> Response:
        """Numbers that are read off a map."""
        return answers.floats(self.request, await self.here.workers.read(work), self.limits)

    async def read(self, work: Callable[[], Any]) -> Response:
        """JSON of what is read off maps."""
        return answers.document(self.request, await self.here.workers.read(work), self.limits)

    async def run(self, work: Callable[[], Any]) -> Response:
        """JSON of what a model has to run for."""
        return answers.document(self.request, await self.here.workers.run(work), self.limits)

    async def file(self, work: Callable[[], bytes], media_type: str, name: str | None = None) -> Response:
        """A file, saved under a name where it has one."""
        saved = {} if name is None else {"Content-Disposition": f'attachment; filename="{name}"'}
        headers = saved | answers.lasting(self.request)
        content = await self.here.workers.read(work)
        return answers.sized(Response(content, media_type=media_type, headers=headers), self.limits)


def _question(request: Request, here: Here, look_id: Annotated[str, Path(max_length=40)]) -> Question:
    answers.check_unchanged(request)
    return Question(here, here.sessions.get(look_id), request)


Asked = Annotated[Question, Depends(_question)]

# ---- words of a question

Kind = Annotated[str, Query(max_length=40, examples=["self"])]
Number = Annotated[int, Query(ge=0, lt=2**31)]
Head = Annotated[str, Query(pattern=r"^(mean|[0-9]{1,6})$", examples=["0", "mean"])]
Cells = Annotated[int, Query(ge=1, le=512)]
Position = Annotated[int, Query(gt=-(2**31), lt=2**31)]
Words = Annotated[bool, Query(description="sub-words as words: rows averaged, columns summed")]
Specials = Annotated[bool, Query(description="false hides special tokens; rows are renormalised")]


def _place(kind: Kind, layer: Number, head: Head = MEAN, words: Words = False, specials: Specials = True) -> Place:
    return Place(kind, layer, None if head == MEAN else int(head), words, specials)


At = Annotated[Place, Depends(_place)]
