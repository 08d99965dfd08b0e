"""When a loss or gradient is not finite: which part of the model it came from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch
from .shards import local

__all__ = ["broken_gradient", "broken_output"]


def broken_output(objective: nn.Module, batch: Batch) -> str | None:
    """The first layer whose output is not finite for this batch; None where all are.

    Weights must still be those of the failed pass, and the generators be seeded as they were.
    """
    found: list[str] = []
    with ExitStack() as hooks:
        for name, module in objective.named_modules():
            if name and not any(True for _ in module.children()):
                handle = module.register_forward_hook(_watch(name, found))
                hooks.callback(handle.remove)
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


def _watch(name: str, found: list[str]) -> Any:
    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.is_floating_point() and not _finite(first):
            found.append(name)

    return look


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _short(name: str) -> str:
    return name.removeprefix("module.").removeprefix("model.").replace("_orig_mod.", "")
