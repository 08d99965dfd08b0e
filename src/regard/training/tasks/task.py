"""What all tasks have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ...config import Kind, ModelConfig, RunConfig
from ...config.data_config import TokenizerKind
from ...data.batching import BatchPlan, pad
from ...data.examples import Example
from ...data.hashing import stable_key, uniform
from ...data.sources import Source
from ...errors import BadData
from ...models import Model
from ...text.processor import Processor
from ...text.tokenizer import BOS, EOS, MASK, PAD, SPECIAL, Tokenizer
from ...text.tokenizer_training import TOKENIZER_KINDS, Template, train_tokenizer
from ..loss import Batch

__all__ = ["Evaluation", "Left", "Row", "Task"]

_MOST_TRAINED_ON = 200_000
"""Texts a tokenizer is made from: more teach it nothing."""


@dataclass(frozen=True)
class Row:
    """One example of an evaluation: what was asked, what was expected, what came out, and how good that is (≤ 1)."""

    source: str
    target: str | list[str]
    output: str
    score: float
    loss: float | None = None

    def document(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Evaluation:
    """What held-out data says about a model."""

    metrics: dict[str, float | str]
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Left:
    """Examples that are not trained on as they are, and why."""

    n_dropped: int = 0
    n_cut: int = 0
    max_len: int = 0

    def text(self) -> str | None:
        dropped, cut = (f"{n:,} example{'s' * (n != 1)}" for n in (self.n_dropped, self.n_cut))
        if self.n_dropped:
            return f"{dropped} longer than max_len={self.max_len} left out"
        return f"{cut} longer than max_len={self.max_len} cut short" if self.n_cut else None


class Task(ABC):
    """Data → batches, and a model's answers → metrics. Batches are a pure function of their number."""

    kinds: ClassVar[tuple[Kind, ...]]
    """Sources it can learn from."""
    template: ClassVar[Template] = "none"
    tokenizer_kind: ClassVar[TokenizerKind] = "bpe"
    """What ``data.tokenizer=auto`` means."""
    criterion: ClassVar[str] = "valid_loss"
    """The metric that says which checkpoint is best; losses are better when smaller."""

    left: Left = Left()
    held_out_cut: int = 0
    """Held-out texts that ``valid_groups`` last had to cut to what the model can read."""

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        self.config, self.source = config, source
        self.processor = processor if processor is not None else self._new_processor()

    @property
    @abstractmethod
    def model_config(self) -> ModelConfig:
        """The config's model with what the data decides: vocabulary, classes, lengths, special tokens."""

    @abstractmethod
    def _new_processor(self) -> Processor:
        """Tokenizers and such, made from the training data."""

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Training batch ``number`` of the whole run, counted from 0."""

    @abstractmethod
    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """All of some held-out examples, once: batches, and which example each row is of (of texts: which row)."""

    def valid_batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        """The batches alone."""
        return (batch for _, batch in self.valid_groups(examples))

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int: ...

    @property
    def ragged(self) -> bool:
        """Whether batches differ in shape."""
        return True

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int, length_penalty: float
    ) -> tuple[dict[str, float | str], list[Row]]:
        """What the model says of some examples, beside the loss; nothing where the loss says it all."""
        return {}, []

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """Some examples as they stand now, for people to look at."""
        _, rows = self.answers(model, self._first(self.source.valid, n), beam=1, length_penalty=1.0)
        return [{"source": row.source, "target": _one(row.target), "output": row.output} for row in rows]

    def examples(self, split: str = "valid", n: int | None = None) -> Sequence[Example]:
        """A held-out set: valid, or one more that the source brings."""
        held = {"valid": self.source.valid, **self.source.others}
        if split not in held:
            raise ValueError(f"split={split!r} is none of {', '.join(held)}")
        return self._first(held[split], n)

    @staticmethod
    def _first(examples: Sequence[Example], n: int | None) -> list[Example]:
        return [examples[index] for index in range(len(examples) if n is None else min(n, len(examples)))]

    # What tasks with texts share.

    def _tokenizer(self, texts: Sequence[str], template: Template | None = None) -> Tokenizer:
        """The one the config names, made from these texts unless it is a file."""
        data = self.config.data
        kind = self.tokenizer_kind if data.tokenizer == "auto" else data.tokenizer
        if kind not in TOKENIZER_KINDS:
            if not kind.endswith(".json"):
                kinds = ", ".join(TOKENIZER_KINDS)
                raise ValueError(f"data.tokenizer={kind!r} is none of {kinds}, nor a tokenizer.json")
            return Tokenizer.load(kind)
        size = data.vocab_size if kind in ("bpe", "unigram") else None
        return train_tokenizer(texts[:_MOST_TRAINED_ON], cast(TokenizerKind, kind), size, template or self.template)

    def _plan(self, lengths: Any, *, shuffle: bool = True, max_len: int | None = None) -> BatchPlan:
        train = self.config.train
        return BatchPlan(
            lengths,
            train.batch_tokens,
            seed=train.seed,
            max_len=max_len,
            shuffle=shuffle,
            max_examples=train.batch_size,
        )

    def _padded(self, rows: Sequence[Sequence[int]], pad_id: int, most: int) -> torch.Tensor:
        """tokens (B, T). T is a round number, which makes for fewer shapes, unless the model's positions end before.

        A GPU takes eight columns as quickly as one; a processor pays for each, and of short texts they are a quarter.
        """
        device = self.config.train.device
        multiple = 2 if device == "cpu" or (device == "auto" and not torch.cuda.is_available()) else 8
        longest = max(map(len, rows))
        width = max(longest, min(-(-longest // multiple) * multiple, most))
        return pad([*rows, [pad_id] * width], pad_id)[:-1]

    def _cut(self, rows: list[list[int]], max_len: int) -> list[list[int]]:
        """Rows of at most max_len tokens; what was cut keeps its last token, which ends it."""
        self.left = Left(n_cut=sum(len(row) > max_len for row in rows), max_len=max_len)
        return [row if len(row) <= max_len else [*row[: max_len - 1], row[-1]] for row in rows]

    def _hidden(self, rows: list[list[int]], epoch: int, index: Sequence[int]) -> list[list[int]]:
        """Training rows with ``data.hide_rate`` of their tokens masked (Gal & Ghahramani 2016), special ones apart."""
        rate = self.config.data.hide_rate
        if not rate:
            return rows
        seed, out = self.config.train.seed, []
        for row, which in zip(rows, index, strict=True):
            gone = uniform(stable_key("hide", seed, epoch, int(which)), np.arange(len(row))) < rate
            out.append(
                [MASK if lost and token >= len(SPECIAL) else token for token, lost in zip(row, gone, strict=True)]
            )
        return out

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The special tokens of every tokenizer made here."""
        return {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}


def evaluate(
    task: Task,
    model: Model,
    loss_of: Any,
    *,
    split: str = "valid",
    n_batches: int | None = None,
    n_examples: int | None = None,
    beam: int = 1,
    length_penalty: float = 1.0,
) -> Evaluation:
    """Loss over a held-out set, and what the model answers there. ``loss_of(batch)`` sums over a batch's targets."""
    examples = task.examples(split)
    total, count = 0.0, 0
    for index, batch in enumerate(task.valid_batches(examples)):
        if index == n_batches:
            break
        total += float(loss_of(batch))
        count += batch.n_targets
    if not count:
        raise BadData(f"{task.source.name} has nothing held out to evaluate on")
    loss = total / count
    metrics: dict[str, float | str] = {f"{split}_loss": loss}
    if task.config.task in ("translate", "lm", "mlm", "caption"):
        metrics["perplexity"] = math.exp(min(loss, 700))
    answered, rows = task.answers(model, task._first(examples, n_examples), beam=beam, length_penalty=length_penalty)
    return Evaluation({**metrics, **answered}, rows)


def _one(target: str | list[str]) -> str:
    return target if isinstance(target, str) else target[0]


def by_length(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, each of at most ``most`` tokens: for generating and scoring."""
    order = np.argsort(np.asarray(sizes), kind="stable")[::-1].tolist()
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * sizes[group[0]] > most:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def shortened(rows: list[list[int]], most: int) -> tuple[list[list[int]], int]:
    """Rows of at most ``most`` tokens, the last one of each kept as it ends the text, and how many had to be cut."""
    n_longer = sum(len(row) > most for row in rows)
    return [row if len(row) <= most else [*row[: most - 1], row[-1]] for row in rows], n_longer


def uneven(n_rows: int, at_once: int) -> bool:
    """Whether the last batch of an epoch is smaller than the others."""
    return n_rows > at_once and n_rows % at_once > 0


def arange_mask(lengths: Sequence[int], width: int) -> torch.Tensor:
    """(B, T) booleans, True for the first lengths[b] places."""
    return torch.arange(width)[None] < torch.tensor(list(lengths))[:, None]
