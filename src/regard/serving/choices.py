"""Collects the scheduler's events into the choices of a response: text in whole characters, log P, finish reasons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ..generation.beam_search import Hypothesis
from ..generation.prompt_reading import PromptReading
from ..generation.prompts import ModelInputs
from ..generation.sampling import LogProb
from ..generation.stop_conditions import Finish, TextPieces, first_stop_token
from .api_models import ApiModel
from .running_text import FailureEvent, SearchEvent, TextEvent, TextRequest, TokenEvent

_REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass
class TextChoice:
    """One text of a response while it is generated."""

    index: int
    reading: PromptReading
    pieces: TextPieces
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # without the end token
    end_token: list[int] = field(default_factory=list)
    log_probs: list[LogProb] = field(default_factory=list)  # of the tokens and of the end token, if requested
    offsets: list[int] = field(default_factory=list)  # where each of these begins in the text
    n_written: int = 0  # number of tokens, including the end token
    score: float | None = None
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> str:
        """Append tokens; returns the text that they complete."""
        self.n_written += len(event.tokens)
        n_content = len(event.tokens) - min(event.n_ending, 1)
        content, self.end_token = event.tokens[:n_content], list(event.tokens[n_content:])
        if event.log_prob is not None:
            self.log_probs.append(event.log_prob)
            self.offsets.append(len(self.text) + len(self.pieces.pending))
        piece = ""
        if content:
            self.tokens += content
            piece = self.pieces.push(*content)
        if event.finish is not None:
            piece += self.pieces.finish()
            self.finish_reason = "stop" if self.pieces.ended else _REASONS[event.finish]
        self.text += piece
        return piece

    @property
    def mean_log_prob(self) -> float:
        return sum(each.value or 0.0 for each in self.log_probs[: len(self.tokens)]) / max(1, len(self.tokens))


class Writing:
    """The scheduler requests of one HTTP request; they are cancelled when the client stops reading."""

    def __init__(self, model: ApiModel) -> None:
        self.model, self.created, self.id = model, int(time.time()), uuid4().hex
        self.requests: list[TextRequest] = []
        self.choices: list[TextChoice] = []
        self.n_unfinished = 0  # choices
        self._groups: list[list[TextChoice]] = []  # the choices of each request
        self._events: asyncio.Queue[tuple[int, TextEvent]] = asyncio.Queue()

    def add(self, inputs: ModelInputs, fields: dict[str, Any], n_choices: int, **options: Any) -> None:
        """Add one input, which gives ``n_choices`` choices."""
        number = len(self.requests)
        request = self.model.new_request(
            inputs, fields, lambda event: self._events.put_nowait((number, event)), **options
        )
        strings = () if request.strings is None else request.strings.strings
        decode, first = self.model.decode_for(inputs), first_stop_token(request.config)
        group = [
            TextChoice(len(self.choices) + n, request.reading, TextPieces(decode, strings, first))
            for n in range(n_choices)
        ]
        self.requests.append(request)
        self._groups.append(group)
        self.choices += group
        self.n_unfinished += n_choices

    @property
    def usage(self) -> dict[str, int]:
        n_prompt = sum(request.n_prompt for request in self.requests)
        n_written = sum(choice.n_written for choice in self.choices)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_written, "total_tokens": n_prompt + n_written}

    async def follow(self) -> AsyncIterator[list[tuple[TextChoice, str]]]:
        """Submit the requests and yield the choices that change, with their new text, as often as there is news.

        Closing the generator cancels the requests that are still running.
        """
        self.model.scheduler.submit(*self.requests)
        try:
            while self.n_unfinished:
                pieces: dict[int, str] = {}  # by the index of the choice
                for number, event in await self._next_events():
                    for choice, piece in self._apply(number, event):
                        pieces[choice.index] = pieces.get(choice.index, "") + piece
                changes = [(self.choices[index], piece) for index, piece in pieces.items()]
                self.n_unfinished -= sum(choice.finish_reason is not None for choice, _ in changes)
                yield changes
        finally:
            for request in self.requests:
                request.cancel()
            self.model.scheduler.wake()

    async def _next_events(self) -> list[tuple[int, TextEvent]]:
        """Wait for an event; returns all that have arrived, each with the number of its request."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def _apply(self, number: int, event: TextEvent) -> list[tuple[TextChoice, str]]:
        """Apply an event; returns the choices that it changes, with their new text."""
        group = self._groups[number]
        if isinstance(event, FailureEvent):
            raise event.error
        if isinstance(event, SearchEvent):
            return list(zip(group, self._set_hypotheses(group, event.hypotheses), strict=True))
        # A greedy request with n > 1 is decoded once: all its choices get the same text.
        choices = [group[event.copy]] if len(group) == self.requests[number].copies else group
        return [(choice, choice.add(event)) for choice in choices]

    def _set_hypotheses(self, group: list[TextChoice], hypotheses: list[Hypothesis]) -> list[str]:
        """Write the hypotheses of a search into its choices; the best fills up the rest if there are too few."""
        for choice, hypothesis in zip(group, [*hypotheses, *hypotheses[:1] * len(group)], strict=False):
            choice.tokens, choice.score = list(hypothesis.content), hypothesis.score
            choice.n_written = len(hypothesis.tokens)
            choice.text = "".join(map(choice.pieces.push, hypothesis.content)) + choice.pieces.finish()
            choice.finish_reason = _REASONS[hypothesis.finish]
        return [choice.text for choice in group]

    async def finish(self) -> list[TextChoice]:
        """Run the requests to their end and return all choices.

        A text without stop strings is decoded as a whole: if bytes of it are no character, what they are replaced by
        depends on the pieces in which it arrived.
        """
        async for _ in self.follow():
            pass
        for request, group in zip(self.requests, self._groups, strict=True):
            for choice in group if request.strings is None else ():
                choice.text = self.model.decode_for(request.reading.inputs)(choice.tokens)
        return self.choices
