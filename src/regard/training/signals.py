"""Ctrl-C and SIGTERM (the first saves and exits, the second exits at once), and where a value became non-finite."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError
from .loss import Batch
from .shards import local


class Interrupted(RegardError):
    """Training was stopped by a signal or at ``train.stop_at``; progress up to there is saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Signals:
    """A context in which ``exit_code`` is the exit code of the first signal received, or 0.

    ``patient``: a second signal is ignored. In a distributed run the launcher may forward a signal that the process has
    already received, the other processes wait for it, and the launcher kills processes that take too long.
    """

    def __init__(self, patient: bool = False) -> None:
        self.exit_code = 0
        self._patient = patient
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if self.exit_code and not self._patient:
            os._exit(code)
        self.exit_code = self.exit_code or code

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only it may set signal handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def broken_output(objective: nn.Module, batch: Batch) -> str | None:
    """The first layer whose output is not finite for this batch; None if all are finite.

    The weights and the seeds must be those of the pass that failed.
    """
    broken: list[str] = []

    def note_broken(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.is_floating_point() and not _finite(first):
            broken.append(name)

    with ExitStack() as hooks:
        for name, module in objective.named_modules():
            if name and not any(True for _ in module.children()):
                hooks.callback(module.register_forward_hook(partial(note_broken, name)).remove)
        with torch.no_grad():
            objective(batch)
    return f"the output of {_short(broken[0])}" if broken else None


def broken_gradient(objective: nn.Module) -> str | None:
    """The parameters whose gradient, or this process's shard of it, is not finite; None if all are finite."""
    grads = {name: local(p.grad) for name, p in objective.named_parameters() if p.grad is not None}
    broken = [_short(name) for name, grad in grads.items() if not _finite(grad)]
    if not broken:
        return None
    # The backward pass runs from the end of the model to its beginning, so the last parameter broke first.
    return f"the gradient of {broken[-1]}" + (f" and {len(broken) - 1} before it" if len(broken) > 1 else "")


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _short(name: str) -> str:
    return name.removeprefix("module.").removeprefix("model.").replace("_orig_mod.", "")
