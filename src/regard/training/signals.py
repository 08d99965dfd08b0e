"""Ctrl-C and SIGTERM: the first one saves and leaves, the second one leaves at once."""

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
    """Training was asked to stop, and everything up to there is saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Signals:
    """While it is entered, ``asked`` is the exit code of the signal that came, or 0.

    Of several processes (``patient``) none leaves at once: their launcher passes on what they may have been told
    already, the others wait for them, and it ends them itself when they take too long.
    """

    def __init__(self, patient: bool = False) -> None:
        self.asked, self._patient = 0, patient
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if self.asked and not self._patient:
            os._exit(code)
        self.asked = self.asked or code

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python delivers no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def broken_output(objective: nn.Module, batch: Batch) -> str | None:
    """The first layer whose output is not finite for this batch; None where all are.

    Weights must still be those of the failed pass, and the generators be seeded as they were.
    """
    found: list[str] = []

    def note_broken(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.is_floating_point() and not _finite(first):
            found.append(name)

    with ExitStack() as hooks:
        for name, module in objective.named_modules():
            if name and not any(True for _ in module.children()):
                hooks.callback(module.register_forward_hook(partial(note_broken, name)).remove)
        with torch.no_grad():
            objective(batch)
    return f"the output of {_short(found[0])}" if found else None


def broken_gradient(objective: nn.Module) -> str | None:
    """The parameters whose gradients, as far as this process holds them, are not finite; None where all are."""
    grads = {name: local(p.grad) for name, p in objective.named_parameters() if p.grad is not None}
    broken = [_short(name) for name, grad in grads.items() if not _finite(grad)]
    if not broken:
        return None
    # The backward pass runs from the end of the model to its beginning: the last parameter is where it started.
    return f"the gradient of {broken[-1]}" + (f" and {len(broken) - 1} before it" if len(broken) > 1 else "")


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _short(name: str) -> str:
    return name.removeprefix("module.").removeprefix("model.").replace("_orig_mod.", "")
