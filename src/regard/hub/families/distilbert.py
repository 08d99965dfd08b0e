"""DistilBERT (Sanh et al. 2019): BERT with fewer layers, no segments, no pooler and a fixed ε."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Step

_CLASSES = hf.encoder_classes("DistilBert")
_FIELDS: hf.Fields = {
    "vocab_size": ("vocab_size", hf.NEEDED),
    "dim": ("d_model", hf.NEEDED),
    "n_layers": ("n_layers", hf.NEEDED),
    "n_heads": ("n_heads", hf.NEEDED),
    "hidden_dim": ("d_ff", hf.NEEDED),
    "max_position_embeddings": ("max_len", hf.NEEDED),
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


def read(theirs: hf.ForeignFields) -> ModelConfig:
    """``sinusoidal_pos_embds`` only says what the table started as; the file holds it either way."""
    theirs.only("pruned_heads", {})
    ours = hf.read_fields(theirs, _FIELDS)
    return ModelConfig(
        **hf.TEXT,
        **ours,
        **hf.read_head(theirs, _CLASSES, pooler="none", class_pooler="relu"),
        activation=theirs.activation("activation", "gelu"),
        norm_eps=1e-12,
        embedding_dropout=ours["dropout"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "model_type": "distilbert",
        **hf.write_head(config, _CLASSES),
        **hf.write_fields(config, _FIELDS),
        "activation": hf.from_our_activation(config.activation),
    }
    fields.pop("has_pooler", None)
    return fields


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "distilbert."
    qkv = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
    head: list[Step] = []
    if config.head == "masked-lm":
        table, transform = f"{prefix}embeddings.word_embeddings.weight", ("vocab_transform", "vocab_layer_norm")
        head = hf.masked_head(config, table, *transform, decoder="vocab_projector", bias="vocab_projector.bias")
    elif config.head == "classify":
        head = hf.modules({"pre_classifier": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [
        *hf.OLD_NORMS,
        *head,
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}transformer.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, qkv),
    ]


DISTILBERT = hf.Family(("distilbert",), read, write, steps)
