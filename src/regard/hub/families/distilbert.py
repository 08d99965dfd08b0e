"""DistilBERT (Sanh et al. 2019): BERT with fewer layers, no segments, no pooler and a fixed ε."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..hf_family import (
    NEEDED,
    OLD_NORMS,
    TEXT,
    Family,
    Fields,
    ForeignFields,
    from_our_activation,
    layer,
    masked_head,
    modules,
    read_fields,
    read_head,
    text_embeddings,
    write_fields,
    write_head,
)
from ..weight_steps import Step

_CLASSES = {
    "DistilBertModel": "none",
    "DistilBertForMaskedLM": "masked-lm",
    "DistilBertForSequenceClassification": "classify",
}
_FIELDS: Fields = {
    "vocab_size": ("vocab_size", NEEDED),
    "dim": ("d_model", NEEDED),
    "n_layers": ("n_layers", NEEDED),
    "n_heads": ("n_heads", NEEDED),
    "hidden_dim": ("d_ff", NEEDED),
    "max_position_embeddings": ("max_len", NEEDED),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "seq_classif_dropout": ("classifier_dropout", 0.2),
    "tie_word_embeddings": ("tie_head", True),
    "initializer_range": ("init_std", None),
    "pad_token_id": ("pad_id", 0),
    "bos_token_id": ("bos_id", None),
    "eos_token_id": ("eos_id", None),
}
_LAYER = {
    "attention.out_lin": "attention.w_o",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "ff.w_in",
    "ffn.lin2": "ff.w_out",
    "output_layer_norm": "ff_norm",
}


def read(theirs: ForeignFields) -> ModelConfig:
    """``sinusoidal_pos_embds`` only says what the table started as; the file holds it either way."""
    theirs.only("pruned_heads", {})
    ours = read_fields(theirs, _FIELDS)
    return ModelConfig(
        **TEXT,
        **ours,
        **read_head(theirs, _CLASSES, pooler="none", class_pooler="relu"),
        activation=theirs.activation("activation", "gelu"),
        norm_eps=1e-12,
        embedding_dropout=ours["dropout"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "model_type": "distilbert",
        **write_head(config, _CLASSES),
        **write_fields(config, _FIELDS),
        "activation": from_our_activation(config.activation),
    }
    fields.pop("has_pooler", None)
    return fields


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "distilbert."
    qkv = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
    head: list[Step] = []
    if config.head == "masked-lm":
        table, transform = f"{prefix}embeddings.word_embeddings.weight", ("vocab_transform", "vocab_layer_norm")
        head = masked_head(config, table, *transform, decoder="vocab_projector", bias="vocab_projector.bias")
    elif config.head == "classify":
        head = modules({"pre_classifier": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [
        *OLD_NORMS,
        *head,
        *text_embeddings(prefix),
        *layer(config, f"{prefix}transformer.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, qkv),
    ]


DISTILBERT = Family(("distilbert",), read, write, steps)
