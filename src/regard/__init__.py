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

# The names of each module, imported when the name is first asked for: `import regard` stays light.
_EXPORTS = {
    "attention": "AttentionMap Frame MultiHeadAttention attend explain record",
    "config": "DataConfig ModelConfig RunConfig TrainConfig",
    "experiments": "ablate",
    "experiments.cost": "Cost cost",
    "export": "export",
    "generation": "caption classify generate stream translate",
    "io": "load",
    "lens": "Look look",
    "models": "Model build",
    "presets": "PRESETS preset",
    "recipes": "RECIPES",
    "training": "evaluate resume train",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_TAKE_A_PATH = ("caption", "classify", "generate", "look", "stream", "translate")  # a model or its directory

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
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    value = module if name == _MODULE_OF[name] else getattr(module, name)  # regard.export is a module that is callable
    globals()[name] = _accept_paths(value) if name in _TAKE_A_PATH else value
    return globals()[name]


def _accept_paths(function: Any) -> Any:
    """The same function for a model's directory too: where a model is expected, a path is loaded."""

    def load_if_path(model: Any, device: Any = None) -> Any:
        from .io import load

        return load(model, device=device) if isinstance(model, str | Path) else model

    @functools.wraps(function)
    def with_paths(model: Any, *inputs: Any, **fields: Any) -> Any:
        if "draft" in fields:
            fields["draft"] = load_if_path(fields["draft"])
        return function(load_if_path(model, fields.get("device")), *inputs, **fields)

    return with_paths


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
