"""The KV cache as an argument: growing, preallocated, ring, cross-attention, and the set of a whole model."""

from .cache import Cache
from .growing import CrossCache, GrowingCache
from .model import ModelCache
from .preallocated import RingCache, StaticCache

__all__ = ["Cache", "CrossCache", "GrowingCache", "ModelCache", "RingCache", "StaticCache"]
