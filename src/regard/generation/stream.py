"""Text as it is written: pieces cut only at whole characters, and stop strings found across the borders of tokens.

A token may be a part of a character: one byte of three of a Hangul syllable. What is not whole yet decodes to U+FFFD at
the end of the text, and waits; so does a syllable spelled in jamo, which the next letter may still be a part of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..models import Model
from .config import GenerateConfig
from .generate import config_of, stream_tokens
from .prompts import Rows

Decode = Callable[[list[int]], str]
"""From token ids to text, as a tokenizer does it."""

Span = TypeVar("Span", str, tuple[int, ...])

# What may still become another character: replaced bytes, or leading, middle and final jamo of one syllable.
_NOT_WHOLE = re.compile(
    "(?:\ufffd+|[\u1100-\u115f\ua960-\ua97c]+[\u1160-\u11a7\ud7b0-\ud7c6]*[\u11a8-\u11ff\ud7cb-\ud7fb]*)\\Z"
)


def stream(
    model: Model,
    inputs: Rows,
    decode: Decode,
    config: GenerateConfig | None = None,
    *,
    stop: Sequence[str] = (),
    target: Rows | None = None,
    **fields: Any,
) -> Iterator[str]:
    """The text of one prompt or source, piece by piece, without end token and stop strings.

    ``stop`` are strings here; token sequences that end a text are ``config.stop``. Fields as in ``generate``.
    """
    if isinstance(stop, str) or any(not s for s in stop):
        raise ValueError(f"stop={stop!r} must be a list of strings, none of them empty")
    config = config_of(config, fields)
    tokens = stream_tokens(model, inputs, config, target=target)
    return text_pieces(_content(tokens, model.config.eos_id, config), decode, stop)


def text_pieces(tokens: Iterable[int], decode: Decode, stop: Sequence[str] = ()) -> Iterator[str]:
    """Pieces that joined are the text of ``tokens``, up to the stop string that is complete first.

    Of several that end at the same letter, the longest counts: where tokens are cut makes no difference.
    """
    held = ""  # text that may be the beginning of a stop string
    for piece in _whole(tokens, decode):
        held += piece
        found = [(held.find(s) + len(s), held.find(s)) for s in stop if s in held]
        ready = min(found)[1] if found else _waiting(held, stop)
        if ready:
            yield held[:ready]
        if found:
            return
        held = held[ready:]
    if held:
        yield held


def _whole(tokens: Iterable[int], decode: Decode) -> Iterator[str]:
    """Text in whole characters. Only the last tokens are decoded again: those of the last piece, and what is new.

    The last piece is decoded with what follows because text may depend on what stands before it: a tokenizer drops the
    space at the beginning of a text.
    """
    ids: list[int] = []
    start = told = 0  # ids before ``start`` are out of sight, those before ``told`` have been shown
    before = ""  # what has been shown of ids[start:]
    for token in tokens:
        ids.append(token)
        text = decode(ids[start:])
        ready = _NOT_WHOLE.sub("", text)
        if len(ready) <= len(before):
            continue
        yield ready[len(before) :]
        before = ready
        if ready == text:  # nothing waits
            start, told = told, len(ids)
            before = decode(ids[start:])
    rest = decode(ids[start:])
    if len(rest) > len(before):
        yield rest[len(before) :]


def _waiting(held: Span, stops: Sequence[Span]) -> int:
    """From where on ``held`` may be the beginning of a stop, and has to wait."""
    return next((i for i in range(len(held)) if any(s[: len(held) - i] == held[i:] for s in stops)), len(held))


def _content(tokens: Iterable[int], eos_id: int | None, config: GenerateConfig) -> Iterator[int]:
    """The tokens without those that end the text: the end token, or a stop sequence, which then comes last."""
    held: tuple[int, ...] = ()
    for token in tokens:
        if token == eos_id:
            yield from held
            return
        held = (*held, token)
        ready = _waiting(held, config.stop)
        yield from held[:ready]
        held = held[ready:]
    ends = [len(stop) for stop in config.stop if held[-len(stop) :] == stop]
    yield from held[: len(held) - max(ends, default=0)]
