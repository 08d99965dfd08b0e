"""The loop, straight from the first step to the last. Tasks differ in data and loss only; it knows none of them."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..errors import Diverged
from ..models import Model
from .averaging import Ema
from .batch import Batch
from .checkpoint import Checkpoint, Checkpoints
from .diverging import where_it_broke
from .interrupting import Interrupted, Signals
from .objective import Objective
from .optimiser import Optimiser
from .parallel import Group, clip_grad_norm, syncing
from .precision import Precision
from .prefetch import Prefetch
from .randomness import seed_everything
from .report import Reporter
from .schedule import Schedule
from .shards import is_sharded
from .tasks import Evaluation, Task
from .tasks.task import evaluate

__all__ = ["Loop", "Position"]


@dataclass
class Position:
    """Where a run stands. With the tensors of a checkpoint it is all that continuing takes."""

    step: int = 0
    """Optimiser steps done."""
    micro: int = 0
    """Batches of the next step whose gradients are already summed."""
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    """The best value of the task's criterion so far, …"""
    best_step: int | None = None
    """… and where it was."""
    waited: int = 0
    """Evaluations since."""
    losses: list[Any] = field(default_factory=list)
    """The losses of a step that is not finished."""


@dataclass
class Loop:
    """Everything a run consists of, put together by ``run.py``, and the loop over it."""

    train: TrainConfig
    task: Task
    model: Model
    objective: Objective
    """Model and loss as they are: for evaluation, and for finding what broke."""
    step_module: nn.Module
    """The same, compiled or wrapped for several processes."""
    optimiser: Optimiser
    schedule: Schedule
    precision: Precision
    group: Group
    checkpoints: Checkpoints
    reporter: Reporter
    ema: Ema | None = None
    at: Position = field(default_factory=Position)

    def run(self) -> None:
        """From where it stands to ``train.steps``; raises Interrupted or Diverged when it does not get there."""
        train, at, batches = self.train, self.at, self.train.accumulate * self.group.world
        make = self.task.batch
        with Signals() as signals, Prefetch(make, self.group.device, stride=self.group.world) as prefetch:
            self.objective.train()
            while at.step < train.steps and not self._out_of_patience():
                started = time.perf_counter()
                first = at.step * batches + self.group.rank
                micros = [prefetch.batch(first + m * self.group.world) for m in range(at.micro, train.accumulate)]
                n_targets, asked = self._agree(sum(n for _, n in micros), signals.asked)
                for batch, _ in micros:
                    # One process may stop between two batches of a step; several stop together, after it.
                    if signals.asked and self.group.world == 1 and at.micro:
                        self._leave(signals.asked)
                    self._accumulate(batch, first + at.micro * self.group.world, n_targets)
                norm, lr = self._update(micros[-1][0], first + (train.accumulate - 1) * self.group.world)
                at.seconds += time.perf_counter() - started
                self.reporter.step(at.step, loss=sum(at.losses), lr=lr, grad_norm=norm, n_tokens=self._n_tokens(micros))
                at.losses, at.micro = [], 0
                last = at.step == train.steps
                improved = self._evaluate() if self._due(train.eval_every) or last else False
                if self._due(train.save_every) or improved or last:
                    self._save()
                if asked or train.stop_at == at.step:
                    self._leave(asked)

    # ---------------------------------------------------------------- one step

    def _accumulate(self, batch: Batch, number: int, n_targets: int) -> None:
        """Add one batch's gradients. ``n_targets`` are those of the whole step, so the sum of losses is their mean."""
        seed_everything(self.train.seed, "batch", number)
        last = self.at.micro == self.train.accumulate - 1
        with syncing(self.step_module, last), self.precision.forward():
            # Gradients of several processes are averaged; what is wanted is their sum.
            loss = self.step_module(batch) * (self.group.world / n_targets)
        with syncing(self.step_module, last):
            self.precision.backward(loss)
        self.at.losses.append(loss.detach() / self.group.world)
        self.at.micro += 1
        self.at.tokens += batch.n_tokens

    def _update(self, batch: Batch, number: int) -> tuple[Tensor, float]:
        """One step of the optimiser, unless something is not finite."""
        self.precision.unscale(self.optimiser.optimisers)
        norm = clip_grad_norm(self.objective.parameters(), self.train.clip)
        loss = self.group.sum(torch.stack([torch.as_tensor(x, device=norm.device) for x in self.at.losses]).sum())
        healthy = torch.isfinite(loss) if self.precision.scales else torch.isfinite(loss + norm)
        if not bool(healthy):
            seed_everything(self.train.seed, "batch", number)
            with self.precision.forward():
                place = where_it_broke(self.objective, batch)
            last = f"the last checkpoint is that of step {max(self.checkpoints.steps(), default=0)}"
            numbers = f"loss {float(loss):.4g}, gradient norm {float(norm):.4g}"
            raise Diverged(f"step {self.at.step + 1}: {numbers}; not finite first in {place}; {last}")
        self.at.losses = [loss]
        factor = self.schedule(self.at.step + 1)
        self.optimiser.set_lr(factor)
        self.precision.step(self.optimiser.optimisers)
        self.optimiser.zero_grad()
        if self.ema is not None:
            self.ema.update()
        self.at.step += 1
        return norm, factor * self.train.lr

    def _agree(self, n_targets: int, asked: int) -> tuple[int, int]:
        """Over all processes: the targets of this step, and whether anyone was asked to stop."""
        known = self._targets_before() if self.at.micro else 0
        if self.group.world == 1:
            return n_targets + known, asked
        both = self.group.sum(torch.tensor([float(n_targets + known), float(asked)], device=self.group.device))
        return int(both[0]), int(both[1] > 0) and (asked or 143)

    def _targets_before(self) -> int:
        """Targets of the batches of this step that were summed before the run was interrupted."""
        first = self.at.step * self.train.accumulate * self.group.world + self.group.rank
        return sum(self.task.batch(first + m * self.group.world).n_targets for m in range(self.at.micro))

    def _n_tokens(self, micros: list[tuple[Batch, int]]) -> int:
        return sum(batch.n_tokens for batch, _ in micros) * self.group.world

    # ---------------------------------------------------------------- between steps

    def _due(self, every: int) -> bool:
        return bool(every) and self.at.step % every == 0

    def _out_of_patience(self) -> bool:
        return self.train.patience is not None and self.at.waited >= self.train.patience

    def _evaluate(self) -> bool:
        """Look at held-out data; True where it was never better."""
        with self.reporter.paused():
            n_examples = 0 if self._sharded else self.train.eval_examples
            found = self.evaluate(n_batches=self.train.eval_batches, n_examples=n_examples)
            self.reporter.evaluation(self.at.step, found.metrics)
            if self.train.samples and self.group.is_main and not self._sharded:
                with self._averaged():
                    self.reporter.samples(self.at.step, self.task.sample(self.model, self.train.samples))
        return self.remember(found)

    def evaluate(self, **options: Any) -> Evaluation:
        """The weights one would ship, on held-out data."""
        self.objective.eval()
        with torch.no_grad(), self._averaged():
            found = evaluate(self.task, self.model, self._loss, **options)
        self.objective.train()
        return found

    def _loss(self, batch: Batch) -> Tensor:
        with self.precision.forward():
            return self.objective(batch.to(self.group.device))

    @property
    def _sharded(self) -> bool:
        """Whether no process holds the whole model: then texts are written only at the end, by one that does."""
        return any(is_sharded(p) for p in self.model.parameters())

    def _averaged(self) -> Any:
        return nullcontext() if self.ema is None else self.ema.swapped()

    def remember(self, found: Evaluation) -> bool:
        """Note what an evaluation found; True where it was never better."""
        value = float(found.metrics[self.task.criterion])
        smaller = self.task.criterion.endswith("loss")
        better = self.at.best is None or (value < self.at.best if smaller else value > self.at.best)
        if better:
            self.at.best, self.at.best_step, self.at.waited = value, self.at.step, 0
        else:
            self.at.waited += 1
        return better

    def _leave(self, asked: int) -> None:
        self._save()
        done = f"stopped at step {self.at.step}; what was done is saved, --resume goes on from there"
        raise Interrupted(done, asked)

    # ---------------------------------------------------------------- to disk and back

    def _save(self) -> None:
        if self.at.step in self.checkpoints.steps() and not self.at.micro:
            return
        with self.reporter.paused():
            path = self.checkpoints.write(self.at.step, self._tensors(), self._state())
            self.checkpoints.prune(self.at.best_step)
        self.reporter.saved(self.at.step, path)

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
        at = asdict(self.at)
        at["losses"] = [float(x) for x in self.at.losses]
        if any(not math.isfinite(x) for x in at["losses"]):
            raise Diverged(f"step {self.at.step + 1}: the loss is not finite, so nothing is saved")
        return {
            "at": at,
            "scaler": self.precision.state(),
            "reporter": self.reporter.state(),
            "batches_per_step": self.train.accumulate * self.group.world,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand where the checkpoint was written."""
        state = checkpoint.state
        batches = self.train.accumulate * self.group.world
        if state["batches_per_step"] != batches:
            raise ValueError(
                f"the run takes {state['batches_per_step']} batches a step; train.accumulate={self.train.accumulate} "
                f"on {self.group.world} processes makes {batches}"
            )
        self.at = Position(**state["at"])
        checkpoint.fill("model/", self.model.state_dict())
        self.optimiser.load_state_tensors(checkpoint.tensors("optimiser/"))
        if self.ema is not None:
            self.ema.load_state_tensors(checkpoint.tensors("ema/"))
        self.precision.load_state(state["scaler"])
        self.reporter.restore(state["reporter"])
        grads = checkpoint.tensors("grad/")
        for name, p in self.model.named_parameters():
            if name in grads:
                p.grad = grads[name].to(p.device, p.dtype)
