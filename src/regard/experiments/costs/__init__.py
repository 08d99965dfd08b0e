"""What a model costs: parameters, operations, memory, cache and time, from its config alone."""

from .finding import Cost, cost

__all__ = ["Cost", "cost"]
