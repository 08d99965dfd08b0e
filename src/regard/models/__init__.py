"""Models: stacks of layers between embeddings and a head, built from one config."""

from .base_model import Model
from .block import Block, Memory, Stack
from .build import ModelOrPath, build, open_model
from .recurrent import Recurrent
from .transformer import Decoder, Encoder, EncoderDecoder

# fmt: off
__all__ = [
    "Block", "Decoder", "Encoder", "EncoderDecoder", "Memory", "Model", "ModelOrPath", "Recurrent", "Stack", "build",
    "open_model",
]
# fmt: on
