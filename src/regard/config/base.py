"""The base class of all configs: frozen, checked, with errors of one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..foundation.checks import check_not_negative, check_positive, check_probability, did_you_mean


class Config(BaseModel):
    """Base class of all configs: frozen, without unknown fields; errors suggest the nearest name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problem = error.errors()[0]
            field, message = ".".join(str(part) for part in problem["loc"]), str(problem["msg"])
            message = message.removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                hint = did_you_mean(field, type(self).model_fields, quoted=True)
                message = f"{type(self).__name__} has no field {field!r}{hint}"
            elif problem["type"] == "missing":
                message = f"the field {field!r} is missing"
            elif field:
                message = f"{field}={problem['input']!r}: {message[:1].lower()}{message[1:]}"
            raise ValueError(message) from None

    def with_(self, **changes: Any) -> Self:
        """A copy with the given fields changed, checked again."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def check_at_least(self, least: float, fields: Iterable[str]) -> None:
        """Reject values of these fields below ``least`` (0 or 1); None passes."""
        (check_positive if least else check_not_negative)(**{name: getattr(self, name) for name in fields})

    def check_at_most(self, most: int, fields: Iterable[str]) -> None:
        """Reject values of these fields above ``most``; None passes."""
        for name in fields:
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"{name}={str(value)[:40]} must be at most {most:,}")

    def check_shares(self, fields: Iterable[str]) -> None:
        """Reject values of these fields outside [0, 1); None passes."""
        check_probability(**{name: getattr(self, name) for name in fields})


def join_paths(value: Any) -> Any:
    """A path, or several paths or names → one string with commas; any other value is returned unchanged."""
    if isinstance(value, Path):
        return str(value)
    several = isinstance(value, list | tuple) and all(isinstance(part, str | Path) for part in value)
    return ",".join(map(str, value)) if several else value


def split_commas(value: Any) -> Any:
    """``0.9,0.98`` → ("0.9", "0.98"); a value that is not a string is returned unchanged."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value
