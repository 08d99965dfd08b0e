"""A text as it is written, token by token, and at its end the look at all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..generation.generate import stream_tokens
from ..generation.pictures import pixels
from ..generation.pieces import Decode, after, text_pieces
from ..generation.words import Words
from .bodies import LookBody, StreamBody
from .limits import Limits, Refused
from .opening import changed, check_text, picture, planned_bytes, search_fields
from .reading import document
from .served import Served
from .sessions import Session, Sessions


def write(served: Served, body: StreamBody, sessions: Sessions, limits: Limits) -> Iterator[dict[str, Any]]:
    """{"token", "text"} for each token, then {"look": id} with what the page has to know of it.

    Everything is checked before the first token: an error comes instead of a text, not in the middle of one.
    """
    if not served.generates:
        raise Refused(422, f"model {served.id!r} writes no text")
    if body.generate.beam > 1:
        raise Refused(422, f"beam={body.generate.beam} has no text before all is done; a stream needs beam=1")
    asked = LookBody(model=body.model, text=body.text, image=body.image, generate=body.generate)
    check_text(served, asked, limits)
    sessions.make_room(planned_bytes(served, asked, search_fields(body.generate), limits))
    return _written(served, body, sessions, limits)


def _written(served: Served, body: StreamBody, sessions: Sessions, limits: Limits) -> Iterator[dict[str, Any]]:
    from ..lens import look

    model, words = served.model, Words(served.model)
    under = changed(served, body.variant)
    image = picture(body.image, limits) if served.config.source == "image" else None
    rows = None if image is not None else words.rows([body.text], "prompt" if words.goes_on else "source")[0]
    decode = after(words.decode, rows) if words.goes_on and rows is not None else words.decode
    new: list[int] = []
    with under():
        tokens = stream_tokens(model, pixels(model, image) if rows is None else rows, **body.generate.fields())
        for token, text in _told(tokens, served.config.eos_id, decode):
            new += [] if token is None else [token]
            yield {"token": token, "text": text}
        if words.goes_on:
            made = look(model, [*(rows or ()), *new])
        else:
            # Where nothing was written there still is the look at the source from which that was decided.
            made = look(model, image if rows is None else body.text, new or [served.config.bos_id])
    session = sessions.add(Session(made, served, under))
    yield {"look": session.id, **document(session)}


def _told(tokens: Iterator[int], eos_id: int | None, decode: Decode) -> Iterator[tuple[int | None, str]]:
    """Each token with the text that it completes, which is none where a character needs more tokens."""
    waiting: list[int] = []

    def content() -> Iterator[int]:
        for token in tokens:
            if token == eos_id:
                return
            waiting.append(token)
            yield token

    for piece in text_pieces(content(), decode):
        yield from ((token, "") for token in waiting[:-1])
        yield waiting[-1] if waiting else None, piece
        waiting.clear()
    yield from ((token, "") for token in waiting)
