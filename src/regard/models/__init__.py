"""Models: stacks of layers between embeddings and a head, built from one config."""

from .block import Block, Memory
from .build import build
from .model import Model
from .recurrent import Recurrent
from .stack import Stack
from .transformer import Decoder, Encoder, EncoderDecoder

__all__ = ["Block", "Decoder", "Encoder", "EncoderDecoder", "Memory", "Model", "Recurrent", "Stack", "build"]
