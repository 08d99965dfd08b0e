"""A family: how one kind of foreign config and its tensors become ours, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..layers import ACTIVATIONS, OTHER_NAMES
from .steps import Step


class Foreign:
    """A foreign config.json, read field by field. A value we cannot honour is refused by name, never passed over."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.architecture: str = (fields.get("architectures") or [""])[0]
        self.model_type: str = fields.get("model_type", "")

    def get(self, name: str, default: Any = None) -> Any:
        """A field; a missing one and null both mean the default."""
        value = self.fields.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            raise ValueError(f"config.json of model_type {self.model_type!r} has no {name!r}")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Refuse any value but these; the first is also what a missing field means."""
        value = self.get(name, supported[0])
        if value not in supported:
            can = " or ".join(repr(x) for x in supported)
            raise ValueError(f"config.json has {name}={value!r}; regard supports {can} for {self.model_type}")

    def token_id(self, name: str) -> int | None:
        """A token id; of several that may end a text, the first."""
        value = self.get(name)
        return value[0] if isinstance(value, list) and value else value

    def activation(self, name: str, default: str) -> str:
        """An activation under its own name here; never a gated one, for whether there is a gate the family decides."""
        value = self.get(name, default)
        ours = OTHER_NAMES.get(value, value)
        if ours not in ACTIVATIONS:
            raise ValueError(f"config.json has {name}={value!r}; regard has {', '.join(ACTIVATIONS)}")
        return ours

    def head(self, heads: dict[str, Any]) -> Any:
        """Our head for their architecture's class; ``heads`` maps their class names."""
        if self.architecture and self.architecture not in heads:
            raise ValueError(f"config.json has architecture {self.architecture!r}; regard reads {', '.join(heads)}")
        return heads.get(self.architecture, next(iter(heads.values())))


@dataclass(frozen=True)
class Family:
    """One family of the hub.

    ``read`` and ``write`` translate configs, ``steps`` tensors. A config of ours has a twin in a family exactly when
    writing and reading it again gives it back; nothing else decides what can be saved as what.
    """

    model_types: tuple[str, ...]
    read: Callable[[Foreign], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    steps: Callable[[ModelConfig], list[Step]]


def from_our_activation(name: str) -> str:
    """Our name of an activation as transformers spells it."""
    return "gelu_new" if name == "gelu_tanh" else name
