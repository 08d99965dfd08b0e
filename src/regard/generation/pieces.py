"""Text in pieces cut only at whole characters, and stop strings found across the borders of tokens.

A token may be a part of a character: one byte of three of a Hangul syllable. What is not whole yet decodes to U+FFFD at
the end of the text, and waits; so does a syllable spelled in jamo, which the next letter may still be a part of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

Decode = Callable[[list[int]], str]
"""From token ids to text, as a tokenizer does it."""

Span = TypeVar("Span", str, tuple[int, ...])

# What may still become another character: replaced bytes, or leading, middle and final jamo of one syllable.
_NOT_WHOLE = re.compile(
    "(?:\ufffd+|[\u1100-\u115f\ua960-\ua97c]+[\u1160-\u11a7\ud7b0-\ud7c6]*[\u11a8-\u11ff\ud7cb-\ud7fb]*)\\Z"
)
_N_CONTEXT = 5


def text_pieces(
    tokens: Iterable[int], decode: Decode, stop: Sequence[str] = (), n_least: int = 0
) -> Generator[str, None, bool]:
    """Pieces that joined are the text of ``tokens``, up to the stop string that is complete first.

    Of several that end at the same letter, the longest counts: where tokens are cut makes no difference. One that is
    complete before token number ``n_least`` is text like any other. Returns whether a stop string was found.
    """
    held = ""  # text that may be the beginning of a stop string
    for n_tokens, piece in _whole(tokens, decode):
        n_before = len(held)
        held += piece
        found = _ends(held, n_before, stop) if n_tokens >= n_least else []
        ready = min(found)[1] if found else waiting(held, stop)
        if ready:
            yield held[:ready]
        if found:
            return True
        held = held[ready:]
    if held:
        yield held
    return False


def stops(tokens: Sequence[int], decode: Decode, stop: Sequence[str], n_least: int = 0) -> bool:
    """Whether the text of ``tokens`` holds a stop string that counts."""
    if not any(string in decode(list(tokens)) for string in stop):
        return False
    pieces = text_pieces(tokens, decode, stop, n_least)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return bool(end.value)


def after(decode: Decode, before: Sequence[int]) -> Decode:
    """The decoder of what follows the tokens ``before``: a word after a word begins with its space."""
    context = list(before[-_N_CONTEXT:])
    n_told = len(decode(context)) if context else 0
    return (lambda ids: decode([*context, *ids])[n_told:]) if n_told else decode


def waiting(held: Span, stops: Sequence[Span]) -> int:
    """From where on ``held`` may be the beginning of a stop, and has to wait."""
    return next((i for i in range(len(held)) if any(s[: len(held) - i] == held[i:] for s in stops)), len(held))


def _ends(held: str, n_before: int, stop: Sequence[str]) -> list[tuple[int, int]]:
    """(end, start) of each stop string's first place that ends behind the first ``n_before`` letters."""
    starts = ((held.find(s, max(0, n_before - len(s) + 1)), s) for s in stop)
    return [(start + len(s), start) for start, s in starts if start >= 0]


def _whole(tokens: Iterable[int], decode: Decode) -> Iterator[tuple[int, str]]:
    """Text in whole characters, and after how many tokens. Only the last tokens are decoded again: those of the last
    piece, and what is new.

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
        yield len(ids), ready[len(before) :]
        before = ready
        if ready == text:  # nothing waits
            start, told = told, len(ids)
            before = decode(ids[start:])
    rest = decode(ids[start:])
    if len(rest) > len(before):
        yield len(ids), rest[len(before) :]
