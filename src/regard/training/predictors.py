"""What is evaluated: a trained model, its task, and the examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..config import DataConfig, RunConfig
from ..config import Task as TaskName
from ..data.corpora import CORPORA
from ..data.sources import Source, open_source
from ..errors import BadData, BadModelFile
from ..models import Model
from ..text.processor import Processor, with_special_ids_of
from .run_directory import IN_MEMORY, RunDirectory, find_run, missing_data
from .tasks import TASKS, Task, open_task, task_class_of

# Fields of DataConfig that select the examples. The others say how a model reads them and are kept from training.
EXAMPLE_FIELDS = (
    *("source", "valid", "format", "valid_fraction", "valid_rows", "split_seed", "deduplicated", "epoch_examples"),
    *("kind", "columns", "header", "encoding", "labels", "images", "documents", "bad_lines", "normalise"),
    *("max_chars", "max_pixels", "check_images"),
)
# Fields of the training data that do not carry over to another file.
_FILE_FIELDS = ("source", "valid", "format", "valid_fraction", "valid_rows", "split_seed", "deduplicated")
_SPLIT_FIELDS = ("valid", "valid_fraction", "valid_rows")
ALL_OF_IT = "all of it"


@dataclass(frozen=True)
class Predictor:
    """A model with everything needed to evaluate it."""

    name: str
    model: Model
    weights: str  # which weights of the run, such as "step 400, the best"
    config: RunConfig
    processor: Processor
    run: RunDirectory | None = None

    @property
    def task_class(self) -> type[Task]:
        return TASKS[self.config.task]

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.processor.labels if self.task_class.has_labels else None

    @property
    def tokens_sha256(self) -> tuple[str, ...]:
        """The hashes of its tokenizers."""
        return tuple(tokenizer.sha256 for tokenizer in self.processor.tokenizers.values())


def open_predictor(path: str | Path | Model, device: torch.device) -> Predictor:
    """Open a run, RUN@STEP, a directory written by ``model.save`` or transformers, or a model in memory."""
    if isinstance(path, Model):
        return _from_model("model", path.to(device))
    from ..io import load

    run_and_step = find_run(path, must_exist=True)
    if run_and_step is None:
        if not Path(path).exists():
            raise BadModelFile(f"there is no run and no model directory {path}")
        return _from_model(str(path), load(path, device=device))
    run, step = run_and_step
    if step is None and run.model_folder.is_dir():
        model, weights = load(run.model_folder, device=device), "as saved at the end of the run"
        with suppress(OSError, ValueError, KeyError, TypeError):  # a more exact description, if there is one
            weights = str(json.loads((run.root / "evaluation.json").read_bytes())["weights"])
    else:
        model, weights = run.model(step)
    return Predictor(str(path), model.to(device).eval(), weights, run.config, run.processor, run)


def _from_model(name: str, model: Model) -> Predictor:
    """A predictor without a run: the task follows from the config of the model, and so do the lengths of texts."""
    task_class = task_class_of(name, model.config)
    data = task_class.data_defaults(model.config)
    config = RunConfig(task=cast(TaskName, task_class.name), data=data, model=model.config)
    processor: Processor = model.processor or Processor()
    for part in task_class.processor_parts:
        if getattr(processor, part) is None:
            missing = "preprocessor_config.json" if part == "image" else "tokenizer"
            raise BadModelFile(f"{name} has no {missing}, which the task {task_class.name!r} needs")
    source, target = (
        # A loaded tokenizer has special ids already, and more of them than the config.
        side if side is None or side.special_ids else with_special_ids_of(side, model.config)
        for side in (processor.source, processor.target)
    )
    if task_class.needs_mask_token and "mask" not in getattr(source, "special_ids", ()):
        raise ValueError(f"{name} has a tokenizer without a mask token, which the task {task_class.name!r} needs")
    return Predictor(name, model.eval(), "as saved", config, replace(processor, source=source, target=target))


def data_config_for(predictor: Predictor, fields: Mapping[str, Any]) -> tuple[DataConfig, bool]:
    """The data to evaluate on, and whether to use all of its examples.

    Without a source in ``fields``, the held-out examples of the run. A file is used whole unless ``fields`` say what to
    hold out; a corpus has its own held-out sets.
    """
    # Without defaults, because a corpus refuses some fields.
    trained = predictor.config.data.model_dump(exclude_defaults=True)
    if "source" not in fields:
        if predictor.run is None:
            raise ValueError(f"{predictor.name} is a model directory: data.source=… must name the data to evaluate on")
        if predictor.config.data.source == IN_MEMORY:
            raise BadData(
                f"{predictor.name} does not keep the examples it was given in memory: data.source=… names others"
            )
        if missing := missing_data(predictor.config.data, predictor.name):
            raise missing
        return DataConfig(**{**trained, **fields}), False
    if fields["source"] in CORPORA:
        kept = {name: value for name, value in trained.items() if name not in EXAMPLE_FIELDS}
        return DataConfig(**{**kept, **fields}), False
    if predictor.run is not None and missing_data(predictor.config.data, predictor.name):
        with suppress(BadData, ValueError):  # the data of the run may have moved: its held-out examples are the same
            moved = DataConfig(**{**trained, **fields})
            if open_source(moved).sha256 == predictor.run.facts["data"]["sha256"]:
                return moved, False
    kept = {name: value for name, value in trained.items() if name not in _FILE_FIELDS}
    whole = not any(name in fields for name in _SPLIT_FIELDS)
    return DataConfig(**{**kept, **({"valid_fraction": 0.0} if whole else {}), **fields}), whole


def open_examples(data: DataConfig, whole: bool, predictor: Predictor) -> Source:
    """The examples, with classes numbered as in the model."""
    labels = predictor.labels
    if labels is not None and data.source not in CORPORA:
        if data.labels is not None and set(data.labels) != set(labels):
            raise ValueError(
                f"labels={','.join(data.labels)}, but the classes of {predictor.name} are {', '.join(labels)}"
            )
        data = data.with_(labels=labels)
    source = open_source(data)
    if whole and not len(source.valid):
        split = replace(source.split, how=ALL_OF_IT, valid_sha256=source.split.train_sha256)
        source = replace(source, valid=source.train, split=split)
    return source


def with_task_for(predictor: Predictor, source: Source) -> Predictor:
    """The predictor with the task that suits these examples: a language model can also be evaluated on chats."""
    if source.kind in predictor.task_class.kinds:
        return predictor
    tasks = [x for x in TASKS.values() if source.kind == x.kinds[0] and x.accepts(predictor.config.model)]
    names = [x.name for x in tasks if x.reference_model is Task.reference_model]  # DPO would need its reference
    return replace(predictor, config=predictor.config.with_(task=names[0])) if names else predictor


def task_for(predictor: Predictor, source: Source, data: DataConfig, overrides: Mapping[str, Any], seed: int) -> Task:
    """The task of the predictor on these examples, read as in training except for ``overrides``."""
    trained, evaluated = (config.model_dump(exclude_defaults=True) for config in (predictor.config.data, data))
    fields = {name: value for name, value in trained.items() if name not in EXAMPLE_FIELDS}
    fields |= {name: value for name, value in evaluated.items() if name in EXAMPLE_FIELDS}
    fields |= {name: value for name, value in overrides.items() if name not in EXAMPLE_FIELDS}
    if fields.get("packing", "auto") == "auto":
        # Follows from how the model was trained, not from the number of documents here.
        tokenizer, model = predictor.processor.source, predictor.config.model
        if tokenizer is not None and tokenizer.is_native:
            separates_documents = model.eos_id is not None
        else:  # a foreign tokenizer has an end-of-text token in any case
            separates_documents = predictor.run is not None and predictor.run.facts["data"]["train"] > 1
        fields["packing"] = "documents" if separates_documents else "blocks"
    config = predictor.config.with_(data=DataConfig(**fields), train=predictor.config.train.with_(seed=seed))
    processor = predictor.processor
    if "chat_template" in overrides:
        processor = replace(processor, chat_template=None)  # the task reads the one that the config names
    task = open_task(config, source, processor)
    task.check_model(predictor.name, predictor.config.model)
    return task


def open_validation_task(run: str | Path, device: torch.device) -> tuple[Predictor, Task]:
    """The model of a run and its task on the data of the run."""
    predictor = open_predictor(run, device)
    data, whole = data_config_for(predictor, {})
    source = open_examples(data, whole, predictor)
    return predictor, task_for(predictor, source, data, {}, predictor.config.train.seed)
