"""Named training runs, as data: a task, its data, its model and how it is trained.

In a recipe's model, ``preset`` names a row of ``presets.PRESETS``, whose fields the others change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from .config import Config, DataConfig, ModelConfig, RunConfig, Task, TrainConfig
from .config.config_file import load_config_file
from .config.overrides import PRESET, SECTIONS, build_section, check_fields, format_value, parse_overrides
from .errors import UsageError
from .foundation.suggestions import did_you_mean
from .presets import PRESETS

Recipe = dict[str, Any]
TASKS: tuple[str, ...] = get_args(Task)

# What learns fastest in our trials, on one processor or one GPU: pre-norm RMSNorm, rotary positions, squared ReLU,
# normalised queries and keys, Muon for the matrices. The paper's own model is model=transformer-base.
_MODERN: dict[str, Any] = {
    **{"positions": "rope", "norm": "rms", "norm_place": "pre", "activation": "relu2", "qk_norm": True},
    **{"qkv_bias": False, "out_bias": False, "ff_bias": False, "init_std": 0.02},
}
_DECODER: dict[str, Any] = {**_MODERN, "architecture": "decoder", "head": "lm"}
_ENCODER: dict[str, Any] = {**_MODERN, "architecture": "encoder", "norm": "layer", "activation": "gelu"}
_TRANSLATOR: dict[str, Any] = {
    **{"architecture": "encoder-decoder", "positions": "rope", "norm": "rms", "norm_place": "pre"},
    **{"activation": "relu", "scale_embeddings": True},
}
_VIT: dict[str, Any] = {
    **{"architecture": "encoder", "source": "image", "head": "classify", "positions": "learned", "norm_place": "pre"},
    **{"activation": "gelu", "init_std": 0.02, "pooling": "mean"},
}
_MUON: dict[str, Any] = {"optimiser": "muon", "muon_lr": 0.02, "lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}

RECIPES: dict[str, Recipe] = {
    # On what stands on every machine, on two processor cores.
    "en-ko": {
        "task": "translate",
        "data": {
            **{"source": "en-ko", "tokenizer": "bpe", "vocab_size": 2000, "joint_vocab": False, "max_len": 64},
            **{"epoch_examples": 60_000},
        },
        "model": {**_TRANSLATOR, "d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 512, "max_len": 64},
        "train": {
            **{**_MUON, "muon_lr": 0.03, "lr": 4e-3, "steps": 1700, "batch_tokens": 1024, "warmup": 100},
            **{"eval_every": 850, "save_every": 850},
        },
    },
    "stdlib": {
        "task": "lm",
        "data": {"source": "stdlib", "tokenizer": "bpe", "vocab_size": 4096, "max_len": 256},
        "model": {**_DECODER, "d_model": 192, "n_layers": 4, "n_heads": 6, "d_ff": 768, "max_len": 256},
        "train": {**_MUON, "steps": 1000, "batch_tokens": 4096, "warmup": 50},
    },
    "stdlib-masked": {
        "task": "mlm",
        "data": {"source": "stdlib", "tokenizer": "bpe", "vocab_size": 4096, "max_len": 128},
        "model": {
            **{**_ENCODER, "head": "masked-lm", "head_transform": True, "head_bias": True},
            **{"d_model": 192, "n_layers": 4, "n_heads": 6, "d_ff": 768, "max_len": 128},
        },
        "train": {**_MUON, "steps": 2000, "batch_tokens": 4096, "warmup": 100},
    },
    "shapes": {
        "task": "caption",
        "data": {"source": "shapes", "tokenizer": "words", "max_len": 32},
        "model": {
            **{PRESET: "captioner", "image_size": 64, "patch_size": 8, "max_len": 32, "d_model": 128, "d_ff": 512},
            **{"dropout": 0.0, "embedding_dropout": 0.0},
        },
        "train": {**_MUON, "muon_lr": 0.03, "lr": 4e-3, "steps": 4500, "batch_tokens": 2048, "warmup": 100},
    },
    # A file of one's own.
    "labels": {
        "task": "classify",
        "data": {"tokenizer": "bpe", "vocab_size": 8000, "max_len": 128, "hide_rate": 0.1},
        "model": {
            **{**_ENCODER, "head": "classify", "pooling": "mean", "max_len": 128},
            **{"d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 512},
            **{"dropout": 0.2, "embedding_dropout": 0.2, "classifier_dropout": 0.1},
        },
        "train": {"steps": 1000, "batch_tokens": 8192, "lr": 1e-3, "weight_decay": 0.1, "label_smoothing": 0.1},
    },
    "images": {
        "task": "classify-images",
        "data": {"shift": 2},
        "model": {PRESET: "vit-tiny"},
        "train": {**_MUON, "steps": 2000, "batch_tokens": 12544, "weight_decay": 0.05},
    },
    # Data sets people measure with: data.source says where they lie. What these reach stands in docs/results.md.
    "shakespeare-small": {
        "task": "lm",
        "data": {"source": "shakespeare/input.txt", "tokenizer": "chars", "valid_fraction": 0.1, "max_len": 64},
        "model": {**_DECODER, "d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 512, "max_len": 64},
        "train": {**_MUON, "steps": 1200, "batch_tokens": 2048, "warmup": 20, "eval_every": 0, "save_every": 0},
    },
    "shakespeare": {
        "task": "lm",
        "data": {"source": "shakespeare/input.txt", "tokenizer": "chars", "valid_fraction": 0.1, "max_len": 512},
        "model": {
            **{**_DECODER, "d_model": 384, "n_layers": 6, "n_heads": 6, "d_ff": 1536, "max_len": 512},
            **{"dropout": 0.3, "attention_dropout": 0.2, "embedding_dropout": 0.1},
        },
        "train": {
            **{**_MUON, "steps": 1400, "batch_tokens": 16384, "warmup": 50, "ema": 0.995},
            **{"eval_every": 700, "save_every": 700, "samples": 1},
        },
    },
    "wikitext-2": {
        "task": "lm",
        "data": {"source": "wikitext-2/train.txt", "valid": "wikitext-2/valid.txt", "vocab_size": 8000, "max_len": 256},
        "model": {
            **{**_DECODER, "d_model": 384, "n_layers": 6, "n_heads": 6, "d_ff": 1536, "max_len": 256},
            **{"dropout": 0.3, "attention_dropout": 0.2, "embedding_dropout": 0.2},
        },
        "train": {
            **{**_MUON, "steps": 2500, "batch_tokens": 16384, "warmup": 50, "ema": 0.995},
            **{"eval_every": 500, "save_every": 500},
        },
    },
    "multi30k": {
        "task": "translate",
        "data": {"source": "multi30k", "columns": ("en", "de"), "vocab_size": 8000, "max_len": 100},
        "model": {
            **{**_TRANSLATOR, "d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 1024, "max_len": 128},
            **{"dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.1, "activation_dropout": 0.1},
        },
        "train": {
            **{"optimiser": "muon", "muon_lr": 0.012, "lr": 1.2e-3, "weight_decay": 0.05, "warmup": 150},
            **{"steps": 1700, "batch_tokens": 16384, "label_smoothing": 0.1, "ema": 0.997, "beam": 5},
            **{"eval_every": 850, "save_every": 850},
        },
    },
    "software-en-ko": {
        "task": "translate",
        "data": {"source": "software-en-ko", "columns": ("en", "ko"), "vocab_size": 16000, "max_len": 100},
        "model": {
            **{**_TRANSLATOR, "d_model": 384, "n_layers": 4, "n_heads": 6, "d_ff": 1536, "max_len": 128},
            **{"dropout": 0.2, "embedding_dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1},
        },
        "train": {
            **{"optimiser": "muon", "muon_lr": 0.01, "lr": 1e-3, "weight_decay": 0.05, "warmup": 200},
            **{"steps": 3000, "batch_tokens": 16384, "label_smoothing": 0.1, "ema": 0.998, "beam": 5},
            **{"length_penalty": 0.6, "eval_every": 1000, "save_every": 1000},
        },
    },
    "nsmc": {
        "task": "classify",
        "data": {
            **{"source": "nsmc/binary_train.tsv", "columns": ("document", "label"), "valid_rows": 10_000},
            **{"deduplicated": "source", "bad_lines": "skip", "vocab_size": 16000, "max_len": 128, "hide_rate": 0.3},
        },
        "model": {
            **{**_ENCODER, "head": "classify", "pooling": "mean", "qk_norm": False, "max_len": 128},
            **{"qkv_bias": True, "out_bias": True, "ff_bias": True},
            **{"d_model": 256, "n_layers": 3, "n_heads": 4, "d_ff": 1024},
            **{"dropout": 0.2, "embedding_dropout": 0.3, "attention_dropout": 0.1, "classifier_dropout": 0.3},
        },
        "train": {
            **{"optimiser": "muon", "muon_lr": 0.01, "lr": 1e-3, "weight_decay": 0.3, "warmup": 100},
            **{"steps": 900, "batch_tokens": 16384, "label_smoothing": 0.1, "ema": 0.99},
            **{"eval_every": 300, "eval_examples": 10_000, "save_every": 300},
        },
    },
    "fashion-mnist": {
        "task": "classify-images",
        "data": {"source": "fashion-mnist", "shift": 2, "flip": True, "valid_rows": 6000},
        "model": {
            **{**_VIT, "image_size": 28, "patch_size": 4, "n_channels": 1, "dropout": 0.1},
            **{"d_model": 128, "n_layers": 6, "n_heads": 4, "d_ff": 256},
        },
        "train": {
            **{"optimiser": "muon", "muon_lr": 0.02, "lr": 3e-3, "weight_decay": 0.1, "warmup": 200},
            **{"steps": 6000, "batch_tokens": 25088, "label_smoothing": 0.1, "ema": 0.998},
            **{"eval_every": 2000, "eval_examples": 6000, "save_every": 2000},
        },
    },
    "flickr8k": {
        "task": "caption",
        "data": {
            **{"source": "flickr8k/train.tsv", "valid": "flickr8k/valid.tsv", "vocab_size": 4000, "max_len": 40},
            **{"shift": 4, "flip": True},
        },
        "model": {
            **{PRESET: "captioner", "image_size": 112, "patch_size": 8, "max_len": 64, "d_model": 256, "n_layers": 4},
            **{"dropout": 0.2, "embedding_dropout": 0.2},
        },
        "train": {
            **{"optimiser": "muon", "muon_lr": 0.01, "lr": 1e-3, "weight_decay": 0.1, "warmup": 200},
            **{"steps": 2500, "batch_tokens": 25088, "label_smoothing": 0.1, "ema": 0.998, "beam": 3},
            **{"eval_every": 1000, "save_every": 1000},
        },
    },
}
# The same with other files.
RECIPES["nsmc-three"] = {
    **RECIPES["nsmc"],
    "data": {
        **{"source": "nsmc/three_class_train.tsv", "valid": "nsmc/three_class_valid.tsv"},
        **{"columns": ("document", "label"), "bad_lines": "skip"},
        **{"vocab_size": 16000, "max_len": 128, "hide_rate": 0.3},
    },
}
RECIPES["sst"] = {
    **RECIPES["nsmc"],
    "data": {"source": "sst", "vocab_size": 8000, "max_len": 80, "hide_rate": 0.3},
    "train": {**RECIPES["nsmc"]["train"], "steps": 400, "batch_tokens": 8192, "eval_every": 100, "save_every": 100},
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
_SOURCE_EXAMPLES = {
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
        raise UsageError(f"there is no preset {name!r}{did_you_mean(name, RECIPES)} (all: {', '.join(RECIPES)})")
    return RECIPES[name]


def default_recipe(task: str) -> Recipe:
    """What a task starts from."""
    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}{did_you_mean(task, TASKS)} (all: {', '.join(TASKS)})")
    return RECIPES[_DEFAULTS[task]]


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
    """A run: a recipe (``preset``, or the one its task starts from) changed by what else is given.

    Later ones win: the recipe, a config file, the sections as Python values (``data`` may be a source, ``model`` the
    name of a preset), and ``section.field=value`` words. The file may name the task and the preset.
    """
    content = {} if config_file is None else load_config_file(config_file)
    of_file = content.get("task")
    if task is not None and of_file not in (None, task):
        raise UsageError(f"{config_file} is for the task {of_file}, not for {task}")
    preset = preset or content.get(PRESET)
    task = task or of_file or (recipe(preset)["task"] if preset is not None else None)
    if task is None:
        raise UsageError(f"{config_file or 'the run'} names no task: task is one of {', '.join(TASKS)}")
    start = default_recipe(task)
    if preset is not None and (start := recipe(preset))["task"] != task:
        raise UsageError(f"preset={preset} is for the task {start['task']}, not for {task}")
    sections = {"data": _data_fields(data), "model": _model_fields(model), "train": _fields_of(train)}
    values = {section: check_fields(section, fields) for section, fields in sections.items()}
    layers: list[Mapping[str, Any]] = [start, content, values, parse_overrides(overrides)]
    fields = {section: _merge_layers([layer.get(section, {}) for layer in layers]) for section in SECTIONS}
    if "source" not in fields["data"]:
        like = f"data.source={_SOURCE_EXAMPLES[task]}"
        raise UsageError(f"{preset or task} needs data.source: where its examples are, for instance {like}")
    return RunConfig(
        task=cast(Task, task),
        data=build_section("data", DataConfig, fields["data"]),
        model=build_section("model", ModelConfig, fields["model"]),
        train=build_section("train", TrainConfig, fields["train"]),
    )


def _fields_of(section: Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """Of a config every field, so that none of the recipe's shows through."""
    if isinstance(section, Config):
        return {name: getattr(section, name) for name in type(section).model_fields}
    return dict(section or {})


def _data_fields(data: str | Path | Sequence[str | Path] | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    fields = _fields_of(data) if data is None or isinstance(data, Mapping | Config) else {"source": data}
    for name in ("source", "valid"):  # files as people have them in Python
        value = fields.get(name)
        if isinstance(value, Path) or (isinstance(value, Sequence) and not isinstance(value, str)):
            fields[name] = str(value) if isinstance(value, Path) else ",".join(map(str, value))
    return fields


def _model_fields(model: str | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    return {PRESET: model} if isinstance(model, str) else _fields_of(model)


def _merge_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of one section, later layers over earlier ones; a model preset drops what stood before it."""
    fields: dict[str, Any] = {}
    for layer in layers:
        if (name := layer.get(PRESET)) is not None:
            if name not in PRESETS:
                raise UsageError(f"model={name}: there is no such model{did_you_mean(name, PRESETS)}")
            fields = dict(PRESETS[name])
        fields |= {key: value for key, value in layer.items() if key != PRESET}
    return fields


def recipes_to_dict() -> dict[str, Any]:
    """Tasks and recipes as JSON."""
    return {"tasks": {task: _DEFAULTS[task] for task in TASKS}, "presets": RECIPES}


def recipes_to_text() -> str:
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
    return f"{section}={value}" if key == PRESET else f"{section}.{key}={format_value(value)}"
