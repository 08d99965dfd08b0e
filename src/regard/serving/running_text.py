"""Requests and the texts they generate: how each text chooses its next token, and the events it reports.

A text sees the logits of its own rows and nothing else of the batch. ``SampledText`` is greedy or sampled and has one
row; ``SearchedText`` is a beam search and has one row per beam.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..config import ModelConfig
from ..generation.beam_search import BeamSearch, Hypothesis
from ..generation.cached_engine import nan_error
from ..generation.generation_config import GenerateConfig
from ..generation.joint_search import JointSearch, SearchStep, can_join
from ..generation.prompt_reading import PromptReading
from ..generation.sampling import (
    LogProb,
    draw_tokens,
    filter_logits,
    has_filters,
    log_probs_of,
    reads_text,
    uniform_draws,
)
from ..generation.slot_engine import BlockDraws, Slot
from ..generation.stop_conditions import END, GOING_ON, LENGTH, TEXT, Finish, StopStrings, finish_reason, stop_codes
from ..generation.text_codec import forbidden_bias


class TokenConstraint(Protocol):
    """Restricts the next token of one text, for example to a grammar."""

    is_finished: bool

    def forbid(self, logits: Tensor) -> Tensor: ...  # logits (1, V) with -inf for tokens that may not come next

    def accept(self, token: int) -> None: ...


class TokenEvent(NamedTuple):
    """The next token of a text, or several that were decoded as a block."""

    copy: int  # which of the request's texts
    tokens: tuple[int, ...]
    log_prob: LogProb | None = None  # of a single token, before temperature and filters; None unless requested
    finish: Finish | None = None
    n_ending: int = 0  # number of final tokens that are the end token or the stop sequence


@dataclass(frozen=True)
class SearchEvent:
    """The end of a beam search: its hypotheses, best first."""

    hypotheses: list[Hypothesis]


@dataclass(frozen=True)
class FailureEvent:
    """The end of a request by an error."""

    error: Exception


TextEvent = TokenEvent | SearchEvent | FailureEvent


@dataclass(eq=False)
class TextRequest:
    """One prompt to generate from; ``deliver`` receives its events.

    Sampling generates ``config.n_best`` texts; with ``config.beam`` > 1 there is a single search.
    """

    reading: PromptReading
    config: GenerateConfig
    deliver: Callable[[TextEvent], None]
    strings: StopStrings | None = None
    new_constraint: Callable[[], TokenConstraint] | None = None  # called once per text
    priority: int = 0
    n_top: int | None = None  # number of likeliest tokens reported with each token; None: no log P at all
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None  # time of the first token
    finished: float | None = None
    n_tokens: int = 0  # generated so far
    cancelled: bool = False
    slots: list[Slot] = field(default_factory=list)  # of its unfinished texts

    @property
    def size(self) -> int:
        """The number of rows of one slot."""
        return self.config.beam

    @property
    def copies(self) -> int:
        """The number of slots that the request takes."""
        return self.config.n_best if self.config.beam == 1 else 1

    @property
    def n_prompt(self) -> int:
        return len(self.reading.row) + self.reading.n_source

    def cancel(self) -> None:
        """Stop within one round of the scheduler; may be called from any thread."""
        self.cancelled = True


class SampledText:
    """A greedy or sampled text; ``draws`` are the uniform random numbers of its tokens."""

    def __init__(self, request: TextRequest, copy: int, draws: Tensor | None, model: ModelConfig) -> None:
        self.request, self.copy, self.tokens = request, copy, list[int]()
        self._config, self._draws, self._eos_id = request.config, draws, model.eos_id
        is_forbidden = model.forbidden_ids and request.config.logit_bias == forbidden_bias(model)
        self._other_filters = request.config.with_(logit_bias={}) if is_forbidden else request.config
        self._limit, self._prompt = request.reading.limit, request.reading.row
        self._reads_text = reads_text(request.config)
        self._constraint = None if request.new_constraint is None else request.new_constraint()

    @property
    def chooses(self) -> bool:
        """Whether the next token may differ from the argmax of the logits."""
        config = self._config
        return self._constraint is not None or config.samples or has_filters(config, len(self.tokens))

    @property
    def sampling_group(self) -> Hashable:
        """Texts with equal keys choose their tokens in one call; a text whose choice depends on its tokens so far, by
        a constraint or a repetition penalty, forms its own group."""
        if self._constraint is not None or self._reads_text:
            return self
        config = self._config
        bias = tuple(config.logit_bias.items()) if config.logit_bias else ()
        return config.samples, config.temperature, config.top_k, config.top_p, config.min_p, bias

    def scores(self, logits: Tensor) -> Tensor:
        """Filtered logits for the texts of its sampling group: (R, V) to (R, V)."""
        if self._constraint is not None:
            logits = self._constraint.forbid(logits)
        texts = self._texts(logits.device) if self._reads_text else logits.new_zeros(len(logits), 0, dtype=torch.int64)
        return filter_logits(logits, texts, len(self.tokens), self._config, self._eos_id)

    @property
    def draw(self) -> Tensor | None:
        """The uniform random number that decides the next token, (1,)."""
        return None if self._draws is None else self._draws[len(self.tokens) : len(self.tokens) + 1]

    def add(self, token: int, log_prob: LogProb | None) -> TokenEvent:
        """Append a token; returns its event."""
        finish, n_ending = self._end(token)
        self.tokens.append(token)
        return TokenEvent(self.copy, (token,), log_prob, finish, n_ending)

    @property
    def takes_blocks(self) -> bool:
        """Whether its next tokens are the likeliest or drawn by temperature alone, whatever they are, until it ends.

        Captured steps leave out the tokens that the model forbids.
        """
        config = self._config
        if self.request.n_top is not None or self._constraint is not None:
            return False
        if has_filters(self._other_filters, len(self.tokens)):
            return False
        return config.top_k is None and config.min_p is None and (config.top_p is None or config.top_p >= 1)

    def next_draws(self, n_before: int, n: int) -> BlockDraws | None:
        """How to sample the n tokens after the next ``n_before``; None if it is greedy."""
        if self._draws is None:
            return None
        first = len(self.tokens) + n_before
        return BlockDraws(self._config.temperature or 1.0, self._draws[first : first + n].tolist())

    def add_block(self, tokens: Sequence[int]) -> TokenEvent:
        """Append tokens that were decoded as a block, up to the end of the text; returns their event."""
        first = len(self.tokens)
        for token in tokens:
            if token < 0:
                raise nan_error()
            finish, n_ending = self._end(token)
            self.tokens.append(token)
            if finish is not None:
                return TokenEvent(self.copy, tuple(self.tokens[first:]), finish=finish, n_ending=n_ending)
        return TokenEvent(self.copy, tuple(tokens))

    def _end(self, token: int) -> tuple[Finish | None, int]:
        code, n_new = GOING_ON, len(self.tokens) + 1
        if self._constraint is not None:
            self._constraint.accept(token)
        if token == self._eos_id:
            code = END
        elif self._config.stop or self.request.strings is not None:
            texts, chosen = self._texts(torch.device("cpu")), torch.tensor([token])
            code = int(stop_codes(chosen, texts, n_new, self._config, self._eos_id, self.request.strings))
        if code == GOING_ON and self._constraint is not None and self._constraint.is_finished:
            code = TEXT
        if code == GOING_ON and n_new >= self._limit:
            code = LENGTH
        return (None, 0) if code == GOING_ON else finish_reason(code, self._config)

    def _texts(self, device: torch.device) -> Tensor:
        return torch.tensor([[*self._prompt, *self.tokens]], device=device)


def choose_tokens(
    texts: Sequence[SampledText], logits: Tensor, likeliest: Sequence[int]
) -> list[TokenEvent | Exception]:
    """Choose the next token of each text from logits (R, V); ``likeliest`` is their argmax, -1 where they are NaN.

    Returns an event, or the exception that a text raised, for each row.
    """
    chosen: list[int | Exception] = [nan_error() if token < 0 else token for token in likeliest]
    groups: dict[Hashable, list[int]] = {}
    for row, text in enumerate(texts):
        if text.chooses and likeliest[row] >= 0:
            groups.setdefault(text.sampling_group, []).append(row)
    for rows in groups.values():
        for row, token in zip(rows, _choose_together([texts[row] for row in rows], logits[rows]), strict=True):
            chosen[row] = token
    log_probs = _log_probs(texts, logits, chosen)
    events: list[TokenEvent | Exception] = []
    for row, (text, token) in enumerate(zip(texts, chosen, strict=True)):
        try:
            events.append(token if isinstance(token, Exception) else text.add(token, log_probs.get(row)))
        except Exception as error:  # for example from a grammar
            events.append(error)
    return events


def _choose_together(texts: Sequence[SampledText], logits: Tensor) -> Sequence[int | Exception]:
    """Choose tokens for the texts of one sampling group from logits (R, V); if that fails, for each text alone."""
    try:
        scores = texts[0].scores(logits)
        draws = [text.draw for text in texts if text.draw is not None]
        chosen = draw_tokens(scores, torch.cat(draws).to(scores.device)) if draws else scores.argmax(-1)
        return chosen.tolist()
    except Exception as error:
        if len(texts) == 1:
            return [error]
        rows = zip(texts, logits.split(1), strict=True)
        return [token for text, row in rows for token in _choose_together([text], row)]


def _log_probs(texts: Sequence[SampledText], logits: Tensor, chosen: Sequence[int | Exception]) -> dict[int, LogProb]:
    """log P of the chosen and of the likeliest tokens, by row, for the texts that request them."""
    rows_by_count: dict[int, list[int]] = {}
    for row, text in enumerate(texts):
        if text.request.n_top is not None and not isinstance(chosen[row], Exception):
            rows_by_count.setdefault(text.request.n_top, []).append(row)
    by_row: dict[int, LogProb] = {}
    for n_top, rows in rows_by_count.items():
        tokens = torch.tensor([chosen[row] for row in rows], device=logits.device)
        by_row |= zip(rows, log_probs_of(logits[rows], tokens, n_top), strict=True)
    return by_row


class SearchedText:
    """A beam search: advanced together with others of the same config, or alone if it depends on the text so far."""

    takes_blocks = True  # asked only where searches are captured

    def __init__(self, request: TextRequest, eos_id: int | None) -> None:
        self.request = request
        self.joins = can_join(request.config) and request.strings is None
        self.group: JointSearch | None = None  # the joint search it is a member of
        self._search = BeamSearch(None, request.config, eos_id, request.strings)
        if not self.joins:
            self._search.begin(request.reading.prompts)

    def steps(self, logits: Tensor) -> list[SearchStep]:
        """One step of a search that is advanced alone, from the logits of its beams (k, V)."""
        step = self._search.step(logits)
        if step is None:
            return [SearchStep([], [], self._search.finished[0])]
        return [SearchStep(step[0].tolist(), step[1].tolist(), None)]


RunningText = SampledText | SearchedText


def new_texts(request: TextRequest, model: ModelConfig) -> list[RunningText]:
    """Create the texts of a request, one per slot."""
    config = request.config
    if config.beam > 1:
        return [SearchedText(request, model.eos_id)]
    if not config.samples:
        return [SampledText(request, copy, None, model) for copy in range(request.copies)]
    draws = uniform_draws(config, torch.tensor([request.reading.limit]), request.copies)
    return [SampledText(request, copy, text_draws, model) for copy, text_draws in enumerate(draws)]
