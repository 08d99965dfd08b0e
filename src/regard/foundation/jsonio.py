"""JSON that is exactly JSON: no duplicate names, no NaN, no infinity, neither read nor written."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ..errors import BadModelFile

__all__ = ["parse_json", "to_json", "to_jsonable"]


def parse_json(text: bytes, name: str | Path) -> dict[str, Any]:
    """A JSON object from the bytes of the file ``name``.

    Stricter than ``json.loads``: a repeated key, NaN, infinity or a top level other than an object is refused.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise ValueError(f"it names {twice!r} twice")
        return out

    def refuse_constant(word: str) -> None:
        raise ValueError(f"{word} is not a number in JSON")

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{name} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadModelFile(f"{name} holds a {type(document).__name__}, where an object belongs")
    return document


def to_json(document: Mapping[str, Any]) -> bytes:
    """An indented JSON document in UTF-8, ending with a newline; raises ValueError on NaN and infinity."""
    return (json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode()


def to_jsonable(value: Any) -> Any:
    """A value as JSON can express it: arrays as lists, records as objects, None for numbers that are not finite."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(name): to_jsonable(item) for name, item in value.items()}
        case tuple() if hasattr(value, "_asdict"):
            return to_jsonable(value._asdict())
        case Sequence() | Set():
            return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, an array or one of their scalars
        return to_jsonable(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")
