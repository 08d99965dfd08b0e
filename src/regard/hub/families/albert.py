"""ALBERT (Lan et al. 2020): BERT whose layers share one set of weights, and whose token table is narrower."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Step
from .bert import FIELDS, read_text

_CLASSES = hf.encoder_classes("Albert")
_FIELDS: hf.Fields = {
    **FIELDS,
    "embedding_size": ("d_embed", hf.NEEDED),
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


def read(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("num_hidden_groups", 1)
    theirs.only("inner_group_num", 1)
    return ModelConfig(**read_text(theirs, _CLASSES, _FIELDS, "gelu_new"), share_layers=True)


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "albert",
        **hf.write_head(config, _CLASSES),
        **hf.write_fields(config, _FIELDS),
        "hidden_act": hf.from_our_activation(config.activation),
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "albert."
    qkv = tuple(f"attention.{x}" for x in hf.QUERY_KEY_VALUE)
    head = hf.modules({"pooler": "pooler.dense"})
    if config.head == "masked-lm":
        table, names = f"{prefix}embeddings.word_embeddings.weight", ("dense", "LayerNorm", "decoder", "bias")
        head = [
            *hf.drop_modules(f"{prefix}pooler", "sop_classifier.classifier"),
            *hf.masked_head(config, table, *(f"predictions.{x}" for x in names)),
        ]
    elif config.head == "classify":
        head = hf.modules({f"{prefix}pooler": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [
        *hf.OLD_NORMS,
        *head,
        *hf.text_embeddings(prefix),
        *hf.modules({f"{prefix}encoder.embedding_hidden_mapping_in": "embeddings.projection"}),
        *hf.layer(config, f"{prefix}encoder.albert_layer_groups.0.albert_layers.0.", "encoder.blocks.0.", _LAYER, qkv),
    ]


ALBERT = hf.Family(("albert",), read, write, steps)
