"""Averages of weights: a moving one beside the run, and the plain mean of its last checkpoints or of chosen ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import silence_warnings
from ..foundation.checks import check_probability
from ..models import Model
from .shards import shard_like

_UPDATES = "updates"
_AVERAGE = "average/"


class Ema:
    """a ← d · a + (1 - d) · w after each step, d = min(decay, (1 + n) / (10 + n)) for the n-th, from 0.

    The rising d lets the first weights, which are noise, go quickly. Frozen weights stay the model's; averages are
    fp32 or wider, and sharded as the weights are.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        check_probability(decay=decay)
        self.decay, self.n_updates = decay, 0
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._averages = {name: _wide(param.detach()).clone() for name, param in self._params.items()}

    @torch.no_grad()
    def update(self) -> None:
        """To be called after each step of the optimiser."""
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        weights = [_wide(param.detach()) for param in self._params.values()]
        if weights:
            torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)
        self.n_updates += 1

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own, bit for bit. Storage stays where it is."""
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
        """Go on exactly where ``state_tensors`` was taken. Whole tensors are sharded as their parameters are."""
        expected = {_UPDATES, *(f"{_AVERAGE}{name}" for name in self._averages)}
        if odd := expected ^ set(tensors):
            raise ValueError(f"the moving average's state and the model differ in {_name_list(odd)}")
        for name, average in self._averages.items():
            value = tensors[f"{_AVERAGE}{name}"]
            if value.shape != average.shape:
                raise ValueError(f"the average of {name} has shape {tuple(value.shape)}, not {tuple(average.shape)}")
            average.copy_(shard_like(value.to(average.device), average))
        self.n_updates = int(tensors[_UPDATES])


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states, tensor by tensor, in fp64 and back (Vaswani et al. 2017, §6.1).

    They are taken one at a time, so an iterator that reads checkpoints holds one of them in memory beside the sum.
    What is no floating-point number, such as a counter, is the last state's.
    """
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for state in states:
        if count and (odd := set(state) ^ set(total)):
            raise ValueError(f"states to average differ in {_name_list(odd)}")
        for name, value in state.items():
            if count and value.shape != total[name].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)} and {tuple(total[name].shape)} in two states")
            if not value.is_floating_point():
                total[name] = value.detach().clone()
            elif count:
                total[name] += value
            else:
                wide = torch.float32 if value.device.type == "mps" else torch.float64  # Apple's GPUs have no fp64
                total[name], dtypes[name] = value.detach().to(wide, copy=True), value.dtype
        count += 1
    if not count:
        raise ValueError("there is no state to average")
    return {name: (x / count).to(dtypes[name]) if name in dtypes else x for name, x in total.items()}


def average_models(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the mean of several models of one run, or of runs that began alike, as a model directory.

    ``paths`` are RUN@STEP, runs or model directories; one beside the mean is in memory at a time.
    """
    from ..io import load, save

    if len(paths) < 2:
        raise ValueError(f"an average needs at least two models, and {len(paths)} is given")
    first = load(paths[0])

    def states() -> Iterator[Mapping[str, Tensor]]:
        for path in paths:
            model = load(path)
            if model.config != first.config or _vocabulary(model) != _vocabulary(first):
                raise ValueError(f"{path} and {paths[0]} differ in their config or their tokens: no mean is a model")
            yield model.state_dict()

    first.load_state_dict(average(states()))
    with silence_warnings("regard.io"):  # whether transformers has a twin of the model was no question
        return save(first, out)


def _vocabulary(model: Model) -> tuple[object, ...]:
    """What the rows of tables and of a classifier stand for."""
    processor = model.processor
    if processor is None:
        return ()
    return (*(side and side.sha256 for side in (processor.source, processor.target)), processor.labels)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _name_list(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first!r}" + (f" and {len(rest)} more" if rest else "")
