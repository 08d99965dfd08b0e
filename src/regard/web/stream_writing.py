"""Streams a generated text token by token, each with its cross-attention, and finally the look at the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..generation.generate import stream_tokens
from ..generation.prompts import image_pixels
from ..generation.stop_conditions import Decode, decode_after, text_pieces
from ..generation.text_codec import ModelTokenizers
from ..lens.capture import attention_modules, n_heads_of, record_attention
from ..lens.labels import Label, token_labels
from .look_queries import label_document, look_document
from .requests import Limits, LookRequest, RequestRefused, StreamRequest, WatchRequest
from .served_models import (
    ServedModel,
    change_model,
    check_inputs,
    decode_image,
    planned_bytes,
    search_fields,
    shrink_image,
)
from .sessions import LookSession, SessionStore


def stream_text(
    served: ServedModel, body: StreamRequest, sessions: SessionStore, limits: Limits
) -> Iterator[dict[str, Any]]:
    """Yield {"token", "text"} for each token, then {"look": id} with the look's description.

    If a layer is watched, the labels of the "source" come first, and each token, including the end token, has its
    "label" and the "weights" of its cross-attention. The request is checked before the first token.
    """
    if not served.can_generate:
        raise RequestRefused(422, f"model {served.id!r} does not generate text")
    if body.generate.beam > 1:
        raise RequestRefused(422, f"beam={body.generate.beam} cannot be streamed: a stream needs beam=1")
    request = LookRequest(model=body.model, text=body.text, image=body.image, generate=body.generate)
    check_inputs(served, request, limits)
    watch = None if body.watch is None else CrossAttentionWatch(served, body.watch, limits)
    sessions.evict_for(planned_bytes(served, request, search_fields(body.generate), limits))
    return _stream(served, body, watch, sessions, limits)


class CrossAttentionWatch:
    """The cross-attention of one layer, recorded one decode step at a time."""

    def __init__(self, served: ServedModel, watch: WatchRequest, limits: Limits) -> None:
        self._max_cols, self._weights_left = limits.tile, limits.response_bytes // 12  # characters per weight
        modules = attention_modules(served.model).get("cross", [])
        if not modules:
            raise RequestRefused(422, f"model {served.id!r} has no cross-attention to watch")
        sizes = {"layer": (watch.layer, len(modules)), "head": (watch.head or 0, n_heads_of(modules[0]))}
        for name, (index, total) in sizes.items():
            if index >= total:
                raise RequestRefused(422, f"watch.{name}={index}: cross attention has {total} {name}s, 0 … {total - 1}")
        self._module, self._head = nn.ModuleList([modules[watch.layer]]), watch.head
        # Layers may share one module; then a decode step records it once per layer.
        self._call = sum(module is modules[watch.layer] for module in modules[: watch.layer])
        self._labels = GrowingLabels(served)
        self.new_tokens: list[int] = []
        self.rows: list[Tensor] = []

    def tokens(self, start: Callable[[], Iterator[int]]) -> Iterator[int]:
        """Yield the tokens of the iterator that ``start`` returns, and append their attention rows to ``rows``."""
        tokens: Iterator[int] | None = None
        while True:
            with record_attention(self._module, 1) as recorder:
                tokens = start() if tokens is None else tokens
                token = next(tokens, None)
            if token is None:
                return
            heads = recorder.map("0", self._call).tile()[0, :, -1]  # (H, S)
            self.new_tokens.append(token)
            self.rows.append(heads.mean(0) if self._head is None else heads[self._head])
            yield token

    def line(self, n: int) -> dict[str, Any]:
        """The label of a token, and its row of weights as long as the response has room for it."""
        label = self._labels.update(self.new_tokens)[n]
        row = self.rows[n][: self._max_cols].tolist()
        self._weights_left -= len(row)
        weights = {"weights": [round(weight, 7) for weight in row]} if self._weights_left >= 0 else {}
        return {"label": label_document(label), **weights}


class GrowingLabels:
    """Labels of a growing text. Only those of its last character can still change; the others are kept.

    Each update starts reading at the last whole character, because a tokenizer decodes the first token of a text
    differently. Only ``text`` and ``special`` of the labels are valid: positions count from where reading started.
    """

    def __init__(self, served: ServedModel) -> None:
        self._tokenizer, self._config = served.target_tokenizer, served.config
        self._labels: list[Label] = []
        self._start = self._n_known = 0  # first token to read, and number of tokens from there with known labels

    def update(self, tokens: Sequence[int]) -> list[Label]:
        """The labels of all ``tokens``: those of the last call, followed by any new ones."""
        if len(tokens) > len(self._labels):
            labels = token_labels(tokens[self._start :], self._tokenizer, self._config)
            self._labels[self._start + self._n_known :] = labels[self._n_known :]
            # The next update starts at the last whole character that has text.
            before = [label for label in labels[: labels[-1].whole[0]] if label.end > label.start]
            if before:
                first, last = before[-1].whole
                self._start, self._n_known = self._start + first, last - first
        return self._labels


def _stream(
    served: ServedModel, body: StreamRequest, watch: CrossAttentionWatch | None, sessions: SessionStore, limits: Limits
) -> Iterator[dict[str, Any]]:
    from ..lens import look

    model, tokenizers = served.model, ModelTokenizers(served.model)
    changes = partial(change_model, served, body.variant)
    image = decode_image(body.image, limits) if served.config.source == "image" else None
    rows = None if image is not None else tokenizers.encode_inputs(body.text)[0]
    continues = tokenizers.continues_prompt and rows is not None
    decode = decode_after(tokenizers.decode, rows or []) if continues else tokenizers.decode

    def start() -> Iterator[int]:
        return stream_tokens(model, image_pixels(model, image) if rows is None else rows, **body.generate.fields())

    new: list[int] = []
    if watch is not None and rows is not None:
        labels = token_labels(rows, tokenizers.source, served.config)
        yield {"source": [label_document(label) for label in labels[: limits.tile]]}
    with changes():
        tokens = start() if watch is None else watch.tokens(start)
        for token, text in _tokens_with_text(tokens, served.config.eos_id, decode):
            new += [] if token is None else [token]
            line = {"token": token, "text": text}
            yield line if watch is None or token is None else line | watch.line(len(new) - 1)
        if watch is not None and len(watch.new_tokens) > len(new):  # the end token
            yield {"token": watch.new_tokens[-1], "text": "", **watch.line(-1)}
        if tokenizers.continues_prompt:
            new_look = look(model, [*(rows or ()), *new])
        else:  # an empty target is shown by its start token
            new_look = look(model, image if rows is None else body.text, new or [served.config.bos_id])
    session = sessions.add(LookSession(shrink_image(new_look), served, changes))
    yield {"look": session.id, **look_document(session)}


def _tokens_with_text(tokens: Iterator[int], eos_id: int | None, decode: Decode) -> Iterator[tuple[int | None, str]]:
    """Yield each token with the text that it completes, empty if a character needs more tokens."""
    pending: list[int] = []

    def content() -> Iterator[int]:
        for token in tokens:
            if token == eos_id:
                return
            pending.append(token)
            yield token

    for piece in text_pieces(content(), decode):
        yield from ((token, "") for token in pending[:-1])
        yield pending[-1] if pending else None, piece
        pending.clear()
    yield from ((token, "") for token in pending)
