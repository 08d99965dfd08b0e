"""The HTTP interface: each route reads its question, asks the room that knows, and sends bytes or JSON.

Weights go out as float32, everything else as JSON; an error is {"error": "one sentence"} with a status of 4xx.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse

from . import answers, reading
from .asking import Asked, At, Cells, Explorer, Head, Here, Kind, Number, Position, Specials, Words
from .beams import tree
from .bodies import LookBody, Problem, StreamBody
from .limits import Refused
from .opening import open_look
from .pictures import as_png
from .reading import MEAN, Place
from .served import by_id
from .writing import write

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
async def old_look(asked: Asked, words: Words = False, specials: Specials = True) -> Response:
    """What a look is about, and how many rows and columns it has when sub-words are joined or special tokens hidden."""
    return await asked.read(lambda: reading.document(asked.session, words, specials))


@router.post("/stream", **_sends("application/x-ndjson"))
async def stream(here: Here, body: StreamBody) -> Response:
    """A text as it is written: a line of JSON for each token, and a last one with the look at it."""
    served = by_id(here.models, body.model)
    pieces = here.workers.stream(lambda: write(served, body, here.sessions, here.limits))
    first = await anext(pieces, None)  # what is wrong with the question is said before anything is sent
    return StreamingResponse(
        _lines(first, pieces), media_type="application/x-ndjson", headers={"Cache-Control": "no-store"}
    )


async def _lines(first: dict[str, Any] | None, rest: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[bytes]:
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
    asked: Asked,
    kind: Kind,
    axis: Literal["rows", "cols"],
    start: Number = 0,
    stop: Number | None = None,
    words: Words = False,
    specials: Specials = True,
) -> Response:
    """The names of rows or columns, a page at a time."""
    at = Place(kind, 0, None, words, specials)
    return await asked.read(lambda: reading.labels(asked.session, at, axis, start, stop, asked.limits))


@router.get("/looks/{look_id}/tile", **_BYTES)
async def tile(asked: Asked, at: At, r0: Number, r1: Number, c0: Number, c1: Number) -> Response:
    """Exact weights of some rows and columns, at most 256 × 256."""
    return await asked.floats(lambda: reading.tile(asked.session, at, (r0, r1), (c0, c1), asked.limits))


@router.get("/looks/{look_id}/pooled", **_BYTES)
async def pooled(asked: Asked, at: At, h: Cells, w: Cells, reduce: Literal["mean", "max"] = "mean") -> Response:
    """The whole matrix in h × w cells, or as many as it has, or as fit into 1,000,000 bytes (500 × 500 where 512 × 512
    are asked for); X-Shape says how many."""
    return await asked.floats(lambda: reading.pooled(asked.session, at, h, w, reduce, asked.limits))


@router.get("/looks/{look_id}/thumbnails", **_BYTES)
async def thumbnails(
    asked: Asked, kind: Kind, layer: Number, size: Cells = 32, words: Words = False, specials: Specials = True
) -> Response:
    """Every head of a layer, small; X-Shape says in how many cells, no more than fit into 1,000,000 bytes."""
    at = Place(kind, layer, None, words, specials)
    return await asked.floats(lambda: reading.thumbnails(asked.session, at, size, asked.limits))


@router.get("/looks/{look_id}/top")
async def top(asked: Asked, at: At, row: Number, k: Annotated[int, Query(ge=1, le=256)] = 5) -> Response:
    """Where a row looks most, best first."""
    return await asked.read(lambda: reading.top(asked.session, at, row, k))


@router.get("/looks/{look_id}/walk")
async def walk(asked: Asked, kind: Kind, layer: Number, head: Number, row: Number, col: Number) -> Response:
    """One weight, step by step."""
    at = Place(kind, layer, head)
    return await asked.run(lambda: reading.arithmetic(asked.session, at, row, col, asked.limits))


@router.get("/looks/{look_id}/patterns")
async def patterns(asked: Asked, kind: Kind) -> Response:
    """What each head tends to do, as numbers for every layer and head, and what it is called after."""
    from ..lens.patterns import patterns as measure

    def work() -> Any:
        reading.view(asked.session, Place(kind, 0))
        return asked.session.once(("patterns", kind), lambda: measure(asked.session.look, kind).document())

    return await asked.read(work)


# ---- what the model would say


@router.get("/looks/{look_id}/next")
async def next_tokens(
    asked: Asked,
    position: Position = -1,
    temperature: Annotated[float | None, Query(gt=0, le=100, allow_inf_nan=False)] = None,
    top_k: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    top_p: Annotated[float | None, Query(gt=0, le=1, allow_inf_nan=False)] = None,
    k: Annotated[int, Query(ge=1, le=200)] = 10,
) -> Response:
    """The likeliest tokens after a position."""
    return await asked.run(lambda: asked.session.look.next(position, k, temperature, top_k, top_p))


@router.get("/looks/{look_id}/logit-lens")
async def logit_lens(asked: Asked, position: Position = -1) -> Response:
    """What each layer would say if it were the last."""
    from ..lens.logit_lens import logit_lens as measure

    def work() -> Any:
        with asked.session.under():
            return measure(asked.session.look, position)

    return await asked.run(work)


@router.get("/looks/{look_id}/beams")
async def beams(asked: Asked) -> Response:
    """All texts a beam search followed, as a tree: those it ended with, and those it gave up on the way."""
    return await asked.read(lambda: asked.session.once("beams", lambda: tree(asked.session, asked.limits)))


# ---- files


@router.get("/looks/{look_id}/image", **_sends("image/png"))
async def image(asked: Asked) -> Response:
    """The part of the picture that the model was shown."""
    found = asked.session.look.image
    if found is None:
        raise Refused(404, "this look is at a text: it has no image")
    return await asked.file(lambda: asked.session.once("image", lambda: as_png(found, asked.limits)), "image/png")


@router.get("/looks/{look_id}/csv", **_sends("text/csv"))
async def csv(
    asked: Asked, at: At, r0: Number = 0, r1: Number | None = None, c0: Number = 0, c1: Number | None = None
) -> Response:
    """Weights as a table; without limits as much of it as is sent at once."""

    def work() -> bytes:
        table = reading.as_csv(asked.session, at, (r0, r1), (c0, c1), asked.limits)
        return table.encode("utf-8-sig")  # a spreadsheet takes it for Latin-1 otherwise

    head = MEAN if at.head is None else at.head
    return await asked.file(work, "text/csv; charset=utf-8", f"regard-{at.kind}-{at.layer}-{head}.csv")


@router.get("/looks/{look_id}/html", **_sends("text/html"))
async def html(
    asked: Asked,
    kind: Kind | None = None,
    layer: Number | None = None,
    head: Head = MEAN,
    view: Annotated[str | None, Query(pattern="^[a-z]{1,20}$")] = None,
    language: Literal["en", "ko"] | None = None,
    theme: Literal["light", "dark"] | None = None,
    words: Words = False,
    specials: Specials = True,
) -> Response:
    """The look as one page that needs no server."""
    from ..lens.page import document

    chosen: dict[str, Any] = {"kind": kind, "layer": layer, "view": view, "language": language, "theme": theme}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    chosen |= {"head": None if head == MEAN else int(head), "words": words, "specials": specials}
    limit = asked.limits.response_bytes
    return await asked.file(
        lambda: document(asked.session.look, limit=limit, **chosen).encode(), "text/html; charset=utf-8", "look.html"
    )
