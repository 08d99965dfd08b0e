"""From a prompt, or a source, to texts: ``generate``, and ``stream_tokens`` for one text as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Model
from .beam import Found, Search, Step
from .config import GenerateConfig
from .cuda_graph import walk_ahead
from .ending import Finish, finish_of
from .prompts import Prompts, Rows, angles_by_length
from .speculative import Drafted, Guesser, Speculation, check_draft
from .start import Given, begin, read, start
from .stop import StopStrings
from .walk import Chosen

_READ_ALONG = 8  # tokens that captured steps run ahead of whoever reads a stream


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
    steps: list[Step] | None = None
    """Of a beam search, all that it kept at each step: also the texts that it gave up on later."""
    drafted: Drafted | None = None
    """What a draft model was worth, where one helped."""

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
    strings: StopStrings | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> Generated:
    """Texts that follow a prompt, or that a model with an encoder writes about a source; for one or for several.

    inputs  token ids, a list or tensor, or several; pixels (B, C, height, width) or regions (B, R, d_region) where
            the encoder reads those
    keep    (B, T), which ids of a padded tensor are real; lists are simply of different lengths
    target  beside an encoder: how the texts begin after bos_id, one for all or one for each source
    strings what ends a text, as text
    draft   a small model of the same tokens that guesses draft_tokens at a time: the same texts, sooner (greedy alone)
    fields  those of GenerateConfig, instead of a config or on top of it
    No text depends on those beside it.
    """
    config = config_of(config, fields)
    if draft is not None:
        check_draft(model, draft, config, draft_tokens)
    with at_rest(model, *([] if draft is None else [draft])):
        given = read(model, inputs, config, target=target, keep=keep)
        groups = _together(model, given) if draft is None else [[index] for index in range(len(given.rows))]
        parts = []
        for index in groups:
            some = given.some(index)
            if draft is None:
                parts.append((index, _texts(model, some, config, strings)))
            else:
                speculation, prompts = _speculation(model, draft, some, config, strings, draft_tokens)
                hypotheses = _walked(speculation.walk(prompts), 1, config)
                parts.append((index, Generated(prompts.rows, hypotheses, drafted=speculation.drafted)))
    return parts[0][1] if len(parts) == 1 else _joined(len(given.rows), parts)


def _texts(model: Model, given: Given, config: GenerateConfig, strings: StopStrings | None) -> Generated:
    eos_id = model.config.eos_id
    engine, prompts = start(model, given, config)
    if config.beam == 1:
        steps = walk_ahead(engine, prompts, config, eos_id, strings)
        return Generated(prompts.rows, _walked(steps, len(prompts), config))
    search = Search(engine, config, eos_id, strings)
    found = search.run(prompts)
    hypotheses = [[_hypothesis(text, config) for text in texts] for texts in found]
    n_steps = max(len(text.tokens) for texts in found for text in texts)
    return Generated(prompts.rows, hypotheses, search.parents[:n_steps], search.steps)


def _speculation(
    model: Model, draft: Model, given: Given, config: GenerateConfig, strings: StopStrings | None, n_tokens: int
) -> tuple[Speculation, Prompts]:
    engine, prompts = start(model, given, config)
    guesser = Guesser(begin(draft, given), draft, config, n_tokens)
    return Speculation(engine, guesser, config, model.config.eos_id, strings), prompts


def _together(model: Model, given: Given) -> list[list[int]]:
    """Which texts can be written side by side: all, unless the model turns by angles that follow the longest text."""
    if not angles_by_length(model.config):
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
    steps = (
        None if parents is None else [_renumbered(step, index) for index, part in parts for step in part.steps or ()]
    )
    counts = [part.drafted for _, part in parts if part.drafted is not None]
    drafted = sum(counts, Drafted()) if counts else None
    rows, texts = [part.prompts[row] for part, row in order], [part.hypotheses[row] for part, row in order]
    return Generated(rows, texts, parents, steps or None, drafted)


def _renumbered(step: Step, index: list[int]) -> Step:
    return step._replace(prompt=torch.tensor(index, device=step.prompt.device)[step.prompt])


def stream_tokens(
    model: Model,
    inputs: Rows,
    config: GenerateConfig | None = None,
    *,
    target: Rows | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> Iterator[int]:
    """The tokens of one text as they are chosen, its end included; drop the iterator to stop."""
    config = config_of(config, fields)
    if config.beam > 1 or config.n_best > 1:
        name = "beam" if config.beam > 1 else "n_best"
        raise ValueError(f"{name}={getattr(config, name)} has no text before all is done; a stream needs {name}=1")
    if draft is not None:
        check_draft(model, draft, config, draft_tokens)
    models = [model] if draft is None else [model, draft]
    with at_rest(*models):
        given = read(model, inputs, config, target=target)
        if len(given.rows) != 1:
            raise ValueError(f"a stream is one text, but {len(given.rows)} were asked for")
        if draft is None:
            engine, prompts = start(model, given, config)
            steps = walk_ahead(engine, prompts, config, model.config.eos_id, ahead=_READ_ALONG)
        else:
            speculation, prompts = _speculation(model, draft, given, config, None, draft_tokens)
            steps = speculation.walk(prompts)
    return _streamed(models, steps)


def _streamed(models: list[Model], steps: Iterator[Chosen]) -> Iterator[int]:
    while True:
        with at_rest(*models):  # only while they work: between two tokens a model is its owner's
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
def at_rest(*models: Model) -> Iterator[None]:
    """Without gradients and dropout; afterwards every part is as it was."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _walked(walked: Iterable[Chosen], n_prompts: int, config: GenerateConfig) -> list[list[Hypothesis]]:
    """Greedy or drawn texts, each prompt's best first."""
    steps = list(walked)
    copies = config.n_best
    rows, *chosen = (torch.cat(parts).cpu() for parts in zip(*steps, strict=True))
    order, counts = rows.argsort(stable=True), rows.bincount(minlength=n_prompts * copies).tolist()
    made = []
    for tokens, log_probs, codes in zip(*(x[order].split(counts) for x in chosen), strict=True):
        n = len(tokens)
        score = float(log_probs.double().sum()) / config.penalty(n)
        made.append(_hypothesis(Found(tokens.tolist(), [0] * n, score, int(codes[-1])), config))
    groups = [made[start : start + copies] for start in range(0, len(made), copies)]
    return [sorted(group, key=lambda text: text.score, reverse=True) for group in groups]


def _hypothesis(text: Found, config: GenerateConfig) -> Hypothesis:
    finish, n_ending = finish_of(text.code, config)
    return Hypothesis(text.tokens, text.score, finish, n_ending, text.beams)
