"""The lens: from taps to pictures. ``look`` at a text or an image, and read any attention weight of any head."""

from .labels import Label
from .look import Look, Next, look
from .view import Looks, View

__all__ = ["Label", "Look", "Looks", "Next", "View", "look"]
