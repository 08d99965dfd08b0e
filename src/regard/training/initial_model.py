"""What a run takes from ``train.init``: the architecture, with the task's head, the tokenizers, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import hub
from ..config import DataConfig, ModelConfig, RunConfig
from ..config.train_config import TASK_MODELS
from ..data.sources import Source
from ..errors import UsageError
from ..foundation.jsonio import to_json
from ..models import Model
from ..models.build import build
from ..text.processor import Processor
from ..text.tokenizer_training import with_template
from .checkpoint import Checkpoint
from .finetuning import add_lora, freeze, quantise_frozen, start_from, use_language_model
from .loop import seed_everything
from .parallel import Group
from .run_directory import STARTED_FILE, RunDirectory, find_run
from .tasks import Task

# Fields of ModelConfig that follow from the tokenizers.
TOKEN_FIELDS = ("vocab_size", "target_vocab_size", "pad_id", "bos_id", "eos_id")
_HEAD_FIELDS = ("head_bias", "head_transform", "head_activation", "logit_scale", "logit_cap", "generator_width")
_POOLINGS = ({"pooler": "tanh"}, {"pooler": "relu"}, {"pooler": "none"})  # of the classifiers in transformers


def read_initial_model(path: str | Path) -> tuple[ModelConfig, Processor | None]:
    """The config and the processor of a run, RUN@STEP or model directory, without reading the weights."""
    if (run_and_step := find_run(path)) is not None:
        run, _ = run_and_step
        return run.config.model, run.processor
    from ..io import describe

    description = describe(path, verify=False)  # ``load`` verifies the files later
    return description.config, description.processor


def recipe_from_initial_model(path: str, task: str, recipe: Mapping[str, Any], *, tune: bool) -> dict[str, Any]:
    """The recipe of a task with the architecture and the tokenizers of the model at ``path`` in place of its own.

    ``tune``: also set a learning rate for fine-tuning.
    """
    initial, _ = read_initial_model(path)
    model = _with_head_for(path, task, initial, ModelConfig(**recipe.get("model", {})))
    data = {name: value for name, value in recipe.get("data", {}).items() if name != "tokenizer"}
    if initial.source == "text":
        data["max_len"] = min(data.get("max_len", DataConfig().max_len), initial.max_len)
    train = dict(recipe.get("train", {}))
    if tune:
        # 5e-5 at width 400; BERT is usually fine-tuned with 2e-5 to 1e-4. Preference tuning uses a twentieth of that,
        # because a model that can already answer should change only a little.
        peak = 0.001 if task == "dpo" else 0.02
        train |= {"optimiser": "adamw", "lr": float(f"{peak / model.d_model:.2g}")}
    return {**recipe, "data": data, "model": {x: getattr(model, x) for x in ModelConfig.model_fields}, "train": train}


def _with_head_for(path: str, task: str, initial: ModelConfig, recipe: ModelConfig) -> ModelConfig:
    """The config of the initial model with the head the task needs; UsageError if the task trains no such model."""
    kind = (initial.architecture, initial.source)
    heads = [head for *other, head in TASK_MODELS[task] if tuple(other) == kind]
    if not heads:
        trained = " or ".join(architecture for architecture, _, _ in TASK_MODELS[task])
        has = f"architecture={initial.architecture!r} and source={initial.source!r}"
        fitting = [name for name, models in TASK_MODELS.items() if any(model[:2] == kind for model in models)]
        can = f"it can be trained for {', '.join(fitting)}" if fitting else "no task trains such a model"
        raise UsageError(f"train.init={path} has {has}, but the task {task!r} trains {trained} models; {can}")
    head: Any = heads[0]
    defaults = {name: ModelConfig.model_fields[name].default for name in (*_HEAD_FIELDS, "pooler", "pooling")}
    if task == "embed":  # the pooler of a BERT is part of another head
        return initial.with_(**defaults, head=head)
    if head == initial.head:
        return initial
    if head != "classify":
        fields = defaults | {name: getattr(recipe, name) for name in ("head_bias", "head_transform")}
        return initial.with_(**fields | {"logit_scale": initial.logit_scale}, head=head)
    changed = initial.with_(**defaults, head=head)
    # Prefer a pooling that transformers supports, so that a BERT stays one; otherwise pool as the recipe does.
    twins = (changed.with_(**pooling) for pooling in _POOLINGS)
    pools = changed.with_(pooling=recipe.pooling, pooler=initial.pooler, classifier_dropout=recipe.classifier_dropout)
    return next((twin for twin in twins if not hub.write_config(twin).obstacles), pools)


def initial_processor(
    config: RunConfig, source: Source, initial: Processor | None, task_class: type[Task]
) -> Processor | None:
    """The tokenizers and the image processor of the initial model, with the labels of the data.

    None if the task should make its own: ``data.tokenizer`` names another one, or the initial model has none.
    """
    parts = [None if initial is None else getattr(initial, part) for part in task_class.processor_parts]
    has_text = any(part != "image" for part in task_class.processor_parts)
    if initial is None or None in parts or (has_text and config.data.tokenizer != "auto"):
        return None
    sides = [side for side in (initial.source, initial.target) if side is not None]
    foreign = not sides or not all(side.is_native for side in sides)
    source_side, target_side = (
        side if side is None or not side.is_native else with_template(side, task_class.template)
        for side in (initial.source, initial.target)
    )
    # Companion files belong to a foreign tokenizer; for our own they are written anew.
    companions = initial.companions if foreign else {}
    made = Processor(source_side, target_side, initial.image, source.labels, initial.chat_template, companions)
    return made.with_pairs(False)  # a task that reads pairs says so itself


def new_model(
    config: RunConfig, task: Task, run: RunDirectory, group: Group, checkpoint: Checkpoint | None, start: Model | None
) -> tuple[Model, list[str]]:
    """The model with its initial weights, and notes about them; a resumed run loads its checkpoint afterwards."""
    recipe = config.train
    notes: list[str] = []
    seed_everything(recipe.seed, "weights")
    model = build(config.model) if start is None else start
    new_names: Sequence[str] = ()
    started = None
    if recipe.init is not None:
        if checkpoint is None:
            from ..io import load

            started = start_from(model, recipe.init, load(recipe.init), task.processor, partial=recipe.init_partial)
            notes.append(started.to_text())
            facts = {**started.to_dict(), "unlearned": started.unlearned, "base": _adapter_base(recipe.init)}
            if group.is_main:
                run.replace_files({STARTED_FILE: to_json(facts)})
        new_names = run.json(STARTED_FILE)["unlearned"] if started is None else started.unlearned
    if recipe.lora is not None:
        add_lora(model, recipe.lora, recipe.lora_alpha, recipe.lora_targets, keep=new_names)
    if recipe.quantize == "nf4":
        quantise_frozen(model)
    use_language_model(model, recipe.language_model, take=checkpoint is None)
    if recipe.freeze:
        freeze(model, recipe.freeze)
    if recipe.checkpointing:
        model.use_checkpointing()
    return model, notes


def _adapter_base(init: str) -> str | None:
    """The model directory that an adapter trained from ``init`` belongs to; None if that is a checkpoint of a run."""
    run_and_step = find_run(init)
    if run_and_step is None:
        return str(Path(init).resolve())
    run, step = run_and_step
    return str(run.model_folder.resolve()) if step is None and run.model_folder.is_dir() else None
