"""What ``train.init`` brings to a run beside weights: the architecture with the task's own head, and the tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import hub
from ..config import DataConfig, ModelConfig, RunConfig
from ..config.train_config import TASK_MODELS
from ..data.sources import Source
from ..errors import UsageError
from ..text.processor import Processor
from ..text.tokenizer_training import with_template
from .run_directory import find_run
from .tasks import Task

# What a model has because of its tokenizers; they go together.
TOKEN_FIELDS = ("vocab_size", "target_vocab_size", "pad_id", "bos_id", "eos_id")
# The fields of a head, and the poolings of classifiers that transformers has.
_HEAD_FIELDS = ("head_bias", "head_transform", "head_activation", "logit_scale", "logit_cap")
_POOLINGS = ({"pooler": "tanh"}, {"pooler": "relu"}, {"pooler": "none"})


def read_initial_model(path: str | Path) -> tuple[ModelConfig, Processor | None]:
    """The config and the processor of a run, RUN@STEP or model directory, without its numbers."""
    if (found := find_run(path)) is not None:
        return found[0].config.model, found[0].processor
    from ..io import describe

    described = describe(path, verify=False)  # ``load`` compares the files with the manifest
    return described.config, described.processor


def recipe_from_initial_model(path: str, task: str, recipe: Mapping[str, Any], *, tune: bool) -> dict[str, Any]:
    """A task's recipe with the architecture and the tokenizers of the model at ``path`` in place of its own.

    ``tune``: also with a learning rate for weights that have learned already.
    """
    initial, _ = read_initial_model(path)
    model = _with_head_for(path, task, initial, ModelConfig(**recipe.get("model", {})))
    data = {name: value for name, value in recipe.get("data", {}).items() if name != "tokenizer"}
    if initial.source == "text":
        data["max_len"] = min(data.get("max_len", DataConfig().max_len), initial.max_len)
    train = dict(recipe.get("train", {}))
    if tune:
        # Adam's steps are of the size of the learning rate: 5e-5 at width 400, where BERTs are tuned with 2e-5 to 1e-4.
        # Preferences need a twentieth of that: a model that has learned to answer is to change a little.
        peak = 0.001 if task == "dpo" else 0.02
        train |= {"optimiser": "adamw", "lr": float(f"{peak / model.d_model:.2g}")}
    return {**recipe, "data": data, "model": {x: getattr(model, x) for x in ModelConfig.model_fields}, "train": train}


def _with_head_for(path: str, task: str, initial: ModelConfig, recipe: ModelConfig) -> ModelConfig:
    """The initial model's config with the head the task needs; UsageError where the task trains no such model."""
    kind = (initial.architecture, initial.source)
    heads = [head for *other, head in TASK_MODELS[task] if tuple(other) == kind]
    if not heads:
        wanted = " or ".join(architecture for architecture, _, _ in TASK_MODELS[task])
        has = f"architecture={initial.architecture!r} and source={initial.source!r}"
        fitting = [name for name, models in TASK_MODELS.items() if any(model[:2] == kind for model in models)]
        can = f"it can be trained for {', '.join(fitting)}" if fitting else "no task trains such a model"
        raise UsageError(f"train.init={path} has {has}, but the task {task!r} trains {wanted} models; {can}")
    head: Any = heads[0]
    if head == initial.head:
        return initial
    defaults = {name: ModelConfig.model_fields[name].default for name in (*_HEAD_FIELDS, "pooler", "pooling")}
    if head != "classify":
        fields = defaults | {name: getattr(recipe, name) for name in ("head_bias", "head_transform")}
        return initial.with_(**fields | {"logit_scale": initial.logit_scale}, head=head)
    changed = initial.with_(**defaults, head=head)
    # A BERT stays one that transformers opens; a model it has no twin of pools as the recipe does.
    twins = (changed.with_(**pooling) for pooling in _POOLINGS)
    pools = changed.with_(pooling=recipe.pooling, pooler=initial.pooler, classifier_dropout=recipe.classifier_dropout)
    return next((twin for twin in twins if not hub.write_config(twin).obstacles), pools)


def initial_processor(
    config: RunConfig, source: Source, given: Processor | None, task_class: type[Task]
) -> Processor | None:
    """The initial model's tokenizers and image processor with the data's labels; None where the task makes its own.

    That is where ``data.tokenizer`` names another one, or where the directory holds none.
    """
    parts = [None if given is None else getattr(given, part) for part in task_class.processor_parts]
    has_text = any(part != "image" for part in task_class.processor_parts)
    if given is None or None in parts or (has_text and config.data.tokenizer != "auto"):
        return None
    sides = [side for side in (given.source, given.target) if side is not None]
    foreign = not sides or not all(side.is_native for side in sides)
    source_side, target_side = (
        side if side is None or not side.is_native else with_template(side, task_class.template)
        for side in (given.source, given.target)
    )
    # Files that stood beside a foreign tokenizer belong to it; beside one of ours they are written anew.
    companions = given.companions if foreign else {}
    return Processor(source_side, target_side, given.image, source.labels, given.chat_template, companions)
