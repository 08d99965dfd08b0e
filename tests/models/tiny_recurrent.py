"""A tiny recurrent model with weights that hide nothing, and ragged batches for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention.cache import ModelCache
from regard.config import ModelConfig
from regard.models import build
from regard.models.block import Memory
from regard.models.recurrent import Recurrent

CELLS = ("lstm", "gru")
DECODERS = (  # alignment, input feeding
    *(("none", True), ("additive", True), ("dot", True), ("general", True), ("concat", True)),
    *(("dot", False), ("general", False), ("concat", False)),
)
PLACE = "decoder.cross_attention"
LSTM_TRACES = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 13)
NO_LSTM_TRACE = "torch before 2.13 traces the last state of an LSTM on a CPU with a wrong shape"
each_cell = pytest.mark.parametrize("cell", CELLS)
each_decoder = pytest.mark.parametrize(("alignment", "feeds"), DECODERS)


def tiny(**fields: Any) -> Recurrent:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 12, "n_layers": 2, "tie_head": False, **fields}
    model = build(ModelConfig(architecture="recurrent", **sizes))
    assert isinstance(model, Recurrent)
    with torch.no_grad():  # nothing passes because it is 0, and attention is far from uniform
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() > 1 else 0.2))
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 13, (batch, length), generator=torch.Generator().manual_seed(seed))


def lengths_to_keep(lengths: list[int], total: int) -> Tensor:
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def close(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-5)


def step_by_step(
    model: Recurrent, target: Tensor, memory: Memory | None, cache: ModelCache, sizes: list[int]
) -> Tensor:
    parts = [model.decode(part, memory, cache=cache) for part in target.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)
