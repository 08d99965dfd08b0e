"""When a loss or gradient is not finite: which part of the model it came from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch

__all__ = ["where_it_broke"]


def where_it_broke(objective: nn.Module, batch: Batch) -> str:
    """The first layer whose output is not finite for this batch; else the parameters whose gradients are not.

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
    if found:
        return f"the output of {_short(found[0])}"
    broken = [_short(name) for name, p in objective.named_parameters() if p.grad is not None and not _finite(p.grad)]
    if not broken:
        return "the loss"
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
