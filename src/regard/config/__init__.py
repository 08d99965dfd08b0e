"""What a model, its data and its training are, as checked data: every choice a field, one sentence where one is wrong.

No torch here: a config can be read, checked and shown without loading anything.
"""

from .base import Config
from .data import DataConfig, Format, Kind
from .mixers import MIXERS, Mixer
from .model import (
    ACTIVATIONS,
    Architecture,
    Backend,
    Head,
    ModelConfig,
    Positions,
    RopeScalingConfig,
    Source,
    Sparsity,
)
from .run import RunConfig, Task, TrainConfig

__all__ = [
    "ACTIVATIONS",
    "Architecture",
    "Backend",
    "Config",
    "DataConfig",
    "Format",
    "Head",
    "Kind",
    "MIXERS",
    "Mixer",
    "ModelConfig",
    "Positions",
    "RopeScalingConfig",
    "RunConfig",
    "Source",
    "Sparsity",
    "Task",
    "TrainConfig",
]
