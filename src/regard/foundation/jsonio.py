"""Strict JSON: no duplicate keys, NaN or infinite numbers, in reading and in writing; one exception for config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BadModelFile

__all__ = ["JsonObject", "parse_json", "to_json", "to_jsonable", "wrong_values_as_bad_file"]
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it; before, it wrote Infinity, which is not JSON
_MAX_DIGITS = 50  # states of random generators have up to 39


class JsonObject(dict[str, Any]):
    """A JSON object from a file; accessing a missing key raises BadModelFile."""

    file: str | Path = ""

    def __missing__(self, name: str) -> Any:
        raise BadModelFile(f"{self.file} has no {name!r}")


@contextmanager
def wrong_values_as_bad_file(name: str | Path) -> Iterator[None]:
    """A context for reading values of a document: a wrong type or value raises BadModelFile."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise BadModelFile(f"{name} holds an invalid value: {str(error) or type(error).__name__}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, as ``parse_json`` reads it; BadModelFile if the file cannot be read."""
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None


def parse_json(text: bytes, name: str | Path) -> dict[str, Any]:
    """Parse the content of the file ``name`` as a JSON object.

    Stricter than ``json.loads``: a repeated key, NaN, an infinite number, one that is too long or too large, or a top
    level other than an object is a BadModelFile. Only in a config.json, Infinity is read as the object ``INFINITY``.
    """

    def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
        out = JsonObject(pairs)
        out.file = name
        if len(out) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"it names {twice!r} twice")
        return out

    def parse_constant(word: str) -> dict[str, str]:
        if word == "Infinity" and Path(name).name == "config.json":
            return dict(INFINITY)
        raise ValueError(f"{word} is not a number in JSON")

    def parse_int(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise ValueError(f"{digits[:10]}… is a number of {len(digits)} digits")
        return int(digits)

    def parse_float(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{digits[:40]} is too large a number")
        return value

    hooks: dict[str, Any] = {"parse_constant": parse_constant, "parse_int": parse_int, "parse_float": parse_float}
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique, **hooks)
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{name} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadModelFile(f"{name} holds a {type(document).__name__}, where an object belongs")
    return document


def to_json(document: Mapping[str, Any]) -> bytes:
    """An indented JSON document in UTF-8, ending with a newline; raises ValueError on NaN and infinity."""
    options: dict[str, Any] = {"indent": 2, "allow_nan": False}
    try:
        return (json.dumps(document, ensure_ascii=False, **options) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate: how Python represents undecodable bytes in paths
        return (json.dumps(document, **options) + "\n").encode()


def to_jsonable(value: Any) -> Any:
    """Convert a value for JSON: arrays to lists, dataclasses to objects, numbers that are not finite to None."""
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
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
