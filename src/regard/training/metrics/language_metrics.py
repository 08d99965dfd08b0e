"""Language models: perplexity = exp(mean loss), bits per character, perplexity of a long text by sliding windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ...models import Decoder
from ...text.tokenizer import Tokenizer
from .statistics import MetricResult, Statistics, mean_statistics

_ROWS_AT_ONCE = 1024  # of logits: a large vocabulary is never held for a whole batch
_PASSAGE = 64  # tokens shown and resampled together, as neighbouring tokens are not independent
_SPAN = 256  # characters resampled together where two models have different tokens


@dataclass(frozen=True)
class LanguageScores(MetricResult):
    """How well text was foreseen. Perplexity is per token of this tokenizer; the others do not depend on it."""

    loss: float  # mean, in nats a token
    perplexity: float
    n_tokens: int
    bits_per_character: float | None = None
    n_characters: int | None = None
    perplexity_per_word: float | None = None
    n_words: int | None = None

    def to_text(self) -> str:
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


# ------------------------------------------------------------------------------------- the loss of every token of texts


@dataclass(frozen=True, eq=False)
class TextLosses:
    """All tokens of some texts and -log p of each; NaN where a token was not predicted."""

    tokenizer: Tokenizer
    texts: list[str]
    tokens: NDArray[Any]
    starts: NDArray[np.int64]  # where each document starts, and one past the end of the last
    losses: NDArray[np.float64]
    predictions: NDArray[np.int64]  # the likeliest token in each place; −1 where none was predicted

    @property
    def scored(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.losses)

    @property
    def n_characters(self) -> int:
        """Of the scored tokens: a text's first token has no context, and an incomplete last block is not read."""
        return sum(map(len, self.texts)) - len(self.tokenizer.decode(self.tokens[~self.scored]))

    def passages(self) -> Iterator[slice]:
        """Runs of at most 64 tokens, none of them in two documents."""
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            for first in range(start, end, _PASSAGE):
                yield slice(first, min(first + _PASSAGE, end))

    def scores(self) -> LanguageScores:
        total, n = float(np.nansum(self.losses)), int(self.scored.sum())
        return language_model(total, n, max(self.n_characters, 0) or None)

    def with_stride(self, model: Decoder, context: int, stride: int) -> TextLosses:
        """The same texts scored with windows that move by ``stride``; none reaches into another document."""
        losses = np.full(len(self.tokens), np.nan)
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            if end - start > 1:
                losses[start + 1 : end] = strided_losses(model, self.tokens[start:end], context, stride)
        return replace(self, losses=losses)


def paired_texts(a: TextLosses, b: TextLosses, *, masked: bool = False) -> list[tuple[Statistics, Statistics]]:
    """What a comparison of two language models resamples: the loss by token where they have the same tokens, else bits
    per character, which do not depend on the tokenizer."""
    if a.texts != b.texts:
        raise ValueError("the two models were asked about different texts")
    if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.starts, b.starts)):
        if masked:
            raise ValueError("the two models have different tokens, so what is hidden from them cannot be compared")
        return [_by_characters(a, b)]
    both = a.scored & b.scored
    passages = [place for place in a.passages() if both[place].any()]
    counts = [int(both[place].sum()) for place in passages]

    def sums(values: NDArray[Any]) -> list[float]:
        return [float(values[place][both[place]].sum()) for place in passages]

    loss_a, loss_b = (loss_statistics(sums(x.losses), counts) for x in (a, b))
    if not masked:
        return [(loss_a, loss_b)]
    hits_a, hits_b = (mean_statistics("accuracy", sums(x.predictions == x.tokens), counts) for x in (a, b))
    return [(hits_a, hits_b), (loss_a, loss_b)]


_Unit = tuple[int, int]  # a document, and which span of 256 characters of it


def _by_characters(a: TextLosses, b: TextLosses) -> tuple[Statistics, Statistics]:
    """Spans of a text where the tokens of both give it back, so that passages in it are known; else documents."""
    if all(_round_trips(x) for x in (a, b)):
        bits_a, bits_b = _bits_by_spans(a), _bits_by_spans(b)
    elif len(a.texts) > 1:
        bits_a, bits_b = _bits_by_documents(a), _bits_by_documents(b)
    else:
        raise ValueError(
            "the two models have different tokens, and those of one do not give the text back exactly: as there is "
            "only one document, they cannot be compared"
        )
    units = sorted(bits_a.keys() & bits_b.keys())
    if not units:
        raise ValueError("the text is too short to compare models with different tokens on it")
    sizes = [_n_characters(a, unit) for unit in units]
    made = [
        mean_statistics("bits per character", [bits[x] for x in units], sizes, higher_is_better=False)
        for bits in (bits_a, bits_b)
    ]
    return made[0], made[1]


def _round_trips(text_losses: TextLosses) -> bool:
    return text_losses.tokenizer.is_native and all(
        text_losses.tokenizer.decode(text_losses.tokens[start:end]) == text
        for text, start, end in zip(text_losses.texts, text_losses.starts[:-1], text_losses.starts[1:], strict=True)
    )


def _bits_by_spans(text_losses: TextLosses) -> dict[_Unit, float]:
    """A token belongs to where it begins. Spans that were not scored to their last character are left out."""
    bits: dict[_Unit, float] = {}
    unread: set[_Unit] = set()
    for document, start in enumerate(text_losses.starts[:-1].tolist()):
        for piece in text_losses.tokenizer.token_spans(
            text_losses.tokens[start : text_losses.starts[document + 1]].tolist()
        ):
            losses = text_losses.losses[start + piece.first : start + piece.last]
            unit = document, piece.start // _SPAN
            if piece.end > piece.start and np.isnan(losses).any():
                unread.add(unit)
            bits[unit] = bits.get(unit, 0.0) + float(np.nansum(losses)) / math.log(2)
    ends = {(n, len(text) // _SPAN) for n, text in enumerate(text_losses.texts) if len(text) % _SPAN == 0}
    # The <eos> of a document that fills its last span begins past it, where there is no character to pay for.
    for document, place in ends & bits.keys():
        bits[document, place - 1] = bits.get((document, place - 1), 0.0) + bits.pop((document, place))
    return {unit: value for unit, value in bits.items() if unit not in unread}


def _bits_by_documents(text_losses: TextLosses) -> dict[_Unit, float]:
    spans = zip(text_losses.starts[:-1], text_losses.starts[1:], strict=True)
    return {
        (n, -1): float(np.nansum(text_losses.losses[start:end])) / math.log(2) for n, (start, end) in enumerate(spans)
    }


def _n_characters(text_losses: TextLosses, unit: _Unit) -> int:
    document, place = unit
    length = len(text_losses.texts[document])
    return length if place < 0 else min(_SPAN, length - place * _SPAN)
