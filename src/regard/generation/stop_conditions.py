"""What ends a text: the end token, a stop sequence of tokens, a stop string, or the limit of new tokens.

Stop strings are found across token boundaries. A token may be part of a character, such as one of the three bytes of a
Hangul syllable: an incomplete character decodes to U+FFFD at the end of the text and is held back until it is complete.
The same holds for a syllable spelled in jamo, which the next letter may extend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from .generation_config import GenerateConfig

Finish = Literal["end", "stop", "length"]
GOING_ON, LENGTH = -1, 0
END, TEXT, STOP = 1, 2, 3  # the end token; a stop string; stop sequence number n has the code STOP + n

Decode = Callable[[list[int]], str]  # from token ids to text
Span = TypeVar("Span", str, tuple[int, ...])

# The end of a text that may still change: replaced bytes, or leading, middle and final jamo of one syllable.
_INCOMPLETE = re.compile(
    "(?:\ufffd+|[\u1100-\u115f\ua960-\ua97c]+[\u1160-\u11a7\ud7b0-\ud7c6]*[\u11a8-\u11ff\ud7cb-\ud7fb]*)\\Z"
)
_N_CONTEXT = 5  # tokens before a text that may affect how its beginning is decoded


class StopStrings:
    """Ends a text at the token that completes one of ``strings``, from new token number ``n_least`` on."""

    def __init__(self, strings: Sequence[str], decode: Decode, n_least: int = 0) -> None:
        self.strings, self.decode, self.n_least = tuple(strings), decode, n_least
        self._last_letters = {string[-1] for string in strings} | {"\ufffd"}
        self._may_end: dict[int, bool] = {}

    def matches(self, tokens: Tensor, texts: Tensor, n_new: int) -> Tensor:
        """Which of ``tokens`` (R,) complete a string after ``texts`` (R, L), whose last n_new - 1 tokens are new."""
        matches = [False] * len(tokens)
        n_prompt = texts.shape[1] - (n_new - 1)
        for row, token in enumerate(tokens.tolist()):
            if n_new >= self.n_least and self._can_end(token):
                ids = texts[row].tolist()
                decode = decode_after(self.decode, [index for index in ids[:n_prompt] if index >= 0])
                matches[row] = contains_stop([*ids[n_prompt:], token], decode, self.strings, self.n_least)
        return torch.tensor(matches, device=tokens.device)

    def _can_end(self, token: int) -> bool:
        """Whether this token may contain the last letter of a stop string; only then is the whole text decoded.

        The token is decoded after itself, so that it keeps its leading space; U+FFFD may be the end of any letter.
        """
        if token not in self._may_end:
            self._may_end[token] = not self._last_letters.isdisjoint(self.decode([token, token]))
        return self._may_end[token]


def stop_codes(
    tokens: Tensor,
    texts: Tensor,
    n_new: int | Tensor,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None,
) -> Tensor:
    """Codes (R,) for tokens (R,) after ``texts`` (R, L): GOING_ON, END, TEXT, or STOP + the number of the sequence.

    ``n_new`` counts the new tokens, including this one: a stop sequence must lie entirely among them. It may be a
    tensor if there are neither sequences nor strings.
    """
    codes = torch.full_like(tokens, GOING_ON)
    if not isinstance(n_new, Tensor) and n_new >= config.min_new_tokens:
        for number, stop in sorted(enumerate(config.stop), key=lambda item: len(item[1])):  # the longest match wins
            before = torch.tensor(stop[:-1], dtype=tokens.dtype, device=tokens.device)
            if n_new >= len(stop):
                matches = (tokens == stop[-1]) & (texts[:, texts.shape[1] - len(before) :] == before).all(-1)
                codes = torch.where(matches, STOP + number, codes)
    if strings is not None and not isinstance(n_new, Tensor):
        codes = torch.where(strings.matches(tokens, texts, n_new), TEXT, codes)
    return codes if eos_id is None else torch.where(tokens == eos_id, END, codes)


def finish_reason(code: int, config: GenerateConfig) -> tuple[Finish, int]:
    """The reason in words, and how many of the last tokens are the end token or the stop sequence."""
    if code == LENGTH:
        return "length", 0
    if code == TEXT:
        return "stop", 0  # the string may begin in the middle of a token
    return ("end", 1) if code == END else ("stop", len(config.stop[code - STOP]))


def first_stop_token(config: GenerateConfig) -> int:
    """The number of the first new token that may complete a stop string: after the prefix and the minimum length."""
    return max(config.min_new_tokens, len(config.prefix) + 1)


class TextPieces:
    """Text decoded incrementally from a stream of tokens, in whole characters, up to the first complete stop string.

    Of several stop strings that end at the same letter the longest counts, wherever the token boundaries are. A stop
    string that is complete before token number ``n_least`` is ordinary text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), n_least: int = 0) -> None:
        self._characters, self._stop, self._n_least = WholeCharacters(decode), stop, n_least
        self.pending = ""  # text that may be the beginning of a stop string
        self.ended = False

    def push(self, *tokens: int) -> str:
        """Add tokens; returns the text that no later token can change."""
        if self._stop:  # which token completes a stop string matters
            return "".join(self._add(self._characters.push(token)) for token in tokens)
        return self._add(self._characters.push(*tokens))

    def finish(self) -> str:
        """The text held back so far, when no token follows."""
        ready = self._add(self._characters.finish())
        pending, self.pending = self.pending, ""
        return ready if self.ended else ready + pending

    def _add(self, piece: str) -> str:
        if self.ended or not piece:
            return ""
        n_before, stop = len(self.pending), self._stop
        pending = self.pending + piece
        n_tokens = len(self._characters.ids)
        starts = [(pending.find(s, max(0, n_before - len(s) + 1)), s) for s in stop if n_tokens >= self._n_least]
        matches = [(start + len(s), start) for start, s in starts if start >= 0]  # (end, start), ending in this piece
        ready = min(matches)[1] if matches else stop_prefix_start(pending, stop)
        self.ended, self.pending = bool(matches), pending[ready:]
        return pending[:ready]


def text_pieces(tokens: Iterable[int], decode: Decode, stop: Sequence[str] = (), n_least: int = 0) -> Iterator[str]:
    """The text of ``tokens`` in pieces, as returned by ``TextPieces``."""
    pieces = TextPieces(decode, stop, n_least)
    for token in tokens:
        if piece := pieces.push(token):
            yield piece
        if pieces.ended:
            return
    if piece := pieces.finish():
        yield piece


def contains_stop(tokens: Sequence[int], decode: Decode, stop: Sequence[str], n_least: int = 0) -> bool:
    """Whether the text of ``tokens`` contains a stop string that is complete at token number ``n_least`` or later."""
    text = decode(list(tokens))
    if not any(string in text for string in stop):
        return False
    whole, until_stop = ("".join(text_pieces(tokens, decode, strings, n_least)) for strings in ((), stop))
    return until_stop != whole


def decode_after(decode: Decode, before: Sequence[int]) -> Decode:
    """A function that decodes tokens as they follow ``before``, so that a word after a word keeps its space."""
    context = list(before[-_N_CONTEXT:])
    n_context = len(decode(context)) if context else 0
    return (lambda ids: decode([*context, *ids])[n_context:]) if n_context else decode


def stop_prefix_start(pending: Span, stops: Sequence[Span]) -> int:
    """The index from which ``pending`` may be the beginning of a stop and must be held back."""
    length = len(pending)
    if not stops:  # the usual case, asked for every piece of a stream
        return length
    return next((i for i in range(length) if any(s[: length - i] == pending[i:] for s in stops)), length)


class WholeCharacters:
    """Text decoded incrementally from a stream of tokens, in whole characters.

    Each step decodes only the last tokens of the last piece and the new ones. The former are needed as context because
    a tokenizer drops the space at the beginning of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self.ids: list[int] = []
        self._decode = decode
        self._start = 0  # ids before it are not decoded again
        self._n_emitted = 0  # ids before it have been emitted
        self._emitted = ""  # the emitted text of ids[start:]

    def push(self, *tokens: int) -> str:
        self.ids += tokens
        text = self._decode(self.ids[self._start :])
        ready = _INCOMPLETE.sub("", text)
        if len(ready) <= len(self._emitted):
            return ""
        piece, self._emitted = ready[len(self._emitted) :], ready
        if ready == text:  # nothing is held back
            self._start, self._n_emitted = max(self._n_emitted, len(self.ids) - _N_CONTEXT), len(self.ids)
            self._emitted = self._decode(self.ids[self._start :])
        return piece

    def finish(self) -> str:
        """The text held back so far: characters that remain incomplete."""
        return self._decode(self.ids[self._start :])[len(self._emitted) :]
