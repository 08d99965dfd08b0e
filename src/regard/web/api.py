"""The HTTP interface: each route reads its question, asks the room that knows, and sends bytes or JSON.

Weights go out as float32, everything else as JSON; an error is {"error": "one sentence"} with a status of 4xx.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from . import answers, reading
from .beams import tree
from .bodies import LookBody, Problem, StreamBody
from .limits import Limits, Refused
from .opening import open_look
from .pictures import as_png
from .served import Served, by_id
from .sessions import Session, Sessions
from .workers import Workers
from .writing import write


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


def _kept(request: Request, here: Here, look_id: Annotated[str, Path(max_length=40)]) -> Session:
    answers.check_unchanged(request)
    return here.sessions.get(look_id)


Kept = Annotated[Session, Depends(_kept)]
Kind = Annotated[str, Query(max_length=40, examples=["self"])]
Number = Annotated[int, Query(ge=0, lt=2**31)]
Head = Annotated[str, Query(pattern=r"^(mean|[0-9]{1,6})$", examples=["0", "mean"])]
Cells = Annotated[int, Query(ge=1, le=512)]

router = APIRouter(prefix="/api", responses={"4XX": {"model": Problem}})


def _sends(media_type: str) -> dict[str, Any]:
    """What a route that sends no JSON says of its answer."""
    return {"response_class": Response, "responses": {200: {"content": {media_type: {"schema": {"type": "string"}}}}}}


_BYTES = _sends(answers.BINARY)


# ---- models and looks


@router.get("/models")
async def models(here: Here) -> list[dict[str, Any]]:
    """The models that are open."""
    return [each.document() for each in here.models]


@router.post("/looks")
async def new_look(here: Here, body: LookBody) -> Response:
    """Run a model over a text or an image, and keep what shows its attention."""
    served = by_id(here.models, body.model)
    session = await here.workers.run(lambda: open_look(served, body, here.sessions, here.limits))
    return _now(reading.document(session), here)


@router.get("/looks/{look_id}")
async def old_look(here: Here, session: Kept, request: Request) -> Response:
    """What a look is about."""
    return answers.document(request, reading.document(session), here.limits)


@router.post("/stream", **_sends("application/x-ndjson"))
async def stream(here: Here, body: StreamBody) -> Response:
    """A text as it is written: a line of JSON for each token, and a last one with the look at it."""
    served = by_id(here.models, body.model)
    pieces = here.workers.stream(lambda: write(served, body, here.sessions, here.limits))
    first = await anext(pieces, None)  # what is wrong with the question is said before anything is sent
    return StreamingResponse(
        _lines(first, pieces), media_type="application/x-ndjson", headers={"Cache-Control": "no-store"}
    )


async def _lines(first: Any, rest: Any) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        try:
            if first is not None:
                yield _line(first)
            async for piece in rest:
                yield _line(piece)
        except (Refused, ValueError, TypeError) as failure:
            yield _line({"error": str(failure)})


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(answers.plain(content), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _now(content: dict[str, Any], here: Explorer) -> Response:
    return answers.sized(JSONResponse(answers.plain(content), headers={"Cache-Control": "no-store"}), here.limits)


# ---- what is in a look


@router.get("/looks/{look_id}/labels")
async def labels(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind,
    axis: Literal["rows", "cols"],
    start: Number = 0,
    stop: Number | None = None,
) -> Response:
    """The names of rows or columns, a page at a time."""
    found = await here.workers.read(lambda: reading.labels(session, kind, axis, start, stop, here.limits))
    return answers.document(request, found, here.limits)


@router.get("/looks/{look_id}/tile", **_BYTES)
async def tile(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind,
    layer: Number,
    r0: Number,
    r1: Number,
    c0: Number,
    c1: Number,
    head: Head = "mean",
) -> Response:
    """Exact weights of some rows and columns."""
    found = await here.workers.read(lambda: reading.tile(session, kind, layer, head, (r0, r1), (c0, c1), here.limits))
    return answers.floats(request, found, here.limits)


@router.get("/looks/{look_id}/pooled", **_BYTES)
async def pooled(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind,
    layer: Number,
    h: Cells,
    w: Cells,
    head: Head = "mean",
    reduce: Literal["mean", "max"] = "mean",
) -> Response:
    """The whole matrix in h × w cells, or as many as it has; X-Shape says how many."""
    found = await here.workers.read(lambda: reading.pooled(session, kind, layer, head, h, w, reduce, here.limits))
    return answers.floats(request, found, here.limits)


@router.get("/looks/{look_id}/thumbnails", **_BYTES)
async def thumbnails(
    here: Here, session: Kept, request: Request, kind: Kind, layer: Number, size: Cells = 32
) -> Response:
    """Every head of a layer, small."""
    found = await here.workers.read(lambda: reading.thumbnails(session, kind, layer, size, here.limits))
    return answers.floats(request, found, here.limits)


@router.get("/looks/{look_id}/top")
async def top(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind,
    layer: Number,
    row: Number,
    head: Head = "mean",
    k: Annotated[int, Query(ge=1, le=256)] = 5,
) -> Response:
    """Where a row looks most, best first."""
    found = await here.workers.read(lambda: reading.top(session, kind, layer, head, row, k))
    return answers.document(request, found, here.limits)


@router.get("/looks/{look_id}/walk")
async def walk(
    here: Here, session: Kept, request: Request, kind: Kind, layer: Number, head: Number, row: Number, col: Number
) -> Response:
    """One weight, step by step."""
    found = await here.workers.run(lambda: reading.arithmetic(session, kind, layer, head, row, col, here.limits))
    return answers.document(request, found, here.limits)


@router.get("/looks/{look_id}/patterns")
async def patterns(here: Here, session: Kept, request: Request, kind: Kind) -> Response:
    """What each head tends to do, as numbers for every layer and head."""
    from ..lens.patterns import patterns as measure

    def work() -> Any:
        reading.maps(session, kind, 0)
        return session.once(("patterns", kind), lambda: measure(session.look, kind))

    return answers.document(request, await here.workers.read(work), here.limits)


# ---- what the model would say


@router.get("/looks/{look_id}/next")
async def next_tokens(
    here: Here,
    session: Kept,
    request: Request,
    position: Annotated[int, Query(gt=-(2**31), lt=2**31)] = -1,
    temperature: Annotated[float | None, Query(gt=0, le=100, allow_inf_nan=False)] = None,
    top_k: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    top_p: Annotated[float | None, Query(gt=0, le=1, allow_inf_nan=False)] = None,
    k: Annotated[int, Query(ge=1, le=200)] = 10,
) -> Response:
    """The likeliest tokens after a position."""
    found = await here.workers.run(lambda: session.look.next(position, k, temperature, top_k, top_p))
    return answers.document(request, found, here.limits)


@router.get("/looks/{look_id}/logit-lens")
async def logit_lens(
    here: Here, session: Kept, request: Request, position: Annotated[int, Query(gt=-(2**31), lt=2**31)] = -1
) -> Response:
    """What each layer would say if it were the last."""
    from ..lens.logit_lens import logit_lens as measure

    def work() -> Any:
        with session.under():
            return measure(session.look, position)

    return answers.document(request, await here.workers.run(work), here.limits)


@router.get("/looks/{look_id}/beams")
async def beams(here: Here, session: Kept, request: Request) -> Response:
    """The texts a beam search followed, as a tree."""

    def work() -> Any:
        made = session.search
        if made is None:
            raise Refused(422, "this look was not written by a beam search; generate with beam=2 or more")
        return session.once("beams", lambda: tree(session, made))

    return answers.document(request, await here.workers.run(work), here.limits)


# ---- files


@router.get("/looks/{look_id}/image", **_sends("image/png"))
async def image(here: Here, session: Kept, request: Request) -> Response:
    """The part of the picture that the model was shown."""
    found = session.look.image
    if found is None:
        raise Refused(404, "this look is at a text: it has no image")
    content = await here.workers.read(lambda: session.once("image", lambda: as_png(found, here.limits)))
    return answers.sized(Response(content, media_type="image/png", headers=answers.lasting(request)), here.limits)


@router.get("/looks/{look_id}/csv", **_sends("text/csv"))
async def csv(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind,
    layer: Number,
    head: Head = "mean",
    r0: Number = 0,
    r1: Number | None = None,
    c0: Number = 0,
    c1: Number | None = None,
) -> Response:
    """Weights as a table; without limits as much of it as is sent at once."""

    def work() -> str:
        n_rows, n_cols = reading.maps(session, kind, layer, head).shape[2:]
        rows = r0, min(n_rows, r0 + here.limits.tile) if r1 is None else r1
        cols = c0, min(n_cols, c0 + here.limits.tile) if c1 is None else c1
        return reading.as_csv(session, kind, layer, head, rows, cols, here.limits)

    name = f"regard-{kind}-{layer}-{head}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', **answers.lasting(request)}
    content = (await here.workers.read(work)).encode("utf-8-sig")  # a spreadsheet takes it for Latin-1 otherwise
    return answers.sized(Response(content, media_type="text/csv; charset=utf-8", headers=headers), here.limits)


@router.get("/looks/{look_id}/html", **_sends("text/html"))
async def html(
    here: Here,
    session: Kept,
    request: Request,
    kind: Kind | None = None,
    layer: Number | None = None,
    head: Head = "mean",
    view: Annotated[str | None, Query(pattern="^[a-z]{1,20}$")] = None,
    language: Literal["en", "ko"] | None = None,
    theme: Literal["light", "dark"] | None = None,
) -> Response:
    """The look as one page that needs no server."""
    from ..lens.page import document

    chosen: dict[str, Any] = {"kind": kind, "layer": layer, "view": view, "language": language, "theme": theme}
    chosen = {name: value for name, value in chosen.items() if value is not None}

    def work() -> bytes:
        one = None if head == reading.MEAN else int(head)
        return document(session.look, head=one, limit=here.limits.response_bytes, **chosen).encode()

    headers = {"Content-Disposition": 'attachment; filename="look.html"', **answers.lasting(request)}
    content = await here.workers.read(work)
    return answers.sized(Response(content, media_type="text/html; charset=utf-8", headers=headers), here.limits)
