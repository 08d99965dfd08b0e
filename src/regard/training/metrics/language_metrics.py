"""Metrics of language models: perplexity = exp(mean loss), bits per character, perplexity by sliding windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ...data.packing import IGNORE
from ...models import Decoder
from ...text.tokenizer import Tokenizer
from ..loss import Batch, token_losses
from .statistics import Statistics, mean_statistics

_PASSAGE = 64  # tokens shown and resampled together, because neighbouring tokens are not independent
_SPAN = 256  # characters resampled together if two models have different tokens
_Unit = tuple[int, int]  # a document and a span of 256 characters in it (-1: the whole document)


@dataclass(frozen=True)
class LanguageScores:
    """The scores of a language model. Perplexity depends on the tokenizer, bits per character do not."""

    loss: float  # mean in nats per token
    perplexity: float
    n_tokens: int
    bits_per_character: float | None = None


def perplexity(mean_loss: float) -> float:
    """exp(mean loss in nats); infinity on overflow."""
    return math.inf if mean_loss >= 709.0 else math.exp(mean_loss)


def language_model(total_loss: float, n_tokens: int, n_characters: int | None = None) -> LanguageScores:
    """Scores from the loss summed over tokens, in nats; ``n_characters`` is the length of the scored text."""
    for name, count in (("n_tokens", n_tokens), ("n_characters", n_characters)):
        if count is not None and count < 1:
            raise ValueError(f"{name}={count}: there is nothing to score")
    loss = total_loss / n_tokens
    bits_per_character = None if n_characters is None else total_loss / math.log(2) / n_characters
    return LanguageScores(loss, perplexity(loss), n_tokens, bits_per_character)


def loss_statistics(total_losses: ArrayLike, counts: ArrayLike | None = None) -> Statistics:
    """The summed loss and the number of targets of each example; the score is the mean over targets."""
    return mean_statistics("loss", total_losses, counts, higher_is_better=False)


def strided_losses(
    model: Decoder,
    tokens: NDArray[np.integer],
    context: int,
    stride: int,
    *,
    batch_size: int = 8,
) -> NDArray[np.float32]:
    """-log p of tokens 1, 2, … of N ≥ 2 (N - 1,), by windows of ``context`` inputs that move by ``stride``.

    Each window scores only its new targets; the first one scores all, so those have less context. The last window ends
    with the text and is as wide as the others, so windows are batched without padding. stride = context is cheapest
    but overestimates the loss; stride = 1 gives every token its full context. A memory-mapped array is read window by
    window.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} is not between 1 and context={context}")
    n_targets = len(tokens) - 1
    width = min(context, n_targets)
    ends = [*range(width, n_targets, stride), n_targets]
    windows = list(zip([0, *ends], ends, strict=False))  # (first target not scored yet, end)
    training = model.training
    model.eval()
    try:
        groups = (windows[i : i + batch_size] for i in range(0, len(windows), batch_size))
        return np.concatenate([_window_losses(model, tokens, group, width) for group in groups])
    finally:
        model.train(training)


def _window_losses(model: Decoder, tokens: Any, windows: list[tuple[int, int]], width: int) -> NDArray[np.float32]:
    """The losses of the new targets of a batch of windows, in the order of the text."""
    ids = torch.stack([torch.from_numpy(np.array(tokens[end - width : end + 1], dtype=np.int64)) for _, end in windows])
    first_new = torch.tensor([first - (end - width) for first, end in windows])
    targets = torch.where(torch.arange(width) >= first_new[:, None], ids[:, 1:], IGNORE)  # (B, width)
    losses, _ = token_losses(model, Batch((ids[:, :-1],), targets).to(model.device))
    return losses.cpu().numpy()


@dataclass(frozen=True, eq=False)
class TextLosses:
    """All tokens of a set of texts, with -log p of each; NaN for tokens that were not predicted."""

    tokenizer: Tokenizer
    texts: list[str]
    tokens: NDArray[Any]
    starts: NDArray[np.int64]  # the start of each document, and the end of the last
    losses: NDArray[np.float64]
    predictions: NDArray[np.int64]  # the most likely token at each position; -1 if none was predicted

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.losses)

    @property
    def n_characters(self) -> int:
        """Characters of the scored tokens; the first token of a text and an incomplete last block are not scored."""
        return sum(map(len, self.texts)) - len(self.tokenizer.decode(self.tokens[~self.is_scored]))

    def passages(self) -> Iterator[slice]:
        """Slices of at most 64 tokens, each within one document."""
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            for first in range(start, end, _PASSAGE):
                yield slice(first, min(first + _PASSAGE, end))

    def scores(self) -> LanguageScores:
        total, n = float(np.nansum(self.losses)), int(self.is_scored.sum())
        return language_model(total, n, max(self.n_characters, 0) or None)

    def with_stride(self, model: Decoder, context: int, stride: int) -> TextLosses:
        """The same texts scored by ``strided_losses``, document by document."""
        losses = np.full(len(self.tokens), np.nan)
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            if end - start > 1:
                losses[start + 1 : end] = strided_losses(model, self.tokens[start:end], context, stride)
        return replace(self, losses=losses)


def paired_texts(a: TextLosses, b: TextLosses, *, masked: bool = False) -> list[tuple[Statistics, Statistics]]:
    """The statistics by which two language models are compared: the loss per token if they have the same tokens, else
    bits per character, which do not depend on the tokenizer."""
    if a.texts != b.texts:
        raise ValueError("the two models were evaluated on different texts")
    if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.starts, b.starts)):
        if masked:
            raise ValueError("the two models have different tokens, so their masked tokens cannot be compared")
        return [_by_characters(a, b)]
    both = a.is_scored & b.is_scored
    passages = [passage for passage in a.passages() if both[passage].any()]
    if not passages:
        raise ValueError("the text is too short to compare the two models: they predict no token in common")
    counts = [int(both[passage].sum()) for passage in passages]

    def sums(values: NDArray[Any]) -> list[float]:
        return [float(values[passage][both[passage]].sum()) for passage in passages]

    loss_a, loss_b = (loss_statistics(sums(x.losses), counts) for x in (a, b))
    if not masked:
        return [(loss_a, loss_b)]
    hits_a, hits_b = (mean_statistics("accuracy", sums(x.predictions == x.tokens), counts) for x in (a, b))
    return [(hits_a, hits_b), (loss_a, loss_b)]


def _by_characters(a: TextLosses, b: TextLosses) -> tuple[Statistics, Statistics]:
    """Bits per character, resampled by spans of text if the tokens of both models decode to the exact text, else by
    documents."""
    if all(_round_trips(x) for x in (a, b)):
        both = [_bits_by_spans(x) for x in (a, b)]
    elif len(a.texts) > 1:
        documents = [np.split(x.losses, x.starts[1:-1]) for x in (a, b)]
        both = [{(n, -1): float(np.nansum(x)) / math.log(2) for n, x in enumerate(losses)} for losses in documents]
    else:
        raise ValueError(
            "the two models have different tokens, and those of one do not decode to the exact text; with a single "
            "document, they cannot be compared"
        )
    units = sorted(both[0].keys() & both[1].keys())
    if not units:
        raise ValueError("the text is too short to compare models with different tokens on it")
    lengths = [len(text) for text in a.texts]
    sizes = [lengths[n] if span < 0 else min(_SPAN, lengths[n] - span * _SPAN) for n, span in units]
    ours, theirs = (
        mean_statistics("bits per character", [bits[x] for x in units], sizes, higher_is_better=False) for bits in both
    )
    return ours, theirs


def _round_trips(text_losses: TextLosses) -> bool:
    return text_losses.tokenizer.is_native and all(
        text_losses.tokenizer.decode(text_losses.tokens[start:end]) == text
        for text, start, end in zip(text_losses.texts, text_losses.starts[:-1], text_losses.starts[1:], strict=True)
    )


def _bits_by_spans(text_losses: TextLosses) -> dict[_Unit, float]:
    """The bits of each span of characters; a token belongs to the span it begins in. Spans that were not scored
    completely are left out."""
    bits: dict[_Unit, float] = {}
    incomplete: set[_Unit] = set()
    for document, start in enumerate(text_losses.starts[:-1].tolist()):
        tokens = text_losses.tokens[start : text_losses.starts[document + 1]].tolist()
        for piece in text_losses.tokenizer.token_spans(tokens):
            losses = text_losses.losses[start + piece.first : start + piece.last]
            unit = document, piece.start // _SPAN
            if piece.end > piece.start and np.isnan(losses).any():
                incomplete.add(unit)
            bits[unit] = bits.get(unit, 0.0) + float(np.nansum(losses)) / math.log(2)
    ends = {(n, len(text) // _SPAN) for n, text in enumerate(text_losses.texts) if len(text) % _SPAN == 0}
    # If a document fills its last span, its <eos> begins in a span without characters: count it to the one before.
    for document, span in ends & bits.keys():
        bits[document, span - 1] = bits.get((document, span - 1), 0.0) + bits.pop((document, span))
    return {unit: value for unit, value in bits.items() if unit not in incomplete}
