"""From logits to the next token: filters on scores (R, V), sampling, and the loop that decodes token by token.

``texts`` (R, L) are the tokens so far, including the prompt, with padding as -1. A filter forbids a token by setting
its score to -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.cancellation import check_cancelled
from ..foundation.device import widest_float
from .cached_engine import DecodingEngine
from .cpu_engine import accelerate
from .generation_config import GenerateConfig
from .prompts import Prompts
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes


class ChosenTokens(NamedTuple):
    """One decode step: for each unfinished text its number, its next token, and whether the token ends it."""

    rows: Tensor  # (n,) prompt · copies + copy
    tokens: Tensor  # (n,)
    log_probs: Tensor  # (n,) log P of the token by the model alone, before any filter
    codes: Tensor  # (n,) codes of ``stop_conditions``


class LogProb(NamedTuple):
    """log P of a token, and the likeliest tokens in its place with theirs."""

    value: float | None = None  # None: nothing precedes the token
    top: tuple[tuple[int, float], ...] = ()


def decode_loop(
    engine: DecodingEngine,
    prompts: Prompts,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
) -> Iterator[ChosenTokens]:
    """Greedy or sampled decoding of n_best texts per prompt, in one batch. Rows do not depend on each other."""
    copies = config.n_best
    rows = torch.arange(len(prompts) * copies, device=prompts.tokens.device)
    limit, texts = prompts.limit.repeat_interleave(copies), prompts.texts.repeat_interleave(copies, 0)
    draws = uniform_draws(config, prompts.limit, copies).to(rows.device) if config.samples else None
    done = torch.zeros_like(rows, dtype=torch.bool)
    engine = accelerate(engine)
    logits = engine.prefill(prompts, copies)
    for step in range(int(limit.max())):
        check_cancelled()
        scores = filter_logits(logits, texts, step, config, eos_id)
        tokens = scores.argmax(-1) if draws is None else draw_tokens(scores, draws[rows, step])
        codes = stop_codes(tokens, texts, step + 1, config, eos_id, strings)
        codes = torch.where((codes == GOING_ON) & (step + 1 >= limit), LENGTH, codes)
        chosen = ChosenTokens(rows, tokens, token_log_probs(logits, tokens), codes)
        yield ChosenTokens(*(x[~done] for x in chosen)) if engine.static else chosen  # a static engine keeps done rows
        texts = torch.cat([texts, tokens[:, None]], dim=1)
        done = done | (codes != GOING_ON)
        if done.all():
            return
        if not engine.static and done.any():
            active = (~done).nonzero()[:, 0]
            engine.select(active)
            rows, limit, texts, tokens, done = (x[active] for x in (rows, limit, texts, tokens, done))
        logits = engine.decode_one_token(tokens)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log P (R,) of tokens (R,) under logits (R, V)."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def log_probs_of(logits: Tensor, tokens: Tensor, n_top: int) -> list[LogProb]:
    """log P of tokens (R,) and of the ``n_top`` likeliest ones under logits (R, V)."""
    scores = logits.log_softmax(-1)
    own, best = scores.gather(1, tokens[:, None])[:, 0], scores.topk(min(n_top, scores.shape[1]))
    rows = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [LogProb(value, tuple(zip(*top, strict=True))) for value, *top in rows]


def filter_logits(
    scores: Tensor,
    texts: Tensor,
    step: int | Tensor,
    config: GenerateConfig,
    eos_id: int | None,
    in_place: bool = False,
) -> Tensor:
    """Apply all filters to float32 scores (R, V) of new token number ``step``, in the order of transformers.

    In a captured step ``step`` is a tensor, (1,) or (R,), and there is no prefix. ``in_place``: scores may be
    overwritten.
    """
    if config.logit_bias:
        scores = scores + bias_vector(config.logit_bias, scores)
    if config.repetition_penalty != 1.0:
        scores = repetition_penalty(scores, texts, config.repetition_penalty)
    if config.no_repeat_ngram:
        scores = no_repeat_ngram(scores, texts, config.no_repeat_ngram)
    if eos_id is not None and isinstance(step, Tensor) and config.min_new_tokens:
        early = (step < config.min_new_tokens)[:, None]
        scores = torch.where(early, forbid_token(scores, eos_id), scores)
    elif eos_id is not None and not isinstance(step, Tensor) and step < config.min_new_tokens:
        scores = forbid_token(scores, eos_id, in_place)
    if not isinstance(step, Tensor) and step < len(config.prefix):
        scores = force_token(scores, config.prefix[step])
    if config.temperature is not None:
        scores = scores / config.temperature
    if config.top_k is not None:
        scores = top_k(scores, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        scores = top_p(scores, config.top_p)
    if config.min_p is not None:
        scores = min_p(scores, config.min_p)
    if not config.logit_bias and not config.no_repeat_ngram:
        return scores
    stuck = scores.amax(-1).isneginf()  # rows with every token forbidden: allow the end token
    if eos_id is not None:
        is_end = torch.arange(scores.shape[-1], device=scores.device) == eos_id
        return scores.masked_fill(stuck[:, None] & is_end, 0.0)
    if stuck.any():
        raise ValueError("no_repeat_ngram and logit_bias forbid every token, and this model has no eos_id to end with")
    return scores


def has_filters(config: GenerateConfig, step: int | Tensor) -> bool:
    """Whether ``filter_logits``, apart from sampling filters, changes the scores of new token number ``step``."""
    always = config.logit_bias or config.repetition_penalty != 1.0 or config.no_repeat_ngram
    n_early = max(config.min_new_tokens, len(config.prefix))  # steps at which the minimum or the prefix applies
    return bool(always) or (n_early > 0 if isinstance(step, Tensor) else step < n_early)


def reads_text(config: GenerateConfig) -> bool:
    """Whether a filter depends on the text so far or on its length."""
    return config.repetition_penalty != 1.0 or bool(config.prefix or config.no_repeat_ngram or config.min_new_tokens)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores, and any that equal the lowest of them."""
    last = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < last, -math.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the nucleus (Holtzman et al. 2020): drop the least likely tokens, up to a total probability of 1 - p."""
    ascending, order = scores.sort(dim=-1)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - p
    dropped[:, -1] = False  # rounding must not drop the most likely token
    return scores.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -math.inf)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one (Nguyen et al. 2024)."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def repetition_penalty(scores: Tensor, texts: Tensor, penalty: float) -> Tensor:
    """Scores s of tokens in the text become s / penalty if positive, else s · penalty (Keskar et al. 2019, §4.1)."""
    lower = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(_token_mask(texts, scores), lower, scores)


def no_repeat_ngram(scores: Tensor, texts: Tensor, n: int) -> Tensor:
    """Forbid every token that would complete an n-gram for the second time."""
    length = texts.shape[1]
    if length < n:
        return scores
    grams = texts.unfold(1, n, 1)  # (R, L - n + 1, n)
    last = texts[:, length - n + 1 :]
    repeats = (grams[..., :-1] == last[:, None]).all(-1)  # padding is only on the left: no n-gram with it repeats
    return scores.masked_fill(_token_mask(torch.where(repeats, grams[..., -1], -1), scores), -math.inf)


def forbid_token(scores: Tensor, token: int, in_place: bool = False) -> Tensor:
    """-inf for one token, such as the end token while a text is too short."""
    scores = scores if in_place else scores.clone()
    scores[:, token].fill_(-math.inf)
    return scores


def force_token(scores: Tensor, token: int) -> Tensor:
    """-inf for all tokens but one, which keeps its score, or gets 0 if another filter has forbidden it."""
    score = scores[:, token]
    forced = torch.full_like(scores, -math.inf)
    forced[:, token] = torch.where(score.isneginf(), 0.0, score)
    return forced


def bias_vector(logit_bias: dict[int, float], scores: Tensor) -> Tensor:
    """``logit_bias`` as a vector (V,), like a row of ``scores``."""
    bias = torch.zeros_like(scores[0])
    for token, value in logit_bias.items():
        bias[token : token + 1].fill_(value)  # filling a slice does not synchronise, so it can be captured
    return bias


def _token_mask(tokens: Tensor, scores: Tensor) -> Tensor:
    """Which tokens of the vocabulary are among ``tokens`` (R, n), as booleans (R, V); -1 is ignored."""
    n_tokens = scores.shape[-1]
    marks = torch.zeros(len(scores), n_tokens + 1, dtype=torch.bool, device=scores.device)
    return marks.scatter_(1, torch.where(tokens < 0, n_tokens, tokens), True)[:, :n_tokens]


def uniform_draws(config: GenerateConfig, limit: Tensor, n_copies: int) -> Tensor:
    """Uniform numbers in [0, 1), (B · copies, the largest limit), that depend only on the seed and the copy.

    ``limit`` (B,) is the maximum of new tokens of each prompt; max_new_tokens may be far larger.
    """
    n_prompts, n_steps = len(limit), int(limit.max())
    seeds = torch.randint(2**62, (n_prompts,)).tolist() if config.seed is None else [config.seed] * n_prompts
    rows = []
    for seed in seeds:
        for copy in range(n_copies):
            generator = torch.Generator().manual_seed((seed + copy * 0x9E3779B97F4A7C15) % 2**63)
            rows.append(torch.rand(n_steps, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def draw_tokens(scores: Tensor, draws: Tensor) -> Tensor:
    """Sample by the inverse CDF: the token (R,) at which the cumulative probability passes ``draws`` (R,)."""
    cumulative = scores.to(widest_float(scores.device)).softmax(-1).cumsum(-1)
    below_one = 1 - torch.finfo(cumulative.dtype).eps / 2  # in float32, a draw may round to 1, which no token passes
    thresholds = draws.to(cumulative).clamp(max=below_one)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp(max=scores.shape[1] - 1)  # NaN is passed by no token: keep the index in range
