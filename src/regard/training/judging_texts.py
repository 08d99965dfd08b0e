"""Language models on texts: the loss of every token, bits per character, strided perplexity, the hardest passages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.examples import Example, Text
from ..errors import BadData
from ..models import Decoder, Model
from ..text.tokenizer import Tokenizer
from . import metrics
from .judging import Floats, Judged, losses_of, need_finite
from .loss import IGNORE
from .metrics import Statistics
from .precision import Precision
from .tasks import Row
from .tasks.language_modelling import MaskedLanguageModel, Texts

__all__ = ["TextLosses", "judge_texts", "paired_texts"]

_PASSAGE = 64
"""Tokens of a passage: what is shown, and what is resampled, as neighbouring tokens are not independent."""
_STRETCH = 256
"""Characters of a passage where two models have different tokens."""
_SHOWN_BEFORE = 32


@dataclass(frozen=True, eq=False)
class TextLosses:
    """All tokens of some texts and -log p of each; NaN where a token was not asked for."""

    tokenizer: Tokenizer
    texts: list[str]
    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    """Where each document starts, and one past the end of the last."""
    losses: Floats
    said: NDArray[np.int64]
    """The likeliest token in the place of each; −1 where none was asked for."""

    @property
    def scored(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.losses)

    @property
    def n_characters(self) -> int:
        """Of what was scored: a text's first token has nothing before it, and an unfinished last block is not read."""
        return sum(map(len, self.texts)) - len(self.tokenizer.decode(self.tokens[~self.scored]))

    def passages(self) -> Iterator[slice]:
        """Stretches of at most 64 tokens, none of them in two documents."""
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            for first in range(start, end, _PASSAGE):
                yield slice(first, min(first + _PASSAGE, end))

    def scores(self) -> metrics.LanguageScores:
        total, n = float(np.nansum(self.losses)), int(self.scored.sum())
        return metrics.language_model(total, n, max(self.n_characters, 0) or None)


def judge_texts(
    task: Texts, model: Model, examples: Sequence[Example], precision: Precision, stride: int | None = None
) -> Judged:
    """All of some texts: as training evaluates them and, with a ``stride``, every token after a long context."""
    texts = [cast(Text, x).text for x in examples]
    file = task.token_file(examples)
    if len(file.tokens) < 2:
        raise BadData(f"{task.source.name} has nothing held out to evaluate on; data.source=FILE names other examples")
    found = TextLosses(
        task._tokens,
        texts,
        file.tokens,
        file.starts,
        np.full(len(file.tokens), np.nan),
        np.full(len(file.tokens), -1, dtype=np.int64),
    )
    n_tokens, inputs, start = 0, np.array(file.tokens, dtype=np.int64), time.perf_counter()
    masked = isinstance(task, MaskedLanguageModel)
    width = task.context if masked or task._separated else min(task.context, len(file.tokens) - 1)
    for index, batch in task.valid_groups(examples):
        with precision.forward():
            losses, said = losses_of(model, batch.to(model.device))
        row, column = (x.numpy() for x in torch.nonzero(batch.targets != IGNORE, as_tuple=True))
        places = np.asarray(index)[row] * width + column + (0 if masked else 1)
        found.losses[places], found.said[places] = losses.cpu().double().numpy(), said.cpu().numpy()
        if masked:
            inputs[places] = batch.inputs[0].numpy()[row, column]
        n_tokens += batch.n_tokens
    seconds = time.perf_counter() - start
    return _judged(task, model, found, inputs, precision, stride, n_tokens, seconds)


def _judged(
    task: Texts,
    model: Model,
    found: TextLosses,
    inputs: NDArray[np.int64],
    precision: Precision,
    stride: int | None,
    n_tokens: int,
    seconds: float,
) -> Judged:
    scores = found.scores()
    need_finite(scores.loss, task)
    values: dict[str, Any] = {"loss": scores.loss, "perplexity": scores.perplexity}
    if isinstance(task, MaskedLanguageModel):
        asked = found.scored
        values["accuracy"] = float((found.said == found.tokens)[asked].mean())
        rows = list(_masked_rows(found, inputs, task.context))
    else:
        values["bits_per_character"] = scores.bits_per_character
        rows = list(_rows(found))
        if stride is not None:
            strided = _strided(cast(Decoder, model), found, task.context, stride, precision)
            by_stride = strided.scores()
            values |= {
                "strided_loss": by_stride.loss,
                "strided_perplexity": by_stride.perplexity,
                "strided_bits_per_character": by_stride.bits_per_character,
            }
            found = strided  # what is compared is the better measure
    values["n_targets"] = scores.n_tokens
    return Judged(len(found.texts), values, rows, n_tokens, seconds, texts=found)


def _strided(model: Decoder, found: TextLosses, context: int, stride: int, precision: Precision) -> TextLosses:
    """The same texts with windows that move by ``stride``; none reaches from one document into another."""
    losses = np.full(len(found.tokens), np.nan)
    for start, end in zip(found.starts[:-1].tolist(), found.starts[1:].tolist(), strict=True):
        if end - start > 1:
            with precision.forward():
                losses[start + 1 : end] = metrics.strided_losses(model, found.tokens[start:end], context, stride)
    return TextLosses(found.tokenizer, found.texts, found.tokens, found.starts, losses, found.said)


def _rows(found: TextLosses) -> Iterator[Row]:
    """Passages: what stood before, what came, and what was likeliest at each of its places."""
    decode, scored = found.tokenizer.decode, found.scored
    for place in found.passages():
        if (asked := scored[place]).any():
            loss = float(found.losses[place][asked].mean())
            begins = int(found.starts[np.searchsorted(found.starts, place.start, side="right") - 1])
            before = decode(found.tokens[max(begins, place.start - _SHOWN_BEFORE) : place.start])
            said = found.said[place][asked]
            yield Row(before, decode(found.tokens[place]), decode(said), math.exp(-loss), loss)


def _masked_rows(found: TextLosses, inputs: NDArray[np.int64], context: int) -> Iterator[Row]:
    """Rows as the model saw them, as they were, and as it filled them in."""
    scored, decode = found.scored, found.tokenizer.decode
    filled = np.where(scored, found.said, found.tokens)
    for first in range(0, len(found.tokens), context):
        place = slice(first, min(first + context, len(found.tokens)))
        if (asked := scored[place]).any():
            loss = float(found.losses[place][asked].mean())
            seen = "".join(found.tokenizer.span_texts(inputs[place].tolist()))
            yield Row(seen, decode(found.tokens[place]), decode(filled[place]), math.exp(-loss), loss)


# ------------------------------------------------------------------------------------- two models on one text


def paired_texts(a: TextLosses, b: TextLosses, *, masked: bool = False) -> list[tuple[Statistics, Statistics]]:
    """What a comparison of two language models resamples: loss by token where their tokens are the same ones, else
    bits per character, which do not depend on the tokenizer."""
    if a.texts != b.texts:
        raise ValueError("the two models were asked about different texts")
    if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.starts, b.starts)):
        if masked:
            raise ValueError("the two models have different tokens, so what is hidden from them cannot be compared")
        return [_by_characters(a, b)]
    both = a.scored & b.scored
    places = [place for place in a.passages() if both[place].any()]
    counts = [int(both[place].sum()) for place in places]

    def summed(values: NDArray[Any]) -> list[float]:
        return [float(values[place][both[place]].sum()) for place in places]

    loss_a, loss_b = (metrics.loss_statistics(summed(x.losses), counts) for x in (a, b))
    if not masked:
        return [(loss_a, loss_b)]
    hits_a, hits_b = (metrics.mean_statistics("accuracy", summed(x.said == x.tokens), counts) for x in (a, b))
    return [(hits_a, hits_b), (loss_a, loss_b)]


Unit = tuple[int, int]
"""A document, and which stretch of 256 characters of it."""


def _by_characters(a: TextLosses, b: TextLosses) -> tuple[Statistics, Statistics]:
    """Stretches of a text where the tokens of both give it back, so that places in it are known; else documents."""
    if all(_gives_back(x) for x in (a, b)):
        bits_a, bits_b = _bits_of_stretches(a), _bits_of_stretches(b)
    elif len(a.texts) > 1:
        bits_a, bits_b = _bits_of_documents(a), _bits_of_documents(b)
    else:
        raise ValueError(
            "the two models have different tokens, and those of one do not give the text back exactly: as there is "
            "only one document, they cannot be compared"
        )
    units = sorted(bits_a.keys() & bits_b.keys())
    if not units:
        raise ValueError("the text is too short to compare models with different tokens on it")
    sizes = [_size(a, unit) for unit in units]
    made = [
        metrics.mean_statistics("bits per character", [bits[x] for x in units], sizes, higher_is_better=False)
        for bits in (bits_a, bits_b)
    ]
    return made[0], made[1]


def _gives_back(found: TextLosses) -> bool:
    return found.tokenizer.is_native and all(
        found.tokenizer.decode(found.tokens[start:end]) == text
        for text, start, end in zip(found.texts, found.starts[:-1], found.starts[1:], strict=True)
    )


def _bits_of_stretches(found: TextLosses) -> dict[Unit, float]:
    """A token belongs to where it begins. Stretches that were not scored to their last character are left out."""
    bits: dict[Unit, float] = {}
    unread: set[Unit] = set()
    for document, start in enumerate(found.starts[:-1].tolist()):
        for piece in found.tokenizer.token_spans(found.tokens[start : found.starts[document + 1]].tolist()):
            losses = found.losses[start + piece.first : start + piece.last]
            unit = document, piece.start // _STRETCH
            if piece.end > piece.start and np.isnan(losses).any():
                unread.add(unit)
            bits[unit] = bits.get(unit, 0.0) + float(np.nansum(losses)) / math.log(2)
    ends = {(n, len(text) // _STRETCH) for n, text in enumerate(found.texts) if len(text) % _STRETCH == 0}
    # The <eos> of a document that fills its last stretch begins past it, where there is no character to pay for.
    for document, place in ends & bits.keys():
        bits[document, place - 1] = bits.get((document, place - 1), 0.0) + bits.pop((document, place))
    return {unit: value for unit, value in bits.items() if unit not in unread}


def _bits_of_documents(found: TextLosses) -> dict[Unit, float]:
    spans = zip(found.starts[:-1], found.starts[1:], strict=True)
    return {(n, -1): float(np.nansum(found.losses[start:end])) / math.log(2) for n, (start, end) in enumerate(spans)}


def _size(found: TextLosses, unit: Unit) -> int:
    document, place = unit
    length = len(found.texts[document])
    return length if place < 0 else min(_STRETCH, length - place * _STRETCH)
