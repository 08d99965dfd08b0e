"""Classification of texts and images."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config import DataConfig, ModelConfig, RunConfig
from ...data.batching import (
    BatchPlan,
    balanced_rows,
    cut_pair,
    group_by_length,
    has_partial_batch,
    index_groups,
    pair_segments,
    truncate,
)
from ...data.example_files import ExampleFile
from ...data.examples import Example, ImageExample, Label, Labelled, image_name
from ...data.sources import Source
from ...data.token_files import Pieces, TokenFile, whole_documents
from ...errors import UsageError
from ...generation.generate import inference
from ...models import Model
from ...text.processor import Processor
from ..loss import Batch
from ..metrics.statistics import Statistics
from ..precision import Precision
from .image_task import ImageTask
from .targets import TARGETS, Answers, Target
from .task import MAX_TOKENIZER_TEXTS, AnswerResults, ExampleResult, Scores, Task


class ClassificationTask(Task):
    """The common part of text and image classification; the Target decides what labels mean."""

    command = "classify"
    eval_examples = None
    reports_perplexity = False
    has_labels = True

    @classmethod
    def metric_table(cls, config: RunConfig) -> tuple[str, Mapping[str, str]]:
        target = TARGETS[config.data.problem_type]
        return target.criterion, target.metric_keys

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        super().check_config(config)
        problem_type, train = config.data.problem_type, config.train
        if problem_type == "regression" and train.class_weights != "none":
            raise UsageError("train.class_weights is for classes, but data.problem_type=regression learns numbers")
        if problem_type != "single_label" and train.sampling == "balanced":
            raise UsageError(f"train.sampling=balanced needs one class for each example, not {problem_type}")

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        return super().data_defaults(model).with_(problem_type=model.problem_type)

    @cached_property
    def target(self) -> Target:
        return TARGETS[self.config.data.problem_type](self.labels)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.processor.labels or self.source.labels or ()

    @property
    def _head_fields(self) -> dict[str, Any]:
        """The fields of a model that follow from the labels."""
        return {"n_classes": self.target.n_outputs, "problem_type": self.config.data.problem_type}

    @property
    def model_config(self) -> ModelConfig:
        sizes = {"max_len": self._max_width, **self._head_fields}
        return self.config.model.with_(**sizes, **self._token_fields(self.tokenizer))

    @property
    def notes(self) -> list[str]:
        if self._class_weights is None:
            return super().notes
        pairs = zip(self.labels, self._class_weights.tolist(), strict=True)
        weights = ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)
        return [*super().notes, f"class weights: {weights}"]

    @cached_property
    def _class_weights(self) -> Tensor | None:
        """The factor on the training loss of each class (classes,); None: all 1."""
        weights = self.config.train.class_weights
        if weights == "none":
            return None
        if weights == "balanced":
            return self.target.balanced_weights(self._training_labels())
        if len(weights) != len(self.labels):
            names = ", ".join(self.labels)
            raise UsageError(f"train.class_weights has {len(weights)} numbers for {len(self.labels)} classes: {names}")
        return torch.tensor(weights)

    def _training_labels(self) -> list[Label]:
        return _labels(self.source.train)

    @cached_property
    def _epoch_rows(self) -> NDArray[np.int64]:
        """The training example of each row of the batch plan."""
        if self.config.train.sampling == "balanced":
            return balanced_rows(self._training_labels())
        return np.arange(len(self.source.train))

    def batch(self, number: int) -> Batch:
        batch, factors = super().batch(number), self._class_weights
        return batch if factors is None else replace(batch, weights=self.target.weights(factors, batch.targets))

    def check_model(self, model_name: str, model: ModelConfig) -> None:
        super().check_model(model_name, model)
        if model.problem_type != self.config.data.problem_type:
            problem_type = self.config.data.problem_type
            raise ValueError(
                f"{model_name} has problem_type={model.problem_type}, but data.problem_type={problem_type}"
            )
        if self.target.n_outputs != model.n_classes:
            names = ", ".join(self.labels)
            named = f"{self.source.name} has the labels {names}; data.labels=… names all of them in order"
            raise ValueError(f"{model_name} has {model.n_classes} classes without names, but {named}")

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        with inference(model):
            logits, _ = self._logits(model, examples, Precision("fp32", model.device))
        answers = self.target.measure(logits, _labels(examples))
        return {"n": len(examples), **answers.metrics}, self._results(answers, examples)

    @torch.no_grad()
    def _logits(self, model: Model, examples: Sequence[Example], precision: Precision) -> tuple[Tensor, int]:
        """Logits (N, classes) on the CPU, and the number of tokens read."""
        logits, n_tokens = torch.zeros(len(examples), self.target.n_outputs), 0
        for index, batch in self.valid_groups(examples):
            moved = batch.to(model.device)
            with precision.forward():
                logits[index] = model(*moved.inputs, **moved.options).float().cpu()
            n_tokens += batch.n_tokens
        return logits, n_tokens

    def _results(self, answers: Answers, examples: Sequence[Example]) -> list[ExampleResult]:
        rows = zip(examples, _labels(examples), answers.outputs, answers.scores, strict=True)
        return [ExampleResult(_input_text(x), self.target.text(label), out, score) for x, label, out, score in rows]

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """One pass gives loss and answers; there are no options."""
        start = time.perf_counter()
        logits, n_tokens = self._logits(model, examples, precision)
        seconds = time.perf_counter() - start
        losses = self.target.losses(logits, _labels(examples)).double().numpy()
        loss, answers = self.check_finite(float(losses.mean())), self.target.measure(logits, _labels(examples))
        rows = zip(self._results(answers, examples), losses, strict=True)
        return Scores(
            n=len(examples),
            metrics={"loss": loss, **answers.metrics},
            rows=[replace(row, loss=float(each)) for row, each in rows],
            n_tokens=n_tokens,
            seconds=seconds,
            details=answers.details,
            losses=(losses, np.ones_like(losses)),
        )

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return self.target.statistics(outputs, references)

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        return super().paired_statistics(ours, theirs, same_tokens=True)  # the loss is per example, not per token


class Classify(ClassificationTask):
    """Classification of a text or a pair of texts."""

    name = "classify"
    kinds = ("labelled",)
    template = "bos-eos"
    needs_positions = True

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        super().__init__(config, source, processor)
        self.processor = self.processor.with_pairs(self._has_pairs)

    def _new_processor(self) -> Processor:
        examples = cast(list[Labelled], self.first(self.source.train, MAX_TOKENIZER_TEXTS))
        texts = [text for x in examples for text in (x.text, x.second) if text is not None]
        return Processor(source=self._new_tokenizer(texts), labels=self.source.labels)

    @cached_property
    def _train(self) -> TokenFile:
        def pieces() -> Pieces:
            return whole_documents(self._encode(self._tracked_train("texts")))

        return self._tokens("pairs" if self._has_pairs else "text", self.tokenizer, pieces)

    def _encode(self, examples: Iterable[Example]) -> Iterator[list[int]]:
        """Token ids of texts or of pairs of texts."""
        texts = cast(Iterable[Labelled], examples)
        if self._has_pairs:
            return self.tokenizer.encode_pairs((x.text, x.second or "") for x in texts)
        return self.tokenizer.encode_stream(x.text for x in texts)

    def _cut(self, rows: list[list[int]]) -> tuple[list[list[int]], int]:
        """Rows of at most max_len tokens, and how many were longer; in a pair, the longer text is cut first."""
        max_len, separator = self.config.data.max_len, self._separator
        if separator is None:
            return truncate(rows, max_len)
        n_longer = sum(len(row) > max_len for row in rows)
        return [cut_pair(row, separator, max_len) for row in rows], n_longer

    @cached_property
    def _has_pairs(self) -> bool:
        examples = cast(Sequence[Labelled], self.source.train or self.source.valid)
        return bool(examples) and examples[0].second is not None

    def example_words(self) -> list[str]:
        example = cast(Labelled, (self.source.valid or self.source.train)[0])
        return [example.text] if example.second is None else [example.text, "--second", example.second]

    @cached_property
    def _separator(self) -> int | None:
        """The token between the texts of a pair; None for single texts."""
        return self.tokenizer.separator_id if self._has_pairs else None

    @cached_property
    def batch_plan(self) -> BatchPlan:
        sizes = self._limit_lengths(self._train.sizes, cut=self.config.data.too_long != "drop")
        return self._plan_by_length(sizes[self._epoch_rows], self.config.data.max_len)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        examples = self._epoch_rows[index].tolist()
        rows, _ = self._cut([self._train.document(i) for i in examples])
        return self._collate(self._hide_tokens(rows, epoch, index), _labels([self.source.train[i] for i in examples]))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows, self.n_held_out_cut = self._cut(list(self._encode(examples)))
        for group in group_by_length([len(row) for row in rows], max(self.config.train.batch_tokens, 16384)):
            yield group, self._collate([rows[i] for i in group], _labels([examples[i] for i in group]))

    def _collate(self, rows: list[list[int]], labels: list[Label]) -> Batch:
        tokens, padding_mask = self._pad(rows, self.tokenizer.pad_id, self._max_width)
        options = {"padding_mask": padding_mask}
        if self._separator is not None and self.config.model.n_segments > 1:
            options["segments"] = pair_segments(tokens, self._separator)
        return Batch((tokens,), self.target.tensor(labels), options, sum(map(len, rows)))


class ClassifyImages(ImageTask, ClassificationTask):
    """Classification of images."""

    name = "classify-images"
    kinds = ("images",)

    def _new_processor(self) -> Processor:
        return Processor(image=self._new_image_processor(), labels=self.source.labels)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(**self._head_fields)

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
        targets = self.target.tensor(_labels([examples[i] for i in index]))
        return Batch((self._pixels(examples, index, epoch),), targets, n_tokens=len(index) * self._n_patches)


def _labels(examples: Sequence[Example]) -> list[Label]:
    if isinstance(examples, ExampleFile) and examples.labels is not None:
        return examples.labels.tolist()
    return [cast(Labelled, x).label for x in examples]  # images have labels too


def _input_text(example: Example) -> str:
    """The input as text: a text, two texts separated by a tab, or the name of an image."""
    if isinstance(example, Labelled):
        return example.text if example.second is None else f"{example.text}\t{example.second}"
    return image_name(cast(ImageExample, example))
