"""Configs of models, data and training: every choice is a checked field, and an error is one sentence.

Free of torch: a config can be read, checked and shown without loading it.
"""

from .base import Config
from .data_config import DataConfig, Format, Kind
from .mixers import MIXERS, Mixer
from .model_config import ACTIVATIONS, Architecture, Backend, Head, ModelConfig, Positions, Source, Sparsity
from .rope_scaling import RopeScalingConfig
from .train_config import RunConfig, Task, TrainConfig

# fmt: off
__all__ = [
    "ACTIVATIONS", "Architecture", "Backend", "Config", "DataConfig", "Format", "Head", "Kind", "MIXERS", "Mixer",
    "ModelConfig", "Positions", "RopeScalingConfig", "RunConfig", "Source", "Sparsity", "Task", "TrainConfig",
]
# fmt: on
