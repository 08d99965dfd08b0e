"""The attention family: one door (``attend``), masks and biases as functions of position, maps that are never stored.

Shapes, here and everywhere: B batch, H query heads, G key/value heads, T queries, S keys, D head width, M model width.
Heads are (B, H, T, D). Masks: True = may look.
"""

from . import biases, cache, capabilities, gradients, masks, readings
from .backends import Attended, attend, explain
from .biases import XLRelative
from .frame import Frame
from .linear import Linear, LinearState, Performer
from .map import AttentionMap
from .mixing import Fourier, Linformer, approximation_error, fourier_mix
from .multihead import MultiHeadAttention
from .reference import Steps
from .scores import Additive, Concat, Dot, General, Mechanism
from .taps import Recorder, record, tap

__all__ = [
    "Additive",
    "Attended",
    "AttentionMap",
    "Concat",
    "Dot",
    "Fourier",
    "Frame",
    "General",
    "Linear",
    "LinearState",
    "Linformer",
    "Mechanism",
    "MultiHeadAttention",
    "Performer",
    "Recorder",
    "Steps",
    "XLRelative",
    "approximation_error",
    "attend",
    "biases",
    "cache",
    "capabilities",
    "explain",
    "fourier_mix",
    "gradients",
    "masks",
    "readings",
    "record",
    "tap",
]
