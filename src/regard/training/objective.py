"""Model and loss as one module, so that it can be compiled, wrapped and sharded as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models import Decoder, Encoder, Model
from ..models.heads import TokenHead
from ..models.translating import SourceToTarget
from .batch import Batch
from .loss import cross_entropy, linear_cross_entropy

__all__ = ["Objective"]


class Objective(nn.Module):
    """A batch → the sum of the loss over its targets. A sum: whoever averages knows over how many, on how many ranks.

    Token logits of a large vocabulary are never held whole: the head's matrix goes into the loss with the states.
    """

    def __init__(self, model: Model, smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> Tensor:
        model, smoothing = self.model, self.smoothing if self.training else 0.0
        head = getattr(model, "head", None)
        if not isinstance(head, TokenHead):
            return cross_entropy(model(*batch.inputs, **batch.options), batch.targets, smoothing)
        states = head.hidden(_hidden(model, batch))
        weight = _table(model) if head.weight is None else head.weight
        # Compiled, a number that differs from batch to batch would be compiled anew.
        counted = None if torch.compiler.is_compiling() else batch.n_counted
        return linear_cross_entropy(states, weight, batch.targets, head.bias, smoothing, counted=counted)


def _hidden(model: Model, batch: Batch) -> Tensor:
    assert isinstance(model, Decoder | Encoder | SourceToTarget)
    return model.hidden(*batch.inputs, **batch.options)  # type: ignore[arg-type]  # as many as it takes


def _table(model: Model) -> Tensor:
    """The token table a tied head shares."""
    if isinstance(model, SourceToTarget):
        return model.output_table
    assert isinstance(model, Decoder | Encoder)
    assert model.token is not None
    return model.token.weight
