"""Overrides on the command line: ``train.lr=3e-4``, ``train.betas=0.9,0.98``, ``model=gpt2``, ``data=pairs.tsv``.

A value is parsed by the type of its field, never by its form: ``007`` stays text in a text field. Values from Python
and from config files go through the same checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError
from ..foundation.checks import did_you_mean
from ..foundation.plugins import MODELS_VARIABLE, import_class
from .base import Config
from .data_config import DataConfig
from .mixers import register
from .model_config import ModelConfig
from .train_config import RunConfig, TrainConfig

SECTIONS: Mapping[str, type[Config]] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
PRESET = "preset"  # a key among the fields of a model: the name of the preset that they change
SHORT_FORMS = {"data": "source", "model": PRESET}  # data=SOURCE, model=PRESET

C = TypeVar("C", bound=Config)


def field_names(sections: Mapping[str, type[Config]] = SECTIONS) -> list[str]:
    """``data.source``, ``model.d_model``, …"""
    return [f"{section}.{field}" for section, config in sections.items() for field in config.model_fields]


def flat_fields(config: RunConfig) -> dict[str, Any]:
    """The values of a config by the full names of their fields, such as train.lr, after the task."""
    sections = {section: getattr(config, section).model_dump(mode="json") for section in SECTIONS}
    fields = {f"{section}.{name}": value for section in sections for name, value in sections[section].items()}
    return {"task": config.task, **fields}


def parse_overrides(
    words: Sequence[str], *, sections: Mapping[str, type[Config]] = SECTIONS
) -> dict[str, dict[str, Any]]:
    """Words ``section.field=value`` as fields by section, each checked by its type; only sections that occur.

    ``data=SOURCE`` sets data.source, and ``model=NAME`` the key ``preset`` among the model's fields. Words are taken
    to come from the user, so ``model.mixer=module:Class`` and ``model.model_class=module:Class`` are imported. A caller
    that reads words from a file must first check that the class is registered, as sweeps do.
    """
    fields: dict[str, dict[str, Any]] = {}
    words_by_field: dict[tuple[str, str], str] = {}
    for word in words:
        section, field, text = _split_word(word, sections)
        if (section, field) in words_by_field:
            raise UsageError(f"{section}.{field} is given twice: {words_by_field[section, field]} and {word}")
        words_by_field[section, field] = word
        is_preset = field == PRESET and section == "model"
        value = text if is_preset else _parse_value(sections[section].model_fields[field].annotation, text, word)
        if section == "model" and field in ("mixer", "model_class") and ":" in text:
            try:
                register(text) if field == "mixer" else import_class(field, text, MODELS_VARIABLE)
            except ValueError as error:
                raise UsageError(f"{word}: {str(error).removeprefix(f'{field}={text!r}: ')}") from None
        fields.setdefault(section, {})[field] = value
    return fields


def check_fields(section: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values from Python or a config file, checked by the types of their fields; strings are parsed like overrides.

    Imports nothing: a user's ``model.mixer`` or ``model.model_class`` must be registered first.
    """
    config = SECTIONS[section]
    checked: dict[str, Any] = {}
    for field, value in fields.items():
        if section == "model" and field == PRESET:
            checked[field] = str(value)
        elif field not in config.model_fields:
            raise UsageError(f"there is no {section}.{field}{did_you_mean(f'{section}.{field}', field_names())}")
        else:
            text = value if isinstance(value, str) else format_value(value)
            checked[field] = _parse_value(config.model_fields[field].annotation, value, f"{section}.{field}={text}")
    return checked


def build_section(section: str, config: type[C], fields: Mapping[str, Any]) -> C:
    """The config of a section; errors begin with the section's name."""
    try:
        return config(**fields)
    except ValueError as error:
        message = str(error)
        names_field = message.partition("=")[0] in config.model_fields
        raise UsageError(f"{section}.{message}" if names_field else f"{section}: {message}") from None


def _split_word(word: str, sections: Mapping[str, type[Config]]) -> tuple[str, str, str]:
    """Section, field and value of a word."""
    name, equals, text = word.partition("=")
    section, dot, field = name.partition(".")
    known = field_names(sections)
    if not equals or not name:
        if name in known:
            raise UsageError(f"{name} has no value: write {name}=VALUE")
        raise UsageError(f"{word!r} is not of the form section.field=value")
    if section in sections and not dot and section in SHORT_FORMS:
        field = SHORT_FORMS[section]
        if not text:
            raise UsageError(f"{word} has no value")
    elif name not in known:
        if section in SECTIONS and section not in sections:
            raise UsageError(f"{word}: only {' and '.join(f'{x}.*' for x in sections)} can be given here")
        if name in sections:
            raise UsageError(f"{word}: {name} is a section; its fields are written {name}.field=value")
        raise UsageError(f"there is no {name}{did_you_mean(name, known)}")
    return section, field, text


def _parse_value(annotation: Any, value: Any, word: str) -> Any:
    """The value converted to the field's type; errors quote ``word``."""
    raw = _parse_text(annotation, value, word) if isinstance(value, str) else value
    try:
        parsed = TypeAdapter(annotation).validate_python(raw)
    except ValidationError as error:
        raise UsageError(_error_message(annotation, word.partition("=")[2], word, error)) from None
    except ValueError as error:  # raised by a nested config
        raise UsageError(f"{word}: {error}") from None
    for number in parsed if isinstance(parsed, tuple) else (parsed,):
        if isinstance(number, float) and not math.isfinite(number):
            raise UsageError(f"{word} is not a finite number")
    return parsed


def _parse_text(annotation: Any, text: str, word: str) -> Any:
    """The input of pydantic's validation: the text itself, or None, a choice, a tuple, or parsed JSON."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] if is_union else [annotation]
    scalars = [kind for kind in kinds if get_origin(kind) is not tuple]  # "balanced" next to a tuple of numbers
    choices = {format_value(choice): choice for kind in scalars for choice in literal_choices(kind)}
    if is_union and NoneType in get_args(annotation) and text.lower() in ("none", "null"):
        return None
    is_tuple = any(get_origin(kind) is tuple for kind in kinds)
    if not text and not is_tuple:
        raise UsageError(f"{word} has no value")
    if str in kinds:
        return text
    if text[:1] in ("[", "{") or text == "null":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{word}: {text[:80]} is not JSON: {error}") from None
    if is_tuple and text not in choices:
        return tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    return choices.get(text, text)


def literal_choices(annotation: Any) -> Iterator[Any]:
    """The values of a Literal, alone or in a union."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            yield from get_args(kind)


_MESSAGES = {"int": "not a whole number", "float": "not a number", "bool": "neither true nor false"}


def _error_message(annotation: Any, text: str, word: str, error: ValidationError) -> str:
    choices = [format_value(choice) for choice in literal_choices(annotation)]
    if choices:
        return f"{word} is not one of {', '.join(choices)}{did_you_mean(text, choices)}"
    problem = error.errors()[0]
    wrong = problem["input"] if isinstance(problem["input"], str) else text
    kind, _, reason = problem["type"].partition("_")
    if kind in _MESSAGES and reason in ("parsing", "from_float", "type"):
        return f"{word if wrong == text else f'{word}: {wrong}'} is {_MESSAGES[kind]}"
    if problem["type"] in ("missing", "too_long", "tuple_type"):
        return f"{word} is not of the form {_type_text(annotation)}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f'{word} must be JSON, {{"field": value}}'
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{word}: {message[:1].lower()}{message[1:]}"


def format_value(value: Any) -> str:
    """A value as written in an override."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return ",".join(format_value(part) for part in value)
        case Config():
            return json.dumps(value.model_dump(exclude_none=True, exclude_unset=True))
    return str(value)


def fields_to_dict() -> dict[str, dict[str, Any]]:
    """Every field by section: its default, type and description."""
    return {
        section: {
            name: {
                "default": format_value(field.default),
                "type": _type_text(field.annotation),
                "about": " ".join((field.description or "").split()),
            }
            for name, field in config.model_fields.items()
        }
        for section, config in SECTIONS.items()
    }


def fields_to_text() -> str:
    """Every field as text, written like an override."""
    lines = []
    for section, fields in fields_to_dict().items():
        lines += ["", f"{section}: {(SECTIONS[section].__doc__ or '').strip()}"]
        for name, field in fields.items():
            lines.append(f"  {section}.{name}={field['default']}  ({field['type']})")
            lines.append(f"      {field['about']}")
    return "\n".join(lines[1:])


_NAMES: dict[Any, str] = {int: "whole number", float: "number", bool: "true|false", str: "text", NoneType: "none"}


def _type_text(annotation: Any) -> str:
    """``text|none``, ``noam|cosine|wsd``, ``number,number``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is Literal:
        return "|".join(format_value(choice) for choice in parts)
    if origin is tuple:
        several = parts[-1] is Ellipsis
        return ",".join([_type_text(part) for part in parts if part is not Ellipsis] + (["…"] if several else []))
    if parts:
        return "|".join(_type_text(part) for part in parts)
    return "JSON"
