"""Classification of texts and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
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
from .task import Left, Row, Task, by_length, shortened, uneven

__all__ = ["Classes", "Classify", "ClassifyImages"]


class Classes(Task):
    criterion = "accuracy"

    @property
    def labels(self) -> tuple[str, ...]:
        labels = self.processor.labels or self.source.labels
        assert labels is not None
        return labels

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int, length_penalty: float
    ) -> tuple[dict[str, float | str], list[Row]]:
        """``beam`` is of no use here. The score of a row is the probability of its true class."""
        if not examples:
            return {}, []
        return self.judged(self.logits(model, examples), examples)

    def judged(self, logits: Tensor, examples: Sequence[Example]) -> tuple[dict[str, float | str], list[Row]]:
        """The same from the logits (N, classes)."""
        said, true = logits.argmax(-1).tolist(), [cast(Labelled, x).label for x in examples]
        shares = logits.softmax(-1)
        rows = [
            Row(self._shown(x), self.labels[truth], self.labels[found], float(shares[place, truth]))
            for place, (x, truth, found) in enumerate(zip(examples, true, said, strict=True))
        ]
        found = metrics.classification(said, true, self.labels)
        return {"accuracy": found.accuracy, "f1": found.macro_f1}, rows

    def logits(self, model: Model, examples: Sequence[Example]) -> Tensor:
        """(N, classes) on the CPU."""
        out = torch.zeros(len(examples), len(self.labels))
        was = model.training
        model.eval()
        with torch.no_grad():
            for group, batch in self.valid_groups(examples):
                batch = batch.to(model.device)
                out[group] = model(*batch.inputs, **batch.options).float().cpu()
        model.train(was)
        return out

    def _shown(self, example: Example) -> str:
        raise NotImplementedError


class Classify(Classes):
    """A text and its class."""

    kinds = ("labelled",)
    template = "bos-eos"

    def _new_processor(self) -> Processor:
        texts = [cast(Labelled, x).text for x in self._first(self.source.train, 200_000)]
        return Processor(source=self._tokenizer(texts), labels=self.source.labels)

    @property
    def _tokens(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.source)

    @property
    def model_config(self) -> ModelConfig:
        max_len = max(self.config.data.max_len, self.config.model.max_len)
        sizes = {"vocab_size": self._tokens.size, "n_classes": len(self.labels), "max_len": max_len}
        return self.config.model.with_(**sizes, **self._ids)

    @cached_property
    def _encoded(self) -> list[list[int]]:
        rows = self._tokens.encode_all(cast(Labelled, x).text for x in self.source.train)
        data = self.config.data
        if data.too_long != "drop":
            return self._cut(rows, data.max_len)
        self.left = Left(n_dropped=sum(len(row) > data.max_len for row in rows), max_len=data.max_len)
        return rows

    @cached_property
    def _order(self) -> BatchPlan:
        return self._plan([len(row) for row in self._encoded], max_len=self.config.data.max_len)

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, place = self._order.at(number)
        index = self._order.batch(epoch, place).tolist()
        rows = self._hidden([self._encoded[i] for i in index], epoch, index)
        return self._of(rows, [cast(Labelled, self.source.train[i]).label for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        known = cast(Sequence[Labelled], examples)
        rows = self._tokens.encode_all(x.text for x in known)
        rows, self.held_out_cut = shortened(rows, self.config.data.max_len)
        for group in by_length([len(row) for row in rows], max(self.config.train.batch_tokens, 16384)):
            yield group, self._of([rows[i] for i in group], [known[i].label for i in group])

    def _of(self, rows: list[list[int]], labels: list[int]) -> Batch:
        pad_id = self._tokens.pad_id
        tokens = self._padded(rows, pad_id, max(self.config.data.max_len, self.config.model.max_len))
        return Batch((tokens,), torch.tensor(labels), {"keep": tokens != pad_id}, sum(map(len, rows)))

    def _shown(self, example: Example) -> str:
        return cast(Labelled, example).text


class ClassifyImages(Classes):
    """An image and its class."""

    kinds = ("images",)

    def _new_processor(self) -> Processor:
        return Processor(image=_image_processor(self.config.model), labels=self.source.labels)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(n_classes=len(self.labels))

    @cached_property
    def _order(self) -> BatchPlan:
        return BatchPlan.by_examples(len(self.source.train), self._at_once, seed=self.config.train.seed)

    @property
    def ragged(self) -> bool:
        return uneven(len(self.source.train), self._at_once)

    @property
    def _at_once(self) -> int:
        return images_at_once(self.config.model, self.config.train.batch_tokens, self.config.train.batch_size)

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, place = self._order.at(number)
        index, data, model = self._order.batch(epoch, place), self.config.data, self.config.model
        examples = cast(Sequence[ImageExample], self.source.train)
        image = self.processor.image
        assert image is not None
        pixels = image_batch(
            examples,
            index,
            size=model.image_size,
            channels=model.n_channels,
            mean=image.mean,
            std=image.std,
            shift=data.shift,
            flip=data.flip,
            seed=self.config.train.seed,
            epoch=epoch,
        )
        return self._of(pixels, [examples[int(i)] for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        known, image = cast(Sequence[ImageExample], examples), self.processor.image
        size, channels = self.config.model.image_size, self.config.model.n_channels
        assert image is not None
        for first in range(0, len(known), 512):
            group = list(range(first, min(first + 512, len(known))))
            pixels = image_batch(known, group, size=size, channels=channels, mean=image.mean, std=image.std)
            yield group, self._of(pixels, [known[i] for i in group])

    def _of(self, pixels: Tensor, examples: Sequence[ImageExample]) -> Batch:
        model = self.config.model
        n_tokens = len(examples) * (model.image_size // model.patch_size) ** 2
        return Batch((pixels,), torch.tensor([x.label for x in examples]), n_tokens=n_tokens)

    def _shown(self, example: Example) -> str:
        return shown_image(cast(ImageExample, example))


def _image_processor(model: ModelConfig) -> ImageProcessor:
    half = (0.5,) * model.n_channels
    return ImageProcessor((model.image_size, model.image_size), half, half)


def images_at_once(model: ModelConfig, batch_tokens: int, batch_size: int | None) -> int:
    """Images of a batch: as many as batch_tokens allow, a patch being a token."""
    rows = max(1, batch_tokens // (model.image_size // model.patch_size) ** 2)
    return rows if batch_size is None else min(rows, batch_size)


def shown_image(example: ImageExample) -> str:
    """What an image is called."""
    name = getattr(example.image, "name", None)
    return str(name) if name else "image"
