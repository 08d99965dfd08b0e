"""config.json both ways: its fields as a ModelConfig, a ModelConfig as transformers writes it; and the model card."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, get_args

from ..config import Head, ModelConfig
from ..errors import BadModelFile
from ..layers import FEEDFORWARD_KINDS
from ..models import Model
from .config_diff import Difference, differences
from .families import BY_TYPE, FAMILIES
from .hf_family import Family, ForeignFields
from .weight_steps import Step

OWN_TYPE = "regard"
_OWN_SECTION = "regard"
_TOKEN_IDS = ("_token_id", "_token_ids", "bad_words_ids")
_KINDS = ("architecture", "source")
_MOST_LAYERS = 10_000  # families list the layers; a billion of them would not fit into memory
# What reading fields of arbitrary values can raise; a family does not check each of them.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StopIteration)


@dataclass(frozen=True)
class ResolvedConfig:
    """A config.json as a ModelConfig, and the steps from its tensors to ours."""

    model_type: str
    config: ModelConfig
    steps: Sequence[Step]


@dataclass(frozen=True)
class WrittenConfig:
    """A ModelConfig as a config.json. ``obstacles`` says why transformers has no twin; empty: it has one."""

    fields: dict[str, Any]
    steps: Sequence[Step]
    obstacles: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return self.fields["model_type"]


def read_config(fields: dict[str, Any], generation: Mapping[str, Any] | None = None) -> ResolvedConfig:
    """Read a config.json. Our own section is exact; the fields for transformers beside it must agree.

    ``generation`` is a generation_config.json, which may name more tokens that end a text.
    """
    model_type, section = fields.get("model_type") or _type_of_class(fields), fields.get(_OWN_SECTION)
    if model_type is None:
        raise BadModelFile(f"config.json has no model_type; regard reads {', '.join(BY_TYPE)}")
    if section is not None and not isinstance(section, dict):
        raise BadModelFile(f"config.json has {_OWN_SECTION!r} as a {type(section).__name__}, where an object belongs")
    try:
        own = None if section is None else ModelConfig(**section)
    except (ValueError, TypeError) as error:
        raise BadModelFile(f"config.json, section {_OWN_SECTION!r}: {error}") from None
    if model_type == OWN_TYPE:
        if own is None:
            raise BadModelFile(f"config.json has model_type {OWN_TYPE!r}, but no section {_OWN_SECTION!r}")
        return ResolvedConfig(model_type, own, ())
    if not isinstance(model_type, str) or model_type not in BY_TYPE:
        near = difflib.get_close_matches(str(model_type), [*BY_TYPE, OWN_TYPE], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadModelFile(f"config.json has model_type {model_type!r}{hint} (regard reads {', '.join(BY_TYPE)})")
    for name, value in fields.items():
        if "layer" in name and isinstance(value, int) and value > _MOST_LAYERS:
            raise BadModelFile(f"config.json has {name}={value}; regard reads up to {_MOST_LAYERS} layers")
    family = BY_TYPE[model_type]
    try:
        config = family.read(ForeignFields({**fields, "model_type": model_type}))
    except _UNREADABLE as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise BadModelFile(f"config.json does not describe a {model_type} that regard can read: {reason}") from None
    if own is not None and (contradictions := differences(own, config)):
        fault = ", ".join(f"{one.field}={one.one!r} and {one.other!r}" for one in contradictions)
        raise BadModelFile(
            f"config.json contradicts itself: its section {_OWN_SECTION!r} and the rest give {fault}; "
            f"remove the section if the rest is right"
        )
    config = (own or config).with_(more_eos_ids=_more_eos_ids(own or config, fields, generation or {}))
    return ResolvedConfig(model_type, config, family.steps(config))


def _type_of_class(fields: Mapping[str, Any]) -> str | None:
    """The model_type that the name of a class begins with, for files from before there was such a field."""
    match fields.get("architectures"):
        case [str(name), *_]:
            beginnings = {kind.replace("-", "").replace("_", ""): kind for kind in BY_TYPE}
            matching = [beginning for beginning in beginnings if name.lower().startswith(beginning)]
            return beginnings[max(matching, key=len)] if matching else None
    return None


def _more_eos_ids(config: ModelConfig, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text besides eos_id, from every list of end tokens that it is in."""
    lists = [value for fields in sources if isinstance(value := fields.get("eos_token_id"), list)]
    ids = [index for value in lists if config.eos_id in value for index in value if isinstance(index, int)]
    return tuple(dict.fromkeys(x for x in ids if x != config.eos_id and 0 <= x < config.output_vocab_size))


def write_config(config: ModelConfig) -> WrittenConfig:
    """As the first family that reads back the config it wrote; as our own model_type where there is none."""
    attempts = [_attempt(family, config) for family in FAMILIES]
    section = config.model_dump(mode="json")
    for family, fields, obstacles in attempts:
        if not obstacles:
            if len(ends := list(dict.fromkeys((config.eos_id, *config.more_eos_ids)))) > 1:
                fields["eos_token_id"] = ends
            return WrittenConfig({**fields, _OWN_SECTION: section}, family.steps(config))
    # Report the obstacles of the nearest family; where that is another kind of model, only the difference in kind.
    nearest = min((obstacles for _, _, obstacles in attempts), key=_distance)
    if _distance(nearest)[0] > 0:
        nearest = [one for one in nearest if one.difference is None or one.difference.field in _KINDS]
    return WrittenConfig({"model_type": OWN_TYPE, _OWN_SECTION: section}, (), tuple(str(one) for one in nearest))


def transformers_twin(config: ModelConfig) -> Any:
    """The model of transformers with the same architecture, its weights random."""
    written = write_config(config)
    if written.obstacles:
        raise ValueError(f"transformers has no twin of this model: {written.obstacles[0]}")
    if find_spec("transformers") is None:
        raise ImportError("transformers is not installed")
    import transformers

    fields = {name: value for name, value in written.fields.items() if name != "model_type"}
    settings = transformers.AutoConfig.for_model(written.model_type, **fields)
    return getattr(transformers, written.fields["architectures"][0])(settings)


def token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that say which token does what."""
    return {name: value for name, value in fields.items() if name.endswith(_TOKEN_IDS)}


def restore_token_ids(written: WrittenConfig, original: Mapping[str, Any]) -> WrittenConfig:
    """Put back the token ids of the ``original`` config.json, absent ones too, where they still mean our config.

    A ModelConfig cannot hold several end tokens or no padding token; an id that was changed since stays changed.
    """
    family = BY_TYPE[written.model_type]
    fields, config = written.fields, family.read(ForeignFields(written.fields))
    for name in {**token_ids(fields), **original}:
        changed = {key: value for key, value in fields.items() if key != name}
        if name in original:
            changed[name] = original[name]
        with suppress(*_UNREADABLE):
            fields = changed if family.read(ForeignFields(changed)) == config else fields
    return replace(written, fields=fields)


@dataclass(frozen=True)
class Obstacle:
    """A field that a family cannot express; None where the family has nothing like this model."""

    model_type: str
    difference: Difference | None = None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.model_type} has nothing like it"
        return f"{self.difference.field}={self.difference.one!r} ({self.model_type} has {self.difference.other!r})"


def _attempt(family: Family, config: ModelConfig) -> tuple[Family, dict[str, Any], list[Obstacle]]:
    """Write and read again; whatever differs is an obstacle.

    Where the family cannot write the config at all, variants with another head or activation are tried.
    """
    changes = [{}, *({"head": head} for head in get_args(Head)), *({"activation": x} for x in FEEDFORWARD_KINDS)]
    for change in changes:
        try:
            variant = config.with_(**change)
            fields = json.loads(json.dumps(family.write(variant)))
            back = family.read(ForeignFields(fields))
        except _UNREADABLE:
            continue
        return family, fields, [Obstacle(fields["model_type"], difference) for difference in differences(config, back)]
    return family, {}, [Obstacle(family.model_types[0])]


def _distance(obstacles: Sequence[Obstacle]) -> tuple[int, int]:
    """(differences in kind, number of fields), to be compared in this order; nothing alike counts most."""
    fields = [None if one.difference is None else one.difference.field for one in obstacles]
    return sum(3 if field is None else field in _KINDS for field in fields), len(fields)


def changed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = config.model_dump(mode="json")
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}


def model_card(model: Model, written: WrittenConfig) -> str:
    """README.md of a saved model: the same model always gives the same text."""
    config = model.config
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if written.obstacles:
        reasons = "\n".join(f"- {reason}" for reason in written.obstacles)
        twin = f"transformers has no twin of this model and cannot open this directory. In the way:\n\n{reasons}"
    else:
        name = written.fields["architectures"][0]
        twin = f"""transformers opens it too, as model_type `{written.model_type}`:

```python
from transformers import {name}

model = {name}.from_pretrained("path/to/this/directory")
```"""
    rows = "\n".join(f"| {field} | {value} |" for field, value in changed_fields(config).items())
    training = "" if model.training_record is None else _training_section(model.training_record)
    return f"""---
library_name: {"regard" if written.obstacles else "transformers"}
tags:
- regard
---

# {written.model_type}, {model.n_parameters:,} parameters

Architecture {config.architecture}, reads {config.source}, head {config.head}; numbers in {", ".join(kinds)}.
Saved by regard.

```python
import regard

model = regard.load("path/to/this/directory")
```

{twin}

`manifest.json` holds the SHA-256 of every file here; `regard.load` checks them before it reads anything.

{training}## Config

Fields that differ from regard's defaults; config.json has all of them.

| field | value |
|---|---|
{rows}
"""


def training_summary(record: Mapping[str, Any]) -> str:
    """Which run, weights and data a model came from, in a line."""
    data = record["data"]
    return f"{record['run']}, {record['weights']}, on {data['source']} (SHA-256 {data['sha256'][:12]}…)"


def _training_section(record: Mapping[str, Any]) -> str:
    """The card's table of where the weights came from."""
    data, versions = record["data"], record["versions"]
    facts = {
        "run": f"{record['run']}: {record['weights']}",
        "data": f"{data['source']}, SHA-256 {data['sha256']}",
        **{name: f"{x:.5g}" if isinstance(x, float) else x for name, x in record["metrics"].items()},
        "command": f"`{shlex.join(record['command'])}`" if record["command"] else "from Python",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    rows = "\n".join(f"| {name} | {str(fact).replace('|', '&#124;')} |" for name, fact in facts.items())
    return f"## Training\n\n| | |\n|---|---|\n{rows}\n\n"
