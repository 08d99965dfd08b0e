"""Classification of texts and images."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import ModelConfig
from ...data.batching import BatchPlan
from ...data.examples import Example, ImageExample, Labelled
from ...data.images import image_batch
from ...models import Model
from ...text.image_processor import ImageProcessor
from ...text.processor import Processor
from ...text.tokenizer import Tokenizer
from .. import metrics
from ..loss import Batch
from ..metrics.statistics import Statistics
from ..precision import Precision
from .task import (
    MAX_TOKENIZER_TEXTS,
    ExampleResult,
    Scores,
    SkippedExamples,
    StatisticsPair,
    Task,
    group_by_length,
    has_partial_batch,
    truncate,
)


class ClassificationTask(Task):
    """What texts and images share: labels, accuracy, macro F1."""

    criterion = "accuracy"
    reports_perplexity = False
    has_labels = True

    @property
    def labels(self) -> tuple[str, ...]:
        labels = self.processor.labels or self.source.labels
        assert labels is not None
        return labels

    def check_model(self, model_name: str, model: ModelConfig) -> None:
        super().check_model(model_name, model)
        labels = self.processor.labels or self.source.labels or ()
        if len(labels) != model.n_classes:
            named = f"{self.source.name} has the labels {', '.join(labels)}; data.labels=… names all of them in order"
            raise ValueError(f"{model_name} tells apart {model.n_classes} classes without names, but {named}")

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int, length_penalty: float
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        """``beam`` has no meaning here. The score of a row is the probability of its true class."""
        if not examples:
            return {}, []
        was_training = model.training
        model.eval()
        logits, _ = self._logits(model, examples)
        model.train(was_training)
        return self._results(logits, examples)

    def _results(
        self, logits: Tensor, examples: Sequence[Example]
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        predicted, true = logits.argmax(-1).tolist(), [cast(Labelled, x).label for x in examples]
        probabilities = logits.softmax(-1)
        rows = [
            ExampleResult(self._source_text(x), self.labels[truth], self.labels[guess], float(probabilities[i, truth]))
            for i, (x, truth, guess) in enumerate(zip(examples, true, predicted, strict=True))
        ]
        scores = metrics.classification(predicted, true, self.labels)
        return {"accuracy": scores.accuracy, "f1": scores.macro_f1}, rows

    @torch.no_grad()
    def _logits(
        self, model: Model, examples: Sequence[Example], precision: Precision | None = None
    ) -> tuple[Tensor, int]:
        """(N, classes) on the CPU, and the number of tokens read."""
        logits, n_tokens = torch.zeros(len(examples), len(self.labels)), 0
        precision = precision or Precision("fp32", model.device)
        for index, batch in self.valid_groups(examples):
            moved = batch.to(model.device)
            with precision.forward():
                logits[index] = model(*moved.inputs, **moved.options).float().cpu()
            n_tokens += batch.n_tokens
        return logits, n_tokens

    def score(
        self,
        model: Model,
        examples: Sequence[Example],
        precision: Precision,
        *,
        beam: int = 1,
        length_penalty: float = 1.0,
        stride: int | None = None,
    ) -> Scores:
        start = time.perf_counter()
        logits, n_tokens = self._logits(model, examples, precision)
        seconds = time.perf_counter() - start
        true, predicted = [cast(Labelled, x).label for x in examples], logits.argmax(-1).tolist()
        losses = F.cross_entropy(logits, torch.tensor(true), reduction="none").double().numpy()
        answered, rows = self._results(logits, examples)
        rows = [replace(row, loss=float(loss)) for row, loss in zip(rows, losses, strict=True)]
        scores = metrics.classification(predicted, true, self.labels).to_dict()
        found: dict[str, Any] = {"loss": self.check_finite(float(losses.mean())), **answered}

        def statistics() -> list[Statistics]:
            hits = [float(row.output == row.target) for row in rows]
            return [
                metrics.mean_statistics("accuracy", hits),
                metrics.macro_f1_statistics(predicted, true, self.labels),
                metrics.loss_statistics(losses),
            ]

        details = {name: scores[name] for name in ("classes", "confusion")}
        return Scores(len(rows), found, rows, n_tokens, seconds, details, statistics)

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[StatisticsPair]:
        return super().paired_statistics(ours, theirs, same_tokens=True)  # the loss is per example, not per token

    def _source_text(self, example: Example) -> str:
        raise NotImplementedError


class Classify(ClassificationTask):
    """A text and its class."""

    name = "classify"
    kinds = ("labelled",)
    template = "bos-eos"
    needs_positions = True

    @classmethod
    def accepts(cls, model: ModelConfig) -> bool:
        return (model.architecture, model.source, model.head) == ("encoder", "text", "classify")

    def _new_processor(self) -> Processor:
        texts = [cast(Labelled, x).text for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS)]
        return Processor(source=self._new_tokenizer(texts), labels=self.source.labels)

    @property
    def _tokens(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.source)

    @property
    def model_config(self) -> ModelConfig:
        max_len = max(self.config.data.max_len, self.config.model.max_len)
        sizes = {"vocab_size": self._tokens.size, "n_classes": len(self.labels), "max_len": max_len}
        return self.config.model.with_(**sizes, **self._special_ids)

    @cached_property
    def _encoded(self) -> list[list[int]]:
        rows = self._tokens.encode_all(cast(Labelled, x).text for x in self.source.train)
        max_len = self.config.data.max_len
        shortened, n_longer = truncate(rows, max_len)
        if self.config.data.too_long == "drop":
            self.skipped = SkippedExamples(n_dropped=n_longer, max_len=max_len)
            return rows
        self.skipped = SkippedExamples(n_cut=n_longer, max_len=max_len)
        return shortened

    @cached_property
    def _order(self) -> BatchPlan:
        return self._plan([len(row) for row in self._encoded], max_len=self.config.data.max_len)

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, place = self._order.at(number)
        index = self._order.batch(epoch, place).tolist()
        rows = self._hide_tokens([self._encoded[i] for i in index], epoch, index)
        return self._collate(rows, [cast(Labelled, self.source.train[i]).label for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        labelled = cast(Sequence[Labelled], examples)
        rows = self._tokens.encode_all(x.text for x in labelled)
        rows, self.n_held_out_cut = truncate(rows, self.config.data.max_len)
        for group in group_by_length([len(row) for row in rows], max(self.config.train.batch_tokens, 16384)):
            yield group, self._collate([rows[i] for i in group], [labelled[i].label for i in group])

    def _collate(self, rows: list[list[int]], labels: list[int]) -> Batch:
        pad_id = self._tokens.pad_id
        tokens = self._pad(rows, pad_id, max(self.config.data.max_len, self.config.model.max_len))
        return Batch((tokens,), torch.tensor(labels), {"padding_mask": tokens != pad_id}, sum(map(len, rows)))

    def _source_text(self, example: Example) -> str:
        return cast(Labelled, example).text


class ClassifyImages(ClassificationTask):
    """An image and its class."""

    name = "classify-images"
    kinds = ("images",)
    processor_parts = ("image",)

    @classmethod
    def accepts(cls, model: ModelConfig) -> bool:
        return (model.architecture, model.source, model.head) == ("encoder", "image", "classify")

    def _new_processor(self) -> Processor:
        return Processor(image=new_image_processor(self.config.model), labels=self.source.labels)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(n_classes=len(self.labels))

    @cached_property
    def _order(self) -> BatchPlan:
        return BatchPlan.by_examples(len(self.source.train), self._batch_size, seed=self.config.train.seed)

    @property
    def ragged(self) -> bool:
        return has_partial_batch(len(self.source.train), self._batch_size)

    @property
    def _batch_size(self) -> int:
        return images_per_batch(self.config.model, self.config.train.batch_tokens, self.config.train.batch_size)

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, place = self._order.at(number)
        index, data = self._order.batch(epoch, place).tolist(), self.config.data
        seed = self.config.train.seed
        return self._collate(self.source.train, index, shift=data.shift, flip=data.flip, seed=seed, epoch=epoch)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        for first in range(0, len(examples), 512):
            index = list(range(first, min(first + 512, len(examples))))
            yield index, self._collate(examples, index)

    def _collate(self, examples: Sequence[Example], index: Sequence[int], **augmentation: Any) -> Batch:
        images, model = cast(Sequence[ImageExample], examples), self.config.model
        pixels = image_pixels(self.processor, model, images, index, **augmentation)
        labels = torch.tensor([images[int(i)].label for i in index])
        return Batch((pixels,), labels, n_tokens=len(index) * (model.image_size // model.patch_size) ** 2)

    def _source_text(self, example: Example) -> str:
        return image_name(cast(ImageExample, example))


def new_image_processor(model: ModelConfig) -> ImageProcessor:
    half = (0.5,) * model.n_channels
    return ImageProcessor((model.image_size, model.image_size), half, half)


def image_pixels(
    processor: Processor,
    model: ModelConfig,
    examples: Sequence[ImageExample],
    index: Sequence[int],
    **augmentation: Any,
) -> Tensor:
    """pixels (B, C, H, W) of the images at ``index``, normalised as the processor says."""
    image = processor.image
    assert image is not None
    size, channels = model.image_size, model.n_channels
    return image_batch(examples, index, size=size, channels=channels, mean=image.mean, std=image.std, **augmentation)


def images_per_batch(model: ModelConfig, batch_tokens: int, batch_size: int | None) -> int:
    """As many images as batch_tokens allow, a patch being a token."""
    rows = max(1, batch_tokens // (model.image_size // model.patch_size) ** 2)
    return rows if batch_size is None else min(rows, batch_size)


def image_name(example: ImageExample) -> str:
    name = getattr(example.image, "name", None)
    return str(name) if name else "image"
