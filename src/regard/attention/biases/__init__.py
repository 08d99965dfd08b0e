"""Position biases: by distance (ALiBi, T5), by content and distance (Transformer-XL), or any dense tensor."""

from .bias import Bias, DenseBias, Sum
from .content import XLRelative
from .distance import Alibi, RelativeBias, T5Bias, alibi_slopes

__all__ = ["Alibi", "Bias", "DenseBias", "RelativeBias", "Sum", "T5Bias", "XLRelative", "alibi_slopes"]
