"""Beam search for texts that must contain given terms: grid beam search (Hokamp & Liu 2017).

A term is a set of token sequences, one of which must occur. ``TermTracker`` follows a text token by token and counts
the tokens of its terms that are still missing. There is a bank of k beams for every such count, from n to 0: a beam
competes only with those that are as far, so none is discarded for having begun an unlikely term. In addition to its
best tokens, every beam considers the tokens that begin or continue a term, so the lowest count falls at every step.
Only a text without missing terms may end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .beam_search import Beams, BeamSearch, Candidates
from .cached_engine import DecodingEngine
from .generation_config import GenerateConfig
from .prompts import Prompts
from .sampling import filter_logits
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes

Tokens = tuple[int, ...]


class Term(NamedTuple):
    """Token sequences of which one must occur: any of ``anywhere``, or, outside a word, any of ``after_word``."""

    anywhere: tuple[Tokens, ...]
    after_word: tuple[Tokens, ...] = ()

    @property
    def size(self) -> int:
        """Length of the longest sequence."""
        return max(map(len, self.anywhere + self.after_word))


class TermState(NamedTuple):
    """How far a text is with its terms."""

    missing: tuple[int, ...]  # numbers of the terms not yet in it
    partial: Tokens = ()  # the longest end of the text that begins a missing term
    after_word: bool = True  # whether ``partial`` begins outside a word


class TermTracker:
    """Follows which terms a text contains. ``in_word(token)`` says whether a word may continue after a token."""

    def __init__(self, terms: Sequence[Term], in_word: Callable[[int], bool] = lambda token: False) -> None:
        self.terms, self.in_word = tuple(terms), in_word
        self.start = TermState(tuple(range(len(terms))))
        self._tokens = {token for term in terms for tokens in (*term.anywhere, *term.after_word) for token in tokens}
        # Cached, as beams are in few different states, and most tokens belong to no term.
        self.next_tokens, self.n_needed = cache(self._next_tokens), cache(self._n_needed)
        self._term_step = cache(self._step_in_term)

    def step(self, state: TermState, token: int) -> TermState:
        """The state after one more token."""
        if token in self._tokens:
            return self._term_step(state, token)
        return TermState(state.missing, (), not self.in_word(token))

    def _step_in_term(self, state: TermState, token: int) -> TermState:
        text = (*state.partial, token)
        for start in range(len(text)):
            after_word = state.after_word if start == 0 else not self.in_word(text[start - 1])
            longer = TermState(state.missing, text[start:], after_word)
            matches = list(self._matching_sequences(longer))
            complete = [number for number, tokens in matches if len(tokens) == len(text) - start]
            if complete:
                missing = tuple(number for number in state.missing if number != complete[0])
                return TermState(missing, (), not self.in_word(token))
            if matches:
                return longer
        return TermState(state.missing, (), not self.in_word(token))

    def _matching_sequences(self, state: TermState) -> Iterator[tuple[int, Tokens]]:
        """The sequences of missing terms that begin with ``state.partial``, each with its term's number."""
        for number in state.missing:
            term = self.terms[number]
            for tokens in term.anywhere + (term.after_word if state.after_word else ()):
                if tokens[: len(state.partial)] == state.partial:
                    yield number, tokens

    def _next_tokens(self, state: TermState) -> list[int]:
        """The tokens that continue the partial term, or begin a missing one."""
        fresh = TermState(state.missing, (), not self.in_word(state.partial[-1]) if state.partial else state.after_word)
        n = len(state.partial)
        return sorted(
            {tokens[n] for _, tokens in self._matching_sequences(state)}
            | {tokens[0] for _, tokens in self._matching_sequences(fresh)}
        )

    def _n_needed(self, state: TermState) -> int:
        """Tokens still to be written: all tokens of the missing terms, minus those already in ``state.partial``."""
        whole = sum(self.terms[number].size for number in state.missing)
        if not state.partial:
            return whole
        return min(
            whole - self.terms[number].size + len(tokens) - len(state.partial)
            for number, tokens in self._matching_sequences(state)
        )


class _Option(NamedTuple):
    """A continuation of one beam."""

    score: float
    beam: int
    token: int
    code: int
    state: TermState


class ConstrainedSearch(BeamSearch):
    """Grid beam search: ``config.beam`` beams for every number of missing tokens.

    ``terms`` are the terms of each prompt, in order; a term that does not fit into the rest of the prompt's limit is
    left out. Unless a length penalty is given, texts are ranked by log P alone: divided by the length, an unlikely term
    would cost less in a text that rambles on.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        config: GenerateConfig,
        eos_id: int | None,
        terms: Sequence[Sequence[Term]],
        strings: StopStrings | None = None,
        in_word: Callable[[int], bool] = lambda token: False,
    ) -> None:
        if "length_penalty" not in config.model_fields_set:
            config = config.with_(length_penalty=0.0)
        super().__init__(engine, config, eos_id, strings)
        self.terms, self.in_word, self.pool_size = terms, in_word, config.beam

    def begin(self, prompts: Prompts) -> None:
        limits = (prompts.limit - len(self.config.prefix)).tolist()
        kept = [_fitting(terms, limit) for terms, limit in zip(self.terms, limits, strict=True)]
        self.trackers = [TermTracker(terms, self.in_word) for terms in kept]
        n_banks = 1 + max(tracker.n_needed(tracker.start) for tracker in self.trackers)
        self.config = self.config.with_(beam=self.pool_size * n_banks)
        self.size = self.config.beam
        self.states = [[tracker.start] * self.size for tracker in self.trackers]
        super().begin(prompts)

    def _advance(self, beams: Beams, logits: Tensor, step: int | Tensor) -> tuple[list[Candidates], Candidates]:
        options = self._options(beams, logits, step)
        at_limit = step + 1 >= beams.limit
        has_text = beams.pool.score[:, 0].isfinite().any(-1)
        nexts, finished = [], []
        lists = (beams.prompt.tolist(), options, at_limit.tolist(), has_text.tolist())
        for prompt, prompt_options, is_last, has_any in zip(*lists, strict=True):
            going, done = self._select(self.trackers[prompt], prompt_options, is_last, has_any)
            self.states[prompt] = [x.state for x in going] + [self.trackers[prompt].start] * (self.size - len(going))
            nexts.append(going)
            finished.append([x._replace(code=LENGTH) if x.code == GOING_ON else x for x in done])
        device = beams.score.device
        following, ended = _candidates(nexts, self.size, device), _candidates(finished, self.pool_size, device)
        ended = Candidates(*(x[:, None] for x in ended))
        beams.pool = self._update_pool(beams, ended)
        beams.open = beams.open & ~at_limit[:, None] & self._may_improve(beams, following.score.amax(-1)[:, None])
        return [following], ended

    def _options(self, beams: Beams, logits: Tensor, step: int | Tensor) -> list[list[_Option]]:
        """For each prompt, the best continuations of its beams and those that begin or continue a term."""
        n, _, width = beams.score.shape
        numbers, texts = beams.prompt.tolist(), beams.texts.flatten(0, 1)
        scores = filter_logits(logits.log_softmax(-1), texts, step, self.config, self.eos_id)
        scores = scores.view(n, width, -1) + beams.score[:, 0, :, None]  # (B, W, V)
        wanted = [[self.trackers[p].next_tokens(state) for state in self.states[p]] for p in numbers]
        n_forced = max((len(tokens) for row in wanted for tokens in row), default=0)
        best = scores.topk(min(self.pool_size + self.n_ends + n_forced, scores.shape[-1])).indices
        rows = torch.tensor(
            [[tokens + [-1] * (n_forced - len(tokens)) for tokens in row] for row in wanted], device=best.device
        )
        forced = torch.where(rows < 0, best[..., :1], rows.to(best.dtype)) if n_forced else best[..., :0]
        token = torch.cat([best, forced], -1)  # (B, W, n)
        before = texts.repeat_interleave(token.shape[-1], 0) if self.config.stop or self.strings else texts[:1]
        code = stop_codes(token.flatten(), before, step + 1, self.config, self.eos_id, self.strings).view_as(token)
        lists = (numbers, *(x.tolist() for x in (scores.gather(-1, token), token, code)))
        return [self._prompt_options(*row) for row in zip(*lists, strict=True)]

    def _prompt_options(
        self, prompt: int, scores: list[list[float]], tokens: list[list[int]], codes: list[list[int]]
    ) -> list[_Option]:
        """The options of one prompt, best first, without duplicates: a token may be both likely and part of a term."""
        tracker, options = self.trackers[prompt], dict[tuple[int, int], _Option]()
        for beam, state in enumerate(self.states[prompt]):
            for score, token, code in zip(scores[beam], tokens[beam], codes[beam], strict=True):
                if score > -math.inf:
                    options[beam, token] = _Option(score, beam, token, code, tracker.step(state, token))
        return sorted(options.values(), key=lambda option: -option.score)

    def _select(
        self, tracker: TermTracker, options: list[_Option], at_limit: bool, has_text: bool
    ) -> tuple[list[_Option], list[_Option]]:
        """The next beams, k for every number of tokens still needed, and the texts that ended with all their terms."""
        banks: dict[int, list[_Option]] = defaultdict(list)
        for option in options:
            banks[tracker.n_needed(option.state)].append(option)
        k, going = self.pool_size, list[_Option]()
        for bank in banks.values():
            going += [x for x in bank if x.code == GOING_ON][:k]
        done = [x for x in banks[0][:k] if x.code != GOING_ON or at_limit]
        if not done and not has_text and (at_limit or not going):  # a filter forbids a term: take the fewest missing
            done = next((banks[n][:k] for n in sorted(banks) if banks[n]), [])
        return going, done


def _fitting(terms: Sequence[Term], limit: int) -> list[Term]:
    """The terms that together fit into ``limit`` tokens, in order of preference."""
    kept: list[Term] = []
    for term in terms:
        if term.size <= limit:
            kept.append(term)
            limit -= term.size
    return kept


def _candidates(options: list[list[_Option]], width: int, device: torch.device) -> Candidates:
    """Options as tensors (B, width), padded with scores of -inf."""
    empty = _Option(-math.inf, 0, 0, GOING_ON, TermState(()))
    padded = [row + [empty] * (width - len(row)) for row in options]
    score, beam, token, code = (
        torch.tensor([[option[field] for option in row] for row in padded], device=device) for field in range(4)
    )
    return Candidates(score, score, beam, token, code)
