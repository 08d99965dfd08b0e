"""regard: build a Transformer, train it, see inside it while it runs at full speed, and ship it."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import export
    from .attention import AttentionMap, Frame, MultiHeadAttention, attend, explain, record
    from .config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from .experiments import ablate
    from .experiments.cost import Cost, cost
    from .generation import caption, classify
    from .generation.text_generation import generate, stream, translate
    from .io import load
    from .lens.look import Look, look
    from .models import Model
    from .models.build import build
    from .presets import PRESETS, preset
    from .recipes import RECIPES
    from .training import evaluate, resume, train

# Each name's room, imported when the name is first asked for: `import regard` stays light.
_ROOMS = {
    "AttentionMap": "attention",
    "Cost": "experiments.cost",
    "Frame": "attention",
    "Look": "lens",
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
    "ablate": "experiments",
    "attend": "attention",
    "build": "models",
    "caption": "generation",
    "classify": "generation",
    "cost": "experiments.cost",
    "explain": "attention",
    "export": "export",
    "generate": "generation",
    "load": "io",
    "look": "lens",
    "preset": "presets",
    "record": "attention",
    "stream": "generation",
    "translate": "generation",
}
# These take a model, or the directory of one.
_OPENING = ("caption", "classify", "generate", "look", "stream", "translate")

__all__ = [
    "PRESETS",
    "RECIPES",
    "AttentionMap",
    "Cost",
    "DataConfig",
    "Frame",
    "Look",
    "Model",
    "ModelConfig",
    "MultiHeadAttention",
    "RunConfig",
    "TrainConfig",
    "ablate",
    "attend",
    "build",
    "caption",
    "classify",
    "cost",
    "evaluate",
    "explain",
    "export",
    "generate",
    "load",
    "look",
    "preset",
    "record",
    "resume",
    "stream",
    "train",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        room = importlib.import_module(f".{_ROOMS[name]}", __name__)
        value = room if name == _ROOMS[name] else getattr(room, name)  # regard.export is its room, which can be called
        value = _opening(value) if name in _OPENING else value
        globals()[name] = value
        return value
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def _opening(run: Any) -> Any:
    """The same function for a model's directory too: where a model is asked for, a path is loaded."""

    def opened(model: Any, device: Any = None) -> Any:
        from .io import load

        return load(model, device=device) if isinstance(model, str | Path) else model

    @functools.wraps(run)
    def with_paths(model: Any, *inputs: Any, **fields: Any) -> Any:
        if "draft" in fields:
            fields["draft"] = opened(fields["draft"])
        return run(opened(model, fields.get("device")), *inputs, **fields)

    return with_paths


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
