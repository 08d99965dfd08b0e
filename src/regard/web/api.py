"""The explorer's HTTP API: each route runs a query in a worker thread and sends float32 bytes or JSON.

An error is {"error": "one sentence"} with a 4xx status. A look never changes and its id is never reused, so responses
about it carry an ETag and may be cached by the browser.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from torch import Tensor

from ..errors import RegardError
from ..foundation.jsonio import to_jsonable
from . import look_queries
from .arithmetic import explain_weight
from .circuit_queries import (
    PatchedPair,
    PatchQuery,
    checkpoint_history,
    contributions,
    explain_score,
    head_effects,
    text_fit,
)
from .look_queries import MEAN, HeadView, beam_tree, encode_png
from .requests import INTERNAL_ERROR, ErrorBody, Limits, LookRequest, RequestRefused, StreamRequest
from .served_models import ServedModel, find_model, open_look
from .sessions import LookSession, SessionStore, WorkerPools
from .story import tell_story
from .stream_writing import stream_text

BINARY = "application/octet-stream"

KindParam = Annotated[str, Query(max_length=40, examples=["self"])]
IndexParam = Annotated[int, Query(ge=0, lt=2**31)]
HeadParam = Annotated[str, Query(pattern=r"^(mean|[0-9]{1,6})$", examples=["0", "mean"])]
CellsParam = Annotated[int, Query(ge=1, le=512)]
PositionParam = Annotated[int, Query(gt=-(2**31), lt=2**31)]
WordsParam = Annotated[bool, Query(description="join sub-words into words: rows averaged, columns summed")]
SpecialsParam = Annotated[bool, Query(description="false hides special tokens; rows keep their sum")]


def _head_view(
    kind: KindParam,
    layer: IndexParam,
    head: HeadParam = MEAN,
    words: WordsParam = False,
    specials: SpecialsParam = True,
) -> HeadView:
    return HeadView(kind, layer, None if head == MEAN else int(head), words, specials)


HeadQuery = Annotated[HeadView, Depends(_head_view)]


@dataclass(eq=False)
class ExplorerState:
    """The models, looks and worker threads of one server."""

    models: list[ServedModel]
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.sessions, self.workers = SessionStore(self.limits), WorkerPools(self.limits)


def _state(request: Request) -> ExplorerState:
    state: ExplorerState = request.app.state.explorer
    return state


State = Annotated[ExplorerState, Depends(_state)]


class NotModified(Exception):
    """The browser already has this response."""


def etag(request: Request) -> str:
    """Identifies a response by its URL: the look's id and the query."""
    url = f"{request.url.path}?{request.url.query}"
    return f'"{hashlib.blake2s(url.encode(), digest_size=12).hexdigest()}"'


class LookQuery:
    """A request about one look; its methods run a query and build the response."""

    def __init__(self, state: ExplorerState, session: LookSession, request: Request) -> None:
        self.session, self.limits, self._workers = session, state.limits, state.workers
        self._headers = {"Cache-Control": "private, max-age=86400, immutable", "ETag": etag(request)}

    async def floats(self, work: Callable[[], Tensor]) -> Response:
        """A tensor read from a map, as little-endian float32 in row-major order; the X-Shape header has its shape."""
        values = await self._workers.read(work)
        content = np.ascontiguousarray(values.detach().cpu().float().numpy(), dtype="<f4").tobytes()
        headers = {"X-Shape": ",".join(str(n) for n in values.shape), **self._headers}
        return _check_size(Response(content, media_type=BINARY, headers=headers), self.limits)

    async def read(self, work: Callable[[], Any]) -> Response:
        """JSON of work that only reads maps."""
        return _json_response(await self._workers.read(work), self._headers, self.limits)

    async def run(self, work: Callable[[], Any]) -> Response:
        """JSON of work that runs the model."""
        return _json_response(await self._workers.run(work), self._headers, self.limits)

    async def file(self, work: Callable[[], bytes], media_type: str, name: str | None = None) -> Response:
        """A file; the browser saves it under ``name``, if given."""
        attachment = {} if name is None else {"Content-Disposition": f'attachment; filename="{name}"'}
        content = await self._workers.read(work)
        return _check_size(Response(content, media_type=media_type, headers=attachment | self._headers), self.limits)


def _json_response(content: Any, headers: dict[str, str], limits: Limits) -> Response:
    return _check_size(JSONResponse(to_jsonable(content), headers=headers), limits)


def _check_size(response: Response, limits: Limits) -> Response:
    if (size := len(response.body)) > limits.response_bytes:
        most = f"more than the limit of {limits.response_bytes:,}"
        raise RequestRefused(413, f"the response has {size:,} bytes, {most}; request less")
    return response


def _look_query(request: Request, state: State, look_id: Annotated[str, Path(max_length=40)]) -> LookQuery:
    cached = request.headers.get("if-none-match", "")
    if etag(request) in {name.strip().removeprefix("W/") for name in cached.split(",")}:
        raise NotModified
    return LookQuery(state, state.sessions.get(look_id), request)


CurrentLook = Annotated[LookQuery, Depends(_look_query)]

router = APIRouter(prefix="/api", responses={"4XX": {"model": ErrorBody}})


def _media_type(name: str) -> dict[str, Any]:
    """Route options that declare a response other than JSON."""
    return {"response_class": Response, "responses": {200: {"content": {name: {"schema": {"type": "string"}}}}}}


@router.get("/models")
async def models(state: State) -> list[dict[str, Any]]:
    """List the served models."""
    return await state.workers.read(lambda: [served.to_dict() for served in state.models])


@router.post("/looks")
async def new_look(state: State, body: LookRequest) -> Response:
    """Run a model over a text or an image and keep the look."""
    served = find_model(state.models, body.model)
    document = await state.workers.run(
        lambda: look_queries.look_document(open_look(served, body, state.sessions, state.limits))
    )
    return _json_response(document, {"Cache-Control": "no-store"}, state.limits)


@router.get("/looks/{look_id}")
async def old_look(query: CurrentLook, words: WordsParam = False, specials: SpecialsParam = True) -> Response:
    """Describe a look, with its numbers of rows and columns after joining sub-words or hiding special tokens."""
    return await query.read(lambda: look_queries.look_document(query.session, words, specials))


@router.post("/stream", **_media_type("application/x-ndjson"))
async def stream(state: State, body: StreamRequest) -> Response:
    """Generate a text: a line of JSON for each token, then one with the look at the whole text."""
    served = find_model(state.models, body.model)
    lines = state.workers.stream(lambda: stream_text(served, body, state.sessions, state.limits))
    content = _json_lines(await anext(lines, None), lines)  # the first line is awaited: an error there is a status
    return StreamingResponse(content, media_type="application/x-ndjson", headers={"Cache-Control": "no-store"})


async def _json_lines(first: dict[str, Any] | None, rest: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[bytes]:
    def encode(content: dict[str, Any]) -> bytes:
        return json.dumps(to_jsonable(content), ensure_ascii=False).encode("utf-8", "replace") + b"\n"

    async with aclosing(rest):
        try:
            if first is not None:
                yield encode(first)
            async for line in rest:
                yield encode(line)
        except (RequestRefused, RegardError, ValueError, TypeError) as failure:
            yield encode({"error": str(failure)})
        except Exception as failure:  # the status has been sent: report the error in the last line
            yield encode({"error": INTERNAL_ERROR.format(type(failure).__name__)})
            raise


@router.get("/looks/{look_id}/labels")
async def labels(
    query: CurrentLook,
    kind: KindParam,
    axis: Literal["rows", "cols"],
    start: IndexParam = 0,
    stop: IndexParam | None = None,
    words: WordsParam = False,
    specials: SpecialsParam = True,
) -> Response:
    """Labels of rows or columns, a page at a time."""
    at = HeadView(kind, 0, None, words, specials)
    return await query.read(lambda: look_queries.labels(query.session, at, axis, start, stop, query.limits))


@router.get("/looks/{look_id}/tile", **_media_type(BINARY))
async def tile(
    query: CurrentLook, at: HeadQuery, r0: IndexParam, r1: IndexParam, c0: IndexParam, c1: IndexParam
) -> Response:
    """Exact weights of some rows and columns, at most 256 × 256."""
    return await query.floats(lambda: look_queries.tile(query.session, at, (r0, r1), (c0, c1), query.limits))


@router.get("/looks/{look_id}/pooled", **_media_type(BINARY))
async def pooled(
    query: CurrentLook, at: HeadQuery, h: CellsParam, w: CellsParam, reduce: Literal["mean", "max"] = "mean"
) -> Response:
    """The whole matrix pooled into at most h × w cells. It has fewer if the matrix is smaller, or if more would not fit
    into 1,000,000 bytes (500 × 500 instead of 512 × 512); X-Shape has the actual size."""
    return await query.floats(lambda: look_queries.pooled(query.session, at, h, w, reduce, query.limits))


@router.get("/looks/{look_id}/thumbnails", **_media_type(BINARY))
async def thumbnails(
    query: CurrentLook,
    kind: KindParam,
    layer: IndexParam,
    size: CellsParam = 32,
    words: WordsParam = False,
    specials: SpecialsParam = True,
) -> Response:
    """Every head of a layer, pooled; X-Shape has the actual size, limited so that all fit into 1,000,000 bytes."""
    at = HeadView(kind, layer, None, words, specials)
    return await query.floats(lambda: look_queries.thumbnails(query.session, at, size, query.limits))


@router.get("/looks/{look_id}/top")
async def top(
    query: CurrentLook, at: HeadQuery, row: IndexParam, k: Annotated[int, Query(ge=1, le=256)] = 5
) -> Response:
    """The largest weights of a row, in descending order."""
    return await query.read(lambda: look_queries.top(query.session, at, row, k))


@router.get("/looks/{look_id}/walk")
async def walk(
    query: CurrentLook, kind: KindParam, layer: IndexParam, row: IndexParam, col: IndexParam, head: HeadParam = MEAN
) -> Response:
    """The computation of one weight and its row, step by step; for the mean, of the head with the largest weight."""
    at = HeadView(kind, layer, None if head == MEAN else int(head))
    return await query.run(lambda: explain_weight(query.session, at, row, col, query.limits))


@router.get("/looks/{look_id}/story")
async def story(query: CurrentLook, kind: KindParam, layer: IndexParam, head: IndexParam, row: IndexParam) -> Response:
    """One token's path through a head and a layer, from its embedding to the prediction, with all numbers."""
    at = HeadView(kind, layer, head)
    return await query.run(lambda: tell_story(query.session, at, row))


@router.get("/looks/{look_id}/why")
async def why(
    query: CurrentLook,
    kind: KindParam,
    layer: IndexParam,
    head: HeadParam,
    row: IndexParam,
    col: IndexParam,
    k: Annotated[int, Query(ge=1, le=100)] = 12,
) -> Response:
    """The score behind one weight, split into pairs of writers: one wrote into the query, the other into the key."""
    at = HeadView(kind, layer, None if head == MEAN else int(head))
    return await query.run(lambda: explain_score(query.session, at, row, col, k, query.limits))


@router.get("/looks/{look_id}/contributions")
async def logit_contributions(
    query: CurrentLook, position: PositionParam = -1, token: IndexParam | None = None
) -> Response:
    """The contribution of every part of the model to the logit of a token after a position, or of a class."""
    return await query.run(lambda: contributions(query.session, position, token, query.limits))


OtherParam = Annotated[str, Query(max_length=40, description="the id of the look at the corrupted text")]


def _patch_query(
    kind: KindParam, over: Literal["residual", "attention", "ff", "heads"] = "residual", position: PositionParam = -1
) -> PatchQuery:
    return PatchQuery(over, kind, position)


PatchParams = Annotated[PatchQuery, Depends(_patch_query)]


@router.get("/looks/{look_id}/patching")
async def patching(query: CurrentLook, state: State, patch: PatchParams, other: OtherParam) -> Response:
    """How much of this look's prediction each activation restores when it is patched into another look's run."""
    corrupted = state.sessions.get(other)
    return await query.run(lambda: PatchedPair(query.session, corrupted, patch).effects(query.limits))


@router.get("/looks/{look_id}/patched")
async def patched(
    query: CurrentLook, state: State, patch: PatchParams, other: OtherParam, layer: IndexParam, unit: IndexParam
) -> Response:
    """The predictions under a single patch: of a layer at one token, or of one of its heads (``unit``)."""
    corrupted = state.sessions.get(other)
    return await query.run(lambda: PatchedPair(query.session, corrupted, patch).predict_patched(layer, unit))


@router.get("/looks/{look_id}/patterns")
async def patterns(query: CurrentLook, kind: KindParam) -> Response:
    """Pattern scores of every layer and head, and the name of each head's strongest pattern."""

    def work() -> Any:
        look_queries.merged_view(query.session, HeadView(kind, 0))  # checks the kind
        return query.session.cache(("patterns", kind), lambda: query.session.look.patterns(kind=kind).to_dict())

    return await query.read(work)


@router.get("/looks/{look_id}/experts")
async def experts(query: CurrentLook, kind: KindParam, layer: IndexParam) -> Response:
    """The experts of each token in a layer, and how often each expert is chosen."""
    return await query.read(lambda: look_queries.routing_document(query.session, HeadView(kind, layer)))


@router.get("/looks/{look_id}/history")
async def history(query: CurrentLook, kind: KindParam) -> Response:
    """Pattern scores of every head at the checkpoints of the run, and the step at which each pattern appeared."""

    def work() -> Any:
        return query.session.cache(("history", kind), lambda: checkpoint_history(query.session, kind))

    return await query.run(work)


@router.get("/looks/{look_id}/next")
async def next_tokens(
    query: CurrentLook,
    position: PositionParam = -1,
    temperature: Annotated[float | None, Query(gt=0, le=100, allow_inf_nan=False)] = None,
    top_k: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    top_p: Annotated[float | None, Query(gt=0, le=1, allow_inf_nan=False)] = None,
    k: Annotated[int, Query(ge=1, le=200)] = 10,
) -> Response:
    """The likeliest tokens after a position."""
    look = query.session.look
    return await query.run(lambda: look.next(position, k, temperature=temperature, top_k=top_k, top_p=top_p))


@router.get("/looks/{look_id}/changes")
async def changes(query: CurrentLook, state: State, other: Annotated[str, Query(max_length=40)]) -> Response:
    """The distance, 0 … 1, between the predictions of this look and another one of the same text, at each position."""
    from ..lens.compare import compare_predictions

    before = state.sessions.get(other).look
    return await query.run(lambda: compare_predictions(before, query.session.look).tolist())


@router.get("/looks/{look_id}/fit")
async def fit(query: CurrentLook) -> Response:
    """How well the model predicts the text that it reads."""
    return await query.run(lambda: text_fit(query.session))


@router.get("/looks/{look_id}/heads")
async def heads(query: CurrentLook) -> Response:
    """The prediction with each head switched off in turn."""
    return await query.run(lambda: query.session.cache("heads", lambda: head_effects(query.session, query.limits)))


@router.get("/looks/{look_id}/logit-lens")
async def logit_lens(query: CurrentLook, position: PositionParam = -1) -> Response:
    """The prediction after each layer, as if it were the last one."""
    from ..lens import effects

    def work() -> Any:
        with query.session.model_changes():
            return effects.logit_lens(query.session.look, position)

    return await query.run(work)


@router.get("/looks/{look_id}/beams")
async def beams(query: CurrentLook) -> Response:
    """All hypotheses of a beam search as a tree: those it returned and those it dropped."""
    return await query.read(lambda: query.session.cache("beams", lambda: beam_tree(query.session, query.limits)))


@router.get("/looks/{look_id}/image", **_media_type("image/png"))
async def image(query: CurrentLook) -> Response:
    """The part of the image that the model read."""
    picture = query.session.look.image
    if picture is None:
        raise RequestRefused(404, "this look is of a text: it has no image")
    return await query.file(
        lambda: query.session.cache("image", lambda: encode_png(picture, query.limits)), "image/png"
    )


@router.get("/looks/{look_id}/csv", **_media_type("text/csv"))
async def csv(
    query: CurrentLook,
    at: HeadQuery,
    r0: IndexParam = 0,
    r1: IndexParam | None = None,
    c0: IndexParam = 0,
    c1: IndexParam | None = None,
) -> Response:
    """Weights as a CSV table; by default as many rows and columns as one response may have."""

    def work() -> bytes:
        table = look_queries.to_csv(query.session, at, (r0, r1), (c0, c1), query.limits)
        return table.encode("utf-8-sig")  # without a byte order mark, spreadsheets assume Latin-1

    head = MEAN if at.head is None else at.head
    return await query.file(work, "text/csv; charset=utf-8", f"regard-{at.kind}-{at.layer}-{head}.csv")


@router.get("/looks/{look_id}/html", **_media_type("text/html"))
async def html(
    query: CurrentLook,
    kind: KindParam | None = None,
    layer: IndexParam | None = None,
    head: HeadParam = MEAN,
    view: Annotated[str | None, Query(pattern="^[a-z]{1,20}$")] = None,
    language: Literal["en", "ko"] | None = None,
    theme: Literal["light", "dark"] | None = None,
    words: WordsParam = False,
    specials: SpecialsParam = True,
) -> Response:
    """The look as a self-contained page that needs no server."""
    from ..lens.render_html import page_html

    def work() -> bytes:
        return page_html(
            query.session.look,
            layer=-1 if layer is None else layer,
            head=None if head == MEAN else int(head),
            kind=kind,
            view=view,
            language=language,
            theme=theme,
            words=words,
            specials=specials,
            limit=query.limits.response_bytes,
        ).encode()

    return await query.file(work, "text/html; charset=utf-8", "look.html")
