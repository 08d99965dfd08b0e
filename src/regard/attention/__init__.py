"""Attention: ``attend``, masks and biases as functions of position, and maps whose weights are never stored.

Shapes: B batch, H query heads, G key/value heads, T queries, S keys, D head width, M model width. Heads are
(B, H, T, D). A mask is True where a query may attend.
"""

from . import backends, biases, cache, gradients, masks, readings
from .attend import attend, explain
from .attention_map import AttentionMap
from .backends import Attended
from .biases import XLRelative
from .frame import Frame
from .linear_attention import Linear, LinearState, Performer
from .mechanisms import Additive, Concat, Dot, General, Mechanism
from .multihead import MultiHeadAttention
from .reference import Steps
from .taps import Recorder, record, tap
from .token_mixing import Fourier, Linformer, approximation_error, fourier_mix

# fmt: off
__all__ = [
    "Additive", "Attended", "AttentionMap", "Concat", "Dot", "Fourier", "Frame", "General", "Linear", "LinearState",
    "Linformer", "Mechanism", "MultiHeadAttention", "Performer", "Recorder", "Steps", "XLRelative",
    "approximation_error", "attend", "backends", "biases", "cache", "explain", "fourier_mix", "gradients", "masks",
    "readings", "record", "tap",
]
# fmt: on
