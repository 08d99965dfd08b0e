"""``train`` and ``resume``: config → task → run directory → model → loop → a model to ship."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.data import Dataset

from ..config import DataConfig, ModelConfig, RunConfig, TrainConfig
from ..config.overrides import flat_fields
from ..config.overrides import format_value as format_word
from ..config.train_config import RESUMABLE
from ..data.sources import Source
from ..errors import BadModelFile, RegardError, UsageError, silence_warnings
from ..foundation.device import resolve_device, without_cudnn_attention
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json, to_jsonable
from ..foundation.progress import show_progress
from ..models import Model
from ..models.build import build
from ..models.model_flops import n_tokens
from ..text.processor import Processor
from .averaging import Ema
from .checkpoint import Checkpoint
from .compilation import Choice, Compiled, choose, compiler_options
from .console_display import GAP, Style, format_duration, format_value
from .distillation import loss_of_run, open_teacher
from .finetuning import start_from
from .gradient_pass import should_capture, working_weights
from .initial_model import initial_processor, new_model, read_initial_model
from .loggers import check_loggers
from .loop import Loop, StepRecord, seed_everything
from .loss import Batch, Objective
from .optimiser import build_optimiser, schedule_of
from .parallel import Group, open_group, parallelise
from .precision import Precision, PrecisionName, model_flops_per_token, peak_flops
from .reporter import Reporter
from .run_directory import CHOICE_FILE, FACTS_FILE, RunDirectory, absolute_paths, missing_data, provenance
from .run_inputs import check_task_class, class_name, open_run_source, resolve_run
from .signals import Interrupted
from .tasks import Task, open_task

Callback = Callable[[StepRecord], None]


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run."""

    path: Path
    steps: int
    seconds: float  # training time without evaluation and saving
    metrics: dict[str, float | str] = field(default_factory=dict)
    weights: str = ""  # which weights ``path/model`` holds, such as "step 400, the best"
    finished: bool = True
    stopped: str | None = None  # why the run ended before its last step
    next_command: str = ""  # the command that tries the model, or resumes the run

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    def to_text(self) -> str:
        """Where the model is, its metrics on held-out data, and the next command.

        Metric signatures are left to ``to_dict``, evaluation.json and ``regard eval``.
        """
        took = f"{self.steps:,} step{'s' * (self.steps != 1)} in {format_duration(self.seconds)}"
        if not self.finished:
            return f"{self.path}: stopped after {took}\nnext: {self.next_command}"
        numbers = {name: value for name, value in self.metrics.items() if isinstance(value, int | float)}
        count = {"n": numbers.pop("n")} if "n" in numbers else {}
        texts = (f"{name.replace('_', ' ')} {format_value(value)}" for name, value in {**numbers, **count}.items())
        lines = [f"{self.path / 'model'}: {self.weights}, {took}", f"held out: {GAP.join(texts)}"]
        if self.metrics.get("note"):
            lines.append(str(self.metrics["note"]))
        return "\n".join([*lines, f"next: {self.next_command}"])


def train(
    config: RunConfig | str | Path | type[Task] | None = None,
    *,
    task: str | type[Task] | None = None,
    data: str | Path | Mapping[str, Any] | DataConfig | Iterable[Any] | Dataset[Any] | None = None,
    model: str | Mapping[str, Any] | ModelConfig | Model | None = None,
    train: Mapping[str, Any] | TrainConfig | None = None,
    preset: str | None = None,
    callbacks: Sequence[Callback] = (),
    style: Style = "auto",
    command: Sequence[str] = (),
    processor: Processor | None = None,
) -> TrainResult:
    """Train in a new directory, as a RunConfig says or as ``regard train TASK`` would with the same fields.

    config     a RunConfig, the name of a task ("translate"), the path of a YAML, TOML or JSON file, or a Task class
    task       your own Task class, if ``config`` does not name the task
    data       a file or corpus, fields of DataConfig, or a Dataset or iterable of examples
    model      the name of a preset, fields of ModelConfig, or a model whose weights are the start
    train      fields of TrainConfig
    callbacks  functions called after each step with a StepRecord
    processor  existing tokenizers, to share them between runs
    """
    inputs = resolve_run(config, task=task, data=data, model=model, train=train, preset=preset)
    run_config = inputs.config
    with closing(_open_group(run_config.train)) as group, _progress(style, group):
        source, opened = open_run_source(inputs), None
        run_config = inputs.task_class.complete_config(run_config, source)
        if group.is_main:
            out = run_config.train.out or f"runs/{run_config.task}-{time.strftime('%Y%m%d-%H%M%S')}"
            seed_everything(run_config.train.seed, "weights")
            opened = _open_new_task(run_config, source, processor or inputs.processor, inputs.task_class)
            run_config = run_config.with_(model=opened.model_config, train=run_config.train.with_(out=out))
            inputs.check_model(run_config.model)
            check_loggers(run_config.train.loggers)
            _check_shippable(run_config, opened.processor)
            facts = {**provenance(source, command, group.world), "task_class": class_name(inputs.task_class)}
            RunDirectory.create(Path(out), run_config, opened.processor, facts)
        run_config = group.broadcast_object(run_config)
        assert run_config.train.out is not None
        run = RunDirectory(Path(run_config.train.out))
        if opened is None:
            opened = open_task(run_config, source, run.processor, inputs.task_class)
        opened.config = run_config
        with run.lock() if group.is_main else nullcontext():
            try:
                return _run(run_config, opened, group, style, run, callbacks, inputs.model)
            except (ValueError, RegardError):
                if group.is_main and not run.has(CHOICE_FILE):  # refused before training: the name is free again
                    run.clear()
                raise


def resume(
    path: str | Path,
    *,
    style: Style = "auto",
    task: type[Task] | None = None,
    data: Mapping[str, Any] | Iterable[Any] | Dataset[Any] | None = None,
    callbacks: Sequence[Callback] = (),
    restart_schedule: bool = False,
    **changes: Any,
) -> TrainResult:
    """Continue a run from its last checkpoint, bit for bit as if it had never stopped.

    ``changes`` are fields of TrainConfig that a run may change, such as ``steps``; they are recorded in
    provenance.json. ``restart_schedule`` starts the learning-rate schedule anew over the remaining steps.
    ``data`` gives the new location of moved files (``{"source": "moved.tsv"}``). A run with your own Task class, or
    with examples from memory, needs ``task`` and ``data`` again. A compiled run on a CPU is the exception to bit for
    bit: its sums differ in the last digit between any two processes.
    """
    run = RunDirectory.open(path)
    done, before = max(run.checkpoints().steps(), default=0), run.config.train
    recipe = _resumed_recipe(path, before, done, changes, restart_schedule)
    config = run.config.with_(train=recipe)
    if isinstance(data, Mapping):
        config, data = config.with_(data=absolute_paths(config.data.with_(**data))), None
    elif missing := missing_data(config.data, path):
        raise missing
    with closing(_open_group(recipe)) as group, _progress(style, group):
        inputs = resolve_run(config, task=task, data=data)
        check_task_class(run, inputs.task_class)
        source = open_run_source(inputs)
        if (recorded := run.facts["data"]["sha256"]) != source.sha256:
            hashes = f"its SHA-256 is {source.sha256[:12]}…, it was {recorded[:12]}…"
            raise RegardError(f"{config.data.source} has changed since the run began: {hashes}")
        shared = config.with_(train=_share_batches(recipe, run.facts["machine"]["processes"], group.world))
        with run.lock() if group.is_main else nullcontext():
            names = [name for name in (*changes, "schedule_start") if name != "stop_at"]
            changed = {name: (getattr(before, name), getattr(recipe, name)) for name in names}
            changed = {name: values for name, values in changed.items() if values[0] != values[1]}
            if group.is_main:
                run.remove_half_written()
                run.write(config)
                _record_changes(run, changed, done)
            group.barrier()
            run = RunDirectory(run.root)
            opened = open_task(shared, source, run.processor, task)
            notes = [_changes_text(changed, done), _schedule_text(before, recipe, done)]
            return _run(shared, opened, group, style, run, callbacks, notes=notes)


def _resumed_recipe(
    path: str | Path, before: TrainConfig, done: int, changes: Mapping[str, Any], restart_schedule: bool
) -> TrainConfig:
    """The recipe of the run at ``path`` with ``changes``; ValueError for one that its ``done`` steps rule out."""
    for name in changes:
        if name not in RESUMABLE:
            raise ValueError(f"train.{name} cannot change when a run is resumed; {', '.join(RESUMABLE)} can")
    recipe = before.with_(**{"stop_at": None, "schedule_start": 0, **changes}, out=str(path))
    if recipe.steps < done:
        raise ValueError(f"train.steps={recipe.steps} is less than the {done} steps that {path} has done")
    if restart_schedule and recipe.steps == done:
        raise ValueError(f"a schedule cannot restart: {path} has done its {done} steps; raise train.steps")
    if recipe.stop_at is not None and recipe.stop_at <= done:
        raise ValueError(f"train.stop_at={recipe.stop_at} is not after the {done} steps that {path} has done")
    return recipe.with_(schedule_start=done if restart_schedule else before.schedule_start)


def _record_changes(run: RunDirectory, changed: Mapping[str, tuple[Any, Any]], done: int) -> None:
    """Add the fields that change after ``done`` steps, as (old, new), to provenance.json."""
    if changed:
        entry = {"step": done, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "train": dict(changed)}
        facts = {**run.facts, "changes": [*run.facts.get("changes", ()), entry]}
        run.replace_files({FACTS_FILE: to_json(facts)})
    if "device" in changed:  # precision and compilation were chosen for the old device
        run.replace_files({CHOICE_FILE: None})


def _changes_text(changed: Mapping[str, tuple[Any, Any]], done: int) -> str | None:
    texts = (f"train.{name} from {format_word(old)} to {format_word(new)}" for name, (old, new) in changed.items())
    return f"changed after step {done:,}: {', '.join(texts)}" if changed else None


def _schedule_text(before: TrainConfig, recipe: TrainConfig, done: int) -> str | None:
    """How the learning rate continues if a change of the steps changes its curve; None if it does not."""
    old_lr, new_lr = before.lr * schedule_of(before)(max(1, done)), recipe.lr * schedule_of(recipe)(done + 1)
    restarts = recipe.schedule_start != before.schedule_start
    has_new_end = recipe.schedule in ("cosine", "wsd") and recipe.steps != before.steps
    if not done or recipe.steps <= done or not (restarts or has_new_end):
        return None
    curve = f"the learning rate was {old_lr:.3g} at step {done:,}"
    end = f"ends with {recipe.lr * schedule_of(recipe)(recipe.steps):.3g} at step {recipe.steps:,}"
    if restarts:
        return f"{curve}; it warms up again over {recipe.warmup:,} steps to {recipe.lr:.3g} and {end}"
    rest = f"{recipe.schedule} over {recipe.steps:,} steps continues with {new_lr:.3g} and {end}"
    return f"{curve}; {rest}; --schedule restart warms up again instead"


def _warmup_text(recipe: TrainConfig) -> str | None:
    """Where the learning rate ends if the run ends within the warm-up; None if it does not."""
    steps = recipe.steps - recipe.schedule_start
    if recipe.warmup <= steps:
        return None
    name, highest = f"train.warmup={recipe.warmup}", recipe.lr * schedule_of(recipe)(recipe.steps)
    return f"{name} is longer than the {steps:,} steps: the learning rate only reaches {highest:.3g} of {recipe.lr:.3g}"


def _progress(style: Style, group: Group) -> AbstractContextManager[None]:
    """A context in which reading and tokenising show progress, on the main process and unless ``style`` is quiet."""
    return show_progress(group.is_main and style not in ("quiet", "records", "off"))


def _check_shippable(config: RunConfig, processor: Processor) -> None:
    """Refuse, before training, a format in train.ship_to that the model cannot be exported to."""
    if config.train.ship_to:
        from ..export.export_model import check_exportable

        try:
            check_exportable(config.model, config.train.ship_to, processor)
        except ValueError as error:
            raise UsageError(f"train.ship_to={','.join(config.train.ship_to)}: {error}") from None


def _open_group(recipe: TrainConfig) -> Group:
    try:
        return open_group(resolve_device(recipe.device, "train.device"))
    except UsageError as error:  # the config is valid, but the device is missing here: exit code 1, not 2
        raise RegardError(str(error)) from None


def _share_batches(recipe: TrainConfig, n_before: int, world: int) -> TrainConfig:
    """The recipe with ``accumulate`` changed so that ``world`` processes compute as many batches per step as before."""
    batches = recipe.accumulate * n_before
    if batches % world:
        raise ValueError(
            f"the run computes {batches} batches per step (train.accumulate={recipe.accumulate} on {n_before} "
            f"processes), which {world} processes cannot share evenly"
        )
    return recipe.with_(accumulate=batches // world)


def _run(
    config: RunConfig,
    task: Task,
    group: Group,
    style: Style,
    run: RunDirectory,
    callbacks: Sequence[Callback],
    start_model: Model | None = None,
    notes: Sequence[str | None] = (),
) -> TrainResult:
    """Build everything a run needs, restore its last checkpoint if there is one, and train to the end."""
    first = _first_batch(task, run, group)
    checkpoints = run.checkpoints(group)
    checkpoint = checkpoints.latest()
    model, weight_notes = new_model(config, task, run, group, checkpoint, start_model)
    objective = _build_objective(model.to(group.device), config, task)
    rows, length = first.inputs[-1].shape[0], first.inputs[-1].shape[-1]
    token_flops = model_flops_per_token(model, length)
    flops = rows * n_tokens(config.model, length) * token_flops
    choice = _choose_precision(config, objective, flops, group, run)
    precision = Precision(choice.precision, group.device)
    working = working_weights(objective, precision, group)
    step_module: nn.Module = objective if working is None else working.objective
    if group.is_distributed:
        kind = "ddp" if config.train.parallel == "auto" else config.train.parallel
        step_module = parallelise(objective, kind, group, precision.dtype)
    if choice.compile:
        options = compiler_options(flops, group.device)
        step_module = Compiled(step_module, dynamic=task.ragged, options=options)
    reporter = _open_reporter(config, run, group, style, checkpoint, token_flops, precision)
    loop = Loop(
        train=config.train,
        task=task,
        model=model,
        objective=objective,
        step_module=step_module,
        optimiser=build_optimiser(model, config.train),
        schedule=schedule_of(config.train),
        precision=precision,
        group=group,
        checkpoints=checkpoints,
        reporter=reporter,
        ema=None if config.train.ema is None else Ema(model, config.train.ema),
        working=working,
        captures=should_capture(objective, flops, working, config.train.accumulate),
        reads_late=_reads_late(precision),
        callbacks=callbacks,
    )
    with reporter, precision.settings(), without_cudnn_attention(task.ragged):
        reporter.begin(_facts(loop, config, choice))
        for note in (*notes, _warmup_text(config.train), *weight_notes, *task.notes):
            reporter.note(note)
        if checkpoint is not None:
            loop.restore(checkpoint)
        return _train_and_save(loop, run, first)


def _first_batch(task: Task, run: RunDirectory, group: Group) -> Batch:
    """The first batch; making it also finds examples that are too long.

    The main process makes it before the others, because it writes the token files that they read.
    """
    task.tokens_folder = run.root / "tokens"
    if not group.is_main:
        group.barrier()
    first = task.batch(0)
    if group.is_main:
        group.barrier()
    return first


def _build_objective(model: Model, config: RunConfig, task: Task) -> Objective:
    """The model with the loss of its task, and with the teacher or reference that the loss compares with."""
    teacher = config.train.teacher
    reference = task.reference_model(model) if teacher is None else open_teacher(teacher, task, config.model)
    if reference is not None:
        reference.to(model.device)
    return Objective(model, config.train.label_smoothing, loss_of_run(config.train, task), reference)


def _open_reporter(
    config: RunConfig,
    run: RunDirectory,
    group: Group,
    style: Style,
    checkpoint: Checkpoint | None,
    token_flops: float,
    precision: Precision,
) -> Reporter:
    peak = peak_flops(group.device, precision.dtype)
    return Reporter(
        run.root,
        steps=config.train.steps,
        log_every=config.train.log_every,
        style=style if group.is_main else "off",
        start_step=0 if checkpoint is None else checkpoint.step,
        flops_per_token=token_flops,
        peak_flops=None if peak is None else peak * group.world,
        loggers=config.train.loggers,
        settings=flat_fields(config),
    )


def _reads_late(precision: Precision) -> bool:
    """Whether to check a step for finite values one step late: on a GPU, unless the loss scale depends on them."""
    return precision.device.type == "cuda" and not precision.scales


def _train_and_save(loop: Loop, run: RunDirectory, first: Batch) -> TrainResult:
    at, compiled = loop.at, loop.step_module if isinstance(loop.step_module, Compiled) else None
    if compiled is not None:  # always with the first batch, so that a resumed run compiles the same code
        with loop.precision.forward():
            compiled.prepare(first.to(loop.group.device))
        at.seconds += compiled.seconds or 0.0
    try:
        loop.run()
    except Interrupted as stop:
        if stop.exit_code:
            raise
        command = f"regard train --resume {shlex.quote(str(run.root))}"
        return TrainResult(run.root, at.step, at.seconds, finished=False, next_command=command)
    for note in (None if compiled is None else compiled.note, loop.gradient_pass.note):
        loop.reporter.note(note)
    return _finish(run, loop) if loop.group.is_main else TrainResult(run.root, at.step, at.seconds)


def _open_new_task(config: RunConfig, source: Source, processor: Processor | None, task_class: type[Task]) -> Task:
    """The task of a new run, with the tokenizers of ``train.init``, else of ``train.teacher``.

    Models that do not fit are refused here, before the run directory is created.
    """
    from ..io import load

    recipe = config.train
    initial = None if recipe.init is None else load(recipe.init)
    if processor is None and (initial is not None or recipe.teacher is not None):
        existing = read_initial_model(str(recipe.teacher))[1] if initial is None else initial.processor
        processor = initial_processor(config, source, existing, task_class)
    if processor is not None and config.data.chat_template is not None:
        processor = replace(processor, chat_template=None)  # the task reads the one that the config names
    task = open_task(config, source, processor, task_class)
    if initial is not None:
        model, partial = build(task.model_config, device="meta"), recipe.init_partial
        start_from(model, str(recipe.init), initial, task.processor, partial=partial)
    if recipe.teacher is not None:
        open_teacher(recipe.teacher, task, task.model_config)
    return task


def _choose_precision(config: RunConfig, objective: Objective, flops: float, group: Group, run: RunDirectory) -> Choice:
    """Precision and compilation, chosen once and stored: another choice on resume would round differently."""
    if run.has(CHOICE_FILE):
        stored = run.json(CHOICE_FILE)
        choice = Choice(**{each.name: stored[each.name] for each in fields(Choice)})
        if choice.precision not in get_args(PrecisionName) or not isinstance(choice.compile, bool):
            raise BadModelFile(f"{run.root / CHOICE_FILE} does not hold a valid precision and compile setting")
        return choice
    choice = group.broadcast_object(choose(objective, flops, config.train, group.device))
    if group.is_main:
        run.replace_files({CHOICE_FILE: to_json(asdict(choice))})
    group.barrier()
    return choice


def _facts(loop: Loop, config: RunConfig, choice: Choice) -> dict[str, Any]:
    """The facts printed before the first step."""
    source, model, group = loop.task.source, loop.model, loop.group
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "task": config.task,
        "data": source.name,
        "examples": f"{len(source.train):,} to train on, {len(source.valid):,} held out",
        "model": f"{config.model.architecture}, head {config.model.head}, {model.n_parameters:,} parameters, "
        f"{n_trained:,} trained",
        "batches": f"{loop.task.batches_per_epoch:,} an epoch",
        "device": f"{group.world} × {group.device.type}" if group.is_distributed else str(group.device),
        "precision": choice.reason,
        "out": str(loop.reporter.out),
    }


def _finish(run: RunDirectory, loop: Loop) -> TrainResult:
    """Choose the weights to ship, evaluate them on all validation data, and save them as a model."""
    recipe, stopped = loop.train, loop.why_stopped()
    if stopped is not None:
        loop.reporter.note(stopped)
    with loop.reporter.paused():
        model, weights = run.model()
        model.to(loop.group.device)
        objective = Objective(model, loss=loop.task.loss, reference=loop.task.reference_model(model)).eval()

        def loss_of(batch: Batch) -> torch.Tensor:
            with torch.no_grad(), loop.precision.forward():
                return objective(batch.to(loop.group.device))

        metrics = loop.task.validate(model, loss_of, beam=recipe.beam, length_penalty=recipe.length_penalty)
        if model.training_record is not None:
            model.training_record["metrics"] = to_jsonable(metrics)
        with silence_warnings("regard.io"):  # the model card says whether transformers can open it
            model.save(run.model_folder)
        run.save_adapter(model)
    command = shlex.join(["regard", loop.task.command, str(run.root), *loop.task.example_words()])
    result = TrainResult(
        run.root, loop.at.step, loop.at.seconds, metrics, weights, stopped=stopped, next_command=command
    )
    write_atomic(run.root / "evaluation.json", to_json(result.to_dict()))
    other = {} if weights.startswith(f"step {loop.at.step}") else {"weights": weights}
    loop.reporter.evaluation(loop.at.step, metrics | other, shown=False)  # the result prints them
    loop.reporter.finish()
    return result
