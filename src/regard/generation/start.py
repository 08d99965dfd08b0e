"""Before the first token: what was given is checked against the model, and the encoder, if there is one, runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..models import Decoder, Model
from .config import GenerateConfig
from .cuda_graph import GraphedEngine, can_capture
from .engine import CacheName, Engine, engine_for
from .prompts import Prompts, Rows, prompts_of, rows_of, side_by_side, sources_of


@dataclass(frozen=True)
class Given:
    """What texts are to follow: prompts, or the beginnings of targets and their sources."""

    rows: list[list[int]]
    sources: list[Tensor] | None

    def some(self, index: list[int]) -> Given:
        return Given([self.rows[i] for i in index], None if self.sources is None else [self.sources[i] for i in index])


def read(
    model: Model, inputs: Rows, config: GenerateConfig, *, target: Rows | None = None, keep: Tensor | None = None
) -> Given:
    """What was given, one item a text, checked."""
    ours = model.config
    _check_tokens(config, ours.output_vocab_size)
    if isinstance(model, Decoder):
        if target is not None:
            raise ValueError("target is for models with an encoder; a decoder's prompt is all there is")
        return Given(_begun(rows_of(inputs, keep), ours.bos_id, "prompt"), None)
    if ours.architecture == "encoder":
        raise TypeError("a model with architecture='encoder' writes no text")
    sources = sources_of(inputs, keep, ours, config.truncate)
    rows = _begun([[]] if target is None else rows_of(target, name="target"), ours.bos_id, "target")
    rows = [row if ours.bos_id in (None, row[0]) else [ours.bos_id, *row] for row in rows]
    rows = rows * len(sources) if len(rows) == 1 else rows
    if len(rows) != len(sources):
        raise ValueError(f"there are {len(rows)} targets for {len(sources)} sources")
    return Given(rows, sources)


def start(model: Model, given: Given, config: GenerateConfig) -> tuple[Engine, Prompts]:
    """Run the encoder, if there is one, and stand before the first token."""
    name = "prompt" if given.sources is None else "target"
    prompts = prompts_of(given.rows, model.config, config, model.device, name)
    return begin(model, given, config.cache), prompts


def begin(model: Model, given: Given, cache: CacheName = "growing") -> Engine:
    """An engine that has read the sources, if there are any, and no token yet."""
    if cache == "static" and isinstance(model, Decoder) and can_capture(model):
        return GraphedEngine(model)
    return engine_for(model, None if given.sources is None else side_by_side(given.sources, model), cache)


def _begun(rows: list[list[int]], bos_id: int | None, name: str) -> list[list[int]]:
    """An empty prompt begins with bos_id."""
    if not rows:
        raise ValueError(f"there is no {name}: the batch is empty")
    for index, row in enumerate(rows):
        if not row and bos_id is None:
            raise ValueError(f"{name} {index} is empty, and this model has no bos_id to begin with")
    return rows if bos_id is None else [row or [bos_id] for row in rows]


def _check_tokens(config: GenerateConfig, vocab_size: int) -> None:
    if config.beam > vocab_size:
        raise ValueError(f"beam={config.beam} is larger than the vocabulary of {vocab_size} tokens")
    stops = [token for stop in config.stop for token in stop]
    for name, tokens in (("stop", stops), ("prefix", config.prefix), ("logit_bias", config.logit_bias)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                allowed = f"the vocabulary has {vocab_size}: 0 to {vocab_size - 1}"
                raise ValueError(f"{name} holds the unknown token {token}; {allowed}")
