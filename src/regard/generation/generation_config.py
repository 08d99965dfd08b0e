"""GenerateConfig: length limits, beam search with its length penalty, sampling, filters, stops. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..config import Config

PAPER: dict[str, Any] = {"beam": 4, "penalty_form": "gnmt", "length_penalty": 0.6}
"""The paper's search (Vaswani et al. 2017, §6.1)."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # fields that only apply to sampling
_MINIMUM = {"max_new_tokens": 1, "min_new_tokens": 0, "beam": 1, "n_best": 1, "groups": 1, "no_repeat_ngram": 0}
_GREEDY_HINT = "; for the most likely token at each step leave it out, with sample=False"
# Logits divided by less than 1e-30 leave the range of float32.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {  # the valid values of a field, as a test and in words
    "length_penalty": (math.isfinite, "be a finite number"),
    "diversity_penalty": (math.isfinite, "be a finite number"),
    "repetition_penalty": (lambda x: 1e-30 <= x <= 1e30, "be a positive number, 1e-30 to 1e30"),
    "temperature": (lambda x: 1e-30 <= x < math.inf, "be a positive number, at least 1e-30" + _GREEDY_HINT),
    "top_k": (lambda x: x >= 1, "be at least 1"),
    "top_p": (lambda x: 0 < x <= 1, "lie in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "lie in [0, 1]"),
}


class GenerateConfig(Config):
    """Everything that determines which tokens follow a prompt or a source."""

    max_new_tokens: int = 128
    """Maximum number of new tokens; a text also ends at the model's max_len."""
    min_new_tokens: int = 0
    """Minimum number of new tokens before a text may end."""

    beam: int = 1
    """Number of beams; 1 takes the most likely token at each step (greedy)."""
    length_penalty: float = 1.0
    """α: a text of n tokens has the score log P / penalty(n), with n^α or ((5 + n) / 6)^α."""
    penalty_form: Literal["hf", "gnmt"] = "hf"
    """n^α as in transformers, or ((5 + n) / 6)^α (Wu et al. 2016, eq. 14; the paper, with α = 0.6)."""
    early_stopping: bool | Literal["never"] = False
    """When to stop once the pool of finished texts is full: True at once, False when no beam can beat the pool at its
    current length, "never" only when none can at any length."""
    ended_first: bool = False
    """Whether texts that ended by themselves rank before texts cut off at the limit, whatever their scores."""
    n_best: int = 1
    """Texts returned per prompt, best first: at most this many from a beam search, or this many samples."""
    groups: int = 1
    """Groups of beams, each penalised for the choices of the groups before it (Vijayakumar et al. 2018)."""
    diversity_penalty: float = 0.0
    """Subtracted from a token's score for each beam of an earlier group that chose it at the same step."""

    sample: bool | None = None
    """Whether tokens are sampled; None: if temperature, top_k, top_p or min_p is given."""
    temperature: float | None = None
    """Logits are divided by it before sampling."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Sample from tokens with at least this share of the highest probability (Nguyen et al. 2024)."""
    seed: int | None = None
    """Makes a prompt's texts reproducible, whatever else is in the batch; None: from torch's global generator."""

    repetition_penalty: float = 1.0
    """Logits of tokens already in the text are divided by it if positive, multiplied if negative (CTRL)."""
    no_repeat_ngram: int = 0
    """No sequence of this many tokens occurs twice; 0: no restriction."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Numbers added to the logits of single tokens; -inf forbids a token."""
    prefix: tuple[int, ...] = ()
    """Tokens that every text starts with, whatever their probability."""
    stop: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end a text, in addition to the model's end token."""

    truncate: bool = False
    """Whether a prompt that is too long loses its beginning, and a source its end; otherwise it is an error."""
    cache: Literal["growing", "static", "static-bf16", "static-int8"] = "growing"
    """growing: as long as the text; finished rows leave the batch. static: preallocated, with one shape for all steps,
    and each row of the batch stays with its prompt, as recording needs; static-bf16 and static-int8 round keys and
    values to a half or a quarter of the memory. CUDA graphs replace growing and static by a key buffer of their own."""

    @field_validator("stop", mode="before")
    @classmethod
    def _parse_stop(cls, stop: Any) -> Any:
        """A single token is short for a sequence of one token; a list may mix both."""
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
            if not abs(bias) <= 1e30 and bias != -math.inf:
                hint = "it must be a finite number, -1e30 to 1e30, or -inf to forbid it"
                raise ValueError(f"logit_bias of token {token} is {bias}; {hint}")
        if any(len(sequence) == 0 for sequence in self.stop):
            raise ValueError("stop contains an empty sequence, which would end every text before it starts")
        self._check_search()
        return self

    def _check_search(self) -> None:
        """Reject combinations of sampling, beam and group fields that contradict each other."""
        sampling = [f"{name}={getattr(self, name)}" for name in _SAMPLING if getattr(self, name) is not None]
        if self.sample is False and sampling:
            raise ValueError(f"{sampling[0]} applies only to sampling, but sample=False")
        if self.samples and self.beam > 1:
            field = sampling[0] if sampling else "sample=True"
            raise ValueError(f"beam={self.beam} searches for the best text and {field} draws one: give one of them")
        if not self.samples and self.n_best > self.beam:
            needs = f"beam={self.n_best} or more, or sample=True; beam={self.beam}"
            raise ValueError(f"n_best={self.n_best} texts need {needs}")
        if self.beam % self.groups:
            raise ValueError(f"beam={self.beam} is not divisible by groups={self.groups}")
        if (self.groups > 1) != (self.diversity_penalty > 0):
            both = f"groups={self.groups} and diversity_penalty={self.diversity_penalty} do not go together"
            raise ValueError(f"{both}: groups above 1 need a positive penalty, and vice versa")

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled rather than searched for."""
        return self.sample if self.sample is not None else any(getattr(self, name) is not None for name in _SAMPLING)

    def length_penalty_at(self, n_tokens: float) -> float:
        """The divisor of log P for a text of n tokens: n^α, or ((5 + n) / 6)^α (GNMT); within float32's range."""
        base = n_tokens if self.penalty_form == "hf" else (5 + n_tokens) / 6
        exponent = self.length_penalty * math.log(base)
        return base**self.length_penalty if abs(exponent) < 80 else math.exp(math.copysign(80, exponent))
