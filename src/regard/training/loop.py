"""The training loop, from the first step to the last. It is the same for every task; a task supplies data and loss."""

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
from .gradient_pass import GradientPass, WorkingWeights, broken_gradient, broken_output
from .loss import Batch, Objective
from .optimiser import Optimiser, Schedule
from .parallel import Group, clip_grad_norm, gather_parameters, gradient_sync
from .precision import Precision
from .reporter import Reporter
from .shards import is_sharded
from .signals import Interrupted, Signals
from .tasks import Task

_AHEAD = 4  # batches that are prepared in advance


@dataclass(frozen=True)
class StepRecord:
    """What a callback receives after each step."""

    step: int
    loss: float
    lr: float
    metrics: dict[str, Any]  # validation metrics at this step; empty if it was not evaluated
    model: Model


class Prefetch(AbstractContextManager["Prefetch"]):
    """``batch(number)`` returns ``make(number)`` on the device; on a GPU a thread prepares the next batches.

    A batch is a pure function of its number, so the thread changes no batch.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device, stride: int = 1) -> None:
        self._make, self._device, self._stride = make, device, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches") if device.type == "cuda" else None
        self._pending: dict[int, Future[Batch]] = {}

    def batch(self, number: int) -> Batch:
        """The batch on the device, with its targets counted."""
        if self._pool is None:
            return self._make(number).to(self._device)
        for ahead in range(number, number + self._stride * _AHEAD, self._stride):
            if ahead not in self._pending:
                self._pending[ahead] = self._pool.submit(lambda n: self._make(n).with_counts().pin_memory(), ahead)
        return self._pending.pop(number).result().to(self._device)

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pending.clear()


def seed_everything(seed: int, stream: str, number: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices) for one random stream of a run, such as ("batch", number)."""
    key = stable_key("training", stream, seed, number)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)


@dataclass
class Position:
    """The progress of a run. Together with the tensors of a checkpoint it is all that resuming needs."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # training time
    best: float | None = None  # best value so far of the metric ``Task.best_metric``
    best_step: int | None = None  # the step at which ``best`` was reached
    waited: int = 0  # evaluations since ``best_step``
    micro: int = 0  # batches already accumulated for the next step
    losses: list[Any] = field(default_factory=list)  # their losses
    n_targets: int = 0  # targets in the next step, over all its batches and processes
    n_tokens: int = 0  # tokens in the next step, likewise

    def check(self) -> None:
        """Raise ValueError unless every value is one that a run could have written."""
        counts = [self.step, self.waited, self.micro, self.n_targets, self.n_tokens]
        numbers = [self.seconds, *self.losses]
        if self.best_step is not None:
            counts.append(self.best_step)
        if self.best is not None:
            numbers.append(self.best)
        if not all(type(x) is int and x >= 0 for x in counts):
            raise ValueError("a count is not a whole number")
        if not all(type(x) in (int, float) for x in numbers):
            raise ValueError("a value is not a number")
        if len(self.losses) != self.micro:
            raise ValueError(f"it has {len(self.losses)} losses for {self.micro} batches")

    def begin_step(self) -> None:
        """Reset the counters of the next step."""
        self.micro, self.losses, self.n_targets, self.n_tokens = 0, [], 0, 0


@dataclass(frozen=True)
class UnreadStep:
    """A step whose loss and gradient norm are still on the GPU: the next step reads whether they are finite."""

    step: int
    batches: list[Batch]
    numbers: list[int]  # the numbers of the batches, which seed their dropout
    loss: Tensor
    norm: Tensor
    finite: Tensor  # one bool in host memory, valid after the event ``copied``
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
    """The parts of a run, assembled by ``trainer.py``, and the loop itself."""

    train: TrainConfig
    task: Task
    model: Model
    objective: Objective  # plain model and loss: for evaluation, and for locating values that are not finite
    step_module: nn.Module  # what a training step calls: the objective compiled, wrapped, or over working weights
    optimiser: Optimiser
    schedule: Schedule
    precision: Precision
    group: Group
    checkpoints: Checkpoints
    reporter: Reporter
    ema: Ema | None = None
    working: WorkingWeights | None = None
    captures: bool = False  # run gradient passes as CUDA graphs
    reads_late: bool = False  # check that a step was finite during the next one, so the GPU never waits for the host
    callbacks: Sequence[Callable[[StepRecord], None]] = ()
    metrics: dict[str, Any] = field(default_factory=dict)  # from the last evaluation
    at: Position = field(default_factory=Position)
    saved_step: int | None = None  # step of the last checkpoint written or read
    # Step of a checkpoint that was written only because the run was stopped; the next one replaces it.
    stopgap: int | None = None
    unread: UnreadStep | None = None  # the last step, until it is known to be finite

    def __post_init__(self) -> None:
        self.gradient_pass = GradientPass(self.step_module, self.precision, self.working, self.captures)

    def run(self) -> None:
        """Train from the current position to ``train.steps``.

        Raises Interrupted after a signal or at ``train.stop_at``, and Diverged when a value is not finite.
        """
        train, at, alone = self.train, self.at, not self.group.is_distributed
        batch_source = Prefetch(self.task.batch, self.group.device, stride=self.group.world)
        with Signals(patient=not alone) as signals, batch_source as prefetch:
            self.objective.train()
            while at.step < train.steps and not self._out_of_patience():
                started = time.perf_counter()
                numbers = self._batch_numbers()
                batches = [prefetch.batch(number) for number in numbers]
                stop_code = self._count_step(batches, signals.exit_code)
                for batch, number in zip(batches, numbers, strict=True):
                    # One process may stop between two batches of a step; several stop together, after it.
                    if signals.exit_code and alone and at.micro:
                        self._save_and_stop(signals.exit_code)
                    self._accumulate(batch, number)
                loss, norm, lr = self._update(batches, numbers)
                if self.callbacks or at.step == 1 or self._due(train.log_every) or at.step == train.steps:
                    self._check_finite()  # before the numbers are shown
                at.seconds += time.perf_counter() - started
                routing = (self.objective if self.working is None else self.working.objective).router_numbers
                self.reporter.step(at.step, loss=loss, lr=lr, grad_norm=norm, n_tokens=at.n_tokens, **routing)
                at.begin_step()
                evaluates = self._due(train.eval_every) or at.step == train.steps
                improved = evaluates and self._evaluate()
                if self.callbacks and self.group.is_main:
                    metrics = self.metrics if evaluates else {}
                    record = StepRecord(at.step, float(loss), lr, metrics, self.model)
                    for callback in self.callbacks:
                        callback(record)
                last = at.step == train.steps or self._out_of_patience()
                if self._due(train.save_every) or improved or last:
                    self._save()
                if alone:
                    stop_code = signals.exit_code
                if stop_code or train.stop_at == at.step:
                    self._save_and_stop(stop_code)

    def _batch_numbers(self) -> list[int]:
        """Numbers, counted over the whole run, of the batches this process has left to compute in the next step."""
        world, accumulate = self.group.world, self.train.accumulate
        return [(self.at.step * accumulate + m) * world + self.group.rank for m in range(self.at.micro, accumulate)]

    def _count_step(self, batches: list[Batch], stop_code: int) -> int:
        """Sum the targets and tokens of the next step over all processes.

        ``stop_code`` is the exit code of a signal this process received, or 0. Returns that of any process.
        """
        if self.at.micro:  # the checkpoint of a partly accumulated step has the counts
            return stop_code
        n_targets, n_tokens = sum(batch.n_targets for batch in batches), sum(batch.n_tokens for batch in batches)
        counts = torch.tensor([n_targets, n_tokens, int(stop_code > 0)])
        self.at.n_targets, self.at.n_tokens, n_stopping = self.group.sum(counts).tolist()
        if not n_stopping:
            return 0
        return stop_code or 143  # 128 + SIGTERM: another process received a signal

    def _accumulate(self, batch: Batch, number: int) -> None:
        """Add the gradients of one batch, scaled so that a step's loss is the mean over all its targets."""
        seed_everything(self.train.seed, "batch", number)
        last = self.at.micro == self.train.accumulate - 1
        with gradient_sync(self.step_module, last):
            # Processes average their gradients; multiplying by their number turns the average into a sum.
            loss = self.gradient_pass.run(batch, self.group.world / max(1, self.at.n_targets))
        self.at.losses.append(loss / self.group.world)
        self.at.micro += 1

    def _update(self, batches: list[Batch], numbers: list[int]) -> tuple[Tensor, Tensor, float]:
        """Clip and take one optimiser step. Returns the loss, the gradient norm and the learning rate.

        Raises Diverged when the loss or the gradients are not finite.
        """
        self.precision.unscale(self.optimiser.optimisers)
        norm = clip_grad_norm(self.objective.parameters(), self.train.clip)
        loss = self.group.sum(torch.stack([torch.as_tensor(x, device=norm.device) for x in self.at.losses]).sum())
        finite_norm = True
        if self.reads_late:
            self._check_finite()  # the previous step, while the GPU works on this one
            self.unread = UnreadStep.of(self.at.step + 1, batches, numbers, loss, norm)
            self.optimiser.skip_where(~(loss.isfinite() & norm.isfinite()))
        else:
            finite_loss, finite_norm = torch.stack([loss.isfinite(), norm.isfinite()]).tolist()
            # With a scale above 1, gradients may have overflowed only because of it: the scaler lowers it and skips.
            may_skip = self.precision.scales and self.precision.state()["scale"] > 1
            if not finite_loss or not (finite_norm or may_skip):
                raise self._divergence(self.at.step + 1, batches, numbers, float(loss), float(norm))
        factor = self.schedule(self.at.step + 1)
        self.optimiser.set_lr(factor)
        # A scaler skips only the optimisers whose own gradients overflowed; skip all of them, or none.
        self.precision.step(self.optimiser.optimisers if finite_norm else [])
        self.optimiser.zero_grad()
        if self.working is not None:
            self.working.refresh()
        if self.ema is not None:
            self.ema.update()
        self.at.step += 1
        return loss, norm, factor * self.train.lr

    def _check_finite(self) -> None:
        """Raise Diverged if the loss or the gradients of the last step were not finite.

        The optimiser left the weights unchanged in that case, so the step is computed again to locate the fault.
        """
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
        """The exception for a step that is not finite; it names the first module or gradient that is not."""
        output = None
        with gather_parameters(self.objective), self.precision.forward():
            for batch, number in zip(batches, numbers, strict=True):
                seed_everything(self.train.seed, "batch", number)
                output = output or broken_output(self.objective, batch)
        # Outputs come first: one bad output on one process makes the gradients of all processes bad.
        outputs, gradients = zip(*self.group.gather_objects((output, broken_gradient(self.objective))), strict=True)
        place = next((name for name in (*outputs, *gradients) if name), "the loss")
        return Diverged(
            f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; not finite first in {place}; "
            f"{self._last_checkpoint()}"
        )

    def _last_checkpoint(self) -> str:
        step = self.saved_step
        return "there is no checkpoint" if step is None else f"the last checkpoint is that of step {step}"

    def _due(self, every: int) -> bool:
        return bool(every) and self.at.step % every == 0

    def _out_of_patience(self) -> bool:
        return self.train.patience is not None and self.at.waited >= self.train.patience

    def why_stopped(self) -> str | None:
        """Why the run ended before its last step; None if it did not."""
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
        """Evaluate on held-out data and report; True if the best metric improved."""
        train, measured, samples = self.train, None, []
        self._check_finite()
        self._check_weights()
        with self.reporter.paused():
            with self._evaluation_mode():
                if self.group.is_main:
                    n_batches, n_examples = train.eval_batches, train.eval_examples
                    n_examples = self.task.eval_examples if n_examples is None else n_examples
                    measured = self.task.validate(self.model, self._loss, n_batches=n_batches, n_examples=n_examples)
                    samples = self.task.sample(self.model, train.samples) if train.samples else []
            metrics = self.metrics = self.group.broadcast_object(measured)
            if broken := [name for name, x in metrics.items() if name.endswith("loss") and not math.isfinite(x)]:
                raise Diverged(f"step {self.at.step}: {broken[0]} {metrics[broken[0]]}; {self._last_checkpoint()}")
            self.reporter.evaluation(self.at.step, metrics)
            self.reporter.samples(self.at.step, samples)
        at, name = self.at, self.task.best_metric(self.task.config)
        value, smaller = float(metrics[name]), name.endswith("loss")
        if at.best is None or (value < at.best if smaller else value > at.best):
            at.best, at.best_step, at.waited = value, at.step, 0
            return True
        at.waited += 1
        return False

    def _check_weights(self) -> None:
        """Raise Diverged if a weight is not finite: finite gradients can still overflow the weights."""
        names = self.group.gather_objects(first_non_finite(self.model.state_dict()))
        if place := next((name for name in names if name), None):
            raise Diverged(f"step {self.at.step}: not finite in {place}; {self._last_checkpoint()}")

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Eval mode without gradients, with gathered parameters and, if the run has one, the moving average."""
        self.objective.eval()
        averaged = nullcontext() if self.ema is None else self.ema.averaged_weights()
        # Sharded layers are gathered in their communication dtype, so generation needs autocast too.
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

    def _save_and_stop(self, exit_code: int) -> None:
        if self.saved_step != self.at.step:
            self.stopgap = self.at.step
        self._save()
        message = f"stopped at step {self.at.step}; progress is saved, --resume continues from there"
        raise Interrupted(message, exit_code)

    def _save(self) -> None:
        at = self.at
        if self.saved_step == at.step and not at.micro:
            return
        self._check_finite()
        tensors, state = self._tensors(), self._state()
        # Finite gradients can still overflow the weights, and the losses of a partly accumulated step have not been
        # checked yet. Accumulated gradients of a scaled loss may overflow; the scaler deals with them.
        checked = {name: x for name, x in tensors.items() if not (self.precision.scales and name.startswith("grad/"))}
        faults = [first_non_finite(checked), *("the loss" for x in state["at"]["losses"] if not math.isfinite(x))]
        place = next((fault for all_faults in self.group.gather_objects(faults) for fault in all_faults if fault), None)
        if place is not None:
            raise Diverged(f"step {at.step}: not finite in {place}, so it is not saved; {self._last_checkpoint()}")
        with self.reporter.paused("saving"):
            path = self.checkpoints.write(at.step, tensors, state)
            if self.stopgap is not None and self.stopgap != at.step:
                self.checkpoints.remove(self.stopgap)
                self.stopgap = None
            self.checkpoints.prune(at.best_step)
        self.saved_step = at.step
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
        """Load the model, the optimiser and the position from a checkpoint."""
        with wrong_values_as_bad_file(checkpoint.path / "state.json"):
            self._restore_state(checkpoint.state, checkpoint.step)
        checkpoint.fill("model/", self.model.state_dict())
        if self.working is not None:
            self.working.refresh()
        self.optimiser.load_state_tensors(checkpoint.tensors("optimiser/"))
        if self.ema is not None:
            self.ema.load_state_tensors(checkpoint.tensors("ema/"))
        accumulated = set(checkpoint.names("grad/")) if self.at.micro else ()
        for name, p in self.model.named_parameters():
            if f"grad/{name}" in accumulated:
                p.grad = checkpoint.tensor(f"grad/{name}", like=p)
        self.checkpoints.prune(self.at.best_step)  # the run may have ended between writing this one and pruning

    def _restore_state(self, state: dict[str, Any], step: int) -> None:
        self.at, self.saved_step = Position(**state["at"]), step
        self.at.check()
        if self.at.step != step:
            raise ValueError(f"it is at step {self.at.step}, not at {step}")
        self.stopgap = step if state["stopgap"] else None
        self.precision.load_state(state["scaler"])
        self.reporter.restore(state["reporter"])
        if state["processes"] != self.group.world:  # batches are divided differently now: restart the current step
            self.at.begin_step()
