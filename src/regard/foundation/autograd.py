"""Backward passes that are not themselves differentiable, and say so.

torch's ``once_differentiable`` lets a second derivative pass where only saved tensors, not the incoming gradient,
depend on the inputs: gradients of a sum then have gradients of their own that silently lack terms.
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
    def forward(ctx: Any, grad: Tensor, what: str) -> Tensor:
        ctx.what = what
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(f"{ctx.what} has first derivatives only; attend(…, backend='reference') has second ones")


def first_derivative_only(what: str) -> Callable[[_Backward], _Backward]:
    """Decorate a backward pass: under ``create_graph=True`` differentiating its results raises, naming ``what``."""

    def decorate(backward: _Backward) -> _Backward:
        @functools.wraps(backward)
        def run_backward(ctx: Any, *slopes: Tensor) -> Any:
            with torch.no_grad():
                grads = backward(ctx, *slopes)
            if not torch.is_grad_enabled():
                return grads
            return tuple(
                None if grad is None else _NoSecondDerivative.apply(grad.detach().requires_grad_(), what)
                for grad in grads
            )

        return run_backward  # type: ignore[return-value]  # the same signature

    return decorate
