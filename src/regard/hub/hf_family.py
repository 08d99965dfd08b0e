"""A family: the translation of one type of Hugging Face config and its tensors to ours, and back.

Also the code that families share: fields and modules that only change their name, heads, and the steps for the tensors
of a layer. "Theirs" is the Hugging Face side, "ours" is regard's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..config import ModelConfig
from ..layers import ACTIVATIONS, OTHER_NAMES
from .weight_steps import Drop, Join, Rename, Step, Tensors, Tie


class ForeignFields:
    """A Hugging Face config.json, read field by field. An unsupported value raises an error, it is never ignored.

    A field that is absent has the default of its model type, which may differ from what null means: a Mistral without
    ``sliding_window`` has a window of 4096 tokens, one with null has none.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.model_type: str = fields.get("model_type", "")
        self.fields = {**_ABSENT.get(self.model_type, {}), **fields}
        self.architecture: str = (fields.get("architectures") or [""])[0]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` if it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The value of a required field."""
        value = self.fields.get(name)
        if value is None:
            raise ValueError(f"config.json of model_type {self.model_type!r} has no {name!r}")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Refuse any value but these; a missing field has the first."""
        value = self.get(name, supported[0])
        if value not in supported:
            options = " or ".join(repr(x) for x in supported)
            raise ValueError(f"config.json has {name}={value!r}; regard supports {options} for {self.model_type}")

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """A token id; the first if the field is a list."""
        value = self.get(name, default)
        return value[0] if isinstance(value, list) and value else value

    def activation(self, name: str, default: str) -> str:
        """Our name of an activation, without a gate: whether there is one depends on the family."""
        value = self.get(name, default)
        ours = OTHER_NAMES.get(value, value)
        if ours not in ACTIVATIONS:
            raise ValueError(f"config.json has {name}={value!r}; regard has {', '.join(ACTIVATIONS)}")
        return ours

    def head(self, heads: dict[str, Any]) -> Any:
        """Our head for their class; ``heads`` maps their class names to ours, the first is the default."""
        if self.architecture and self.architecture not in heads:
            raise ValueError(f"config.json has architecture {self.architecture!r}; regard reads {', '.join(heads)}")
        return heads.get(self.architecture, next(iter(heads.values())))


@dataclass(frozen=True)
class Family:
    """Translations for one family: ``read`` and ``write`` for configs, ``steps`` for tensors.

    A model can be saved as a family if and only if writing its config and reading it back gives the same config.
    """

    model_types: tuple[str, ...]
    read: Callable[[ForeignFields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    steps: Callable[[ModelConfig], list[Step]]


def from_our_activation(name: str) -> str:
    """The name of one of our activations in transformers."""
    return "gelu_new" if name == "gelu_tanh" else name


NEEDED = object()  # the default of a required field
Fields = Mapping[str, tuple[str, Any]]  # their field → (our field, its default)

_NAMES = tomllib.loads((files(__package__) / "families" / "names.toml").read_text(encoding="utf-8"))
_ABSENT: dict[str, dict[str, Any]] = _NAMES["absent"]  # model type → values of absent fields


def field_names(*tables: str) -> Fields:
    """The fields of config.json in some tables of names.toml; later tables override earlier ones and their bases."""
    fields: dict[str, tuple[str, Any]] = {}
    for table in tables:
        fields |= field_names(*_NAMES[table].get("bases", ()))
        for theirs, ours in _NAMES[table]["fields"].items():
            name, default = (ours, NEEDED) if isinstance(ours, str) else (*ours, None)[:2]
            fields[theirs] = name, default
    return fields


def layer_names(table: str) -> dict[str, str]:
    """The modules of a layer in a table of names.toml."""
    return _NAMES[table]["layer"]


TEXT: dict[str, Any] = {"architecture": "encoder", "positions": "learned", "embedding_norm": True, "norm_place": "post"}
QUERY_KEY_VALUE = ("query", "key", "value")


def read_fields(theirs: ForeignFields, fields: Fields) -> dict[str, Any]:
    def value(name: str, default: Any) -> Any:
        if default is NEEDED:
            return theirs.need(name)
        return theirs.token_id(name, default) if name.endswith("_token_id") else theirs.get(name, default)

    return {ours: value(name, default) for name, (ours, default) in fields.items()}


def write_fields(config: ModelConfig, fields: Fields, nulls: bool = False) -> dict[str, Any]:
    """Their fields. Our None is left out, or with ``nulls`` written as the field's default, which may be null."""
    values = {name: (getattr(config, ours), default) for name, (ours, default) in fields.items()}
    if nulls:
        return {name: default if value is None else value for name, (value, default) in values.items()}
    return {name: value for name, (value, _) in values.items() if value is not None}


def encoder_classes(*names: str) -> dict[str, str]:
    """Class names of BERT-like models → our heads."""
    heads = {"Model": "none", "ForMaskedLM": "masked-lm", "ForSequenceClassification": "classify"}
    heads |= {"ForTokenClassification": "tag", "ForPreTraining": "masked-lm"}  # without its sentence-pair head
    heads["ForQuestionAnswering"] = "span"
    return {f"{name}{kind}": head for name in names for kind, head in heads.items()}


def read_head(theirs: ForeignFields, classes: Mapping[str, str], pooler: str, class_pooler: str) -> dict[str, Any]:
    """Our fields for their class. A base model has its pooler unless ``has_pooler`` is false.

    ``has_pooler`` is our addition to config.json: in transformers it is an argument of the constructor, and unknown
    fields are kept but ignored.
    """
    head = theirs.head(dict(classes))
    if head == "masked-lm":
        return {"head": head, "head_transform": True, "head_bias": True}
    if head == "span":
        return {"head": head}
    if head in ("classify", "tag"):
        labels = theirs.get("id2label")
        n_classes = theirs.get("num_labels", 2 if labels is None else len(labels))  # num_labels overrides id2label
        if head == "tag":
            return {"head": head, "n_classes": n_classes}
        problem_type = theirs.get("problem_type", "regression" if n_classes == 1 else "single_label")
        problem_type = problem_type.removesuffix("_classification")
        return {"head": head, "n_classes": n_classes, "problem_type": problem_type, "pooler": class_pooler}
    return {"head": head, "pooler": pooler if theirs.get("has_pooler", True) else "none"}


def write_head(config: ModelConfig, classes: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name, head in classes.items() if head == config.head]
    if not names:
        raise ValueError(f"no class has head={config.head!r}; the classes are {', '.join(classes)}")
    fields: dict[str, Any] = {"architectures": names[:1]}
    if config.head in ("classify", "tag"):
        fields |= label_fields([f"LABEL_{i}" for i in range(config.n_classes)])
    if config.head == "classify":
        is_number = config.problem_type == "regression"
        fields["problem_type"] = config.problem_type if is_number else f"{config.problem_type}_classification"
    if config.head == "none" and config.pooler == "none":
        fields["has_pooler"] = False
    return fields


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """The names of classes in both directions."""
    numbered = list(enumerate(labels))
    return {"id2label": {str(i): label for i, label in numbered}, "label2id": {label: i for i, label in numbered}}


def write_encoder(
    config: ModelConfig, model_type: str, classes: Mapping[str, str], fields: Fields, activation: str = "hidden_act"
) -> dict[str, Any]:
    """The fields that most encoders have; ``activation`` is the name of that field."""
    written = {"model_type": model_type, **write_head(config, classes), **write_fields(config, fields)}
    return written | {activation: from_our_activation(config.activation)}


def write_decoder(
    config: ModelConfig, model_type: str, classes: Mapping[str, str], fields: Fields, activation: str | None
) -> dict[str, Any]:
    """The fields that most models with a decoder have; ``activation`` is the name of that field, if there is one."""
    written = {"model_type": model_type, "architectures": write_head(config, classes)["architectures"]}
    written |= write_fields(config, fields, nulls=True)
    return written if activation is None else written | {activation: from_our_activation(config.activation)}


def text_embeddings(prefix: str) -> list[Step]:
    """BERT's three embedding tables and their norm; older files also have a buffer of position ids."""
    theirs = f"{prefix}embeddings."
    return [
        Drop(f"{theirs}position_ids"),
        Rename(f"{theirs}word_embeddings.weight", "token.weight"),
        Rename(f"{theirs}position_embeddings.weight", "embeddings.position.weight"),
        Rename(f"{theirs}token_type_embeddings.weight", "embeddings.segment.weight"),
        *modules({f"{theirs}LayerNorm": "embeddings.norm"}),
    ]


def modules(names: Mapping[str, str], theirs: str = "", ours: str = "") -> list[Step]:
    """Rename the weight and bias of each module."""
    return [Rename(f"{theirs}{a}.{kind}", f"{ours}{b}.{kind}") for a, b in names.items() for kind in ("weight", "bias")]


def join_modules(theirs: Sequence[str], ours: str, rows: tuple[int, ...]) -> list[Step]:
    """Concatenate the weights, and the biases, of several modules; ``rows`` are their numbers of rows."""
    kinds = ("weight", "bias")
    return [Join(tuple(f"{name}.{kind}" for name in theirs), f"{ours}.{kind}", rows) for kind in kinds]


def layer(config: ModelConfig, theirs: str, ours: str, names: Mapping[str, str], qkv: Sequence[str]) -> list[Step]:
    """The tensors of a layer; ``qkv`` are the names of its query, key and value projections."""
    joins = join_modules([f"{theirs}{x}" for x in qkv], f"{ours}attention.w_qkv", (config.d_model,) * 3)
    return [*modules(names, theirs, ours), *joins]


def token_head(config: ModelConfig, table: str, name: str = "lm_head.weight") -> Step:
    """The output matrix: tied to the ``table``, or a tensor of its own."""
    return Tie(name, table) if config.tie_head else Rename(name, "head.weight")


def masked_head(config: ModelConfig, table: str, dense: str, norm: str, decoder: str, bias: str) -> list[Step]:
    """A masked-token head: dense layer, norm, and an output matrix that is the ``table`` unless untied.

    Some files hold a bias besides the decoder's own. If the head is tied, the two are one. If it is untied,
    transformers keeps both but uses the decoder's, which older files lack.
    """
    decoder_bias = f"{decoder}.bias"
    second_bias: list[Step] = []
    if bias != decoder_bias:
        second_bias = [
            Tie(decoder_bias, bias) if config.tie_head else Tie(bias, decoder_bias, checked=False, written=True)
        ]
    return [
        *second_bias,
        token_head(config, table, f"{decoder}.weight"),
        Rename(bias if config.tie_head else decoder_bias, "head.bias"),
        *modules({dense: "head.transform", norm: "head.norm"}),
    ]


def drop_modules(*names: str) -> list[Step]:
    """Drop modules that a file may hold but this class does not have, such as the other head of pretraining."""
    return [Drop(f"{name}.{kind}") for name in names for kind in ("weight", "bias")]


@dataclass(frozen=True)
class OldEnding(Step):
    """Replace a suffix of older files (TensorFlow's gamma and beta) by the current one, which is also written."""

    old: str
    new: str

    def apply(self, tensors: Tensors) -> Tensors:
        return {
            name.removesuffix(self.old) + self.new if name.endswith(self.old) else name: x
            for name, x in tensors.items()
        }


OLD_NORMS: list[Step] = [
    OldEnding(".LayerNorm.gamma", ".LayerNorm.weight"),
    OldEnding(".LayerNorm.beta", ".LayerNorm.bias"),
]
