"""From logits to the next token: filters, each a pure function on scores (R, V), and the draw.

``texts`` (R, L) are the tokens so far, prompt and all; -1 stands where there is none: padding counts for nothing.
A filter that forbids a token gives it -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import GenerateConfig


def temperature(scores: Tensor, t: float) -> Tensor:
    """Sharper below 1, flatter above."""
    return scores / t


def top_k(scores: Tensor, k: int) -> Tensor:
    """The k highest stay, and whatever equals the last of them."""
    last = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < last, -math.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """The nucleus stays (Holtzman et al. 2020): the unlikeliest go as long as together they have at most 1 - p."""
    rising, order = scores.sort(dim=-1)
    goes = rising.softmax(-1).cumsum(-1) <= 1 - p
    goes[:, -1] = False  # rounding must not take the likeliest
    return scores.masked_fill(torch.empty_like(goes).scatter_(1, order, goes), -math.inf)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Those at least p times as likely as the likeliest stay (Nguyen et al. 2024)."""
    chance = scores.softmax(-1)
    return scores.masked_fill(chance < p * chance.amax(-1, keepdim=True), -math.inf)


def repetition_penalty(scores: Tensor, texts: Tensor, penalty: float) -> Tensor:
    """Tokens of the text, once each: s / penalty if s is positive, else s · penalty (Keskar et al. 2019, §4.1)."""
    lower = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(_marked(texts, scores), lower, scores)


def no_repeat_ngram(scores: Tensor, texts: Tensor, n: int) -> Tensor:
    """No n tokens in a row occur twice: where the last n - 1 stood before, what followed them is forbidden."""
    length = texts.shape[1]
    if length < n:
        return scores
    grams = texts.unfold(1, n, 1)  # (R, L - n + 1, n)
    last = texts[:, length - n + 1 :]
    again = (grams[..., :-1] == last[:, None]).all(-1)  # -1 stands at the left alone: no run with it comes again
    return scores.masked_fill(_marked(torch.where(again, grams[..., -1], -1), scores), -math.inf)


def forbidden(scores: Tensor, token: int, in_place: bool = False) -> Tensor:
    """One token goes; the end token, while a text is too short."""
    scores = scores if in_place else scores.clone()
    scores[:, token].fill_(-math.inf)
    return scores


def forced(scores: Tensor, token: int) -> Tensor:
    """One token alone stays, with its score; with 0, where another filter had forbidden it."""
    own = scores[:, token]
    only = torch.full_like(scores, -math.inf)
    only[:, token] = torch.where(own.isneginf(), 0.0, own)
    return only


def bias_of(logit_bias: dict[int, float], like: Tensor) -> Tensor:
    """What is added to the scores (V,)."""
    bias = torch.zeros_like(like[0])
    for token, value in logit_bias.items():
        bias[token : token + 1].fill_(value)  # a filled slice asks nothing of the host, and can be captured
    return bias


def _marked(tokens: Tensor, scores: Tensor) -> Tensor:
    """Which tokens of the vocabulary are among ``tokens`` (R, n), as (R, V); -1 is none of them."""
    n_tokens = scores.shape[-1]
    marks = torch.zeros(len(scores), n_tokens + 1, dtype=torch.bool, device=scores.device)
    return marks.scatter_(1, torch.where(tokens < 0, n_tokens, tokens), True)[:, :n_tokens]


def filtered(
    scores: Tensor, texts: Tensor, step: int, config: GenerateConfig, eos_id: int | None, in_place: bool = False
) -> Tensor:
    """All filters of a config on float32 scores (R, V) before token number ``step``, in the order transformers has.

    ``in_place``: nobody else needs these scores, and they may be written over.
    """
    if config.logit_bias:
        scores = scores + bias_of(config.logit_bias, scores)
    if config.repetition_penalty != 1.0:
        scores = repetition_penalty(scores, texts, config.repetition_penalty)
    if config.no_repeat_ngram:
        scores = no_repeat_ngram(scores, texts, config.no_repeat_ngram)
    if eos_id is not None and step < config.min_new_tokens:
        scores = forbidden(scores, eos_id, in_place)
    if step < len(config.prefix):
        scores = forced(scores, config.prefix[step])
    if config.temperature is not None:
        scores = temperature(scores, config.temperature)
    if config.top_k is not None:
        scores = top_k(scores, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        scores = top_p(scores, config.top_p)
    if config.min_p is not None:
        scores = min_p(scores, config.min_p)
    return _or_the_end(scores, eos_id) if config.logit_bias or config.no_repeat_ngram else scores


def _or_the_end(scores: Tensor, eos_id: int | None) -> Tensor:
    """Where every token is forbidden, the text ends."""
    stuck = scores.amax(-1).isneginf()
    if eos_id is not None:
        is_end = torch.arange(scores.shape[-1], device=scores.device) == eos_id
        return scores.masked_fill(stuck[:, None] & is_end, 0.0)
    if stuck.any():
        raise ValueError("no_repeat_ngram and logit_bias forbid every token, and this model has no eos_id to end with")
    return scores


def chances(config: GenerateConfig, n_prompts: int, n_copies: int) -> Tensor:
    """Numbers in [0, 1) to draw with, (prompts · copies, max_new_tokens): they depend on nothing but seed and copy."""
    seeds = torch.randint(2**62, (n_prompts,)).tolist() if config.seed is None else [config.seed] * n_prompts
    rows = []
    for seed in seeds:
        for copy in range(n_copies):
            generator = torch.Generator().manual_seed((seed + copy * 0x9E3779B97F4A7C15) % 2**63)
            rows.append(torch.rand(config.max_new_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def draw(scores: Tensor, chance: Tensor) -> Tensor:
    """The token (R,) at which the summed probabilities pass ``chance`` (R,): one number a row, whoever is beside it."""
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    summed = scores.to(wide).softmax(-1).cumsum(-1)
    at = chance.to(summed)[:, None] * summed[:, -1:]
    return torch.searchsorted(summed, at, right=True)[:, 0]
