"""Generation: from logits to tokens, by greedy or beam search or by drawing, for every model that writes text."""

from .beam import Search
from .config import PAPER, GenerateConfig
from .engine import Engine, SourceEngine, TextEngine, engine_for
from .generate import Generated, Hypothesis, generate, stream_tokens
from .stream import stream, text_pieces
from .walk import walk

__all__ = [
    "PAPER",
    "Engine",
    "GenerateConfig",
    "Generated",
    "Hypothesis",
    "Search",
    "SourceEngine",
    "TextEngine",
    "engine_for",
    "generate",
    "stream",
    "stream_tokens",
    "text_pieces",
    "walk",
]
