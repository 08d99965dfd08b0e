"""The left half of a sweep's table: which fields have a column, by the names the paper gives them, and its values."""

from __future__ import annotations

from typing import Any

from ..config import RunConfig
from ..config.overrides import format_value
from .sweep import settings

__all__ = ["columns_of", "symbol"]

_SYMBOLS = {
    **{"model.n_layers": "N", "model.d_model": "d_model", "model.d_ff": "d_ff", "model.n_heads": "h"},
    **{"d_k": "d_k", "model.dropout": "P_drop", "train.label_smoothing": "ε_ls", "train.steps": "steps"},
}
"""The paper's names; other fields are called by their own."""
_ALWAYS = ("model.n_layers", "model.d_model", "model.d_ff", "model.n_heads")


def columns_of(configs: dict[str, RunConfig], base: str) -> tuple[tuple[str, ...], dict[str, dict[str, str]]]:
    """Which fields have a column, and what stands in it: all values of the base, of others only what is changed."""
    values = {name: _shown_settings(config) for name, config in configs.items()}
    changed = {key for found in values.values() for key in found if found[key] != values[base].get(key)}
    always = _ALWAYS if configs[base].model.architecture != "recurrent" else ("model.n_layers", "model.d_model")
    keys = [key for key in (*_SYMBOLS, *values[base]) if key in changed or key in always]
    columns = tuple(dict.fromkeys(keys))
    shown = {
        name: {
            key: format_value(found.get(key))
            for key in columns
            if name == base or found.get(key) != values[base].get(key)
        }
        for name, found in values.items()
    }
    return columns, shown


def _shown_settings(config: RunConfig) -> dict[str, Any]:
    """The settings with the width of a head as one number, and one dropout where several are the same."""
    found, model = settings(config), config.model
    if model.architecture != "recurrent":
        found["d_k"] = model.head_width
        del found["model.d_head"]
    if model.embedding_dropout == model.dropout:
        found["model.embedding_dropout"] = None
    return found


def symbol(key: str) -> str:
    return _SYMBOLS.get(key, key.rpartition(".")[2])
