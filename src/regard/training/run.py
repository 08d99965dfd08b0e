"""``train`` and ``resume``: put a run together from its config, run the loop, leave a model to ship."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data.sources import Source, open_source
from ..errors import RegardError
from ..hub.files import to_json, write_file
from ..models import Model
from ..models.build import build
from .averaging import Ema
from .compiling import choose, compile_objective
from .directory import RunDirectory, provenance
from .finetune import freeze, start_from
from .flops import flops_per_token, peak_flops
from .interrupting import Interrupted
from .lora import add_lora
from .loop import Loop, Position
from .objective import Objective
from .optimiser import build_optimiser
from .parallel import Group, open_group, parallelise
from .precision import Precision
from .randomness import seed_everything
from .report import Reporter
from .schedule import schedule_of
from .tasks import Task, open_task
from .tasks.language import _Texts
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
        rows = [f"  {name}  {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in self.metrics.items()]
        head = f"{self.path / 'model'}: {self.weights}, {self.steps} steps in {self.seconds:.0f} s"
        return "\n".join([head, *rows])


def train(config: RunConfig, *, style: str = "auto", command: Sequence[str] = ()) -> TrainResult:
    """Train as the config says, in a new directory."""
    group = open_group(config.train.device)
    try:
        source = open_source(config.data)
        seed_everything(config.train.seed, "weights")
        task = open_task(config, source)
        config = config.with_(model=task.model_config, train=config.train.with_(out=str(_new_folder(config, group))))
        assert config.train.out is not None
        out = Path(config.train.out)
        if group.is_main:
            RunDirectory.create(out, config, task.processor, provenance(source, config.model, command))
        group.barrier()
        return _run(config, source, group, style, out)
    finally:
        group.close()


def resume(path: str | Path, *, style: str = "auto", **changes: Any) -> TrainResult:
    """Go on with a run from its last checkpoint, bit for bit as if it had never stopped; ``changes`` are fields of
    TrainConfig that do not make it another run, such as more steps."""
    run = RunDirectory.open(path)
    for name in changes:
        if name not in RESUMABLE:
            raise ValueError(f"train.{name} cannot change while a run goes on; {', '.join(RESUMABLE)} can")
    changed = run.config.train.with_(**{"stop_at": None, **changes}, out=str(path))
    config = run.config.with_(train=changed)
    group = open_group(config.train.device)
    try:
        source = open_source(config.data)
        if (known := run.facts["data"]["sha256"]) != source.sha256:
            raise RegardError(
                f"{config.data.source} has changed since the run began: its SHA-256 is {source.sha256[:12]}…, it was "
                f"{known[:12]}…"
            )
        if group.is_main:
            run.write(config)
        return _run(config, source, group, style, Path(path))
    finally:
        group.close()


def _run(config: RunConfig, source: Source, group: Group, style: str, out: Path) -> TrainResult:
    run = RunDirectory(out)
    found = run.checkpoints.latest()
    loop, facts = _put_together(config, source, group, style, run, 0 if found is None else found.step)
    with loop.reporter:
        if group.is_main:
            loop.reporter.begin(facts)
            if (left := loop.task.left.text()) is not None:
                loop.reporter.note(left)
        if found is not None:
            loop.restore(found)
        try:
            loop.run()
        except Interrupted as stop:
            if stop.exit_code:
                raise
            return TrainResult(out, loop.at.step, loop.at.seconds, finished=False)
        if not group.is_main:
            return TrainResult(out, loop.at.step, loop.at.seconds)
        return _finish(run, loop)


def _put_together(
    config: RunConfig, source: Source, group: Group, style: str, run: RunDirectory, start: int
) -> tuple[Loop, dict[str, Any]]:
    recipe = config.train
    task = open_task(config, source, run.processor)
    if isinstance(task, _Texts):
        task.tokens_folder = run.root / "tokens"
    model = _new_model(config).to(group.device)
    objective = Objective(model, recipe.label_smoothing)
    chosen = _choice(config, task, objective, group, run)
    precision = Precision(chosen["precision"], group.device)
    module: torch.nn.Module = objective
    if group.world > 1:
        kind = "ddp" if recipe.parallel == "auto" else recipe.parallel
        module = parallelise(objective, kind, group)
    if chosen["compile"]:
        module = compile_objective(module, dynamic=config.task in ("translate", "classify", "caption"))
    optimiser = build_optimiser(model, recipe)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    reporter = Reporter(
        run.root,
        steps=recipe.steps,
        log_every=recipe.log_every,
        style=style if group.is_main else "off",
        start_step=start,
        flops_per_token=flops_per_token(config.model, model.n_parameters, config.data.max_len),
        peak_flops=peak_flops(group.device, precision.name),
    )
    loop = Loop(
        recipe,
        task,
        model,
        objective,
        module,
        optimiser,
        schedule_of(recipe, config.model.d_model),
        precision,
        group,
        run.checkpoints,
        reporter,
        None if recipe.ema is None else Ema(model, recipe.ema),
        Position(),
    )
    facts = {
        "task": config.task,
        "data": f"{source.name}: {len(source.train):,} to train on, {len(source.valid):,} held out",
        "model": f"{config.model.architecture}, {model.n_parameters:,} parameters, {n_trained:,} trained",
        "batches": f"{task.batches_per_epoch:,} an epoch",
        "device": str(group.device) if group.world == 1 else f"{group.world} × {group.device.type}",
        "precision": precision.name,
        "compile": "on" if chosen["compile"] else "off",
        "out": str(run.root),
    }
    return loop, {**facts, **({"chosen": chosen["reason"]} if chosen.get("reason") else {})}


def _new_model(config: RunConfig) -> Model:
    recipe = config.train
    seed_everything(recipe.seed, "weights")
    model = build(config.model)
    if recipe.init is not None:
        from ..io import load

        start_from(model, recipe.init, load)
    if recipe.freeze:
        freeze(model, recipe.freeze)
    if recipe.lora is not None:
        add_lora(model, recipe.lora, recipe.lora_alpha, recipe.lora_targets)
    if recipe.checkpointing:
        model.use_checkpointing()
    return model


def _choice(config: RunConfig, task: Task, objective: Objective, group: Group, run: RunDirectory) -> dict[str, Any]:
    """Precision and compilation: chosen once, at the start, then kept: another choice would round otherwise."""
    path = run.root / "choice.json"
    if path.exists():
        from ..hub.files import parse_json

        return parse_json(path.read_bytes(), path)
    found = choose(objective, lambda n: task.batch(n).to(group.device), config.train, group.device)
    chosen = {"precision": found.precision, "compile": found.compile, "reason": found.reason, "table": found.table}
    if group.world > 1:
        chosen = group.broadcast_object(chosen)
    if group.is_main:
        write_file(path, to_json(chosen))
    group.barrier()
    return chosen


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
    write_file(run.root / "evaluation.json", to_json(result.document()))
    loop.reporter.evaluation(loop.at.step, found.metrics)
    loop.reporter.finish(result.document())
    return result


def _new_folder(config: RunConfig, group: Group) -> Path:
    named = config.train.out or f"runs/{config.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(group.broadcast_object(named) if group.world > 1 else named)
