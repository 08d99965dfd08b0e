"""Tokenizers, image processors and class names: everything between user data and a model's tensors."""

from .image_processor import ImageProcessor
from .processor import Processor, read_processor
from .tokenizer import MarianTokenizer, Tokenizer, TokenSpan
from .tokenizer_training import train_tokenizer

# fmt: off
__all__ = [
    "ImageProcessor", "MarianTokenizer", "Processor", "TokenSpan", "Tokenizer", "read_processor", "train_tokenizer",
]
# fmt: on
