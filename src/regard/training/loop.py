"""The training loop, straight from the first step to the last. Tasks differ in data and loss; it knows none by name."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..data.hashing import stable_key
from ..errors import Diverged
from ..foundation.jsonio import wrong_values_as_bad_file
from ..models import Model
from .averaging import Ema
from .checkpoint import Checkpoint, Checkpoints, first_non_finite
from .loss import Batch, Objective
from .optimiser import Optimiser, Schedule
from .parallel import Group, clip_grad_norm, gather_parameters, gradient_sync
from .precision import Precision
from .reporter import Reporter
from .shards import is_sharded
from .signals import Interrupted, Signals, broken_gradient, broken_output
from .tasks import Task
from .working_weights import WorkingWeights


@dataclass(frozen=True)
class StepRecord:
    """What a callback is given after a step."""

    step: int
    loss: float
    lr: float
    metrics: dict[str, Any]  # of the evaluation at this step, if there was one
    model: Model


class Prefetch(AbstractContextManager["Prefetch"]):
    """``batch(number)`` as ``make(number)`` gives it, on the device; the next ones are already being made.

    A thread makes the same batches as no thread, since a batch is a pure function of its number.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device, ahead: int = 4, stride: int = 1) -> None:
        self._make, self._device, self._ahead, self._stride = make, device, ahead, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches") if device.type == "cuda" else None
        self._coming: dict[int, Future[Batch]] = {}

    def batch(self, number: int) -> Batch:
        """The batch on the device, its targets counted."""
        if self._pool is None:
            return self._make(number).to(self._device)
        for ahead in range(number, number + self._stride * self._ahead, self._stride):
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(lambda n: self._make(n).with_counts().pin_memory(), ahead)
        return self._coming.pop(number).result().to(self._device)

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._coming.clear()


def seed_everything(seed: int, what: str, number: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators, on every device."""
    key = stable_key("training", what, seed, number)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)


@dataclass
class Position:
    """Where a run stands. With the tensors of a checkpoint it is all that continuing takes."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0
    best: float | None = None  # the best value so far of the metric that ``Task.best_metric`` names
    best_step: int | None = None  # where it was reached
    waited: int = 0  # evaluations since then
    micro: int = 0  # batches of the next step whose gradients are already summed
    losses: list[Any] = field(default_factory=list)  # the losses of those batches
    n_targets: int = 0  # of the next step, like n_tokens: over all its batches and processes
    n_tokens: int = 0

    def begin_step(self) -> None:
        """Nothing is done of the next step."""
        self.micro, self.losses, self.n_targets, self.n_tokens = 0, [], 0, 0


@dataclass(frozen=True)
class UnreadStep:
    """A step whose loss and gradient norm are still on the GPU: whether they are finite is read during the next."""

    step: int
    batches: list[Batch]
    numbers: list[int]
    loss: Tensor
    norm: Tensor
    finite: Tensor  # one bool, in memory of the host once ``copied`` is done
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, batches: list[Batch], numbers: list[int], loss: Tensor, norm: Tensor) -> UnreadStep:
        finite = torch.empty((), dtype=torch.bool, pin_memory=loss.is_cuda)
        finite.copy_(loss.isfinite() & norm.isfinite(), non_blocking=True)
        copied = torch.cuda.Event() if loss.is_cuda else None
        if copied is not None:
            copied.record()
        return cls(step, batches, numbers, loss, norm, finite, copied)


@dataclass
class Loop:
    """Everything a run consists of, put together by ``trainer.py``, and the loop over it."""

    train: TrainConfig
    task: Task
    model: Model
    objective: Objective  # model and loss as they are: for evaluation, and for finding what broke
    step_module: nn.Module  # the same, compiled or wrapped for several processes
    optimiser: Optimiser
    schedule: Schedule
    precision: Precision
    group: Group
    checkpoints: Checkpoints
    reporter: Reporter
    ema: Ema | None = None
    working: WorkingWeights | None = None  # whose objective ``step_module`` then is
    reads_late: bool = False  # whether a step is finite is read during the next one, so that no GPU waits
    callbacks: Sequence[Callable[[StepRecord], None]] = ()
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    at: Position = field(default_factory=Position)
    saved: int | None = None  # the step of the last checkpoint that was written or read
    stopgap: int | None = None  # a checkpoint written only because the run was asked to stop: the next replaces it
    unread: UnreadStep | None = None  # the last step, until it is known to be finite

    def run(self) -> None:
        """From where it stands to ``train.steps``; raises Interrupted or Diverged when it does not get there."""
        train, at, alone = self.train, self.at, not self.group.is_distributed
        ahead = Prefetch(self.task.batch, self.group.device, stride=self.group.world)
        with Signals(patient=not alone) as signals, ahead as prefetch:
            self.objective.train()
            while at.step < train.steps and not self._out_of_patience():
                started = time.perf_counter()
                numbers = self._numbers()
                batches = [prefetch.batch(number) for number in numbers]
                asked = self._count_step(batches, signals.asked)
                for batch, number in zip(batches, numbers, strict=True):
                    # One process may stop between two batches of a step; several stop together, after it.
                    if signals.asked and alone and at.micro:
                        self._save_and_stop(signals.asked)
                    self._accumulate(batch, number)
                loss, norm, lr = self._update(batches, numbers)
                if self.callbacks or at.step == 1 or self._due(train.log_every) or at.step == train.steps:
                    self._check_finite()  # before anybody sees the numbers
                at.seconds += time.perf_counter() - started
                numbers_of_routers = (self.objective if self.working is None else self.working.objective).router_numbers
                self.reporter.step(
                    at.step, loss=loss, lr=lr, grad_norm=norm, n_tokens=at.n_tokens, **numbers_of_routers
                )
                at.begin_step()
                evaluates = self._due(train.eval_every) or at.step == train.steps
                improved = evaluates and self._evaluate()
                if self.callbacks and self.group.is_main:
                    metrics = self.metrics if evaluates else {}
                    step = StepRecord(at.step, float(loss), lr, metrics, self.model)
                    for callback in self.callbacks:
                        callback(step)
                last = at.step == train.steps or self._out_of_patience()
                if self._due(train.save_every) or improved or last:
                    self._save()
                asked = signals.asked if alone else asked
                if asked or train.stop_at == at.step:
                    self._save_and_stop(asked)

    def _numbers(self) -> list[int]:
        """Of the batches of the whole run, those this process has still to do for the next step."""
        world, accumulate = self.group.world, self.train.accumulate
        return [(self.at.step * accumulate + m) * world + self.group.rank for m in range(self.at.micro, accumulate)]

    def _count_step(self, batches: list[Batch], asked: int) -> int:
        """Over all processes: what this step consists of, and whether anyone was asked to stop."""
        if self.at.micro:  # begun before the run was interrupted, when it was known
            return asked
        mine = [sum(batch.n_targets for batch in batches), sum(batch.n_tokens for batch in batches), int(asked > 0)]
        self.at.n_targets, self.at.n_tokens, any_asked = self.group.sum(torch.tensor(mine)).tolist()
        return any_asked and (asked or 143)

    def _accumulate(self, batch: Batch, number: int) -> None:
        """Add one batch's gradients: those of its part of the mean over all targets of the step."""
        seed_everything(self.train.seed, "batch", number)
        last = self.at.micro == self.train.accumulate - 1
        with gradient_sync(self.step_module, last):
            with self.precision.forward():
                # Gradients of several processes are averaged; what is wanted is their sum.
                loss = self.step_module(batch) * (self.group.world / max(1, self.at.n_targets))
            self.precision.backward(loss)
        if self.working is not None:
            self.working.hand_over_gradients()
        self.at.losses.append(loss.detach() / self.group.world)
        self.at.micro += 1

    def _update(self, batches: list[Batch], numbers: list[int]) -> tuple[Tensor, Tensor, float]:
        """One step of the optimiser, unless something is not finite; loss, norm of the gradient, learning rate."""
        self.precision.unscale(self.optimiser.optimisers)
        norm = clip_grad_norm(self.objective.parameters(), self.train.clip)
        loss = self.group.sum(torch.stack([torch.as_tensor(x, device=norm.device) for x in self.at.losses]).sum())
        finite_norm = True
        if self.reads_late:
            self._check_finite()  # of the step before, while the GPU works on this one
            self.unread = UnreadStep.of(self.at.step + 1, batches, numbers, loss, norm)
            self.optimiser.skip_where(~(loss.isfinite() & norm.isfinite()))
        else:
            finite_loss, finite_norm = torch.stack([loss.isfinite(), norm.isfinite()]).tolist()
            # Gradients may have overflowed only because the loss is scaled up, which the scaler then does less.
            may_skip = self.precision.scales and self.precision.state()["scale"] > 1
            if not finite_loss or not (finite_norm or may_skip):
                raise self._divergence(self.at.step + 1, batches, numbers, float(loss), float(norm))
        factor = self.schedule(self.at.step + 1)
        self.optimiser.set_lr(factor)
        # A scaler would skip only those optimisers whose own gradients overflowed; a step is made whole or not at all.
        self.precision.step(self.optimiser.optimisers if finite_norm else [])
        self.optimiser.zero_grad()
        if self.working is not None:
            self.working.refresh()
        if self.ema is not None:
            self.ema.update()
        self.at.step += 1
        return loss, norm, factor * self.train.lr

    def _check_finite(self) -> None:
        """Diverged where the last step's loss or gradients were not finite. The optimiser then left the weights as
        they were, so what broke is found by computing that step again."""
        last, self.unread = self.unread, None
        if last is None:
            return
        if last.copied is not None:
            last.copied.synchronize()
        if last.finite:
            return
        self.optimiser.zero_grad()
        for batch, number in zip(last.batches, last.numbers, strict=True):
            seed_everything(self.train.seed, "batch", number)
            with self.precision.forward():
                loss = self.objective(batch)
            loss.backward()
        raise self._divergence(last.step, last.batches, last.numbers, float(last.loss), float(last.norm))

    def _divergence(self, step: int, batches: list[Batch], numbers: list[int], loss: float, norm: float) -> Diverged:
        output = None
        with gather_parameters(self.objective), self.precision.forward():
            for batch, number in zip(batches, numbers, strict=True):
                seed_everything(self.train.seed, "batch", number)
                output = output or broken_output(self.objective, batch)
        # An output that broke on any process comes before the gradients, which it breaks on all.
        outputs, gradients = zip(*self.group.gather_objects((output, broken_gradient(self.objective))), strict=True)
        place = next((found for found in (*outputs, *gradients) if found), "the loss")
        return Diverged(
            f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; not finite first in {place}; "
            f"{self._last_checkpoint()}"
        )

    def _last_checkpoint(self) -> str:
        return "there is no checkpoint" if self.saved is None else f"the last checkpoint is that of step {self.saved}"

    def _due(self, every: int) -> bool:
        return bool(every) and self.at.step % every == 0

    def _out_of_patience(self) -> bool:
        return self.train.patience is not None and self.at.waited >= self.train.patience

    def why_stopped(self) -> str | None:
        """Why the run ended before its last step; None where it did not."""
        at, train = self.at, self.train
        if at.step >= train.steps or not self._out_of_patience():
            return None
        name = self.task.best_metric(self.task.config).replace("_", " ")
        evaluations = f"{at.waited} evaluation{'s' * (at.waited != 1)}"
        return (
            f"stopped early at step {at.step:,} of {train.steps:,}: {evaluations} without a better {name} than "
            f"{at.best:.4g} at step {at.best_step:,} (train.patience={train.patience})"
        )

    def _evaluate(self) -> bool:
        """Look at held-out data; True where it was never better."""
        train, found, shown = self.train, None, []
        self._check_finite()
        self._check_weights()
        with self.reporter.paused():
            with self._evaluation_mode():
                if self.group.is_main:
                    n_batches, n_examples = train.eval_batches, train.eval_examples
                    n_examples = self.task.eval_examples if n_examples is None else n_examples
                    found = self.task.validate(self.model, self._loss, n_batches=n_batches, n_examples=n_examples)
                    shown = self.task.sample(self.model, train.samples) if train.samples else []
            metrics = self.metrics = self.group.broadcast_object(found)
            if broken := [name for name, x in metrics.items() if name.endswith("loss") and not math.isfinite(x)]:
                raise Diverged(f"step {self.at.step}: {broken[0]} {metrics[broken[0]]}; {self._last_checkpoint()}")
            self.reporter.evaluation(self.at.step, metrics)
            self.reporter.samples(self.at.step, shown)
        at, name = self.at, self.task.best_metric(self.task.config)
        value, smaller = float(metrics[name]), name.endswith("loss")
        if at.best is None or (value < at.best if smaller else value > at.best):
            at.best, at.best_step, at.waited = value, at.step, 0
            return True
        at.waited += 1
        return False

    def _check_weights(self) -> None:
        """Finite gradients may still make weights that are not; texts generated with them would be of no use."""
        found = self.group.gather_objects(first_non_finite(self.model.state_dict()))
        if place := next((name for name in found if name), None):
            raise Diverged(f"step {self.at.step}: not finite in {place}; {self._last_checkpoint()}")

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The model whole, with the weights one would ship, to be asked and not taught."""
        self.objective.eval()
        averaged = nullcontext() if self.ema is None else self.ema.averaged_weights()
        # Layers that were sharded are whole in the dtype they are sent in, so that texts, too, need autocast.
        sharded = any(is_sharded(p) for p in self.model.parameters())
        with (
            averaged,
            gather_parameters(self.objective),
            torch.no_grad(),
            self.precision.forward() if sharded else nullcontext(),
        ):
            yield
        self.objective.train()

    def _loss(self, batch: Batch) -> Tensor:
        with self.precision.forward():
            return self.objective(batch.to(self.group.device))

    def _save_and_stop(self, asked: int) -> None:
        if self.saved != self.at.step:
            self.stopgap = self.at.step
        self._save()
        done = f"stopped at step {self.at.step}; what was done is saved, --resume goes on from there"
        raise Interrupted(done, asked)

    def _save(self) -> None:
        at = self.at
        if self.saved == at.step and not at.micro:
            return
        self._check_finite()
        tensors, state = self._tensors(), self._state()
        # Finite gradients may still make weights that are not, and a step may be left half done: neither is kept. Of a
        # scaled loss gradients may overflow; the scaler sees to those.
        kept = {name: x for name, x in tensors.items() if not (self.precision.scales and name.startswith("grad/"))}
        faults = [first_non_finite(kept), *("the loss" for x in state["at"]["losses"] if not math.isfinite(x))]
        place = next((x for found in self.group.gather_objects(faults) for x in found if x), None)
        if place is not None:
            raise Diverged(f"step {at.step}: not finite in {place}, so it is not saved; {self._last_checkpoint()}")
        with self.reporter.paused("saving"):
            path = self.checkpoints.write(at.step, tensors, state)
            if self.stopgap is not None and self.stopgap != at.step:
                self.checkpoints.remove(self.stopgap)
                self.stopgap = None
            self.checkpoints.prune(at.best_step)
        self.saved = at.step
        self.reporter.report_checkpoint(at.step, path)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model/{name}": x.detach() for name, x in self.model.state_dict().items()}
        tensors.update({f"optimiser/{name}": x for name, x in self.optimiser.state_tensors().items()})
        if self.ema is not None:
            tensors.update({f"ema/{name}": x for name, x in self.ema.state_tensors().items()})
        if self.at.micro:
            grads = {name: p.grad for name, p in self.model.named_parameters()}
            tensors.update({f"grad/{name}": grad for name, grad in grads.items() if grad is not None})
        return tensors

    def _state(self) -> dict[str, Any]:
        return {
            "at": {**asdict(self.at), "losses": [float(x) for x in self.at.losses]},
            "scaler": self.precision.state(),
            "reporter": self.reporter.state(),
            "stopgap": self.stopgap == self.at.step,
            "processes": self.group.world,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand where the checkpoint was written."""
        state = checkpoint.state
        with wrong_values_as_bad_file(checkpoint.path / "state.json"):
            self._restore_state(state, checkpoint.step)
        checkpoint.fill("model/", self.model.state_dict())
        if self.working is not None:
            self.working.refresh()
        self.optimiser.load_state_tensors(checkpoint.tensors("optimiser/"))
        if self.ema is not None:
            self.ema.load_state_tensors(checkpoint.tensors("ema/"))
        summed = set(checkpoint.names("grad/")) if self.at.micro else ()
        for name, p in self.model.named_parameters():
            if f"grad/{name}" in summed:
                p.grad = checkpoint.tensor(f"grad/{name}", like=p)
        self.checkpoints.prune(self.at.best_step)  # where the run ended between writing this one and that

    def _restore_state(self, state: dict[str, Any], step: int) -> None:
        self.at, self.saved = Position(**state["at"]), step
        if not all(isinstance(x, int) for x in (self.at.step, self.at.waited, self.at.micro)) or self.at.step != step:
            raise ValueError(f"it stands at step {self.at.step}, not at {step}")
        self.stopgap = step if state["stopgap"] else None
        self.precision.load_state(state["scaler"])
        self.reporter.restore(state["reporter"])
        if state["processes"] != self.group.world:  # which share the batches of a step otherwise, so it begins anew
            self.at.begin_step()
