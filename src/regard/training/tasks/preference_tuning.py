"""Direct preference optimisation: of two answers, the chosen one becomes more likely."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import RunConfig
from ...data.batching import BatchPlan, group_by_length
from ...data.examples import Example, Preference, key_of
from ...data.packing import IGNORE
from ...errors import UsageError
from ...generation.generate import inference
from ...models import Model
from ...text.chat import ANSWERS, EncodedChat
from ..finetuning import LoraLinear, add_lora, merge, quantise_frozen, same_processors, without_lora
from ..loss import Batch
from ..metrics.statistics import Statistics, mean_statistics
from ..precision import Precision
from .chat_tuning import ChatTask
from .task import ExampleResult, Scores, Task


class DirectPreferenceOptimisation(ChatTask):
    """-log σ(β (log π/π₀ (chosen) - log π/π₀ (rejected))), π the model, π₀ its initial weights (Rafailov et al. 2023).

    β log π/π₀ of an answer is its reward, β is ``train.dpo_beta``. With ``train.lora``, π₀ is the model with its
    low-rank additions switched off, else a frozen copy of ``train.init``. Label smoothing assumes that a share of the
    preferences is mistaken.
    """

    name = "dpo"
    kinds = ("preferences",)
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "accuracy": "accuracy"}
    eval_examples = None
    reports_perplexity = False

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        super().check_config(config)
        if config.train.init is None:
            raise UsageError("the task dpo needs an initial model to compare with: add train.init=DIR")

    # Batches (2B, T): the chosen answers to B prompts, then the rejected ones. A pair counts as one target.

    def _encode_pair(self, example: Example) -> tuple[EncodedChat, EncodedChat]:
        pair = cast(Preference, example)
        n_prompt = len(self._template.encode_prompt(pair.prompt))
        chats = (self._template.encode((*pair.prompt, (ANSWERS, text))) for text in (pair.chosen, pair.rejected))
        # Only the last answer has a loss: earlier ones are part of the prompt.
        chosen, rejected = (EncodedChat(x.ids, [False] * n_prompt + x.is_answer[n_prompt:]) for x in chats)
        return chosen, rejected

    @cached_property
    def _encoded_rows(self) -> list[tuple[EncodedChat, EncodedChat]]:
        return [self._encode_pair(x) for x in self.first(self.source.train)]

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_to_max_len(np.array([[len(x.ids) for x in pair] for pair in self._encoded_rows]))

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._collate_pairs([self._encoded_rows[i] for i in index])

    def _collate_pairs(self, pairs: Sequence[tuple[EncodedChat, EncodedChat]]) -> Batch:
        both = self._collate([pair[side] for side in (0, 1) for pair in pairs])
        return Batch(both.inputs, both.targets, both.options, both.n_tokens, n_counted=len(pairs))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        pairs, max_len = [self._encode_pair(x) for x in examples], self.config.data.max_len
        lengths = [max(len(x.ids) for x in pair) for pair in pairs]
        self.n_held_out_cut = sum(length > max_len for length in lengths)
        for group in group_by_length([min(x, max_len) for x in lengths], max(self.config.train.batch_tokens, 2048)):
            yield group, self._collate_pairs([pairs[i] for i in group])

    # The loss.

    def reference_model(self, model: Model) -> Model | None:
        """π₀ as a separate model; None if ``model`` has low-rank additions, which can be switched off instead."""
        if any(isinstance(layer, LoraLinear) for layer in model.modules()):
            return None
        if self._reference is None:
            from ...io import load

            train, path = self.config.train, cast(str, self.config.train.init)
            self._reference = load(path)
            if not same_processors(self.processor, self._reference.processor):
                raise UsageError(f"train.init={path} has other tokens than this run; leave out data.tokenizer")
            if train.lora is not None and train.quantize == "nf4":  # rounded like the trained model
                merge(quantise_frozen(add_lora(self._reference, train.lora, targets=train.lora_targets)))
            self._reference.requires_grad_(False).eval()
        return self._reference.to(model.device)

    _reference: Model | None = None

    @cached_property
    def _reference_log_probs(self) -> Callable[[Model, Batch, Model | None], Tensor]:
        """Excluded from compilation, because a compiled graph would not follow the switching of layers.

        Wrapped on first use, since ``torch.compiler.disable`` imports a thousand modules.
        """
        return torch.compiler.disable(_reference_log_probs)

    def loss(  # a method, because β is part of the config
        self, model: Model, batch: Batch, smoothing: float = 0.0, reference: Model | None = None
    ) -> Tensor:
        """The sum of the loss over the pairs of a batch."""
        chosen, rejected = self._rewards(model, batch, reference)
        margin = chosen - rejected
        return -((1 - smoothing) * F.logsigmoid(margin) + smoothing * F.logsigmoid(-margin)).sum()

    def _rewards(self, model: Model, batch: Batch, reference: Model | None) -> tuple[Tensor, Tensor]:
        """β log π/π₀ of the chosen answers (B,) and of the rejected ones (B,)."""
        ratio = answer_log_probs(model, batch) - self._reference_log_probs(model, batch, reference)
        chosen, rejected = (self.config.train.dpo_beta * ratio).chunk(2)
        return chosen, rejected

    # Evaluation.

    answers = Task._answers_of_score

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """How often the chosen answer has the higher reward, and by how much.

        The output of a row is the answer with the higher reward; its score is σ(difference of rewards).
        """
        reference = self.reference_model(model)
        rewards, n_tokens, start = np.zeros((len(examples), 2)), 0, time.perf_counter()
        for index, batch in self.valid_groups(examples):
            with inference(model), precision.forward():
                pair = self._rewards(model, batch.to(model.device), reference)
            rewards[index] = torch.stack(pair, dim=1).double().cpu().numpy()
            n_tokens += batch.n_tokens
        seconds, margin = time.perf_counter() - start, rewards[:, 0] - rewards[:, 1]
        losses = np.logaddexp(0.0, -margin)
        each = zip(cast(Sequence[Preference], examples), margin.tolist(), losses.tolist(), strict=True)
        rows = [
            ExampleResult(str(key_of(x)), x.chosen, x.chosen if difference > 0 else x.rejected, math.exp(-loss), loss)
            for x, difference, loss in each
        ]
        metrics = {
            "loss": self.check_finite(float(losses.mean())),
            "accuracy": float((margin > 0).mean()),
            "margin": float(margin.mean()),
            "chosen_reward": float(rewards[:, 0].mean()),
            "rejected_reward": float(rewards[:, 1].mean()),
        }
        return Scores(len(rows), metrics, rows, n_tokens, seconds, losses=(losses, np.ones(len(rows), dtype=np.int64)))

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [mean_statistics("accuracy", [a == b for a, b in zip(outputs, references, strict=True)])]

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """The model's answers to the first held-out prompts, next to the chosen answers."""
        examples = cast(Sequence[Preference], self.first(self.source.valid, n))
        outputs = self._write_answers(model, [(*x.prompt, (ANSWERS, x.chosen)) for x in examples]) if examples else []
        rows = zip(examples, outputs, strict=True)
        return [{"source": x.prompt[-1][1], "target": x.chosen, "output": output} for x, output in rows]


def answer_log_probs(model: Model, batch: Batch) -> Tensor:
    """The log probability of the targets of each row (rows,)."""
    logits = model(*batch.inputs, **batch.options).float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(batch.targets.shape).sum(1)


def _reference_log_probs(model: Model, batch: Batch, reference: Model | None) -> Tensor:
    with torch.no_grad():
        if reference is not None:
            return answer_log_probs(reference, batch)
        with without_lora(model):
            return answer_log_probs(model, batch)
