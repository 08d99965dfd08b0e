"""regard: build a Transformer, train it, see inside it while it runs at full speed, and ship it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attention import AttentionMap, Frame, MultiHeadAttention, attend, explain, record
    from .config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from .experiments import ablate
    from .experiments.cost import cost
    from .experiments.cost_report import Cost
    from .export.export_model import export
    from .generation.tag_words import tag
    from .generation.text_generation import caption, classify, generate, stream, translate
    from .io import load
    from .lens.activations import ActivationRecord, capture
    from .lens.look import Look, look
    from .models import Model
    from .models.build import build
    from .presets import PRESETS, preset
    from .recipes import RECIPES
    from .training import back_translate, distill, evaluate, resume, train

# The names of each module, imported when the name is first asked for: `import regard` stays light.
_EXPORTS = {
    "attention": "AttentionMap Frame MultiHeadAttention attend explain record",
    "config": "DataConfig ModelConfig RunConfig TrainConfig",
    "experiments": "ablate",
    "experiments.cost": "cost",
    "experiments.cost_report": "Cost",
    "export": "export",
    "generation": "caption classify generate stream tag translate",
    "io": "load",
    "lens": "Look look",
    "lens.activations": "ActivationRecord capture",
    "models": "Model build",
    "presets": "PRESETS preset",
    "recipes": "RECIPES",
    "training": "back_translate distill evaluate resume train",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "PRESETS",
    "RECIPES",
    "ActivationRecord",
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
    "back_translate",
    "build",
    "caption",
    "capture",
    "classify",
    "cost",
    "distill",
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
    "tag",
    "train",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    value = module if name == _MODULE_OF[name] else getattr(module, name)  # regard.export is a module that is callable
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
