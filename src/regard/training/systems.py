"""What is evaluated: a model from a run or a directory, the task it was made for, and the examples it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..config import DataConfig, ModelConfig, RunConfig
from ..config import Task as TaskName
from ..data.corpora import CORPORA
from ..data.sources import Source, open_source
from ..errors import BadModelFile
from ..models import Model
from ..text.processor import Processor
from ..text.tokenizer import Tokenizer
from .run_directory import RUN_FILE, RunDirectory
from .tasks import Task, open_task

__all__ = ["ALL_OF_IT", "System", "data_for", "open_data", "open_system", "task_for"]

WHERE = (
    *("source", "valid", "format", "valid_fraction", "valid_rows", "split_seed", "deduplicated", "epoch_examples"),
    *("kind", "columns", "header", "labels", "images", "documents", "bad_lines", "normalise"),
    *("max_chars", "max_pixels", "check_images"),
)
"""Fields that say which examples there are. The others say how a model reads them, and stay a model's own."""
_ANOTHER_FILE = ("source", "valid", "format", "valid_fraction", "valid_rows", "split_seed", "deduplicated")
"""Of those, what another file does not take over from the one a run learned from."""
_HELD_OUT_BY = ("valid", "valid_fraction", "valid_rows")
ALL_OF_IT = "all of it"
_MOST_CONTEXT = 1024
"""Of a language model that can read more and says nothing about what it was trained with."""


@dataclass(frozen=True)
class System:
    """A model and what it takes to ask it."""

    name: str
    model: Model
    weights: str
    """Which weights of a run these are."""
    config: RunConfig
    processor: Processor
    run: RunDirectory | None = None

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.processor.labels if self.config.task in ("classify", "classify-images") else None

    @property
    def tokens_sha256(self) -> tuple[str, ...]:
        """What its tokenizers are recognised by."""
        sides = (self.processor.source, self.processor.target)
        return tuple(side.sha256 for side in sides if side is not None)


def open_system(path: str | Path, device: torch.device) -> System:
    """A run, RUN@STEP, or a directory that ``model.save`` or transformers wrote."""
    from ..io import load

    root, step = _run_of(path)
    if root is None:
        if not Path(path).exists():
            raise BadModelFile(f"there is no run and no model directory {path}")
        return _from_directory(str(path), load(path, device=device))
    run = RunDirectory.open(root)
    if step is None and run.model_folder.is_dir():
        model, weights = load(run.model_folder, device=device), _saved_weights(run)
    else:
        model, weights = run.model(step)
    return System(str(path), model.to(device).eval(), weights, run.config, run.processor, run)


def _saved_weights(run: RunDirectory) -> str:
    """What the run says about the model it ended with."""
    try:
        return str(json.loads((run.root / "evaluation.json").read_bytes())["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return "as saved at the end of the run"


def _run_of(path: str | Path) -> tuple[Path | None, int | None]:
    """The directory of the run that a path names, and the step; None where it names no run."""
    name, _, step = str(path).rpartition("@")
    if name and step.isdecimal() and not Path(path).exists():
        if not (Path(name) / RUN_FILE).is_file():
            raise BadModelFile(f"{path}: {name} is no run, so it has no step {step}")
        return Path(name), int(step)
    return (Path(path), None) if (Path(path) / RUN_FILE).is_file() else (None, None)


# ------------------------------------------------------------------------------------- a directory without a run


def _from_directory(name: str, model: Model) -> System:
    """What a run would say is told from the model: its task from what it reads and says, lengths from its own."""
    config, task = model.config, _task_of(name, model.config)
    processor = _adapted(name, task, model)
    most = config.max_target_len or config.max_len
    if task == "lm":
        data = DataConfig(max_len=min(config.max_len, _MOST_CONTEXT))
    else:
        data = DataConfig(max_len=most if task == "caption" else config.max_len, max_target_len=most)
    return System(name, model.eval(), "as saved", RunConfig(task=task, data=data, model=config), processor)


def _task_of(name: str, model: ModelConfig) -> TaskName:
    """Features decide: what is read, and what comes out."""
    match model.architecture, model.source, model.head:
        case "decoder", _, "lm":
            return "lm"
        case "encoder", "text", "masked-lm":
            return "mlm"
        case "encoder", "text", "classify":
            return "classify"
        case "encoder", "image", "classify":
            return "classify-images"
        case "encoder-decoder" | "recurrent", "text", "lm":
            return "translate"
        case "encoder-decoder", "image", "lm":
            return "caption"
    raise ValueError(
        f"{name} is a model with architecture={model.architecture!r}, source={model.source!r} and head={model.head!r}, "
        "which no task is evaluated with"
    )


def _adapted(name: str, task: TaskName, model: Model) -> Processor:
    """The processor a directory came with, its tokenizers with the special ids that tasks need."""
    found: Processor = model.processor or Processor()
    needs = {
        "classify-images": ("image",),
        "caption": ("target", "image"),
    }.get(task, ("source",))
    for part in needs:
        if getattr(found, part) is None:
            what = "preprocessor_config.json" if part == "image" else "tokenizer"
            raise BadModelFile(f"{name} has no {what}, which the task {task!r} needs")
    if task == "mlm" and "mask" not in getattr(found.source, "special_ids", ()):
        raise ValueError(f"{name} has a tokenizer that was not made here: what hides its tokens is not known")
    return replace(found, source=_with_ids(found.source, model.config), target=_with_ids(found.target, model.config))


def _with_ids(tokenizer: Tokenizer | None, config: ModelConfig) -> Tokenizer | None:
    """A foreign tokenizer with the special ids of its model."""
    if tokenizer is None or tokenizer.is_native:
        return tokenizer
    bos_id = config.pad_id if config.bos_id is None else config.bos_id
    eos_id = bos_id if config.eos_id is None else config.eos_id
    return tokenizer.with_special_ids(pad=config.pad_id, bos=bos_id, eos=eos_id)


# ------------------------------------------------------------------------------------- the examples


def data_for(system: System, words: Mapping[str, Any]) -> tuple[DataConfig, bool]:
    """Where the examples come from, and whether all of them are meant.

    Without a source of their own, those the run held out. A given file is taken whole, unless words say what of it is
    held out; a given corpus has held-out sets of its own.
    """
    known = _said(system.config.data)
    if "source" not in words:
        if system.run is None:
            raise ValueError(f"{system.name} is a model directory: data.source=… must say what to evaluate it on")
        return DataConfig(**{**known, **words}), False
    if words["source"] in CORPORA:
        own = {name: value for name, value in known.items() if name not in WHERE}
        return DataConfig(**{**own, **words}), False
    own = {name: value for name, value in known.items() if name not in _ANOTHER_FILE}
    whole = not any(name in words for name in _HELD_OUT_BY)
    return DataConfig(**{**own, **({"valid_fraction": 0.0} if whole else {}), **words}), whole


def _said(data: DataConfig) -> dict[str, Any]:
    """The fields that differ from their defaults: a run's file holds all of them, and a corpus refuses some."""
    return {
        name: getattr(data, name)
        for name, field in DataConfig.model_fields.items()
        if getattr(data, name) != field.default
    }


def open_data(data: DataConfig, whole: bool, system: System) -> Source:
    """The examples, classes numbered as the model numbers them."""
    labels = system.labels
    if labels is not None and data.source not in CORPORA:
        if data.labels is not None and set(data.labels) != set(labels):
            raise ValueError(f"labels={','.join(data.labels)}, but {system.name} tells apart {', '.join(labels)}")
        data = data.with_(labels=labels)
    source = open_source(data)
    if whole and not len(source.valid):
        split = replace(source.split, how=ALL_OF_IT, valid_sha256=source.split.train_sha256)
        source = replace(source, valid=source.train, split=split)
    return source


def task_for(system: System, source: Source, data: DataConfig, words: Mapping[str, Any], seed: int) -> Task:
    """The system's task on these examples: read as the system read its own, unless words say otherwise."""
    fields = {name: value for name, value in _said(system.config.data).items() if name not in WHERE}
    fields |= {name: value for name, value in _said(data).items() if name in WHERE}
    fields |= {name: value for name, value in words.items() if name not in WHERE}
    if fields.get("packing", "auto") == "auto":
        # How many documents there are now says nothing about how the model was taught to tell them apart.
        own = system.processor.source is not None and system.processor.source.is_native
        fields["packing"] = "documents" if own and system.config.model.eos_id is not None else "blocks"
    read, model = DataConfig(**fields), system.config.model
    if (
        model.positions == "learned"
        and read.max_len > model.max_len
        and system.config.task in ("lm", "mlm", "classify")
    ):
        raise ValueError(f"max_len={read.max_len}, but the positions of {system.name} end at {model.max_len}")
    config = system.config.with_(data=read, train=system.config.train.with_(seed=seed))
    task = open_task(config, source, system.processor)
    labels = system.processor.labels or source.labels
    if system.config.task in ("classify", "classify-images") and len(labels or ()) != model.n_classes:
        named = f"{source.name} has the labels {', '.join(labels or ())}; data.labels=… names all of them in order"
        raise ValueError(f"{system.name} tells apart {model.n_classes} classes without names, but {named}")
    return task
