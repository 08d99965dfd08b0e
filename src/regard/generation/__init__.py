"""Generation: prefill, decode steps, greedy and beam search, sampling and streaming, for every generative model.

``generate``, ``translate``, ``caption``, ``classify``, ``tag``, ``embed`` and ``stream`` take text, images or ids.
"""

from .beam_search import BeamSearch, Hypothesis
from .cached_engine import DecodingEngine
from .fused_answers import Answered, answer
from .generate import Generated, stream_tokens
from .generation_config import PAPER, GenerateConfig
from .sampling import decode_loop
from .speculative import DraftStatistics
from .stop_conditions import StopStrings, text_pieces
from .tag_words import TaggedWords, tag
from .text_embeddings import embed
from .text_generation import (
    Classified,
    GeneratedText,
    GeneratedTexts,
    caption,
    check_texts,
    classify,
    generate,
    stream,
    translate,
)

# fmt: off
__all__ = [
    "PAPER", "Classified", "DraftStatistics", "DecodingEngine", "GenerateConfig", "Generated", "Hypothesis",
    "BeamSearch", "StopStrings", "TaggedWords", "GeneratedText", "GeneratedTexts", "Answered", "answer", "caption",
    "check_texts", "classify", "embed", "generate", "stream", "stream_tokens", "tag", "text_pieces", "translate",
    "decode_loop",
]
# fmt: on
