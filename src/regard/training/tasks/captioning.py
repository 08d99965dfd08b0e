"""Captioning: describing an image in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

from torch import Tensor

from ...config import DataConfig, ModelConfig, RunConfig
from ...data.batching import BatchPlan, index_groups, truncate
from ...data.examples import Example, ImageExample, image_name
from ...data.sources import Source
from ...errors import UsageError
from ...generation import GenerateConfig, generate
from ...models import Model
from ...text.processor import Processor
from ...text.tokenizer import PAD
from ...text.tokenizer_training import Template
from ..loss import Batch
from ..metrics import translation_metrics as metrics
from ..metrics.statistics import Statistics
from .image_task import ImageTask
from .task import AnswerResults, ExampleResult, SkippedExamples


class CaptionTask(ImageTask):
    """An encoder over patches and a decoder over words (Xu et al. 2015, with a ViT in place of the convolutions).

    An epoch shows each image once, with a different one of its captions each time.
    """

    name = "caption"
    command = "caption"
    kinds = ("captions",)
    template: ClassVar[Template] = "eos"
    metric_keys: ClassVar[Mapping[str, str]] = {
        "loss": "valid_loss",
        "bleu": "bleu_4",
        "cider": "cider",
        "exact": "exact",
    }
    evaluation_options: ClassVar[tuple[str, ...]] = ("beam", "length_penalty")
    processor_parts = ("target", "image")

    @classmethod
    def complete_config(cls, config: RunConfig, source: Source) -> RunConfig:
        """The config with the tokens and lengths of ``train.language_model``, if there is one."""
        config = super().complete_config(config, source)
        if (path := config.train.language_model) is None or cls.name != "caption":  # subclasses refuse it later
            return config
        language, _ = _read_language_model(path)
        tokens = {name: getattr(language, name) for name in ("vocab_size", "pad_id", "bos_id", "eos_id")}
        lengths = {"max_len": language.max_len, "max_target_len": language.max_len}
        return config.with_(model=config.model.with_(text_model=language, target_vocab_size=None, **tokens, **lengths))

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        max_len = model.max_target_len or model.max_len
        return DataConfig(max_len=max_len, max_target_len=max_len)

    def _new_processor(self) -> Processor:
        if self.config.train.language_model is not None:
            _, processor = _read_language_model(self.config.train.language_model)
            return Processor(target=processor.source, image=self._new_image_processor())
        texts = [text for x in self.first(self.source.train, 40_000) for text in cast(ImageExample, x).captions]
        return Processor(target=self._new_tokenizer(texts), image=self._new_image_processor())

    @property
    def _max_width(self) -> int:
        return max(self._max_target_len, self.config.model.max_target_len or self.config.model.max_len)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model.with_(max_target_len=self._max_width, **self._token_fields(self.tokenizer))

    @cached_property
    def _short_captions(self) -> dict[int, list[str]] | None:
        """The captions of each training image, without those that are too long; None if those are truncated."""
        if self.config.data.too_long != "drop":
            return None  # an image of an embedded corpus is drawn for its captions: not all of them in advance
        images: dict[int, list[str]] = {}
        n_dropped = 0
        for i, example in enumerate(self.source.train):
            texts = _captions(example)
            rows = zip(texts, self._encode(texts), strict=True)
            if captions := [text for text, row in rows if len(row) <= self._max_target_len]:
                images[i] = captions
            n_dropped += len(texts) - len(captions)
        self.skipped = SkippedExamples(n_dropped=n_dropped, max_len=self._max_target_len)
        return images

    @cached_property
    def _images(self) -> Sequence[int]:
        return range(len(self.source.train)) if self._short_captions is None else list(self._short_captions)

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_by_rows(len(self._images), self._n_patches)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        examples, short = {i: self.source.train[i] for i in (self._images[n] for n in index)}, self._short_captions
        texts = {i: _captions(x) if short is None else short[i] for i, x in examples.items()}
        captions = [own[(epoch + i) % len(own)] for i, own in texts.items()]
        rows, n_longer = truncate(self._encode(captions), self._max_target_len)
        if n_longer:
            self.skipped = SkippedExamples(n_cut=self.skipped.n_cut + n_longer, max_len=self._max_target_len)
        return self._collate(self._pixels(examples, list(examples), epoch), rows)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Every caption of every image."""
        self.n_held_out_cut = 0
        for group in index_groups(len(examples), 64):
            captions = [(image, text) for image, i in enumerate(group) for text in _captions(examples[i])]
            image_rows = [image for image, _ in captions]
            rows, n_longer = truncate(self._encode([text for _, text in captions]), self._max_target_len)
            self.n_held_out_cut += n_longer
            pixels = self._pixels(examples, group)[image_rows]
            yield [group[image] for image in image_rows], self._collate(pixels, rows)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with the end-of-text token, which the tokenizer of a language model does not add."""
        end = self.tokenizer.eos_id
        return [row if row[-1:] == [end] else [*row, end] for row in self.tokenizer.encode_all(texts)]

    def _collate(self, pixels: Tensor, rows: list[list[int]]) -> Batch:
        first = self.tokenizer.special_ids.get("bos", self.tokenizer.eos_id)
        pad_id = self.tokenizer.special_ids.get("pad", PAD)
        decoder_input, labels = self._pad_targets(rows, first, pad_id, self._max_width)
        n_tokens = len(rows) * self._n_patches + sum(len(row) + 1 for row in rows)
        return Batch((pixels, decoder_input), labels, n_tokens=n_tokens)

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        outputs = []
        config = GenerateConfig(max_new_tokens=self._max_target_len, **decoding)
        for group in index_groups(len(examples), 128):
            generated = generate(model, self._pixels(examples, group).to(model.device), config)
            outputs += [self.tokenizer.decode(tokens) for tokens in generated.tokens]
        references = [list(_captions(x)) for x in examples]
        # chrF ranks bad captions too, for which CIDEr-D is often 0.
        each = zip(examples, references, outputs, metrics.sentence_chrf(outputs, references), strict=True)
        rows = [
            ExampleResult(image_name(cast(ImageExample, x)), texts, output, chrf / 100)
            for x, texts, output, chrf in each
        ]
        return metrics.captions(outputs, references), rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        measures = (metrics.bleu_n_statistics, metrics.cider_statistics, metrics.exact_statistics)
        return [measure(outputs, references) for measure in measures]


def _read_language_model(path: str) -> tuple[ModelConfig, Processor]:
    """The config and the processor of a language model; UsageError if the model at ``path`` is not one."""
    from ..initial_model import read_initial_model

    config, processor = read_initial_model(path)
    if (config.architecture, config.head) != ("decoder", "lm") or processor is None or processor.source is None:
        raise UsageError(f"train.language_model={path} is not a language model with a tokenizer")
    return config, processor


def _captions(example: Example) -> Sequence[str]:
    return cast(ImageExample, example).captions
