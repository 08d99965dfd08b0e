"""Captions: an image, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import DataConfig, ModelConfig
from ...data.batching import BatchPlan
from ...data.examples import Example, ImageExample
from ...generation import GenerateConfig, generate
from ...models import Model
from ...text.processor import Processor
from ...text.tokenizer import Tokenizer
from .. import metrics
from ..loss import Batch, shift_targets
from ..metrics.statistics import Statistics
from .classification import image_name, image_pixels, images_per_batch, new_image_processor
from .task import ExampleResult, SkippedExamples, Task, truncate


class CaptionTask(Task):
    """An encoder over patches, a decoder over words (Xu et al. 2015, with a ViT for the convolutions).

    Each epoch shows each image once, with one of its captions in turn.
    """

    name = "caption"
    kinds = ("captions",)
    template = "eos"
    evaluation_options = ("beam", "length_penalty")
    processor_parts = ("target", "image")

    @classmethod
    def accepts(cls, model: ModelConfig) -> bool:
        return (model.architecture, model.source, model.head) == ("encoder-decoder", "image", "lm")

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        longest = model.max_target_len or model.max_len
        return DataConfig(max_len=longest, max_target_len=longest)

    def _new_processor(self) -> Processor:
        texts = [text for x in self.first(self.source.train, 40_000) for text in cast(ImageExample, x).captions]
        return Processor(target=self._new_tokenizer(texts), image=new_image_processor(self.config.model))

    @property
    def _tokens(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.target)

    @property
    def _most(self) -> int:
        return self.config.data.max_target_len or self.config.data.max_len

    @property
    def model_config(self) -> ModelConfig:
        model = self.config.model
        longest = max(self._most, model.max_target_len or model.max_len)
        return model.with_(vocab_size=self._tokens.size, max_target_len=longest, **self._special_ids)

    @cached_property
    def _order(self) -> BatchPlan:
        train = self.config.train
        at_once = images_per_batch(self.config.model, train.batch_tokens, train.batch_size)
        return BatchPlan.by_examples(len(self._images), at_once, seed=train.seed)

    @cached_property
    def _images(self) -> list[tuple[int, Sequence[str]]]:
        """The images to learn from, by number, and their captions; too long ones may have to go."""
        examples = cast(Sequence[ImageExample], self.source.train)
        if self.config.data.too_long != "drop":
            return [(i, x.captions) for i, x in enumerate(examples)]
        fits = [[len(row) <= self._most for row in self._tokens.encode_all(x.captions)] for x in examples]
        self.skipped = SkippedExamples(n_dropped=sum(not one for some in fits for one in some), max_len=self._most)
        kept = [
            [text for text, one in zip(x.captions, some, strict=True) if one]
            for x, some in zip(examples, fits, strict=True)
        ]
        return [(i, texts) for i, texts in enumerate(kept) if texts]

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, place = self._order.at(number)
        chosen, data = [self._images[int(i)] for i in self._order.batch(epoch, place)], self.config.data
        examples, index = cast(Sequence[ImageExample], self.source.train), [i for i, _ in chosen]
        captions = [texts[(epoch + i) % len(texts)] for i, texts in chosen]
        seed = self.config.train.seed
        pixels = image_pixels(
            self.processor, self.config.model, examples, index, shift=data.shift, flip=data.flip, seed=seed, epoch=epoch
        )
        return self._collate(pixels, captions)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Every caption of every image."""
        before, self.skipped = self.skipped, SkippedExamples()
        known = cast(Sequence[ImageExample], examples)
        for first in range(0, len(known), 64):
            group = known[first : first + 64]
            pixels = image_pixels(self.processor, self.config.model, group, range(len(group)))
            which = torch.tensor([place for place, x in enumerate(group) for _ in x.captions])
            batch = self._collate(pixels[which], [text for x in group for text in x.captions])
            yield (which + first).tolist(), batch
        self.n_held_out_cut, self.skipped = self.skipped.n_cut, before  # ``skipped`` is about training

    def _collate(self, pixels: Tensor, captions: Sequence[str]) -> Batch:
        rows, longer = truncate(self._tokens.encode_all(captions), self._most)
        if longer:
            self.skipped = SkippedExamples(n_cut=self.skipped.n_cut + longer, max_len=self._most)
        model, pad_id = self.config.model, self._tokens.pad_id
        said = self._pad(rows, pad_id, max(self._most, model.max_target_len or model.max_len))
        read, wanted = shift_targets(F.pad(said, (1, 0), value=self._tokens.bos_id), pad_id)
        patches = len(rows) * (model.image_size // model.patch_size) ** 2
        return Batch((pixels, read), wanted, n_tokens=patches + sum(len(row) + 1 for row in rows))

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int, length_penalty: float
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        known = cast(Sequence[ImageExample], examples)
        if not known:
            return {}, []
        outputs = []
        config = GenerateConfig(beam=beam, length_penalty=length_penalty, max_new_tokens=self._most)
        for first in range(0, len(known), 128):
            group = range(first, min(first + 128, len(known)))
            pixels = image_pixels(self.processor, self.config.model, known, group).to(model.device)
            outputs += [self._tokens.decode(tokens) for tokens in generate(model, pixels, config).tokens]
        references = [list(x.captions) for x in known]
        found = metrics.captions(outputs, references)
        rows = [
            ExampleResult(image_name(x), texts, output, score)
            for x, texts, output, score in zip(known, references, outputs, found.scores, strict=True)
        ]
        return dict(found.to_dict()), rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        kinds = (metrics.bleu_n_statistics, metrics.cider_statistics, metrics.exact_statistics)
        return [kind(outputs, references) for kind in kinds]
