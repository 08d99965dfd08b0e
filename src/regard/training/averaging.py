"""Averages of weights: an exponential moving average during a run, and the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import silence_warnings
from ..foundation.device import widest_float
from ..models import Model
from .shards import shard_like

_UPDATES = "updates"
_AVERAGE = "average/"


class Ema:
    """a ← d · a + (1 - d) · w after each step, with d = min(decay, (1 + n) / (10 + n)) in the n-th update, from 0.

    The rising d forgets the initial random weights quickly. Frozen weights are not averaged; averages are fp32 or
    wider, and sharded like the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.n_updates = decay, 0
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._averages = {name: _wide(param.detach()).clone() for name, param in self._params.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Call after each optimiser step."""
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        weights = [_wide(param.detach()) for param in self._params.values()]
        if weights:
            torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)
        self.n_updates += 1

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model has the averaged weights; its own are restored bit for bit, in place."""
        own = [param.detach().clone() for param in self._params.values()]
        self._write(self._averages.values())
        try:
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Iterable[Tensor]) -> None:
        for param, value in zip(self._params.values(), values, strict=True):
            param.copy_(value)

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages themselves, not copies, and the number of updates."""
        averages = {f"{_AVERAGE}{name}": average for name, average in self._averages.items()}
        return {_UPDATES: torch.tensor(self.n_updates), **averages}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore ``state_tensors``. Whole tensors are sharded like their parameters."""
        if odd := {_UPDATES, *(f"{_AVERAGE}{name}" for name in self._averages)} ^ set(tensors):
            raise ValueError(f"the moving average and the model differ in {min(odd)!r}")
        for name, average in self._averages.items():
            average.copy_(shard_like(tensors[f"{_AVERAGE}{name}"].to(average.device), average))
        self.n_updates = int(tensors[_UPDATES])


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states of one model, tensor by tensor, summed in fp64 (Vaswani et al. 2017, §6.1).

    States are consumed one at a time, so an iterator that reads checkpoints needs memory for one state and the sum.
    Tensors that are not floating-point, such as counters, are those of the last state.
    """
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for state in states:
        for name, value in state.items():
            if not value.is_floating_point():
                total[name] = value.detach().clone()
            elif count:
                total[name] += value
            else:
                total[name], dtypes[name] = value.detach().to(widest_float(value.device), copy=True), value.dtype
        count += 1
    return {name: (x / count).to(dtypes[name]) if name in dtypes else x for name, x in total.items()}


def average_models(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the mean of several models of one run, or of runs that started from the same weights, as a model directory.

    ``paths`` are RUN@STEP, runs or model directories; memory holds the mean and one model at a time.
    """
    from ..io import load, save

    if len(paths) < 2:
        raise ValueError(f"an average needs at least two models, got {len(paths)}")
    first = load(paths[0])
    records = list[dict[str, Any]]()

    def states() -> Iterator[Mapping[str, Tensor]]:
        for path in paths:
            model = load(path)
            if model.config != first.config or _vocabulary(model) != _vocabulary(first):
                raise ValueError(f"{path} and {paths[0]} cannot be averaged: they differ in config or vocabulary")
            records.append(model.training_record or {})
            yield model.state_dict()

    first.load_state_dict(average(states()))
    first.training_record = _average_record(records)
    with silence_warnings("regard.io"):  # whether transformers can open the model does not matter here
        return save(first, out)


def _average_record(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The training record of an average of models of one run, without metrics; None for models of several runs."""
    names = [record.pop("weights", None) for record in records]
    shared = [{**record, "step": None, "metrics": {}} for record in records]
    if None in names or any(other != shared[0] for other in shared):
        return None
    return {**shared[0], "weights": f"the average of {', '.join(names)}"}


def _vocabulary(model: Model) -> tuple[object, ...]:
    """Hashes of the tokenizers, and the labels: what the rows of embeddings and of a classifier stand for."""
    processor = model.processor
    if processor is None:
        return ()
    return (*(side and side.sha256 for side in (processor.source, processor.target)), processor.labels)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
