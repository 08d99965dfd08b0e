"""What a decoder knows when it writes: the loss with nothing shown of the future, one token after the other.

−log p(y_t | x, y_<t) from a forward pass over y_<t alone. With a causal mask that is the ordinary loss; without one the
ordinary loss reads the answer off the input, and this one shows what was learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Model
from ..training.loss import IGNORE, Batch
from ..training.systems import data_for, open_data, open_system, task_for

__all__ = ["loss_token_by_token", "measure"]

_EXAMPLES, _SAMPLES = 64, 3


def loss_token_by_token(model: Model, batch: Batch) -> tuple[float, int]:
    """The sum of the loss over the batch's targets, each computed from what stands before it, and their number."""
    *sources, read = batch.inputs
    total, count = 0.0, 0
    for t in range(1, read.shape[1] + 1):
        wanted = batch.targets[:, t - 1]  # (B,)
        logits = _logits(model(*sources, read[:, :t], **batch.options))[:, -1]  # (B, V)
        total += float(F.cross_entropy(logits.float(), wanted, ignore_index=IGNORE, reduction="sum"))
        count += int((wanted != IGNORE).sum())
    return total, count


def _logits(answer: Any) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer.logits


def measure(run: Path) -> dict[str, Any]:
    """Of the first held-out examples of a finished translation run; with a few translations to look at."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    system = open_system(run, device)
    if system.config.task != "translate":
        raise ValueError(f"the loss token by token is measured of translations, not of {system.config.task!r}")
    data, whole = data_for(system, {})
    task = task_for(system, open_data(data, whole, system), data, {}, system.config.train.seed)
    examples = task.examples("valid", _EXAMPLES)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in task.valid_batches(examples):
            found, n = loss_token_by_token(system.model, batch.to(device))
            total, count = total + found, count + n
    return {"loss_token_by_token": total / count, "samples": task.sample(system.model, _SAMPLES)}
