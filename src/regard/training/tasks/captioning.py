"""Captions: an image, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor

from ...config import DataConfig, ModelConfig
from ...data.batching import BatchPlan
from ...data.examples import Example, ImageExample, image_name
from ...generation import GenerateConfig, generate
from ...models import Model
from ...text.processor import Processor
from ..loss import Batch, shift_targets
from ..metrics import translation_metrics as metrics
from ..metrics.statistics import Statistics
from .task import ExampleResult, ImageTask, SkippedExamples, index_groups, truncate


class CaptionTask(ImageTask):
    """An encoder over patches, a decoder over words (Xu et al. 2015, with a ViT for the convolutions).

    Each epoch shows each image once, with one of its captions in turn.
    """

    name = "caption"
    command = "caption"
    kinds = ("captions",)
    template = "eos"
    metric_keys: ClassVar[Mapping[str, str]] = {
        "loss": "valid_loss",
        "bleu": "bleu_4",
        "cider": "cider",
        "exact": "exact",
    }
    evaluation_options = ("beam", "length_penalty")
    processor_parts = ("target", "image")

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        longest = model.max_target_len or model.max_len
        return DataConfig(max_len=longest, max_target_len=longest)

    def _new_processor(self) -> Processor:
        texts = [text for x in self.first(self.source.train, 40_000) for text in cast(ImageExample, x).captions]
        return Processor(target=self._new_tokenizer(texts), image=self._new_image_processor())

    @property
    def _max_target_len(self) -> int:
        return self.config.data.max_target_len or self.config.data.max_len

    @property
    def _max_width(self) -> int:
        return max(self._max_target_len, self.config.model.max_target_len or self.config.model.max_len)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(max_target_len=self._max_width, **self._token_fields(self.tokenizer))

    @cached_property
    def _images(self) -> list[tuple[int, Sequence[str]]]:
        """The images to learn from, by number, and their captions; too long ones may have to go."""
        examples = cast(Sequence[ImageExample], self.source.train)
        if self.config.data.too_long != "drop":
            return [(i, x.captions) for i, x in enumerate(examples)]
        images: list[tuple[int, Sequence[str]]] = []
        n_dropped = 0
        for i, x in enumerate(examples):
            rows = zip(x.captions, self.tokenizer.encode_all(x.captions), strict=True)
            captions = [text for text, row in rows if len(row) <= self._max_target_len]
            n_dropped += len(x.captions) - len(captions)
            if captions:
                images.append((i, captions))
        self.skipped = SkippedExamples(n_dropped=n_dropped, max_len=self._max_target_len)
        return images

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_by_rows(len(self._images), self._n_patches)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        chosen = [self._images[i] for i in index]
        captions = [texts[(epoch + i) % len(texts)] for i, texts in chosen]
        rows, n_longer = truncate(self.tokenizer.encode_all(captions), self._max_target_len)
        if n_longer:
            self.skipped = SkippedExamples(n_cut=self.skipped.n_cut + n_longer, max_len=self._max_target_len)
        return self._collate(self._pixels(self.source.train, [i for i, _ in chosen], epoch), rows)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Every caption of every image."""
        self.n_held_out_cut = 0
        for group in index_groups(len(examples), 64):
            captions = [(place, text) for place, i in enumerate(group) for text in _captions(examples[i])]
            which = [place for place, _ in captions]
            rows, n_longer = truncate(self.tokenizer.encode_all(text for _, text in captions), self._max_target_len)
            self.n_held_out_cut += n_longer
            yield [group[place] for place in which], self._collate(self._pixels(examples, group)[which], rows)

    def _collate(self, pixels: Tensor, rows: list[list[int]]) -> Batch:
        pad_id = self.tokenizer.pad_id
        said = self._pad(rows, pad_id, self._max_width)
        read, wanted = shift_targets(F.pad(said, (1, 0), value=self.tokenizer.bos_id), pad_id)
        n_tokens = len(rows) * self._n_patches + sum(len(row) + 1 for row in rows)
        return Batch((pixels, read), wanted, n_tokens=n_tokens)

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int = 1, length_penalty: float = 1.0
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        if not examples:
            return {}, []
        outputs = []
        config = GenerateConfig(beam=beam, length_penalty=length_penalty, max_new_tokens=self._max_target_len)
        for group in index_groups(len(examples), 128):
            generated = generate(model, self._pixels(examples, group).to(model.device), config)
            outputs += [self.tokenizer.decode(tokens) for tokens in generated.tokens]
        references = [list(_captions(x)) for x in examples]
        found = metrics.captions(outputs, references)
        rows = [
            ExampleResult(image_name(cast(ImageExample, x)), texts, output, score)
            for x, texts, output, score in zip(examples, references, outputs, found.scores, strict=True)
        ]
        return dict(found.to_dict()), rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        measures = (metrics.bleu_n_statistics, metrics.cider_statistics, metrics.exact_statistics)
        return [measure(outputs, references) for measure in measures]


def _captions(example: Example) -> Sequence[str]:
    return cast(ImageExample, example).captions
