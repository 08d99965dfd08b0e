"""ALBERT (Lan et al. 2020): BERT whose layers share one set of weights, and whose token table is narrower."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..hf_family import (
    NEEDED,
    OLD_NORMS,
    QUERY_KEY_VALUE,
    Family,
    Fields,
    ForeignFields,
    drop_modules,
    from_our_activation,
    layer,
    masked_head,
    modules,
    text_embeddings,
    write_fields,
    write_head,
)
from ..weight_steps import Step
from .bert import FIELDS, read_text

_CLASSES = {"AlbertModel": "none", "AlbertForMaskedLM": "masked-lm", "AlbertForSequenceClassification": "classify"}
_FIELDS: Fields = {
    **FIELDS,
    "embedding_size": ("d_embed", NEEDED),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "classifier_dropout_prob": ("classifier_dropout", 0.1),
}
_LAYER = {
    "attention.dense": "attention.w_o",
    "attention.LayerNorm": "attention_norm",
    "ffn": "ff.w_in",
    "ffn_output": "ff.w_out",
    "full_layer_layer_norm": "ff_norm",
}


def read(theirs: ForeignFields) -> ModelConfig:
    theirs.only("num_hidden_groups", 1)
    theirs.only("inner_group_num", 1)
    return ModelConfig(**read_text(theirs, _CLASSES, _FIELDS, "gelu_new"), share_layers=True)


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "albert",
        **write_head(config, _CLASSES),
        **write_fields(config, _FIELDS),
        "hidden_act": from_our_activation(config.activation),
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "albert."
    qkv = tuple(f"attention.{x}" for x in QUERY_KEY_VALUE)
    head = modules({"pooler": "pooler.dense"})
    if config.head == "masked-lm":
        table, names = f"{prefix}embeddings.word_embeddings.weight", ("dense", "LayerNorm", "decoder", "bias")
        head = [
            *drop_modules(f"{prefix}pooler", "sop_classifier.classifier"),
            *masked_head(config, table, *(f"predictions.{x}" for x in names)),
        ]
    elif config.head == "classify":
        head = modules({f"{prefix}pooler": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [
        *OLD_NORMS,
        *head,
        *text_embeddings(prefix),
        *modules({f"{prefix}encoder.embedding_hidden_mapping_in": "embeddings.projection"}),
        *layer(config, f"{prefix}encoder.albert_layer_groups.0.albert_layers.0.", "encoder.blocks.0.", _LAYER, qkv),
    ]


ALBERT = Family(("albert",), read, write, steps)
