"""A bf16 copy of the model that computes loss and gradients; the fp32 weights are trained, averaged and saved.

Autocast keeps one set of weights, converts it in every pass, and keeps the residual stream in fp32. Here, as in mixed
precision by Micikevicius et al. (2018), the model keeps fp32 "master" weights and a bf16 copy runs the passes: half the
bytes in every pass, and one conversion per step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError
from .fused_layers import fuse_layers, use_fp8
from .loss import Objective
from .parallel import Group
from .precision import Precision


def uses_working_weights(precision: Precision, group: Group) -> bool:
    """True for bf16 and fp8 on a single GPU. A CPU, fp16 (with its scaled loss) and several GPUs use autocast."""
    return precision.dtype == torch.bfloat16 and precision.device.type == "cuda" and not group.is_distributed


def working_weights(objective: Objective, precision: Precision, group: Group) -> WorkingWeights | None:
    """The working weights of a run; None if it computes with autocast or in fp32."""
    if uses_working_weights(precision, group):
        return WorkingWeights(objective, precision.dtype, fp8=precision.name == "fp8")
    if precision.name == "fp8":
        raise RegardError("train.precision=fp8 needs a single GPU; train.precision=bf16 trains on several")
    return None


class WorkingWeights:
    """``objective`` is the given one over a copy of its model, with fp32 parameters converted to ``dtype``.

    Feed-forward networks and projections to heads are fused. With ``fp8``, they, the other linear layers that gain from
    it and the head compute their products in eight bits. Buffers, tokenizers and the reference model are shared with
    the original; tied parameters stay tied.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> None:
        model = objective.model
        self._pairs = [(p, _half(p, dtype)) for p in model.parameters() if p.dtype == torch.float32]
        memo: dict[int, Any] = {id(shared): shared for shared in (model.processor, model.provenance, *model.buffers())}
        memo |= {id(own): half for own, half in self._pairs}
        copied = copy.deepcopy(model, memo)
        for stack in copied.stacks():
            fuse_layers(stack, fp8)
            if fp8:
                use_fp8(stack)
        if fp8 and copied.head is not None:
            copied.head.fp8 = True
        self.objective = Objective(copied, objective.smoothing, objective.loss, objective.reference)
        self.objective.train()

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Add the gradients of the working weights to the fp32 gradients of the model, then clear them."""
        pairs = [(own, half.grad) for own, half in self._pairs if half.grad is not None]
        wide = [torch.empty_like(own) for own, _ in pairs]
        torch._foreach_copy_(wide, [grad for _, grad in pairs])
        for (own, _), grad in zip(pairs, wide, strict=True):
            own.grad = grad if own.grad is None else own.grad.add_(grad)
        for _, half in self._pairs:
            half.grad = None

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of the model that have a gradient, each with that gradient."""
        return [(own, own.grad) for own, _ in self._pairs if own.grad is not None]

    def forget_gradients(self) -> None:
        """Clear the gradients of the model and of the working weights."""
        for own, half in self._pairs:
            own.grad = half.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the model: after each optimiser step, and after loading a checkpoint."""
        torch._foreach_copy_([half.detach() for _, half in self._pairs], [own.detach() for own, _ in self._pairs])


def _half(p: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
