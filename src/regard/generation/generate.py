"""From a prompt, or a source, to texts: ``generate``, and ``stream_tokens`` for one text as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Model
from .beam import Found, Search
from .config import GenerateConfig
from .ending import GOING_ON, Finish, finish_of
from .engine import Engine
from .prompts import Prompts, Rows
from .start import Given, read, start
from .walk import walk

_ANGLES_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Hypothesis:
    """One text: new tokens only, those that end it included."""

    tokens: list[int]
    score: float
    """log P / penalty(length); of a beam after the filters, otherwise by the model alone."""
    finish: Finish
    """The model's end token, a stop sequence, or no room."""
    n_ending: int
    """How many of the last tokens are the end token or the stop sequence."""
    beams: list[int]
    """For each token the beam, 0 … beam - 1, whose logits it was chosen from."""

    @property
    def content(self) -> list[int]:
        """The tokens without those that only say that it ends."""
        return self.tokens[: len(self.tokens) - self.n_ending]


@dataclass(frozen=True, eq=False)
class Generated:
    """The texts of a batch: ``hypotheses[prompt]`` best first."""

    prompts: list[list[int]]
    """What was continued, as the model saw it."""
    hypotheses: list[list[Hypothesis]]
    parents: Tensor | None = None
    """Of a beam search, (steps, prompts, beam): beam k after step t goes on from beam parents[t, prompt, k] before it.

    With cache="static" the model's batch row of a beam is prompt · beam + k at every step, so that what a recorder saw
    can be followed along a hypothesis: the query of its token t is in row prompt · beam + beams[t] of call t.
    """

    def __len__(self) -> int:
        return len(self.hypotheses)

    @property
    def best(self) -> list[Hypothesis]:
        return [texts[0] for texts in self.hypotheses]

    @property
    def tokens(self) -> list[list[int]]:
        """Each prompt's best text, without what only ends it."""
        return [text.content for text in self.best]

    @property
    def scores(self) -> list[float]:
        return [text.score for text in self.best]


def generate(
    model: Model,
    inputs: Rows,
    config: GenerateConfig | None = None,
    *,
    target: Rows | None = None,
    keep: Tensor | None = None,
    **fields: Any,
) -> Generated:
    """Texts that follow a prompt, or that a model with an encoder writes about a source; for one or for several.

    inputs  token ids, a list or tensor, or several; pixels (B, C, height, width) or regions (B, R, d_region) where
            the encoder reads those
    keep    (B, T), which ids of a padded tensor are real; lists are simply of different lengths
    target  beside an encoder: how the texts begin after bos_id, one for all or one for each source
    fields  those of GenerateConfig, instead of a config or on top of it
    No text depends on those beside it.
    """
    config = config_of(config, fields)
    with _at_rest(model):
        given = read(model, inputs, config, target=target, keep=keep)
        parts = [(index, _texts(model, given.some(index), config)) for index in _together(model, given)]
    return parts[0][1] if len(parts) == 1 else _joined(len(given.rows), parts)


def _texts(model: Model, given: Given, config: GenerateConfig) -> Generated:
    eos_id = model.config.eos_id
    engine, prompts = start(model, given, config)
    if config.beam == 1:
        return Generated(prompts.rows, _walked(engine, prompts, config, eos_id))
    search = Search(engine, config, eos_id)
    found = search.run(prompts)
    hypotheses = [[_hypothesis(text, config) for text in texts] for texts in found]
    n_steps = max(len(text.tokens) for texts in found for text in texts)
    return Generated(prompts.rows, hypotheses, search.parents[:n_steps])


def _together(model: Model, given: Given) -> list[list[int]]:
    """Which texts can be written side by side: all, unless the model turns by angles that follow the longest text."""
    scaling = model.config.rope_scaling
    if scaling is None or scaling.kind not in _ANGLES_BY_LENGTH:
        return [list(range(len(given.rows)))]
    alike: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(given.rows):
        n_source = 0 if given.sources is None else len(given.sources[index])
        alike.setdefault((len(row), n_source), []).append(index)
    return list(alike.values())


def _joined(n_prompts: int, parts: list[tuple[list[int], Generated]]) -> Generated:
    """Several batches as one, each prompt in its place."""
    place = {index: (part, row) for indices, part in parts for row, index in enumerate(indices)}
    order = [place[index] for index in range(n_prompts)]
    parents = None
    if all(part.parents is not None for _, part in parts):
        columns = [part.parents[:, row] for part, row in order if part.parents is not None]  # each (steps, beam)
        parents = torch.nn.utils.rnn.pad_sequence(columns).contiguous()
    return Generated([part.prompts[row] for part, row in order], [part.hypotheses[row] for part, row in order], parents)


def stream_tokens(
    model: Model, inputs: Rows, config: GenerateConfig | None = None, *, target: Rows | None = None, **fields: Any
) -> Iterator[int]:
    """The tokens of one text as they are chosen, its end included; drop the iterator to stop."""
    config = config_of(config, fields)
    if config.beam > 1 or config.n_best > 1:
        name = "beam" if config.beam > 1 else "n_best"
        raise ValueError(f"{name}={getattr(config, name)} has no text before all is done; a stream needs {name}=1")
    with _at_rest(model):
        given = read(model, inputs, config, target=target)
        if len(given.rows) != 1:
            raise ValueError(f"a stream is one text, but {len(given.rows)} were asked for")
        engine, prompts = start(model, given, config)
    return _streamed(model, engine, prompts, config)


def _streamed(model: Model, engine: Engine, prompts: Prompts, config: GenerateConfig) -> Iterator[int]:
    steps = walk(engine, prompts, config, model.config.eos_id)
    while True:
        with _at_rest(model):  # only while it works: between two tokens the model is its owner's
            chosen = next(steps, None)
        if chosen is None:
            return
        yield int(chosen.tokens[0])


def config_of(config: GenerateConfig | None, fields: dict[str, Any]) -> GenerateConfig:
    """A config, its fields, or both."""
    if config is None:
        return GenerateConfig(**fields)
    return config.with_(**fields) if fields else config


@contextmanager
def _at_rest(model: Model) -> Iterator[None]:
    """Without gradients and dropout; afterwards every part is as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _walked(engine: Engine, prompts: Prompts, config: GenerateConfig, eos_id: int | None) -> list[list[Hypothesis]]:
    """Greedy or drawn texts, each prompt's best first."""
    steps = list(walk(engine, prompts, config, eos_id))
    copies = config.n_best
    texts = [Found([], [], 0.0, GOING_ON) for _ in range(len(prompts) * copies)]
    for row, token, log_prob, code in zip(
        *(torch.cat(parts).tolist() for parts in zip(*steps, strict=True)), strict=True
    ):
        before = texts[row]
        before.tokens.append(token)
        before.beams.append(0)
        texts[row] = before._replace(score=before.score + log_prob, code=code)
    made = [_hypothesis(text._replace(score=text.score / config.penalty(len(text.tokens))), config) for text in texts]
    groups = [made[start : start + copies] for start in range(0, len(made), copies)]
    return [sorted(group, key=lambda text: text.score, reverse=True) for group in groups]


def _hypothesis(text: Found, config: GenerateConfig) -> Hypothesis:
    finish, n_ending = finish_of(text.code, config)
    return Hypothesis(text.tokens, text.score, finish, n_ending, text.beams)
