"""Interpretability: ``look`` at one text or image and read any attention weight of any head."""

from .labels import Label
from .look import Look, Next, look
from .merged_view import Looks, MergedView

__all__ = ["Label", "Look", "Looks", "Next", "MergedView", "look"]
