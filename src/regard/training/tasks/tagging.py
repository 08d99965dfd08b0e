"""A tag for every word of a sentence: named entities (B-PER, I-PER, O …), parts of speech."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import eq
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ...config import RunConfig
from ...data.batching import BatchPlan, group_by_length, truncate
from ...data.examples import Example, Label, Tagged
from ...data.packing import IGNORE
from ...errors import UsageError
from ...foundation.jsonio import to_jsonable
from ...models import Model
from ...text.processor import Processor
from ..loss import Batch
from ..metrics import classification_metrics
from ..metrics.statistics import Statistics
from ..precision import Precision
from .classification import ClassificationTask
from .task import MAX_TOKENIZER_TEXTS, ExampleResult, Scores, Task

Row = tuple[list[int], list[int]]  # token ids of a sentence, and the position of each word's first token (-1: cut off)


class Tag(ClassificationTask):
    """Words and their tags. The first token of a word predicts its tag, as in BERT (Devlin et al. 2019, §5.3)."""

    name = "tag"
    kinds = ("tagged",)
    template = "bos-eos"
    needs_positions = True
    metric_keys: ClassVar[Mapping[str, str]] = {
        "loss": "valid_loss",
        "accuracy": "accuracy",
        "entity_f1": "f1",
        "macro_f1": "f1",
    }

    @classmethod
    def metric_table(cls, config: RunConfig) -> tuple[str, Mapping[str, str]]:
        return "f1", cls.metric_keys

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        super().check_config(config)
        if config.data.problem_type != "single_label" or config.train.sampling == "balanced":
            raise UsageError("data.problem_type and train.sampling are for labels of whole texts, not for the task tag")

    def _new_processor(self) -> Processor:
        texts = [cast(Tagged, x).text for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS)]
        return Processor(source=self._new_tokenizer(texts), labels=self.source.labels)

    def _training_labels(self) -> list[Label]:
        return [tag for x in self.source.train for tag in cast(Tagged, x).tags]

    def _encode(self, examples: Sequence[Example]) -> tuple[list[Row], NDArray[np.int64]]:
        """Rows of at most max_len tokens, and the number of tokens of each whole sentence."""
        max_len = self.config.data.max_len
        rows: list[Row] = []
        lengths: list[int] = []
        for example in examples:
            ids, first = self.tokenizer.encode_words(cast(Tagged, example).words)
            lengths.append(len(ids))
            if len(ids) > max_len:  # the last token of a row that is cut ends the text
                ids, first = truncate([ids], max_len)[0][0], [p if p < max_len - 1 else -1 for p in first]
            rows.append((ids, first))
        return rows, np.array(lengths)

    @cached_property
    def _encoded_rows(self) -> tuple[list[Row], NDArray[np.int64]]:
        return self._encode(self.source.train)

    @cached_property
    def batch_plan(self) -> BatchPlan:
        lengths = self._limit_lengths(self._encoded_rows[1], cut=self.config.data.too_long != "drop")
        return self._plan_by_length(lengths, self.config.data.max_len)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        rows, _ = self._encoded_rows
        hidden = self._hide_tokens([rows[i][0] for i in index], epoch, index)
        chosen = [(ids, rows[i][1]) for ids, i in zip(hidden, index, strict=True)]
        return self._collate(chosen, [self.source.train[i] for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        return self._groups(self._held_out_rows(examples), examples)

    def _held_out_rows(self, examples: Sequence[Example]) -> list[Row]:
        rows, lengths = self._encode(examples)
        self.n_held_out_cut = int((lengths > self.config.data.max_len).sum())
        return rows

    def _groups(self, rows: list[Row], examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        for group in group_by_length([len(ids) for ids, _ in rows], max(self.config.train.batch_tokens, 16384)):
            yield group, self._collate([rows[i] for i in group], [examples[i] for i in group])

    def _collate(self, rows: list[Row], examples: Sequence[Example]) -> Batch:
        tokens, padding_mask = self._pad([ids for ids, _ in rows], self.tokenizer.pad_id, self._max_width)
        targets = torch.full_like(tokens, IGNORE)
        for row, ((_, first), example) in enumerate(zip(rows, examples, strict=True)):
            for position, tag in zip(first, cast(Tagged, example).tags, strict=True):
                if position >= 0:
                    targets[row, position] = tag
        return Batch((tokens,), targets, {"padding_mask": padding_mask}, sum(len(ids) for ids, _ in rows))

    answers = Task._answers_of_score

    @torch.no_grad()
    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """The loss and the tags of every sentence; the score of a row is the share of words with the correct tag.
        Words beyond ``data.max_len`` are tagged O."""
        outside = self.labels.index("O") if "O" in self.labels else 0
        tagged, rows = cast(Sequence[Tagged], examples), self._held_out_rows(examples)
        sums, counts = np.zeros(len(tagged)), np.zeros(len(tagged), dtype=np.int64)
        outputs: list[list[str]] = [[] for _ in tagged]
        n_tokens, start = 0, time.perf_counter()
        for index, batch in self._groups(rows, tagged):
            moved = batch.to(model.device)
            with precision.forward():
                logits = model(*moved.inputs, **moved.options).float().cpu()
            losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORE, reduction="none")
            sums[index], counts[index] = losses.sum(1).double(), (batch.targets != IGNORE).sum(1)
            for i, predicted in zip(index, logits.argmax(-1).tolist(), strict=True):
                outputs[i] = self._names([predicted[p] if p >= 0 else outside for p in rows[i][1]])
            n_tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        loss = self.check_finite(float(sums.sum() / max(1, counts.sum())))
        truth = [self._names(x.tags) for x in tagged]
        metrics = classification_metrics.tagging(outputs, truth)
        each = zip(tagged, truth, outputs, (sums / np.maximum(counts, 1)).tolist(), strict=True)
        results = [
            ExampleResult(x.text, " ".join(true), " ".join(predicted), sum(map(eq, predicted, true)) / len(true), mean)
            for x, true, predicted, mean in each
        ]
        return Scores(
            n=len(tagged),
            metrics={"loss": loss, "accuracy": metrics.accuracy, "f1": metrics.f1},
            rows=results,
            n_tokens=n_tokens,
            seconds=seconds,
            details={"classes": to_jsonable(metrics.classes)},
            losses=(sums, np.maximum(counts, 1)),
        )

    def _names(self, tags: Sequence[int]) -> list[str]:
        return [self.labels[tag] for tag in tags]

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return classification_metrics.tagging_statistics(
            [x.split(" ") for x in outputs], [x.split(" ") for x in references]
        )

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        return Task.paired_statistics(self, ours, theirs, same_tokens=True)  # the loss is per word, not per token
