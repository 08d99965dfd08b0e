"""From a model to an artefact: ONNX, CTranslate2, int8 and Hugging Face directories, each with its certificate."""

from .certificate import BoundBroken, Bounds, certify, table
from .engines import Ct2Engine, Engine, OnnxEngine, TorchEngine, engines_in, open_engine
from .export import Kind, export
from .quantise import is_quantised, open_int8, quantise

__all__ = [
    "BoundBroken",
    "Bounds",
    "Ct2Engine",
    "Engine",
    "Kind",
    "OnnxEngine",
    "TorchEngine",
    "certify",
    "engines_in",
    "export",
    "is_quantised",
    "open_engine",
    "open_int8",
    "quantise",
    "table",
]
