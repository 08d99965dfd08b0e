"""regard: build a Transformer, train it, see inside it while it runs at full speed, and ship it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attention import AttentionMap, Frame, MultiHeadAttention, attend, explain, record
    from .config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from .io import load
    from .models import Model
    from .models.build import build
    from .presets import PRESETS, preset
    from .recipes import RECIPES
    from .training import evaluate, resume, train

# Each name's room, imported when the name is first asked for: `import regard` stays light.
_ROOMS = {
    "AttentionMap": "attention",
    "Frame": "attention",
    "Model": "models",
    "DataConfig": "config",
    "ModelConfig": "config",
    "RECIPES": "recipes",
    "RunConfig": "config",
    "TrainConfig": "config",
    "evaluate": "training",
    "resume": "training",
    "train": "training",
    "MultiHeadAttention": "attention",
    "PRESETS": "presets",
    "attend": "attention",
    "build": "models",
    "explain": "attention",
    "load": "io",
    "preset": "presets",
    "record": "attention",
}

__all__ = [
    "PRESETS",
    "RECIPES",
    "AttentionMap",
    "DataConfig",
    "Frame",
    "Model",
    "ModelConfig",
    "MultiHeadAttention",
    "RunConfig",
    "TrainConfig",
    "attend",
    "build",
    "evaluate",
    "explain",
    "load",
    "preset",
    "record",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value = getattr(importlib.import_module(f".{_ROOMS[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
