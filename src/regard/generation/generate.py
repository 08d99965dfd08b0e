"""From a prompt, or a source, to texts: ``generate``, and ``stream_tokens`` for one text as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Decoder, Model
from .beam import Found, Search
from .config import GenerateConfig
from .ending import GOING_ON, Finish, finish_of
from .engine import Engine, engine_for
from .prompts import Prompts, Rows, prompts_of, rows_of, sources_of
from .walk import walk


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
        engine, prompts = start(model, inputs, config, target=target, keep=keep)
        if config.beam > 1:
            search = Search(engine, config, model.config.eos_id)
            found = search.run(prompts)
            hypotheses = [[_hypothesis(text, config) for text in texts] for texts in found]
            n_steps = max(len(text.tokens) for texts in found for text in texts)
            return Generated(prompts.rows, hypotheses, search.parents[:n_steps])
        return Generated(prompts.rows, _walked(engine, prompts, config, model.config.eos_id))


def stream_tokens(
    model: Model, inputs: Rows, config: GenerateConfig | None = None, *, target: Rows | None = None, **fields: Any
) -> Iterator[int]:
    """The tokens of one text as they are chosen, its end included; drop the iterator to stop."""
    config = config_of(config, fields)
    if config.beam > 1 or config.n_best > 1:
        name = "beam" if config.beam > 1 else "n_best"
        raise ValueError(f"{name}={getattr(config, name)} has no text before all is done; a stream needs {name}=1")
    with _at_rest(model):
        engine, prompts = start(model, inputs, config, target=target)
    if len(prompts) != 1:
        raise ValueError(f"a stream is one text, but {len(prompts)} were asked for")
    return _streamed(model, engine, prompts, config)


def _streamed(model: Model, engine: Engine, prompts: Prompts, config: GenerateConfig) -> Iterator[int]:
    steps = walk(engine, prompts, config, model.config.eos_id)
    while True:
        with _at_rest(model):  # only while it works: between two tokens the model is its owner's
            chosen = next(steps, None)
        if chosen is None:
            return
        yield int(chosen.tokens[0])


def start(
    model: Model, inputs: Rows, config: GenerateConfig, *, target: Rows | None = None, keep: Tensor | None = None
) -> tuple[Engine, Prompts]:
    """Check everything, run the encoder if there is one, and stand before the first token."""
    ours, static = model.config, config.cache == "static"
    _check_tokens(config, ours.output_vocab_size)
    if isinstance(model, Decoder):
        if target is not None:
            raise ValueError("target is for models with an encoder; a decoder's prompt is all there is")
        rows = _begun(rows_of(inputs, keep), ours.bos_id, "prompt")
        return engine_for(model, None, static), prompts_of(rows, ours, config, model.device)
    if ours.architecture == "encoder":
        raise TypeError("a model with architecture='encoder' writes no text")
    sources = sources_of(inputs, keep, ours, config.truncate, model.device)
    rows = _begun([[]] if target is None else rows_of(target, name="target"), ours.bos_id, "target")
    rows = [row if ours.bos_id in (None, row[0]) else [ours.bos_id, *row] for row in rows]
    rows = rows * len(sources) if len(rows) == 1 else rows
    if len(rows) != len(sources):
        raise ValueError(f"there are {len(rows)} targets for {len(sources)} sources")
    prompts = prompts_of(rows, ours, config, model.device, "target")
    return engine_for(model, sources, static), prompts


def _begun(rows: list[list[int]], bos_id: int | None, name: str) -> list[list[int]]:
    """An empty prompt begins with bos_id."""
    if not rows:
        raise ValueError(f"there is no {name}: the batch is empty")
    for index, row in enumerate(rows):
        if not row and bos_id is None:
            raise ValueError(f"{name} {index} is empty, and this model has no bos_id to begin with")
    return rows if bos_id is None else [row or [bos_id] for row in rows]


def config_of(config: GenerateConfig | None, fields: dict[str, Any]) -> GenerateConfig:
    """A config, its fields, or both."""
    if config is None:
        return GenerateConfig(**fields)
    return config.with_(**fields) if fields else config


def _check_tokens(config: GenerateConfig, vocab_size: int) -> None:
    if config.beam > vocab_size:
        raise ValueError(f"beam={config.beam} is larger than the vocabulary of {vocab_size} tokens")
    stops = [token for stop in config.stop for token in stop]
    for name, tokens in (("stop", stops), ("prefix", config.prefix), ("logit_bias", config.logit_bias)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                allowed = f"the vocabulary has {vocab_size}: 0 to {vocab_size - 1}"
                raise ValueError(f"{name} holds the unknown token {token}; {allowed}")


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
