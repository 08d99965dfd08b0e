"""Encoder-decoders of before the Transformer: LSTM and GRU with Bahdanau's and Luong's attention."""

from .model import Recurrent, RecurrentMemory

__all__ = ["Recurrent", "RecurrentMemory"]
