"""Recurrent encoder-decoders with attention (being written)."""

from __future__ import annotations

from .model import Model


class Recurrent(Model):
    """Placeholder while it is being written."""
