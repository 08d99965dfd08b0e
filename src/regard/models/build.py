"""Build a model from a config or a preset's name, or open a saved one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..config import ModelConfig
from ..foundation.plugins import MODELS_VARIABLE, environment_names, import_class, unregistered_class
from ..presets import preset
from .base_model import Model
from .recurrent import Recurrent
from .transformer import Decoder, Encoder, EncoderDecoder
from .two_tower import TwoTower

ModelOrPath = Model | str | Path  # a model, or the directory of one

_MODELS: dict[str, type[Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder-decoder": EncoderDecoder,
    "recurrent": Recurrent,
    "two-tower": TwoTower,
}
_REGISTERED: dict[str, type[Model]] = {}  # by the value of ModelConfig.model_class


def check_has_numbers(model: Model, purpose: str) -> None:
    """Raise ValueError for a model on the meta device: it has no numbers to ``purpose``, such as export."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"the model is on the meta device: it has no numbers to {purpose}")


AnyModel = TypeVar("AnyModel", bound=type[Model])


def register_model(model: AnyModel, *, name: str | None = None) -> AnyModel:
    """Make a subclass of Model known to ``build`` and ``load``, as ``model_class=module:Class`` or another name.

    Used as a decorator or called. A class whose runs are loaded by other programs belongs in a module of its own: the
    name of one defined in a script or notebook begins with ``__main__``.
    """
    _REGISTERED[name or model_class_name(model)] = model
    return model


def import_model_class(name: str) -> type[Model]:
    """Import and register ``module:Class``. This runs the module: never call it for a name read from a file."""
    if name not in _REGISTERED:
        model = import_class("model_class", name, MODELS_VARIABLE)
        if not (isinstance(model, type) and issubclass(model, Model)):
            raise ValueError(f"model_class={name!r} is not a subclass of regard.Model")
        register_model(model, name=name)
    return _REGISTERED[name]


def model_class_name(model: type[Model]) -> str:
    return f"{model.__module__}:{model.__qualname__}"


def model_class(config: ModelConfig) -> type[Model]:
    """The class that ``build`` makes an instance of. Nothing is imported that the environment does not name."""
    if config.model_class is None:
        return _MODELS[config.architecture]
    for name in environment_names(MODELS_VARIABLE):
        import_model_class(name)
    if config.model_class not in _REGISTERED:
        raise unregistered_class("model_class", config.model_class, "regard.models.import_model_class", MODELS_VARIABLE)
    return _REGISTERED[config.model_class]


def build(model: str | ModelConfig, *, device: torch.device | str | None = None, **fields: Any) -> Model:
    """A model from a preset's name or a ModelConfig; ``fields`` override the config's.

    ``device="meta"`` allocates no memory.
    """
    if isinstance(model, str):
        model = preset(model, **fields)
    elif fields:
        model = model.with_(**fields)
    device = torch.device(device) if device is not None else torch.get_default_device()
    with device, _NoInitialisation() if device.type == "meta" else nullcontext():
        return model_class(model)(model)


class _NoInitialisation(TorchFunctionMode):
    """Skips ``torch.nn.init``, which takes milliseconds per tensor on the meta device and has no effect there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def open_model(model: ModelOrPath, device: torch.device | str | None = None) -> Model:
    """The model itself, or the one loaded from its directory."""
    if not isinstance(model, str | Path):
        return model
    from ..io import load

    return load(model, device=device)
