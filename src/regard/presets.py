"""Model presets: well-known models with the sizes of the originals. The table is presets.yaml."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .config import ModelConfig
from .config.config_file import load_package_data
from .config.overrides import check_fields
from .foundation.checks import did_you_mean


@cache
def load_presets() -> dict[str, dict[str, Any]]:
    """Fields of ModelConfig by preset; cached."""
    return {
        name: check_fields("model", fields) for name, fields in load_package_data("presets.yaml")["presets"].items()
    }


def preset(name: str, **fields: Any) -> ModelConfig:
    """The config of a preset, with ``fields`` overridden."""
    presets = load_presets()
    if name not in presets:
        hint = did_you_mean(name, presets, dotted=False, quoted=True)
        raise ValueError(f"there is no preset {name!r}{hint} (all: {', '.join(presets)})")
    return ModelConfig(**{**presets[name], **fields})


if TYPE_CHECKING:
    PRESETS: dict[str, dict[str, Any]]
else:

    def __getattr__(name: str) -> Any:
        if name == "PRESETS":  # read on first access
            return load_presets()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
