"""From a model to an artefact: ONNX, CTranslate2, GGUF, int8 and Hugging Face directories, each with its certificate.

The module can be called: ``regard.export(model, kind, path)`` is ``regard.export.export(model, kind, path)``.
"""

import sys
from types import ModuleType
from typing import Any

from .certificate import BoundBroken, Bounds, certificate_text, certify
from .engines import Ct2Engine, Engine, GgufEngine, OnnxEngine, TorchEngine, engines_in, open_engine
from .export_model import Kind, export
from .quantise import is_quantised, open_int8, quantise

__all__ = [
    "BoundBroken",
    "Bounds",
    "Ct2Engine",
    "Engine",
    "GgufEngine",
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


class _CallableModule(ModuleType):
    """A function named ``export`` in ``regard`` would be hidden by this submodule, so the submodule is callable."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return export(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
