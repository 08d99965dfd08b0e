"""A language model that is a table, and beam search over it written for the eye: lists, no tensors, one prompt."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.generation import BeamSearch, GenerateConfig, Hypothesis
from regard.generation.cached_engine import DecodingEngine
from regard.generation.prompts import Prompts


class Script:
    """Logits of the next token for any text, made up from a seed; ``eos_bias`` makes texts end sooner."""

    def __init__(self, seed: int, n_tokens: int = 7, eos_id: int = 2, eos_bias: float = 0.0) -> None:
        self.seed, self.n_tokens, self.eos_id, self.eos_bias = seed, n_tokens, eos_id, eos_bias

    def logits(self, text: tuple[int, ...]) -> list[float]:
        chance = random.Random(f"{self.seed} {text}")
        made = [chance.gauss(0, 1.5) for _ in range(self.n_tokens)]
        made[self.eos_id] += self.eos_bias
        return made

    def log_probs(self, text: tuple[int, ...]) -> list[float]:
        return torch.tensor(self.logits(text)).log_softmax(-1).tolist()


class ScriptEngine(DecodingEngine):
    """The script behind the interface of an engine."""

    def __init__(self, script: Script, static: bool = False) -> None:
        self.script, self.static, self.texts = script, static, list[tuple[int, ...]]()

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        self.texts = [tuple(row) for row in prompts.rows for _ in range(copies)]
        return self._next()

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        self.texts = [(*text, token) for text, token in zip(self.texts, tokens.tolist(), strict=True)]
        return self._next()

    def select(self, rows: Tensor) -> None:
        assert not self.static or len(rows) == len(self.texts)
        self.texts = [self.texts[row] for row in rows.tolist()]

    def _next(self) -> Tensor:
        return torch.tensor([self.script.logits(text) for text in self.texts])


def prompts(texts: list[list[int]], limits: list[int]) -> Prompts:
    width = max(len(text) for text in texts)
    gaps = [width - len(text) for text in texts]
    tokens = torch.tensor([[0] * gap + text for gap, text in zip(gaps, texts, strict=True)])
    places = (torch.arange(width) - torch.tensor(gaps)[:, None]).clamp(min=-1)
    return Prompts(texts, tokens, places, torch.tensor(limits))


def search(
    script: Script, texts: list[list[int]], limit: int, static: bool = False, **fields: Any
) -> list[list[Hypothesis]]:
    config = GenerateConfig(max_new_tokens=limit, **fields)
    return BeamSearch(ScriptEngine(script, static), config, script.eos_id).run(prompts(texts, [limit] * len(texts)))


@dataclass
class _Group:
    beams: list[tuple[tuple[int, ...], float]]
    pool: list[tuple[bool, float, tuple[int, ...]]] = field(default_factory=list)
    open: bool = True


def by_hand(script: Script, prompt: list[int], limit: int, **fields: Any) -> list[tuple[tuple[int, ...], float]]:
    """The same search told in lists: (new tokens, score), best first."""
    config = GenerateConfig(max_new_tokens=limit, **fields)
    size, start = config.beam // config.groups, tuple(prompt)
    groups = [_Group([((), 0.0)]) for _ in range(config.groups)]
    for n_new in range(1, limit + 1):
        taken: list[int] = []
        for group in groups:
            options = []
            for text, score in group.beams:
                for token, log_prob in enumerate(script.log_probs(start + text)):
                    price = config.diversity_penalty * taken.count(token)
                    options.append((score + log_prob - price, score + log_prob, (*text, token)))
            options.sort(reverse=True)
            ranked = options[: size * (2 + len(config.stop))]
            for _, score, text in ranked[:size]:
                if group.open and (_ends(text, script, config) or n_new == limit):
                    first = config.ended_first and _ends(text, script, config)
                    group.pool.append((first, score / config.length_penalty_at(n_new), text))
            group.pool = sorted(group.pool, reverse=True)[:size]
            group.beams = [(text, score) for _, score, text in ranked if not _ends(text, script, config)][:size]
            if group.open:
                taken += [text[-1] for text, _ in group.beams]
                taken += [text[-1] for _, _, text in ranked[:size] if _ends(text, script, config)]
            group.open = group.open and n_new < limit and _worth_it(group, n_new, limit, size, config)
        if not any(group.open for group in groups):
            break
    found = sorted((entry for group in groups for entry in group.pool), reverse=True)
    return [(text, score) for _, score, text in found[: config.n_best]]


def _ends(text: tuple[int, ...], script: Script, config: GenerateConfig) -> bool:
    return text[-1] == script.eos_id or any(text[-len(stop) :] == stop for stop in config.stop)


def _worth_it(group: _Group, n_new: int, limit: int, size: int, config: GenerateConfig) -> bool:
    if len(group.pool) < size:
        return True
    if config.early_stopping is True:
        return False
    length = limit if config.early_stopping == "never" and config.length_penalty > 0 else n_new
    best = max((score for _, score in group.beams), default=-math.inf)
    return best / config.length_penalty_at(length) > group.pool[-1][1]
