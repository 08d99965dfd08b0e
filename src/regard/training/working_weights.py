"""Weights to compute with in half precision, beside the fp32 weights that are trained, averaged and saved.

Of mixed precision (Micikevicius et al. 2018) autocast keeps one set of weights, converts it in every pass and keeps the
residual stream in fp32. Here the model of the run keeps its fp32 weights (the "master" weights), and a copy of it in
bf16 computes loss and gradients: half the bytes in every pass, and nothing to convert but once a step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError
from ..layers.fp8_linear import use_fp8
from .loss import Objective
from .parallel import Group
from .precision import Precision


def uses_working_weights(precision: Precision, group: Group) -> bool:
    """In bf16 and fp8 on one GPU. On a CPU, in fp16, whose loss is scaled, and over several GPUs autocast converts."""
    return precision.dtype == torch.bfloat16 and precision.device.type == "cuda" and not group.is_distributed


def working_weights(objective: Objective, precision: Precision, group: Group) -> WorkingWeights | None:
    """Of a run, where it has any."""
    if uses_working_weights(precision, group):
        return WorkingWeights(objective, precision.dtype, fp8=precision.name == "fp8")
    if precision.name == "fp8":
        raise RegardError("train.precision=fp8 trains on one GPU, not on several; train.precision=bf16 does")
    return None


class WorkingWeights:
    """``objective``: the given one over a copy of its model whose fp32 parameters are in ``dtype``.

    ``fp8``: the products of its layers and its head are computed in eight bits.
    Buffers, tokenizers and the reference model are shared with the original; parameters that are tied stay tied.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> None:
        model = objective.model
        self._pairs = [(p, _half(p, dtype)) for p in model.parameters() if p.dtype == torch.float32]
        memo: dict[int, Any] = {id(shared): shared for shared in (model.processor, model.provenance, *model.buffers())}
        memo |= {id(own): half for own, half in self._pairs}
        copied = copy.deepcopy(model, memo)
        if fp8:
            for stack in copied.stacks():
                use_fp8(stack)
            if copied.head is not None:
                copied.head.fp8 = True
        self.objective = Objective(copied, objective.smoothing, objective.loss, objective.reference)
        self.objective.train()

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Add the gradients of the working weights, which are then gone, to those of the model in fp32."""
        pairs = [(own, half.grad) for own, half in self._pairs if half.grad is not None]
        wide = [torch.empty_like(own) for own, _ in pairs]
        torch._foreach_copy_(wide, [grad for _, grad in pairs])
        for (own, _), grad in zip(pairs, wide, strict=True):
            own.grad = grad if own.grad is None else own.grad.add_(grad)
        for _, half in self._pairs:
            half.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the model's weights as they are now: after a step of the optimiser, and after they were read."""
        torch._foreach_copy_([half.detach() for _, half in self._pairs], [own.detach() for own, _ in self._pairs])


def _half(p: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
