"""Text embeddings: vectors of texts that belong together are near each other, those of other texts far apart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import ModelConfig
from ...data.batching import BatchPlan, group_by_length, truncate
from ...data.examples import Example, Pair, Triplet
from ...data.token_files import Pieces, TokenFile, whole_documents
from ...generation.generate import inference
from ...models import Model
from ...models.components import embed_states
from ...text.processor import Processor
from ..loss import Batch
from ..metrics.retrieval_metrics import ranks_of, retrieval_metrics
from ..metrics.statistics import Statistics, mean_statistics
from ..precision import Precision
from .task import MAX_TOKENIZER_TEXTS, ExampleResult, Scores, Task


class Embed(Task):
    """-log exp(a·p/τ) / Σ_c exp(a·c/τ) over the other texts c of the batch (InfoNCE, van den Oord et al. 2018).

    a and p are the vectors of an anchor and of its positive, τ is ``train.temperature``; the candidates c are the
    positives of the batch and the negatives of triplets. A text that equals p is not a negative of a.
    """

    name = "embed"
    command = "embed"
    kinds = ("pairs", "triplets")
    template = "bos-eos"
    criterion = "recall_1"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "recall_1": "recall_1", "mrr": "mrr"}
    eval_examples = 1000
    reports_perplexity = False
    needs_positions = True

    def _new_processor(self) -> Processor:
        examples = self.first(self.source.train, MAX_TOKENIZER_TEXTS)
        return Processor(source=self._new_tokenizer([text for x in examples for text in sides_of(x)]))

    @property
    def model_config(self) -> ModelConfig:
        model, data = self.config.model, self.config.data
        default = "last" if model.architecture == "decoder" else "mean"
        fields = {"embed_pooling": model.embed_pooling or default, "embed_len": data.max_len}
        return model.with_(max_len=self._max_width, **fields, **self._token_fields(self.tokenizer))

    @cached_property
    def _final_config(self) -> ModelConfig:
        return self.model_config

    # Batches (2B or 3B, T): the anchors of B examples, then their positives, then the negatives of triplets.
    # Targets (2B or 3B,) number the distinct texts, so that equal texts have equal targets.

    @cached_property
    def _train(self) -> list[TokenFile]:
        """The tokens of each side."""
        n_sides = len(sides_of(self.source.train[0]))

        def side(number: int) -> TokenFile:
            def pieces() -> Pieces:
                texts = (sides_of(x)[number] for x in self._tracked_train("texts"))
                return whole_documents(self.tokenizer.encode_stream(texts))

            return self._tokens(f"embed {number}", self.tokenizer, pieces)

        return [side(number) for number in range(n_sides)]

    @cached_property
    def batch_plan(self) -> BatchPlan:
        lengths = np.stack([side.sizes for side in self._train], axis=1)
        lengths = self._limit_lengths(lengths, cut=self.config.data.too_long != "drop")
        return self._plan_by_length(lengths, self.config.data.max_len)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._collate([[side.document(i) for i in index] for side in self._train])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        texts = zip(*map(sides_of, examples), strict=True)
        sides = [truncate(list(self.tokenizer.encode_stream(side)), self.config.data.max_len) for side in texts]
        self.n_held_out_cut = sum(n for _, n in sides)
        lengths = [max(map(len, rows)) for rows in zip(*(rows for rows, _ in sides), strict=True)]
        for group in group_by_length(lengths, self.config.train.batch_tokens):
            yield group, self._collate([[rows[i] for i in group] for rows, _ in sides])

    def _collate(self, sides: list[list[list[int]]]) -> Batch:
        rows = truncate([row for side in sides for row in side], self.config.data.max_len)[0]
        tokens, padding_mask = self._pad(rows, self.tokenizer.pad_id, self._max_width)
        numbers: dict[tuple[int, ...], int] = {}
        targets = torch.tensor([numbers.setdefault(tuple(row), len(numbers)) for row in rows])
        n_tokens = sum(map(len, rows))
        return Batch((tokens,), targets, {"padding_mask": padding_mask}, n_tokens, n_counted=len(sides[0]))

    def loss(  # a method, because τ is part of the config
        self, model: Model, batch: Batch, smoothing: float = 0.0, reference: Model | None = None
    ) -> Tensor:
        """The sum of the loss over the anchors of a batch; smoothing spreads over the candidates that are compared."""
        scores, positives = self._scores(model, batch)
        if not smoothing:
            return F.cross_entropy(scores, positives, reduction="sum")
        log_p, compared = scores.log_softmax(-1), scores > float("-inf")
        mean = torch.where(compared, log_p, 0.0).sum(1) / compared.sum(1)
        return -((1 - smoothing) * log_p.gather(1, positives[:, None])[:, 0] + smoothing * mean).sum()

    def _scores(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosine / τ of anchors and candidates (B, C), -inf for repetitions of a positive; and the positives (B,)."""
        n = batch.n_targets
        vectors = embed_states(self._final_config, model(*batch.inputs, **batch.options), batch.options["padding_mask"])
        vectors = F.normalize(vectors, dim=-1)
        scores = vectors[:n] @ vectors[n:].T / self.config.train.temperature
        same = batch.targets[n : 2 * n, None] == batch.targets[n:]
        positives = torch.arange(n, device=scores.device)
        repeated = same & (positives[:, None] != torch.arange(scores.shape[1], device=scores.device))
        return scores.masked_fill(repeated, float("-inf")), positives

    # Evaluation: the positive of each anchor is retrieved among those of all anchors.

    def _vectors(self, model: Model, examples: Sequence[Example], precision: Precision) -> tuple[list[Tensor], int]:
        """The vectors (N, M) of each side, and the number of tokens read."""
        sides = [torch.zeros(len(examples), model.config.d_model) for _ in sides_of(examples[0])]
        n_tokens = 0
        for index, batch in self.valid_groups(examples):
            moved = batch.to(model.device)
            with inference(model), precision.forward():
                states = model(*moved.inputs, **moved.options)
            vectors = F.normalize(embed_states(self._final_config, states, moved.options["padding_mask"]), dim=-1)
            for side, rows in zip(sides, vectors.float().cpu().split(len(index)), strict=True):
                side[index] = rows
            n_tokens += batch.n_tokens
        return sides, n_tokens

    answers = Task._answers_of_score

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """Retrieval metrics: how often the positive is the nearest text."""
        start = time.perf_counter()
        (anchors, positives, *negatives), n_tokens = self._vectors(model, examples, precision)
        seconds, texts = time.perf_counter() - start, [sides_of(x) for x in examples]
        candidates = [text for side in range(1, len(texts[0])) for text in (row[side] for row in texts)]
        first = {text: index for index, text in reversed(list(enumerate(candidates)))}
        unique = torch.tensor(sorted(first.values()))
        column = {int(index): number for number, index in enumerate(unique)}
        target = torch.tensor([column[first[row[1]]] for row in texts])
        cosines = anchors @ torch.cat([positives, *negatives])[unique].T  # (N, distinct candidates)
        losses = F.cross_entropy(cosines / self.config.train.temperature, target, reduction="none").double().numpy()
        nearest = unique[cosines.argmax(1)].tolist()
        each = zip(texts, nearest, cosines.gather(1, target[:, None])[:, 0].tolist(), losses.tolist(), strict=True)
        rows = [ExampleResult(row[0], row[1], candidates[n], cosine, loss) for row, n, cosine, loss in each]
        metrics = {"loss": self.check_finite(float(losses.mean())), **retrieval_metrics(ranks_of(cosines, target))}
        counts = np.ones(len(rows), dtype=np.int64)
        return Scores(len(rows), metrics, rows, n_tokens, seconds, losses=(losses, counts))

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [mean_statistics("recall_1", [a == b for a, b in zip(outputs, references, strict=True)])]


def sides_of(example: Example) -> tuple[str, ...]:
    """The anchor, the positive and, for a triplet, the negative."""
    if isinstance(example, Triplet):
        return example.anchor, example.positive, example.negative
    pair = cast(Pair, example)
    return pair.source, pair.target
