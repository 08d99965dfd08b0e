"""What all configs have in common: checked, frozen, and wrong ones told in one sentence."""

from __future__ import annotations

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """Base of all configs: frozen, no unknown fields, and an error that offers the nearest name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(_one_sentence(error, type(self))) from None

    def with_(self, **changes: Any) -> Self:
        """The same config with some fields changed, checked again."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def _one_sentence(error: ValidationError, config: type[Config]) -> str:
    """The first problem pydantic found, said the way the rest of the library says it."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, config.model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{config.__name__} has no field {field!r}{hint}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message if not field else f"{field}={problem['input']!r}: {message[:1].lower()}{message[1:]}"
