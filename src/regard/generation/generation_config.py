"""GenerateConfig: length limits, beam search with its length penalty, sampling, filters, stops. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..config import Config

PAPER: dict[str, Any] = {"beam": 4, "penalty_form": "gnmt", "length_penalty": 0.6}
"""How the paper translates (Vaswani et al. 2017, §6.1)."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # fields that only matter where tokens are drawn
_MINIMUM = {"max_new_tokens": 1, "min_new_tokens": 0, "beam": 1, "n_best": 1, "groups": 1, "no_repeat_ngram": 0}
_GREEDY_HINT = "; for the most likely token at each step leave it out, with sample=False"
# Logits divided by less than 1e-30 leave the range of float32.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {  # which numbers a field may have, and that in words
    "length_penalty": (math.isfinite, "be a finite number"),
    "diversity_penalty": (math.isfinite, "be a finite number"),
    "repetition_penalty": (lambda x: 1e-30 <= x <= 1e30, "be a positive number, 1e-30 to 1e30"),
    "temperature": (lambda x: 1e-30 <= x < math.inf, "be a positive number, at least 1e-30" + _GREEDY_HINT),
    "top_k": (lambda x: x >= 1, "be at least 1"),
    "top_p": (lambda x: 0 < x <= 1, "lie in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "lie in [0, 1]"),
}


class GenerateConfig(Config):
    """Everything that decides which tokens follow a prompt or a source."""

    max_new_tokens: int = 128
    """A text ends after so many new tokens, or where the model's max_len is reached."""
    min_new_tokens: int = 0
    """No text ends before it has so many new tokens."""

    beam: int = 1
    """Hypotheses followed at a time; 1 takes the most likely token at each step (greedy)."""
    length_penalty: float = 1.0
    """α: a text of n tokens has the score log P / penalty(n), with n^α or ((5 + n) / 6)^α."""
    penalty_form: Literal["hf", "gnmt"] = "hf"
    """n^α as in transformers, or ((5 + n) / 6)^α (Wu et al. 2016, eq. 14; the paper, with α = 0.6)."""
    early_stopping: bool | Literal["never"] = False
    """When a full set of finished texts is enough: True at once, False when no text of today's length could be better,
    "never" when none of any length could."""
    ended_first: bool = False
    """Whether texts that ended by themselves come before those cut off at the limit, whatever their scores."""
    n_best: int = 1
    """Texts returned for each prompt, best first: of the beam, as far as it found so many, or so many drawn ones."""
    groups: int = 1
    """Groups of beams, each kept away from what the ones before it choose (Vijayakumar et al. 2018)."""
    diversity_penalty: float = 0.0
    """What a token costs a group for each beam of an earlier group that takes it at the same step."""

    sample: bool | None = None
    """Whether tokens are drawn; None: where temperature, top_k, top_p or min_p is given."""
    temperature: float | None = None
    """Logits are divided by it before drawing."""
    top_k: int | None = None
    """Draw among the k most likely tokens."""
    top_p: float | None = None
    """Draw among the fewest tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Draw among tokens at least this share as likely as the likeliest (Nguyen et al. 2024)."""
    seed: int | None = None
    """With it a prompt gives the same texts every time, in any company; None: from torch's own generator."""

    repetition_penalty: float = 1.0
    """Logits of tokens already in the text are divided by it where positive, multiplied where negative (CTRL)."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens occurs twice; 0: it may."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """What is added to single tokens' logits; -inf forbids one."""
    prefix: tuple[int, ...] = ()
    """Tokens every text starts with, whatever the model thinks of them."""
    stop: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end a text, beside the model's own end token."""

    truncate: bool = False
    """Whether too long a prompt loses its beginning, and too long a source its end; otherwise it is an error."""
    cache: Literal["growing", "static", "static-bf16", "static-int8"] = "growing"
    """Growing: as long as the text, and finished rows leave the batch. Static: preallocated, one shape for every step
    and row r of the batch always the same prompt's, for recording; its keys and values as the model computes them, or
    rounded to half or a quarter of the memory. Steps captured in CUDA graphs have keys of their own instead of either,
    unless they are to be rounded."""

    @field_validator("stop", mode="before")
    @classmethod
    def _parse_stop(cls, stop: Any) -> Any:
        """A single token is a sequence of one token, and may stand for a list of one sequence."""
        stop = (stop,) if isinstance(stop, int) else stop
        return tuple((s,) if isinstance(s, int) else s for s in stop) if isinstance(stop, tuple | list) else stop

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, least in _MINIMUM.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")
        for name, (is_valid, words) in _RANGES.items():
            if (value := getattr(self, name)) is not None and not is_valid(value):
                raise ValueError(f"{name}={value} must {words}")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                hint = "it must be a finite number, or -inf to forbid it"
                raise ValueError(f"logit_bias of token {token} is {bias}; {hint}")
        if any(len(sequence) == 0 for sequence in self.stop):
            raise ValueError("stop holds an empty sequence, which would end every text before it starts")
        self._check_search()
        return self

    def _check_search(self) -> None:
        """Refuse fields that do not go together: of drawing and of beam search."""
        given = [f"{name}={getattr(self, name)}" for name in _SAMPLING if getattr(self, name) is not None]
        if self.sample is False and given:
            raise ValueError(f"{given[0]} is for drawing tokens, but sample=False")
        if self.samples and self.beam > 1:
            sampling = given[0] if given else "sample=True"
            raise ValueError(f"beam={self.beam} searches for the best text and {sampling} draws one: give one of them")
        if not self.samples and self.n_best > self.beam:
            needs = f"beam={self.n_best} or more, or sample=True; beam={self.beam}"
            raise ValueError(f"n_best={self.n_best} texts need {needs}")
        if self.beam % self.groups:
            raise ValueError(f"beam={self.beam} is not divisible by groups={self.groups}")
        if (self.groups > 1) != (self.diversity_penalty > 0):
            both = f"groups={self.groups} and diversity_penalty={self.diversity_penalty} do not go together"
            raise ValueError(f"{both}: groups above 1 need a positive penalty, and the other way round")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn rather than searched for."""
        return self.sample if self.sample is not None else any(getattr(self, name) is not None for name in _SAMPLING)

    def length_penalty_at(self, n_tokens: float) -> float:
        """What log P of a text of n tokens is divided by: n^α, or ((5 + n) / 6)^α (GNMT)."""
        return (n_tokens if self.penalty_form == "hf" else (5 + n_tokens) / 6) ** self.length_penalty
