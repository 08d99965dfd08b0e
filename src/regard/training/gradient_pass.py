"""A forward and a backward pass over a batch: on a bf16 copy of the model, as a CUDA graph, and where numbers break.

Autocast keeps one set of weights, converts it in every pass, and keeps the residual stream in fp32. Here, as in mixed
precision by Micikevicius et al. (2018), the model keeps fp32 "master" weights, which are trained, averaged and saved,
and a bf16 copy runs the passes: half the bytes in every pass, and one conversion per step.

A pass of a small model is several hundred kernels of a few microseconds each, and the GPU waits for Python to launch
them. When batches have one shape, the pass is therefore captured once and replayed on the same addresses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError, first_line
from .compilation import SMALL_FLOPS
from .fused_layers import fuse_layers, use_fp8
from .loss import Batch, Objective, batch_loss
from .parallel import Group
from .precision import Precision
from .shards import local

_WARMUP_PASSES = 2  # passes per shape before capture: they load kernels and choose algorithms
_MAX_SHAPES = 4  # with more batch shapes than this, capturing does not pay off


def should_capture(objective: Objective, flops: float, working: WorkingWeights | None, accumulate: int) -> bool:
    """Whether to capture passes of ``flops`` operations: small ones on a GPU that never synchronise with the host.

    A replay overwrites the gradients of the previous one, so a step must be a single pass. Routers, and losses other
    than ``batch_loss``, may synchronise.
    """
    plain = objective.loss is batch_loss and objective.reference is None and not objective.has_routers
    checkpointed = any(getattr(part, "checkpointing", False) for part in objective.modules())
    return working is not None and accumulate == 1 and flops < SMALL_FLOPS and plain and not checkpointed


class GradientPass:
    """``run(batch, factor)`` adds the gradients of factor · loss to those of the model and returns factor · loss.

    ``module`` computes the loss of a batch, over the working weights if ``working`` is given. With ``captures``, passes
    run as a CUDA graph from the third batch of a shape on; if the capture fails, ``note`` says why.
    """

    def __init__(
        self, module: nn.Module, precision: Precision, working: WorkingWeights | None = None, captures: bool = False
    ) -> None:
        self.module, self.precision, self.working = module, precision, working
        self.captures = captures
        self.note: str | None = None
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, CapturedPass] = {}

    def run(self, batch: Batch, factor: float) -> Tensor:
        graph = self._graph(batch) if self.captures else None
        return self._compute(batch, factor) if graph is None else graph.run(batch, factor)

    def _compute(self, batch: Batch, factor: float | Tensor) -> Tensor:
        with self.precision.forward():
            loss = self.module(batch) * factor
        self.precision.backward(loss)
        if self.working is not None:
            self.working.hand_over_gradients()
        return loss.detach()

    def _graph(self, batch: Batch) -> CapturedPass | None:
        """The captured pass for the shape of this batch; None if there is none yet or capturing is off."""
        if 2 * batch.n_targets <= batch.targets.numel():  # the loss skips rows without a target, which is faster
            return None
        key = (tuple((x.shape, x.dtype) for x in batch.tensors()), tuple(batch.options))
        if key in self._graphs:
            return self._graphs[key]
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= _WARMUP_PASSES:
            self.captures = len(self._seen) <= _MAX_SHAPES
            return None
        assert self.working is not None
        try:
            self._graphs[key] = CapturedPass(self._compute, batch, self.working)
        except Exception as error:  # an operation synchronised with the host, or memory ran out
            self.working.forget_gradients()
            self.captures = False
            self.note = f"passes are not captured as a CUDA graph: {first_line(error)[:300]}"
        return self._graphs.get(key)


class CapturedPass:
    """``compute(batch, factor)`` for batches of one shape as a CUDA graph; on a CPU (in tests) a plain call."""

    def __init__(self, compute: Callable[[Batch, Tensor], Tensor], batch: Batch, working: WorkingWeights) -> None:
        self._batch = replace(batch.clone(), n_counted=None)  # a Python number would be baked into the graph
        device = batch.targets.device
        self._factor = torch.ones((), device=device)
        self._loss = self._factor
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

        def compute_static() -> None:
            self._loss = compute(self._batch, self._factor)

        self._replay: Callable[[], None] = compute_static
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            # The prefetch thread may allocate pinned memory during the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                compute_static()
            self._gradients, self._replay = working.gradients(), graph.replay
            working.forget_gradients()

    def run(self, batch: Batch, factor: float) -> Tensor:
        for static, new in zip(self._batch.tensors(), batch.tensors(), strict=True):
            static.copy_(new, non_blocking=True)
        self._factor.fill_(factor)
        self._replay()
        for p, gradient in self._gradients:
            p.grad = gradient
        return self._loss.clone()


# ------------------------------------------------------------------------------------- working weights


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
        wide = [p for p in model.parameters() if p.dtype == torch.float32]
        self._pairs = [(p, nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)) for p in wide]
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


# ------------------------------------------------------------------------------------- values that are not finite


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
