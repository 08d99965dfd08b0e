"""Generation: from logits to tokens, by greedy or beam search or by drawing, for every model that writes text.

``generate``, ``translate``, ``caption``, ``classify`` and ``stream`` take what people have: text, images, or tokens.
"""

from .beam import Search
from .captions import caption
from .classes import Classified, classify
from .config import PAPER, GenerateConfig
from .engine import Engine, SourceEngine, TextEngine, engine_for
from .generate import Generated, Hypothesis, stream_tokens
from .pieces import text_pieces
from .speculative import Drafted
from .stop import StopStrings
from .stream import stream
from .texts import Text, Texts, check_texts, generate, translate
from .walk import walk

__all__ = [
    "PAPER",
    "Classified",
    "Drafted",
    "Engine",
    "GenerateConfig",
    "Generated",
    "Hypothesis",
    "Search",
    "SourceEngine",
    "StopStrings",
    "Text",
    "TextEngine",
    "Texts",
    "caption",
    "check_texts",
    "classify",
    "engine_for",
    "generate",
    "stream",
    "stream_tokens",
    "text_pieces",
    "translate",
    "walk",
]
