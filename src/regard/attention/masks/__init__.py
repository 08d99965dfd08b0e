"""Masks: predicates over positions, the sparse patterns, and the plan of blocks that follows from them."""

from .basic import causal, document, everything, from_dense, keep, packed, padding, prefix, window
from .mask import Mask
from .plan import BlockPlan, plan
from .sparse import bigbird, blocks, dilated, fixed, global_tokens, grid_windows, random_blocks, strided

__all__ = [
    "BlockPlan",
    "Mask",
    "bigbird",
    "blocks",
    "causal",
    "dilated",
    "document",
    "everything",
    "fixed",
    "from_dense",
    "global_tokens",
    "grid_windows",
    "keep",
    "packed",
    "padding",
    "plan",
    "prefix",
    "random_blocks",
    "strided",
    "window",
]
