"""Models: stacks of layers between embeddings and a head, built from one config."""

from .base_model import Model
from .block import Block, Memory, Stack
from .build import ModelOrPath, build, import_model_class, open_model, register_model
from .recurrent import Recurrent
from .transformer import Decoder, Encoder, EncoderDecoder
from .two_tower import TwoTower, ZeroShotClassifier

# fmt: off
__all__ = [
    "Block", "Decoder", "Encoder", "EncoderDecoder", "Memory", "Model", "ModelOrPath", "Recurrent", "Stack", "TwoTower",
    "ZeroShotClassifier", "build", "import_model_class", "open_model", "register_model",
]
# fmt: on
