"""The dense matrix of every attention a model computes, by the formula, at the moment it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from regard.attention import multihead
from regard.attention.reference import reference
from regard.attention.score_matrix import AttentionCall
from regard.models import Model, recurrent_cells
from regard.models.recurrent_cells import Alignment, MemoryView

Matrices = dict[str, list[Tensor]]
"""By place, one (B, H, T, S) a call."""


@contextmanager
def written_out(model: Model) -> Iterator[Matrices]:
    """Whatever passes an attention inside the block, as matrices; neither recorder nor map has a part in it."""
    places = {module: name for name, module in model.named_modules()}
    found: Matrices = {}
    tap, weigh = multihead.tap_attention, Alignment._weigh

    def keep(owner: nn.Module, call: AttentionCall, output: Tensor, cache: Any = None) -> Tensor:
        found.setdefault(places[owner], []).append(reference(call)[1].detach().clone())
        return tap(owner, call, output, cache)

    def step(self: Alignment, q: Tensor, view: MemoryView, closed: Tensor | None) -> Tensor:
        scores = self.mechanism.tile(q, view.k, self.mechanism.operands(recurrent_cells._ONE_HEAD))
        weights = (scores if closed is None else scores + closed).softmax(-1)
        found.setdefault(f"{places[self]}.steps", []).append(weights.detach().clone())
        return weigh(self, q, view, closed)

    with (
        mock.patch.object(multihead, "tap_attention", keep),
        mock.patch.object(recurrent_cells, "tap_attention", keep),
        mock.patch.object(Alignment, "_weigh", step),
    ):
        yield found
