"""Named training runs, as data: a task, where its examples come from, what learns, and how.

A run is what its task starts from, changed by a recipe where one is named, changed by what is typed. In a recipe's
model, ``preset`` names a row of ``presets.PRESETS`` that takes the place of whatever stood there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from .config import DataConfig, ModelConfig, RunConfig, Task, TrainConfig
from .config.words import PRESET, SECTIONS, UsageError, build_section, nearest, parse_words, written
from .presets import PRESETS

Recipe = dict[str, Any]
TASKS: tuple[str, ...] = get_args(Task)

# A small pre-norm Transformer: trains without a long warm-up, on a laptop's processor.
_SMALL: dict[str, Any] = {
    **{"d_model": 128, "n_layers": 3, "n_heads": 4, "d_ff": 512},
    **{"norm_place": "pre", "activation": "gelu", "dropout": 0.1, "embedding_dropout": 0.1},
}
_DECODER: dict[str, Any] = {
    **{"architecture": "decoder", "head": "lm", "positions": "rope", "norm": "rms", "norm_place": "pre"},
    **{"activation": "swiglu", "qkv_bias": False, "out_bias": False, "ff_bias": False, "init_std": 0.02},
    **{"d_model": 192, "n_layers": 4, "n_heads": 6, "d_ff": 512, "max_len": 256},
}
_ENCODER: dict[str, Any] = {
    **_SMALL,
    **{"architecture": "encoder", "head": "masked-lm", "head_transform": True, "head_bias": True},
    **{"positions": "learned", "d_model": 192, "n_layers": 4, "n_heads": 6, "max_len": 128, "init_std": 0.02},
}

RECIPES: dict[str, Recipe] = {
    "en-ko": {
        "task": "translate",
        "data": {"source": "en-ko", "tokenizer": "words", "max_len": 64},
        "model": {**_SMALL, "architecture": "encoder-decoder", "max_len": 64},
        "train": {"steps": 2000, "batch_tokens": 4096, "lr": 1e-3, "warmup": 200, "label_smoothing": 0.1},
    },
    "stdlib": {
        "task": "lm",
        "data": {"source": "stdlib", "tokenizer": "bpe", "vocab_size": 4096, "max_len": 256},
        "model": _DECODER,
        "train": {"steps": 1000, "batch_tokens": 4096, "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    },
    "stdlib-masked": {
        "task": "mlm",
        "data": {"source": "stdlib", "tokenizer": "bpe", "vocab_size": 4096, "max_len": 128},
        "model": _ENCODER,
        "train": {"steps": 2000, "batch_tokens": 4096, "lr": 1e-3, "weight_decay": 0.01},
    },
    "labels": {
        "task": "classify",
        "data": {"tokenizer": "bpe", "vocab_size": 8000, "max_len": 128},
        "model": {PRESET: "sentiment", "d_model": 128, "n_layers": 3, "d_ff": 512, "max_len": 128},
        "train": {"steps": 1000, "batch_tokens": 8192, "lr": 5e-4, "weight_decay": 0.01},
    },
    "images": {
        "task": "classify-images",
        "data": {"shift": 2},
        "model": {PRESET: "vit-tiny"},
        "train": {"steps": 2000, "batch_tokens": 12544, "lr": 1e-3, "weight_decay": 0.05},
    },
    "shapes": {
        "task": "caption",
        "data": {"source": "shapes", "tokenizer": "words", "max_len": 32},
        "model": {
            **{PRESET: "captioner", "image_size": 64, "patch_size": 8, "max_len": 32},
            **{"d_model": 128, "d_ff": 512, "dropout": 0.0, "embedding_dropout": 0.0},
        },
        "train": {"steps": 2000, "batch_tokens": 4096, "lr": 1e-3, "warmup": 200},
    },
}
_DEFAULTS = {
    "translate": "en-ko",
    "lm": "stdlib",
    "mlm": "stdlib-masked",
    "classify": "labels",
    "classify-images": "images",
    "caption": "shapes",
}
# Shown where a source must be given: what one looks like.
_SOURCE_LIKE = {
    "translate": "pairs.tsv",
    "lm": "text.txt",
    "mlm": "text.txt",
    "classify": "reviews.csv",
    "classify-images": "pictures/",
    "caption": "captions.json",
}


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise UsageError(f"there is no preset {name!r}{nearest(name, RECIPES)} (all: {', '.join(RECIPES)})")
    return RECIPES[name]


def default_recipe(task: str) -> Recipe:
    """What a task starts from."""
    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}{nearest(task, TASKS)} (all: {', '.join(TASKS)})")
    return RECIPES[_DEFAULTS[task]]


def run_config(task: str, words: Sequence[str] = (), *, preset: str | None = None) -> RunConfig:
    """The run that a task, the name of a recipe and typed words ask for."""
    layers: list[Mapping[str, Any]] = [default_recipe(task)]
    if preset is not None:
        if (named := recipe(preset))["task"] != task:
            raise UsageError(f"preset={preset} is for the task {named['task']}, not for {task}")
        layers.append(named)
    layers.append(parse_words(words))
    fields = {section: _merged(layer.get(section, {}) for layer in layers) for section in SECTIONS}
    if "source" not in fields["data"]:
        like = f"data.source={_SOURCE_LIKE[task]}"
        raise UsageError(f"{preset or task} needs data.source: where its examples are, for instance {like}")
    return RunConfig(
        task=cast(Task, task),
        data=build_section("data", DataConfig, fields["data"]),
        model=build_section("model", ModelConfig, fields["model"]),
        train=build_section("train", TrainConfig, fields["train"]),
    )


def _merged(layers: Any) -> dict[str, Any]:
    """Fields of one section, later layers over earlier ones; a model's preset starts afresh."""
    fields: dict[str, Any] = {}
    for layer in layers:
        if (name := layer.get(PRESET)) is not None:
            if name not in PRESETS:
                raise UsageError(f"model={name}: there is no such model{nearest(name, PRESETS)}")
            fields = dict(PRESETS[name])
        fields |= {key: value for key, value in layer.items() if key != PRESET}
    return fields


def recipes_document() -> dict[str, Any]:
    """Tasks and recipes as JSON."""
    return {"tasks": {task: _DEFAULTS[task] for task in TASKS}, "presets": RECIPES}


def recipes_table() -> str:
    """Tasks and recipes for people, fields as they would be typed."""
    lines = ["tasks, and the preset each starts from"]
    lines += [f"  {task:16} {_DEFAULTS[task]}" for task in TASKS]
    lines.append("presets: regard train TASK --preset NAME")
    for name, made in RECIPES.items():
        lines.append(f"  {name}: {made['task']}")
        for section in SECTIONS:
            if fields := made.get(section):
                lines.append("      " + " ".join(_word(section, key, value) for key, value in fields.items()))
    lines.append("models: regard train TASK model=NAME")
    return "\n".join([*lines, f"  {', '.join(PRESETS)}"])


def _word(section: str, key: str, value: Any) -> str:
    return f"{section}={value}" if key == PRESET else f"{section}.{key}={written(value)}"
