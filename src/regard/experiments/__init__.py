"""From configs to tables: what things cost, measured."""

from .ablating import ablate

__all__ = ["ablate"]
