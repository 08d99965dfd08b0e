"""From a model to an artefact: ONNX, CTranslate2, int8 and Hugging Face directories, each with its certificate.

``regard.export(model, kind, path)`` is ``regard.export.export_model``: the room can be called.
"""

import sys
from types import ModuleType
from typing import Any

from .certificate import BoundBroken, Bounds, certificate_text, certify
from .engines import Ct2Engine, Engine, OnnxEngine, TorchEngine, engines_in, open_engine
from .export_model import Kind, export
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
    "certificate_text",
]


class _Room(ModuleType):
    """This module as a function too: a function ``regard.export`` would be hidden by the room of that name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return export(*args, **options)


sys.modules[__name__].__class__ = _Room
