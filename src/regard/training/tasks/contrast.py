"""Contrastive training of images and captions (CLIP, SigLIP)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ...config import ModelConfig
from ...data.batching import index_groups, truncate
from ...data.examples import Example, ImageExample, image_name
from ...generation.generate import inference
from ...generation.zero_shot import embed_texts, pad_texts
from ...models import Model, TwoTower
from ..loss import Batch, contrast_loss
from ..metrics.retrieval_metrics import Ranks, retrieval_ranks
from ..metrics.statistics import Statistics, mean_statistics
from ..metrics.translation_metrics import exact_statistics
from ..precision import Precision
from .captioning import CaptionTask
from .task import AnswerResults, ExampleResult, Scores

_HELD_OUT = 128  # batch size of the held-out loss, which depends on the number of pairs contrasted


class ContrastTask(CaptionTask):
    """Two towers, over patches and over words; each pair is contrasted with the other pairs of its batch.

    An epoch shows each image once, with one of its captions, so that no caption of a batch fits two of its images.
    """

    name = "contrast"
    command = "look"
    template = "bos-eos"
    criterion = "mean_recall"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "recall": "mean_recall"}
    eval_examples = None
    reports_perplexity = False
    evaluation_options = ()
    loss = staticmethod(contrast_loss)

    @property
    def model_config(self) -> ModelConfig:
        lengths = {"max_len": self._max_width, "max_target_len": self._max_width}
        return self.config.model.with_(**lengths, **self._token_fields(self.tokenizer))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Every image with its first caption."""
        self.n_held_out_cut = 0
        for group in index_groups(len(examples), _HELD_OUT):
            captions = [cast(ImageExample, examples[i]).captions[0] for i in group]
            rows, n_longer = truncate(self.tokenizer.encode_all(captions), self._max_target_len)
            self.n_held_out_cut += n_longer
            yield group, self._collate(self._pixels(examples, group), rows)

    def _collate(self, pixels: Tensor, rows: list[list[int]]) -> Batch:
        tokens, padding_mask = pad_texts(self.model_config, rows, multiple=8)
        n_tokens = len(rows) * self._n_patches + sum(map(len, rows))
        options = {} if padding_mask is None else {"padding_mask": padding_mask}
        return Batch((pixels, tokens), torch.arange(len(rows)), options, n_tokens)

    # Evaluation.

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        """Retrieval among all images and captions of the examples; the output of a row is the nearest caption."""
        images = cast(Sequence[ImageExample], examples)
        texts = [(i, text) for i, image in enumerate(images) for text in image.captions]
        ranks = self._ranks(cast(TwoTower, model), examples, texts)
        rows = [
            ExampleResult(image_name(image), list(image.captions), texts[best][1], 1 / (1 + float(rank)))
            for image, best, rank in zip(images, ranks.best_text, ranks.images, strict=True)
        ]
        return dict(ranks.recalls()), rows

    def _ranks(self, model: TwoTower, examples: Sequence[Example], texts: list[tuple[int, str]]) -> Ranks:
        rows, _ = truncate(self.tokenizer.encode_all(text for _, text in texts), self._max_target_len)
        with inference(model):
            parts = [
                model.embed_images(self._pixels(examples, group).to(model.device))
                for group in index_groups(len(examples), 256)
            ]
            vectors = torch.cat(parts), embed_texts(model, rows)
        images, captions = (x.double().cpu().numpy() for x in vectors)
        return retrieval_ranks(images, captions, np.array([i for i, _ in texts]))

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        losses, n_tokens, start = np.zeros(len(examples)), 0, time.perf_counter()
        for index, batch in self.valid_groups(examples):
            with inference(model), precision.forward():
                losses[index] = float(contrast_loss(model, batch.to(model.device))) / len(index)
            n_tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        recall, rows = self.answers(model, examples)
        metrics = {"loss": self.check_finite(float(losses.mean())), **recall}
        metrics.pop("n", None)
        return Scores(len(examples), metrics, rows, n_tokens, seconds, losses=(losses, np.ones_like(losses)))

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [mean_statistics("text_recall_1", exact_statistics(outputs, references).each())]
