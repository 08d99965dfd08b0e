"""From a config, or a preset's name, to a model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import ModelConfig
from ..presets import preset
from .base_model import Model
from .recurrent import Recurrent
from .transformer import Decoder, Encoder, EncoderDecoder

ModelOrPath = Model | str | Path  # a model, or the directory of one

_MODELS = {"encoder": Encoder, "decoder": Decoder, "encoder-decoder": EncoderDecoder, "recurrent": Recurrent}


def build(model: str | ModelConfig, *, device: torch.device | str | None = None, **fields: Any) -> Model:
    """A model from a preset's name or a ModelConfig, any field overridden. ``device="meta"`` allocates nothing."""
    config = preset(model, **fields) if isinstance(model, str) else model.with_(**fields) if fields else model
    place = torch.device(device) if device is not None else torch.get_default_device()
    with place, _NoInitialisation() if place.type == "meta" else nullcontext():
        return _MODELS[config.architecture](config)


class _NoInitialisation(TorchFunctionMode):
    """Leaves out ``torch.nn.init``: on the meta device it costs milliseconds for every tensor and sets nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def open_model(model: ModelOrPath, device: torch.device | str | None = None) -> Model:
    """The model itself, or the one loaded from a path."""
    if not isinstance(model, str | Path):
        return model
    from ..io import load

    return load(model, device=device)
