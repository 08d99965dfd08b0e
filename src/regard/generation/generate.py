"""From prompts or sources to new tokens: ``generate``, and ``stream_tokens`` for one text as it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BadOutput
from ..models import Model
from .beam_search import NO_TEXT, BeamSearch, BeamStep, Hypothesis
from .cached_engine import CacheName, DecodingEngine, check_logits, plain_engine
from .captured_search import run_captured
from .constrained_search import ConstrainedSearch, Term
from .cuda_graph import CudaGraphEngine, can_capture, graph_decode_loop
from .generation_config import GenerateConfig
from .prompts import ModelInputs, Prompts, Rows, pad_prompts, pad_sources, read_inputs, rope_depends_on_length
from .sampling import ChosenTokens
from .speculative import DraftStatistics, SpeculativeDecoder, check_draft
from .stop_conditions import StopStrings
from .text_codec import merge_config


@dataclass(frozen=True, eq=False)
class Generated:
    """The texts of a batch: ``hypotheses[prompt]``, best first."""

    prompts: list[list[int]]  # the prompts as the model read them
    hypotheses: list[list[Hypothesis]]
    parents: Tensor | None = None
    """Beam search only, (steps, prompts, beam): beam k after step t continues beam parents[t, prompt, k].

    With cache="static" a beam is in row prompt · beam + k of the model's batch at every step, so recorded activations
    can be followed along a hypothesis: the query of its token t is in row prompt · beam + beams[t] of call t.
    """
    steps: list[BeamStep] | None = None  # beam search only: the result of each step, including texts dropped later
    drafted: DraftStatistics | None = None  # how many tokens of a draft model were accepted

    def __len__(self) -> int:
        return len(self.hypotheses)

    @property
    def best(self) -> list[Hypothesis]:
        return [texts[0] for texts in self.hypotheses]

    @property
    def tokens(self) -> list[list[int]]:
        """Each prompt's best text, without the end token or stop sequence."""
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
    padding_mask: Tensor | None = None,
    strings: StopStrings | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    terms: Sequence[Sequence[Term]] | None = None,
    in_word: Callable[[int], bool] = lambda token: False,
    **fields: Any,
) -> Generated:
    """Continue one or several prompts, or, with an encoder-decoder, write a target for one or several sources.

    inputs  token ids, as a list or tensor, of one text or several; for an image encoder pixels (B, C, height, width)
            or regions (B, R, d_region)
    padding_mask    (B, T), True at the real tokens of a padded tensor; lists may differ in length
    target  encoder-decoder: the beginning of the texts after bos_id, one for all or one per source
    strings strings that end a text
    draft   a smaller model with the same tokens that proposes draft_tokens at a time: the same texts, sooner (greedy
            only)
    terms   for each prompt, the terms that its text must contain (greedy or beam search, without groups);
            ``in_word(token)`` says whether a word may continue after the token
    fields  fields of GenerateConfig, instead of a config or on top of it
    A text does not depend on the others in its batch.
    """
    config = merge_config(model, config, fields)
    if draft is not None:
        check_draft(model, draft, config, draft_tokens)
    with inference(model, draft):
        checked = read_inputs(model, inputs, config, target=target, padding_mask=padding_mask)
        groups = _independent_groups(model, checked, one_by_one=draft is not None)
        parts = []
        for group in groups:
            selected = checked.select(group)
            if terms is not None or draft is None:
                group_terms = None if terms is None else [terms[index] for index in group]
                parts.append(_generate_group(model, selected, config, strings, group_terms, in_word))
            else:
                decoder, prompts = _speculative_decoder(model, draft, selected, config, strings, draft_tokens)
                hypotheses = _collect_hypotheses(decoder.decode(prompts), 1, config)
                parts.append(Generated(prompts.rows, hypotheses, drafted=decoder.statistics))
    return parts[0] if len(parts) == 1 else _join_groups(groups, parts)


def prepare(
    model: Model, inputs: ModelInputs, config: GenerateConfig, may_capture: bool = True
) -> tuple[DecodingEngine, Prompts]:
    """Pad the prompts and make an engine (``new_engine``), which runs the encoder if there is one."""
    name = "prompt" if inputs.sources is None else "target"
    prompts = pad_prompts(inputs.rows, model.config, config, model.device, name)
    return new_engine(model, inputs, config.cache, may_capture), prompts


def new_engine(
    model: Model, inputs: ModelInputs, cache: CacheName = "growing", may_capture: bool = True
) -> DecodingEngine:
    """An engine that has encoded the sources, if there are any, and read no token yet.

    An engine with captured steps decodes one token of each text at a time and cannot remove any.
    """
    capture = may_capture and cache in ("growing", "static") and model.decodes_by_token and can_capture(model)
    sources = None if inputs.sources is None else pad_sources(inputs.sources, model)
    return (CudaGraphEngine if capture else plain_engine)(model, sources, cache)


def _generate_group(
    model: Model,
    inputs: ModelInputs,
    config: GenerateConfig,
    strings: StopStrings | None,
    terms: Sequence[Sequence[Term]] | None,
    in_word: Callable[[int], bool],
) -> Generated:
    eos_id = model.config.eos_id
    engine, prompts = prepare(model, inputs, config)
    if config.beam == 1 and terms is None:
        steps = graph_decode_loop(engine, prompts, config, eos_id, strings)
        return Generated(prompts.rows, _collect_hypotheses(steps, len(prompts), config))
    if terms is None:
        search = BeamSearch(engine, config, eos_id, strings)
    else:
        search = ConstrainedSearch(engine, config, eos_id, terms, strings, in_word)
    hypotheses = run_captured(search, prompts) or search.run(prompts)
    if not all(hypotheses):
        raise BadOutput(NO_TEXT)
    n_steps = max(len(text.tokens) for texts in hypotheses for text in texts)
    return Generated(prompts.rows, hypotheses, search.parents[:n_steps], search.steps)


def _speculative_decoder(
    model: Model, draft: Model, inputs: ModelInputs, config: GenerateConfig, strings: StopStrings | None, n_tokens: int
) -> tuple[SpeculativeDecoder, Prompts]:
    engine, prompts = prepare(model, inputs, config, may_capture=False)
    draft_engine = new_engine(draft, inputs, may_capture=False)
    return SpeculativeDecoder(engine, draft_engine, n_tokens, config, strings), prompts


def _independent_groups(model: Model, inputs: ModelInputs, one_by_one: bool) -> list[list[int]]:
    """Which texts can share a batch: all, or, if rotary angles depend on the longest text, those of equal length."""
    if one_by_one:
        return [[index] for index in range(len(inputs.rows))]
    if not rope_depends_on_length(model.config):
        return [list(range(len(inputs.rows)))]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(inputs.rows):
        n_source = 0 if inputs.sources is None else len(inputs.sources[index])
        groups.setdefault((len(row), n_source), []).append(index)
    return list(groups.values())


def _join_groups(groups: list[list[int]], parts: list[Generated]) -> Generated:
    """Several groups as one batch, in the order of the prompts."""
    by_prompt = {
        index: (part, row) for group, part in zip(groups, parts, strict=True) for row, index in enumerate(group)
    }
    order = [by_prompt[index] for index in sorted(by_prompt)]
    parents, steps = None, None
    if all(part.parents is not None for part in parts):
        columns = [part.parents[:, row] for part, row in order if part.parents is not None]  # each (steps, beam)
        parents = torch.nn.utils.rnn.pad_sequence(columns).contiguous()
        steps = []
        for group, part in zip(groups, parts, strict=True):
            numbers = torch.tensor(group, device=parents.device)
            steps += [step._replace(prompt=numbers[step.prompt]) for step in part.steps or ()]
    counts = [part.drafted for part in parts if part.drafted is not None]
    drafted = sum(counts, DraftStatistics()) if counts else None
    rows, texts = [part.prompts[row] for part, row in order], [part.hypotheses[row] for part, row in order]
    return Generated(rows, texts, parents, steps or None, drafted)


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
    """The tokens of one text as they are chosen, including the end token; drop the iterator to stop."""
    config = merge_config(model, config, fields)
    if config.beam > 1 or config.n_best > 1:
        name = "beam" if config.beam > 1 else "n_best"
        raise ValueError(f"{name}={getattr(config, name)} has no text before all is done; a stream needs {name}=1")
    if draft is not None:
        check_draft(model, draft, config, draft_tokens)
    with inference(model, draft):
        checked = read_inputs(model, inputs, config, target=target)
        if len(checked.rows) != 1:
            raise ValueError(f"a stream is one text, got {len(checked.rows)}")
        if draft is None:
            engine, prompts = prepare(model, checked, config)
            steps = graph_decode_loop(engine, prompts, config, model.config.eos_id)
        else:
            decoder, prompts = _speculative_decoder(model, draft, checked, config, None, draft_tokens)
            steps = decoder.decode(prompts)
    return _next_tokens(steps, model, draft)


def _next_tokens(steps: Iterator[ChosenTokens], *models: Model | None) -> Iterator[int]:
    while True:
        with inference(*models):  # not around the yield: the caller may train between two tokens
            chosen = next(steps, None)
        if chosen is None:
            return
        check_logits(chosen.log_probs)
        yield int(chosen.tokens[0])


@contextmanager
def inference(*models: Model | None) -> Iterator[None]:
    """No gradients, and every module in eval mode; restores each module's mode afterwards."""
    training = [module for model in models if model is not None for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _collect_hypotheses(
    steps: Iterable[ChosenTokens], n_prompts: int, config: GenerateConfig
) -> list[list[Hypothesis]]:
    """The greedy or sampled texts of each prompt, best first."""
    copies = config.n_best
    rows, *chosen = (torch.cat(parts).cpu() for parts in zip(*steps, strict=True))
    check_logits(chosen[1])
    order, counts = rows.argsort(stable=True), rows.bincount(minlength=n_prompts * copies).tolist()
    hypotheses = []
    for tokens, log_probs, codes in zip(*(x[order].split(counts) for x in chosen), strict=True):
        n = len(tokens)
        score = float(log_probs.double().sum()) / config.length_penalty_at(n)
        hypotheses.append(Hypothesis.of(tokens.tolist(), [0] * n, score, int(codes[-1]), config))
    groups = [hypotheses[start : start + copies] for start in range(0, len(hypotheses), copies)]
    return [sorted(group, key=lambda text: text.score, reverse=True) for group in groups]
