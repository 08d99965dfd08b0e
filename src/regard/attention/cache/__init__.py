"""KV caches: growing, preallocated, ring, cross-attention, and the caches of a whole model."""

from .kv_cache import Cache, CrossCache, GrowingCache, ModelCache
from .static_cache import RingCache, StaticCache

__all__ = ["Cache", "CrossCache", "GrowingCache", "ModelCache", "RingCache", "StaticCache"]
