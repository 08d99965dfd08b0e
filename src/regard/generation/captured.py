"""A step captured once and replayed for every token, and what it needs to stay where it is between two of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models import Decoder
from .config import GenerateConfig
from .prompts import Prompts
from .sampling import chances, draw, filtered
from .steps import Form, OneToken, State, log_prob_of

_WARM_UPS = 3
_KEPT = 8  # captures of one step, each for its own way to choose


class Captured:
    """A function without arguments, captured with the tensors it reads and writes; ``out`` is what it returned.

    Calling it repeats the work and not the function. It runs a few times first, which loads kernels and picks
    algorithms: what it writes then has to be meaningless.
    """

    def __init__(self, run: Callable[[], Tensor | None], device: torch.device) -> None:
        self.out: Tensor | None = None
        if device.type != "cuda":
            self._run: Callable[[], Any] = run
            return
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = run()
        self._run = graph.replay

    def __call__(self) -> Tensor | None:
        made = self._run()
        return made if self.out is None else self.out


class Writer:
    """A decoder's step for a number of rows and places: its cache, its state, and its captures, used again and again.

    ``compile`` hands the step to torch.compile before it is captured; ``form`` and ``parts`` are OneToken's.
    """

    def __init__(
        self,
        model: Decoder,
        rows: int,
        places: int,
        *,
        form: Form | None = None,
        parts: Any = None,
        compile: bool = False,
    ) -> None:
        self.rows, self.places, self.device = rows, places, model.device
        self.cache = model.new_cache(rows, places)
        self.state = State.empty(rows, places + _WARM_UPS + 1, model.device)
        self.step = OneToken(model, self.cache, self.state, form, parts)
        n_steps = len(self.state.history)
        # New tokens first, then the prompt: filters ask which tokens were there, not in which order.
        self.texts = torch.full((rows, n_steps + places), -1, dtype=torch.int64, device=model.device)
        self.chance = torch.zeros(rows, n_steps, dtype=torch.float64, device=model.device)
        self.owner: weakref.ref[object] | None = None
        self._logits: Callable[[], Tensor] = self.step.logits
        if compile:
            self._logits = torch.compile(self.step.logits, dynamic=False, fullgraph=True)
        self._captures: dict[Any, Captured] = {}

    def logits(self) -> Captured:
        """The step alone: takes in ``state.tokens`` and returns logits, which the next call overwrites."""

        def run() -> Tensor:
            logits = self._logits()
            self.state.advance()
            return logits

        return self._capture("logits", run)

    def chooser(self, config: GenerateConfig, eos_id: int | None) -> Captured:
        """The step with the choice of the next token, which the next step takes in."""

        def run() -> None:
            self.choose(self._logits(), config, eos_id, advance=True)

        return self._capture(_choice(config, eos_id), run)

    def _capture(self, key: Any, run: Callable[[], Tensor | None]) -> Captured:
        if key not in self._captures:
            while len(self._captures) >= _KEPT:
                self._captures.pop(next(iter(self._captures)))
            # Warming up chooses tokens and writes their keys into the first place; afterwards all is as it was.
            touched = [*self.state, *(x[:, :, :1] for held in self.step.held for x in held)]
            before = [x.clone() for x in touched]
            self.state.begin(torch.zeros_like(self.state.lengths), torch.zeros_like(self.state.last))
            try:
                self._captures[key] = Captured(run, self.device)
            finally:
                for x, was in zip(touched, before, strict=True):
                    x.copy_(was)
        return self._captures[key]

    def choose(self, logits: Tensor, config: GenerateConfig, eos_id: int | None, advance: bool) -> None:
        """The next token of every row, written down; after a step its own token's place is left behind."""
        state = self.state
        if not config.samples and not _filters(config):
            self.step.parts.settle_greedy(logits, *state, advance)
            return
        logits = logits.float()
        scores = filtered(logits, self.texts, 0, config, eos_id)
        if config.samples:
            tokens = draw(scores, self.chance.gather(1, state.steps[:, None])[:, 0])
        else:
            tokens = scores.argmax(-1)
        if advance:
            state.advance()
        self.texts.scatter_(1, state.steps[:, None], tokens[:, None])
        state.note(tokens, log_prob_of(logits, tokens))

    def before_choosing(self, prompts: Prompts, copies: int, config: GenerateConfig) -> None:
        """What the choice reads beside the logits: the tokens there were, and the numbers it draws with."""
        given, n_steps = prompts.texts.repeat_interleave(copies, 0), len(self.state.history)
        self.texts.fill_(-1)
        self.texts[:, n_steps : n_steps + given.shape[1]] = given
        if config.samples:
            drawn = chances(config, len(prompts), copies)[:, :n_steps]
            self.chance[:, : drawn.shape[1]].copy_(drawn)


def _filters(config: GenerateConfig) -> bool:
    return bool(config.logit_bias) or config.repetition_penalty != 1.0


def _choice(config: GenerateConfig, eos_id: int | None) -> tuple[Any, ...]:
    """What of a config the captured choice depends on."""
    drawing = (config.samples, config.temperature, config.top_k, config.top_p, config.min_p)
    return (*drawing, config.repetition_penalty, tuple(sorted(config.logit_bias.items())), eos_id)


def chooses(config: GenerateConfig, eos_id: int | None) -> bool:
    """Whether the choice can be part of the captured step: not where its rules change from token to token."""
    by_step = config.no_repeat_ngram or config.prefix or config.min_new_tokens
    return config.beam == 1 and not by_step and not (config.logit_bias and eos_id is None)
