"""Backward passes that raise when they are differentiated again.

torch's ``once_differentiable`` misses a case: if only saved tensors depend on the inputs and the incoming gradient does
not (the gradient of a sum), a second derivative is computed that silently lacks terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, name: str) -> Tensor:
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} has first derivatives only; attend(…, backend='reference') has second ones")


def first_derivative_only(name: str) -> Callable[[_Backward], _Backward]:
    """Decorator of a backward function: differentiating its results raises a RuntimeError that mentions ``name``."""

    def decorate(backward: _Backward) -> _Backward:
        @functools.wraps(backward)
        def run_backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            if not torch.is_grad_enabled():  # enabled under create_graph=True
                return grads
            return tuple(
                None if grad is None else _NoSecondDerivative.apply(grad.detach().requires_grad_(), name)
                for grad in grads
            )

        return run_backward  # type: ignore[return-value]  # the same signature

    return decorate
