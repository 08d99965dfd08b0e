"""Classification of texts and images."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...config import ModelConfig
from ...data.batching import BatchPlan, balanced_rows
from ...data.example_files import ExampleFile
from ...data.examples import Example, ImageExample, Labelled
from ...data.token_files import Pieces, TokenFile, whole_documents
from ...errors import UsageError
from ...models import Model
from ...text.processor import Processor
from ..loss import Batch
from ..metrics import classification_metrics as metrics
from ..metrics.statistics import Statistics
from ..precision import Precision
from .task import (
    MAX_TOKENIZER_TEXTS,
    ExampleResult,
    ImageTask,
    Scores,
    SkippedExamples,
    Task,
    group_by_length,
    has_partial_batch,
    image_name,
    index_groups,
    truncate,
)


class ClassificationTask(Task):
    """What texts and images share: labels, accuracy, macro F1."""

    command = "classify"
    criterion = "accuracy"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "accuracy": "accuracy", "macro_f1": "f1"}
    eval_examples = None
    reports_perplexity = False
    has_labels = True

    @property
    def labels(self) -> tuple[str, ...]:
        return self.processor.labels or self.source.labels or ()

    @property
    def notes(self) -> list[str]:
        names = [] if self._class_weights is None else zip(self.labels, self._class_weights.tolist(), strict=True)
        weights = ", ".join(f"{name} {weight:.3g}" for name, weight in names)
        return [*super().notes, *([f"class weights: {weights}"] if weights else [])]

    @cached_property
    def _class_weights(self) -> Tensor | None:
        """A factor on the training loss of each class (classes,)."""
        weights = self.config.train.class_weights
        if weights == "none":
            return None
        if weights == "balanced":  # King & Zeng 2001, as scikit-learn has it
            n_of = np.bincount(_classes(self.source.train), minlength=len(self.labels))
            return torch.from_numpy(n_of.sum() / ((n_of > 0).sum() * np.maximum(n_of, 1))).float()
        if len(weights) != len(self.labels):
            names = ", ".join(self.labels)
            raise UsageError(f"train.class_weights has {len(weights)} numbers for {len(self.labels)} classes: {names}")
        return torch.tensor(weights)

    @cached_property
    def _epoch_rows(self) -> NDArray[np.int64]:
        """Which training example each row of the batch plan is."""
        if self.config.train.sampling == "balanced":
            return balanced_rows(_classes(self.source.train))
        return np.arange(len(self.source.train))

    def batch(self, number: int) -> Batch:
        batch, weights = super().batch(number), self._class_weights
        return batch if weights is None else replace(batch, weights=weights[batch.targets])

    def check_model(self, model_name: str, model: ModelConfig) -> None:
        super().check_model(model_name, model)
        if len(self.labels) != model.n_classes:
            names = ", ".join(self.labels)
            named = f"{self.source.name} has the labels {names}; data.labels=… names all of them in order"
            raise ValueError(f"{model_name} tells apart {model.n_classes} classes without names, but {named}")

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int = 1, length_penalty: float = 1.0
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        """``beam`` has no meaning here. The score of a row is the probability of its true class."""
        if not examples:
            return {}, []
        was_training = model.training
        model.eval()
        logits, _ = self._logits(model, examples, Precision("fp32", model.device))
        model.train(was_training)
        scores, rows = self._results(logits, examples)
        return {"n": scores.n, "accuracy": scores.accuracy, "f1": scores.macro_f1}, rows

    @torch.no_grad()
    def _logits(self, model: Model, examples: Sequence[Example], precision: Precision) -> tuple[Tensor, int]:
        """(N, classes) on the CPU, and the number of tokens read."""
        logits, n_tokens = torch.zeros(len(examples), len(self.labels)), 0
        for index, batch in self.valid_groups(examples):
            moved = batch.to(model.device)
            with precision.forward():
                logits[index] = model(*moved.inputs, **moved.options).float().cpu()
            n_tokens += batch.n_tokens
        return logits, n_tokens

    def _results(
        self, logits: Tensor, examples: Sequence[Example]
    ) -> tuple[metrics.ClassificationScores, list[ExampleResult]]:
        predicted, true = logits.argmax(-1).tolist(), _classes(examples)
        probabilities = logits.softmax(-1)
        rows = []
        for i, (example, truth, guess) in enumerate(zip(examples, true, predicted, strict=True)):
            text = example.text if isinstance(example, Labelled) else image_name(cast(ImageExample, example))
            rows.append(ExampleResult(text, self.labels[truth], self.labels[guess], float(probabilities[i, truth])))
        return metrics.classification(predicted, true, self.labels), rows

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """One pass gives loss and answers; no option of the search has a meaning here."""
        start = time.perf_counter()
        logits, n_tokens = self._logits(model, examples, precision)
        seconds = time.perf_counter() - start
        losses = F.cross_entropy(logits, torch.tensor(_classes(examples)), reduction="none").double().numpy()
        scores, rows = self._results(logits, examples)
        rows = [replace(row, loss=float(loss)) for row, loss in zip(rows, losses, strict=True)]
        loss, document = self.check_finite(float(losses.mean())), scores.to_dict()
        return Scores(
            n=len(rows),
            metrics={"loss": loss, "accuracy": scores.accuracy, "f1": scores.macro_f1},
            rows=rows,
            n_tokens=n_tokens,
            seconds=seconds,
            details={name: document[name] for name in ("classes", "confusion")},
            losses=(losses, np.ones_like(losses)),
        )

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        predicted, true = ([self.labels.index(label) for label in labels] for labels in (outputs, references))
        return [metrics.accuracy_statistics(predicted, true), metrics.macro_f1_statistics(predicted, true, self.labels)]

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        return super().paired_statistics(ours, theirs, same_tokens=True)  # the loss is per example, not per token


class Classify(ClassificationTask):
    """A text and its class."""

    name = "classify"
    kinds = ("labelled",)
    template = "bos-eos"
    needs_positions = True

    def _new_processor(self) -> Processor:
        texts = [cast(Labelled, x).text for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS)]
        return Processor(source=self._new_tokenizer(texts), labels=self.source.labels)

    @property
    def model_config(self) -> ModelConfig:
        sizes = {"n_classes": len(self.labels), "max_len": self._max_width}
        return self.config.model.with_(**sizes, **self._token_fields(self.tokenizer))

    @property
    def _max_width(self) -> int:
        return max(self.config.data.max_len, self.config.model.max_len)

    @cached_property
    def _train(self) -> TokenFile:
        def pieces() -> Pieces:
            texts = (cast(Labelled, x).text for x in self._tracked_train("texts"))
            return whole_documents(self.tokenizer.encode_stream(texts))

        return self._tokens("text", self.tokenizer, pieces, None)

    @cached_property
    def batch_plan(self) -> BatchPlan:
        max_len, sizes = self.config.data.max_len, self._train.sizes
        n_longer = int((sizes > max_len).sum())
        if self.config.data.too_long == "drop":
            self.skipped = SkippedExamples(n_dropped=n_longer, max_len=max_len)
        else:
            self.skipped, sizes = SkippedExamples(n_cut=n_longer, max_len=max_len), np.minimum(sizes, max_len)
        return self._plan_by_length(sizes[self._epoch_rows], max_len)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        examples = self._epoch_rows[index].tolist()
        rows, _ = truncate([self._train.document(i) for i in examples], self.config.data.max_len)
        return self._collate(self._hide_tokens(rows, epoch, index), _classes([self.source.train[i] for i in examples]))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows = self.tokenizer.encode_all(cast(Labelled, x).text for x in examples)
        rows, self.n_held_out_cut = truncate(rows, self.config.data.max_len)
        for group in group_by_length([len(row) for row in rows], max(self.config.train.batch_tokens, 16384)):
            yield group, self._collate([rows[i] for i in group], _classes([examples[i] for i in group]))

    def _collate(self, rows: list[list[int]], labels: list[int]) -> Batch:
        pad_id = self.tokenizer.pad_id
        tokens = self._pad(rows, pad_id, self._max_width)
        return Batch((tokens,), torch.tensor(labels), {"padding_mask": tokens != pad_id}, sum(map(len, rows)))


class ClassifyImages(ImageTask, ClassificationTask):
    """An image and its class."""

    name = "classify-images"
    kinds = ("images",)

    def _new_processor(self) -> Processor:
        return Processor(image=self._new_image_processor(), labels=self.source.labels)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(n_classes=len(self.labels))

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_by_rows(len(self._epoch_rows), self._n_patches)

    @property
    def ragged(self) -> bool:
        return has_partial_batch(self.batch_plan)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._collate(self.source.train, self._epoch_rows[index].tolist(), epoch)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        return ((index, self._collate(examples, index)) for index in index_groups(len(examples), 512))

    def _collate(self, examples: Sequence[Example], index: list[int], epoch: int | None = None) -> Batch:
        labels = torch.tensor(_classes([examples[i] for i in index]))
        return Batch((self._pixels(examples, index, epoch),), labels, n_tokens=len(index) * self._n_patches)


def _classes(examples: Sequence[Example]) -> list[int]:
    if isinstance(examples, ExampleFile) and examples.labels is not None:
        return examples.labels.tolist()
    return [cast(Labelled, x).label for x in examples]  # images have labels too
