"""From the arguments of ``regard.train`` to the RunConfig, the examples and the model of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..config import DataConfig, ModelConfig, RunConfig
from ..data.example_files import ExampleWriter
from ..data.examples import (
    Example,
    ImageExample,
    Label,
    Labelled,
    Pair,
    Question,
    Tagged,
    Text,
    Triplet,
    chat_of,
    preference_of,
)
from ..data.sources import Source, open_source
from ..data.splits import Split, held_out_mask, sha256_of, split_tail
from ..errors import BadData, UsageError
from ..models import Model
from ..models.build import model_class, model_class_name, register_model
from ..recipes import run_config
from ..text.processor import Processor
from .run_directory import IN_MEMORY, RunDirectory
from .tasks import TASKS, Task

_CONFIG_FILES = (".json", ".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class RunInputs:
    """A resolved config, with the objects that a config cannot hold."""

    config: RunConfig
    task_class: type[Task]
    examples: list[Example] | None = None
    labels: tuple[str, ...] | None = None
    model: Model | None = None

    @property
    def processor(self) -> Processor | None:
        """The tokenizers of the given model, if it has been trained before."""
        return None if self.model is None else self.model.processor

    def check_model(self, resolved: ModelConfig) -> None:
        """Raise ValueError if the config that the data needs differs from that of the given model."""
        if self.model is None or resolved == self.model.config:
            return
        has, needs = self.model.config.model_dump(), resolved.model_dump()
        pairs = ", ".join(f"{n}={has[n]!r} (the data needs {needs[n]!r})" for n in has if has[n] != needs[n])
        raise ValueError(f"the given model does not fit the data: {pairs}")


def resolve_run(
    config: RunConfig | str | Path | type[Task] | None,
    *,
    task: str | type[Task] | None = None,
    data: Any = None,
    model: Any = None,
    train: Any = None,
    preset: str | None = None,
) -> RunInputs:
    """Check and complete the arguments of ``regard.train`` as the command line does with its own."""
    task_class = next((x for x in (task, config) if isinstance(x, type)), None)
    module = model if isinstance(model, Model) else None
    if module is not None:
        _register_class(module)
    elif isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: your own models must be subclasses of regard.Model")
    fields: dict[str, Any] = {"model": model if module is None else module.config.model_dump(), "train": train}
    in_memory = data is not None and not isinstance(data, str | Path | Mapping | DataConfig)
    if not isinstance(config, RunConfig):
        fields["data"] = {"source": IN_MEMORY} if in_memory else data
        name = task_class.name if task_class is not None else config if task is None else task
        is_file = isinstance(name, Path) or (isinstance(name, str) and Path(name).suffix in _CONFIG_FILES)
        if is_file:
            config = run_config(preset=preset, config_file=cast(str | Path, name), **fields)
        else:
            config = run_config(cast(str | None, name), preset=preset, **fields)
    elif preset is not None or model is not None or train is not None or (data is not None and not in_memory):
        raise UsageError("a RunConfig already holds data, model and train: change them with config.with_(…)")
    model_class(config.model)  # raises ValueError if its class is not registered
    task_class = task_class or TASKS[config.task]
    examples, labels = _examples_of(data, task_class, config.data) if in_memory else (None, None)
    return RunInputs(config, task_class, examples, labels, module)


def _register_class(model: Model) -> None:
    """Register a user's own model class and note it in the config, so that checkpoints are loaded with it."""
    if type(model) is not model_class(model.config):
        register_model(type(model))
        model.config = model.config.with_(model_class=model_class_name(type(model)))


def check_task_class(run: RunDirectory, resumed: type[Task]) -> None:
    """Refuse to resume a run of a task class of one's own with the built-in one, whose loss may differ, or vice versa.

    Two classes of one's own are not compared: a class may have been renamed or moved.
    """
    built_in = TASKS[run.config.task]
    name = run.facts.get("task_class", class_name(resumed))  # older runs do not record it
    if name != class_name(built_in) and resumed is built_in:
        raise UsageError(f"{run.root} was trained with the task class {name}: resume it in Python with this class")
    if name == class_name(built_in) and resumed is not built_in:
        raise UsageError(f"{run.root} was trained with the built-in task {run.config.task!r}: leave out task=…")


def class_name(task_class: type[Task]) -> str:
    return f"{task_class.__module__}:{task_class.__qualname__}"


def open_run_source(inputs: RunInputs) -> Source:
    """The examples of a run, with some of them held out; BadData if none are, or all."""
    source = _open_examples(inputs)
    if not len(source.train):
        raise BadData(f"{source.name} has no example to train on")
    if not len(source.valid):
        raise BadData(f"{source.name} has no held-out examples to evaluate on; data.valid=… names some")
    if source.labels is not None and len(source.labels) < 2 and inputs.config.data.problem_type == "single_label":
        hint = "" if source.schema is None else "; data.columns=… names the column of the classes"
        raise BadData(f"{source.name} has one class only, {', '.join(source.labels)}{hint}")
    return source


def _open_examples(inputs: RunInputs) -> Source:
    """The source that the config names, or the examples in memory, held out by the same rules."""
    data, examples = inputs.config.data, inputs.examples
    if examples is None:
        if data.source == IN_MEMORY:
            raise UsageError("the run was trained on examples in memory: pass them again as data=…")
        return _open_for_task(data, inputs.task_class)
    if not examples:
        raise BadData("data has no examples")
    train: Sequence[Example] = examples
    valid: Sequence[Example] = []
    how = "nothing held out"
    match examples:
        case [Text(text)]:
            writer = ExampleWriter()
            writer.add(text)
            train, valid, how = split_tail(writer.finish(), data)
        case _ if data.valid_fraction or isinstance(data.valid_rows, int):
            pairs = list(zip(examples, held_out_mask(examples, data), strict=True))
            train, valid = [x for x, out in pairs if not out], [x for x, out in pairs if out]
            how = "by hash of the source side"
    split = Split(how, sha256_of(train), sha256_of(valid))
    return Source(IN_MEMORY, inputs.task_class.kinds[0], train, valid, split, inputs.labels)


def _open_for_task(data: DataConfig, task_class: type[Task]) -> Source:
    """Open a source; a table whose guessed kind does not suit the task is read as the kind the task needs."""
    if data.kind is None and data.problem_type != "single_label":  # the kind cannot be guessed from such a table
        return replace(open_source(data.with_(kind=task_class.kinds[0])), kind_implied=True)
    source = open_source(data)
    if source.kind in task_class.kinds or source.schema is None or not source.schema.guessed:
        return source
    other = open_source(data.with_(kind=task_class.kinds[0]))
    is_plausible = not task_class.has_labels or len(other.labels or ()) <= min(100, len(other.train) // 2)
    return replace(other, kind_implied=True) if is_plausible else source


def _examples_of(data: Any, task_class: type[Task], config: DataConfig) -> tuple[list[Example], tuple[str, ...] | None]:
    """The items of a Dataset or iterable as Examples of the kind the task reads, and the labels of its classes."""
    is_map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # such a Dataset has no __iter__
    rows = [data[i] for i in range(len(data))] if is_map_style else list(data)
    kind = task_class.kinds[0]
    labels: tuple[str, ...] | None = None
    if task_class.has_labels and config.problem_type != "regression":
        labels = config.labels or _label_names(rows, config.problem_type == "multi_label" or kind == "tagged")
    numbers = {name: number for number, name in enumerate(labels or ())}

    def number(name: Any) -> int:
        if str(name) not in numbers:
            raise ValueError(f"the label {name!r} is not one of {', '.join(numbers)}")
        return numbers[str(name)]

    def label(value: Any) -> Label:
        if labels is None:
            return float(value)
        return tuple(map(number, value)) if config.problem_type == "multi_label" else number(value)

    makers: dict[str, Any] = {
        "text": lambda x: Text(x),
        "pairs": lambda x: (Triplet if len(x) == 3 and "triplets" in task_class.kinds else Pair)(*x),
        "labelled": lambda x: Labelled(x[0], label(_label_of(x)), *x[1:-1]),
        "images": lambda x: ImageExample(_image_of(x[0]), label=label(_label_of(x))),
        "tagged": lambda x: Tagged(tuple(x[0]), tuple(map(number, _label_of(x)))),
        "chats": lambda x: chat_of(x if isinstance(x, tuple) else (x,)),
        "preferences": preference_of,
        "questions": lambda x: Question(x[0], x[1], _texts_of(x[2])),
        "captions": lambda x: ImageExample(_image_of(x[0]), _texts_of(x[1])),
    }
    try:
        examples: list[Example] = [x if isinstance(x, Example) else makers[kind](x) for x in rows]
    except (TypeError, IndexError, ValueError) as error:
        raise BadData(f"an example in data does not fit the kind {kind}: {error}") from None
    if any(isinstance(x, Question) and not x.passages for x in examples):
        raise BadData("a question in data has no passage")
    return examples, labels


def _label_names(rows: list[Any], has_several: bool) -> tuple[str, ...]:
    """The names of the classes: the labels of the rows, sorted; Examples have numbers, of which some may not occur."""
    values = [_label_of(x) for x in rows]
    names: set[Any] = {name for value in values for name in (value if has_several else (value,))}
    if any(isinstance(x, Example) for x in rows):
        return tuple(map(str, range(max(names, default=-1) + 1)))
    return tuple(map(str, sorted(names, key=lambda x: (isinstance(x, str), x))))


def _label_of(example: Any) -> Any:
    """The label of an Example, or the last item of a row; tensors and arrays as numbers."""
    match example:
        case Tagged(tags=label) | Labelled(label=label) | ImageExample(label=label):
            return label
    return example[-1].tolist() if hasattr(example[-1], "tolist") else example[-1]


def _image_of(image: Any) -> Any:
    """An image as an ImageExample holds it: a string is the path of a file, a tensor holds uint8 pixels."""
    if not isinstance(image, torch.Tensor):
        return Path(image) if isinstance(image, str) else image
    if image.dtype != torch.uint8 or image.dim() not in (2, 3):
        found = f"{image.dtype} of shape {tuple(image.shape)}"
        raise ValueError(f"an image is {found}; uint8 pixels (height, width, channels) are needed")
    return image.numpy()


def _texts_of(texts: str | Iterable[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)
