"""From text and images to batches: corpora that stand on every machine and those in files, tokenizers, batching."""

from __future__ import annotations

from .corpora import CORPORA, open_corpus

__all__ = ["CORPORA", "open_corpus"]
