"""From texts and images to batches: embedded corpora, files of examples, splits, encoding and batching."""

from __future__ import annotations

from .corpora import CORPORA, open_corpus

__all__ = ["CORPORA", "open_corpus"]
