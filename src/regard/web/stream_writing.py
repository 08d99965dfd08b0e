"""A text as it is written, token by token and with where the model looked, and at its end the look at all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..generation.generate import stream_tokens
from ..generation.prompts import image_pixels
from ..generation.stop_conditions import Decode, decode_after, text_pieces
from ..generation.text_codec import ModelTokenizers
from ..lens.capture import attention_modules, n_heads_of, record_attention
from ..lens.labels import Label, token_labels
from .look_queries import label_document, look_document
from .request_bodies import LookRequest, StreamRequest, WatchRequest
from .request_limits import Limits, RequestRefused
from .served_models import ServedModel, change_model, check_inputs, decode_image, planned_bytes, search_fields
from .sessions import LookSession, SessionStore


def stream_text(
    served: ServedModel, body: StreamRequest, sessions: SessionStore, limits: Limits
) -> Iterator[dict[str, Any]]:
    """{"token", "text"} for each token, then {"look": id} with what the page has to know of it.

    Where a layer is watched, the labels of the "source" come first, and each token has its "label" and the "weights"
    of its cross-attention; the end of the text too.
    Everything is checked before the first token: an error comes instead of a text, not in the middle of one.
    """
    if not served.generates:
        raise RequestRefused(422, f"model {served.id!r} writes no text")
    if body.generate.beam > 1:
        raise RequestRefused(422, f"beam={body.generate.beam} has no text before all is done; a stream needs beam=1")
    asked = LookRequest(model=body.model, text=body.text, image=body.image, generate=body.generate)
    check_inputs(served, asked, limits)
    watching = None if body.watch is None else CrossAttentionWatch(served, body.watch, limits)
    sessions.make_room(planned_bytes(served, asked, search_fields(body.generate), limits))
    return _stream(served, body, watching, sessions, limits)


class CrossAttentionWatch:
    """The cross-attention of one layer, row by row while the model decodes: its recorder is on for a step at a time."""

    def __init__(self, served: ServedModel, watch: WatchRequest, limits: Limits) -> None:
        self._n_cols, self._left = limits.tile, limits.response_bytes // 12  # digits of a weight
        modules = attention_modules(served.model).get("cross", [])
        if not modules:
            raise RequestRefused(422, f"model {served.id!r} has no cross-attention to watch")
        sizes = {"layer": (watch.layer, len(modules)), "head": (watch.head or 0, n_heads_of(modules[0]))}
        for name, (asked, have) in sizes.items():
            if asked >= have:
                raise RequestRefused(422, f"watch.{name}={asked}: cross attention has {have} {name}s, 0 … {have - 1}")
        self._module, self._head = nn.ModuleList([modules[watch.layer]]), watch.head
        self._call = sum(module is modules[watch.layer] for module in modules[: watch.layer])  # layers may share one
        self._labels = GrowingLabels(served)
        self.written: list[int] = []
        self.rows: list[Tensor] = []

    def tokens(self, start: Callable[[], Iterator[int]]) -> Iterator[int]:
        """The same tokens; for each there is a row."""
        tokens: Iterator[int] | None = None
        while True:
            with record_attention(self._module, 1) as seen:
                tokens = start() if tokens is None else tokens
                token = next(tokens, None)
            if token is None:
                return
            heads = seen.map("0", self._call).tile()[0, :, -1]  # (H, S)
            self.written.append(token)
            self.rows.append(heads.mean(0) if self._head is None else heads[self._head])
            yield token

    def line(self, n: int) -> dict[str, Any]:
        """A token as it is called in the look at the whole text, and where the model looked when it wrote it.

        As much of a row as a page shows, and as many rows as one answer may be long.
        """
        label = self._labels.of(self.written)[n]
        row = self.rows[n][: self._n_cols].tolist()
        self._left -= len(row)
        weights = {"weights": [round(weight, 7) for weight in row]} if self._left >= 0 else {}
        return {"label": label_document(label), **weights}


class GrowingLabels:
    """The labels of a text that grows, of which only the last character can still change: what is before is kept.

    One piece of it is read again, since a text begins otherwise than it goes on. Only ``text`` and ``special`` hold:
    places count from where reading began.
    """

    def __init__(self, served: ServedModel) -> None:
        self._tokenizer, self._config = served.writes_with, served.config
        self._kept: list[Label] = []
        self._start = self._n_known = 0  # where reading begins, and tokens there whose labels are known

    def of(self, tokens: Sequence[int]) -> list[Label]:
        """``tokens`` are those of the last time and any that came since."""
        if len(tokens) > len(self._kept):
            found = token_labels(tokens[self._start :], self._tokenizer, self._config)
            self._kept[self._start + self._n_known :] = found[self._n_known :]
            # Of these the last one has text, and is whole: after it nothing is at the beginning of a text.
            before = [label for label in found[: found[-1].whole[0]] if label.end > label.start]
            if before:
                first, last = before[-1].whole
                self._start, self._n_known = self._start + first, last - first
        return self._kept


def _stream(
    served: ServedModel,
    body: StreamRequest,
    watching: CrossAttentionWatch | None,
    sessions: SessionStore,
    limits: Limits,
) -> Iterator[dict[str, Any]]:
    from ..lens import look

    model, words = served.model, ModelTokenizers(served.model)
    under = change_model(served, body.variant)
    image = decode_image(body.image, limits) if served.config.source == "image" else None
    rows = None if image is not None else words.encode_inputs(body.text)[0]
    decode = decode_after(words.decode, rows) if words.continues_prompt and rows is not None else words.decode

    def start() -> Iterator[int]:
        return stream_tokens(model, image_pixels(model, image) if rows is None else rows, **body.generate.fields())

    new: list[int] = []
    if watching is not None and rows is not None:
        labels = token_labels(rows, words.source, served.config)
        yield {"source": [label_document(label) for label in labels[: limits.tile]]}
    with under():
        told = _tokens_with_text(start() if watching is None else watching.tokens(start), served.config.eos_id, decode)
        for token, text in told:
            new += [] if token is None else [token]
            line = {"token": token, "text": text}
            yield line if watching is None or token is None else line | watching.line(len(new) - 1)
        if watching is not None and len(watching.written) > len(new):  # where it looked when it chose to end
            yield {"token": watching.written[-1], "text": "", **watching.line(-1)}
        if words.continues_prompt:
            made = look(model, [*(rows or ()), *new])
        else:
            # Where nothing was written there still is the look at the source from which that was decided.
            made = look(model, image if rows is None else body.text, new or [served.config.bos_id])
    session = sessions.add(LookSession(made, served, under))
    yield {"look": session.id, **look_document(session)}


def _tokens_with_text(tokens: Iterator[int], eos_id: int | None, decode: Decode) -> Iterator[tuple[int | None, str]]:
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
