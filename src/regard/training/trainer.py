"""``train`` and ``resume``: put a run together from its config, run the loop, leave a model to ship."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import RunConfig, TrainConfig
from ..data.sources import Source, open_source
from ..errors import RegardError
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..models import Model
from ..models.build import build
from ..text.processor import Processor
from .averaging import Ema
from .checkpoint import Checkpoint, Checkpoints
from .compilation import Choice, Compiled, choose, compile_objective, record
from .console_display import Style
from .finetuning import add_lora, freeze, start_from
from .loop import Loop, seed_everything
from .loss import Batch, Objective
from .optimiser import build_optimiser, schedule_of
from .parallel import Group, open_group, parallelise
from .precision import Precision, flops_per_token, peak_flops
from .reporter import Reporter
from .run_directory import RunDirectory, provenance
from .signals import Interrupted
from .tasks import Task, open_task
from .tasks.language_modelling import Texts
from .tasks.task import evaluate

__all__ = ["TrainResult", "resume", "train"]


RESUMABLE = ("steps", "stop_at", "eval_every", "save_every", "log_every", "samples", "keep", "patience")
"""What may be changed when a run goes on; anything else would make it another run."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    path: Path
    steps: int
    seconds: float
    """Of training: evaluations and saving not counted."""
    metrics: dict[str, float | str] = field(default_factory=dict)
    weights: str = ""
    """Which weights the model in ``path/model`` has."""
    finished: bool = True

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "path": str(self.path)}

    def table(self) -> str:
        """As lines for people."""
        if not self.finished:
            return f"{self.path}: stopped at step {self.steps} after {self.seconds:.0f} s"
        rows = [
            f"  {name}  {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in self.metrics.items()
        ]
        head = f"{self.path / 'model'}: {self.weights}, {self.steps} steps in {self.seconds:.0f} s"
        return "\n".join([head, *rows])


def train(
    config: RunConfig, *, style: Style = "auto", command: Sequence[str] = (), processor: Processor | None = None
) -> TrainResult:
    """Train as the config says, in a new directory; ``processor``: tokenizers made before, where runs share them."""
    group = open_group(_device(config.train.device))
    try:
        source = open_source(config.data)
        if group.is_main:
            out = config.train.out or f"runs/{config.task}-{time.strftime('%Y%m%d-%H%M%S')}"
            seed_everything(config.train.seed, "weights")
            task = open_task(config, source, processor)
            config = config.with_(model=task.model_config, train=config.train.with_(out=out))
            RunDirectory.create(Path(out), config, task.processor, provenance(source, command, group.world))
        config = group.broadcast_object(config)
        assert config.train.out is not None
        run = RunDirectory(Path(config.train.out))
        with run.lock() if group.is_main else nullcontext():
            return _run(config, source, group, style, run)
    finally:
        group.close()


def resume(path: str | Path, *, style: Style = "auto", **changes: Any) -> TrainResult:
    """Go on with a run from its last checkpoint, bit for bit as if it had never stopped; ``changes`` are fields of
    TrainConfig that do not make it another run, such as more steps.

    Bit for bit where it is not compiled: compiled, a CPU's sums differ in the last digit from process to process,
    whether a run was stopped or not.
    """
    run = RunDirectory.open(path)
    for name in changes:
        if name not in RESUMABLE:
            raise ValueError(f"train.{name} cannot change while a run goes on; {', '.join(RESUMABLE)} can")
    changed = run.config.train.with_(**{"stop_at": None, **changes}, out=str(path))
    config = run.config.with_(train=changed)
    done = max(run.checkpoints().steps(), default=0)
    if changed.steps < done:
        raise ValueError(f"train.steps={changed.steps} is less than the {done} steps that {path} has done")
    if changed.stop_at is not None and changed.stop_at <= done:
        raise ValueError(f"train.stop_at={changed.stop_at} lies behind the {done} steps that {path} has done")
    group = open_group(_device(changed.device))
    try:
        source = open_source(config.data)
        if (known := run.facts["data"]["sha256"]) != source.sha256:
            raise RegardError(
                f"{config.data.source} has changed since the run began: its SHA-256 is {source.sha256[:12]}…, it was "
                f"{known[:12]}…"
            )
        shared = config.with_(train=_shared(changed, run.facts["machine"]["processes"], group.world))
        with run.lock() if group.is_main else nullcontext():
            if group.is_main:
                run.tidy()
                run.write(config)
            return _run(shared, source, group, style, RunDirectory(run.root))
    finally:
        group.close()


def _shared(recipe: TrainConfig, began_with: int, world: int) -> TrainConfig:
    """As many batches a step as the run began with, on whatever number of processes it goes on."""
    batches = recipe.accumulate * began_with
    if batches % world:
        raise ValueError(
            f"the run takes {batches} batches a step, train.accumulate={recipe.accumulate} on each of {began_with} "
            f"processes, and {world} processes cannot share them evenly"
        )
    return recipe.with_(accumulate=batches // world)


def _run(config: RunConfig, source: Source, group: Group, style: Style, run: RunDirectory) -> TrainResult:
    checkpoints = run.checkpoints(group)
    found = checkpoints.latest()
    loop, choice, facts, notes = _put_together(config, source, group, style, run, checkpoints, found)
    with loop.reporter, loop.precision.settings():
        loop.reporter.begin(facts)
        for note in notes:
            loop.reporter.note(note)
        if found is not None:
            loop.restore(found)
        _compile(loop)
        try:
            loop.run()
        except Interrupted as stop:
            if stop.exit_code:
                raise
            return TrainResult(run.root, loop.at.step, loop.at.seconds, finished=False)
        if found is None:
            _remember_compiling(loop, choice)
        if not group.is_main:
            return TrainResult(run.root, loop.at.step, loop.at.seconds)
        return _finish(run, loop)


def _put_together(
    config: RunConfig,
    source: Source,
    group: Group,
    style: Style,
    run: RunDirectory,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
) -> tuple[Loop, Choice, dict[str, Any], list[str]]:
    recipe = config.train
    task = open_task(config, source, run.processor)
    if isinstance(task, Texts):
        task.tokens_folder = run.root / "tokens"
    first = _first_batch(task, group)
    model, notes = _new_model(config, task, run, found is None)
    model.to(group.device)
    objective = Objective(model, recipe.label_smoothing)
    choice = _choice(config, task, objective, group, run)
    precision = Precision(choice.precision, group.device)
    module: nn.Module = objective
    if not group.alone:
        module = parallelise(objective, "ddp" if recipe.parallel == "auto" else recipe.parallel, group, precision.dtype)
    if choice.compile:
        module = compile_objective(module, dynamic=task.ragged)
    notes += [note for note in (task.left.text(),) if note is not None]
    peak = peak_flops(group.device, precision.dtype)
    reporter = Reporter(
        run.root,
        steps=recipe.steps,
        log_every=recipe.log_every,
        style=style if group.is_main else "off",
        start_step=0 if found is None else found.step,
        flops_per_token=flops_per_token(config.model, first.inputs[-1].shape[-1]),
        peak_flops=None if peak is None else peak * group.world,
    )
    loop = Loop(
        train=recipe,
        task=task,
        model=model,
        objective=objective,
        step_module=module,
        optimiser=build_optimiser(model, recipe),
        schedule=schedule_of(recipe, config.model.d_model),
        precision=precision,
        group=group,
        checkpoints=checkpoints,
        reporter=reporter,
        ema=None if recipe.ema is None else Ema(model, recipe.ema),
    )
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts = {
        "task": config.task,
        "data": f"{source.name}: {len(source.train):,} to train on, {len(source.valid):,} held out",
        "model": f"{config.model.architecture}, {model.n_parameters:,} parameters, {n_trained:,} trained",
        "batches": f"{task.batches_per_epoch:,} an epoch",
        "device": str(group.device) if group.alone else f"{group.world} × {group.device.type}",
        "numbers": choice.reason,
        "out": str(run.root),
    }
    return loop, choice, facts, notes


def _first_batch(task: Task, group: Group) -> Batch:
    """Made by the main process first: it writes the tokens that the others read. It also finds what is too long."""
    if not group.is_main:
        group.barrier()
    batch = task.batch(0)
    if group.is_main:
        group.barrier()
    return batch


def _new_model(config: RunConfig, task: Task, run: RunDirectory, begins: bool) -> tuple[Model, list[str]]:
    """The model with its first weights, and what is to be said about them; a run that goes on has its own."""
    recipe, notes = config.train, []
    seed_everything(recipe.seed, "weights")
    model = build(config.model)
    fresh: list[str] = []
    if recipe.init is not None:
        path = run.root / "started.json"
        if begins:
            from ..io import load

            started = start_from(model, recipe.init, load, task.processor)
            notes.append(started.text())
            write_atomic(path, to_json({**started.document(), "unlearned": started.unlearned}))
        fresh = parse_json(path.read_bytes(), path)["unlearned"]
    if recipe.lora is not None:
        add_lora(model, recipe.lora, recipe.lora_alpha, recipe.lora_targets, keep=fresh)
    if recipe.freeze:
        freeze(model, recipe.freeze)
    if recipe.checkpointing:
        model.use_checkpointing()
    return model, notes


def _choice(config: RunConfig, task: Task, objective: Objective, group: Group, run: RunDirectory) -> Choice:
    """Precision and compilation: chosen once, at the start, then kept: another choice would round otherwise."""
    path = run.root / "choice.json"
    if path.exists():
        return Choice(**parse_json(path.read_bytes(), path))
    chosen = choose(objective, lambda n: task.batch(n).to(group.device), config.train, group.device)
    chosen = group.broadcast_object(chosen)
    if group.is_main:
        write_atomic(path, to_json(asdict(chosen)))
    group.barrier()
    return chosen


def _compile(loop: Loop) -> None:
    """Where it is compiled: now, with the first batch, wherever the run goes on from. The code is then the same."""
    if isinstance(loop.step_module, Compiled):
        with loop.precision.forward():
            loop.step_module.prepare(loop.task.batch(0).to(loop.group.device))
        loop.at.seconds += loop.step_module.seconds or 0.0


def _finish(run: RunDirectory, loop: Loop) -> TrainResult:
    """Choose the weights to ship, evaluate them on everything held out, save them as a model."""
    recipe = loop.train
    with loop.reporter.paused():
        model, which = run.model()
        model.to(loop.group.device)
        objective = Objective(model).eval()

        def loss_of(batch: Any) -> torch.Tensor:
            with torch.no_grad(), loop.precision.forward():
                return objective(batch.to(loop.group.device))

        found = evaluate(loop.task, model, loss_of, beam=recipe.beam, length_penalty=recipe.length_penalty)
        model.save(run.model_folder)
    result = TrainResult(run.root, loop.at.step, loop.at.seconds, found.metrics, which)
    write_atomic(run.root / "evaluation.json", to_json(result.document()))
    loop.reporter.evaluation(loop.at.step, found.metrics)
    loop.reporter.finish(result.document())
    return result


def _device(name: str) -> torch.device:
    """``auto`` is the best there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not has[name]:
        raise ValueError(f"train.device={name}: this machine, or this torch, has none")
    return torch.device(name)


def _remember_compiling(loop: Loop, choice: Choice) -> None:
    """What compiling cost and brought in a whole run, for the next one to know."""
    module = loop.step_module
    if not isinstance(module, Compiled):
        return
    if module.note is not None:
        loop.reporter.note(module.note)
    elif module.seconds is not None and loop.at.step >= 20:
        passes = loop.at.step * loop.train.accumulate
        record(choice, module.seconds, None, 1e3 * (loop.at.seconds - module.seconds) / passes)
