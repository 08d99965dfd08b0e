"""ELECTRA: a small generator fills in masked tokens, and the model detects which tokens were replaced."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import ModelConfig
from ...data.examples import Example
from ...data.packing import IGNORE
from ...generation.generate import inference
from ...models import Encoder, Model
from ...models.components import TokenHead
from ..loss import Batch
from ..metrics.statistics import Statistics
from ..precision import Precision
from .language_modelling import MaskedLanguageModel
from .task import AnswerResults, Scores, Task

_DETECTION_WEIGHT = 50.0  # λ in the paper: detection is an easier task with smaller gradients


class ReplacedTokens(MaskedLanguageModel):
    """L = L_MLM(generator) + 50 L_BCE(replaced or not, over all tokens) (Clark et al. 2020).

    Replacements are sampled from the generator, and no gradient flows through the sampling. A shipped model has no
    generator; ``regard eval`` then replaces tokens by random ones.
    """

    name = "electra"
    criterion = "valid_loss"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "accuracy": "accuracy"}
    reports_perplexity = False

    @property
    def model_config(self) -> ModelConfig:
        config = super().model_config
        return config.with_(generator_width=config.generator_width or max(1, config.d_model // 4))

    def loss(self, model: Model, batch: Batch, smoothing: float = 0.0, reference: Model | None = None) -> Tensor:
        """The loss of the generator, summed over masked tokens, plus 50 times that of detection.

        The mean detection loss over all tokens is multiplied by the number of masked tokens, by which the caller
        divides.
        """
        replaced, original, generator_loss = self._replace(model, batch)
        padding_mask = batch.options["padding_mask"]
        logits = model(replaced, padding_mask=padding_mask).float()
        each_loss = F.binary_cross_entropy_with_logits(logits, (replaced != original).float(), reduction="none")
        detection = (each_loss * padding_mask).sum() / padding_mask.sum().clamp(min=1)
        return generator_loss + _DETECTION_WEIGHT * detection * batch.n_targets

    def _replace(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens with masked ones replaced, the original tokens, and the generator's summed loss (0 without one)."""
        (tokens,), targets = batch.inputs, batch.targets
        masked = targets != IGNORE
        original = torch.where(masked, targets, tokens)
        rng = None if model.training else torch.Generator(tokens.device).manual_seed(0)
        generator = cast(Encoder, model).generator
        if generator is None:
            noise = torch.rand(tokens.shape, device=tokens.device, generator=rng)
            sampled = (noise * self.tokenizer.size).long().clamp(max=self.tokenizer.size - 1)
            return torch.where(masked, sampled, original), original, tokens.new_zeros(())
        states = generator.hidden(tokens, **batch.options)[masked]  # (N, M): logits of masked tokens only
        logits = cast(TokenHead, generator.head)(states, generator.output_table).float()
        loss = F.cross_entropy(logits, targets[masked], reduction="sum")
        noise = torch.rand(logits.shape, device=logits.device, generator=rng).clamp(1e-9, 1 - 1e-7)
        sampled = (logits.detach() - torch.log(-torch.log(noise))).argmax(-1)  # Gumbel-max: a sample of the softmax
        return original.masked_scatter(masked, sampled), original, loss

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        metrics, rows = self._answers_of_score(model, examples)
        metrics.pop("n", None)
        return metrics, rows

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """The share of tokens classified correctly, and the share of replaced tokens that are detected."""
        start, n_tokens = time.perf_counter(), 0
        losses: list[float] = []
        counts = np.zeros(4)  # tokens, correct, replaced, detected
        for _, batch in self.valid_groups(examples):
            moved = batch.to(model.device)
            with inference(model), precision.forward():
                replaced, original, _ = self._replace(model, moved)
                logits = model(replaced, padding_mask=moved.options["padding_mask"]).float()
            real, is_replaced = moved.options["padding_mask"], replaced != original
            each_loss = F.binary_cross_entropy_with_logits(logits, is_replaced.float(), reduction="none")
            losses += each_loss[real].tolist()
            flagged = (logits > 0) & real
            correct, detected = (flagged == is_replaced) & real, flagged & is_replaced
            counts += [int(x.sum()) for x in (real, correct, is_replaced & real, detected)]
            n_tokens += batch.n_tokens
        each = np.array(losses)
        metrics = {
            "loss": self.check_finite(float(each.mean())),
            "accuracy": counts[1] / counts[0],
            "replaced_found": counts[3] / max(counts[2], 1),
        }
        seconds = time.perf_counter() - start
        return Scores(len(examples), metrics, [], n_tokens, seconds, losses=(each, np.ones_like(each)))

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        return []

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        return Task.paired_statistics(self, ours, theirs, same_tokens)
