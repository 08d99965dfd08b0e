"""Config files: a run as YAML, TOML or JSON, written by hand, by ``--save-config``, or the run.json of a run.

A file is only data: nothing in it is imported or run. It may have the keys ``task``, ``preset`` (a recipe), and the
sections ``data``, ``model`` and ``train`` with any of their fields; ``data: SOURCE`` and ``model: PRESET`` are short
forms.
"""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import BadModelFile, UsageError
from ..foundation.checks import did_you_mean
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json, to_json
from .overrides import PRESET, SECTIONS, SHORT_FORMS, check_fields, field_names
from .train_config import RunConfig

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_MAX_DEPTH = 100  # maximum nesting of brackets in a YAML file
_RUN_FILE = "run.json"  # the config in a run directory


def load_config_file(path: str | Path) -> dict[str, Any]:
    """The content of a config file, its sections checked field by field; errors begin with the file's name.

    ``train.out`` of a run's run.json is dropped, because a new run needs its own directory.
    """
    path = Path(path)
    if path.is_dir() and (path / _RUN_FILE).is_file():
        path = path / _RUN_FILE
    check_suffix(path)
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        if path.suffix == ".json":
            fields: Any = parse_json(raw, path)
        else:
            text = raw.decode("utf-8")
            fields = tomllib.loads(text) if path.suffix == ".toml" else parse_yaml(text)
        if not isinstance(fields, dict):
            raise UsageError("it has no fields: write sections and their fields as field: value")
        content = check_content(fields)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except BadModelFile as error:
        raise UsageError(f"{path}: {str(error).removeprefix(f'{path} ')}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors too
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if path.name == _RUN_FILE:
        content["train"].pop("out", None)
    return content


def check_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config file with short forms expanded and all fields checked."""
    keys = ("task", PRESET, *SECTIONS)
    for key in content:
        if key not in keys:
            raise UsageError(f"there is no {key}{did_you_mean(key, [*keys, *field_names()])}")
    for key in ("task", PRESET):
        if not isinstance(content.get(key), str | None):
            raise UsageError(f"{key} is a name, not {content[key]!r}")
    checked = dict(content)
    for section in SECTIONS:
        fields = content.get(section, {})
        if isinstance(fields, str) and section in SHORT_FORMS:
            fields = {SHORT_FORMS[section]: fields}
        if not isinstance(fields, Mapping):
            raise UsageError(f"{section} is a section: write its fields as field: value, one per line")
        checked[section] = check_fields(section, fields)
    return checked


def load_package_data(name: str) -> dict[str, Any]:
    """A YAML file of this package, with all scalars as strings."""
    return parse_yaml(files("regard").joinpath(name).read_text(encoding="utf-8"))


def save_config_file(path: str | Path, config: RunConfig) -> None:
    """Write every field of a run, in the format of the file's suffix."""
    path = Path(path)
    check_suffix(path)
    content = config.model_dump(mode="json")
    if (scaling := content["model"]["rope_scaling"]) is not None:
        content["model"]["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    if config.model.text_model is not None:
        content["model"]["text_model"] = config.model.text_model.model_dump(mode="json", exclude_defaults=True)
    if path.suffix == ".json":
        text = to_json(content).decode()
    elif path.suffix == ".toml":
        # TOML has no null: None is written "none", as in an override.
        lines = [f"{key} = {_toml_value(value)}" for key, value in content.items() if not isinstance(value, dict)]
        for section in SECTIONS:
            fields = (f"{key} = {_toml_value(value)}" for key, value in content[section].items())
            lines += ["", f"[{section}]", *fields]
        text = "\n".join(lines) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def check_suffix(path: Path) -> None:
    """Reject a file name without the suffix of a known format."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} ends in {path.suffix or 'nothing'}; a config file ends in {', '.join(SUFFIXES)}")


def parse_yaml(text: str) -> Any:
    """Parse YAML with all scalars as strings, which the field's type then parses: ``off`` is not a boolean.

    ``<<: *name`` merges the fields of another mapping, as in YAML 1.1.
    """
    import yaml

    class Loader(yaml.BaseLoader):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if repeated := [key for i, key in enumerate(keys) if key in keys[:i]]:
                raise ValueError(f"it names {repeated[0]!r} twice")
            fields = super().construct_mapping(node, deep)
            if not isinstance(base := fields.pop("<<", {}), dict):
                raise ValueError("<<: merges the fields of one mapping")
            return base | fields

    depths = accumulate(1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    if max(depths, default=0) > _MAX_DEPTH:  # PyYAML would run for seconds before it reaches Python's recursion limit
        raise ValueError("it is nested too deeply")
    try:
        return yaml.load(text, Loader)  # BaseLoader makes only strings, lists and mappings
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return '"none"'
        case list():
            return f"[{', '.join(map(_toml_value, value))}]"
        case dict():
            pairs = (f"{key} = {_toml_value(item)}" for key, item in value.items())
            return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
