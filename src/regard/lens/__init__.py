"""The lens: from taps to pictures. ``look`` at a text or an image, and read any attention weight of any head."""

from .labels import Label
from .look import Look, Next, look
from .merged_view import Looks, MergedView

__all__ = ["Label", "Look", "Looks", "Next", "MergedView", "look"]
