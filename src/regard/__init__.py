"""regard: build a Transformer, train it, look inside it while it runs at full speed, and ship it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attention import AttentionMap, Frame, MultiHeadAttention, attend, explain, record
    from .config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from .course import check
    from .experiments import ablate
    from .experiments.cost import cost
    from .experiments.cost_report import Cost
    from .export.export_model import export
    from .generation.fused_answers import answer
    from .generation.tag_words import tag
    from .generation.text_embeddings import embed
    from .generation.text_generation import caption, classify, generate, stream, translate
    from .generation.zero_shot import zero_shot
    from .io import load
    from .lens.activations import ActivationRecord, capture
    from .lens.look import Look, look
    from .models import Model
    from .models.build import build, register_model
    from .presets import PRESETS, preset
    from .recipes import RECIPES
    from .training import back_translate, distill, evaluate, resume, train

# Public names by module. They are imported on first access, so that `import regard` stays fast.
_EXPORTS = {
    "attention": "AttentionMap Frame MultiHeadAttention attend explain record",
    "config": "DataConfig ModelConfig RunConfig TrainConfig",
    "course": "check",
    "experiments": "ablate",
    "experiments.cost": "cost",
    "experiments.cost_report": "Cost",
    "export": "export",
    "generation": "answer caption classify embed generate stream tag translate",
    "generation.zero_shot": "zero_shot",
    "io": "load",
    "lens": "Look look",
    "lens.activations": "ActivationRecord capture",
    "models": "Model build register_model",
    "presets": "PRESETS preset",
    "recipes": "RECIPES",
    "training": "back_translate distill evaluate resume train",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

# fmt: off
__all__ = [
    "PRESETS", "RECIPES", "ActivationRecord", "AttentionMap", "Cost", "DataConfig", "Frame", "Look", "Model",
    "ModelConfig", "MultiHeadAttention", "RunConfig", "TrainConfig", "ablate", "answer", "attend", "back_translate",
    "build", "caption", "capture", "check", "classify", "cost", "distill", "embed", "evaluate", "explain", "export",
    "generate", "load", "look", "preset", "record", "register_model", "resume", "stream", "tag", "train", "translate",
    "zero_shot",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    value = module if name == _MODULE_OF[name] else getattr(module, name)  # regard.export is a callable module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
