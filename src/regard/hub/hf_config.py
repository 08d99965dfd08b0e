"""config.json read as a ModelConfig and written from one in the format of transformers; and the model card."""

from __future__ import annotations

import difflib
import json
import logging
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
from ..text.processor import SOURCE, TARGET
from .config_diff import Difference, differences
from .families import BY_TYPE, FAMILIES
from .hf_family import Family, ForeignFields
from .weight_steps import Step

OWN_TYPE = "regard"
_OWN_SECTION = "regard"
# Settings of transformers that change which tokens are chosen, with the values that change nothing.
_TOKEN_RULES = {
    "forced_bos_token_id": None,
    "begin_suppress_tokens": None,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}
_TOKEN_IDS = ("_token_id", "_token_ids", "bad_words_ids")
_KINDS = ("architecture", "source", "mixer")  # a difference in these is a different kind of model
_MAX_LAYERS = 10_000  # families build lists of layers; a billion of them would not fit into memory
# What a family's ``read`` can raise on arbitrary values; it does not check each field.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StopIteration)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """The ModelConfig of a config.json, and the steps from its tensors to ours."""

    model_type: str
    config: ModelConfig
    steps: Sequence[Step]


@dataclass(frozen=True)
class WrittenConfig:
    """A ModelConfig as the fields of a config.json."""

    fields: dict[str, Any]
    steps: Sequence[Step]
    obstacles: tuple[str, ...] = ()  # why transformers has no equivalent model; empty if it has one

    @property
    def model_type(self) -> str:
        return self.fields["model_type"]


def read_config(fields: dict[str, Any], generation: Mapping[str, Any] | None = None) -> ResolvedConfig:
    """Read a config.json. If it has a section written by regard, that is used, and the other fields must agree with it.

    generation  the fields of a generation_config.json, which may name other start and end tokens
    """
    model_type, section = fields.get("model_type") or _type_of_class(fields), fields.get(_OWN_SECTION)
    if model_type is None:
        raise BadModelFile(f"config.json has no model_type; regard reads {', '.join(BY_TYPE)}")
    if section is not None and not isinstance(section, dict):
        raise BadModelFile(f"config.json has {_OWN_SECTION!r} as a {type(section).__name__}, where an object belongs")
    try:
        section_config = None if section is None else ModelConfig(**section)
    except (ValueError, TypeError) as error:
        raise BadModelFile(f"config.json, section {_OWN_SECTION!r}: {error}") from None
    if model_type == OWN_TYPE:
        if section_config is None:
            raise BadModelFile(f"config.json has model_type {OWN_TYPE!r}, but no section {_OWN_SECTION!r}")
        return ResolvedConfig(model_type, section_config, ())
    if not isinstance(model_type, str) or model_type not in BY_TYPE:
        near = difflib.get_close_matches(str(model_type), [*BY_TYPE, OWN_TYPE], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadModelFile(f"config.json has model_type {model_type!r}{hint} (regard reads {', '.join(BY_TYPE)})")
    for name, value in fields.items():
        if "layer" in name and isinstance(value, int) and value > _MAX_LAYERS:
            raise BadModelFile(f"config.json has {name}={value}; regard reads up to {_MAX_LAYERS} layers")
    family = BY_TYPE[model_type]
    try:
        theirs = ForeignFields({**fields, "model_type": model_type})
        config = family.read(theirs)
        if config.architecture != "encoder":
            theirs.only("is_causal", True)  # transformers reads it in every decoder, though no config class declares it
    except _UNREADABLE as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise BadModelFile(f"config.json does not describe a {model_type} that regard can read: {reason}") from None
    if section_config is not None and (contradictions := differences(section_config, config)):
        fault = ", ".join(f"{each.field}={each.one!r} and {each.other!r}" for each in contradictions)
        raise BadModelFile(
            f"config.json contradicts itself: its section {_OWN_SECTION!r} and the other fields give {fault}; "
            f"remove the section if the other fields are right"
        )
    settings = {**fields, **(generation or {})}
    forbidden, sequences = _forbidden_ids(config, settings)
    ignored = {name: settings.get(name) for name in _TOKEN_RULES} | {"bad_words_ids": sequences or None}
    is_rule = {name: value not in (None, [], _TOKEN_RULES.get(name)) for name, value in ignored.items()}
    if rules := [f"{name}={value}"[:100] for name, value in ignored.items() if is_rule[name]]:
        hint = "give prefix, logit_bias, repetition_penalty, no_repeat_ngram or min_new_tokens for the same texts"
        _log.warning("transformers generates with %s, which regard does not follow; %s", ", ".join(rules), hint)
    config = section_config or config.with_(**_generation_ids(config, generation or {}))
    ends = config.more_eos_ids if section_config else _more_eos_ids(config, generation or {}, fields)
    config = config.with_(more_eos_ids=ends, forbidden_ids=forbidden)
    return ResolvedConfig(model_type, config, family.steps(config))


def _type_of_class(fields: Mapping[str, Any]) -> str | None:
    """The model_type that the class name begins with, for old files without that field."""
    match fields.get("architectures"):
        case [str(name), *_]:
            prefixes = {kind.replace("-", "").replace("_", ""): kind for kind in BY_TYPE}
            matching = [prefix for prefix in prefixes if name.lower().startswith(prefix)]
            return prefixes[max(matching, key=len)] if matching else None
    return None


def _generation_ids(config: ModelConfig, generation: Mapping[str, Any]) -> dict[str, int]:
    """The start and end token of a generation_config.json: transformers generates with these, not config.json's."""
    end, start = generation.get("eos_token_id"), generation.get("decoder_start_token_id")
    if isinstance(end, list):
        end = config.eos_id if config.eos_id in end else next(iter(end), None)
    ids = {"eos_id": end} | ({"bos_id": start} if config.architecture == "encoder-decoder" else {})
    n_tokens = config.output_vocab_size if config.has_decoder else 0
    return {name: index for name, index in ids.items() if type(index) is int and 0 <= index < n_tokens}


def _more_eos_ids(config: ModelConfig, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens other than eos_id, from the first list of end tokens that contains it."""
    lists = [value if isinstance(value := fields.get("eos_token_id"), list) else [value] for fields in sources]
    ids = next((value for value in lists if config.eos_id in value), ())
    others = dict.fromkeys(x for x in ids if isinstance(x, int) and x != config.eos_id)
    return tuple(x for x in others if 0 <= x < config.output_vocab_size)


def _forbidden_ids(config: ModelConfig, settings: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The tokens that no text may contain, and the sequences of tokens that none may, which regard does not follow."""
    lists = (settings.get(name) for name in ("bad_words_ids", "suppress_tokens"))
    words, tokens = (value if isinstance(value, list) else [] for value in lists)
    ids = [*tokens, *(word[0] for word in words if isinstance(word, list) and len(word) == 1)]
    forbidden = dict.fromkeys(x for x in ids if type(x) is int and 0 <= x < config.output_vocab_size)
    return tuple(forbidden), [word for word in words if isinstance(word, list) and len(word) > 1]


def write_config(config: ModelConfig) -> WrittenConfig:
    """Write a config as the first family that can read it back unchanged; as our own model_type if there is none."""
    attempts = [_attempt(family, config) for family in FAMILIES]
    section = config.model_dump(mode="json")
    for family, fields, obstacles in attempts:
        if not obstacles:
            if len(ends := list(dict.fromkeys((config.eos_id, *config.more_eos_ids)))) > 1:
                fields["eos_token_id"] = ends
            if config.forbidden_ids:
                fields["bad_words_ids"] = [[index] for index in config.forbidden_ids]
            return WrittenConfig({**fields, _OWN_SECTION: section}, family.steps(config))
    # Report the obstacles of the nearest family; if that is another kind of model, only the difference in kind.
    nearest = min((obstacles for _, _, obstacles in attempts), key=_distance)
    if _distance(nearest)[0] > 0:
        nearest = [each for each in nearest if each.difference is None or each.difference.field in _KINDS]
    return WrittenConfig({"model_type": OWN_TYPE, _OWN_SECTION: section}, (), tuple(str(each) for each in nearest))


def transformers_twin(config: ModelConfig) -> Any:
    """The transformers model of the same architecture, with random weights."""
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
    """The fields of a config.json that hold special token ids."""
    return {name: value for name, value in fields.items() if name.endswith(_TOKEN_IDS)}


def restore_token_ids(written: WrittenConfig, original: Mapping[str, Any]) -> WrittenConfig:
    """Restore the token ids of the ``original`` config.json, present or absent, as long as they give our config.

    A ModelConfig cannot represent all of them, such as a missing padding token. Ids that were changed stay changed.
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
    """Why a family cannot represent a config."""

    model_type: str
    difference: Difference | None = None  # the field that it cannot represent; None: it cannot write the config at all

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.model_type} has no such model"
        return f"{self.difference.field}={self.difference.one!r} ({self.model_type} has {self.difference.other!r})"


def _attempt(family: Family, config: ModelConfig) -> tuple[Family, dict[str, Any], list[Obstacle]]:
    """Write a config as a family and read it back; every difference is an obstacle.

    If the family cannot write the config, variants with another head or activation are tried.
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
    """A sort key: (differences in kind, number of fields); a family that cannot write the config comes last."""
    fields = [None if each.difference is None else each.difference.field for each in obstacles]
    return sum(3 if field is None else field in _KINDS for field in fields), len(fields)


def changed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config that differ from their defaults."""
    values = config.model_dump(mode="json")
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}


def model_card(model: Model, written: WrittenConfig, n_parameters: int) -> str:
    """README.md of a saved model; deterministic, so that saving a model twice gives the same files."""
    config = model.config
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.state_dict().values()})
    if written.obstacles:
        reasons = "\n".join(f"- {reason}" for reason in written.obstacles)
        twin = f"transformers has no twin of this model and cannot open this directory, because of:\n\n{reasons}"
    else:
        name = written.fields["architectures"][0]
        twin = f"""transformers opens it too, as model_type `{written.model_type}`:

```python
from transformers import {name}

model = {name}.from_pretrained("path/to/this/directory")
```"""
        if model.processor is not None and SOURCE in model.processor.files(config):
            twin += f"""

AutoTokenizer opens a single tokenizer, and this model has two: `PreTrainedTokenizerFast(tokenizer_file="…/{SOURCE}")`
for its inputs, the same with `{TARGET}` for its outputs."""
    rows = "\n".join(f"| {field} | {value} |" for field, value in changed_fields(config).items())
    training = "" if model.training_record is None else _training_section(model.training_record)
    return f"""---
library_name: {"regard" if written.obstacles else "transformers"}
tags:
- regard
---

# {written.model_type}, {n_parameters:,} parameters

Architecture {config.architecture}, reads {config.source}, head {config.head}; weights in {", ".join(dtypes)}.
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
    """The run, weights and data that a model came from, in one line."""
    data = record["data"]
    return f"{record['run']}, {record['weights']}, on {data['source']} (SHA-256 {data['sha256'][:12]}…)"


def _training_section(record: Mapping[str, Any]) -> str:
    """The section of the model card on training."""
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
