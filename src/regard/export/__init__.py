"""Export of models as ONNX, CTranslate2, GGUF, int8 and Hugging Face directories, each with a certificate.

The module is callable: ``regard.export(model, kind, path)`` is ``regard.export.export(model, kind, path)``.
"""

import sys
from types import ModuleType
from typing import Any

from .certificate import BoundBroken, Bounds, certificate_text, certify
from .engines import Ct2Engine, Engine, GgufEngine, OnnxEngine, TorchEngine, engines_in, open_engine
from .export_model import Kind, export
from .quantise import is_quantised, open_int8, quantise

# fmt: off
__all__ = [
    "BoundBroken", "Bounds", "Ct2Engine", "Engine", "GgufEngine", "Kind", "OnnxEngine", "TorchEngine", "certify",
    "engines_in", "export", "is_quantised", "open_engine", "open_int8", "quantise", "certificate_text",
]
# fmt: on


class _CallableModule(ModuleType):
    """Makes this submodule callable, because it would shadow a function named ``export`` in ``regard``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return export(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
