"""Language models: perplexity = exp(mean loss), bits per character, perplexity of a long text by sliding windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ...models import Decoder
from .statistics import Result, Statistics, mean_statistics

_ROWS_AT_ONCE = 1024  # of logits: a large vocabulary is never held for a whole batch


@dataclass(frozen=True)
class LanguageScores(Result):
    """How well text was foreseen. Perplexity is per token of this tokenizer; the others do not depend on it."""

    loss: float
    """Mean, in nats a token."""
    perplexity: float
    n_tokens: int
    bits_per_character: float | None = None
    n_characters: int | None = None
    perplexity_per_word: float | None = None
    n_words: int | None = None

    def text(self) -> str:
        parts = [f"loss {self.loss:.4f}", f"perplexity {self.perplexity:.2f}"]
        if self.bits_per_character is not None:
            parts.append(f"{self.bits_per_character:.4f} bits/character")
        if self.perplexity_per_word is not None:
            parts.append(f"{self.perplexity_per_word:.2f} per word")
        return ", ".join(parts) + f" ({self.n_tokens} tokens)"


def perplexity(mean_loss: float) -> float:
    """exp(mean loss in nats); infinite where that is past what a float holds."""
    if math.isnan(mean_loss):
        raise ValueError("the mean loss is not a number")
    return math.exp(mean_loss) if mean_loss < 709.0 else math.inf


def language_model(
    total_loss: float, n_tokens: int, n_characters: int | None = None, n_words: int | None = None
) -> LanguageScores:
    """From the sum of the loss over tokens, in nats; characters and words are those of the text that was scored."""
    for name, count in (("n_tokens", n_tokens), ("n_characters", n_characters), ("n_words", n_words)):
        if count is not None and count < 1:
            raise ValueError(f"{name}={count}: there is nothing to score")
    return LanguageScores(
        loss=total_loss / n_tokens,
        perplexity=perplexity(total_loss / n_tokens),
        n_tokens=n_tokens,
        bits_per_character=None if n_characters is None else total_loss / math.log(2) / n_characters,
        n_characters=n_characters,
        perplexity_per_word=None if n_words is None else perplexity(total_loss / n_words),
        n_words=n_words,
    )


def loss_statistics(total_losses: ArrayLike, counts: ArrayLike | None = None) -> Statistics:
    """The summed loss and number of targets of every example; the score is the mean over targets, lower is better."""
    return mean_statistics("loss", total_losses, counts, higher_is_better=False)


def strided_perplexity(
    model: Decoder,
    tokens: Tensor | NDArray[np.integer] | Sequence[int],
    context: int,
    stride: int,
    *,
    batch_size: int = 8,
    n_characters: int | None = None,
    n_words: int | None = None,
) -> LanguageScores:
    """Perplexity of one long text, every token once, with at least context - stride tokens before it."""
    losses = strided_losses(model, tokens, context, stride, batch_size=batch_size)
    return language_model(float(losses.sum(dtype=np.float64)), len(losses), n_characters, n_words)


@torch.no_grad()
def strided_losses(
    model: Decoder,
    tokens: Tensor | NDArray[np.integer] | Sequence[int],
    context: int,
    stride: int,
    *,
    batch_size: int = 8,
) -> NDArray[np.float32]:
    """-log p of tokens 1, 2, … (N - 1,): windows of ``context`` inputs end ``stride`` apart, each scores what is new.

    The first window scores all of its targets, so those see fewer tokens. The last one ends with the text and is as
    wide as the others, which means all windows stack into batches and nothing is padded. stride = context is the
    cheapest and reads too high; stride = 1 gives every token its full context. A memory-mapped array is read window
    by window.
    """
    n_targets = _need_windows(model, tokens, context, stride, batch_size)
    width = min(context, n_targets)
    ends = [*range(width, n_targets, stride), n_targets]
    windows = list(zip([0, *ends], ends, strict=False))  # (first target not scored yet, end)
    training = model.training
    model.eval()
    try:
        parts = [
            _window_losses(model, tokens, windows[i : i + batch_size], width)
            for i in range(0, len(windows), batch_size)
        ]
    finally:
        model.train(training)
    return np.concatenate(parts)


def _window_losses(
    model: Decoder,
    tokens: Tensor | NDArray[np.integer] | Sequence[int],
    windows: list[tuple[int, int]],
    width: int,
) -> NDArray[np.float32]:
    """The losses of the new targets of some windows, in the order of the text."""
    assert model.head is not None
    ids = torch.stack([_ids(tokens, end - width, end + 1) for _, end in windows])  # (B, width + 1)
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        odd = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(f"tokens hold id {odd}, but vocab_size={model.config.vocab_size}")
    first_new = torch.tensor([first - (end - width) for first, end in windows])
    new = torch.arange(width) >= first_new[:, None]  # (B, width)
    ids, new = ids.to(model.device), new.to(model.device)
    states, targets = model.hidden(ids[:, :-1])[new], ids[:, 1:][new]
    losses = []
    for x, y in zip(states.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
        logits = model.head(x[None], model.token.weight)[0]
        losses.append(F.cross_entropy(logits.float(), y, reduction="none"))
    return torch.cat(losses).cpu().numpy()


def _ids(tokens: Tensor | NDArray[np.integer] | Sequence[int], start: int, stop: int) -> Tensor:
    part = tokens[start:stop]
    return part.to("cpu", torch.int64) if isinstance(part, Tensor) else torch.from_numpy(np.array(part, dtype=np.int64))


def _need_windows(
    model: Decoder,
    tokens: Tensor | NDArray[np.integer] | Sequence[int],
    context: int,
    stride: int,
    batch_size: int,
) -> int:
    """The number of targets, when the arguments make sense."""
    if getattr(tokens, "ndim", 1) != 1:
        raise ValueError(f"tokens have shape {tuple(np.shape(tokens))}, but must be one text (N,)")
    if len(tokens) < 2:
        raise ValueError(f"tokens has {len(tokens)} tokens, but the first to be scored is the second")
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} is not between 1 and context={context}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is less than 1")
    if model.head is None:
        raise ValueError(f"the model has no language-model head (head={model.config.head!r}), so it cannot be scored")
    return len(tokens) - 1
