"""A model's answers to some examples: the loss of each, what was said, the metrics of all, and what adds up to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.examples import Example, Labelled
from ..errors import BadData, RegardError
from ..models import Model
from ..models.heads import TokenHead
from . import metrics
from .loss import IGNORE, Batch
from .metrics import Statistics
from .precision import Precision
from .tasks import Row, Task
from .tasks.classification import Classes

__all__ = ["Judged", "judge", "losses_of"]

Floats = NDArray[np.float64]
_ROWS_AT_ONCE = {"cuda": 8192}
"""Of logits; 1024 elsewhere. A large vocabulary is never held for a whole batch."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What was found about one set of examples."""

    n: int
    metrics: dict[str, Any]
    rows: list[Row]
    n_tokens: int
    seconds: float
    """Of the pass that gives the loss."""
    details: dict[str, Any] = field(default_factory=dict)
    statistics: Callable[[], list[Statistics]] = list
    """What a comparison resamples; made when asked for. Loss comes last, where there is one for each example."""
    texts: Any = None
    """Of a language model: see ``judging_texts``."""

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(self.seconds, 1e-9)


@torch.no_grad()
def losses_of(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """-log p of every target (n,) and the likeliest answer in its place (n,), in the order of the batch."""
    head = cast(TokenHead, model.head)
    asked = batch.targets != IGNORE
    states, targets = head.hidden(model.hidden(*batch.inputs, **batch.options))[asked], batch.targets[asked]
    weight = model.output_table if head.weight is None else head.weight
    losses, said = [], []
    size = _ROWS_AT_ONCE.get(states.device.type, 1024)
    for x, y in zip(states.split(size), targets.split(size), strict=True):
        logits = F.linear(x, weight, head.bias).float()
        losses.append(F.cross_entropy(logits, y, reduction="none"))
        said.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(said)


def judge(
    task: Task, model: Model, examples: Sequence[Example], precision: Precision, *, beam: int, length_penalty: float
) -> Judged:
    """All of some examples. ``precision`` is that of the loss; texts are written with the weights as they are."""
    if not len(examples):
        raise BadData(f"{task.source.name} has nothing held out to evaluate on; data.source=FILE names other examples")
    if isinstance(task, Classes):
        return _classes(task, model, examples, precision)
    sums, counts, n_tokens, seconds = _losses(task, model, examples, precision)
    loss = need_finite(float(sums.sum() / counts.sum()), task)
    answered, rows = task.answers(model, examples, beam=beam, length_penalty=length_penalty)
    rows = [replace(row, loss=float(each)) for row, each in zip(rows, sums / counts, strict=True)]
    found: dict[str, Any] = {"loss": loss, "perplexity": metrics.perplexity(loss), **answered}
    found.pop("n", None)

    def statistics() -> list[Statistics]:
        outputs, references = [row.output for row in rows], [row.target for row in rows]
        made = _caption_statistics if task.config.task == "caption" else _translation_statistics
        return [*made(outputs, cast(Any, references)), metrics.loss_statistics(sums, counts)]

    return Judged(len(examples), found, rows, n_tokens, seconds, statistics=statistics)


def _translation_statistics(outputs: list[str], references: list[str]) -> list[Statistics]:
    kinds = (metrics.bleu_statistics, metrics.chrf_statistics, metrics.exact_statistics)
    return [kind(outputs, references) for kind in kinds]


def _caption_statistics(outputs: list[str], references: list[list[str]]) -> list[Statistics]:
    kinds = (metrics.bleu_n_statistics, metrics.cider_statistics, metrics.exact_statistics)
    return [kind(outputs, references) for kind in kinds]


def _losses(
    task: Task, model: Model, examples: Sequence[Example], precision: Precision
) -> tuple[Floats, NDArray[np.int64], int, float]:
    """The summed loss of every example, over how many targets, tokens read, seconds."""
    sums, counts = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
    n_tokens, start = 0, time.perf_counter()
    for index, batch in task.valid_groups(examples):
        with precision.forward():
            losses, _ = losses_of(model, batch.to(model.device))
        row_of = torch.nonzero(batch.targets != IGNORE)[:, 0].numpy()  # of every target, on the CPU
        which = np.asarray(index)[row_of]
        np.add.at(sums, which, losses.cpu().double().numpy())
        np.add.at(counts, which, 1)
        n_tokens += batch.n_tokens
    return sums, counts, n_tokens, time.perf_counter() - start


def _classes(task: Classes, model: Model, examples: Sequence[Example], precision: Precision) -> Judged:
    logits, n_tokens, start = torch.zeros(len(examples), len(task.labels)), 0, time.perf_counter()
    for group, batch in task.valid_groups(examples):
        moved = batch.to(model.device)
        with torch.no_grad(), precision.forward():
            logits[group] = model(*moved.inputs, **moved.options).float().cpu()
        n_tokens += batch.n_tokens
    seconds = time.perf_counter() - start
    true = [cast(Labelled, x).label for x in examples]
    said = logits.argmax(-1).tolist()
    losses = F.cross_entropy(logits, torch.tensor(true), reduction="none").double().numpy()
    answered, rows = task.judged(logits, examples)
    rows = [replace(row, loss=float(loss)) for row, loss in zip(rows, losses, strict=True)]
    scores = metrics.classification(said, true, task.labels).document()
    found: dict[str, Any] = {"loss": need_finite(float(losses.mean()), task), **answered}

    def statistics() -> list[Statistics]:
        hits = [float(row.output == row.target) for row in rows]
        return [
            metrics.mean_statistics("accuracy", hits),
            metrics.macro_f1_statistics(said, true, task.labels),
            metrics.loss_statistics(losses),
        ]

    details = {name: scores[name] for name in ("classes", "confusion")}
    return Judged(len(rows), found, rows, n_tokens, seconds, details, statistics)


def need_finite(loss: float, task: Task) -> float:
    """A model that has diverged has no perplexity to speak of."""
    if not math.isfinite(loss):
        raise RegardError(f"the loss on {task.source.name} is {loss}: the weights, or what they make of it, are broken")
    return loss
