"""A forward and a backward pass over a batch; for a small model on a GPU, as a CUDA graph.

A pass of a small model is several hundred kernels of a few microseconds each, and the GPU waits for Python to launch
them. When batches have one shape, the pass is therefore captured once and replayed on the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from .compilation import SMALL_FLOPS
from .loss import Batch, Objective, batch_loss
from .precision import Precision
from .working_weights import WorkingWeights

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
