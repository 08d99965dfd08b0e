"""Recipes, named training runs: a task with its data, model and training fields. The table is recipes.yaml."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from .config import Config, DataConfig, ModelConfig, RunConfig, Task, TrainConfig
from .config.base import join_paths
from .config.config_file import check_content, load_config_file, load_package_data
from .config.overrides import PRESET, SECTIONS, build_section, check_fields, format_value, parse_overrides
from .config.train_config import TASK_MODELS
from .errors import UsageError
from .foundation.checks import did_you_mean
from .presets import load_presets

Recipe = dict[str, Any]
TASKS: tuple[str, ...] = get_args(Task)
_TASK_FIELDS = ("architecture", "source", "head")  # the fields of a model that TASK_MODELS lists


class TaskStart(NamedTuple):
    """The default recipe of a task, and an example of a data source."""

    recipe: str
    source: str  # such as pairs.tsv


class RecipeTable(NamedTuple):
    """The content of recipes.yaml."""

    tasks: dict[str, TaskStart]
    recipes: dict[str, Recipe]


@cache
def load_recipes() -> RecipeTable:
    """Tasks and recipes; cached."""
    content = load_package_data("recipes.yaml")
    return RecipeTable(
        {task: TaskStart(**content["tasks"][task]) for task in TASKS},
        {name: check_content(fields) for name, fields in content["recipes"].items()},
    )


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    recipes = load_recipes().recipes
    if name not in recipes:
        raise UsageError(f"there is no preset {name!r}{did_you_mean(name, recipes)} (all: {', '.join(recipes)})")
    return recipes[name]


def default_recipe(task: str) -> Recipe:
    """The recipe that a task starts from."""
    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}{did_you_mean(task, TASKS)} (all: {', '.join(TASKS)})")
    return recipe(load_recipes().tasks[task].recipe)


def run_config(
    task: str | None = None,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    config_file: str | Path | None = None,
    data: str | Path | Sequence[str | Path] | Mapping[str, Any] | DataConfig | None = None,
    model: str | Mapping[str, Any] | ModelConfig | None = None,
    train: Mapping[str, Any] | TrainConfig | None = None,
) -> RunConfig:
    """The config of a run: a recipe (``preset``, or the default of the task) with overrides.

    In order of precedence, lowest first: the recipe, a config file, the sections as Python values (``data`` may be a
    source, ``model`` the name of a preset), and ``section.field=value`` overrides. The file may name task and preset.
    """
    content = {} if config_file is None else load_config_file(config_file)
    file_task = content.get("task")
    if task is not None and file_task not in (None, task):
        raise UsageError(f"{config_file} is for the task {file_task}, not for {task}")
    preset = preset or content.get(PRESET)
    task = task or file_task or (recipe(preset)["task"] if preset is not None else None)
    if task is None:
        raise UsageError(f"{config_file or 'the run'} names no task: task is one of {', '.join(TASKS)}")
    start = default_recipe(task)
    if preset is not None and (start := recipe(preset))["task"] != task:
        raise UsageError(f"preset={preset} is for the task {start['task']}, not for {task}")
    model_fields = {PRESET: model} if isinstance(model, str) else _fields_of(model)
    sections = {"data": _data_fields(data), "model": model_fields, "train": _fields_of(train)}
    values = {section: check_fields(section, fields) for section, fields in sections.items()}
    layers: list[Mapping[str, Any]] = [content, values, parse_overrides(overrides)]
    if "n_channels" in _explicit_fields(layers, "model"):  # explicit, so the images must not change it
        layers.insert(0, {"data": {"channels": "model"}})
    fields = _merge_sections([start, *layers])
    if (init := fields["train"].get("init")) is not None:
        fields = _merge_with_initial_model(init, task, start, layers, tune=preset is None)
    if (teacher := fields["train"].get("teacher")) is not None:
        config = _teacher_config(teacher, task)
        if init is None and "tokenizer" not in _explicit_fields(layers, "data"):
            fields = _merge_with_teacher(config, start, layers)
    fields["model"] = _fit_to_task(task, fields["model"], _explicit_fields(layers, "model"))
    if "source" not in fields["data"]:
        example = f"data.source={load_recipes().tasks[task].source}"
        raise UsageError(f"{preset or task} needs data.source: where its examples are, for instance {example}")
    return RunConfig(
        task=cast(Task, task),
        data=build_section("data", DataConfig, fields["data"]),
        model=build_section("model", ModelConfig, fields["model"]),
        train=build_section("train", TrainConfig, fields["train"]),
    )


def _fit_to_task(task: str, model: dict[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The fields of a model preset (BERT, GPT-2) with the architecture and head that the task trains.

    UsageError if that would change a field in ``typed``, or if the model reads another source or is recurrent.
    """
    known = TASK_MODELS[task]
    if _task_fields(model) in known:
        return model
    architecture, _, head = known[0]
    fitted = {**model, "architecture": architecture, "head": head}
    changed = {name for name in fitted if fitted[name] != model.get(name)}
    is_recurrent = model.get("architecture") == "recurrent"
    if changed & set(typed) or is_recurrent or _task_fields(fitted) not in known:
        raise UsageError(unfit_model(task, model))
    return fitted


def unfit_model(task: str, model: Mapping[str, Any]) -> str:
    """The error message for a model that the task cannot train; it names presets that fit."""
    known = TASK_MODELS[task]
    rows = [row for row in zip(_TASK_FIELDS, known[0], _task_fields(model), strict=True) if row[1] != row[2]]
    needs, has = (", ".join(f"model.{row[0]}={row[i]}" for row in rows) for i in (1, 2))
    presets = [name for name, fields in load_presets().items() if _task_fields(fields) in known]
    return f"the task {task} needs {needs}, but this model has {has}; one that fits is model={' or '.join(presets[:3])}"


def _task_fields(model: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(model.get(name, ModelConfig.model_fields[name].default) for name in _TASK_FIELDS)


def _merge_sections(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {section: _merge_layers([layer.get(section, {}) for layer in layers]) for section in SECTIONS}


def _merge_with_initial_model(
    init: str, task: str, start: Recipe, layers: Sequence[Mapping[str, Any]], tune: bool
) -> dict[str, dict[str, Any]]:
    """The sections with model and tokenizers of ``train.init`` in place of the recipe's, overridden by ``layers``."""
    from .training.initial_model import TOKEN_FIELDS, recipe_from_initial_model

    initial = recipe_from_initial_model(init, task, _merge_sections([start]), tune=tune)
    fields, explicit = _merge_sections([initial, *layers]), _merge_sections(layers)
    if tune and explicit["train"].get("lora") is not None and "lr" not in explicit["train"]:
        fields["train"]["lr"] *= 10  # low-rank additions start at zero
    if "tokenizer" not in explicit["data"]:  # a model preset does not change the vocabulary of train.init
        typed = _explicit_fields(layers, "model")
        fields["model"] |= {name: initial["model"][name] for name in TOKEN_FIELDS if name not in typed}
    return fields


def _teacher_config(path: str, task: str) -> ModelConfig:
    from .training.initial_model import read_initial_model

    config = read_initial_model(path)[0]
    if (config.architecture, config.source, config.head) not in TASK_MODELS[task]:
        has = f"architecture={config.architecture}, source={config.source} and head={config.head}"
        raise UsageError(f"train.teacher={path} has {has}, so it is not a model for the task {task}")
    return config


def _merge_with_teacher(
    teacher: ModelConfig, start: Recipe, layers: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The sections of a student, with the tokens of its teacher in place of the recipe's."""
    from .training.initial_model import TOKEN_FIELDS

    data = {name: value for name, value in start.get("data", {}).items() if name != "tokenizer"}
    fields = _merge_sections([{**start, "data": data}, *layers])
    typed = _explicit_fields(layers, "model")
    fields["model"] |= {name: getattr(teacher, name) for name in TOKEN_FIELDS if name not in typed}
    return fields


def _explicit_fields(layers: Sequence[Mapping[str, Any]], section: str) -> set[str]:
    """The fields of a section that a config file, an argument or an override sets."""
    return {name for layer in layers for name in layer.get(section, {})}


def _fields_of(section: Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """The fields of a section; of a Config all of them, so that none of the recipe's remain."""
    if isinstance(section, Config):
        return {name: getattr(section, name) for name in type(section).model_fields}
    return dict(section or {})


def _data_fields(data: str | Path | Sequence[str | Path] | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    fields = _fields_of(data) if data is None or isinstance(data, Mapping | Config) else {"source": data}
    return fields | {name: join_paths(fields[name]) for name in ("source", "valid") if name in fields}


def _merge_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the fields of one section; later layers win, and a model preset discards all fields before it."""
    fields: dict[str, Any] = {}
    for layer in layers:
        if (name := layer.get(PRESET)) is not None:
            presets = load_presets()
            if name not in presets:
                raise UsageError(f"model={name}: there is no such model{did_you_mean(name, presets)}")
            fields = dict(presets[name])
        fields |= {key: value for key, value in layer.items() if key != PRESET}
    return fields


def recipes_to_dict() -> dict[str, Any]:
    """Tasks and recipes for JSON."""
    tasks, recipes = load_recipes()
    return {"tasks": {task: start.recipe for task, start in tasks.items()}, "presets": _plain(recipes)}


def _plain(value: Any) -> Any:
    """Convert nested Configs to dictionaries."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, Config) else value


def recipes_to_text() -> str:
    """Tasks and recipes as text, with fields as they are typed on the command line."""
    tasks, recipes = load_recipes()
    lines = ["tasks, and the preset each starts from"]
    lines += [f"  {task:16} {start.recipe}" for task, start in tasks.items()]
    lines.append("presets: regard train TASK --preset NAME")
    for name, content in recipes.items():
        lines.append(f"  {name}: {content['task']}")
        for section in SECTIONS:
            if fields := content.get(section):
                words = (
                    f"{section}={value}" if key == PRESET else f"{section}.{key}={format_value(value)}"
                    for key, value in fields.items()
                )
                lines.append(f"      {' '.join(words)}")
    lines.append("models: regard train TASK model=NAME")
    return "\n".join([*lines, f"  {', '.join(load_presets())}"])


if TYPE_CHECKING:
    RECIPES: dict[str, Recipe]
else:

    def __getattr__(name: str) -> Any:
        if name == "RECIPES":  # read on first access
            return load_recipes().recipes
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
