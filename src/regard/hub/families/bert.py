"""BERT (Devlin et al. 2019), and RoBERTa (Liu et al. 2019), which counts positions behind a row for padding."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..hf_family import (
    NEEDED,
    OLD_NORMS,
    QUERY_KEY_VALUE,
    TEXT,
    Family,
    Fields,
    ForeignFields,
    drop_modules,
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

FIELDS: Fields = {
    "vocab_size": ("vocab_size", NEEDED),
    "hidden_size": ("d_model", NEEDED),
    "num_hidden_layers": ("n_layers", NEEDED),
    "num_attention_heads": ("n_heads", NEEDED),
    "intermediate_size": ("d_ff", NEEDED),
    "max_position_embeddings": ("max_len", NEEDED),
    "type_vocab_size": ("n_segments", 2),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "tie_word_embeddings": ("tie_head", True),
    "initializer_range": ("init_std", None),
    "pad_token_id": ("pad_id", 0),
    "bos_token_id": ("bos_id", None),
    "eos_token_id": ("eos_id", None),
}
_CLASSES = {"BertModel": "none", "BertForMaskedLM": "masked-lm", "BertForSequenceClassification": "classify"}
# XLM-R and CamemBERT are RoBERTa under other class names; what is saved is called RoBERTa.
_ROBERTA_CLASSES = {
    f"{name}{kind}": head
    for name in ("Roberta", "XLMRoberta", "Camembert")
    for kind, head in {"Model": "none", "ForMaskedLM": "masked-lm", "ForSequenceClassification": "classify"}.items()
}
_LAYER = {
    "attention.output.dense": "attention.w_o",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "ff.w_in",
    "output.dense": "ff.w_out",
    "output.LayerNorm": "ff_norm",
}


def read_text(theirs: ForeignFields, classes: dict[str, str], fields: Fields, activation: str) -> dict[str, Any]:
    """Our fields of a BERT-like encoder with segments."""
    theirs.only("is_decoder", False)
    theirs.only("add_cross_attention", False)
    theirs.only("position_embedding_type", "absolute")
    theirs.only("pruned_heads", {})
    ours = {
        **TEXT,
        **read_fields(theirs, fields),
        **read_head(theirs, classes, "tanh", "tanh"),
        "activation": theirs.activation("hidden_act", activation),
    }
    if ours["n_segments"] < 1:
        raise ValueError(f"config.json has type_vocab_size={ours['n_segments']}; {theirs.model_type} needs at least 1")
    return {**ours, "embedding_dropout": ours["dropout"]}


def read(theirs: ForeignFields) -> ModelConfig:
    ours = read_text(theirs, _CLASSES, FIELDS, "gelu")
    return ModelConfig(**ours, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"]))


def read_roberta(theirs: ForeignFields) -> ModelConfig:
    ours = read_text(theirs, _ROBERTA_CLASSES, {**FIELDS, "pad_token_id": ("pad_id", 1)}, "gelu")
    ours["position_offset"] = ours["pad_id"] + 1
    ours["max_len"] -= ours["position_offset"]
    if ours["head"] == "masked-lm" and ours["activation"] != "gelu":
        ours["head_activation"] = "gelu"
    return ModelConfig(
        **ours, positions_skip_padding=True, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"])
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **write_head(config, _CLASSES),
        **write_fields(config, FIELDS),
        "hidden_act": from_our_activation(config.activation),
        "classifier_dropout": config.classifier_dropout,
    }


def write_roberta(config: ModelConfig) -> dict[str, Any]:
    return {
        **write(config),
        "model_type": "roberta",
        **write_head(config, _ROBERTA_CLASSES),
        "max_position_embeddings": config.max_len + config.position_offset,
    }


def _encoder(config: ModelConfig, prefix: str) -> list[Step]:
    qkv = tuple(f"attention.self.{x}" for x in QUERY_KEY_VALUE)
    return [
        *text_embeddings(prefix),
        *layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, qkv),
    ]


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "bert."
    head: list[Step] = []
    if config.head == "masked-lm":
        table, cls = f"{prefix}embeddings.word_embeddings.weight", "cls.predictions"
        transform = (f"{cls}.transform.dense", f"{cls}.transform.LayerNorm")
        head = [
            *drop_modules(f"{prefix}pooler.dense", "cls.seq_relationship"),
            *masked_head(config, table, *transform, decoder=f"{cls}.decoder", bias=f"{cls}.bias"),
        ]
    elif config.head == "classify":
        head = modules({f"{prefix}pooler.dense": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [*OLD_NORMS, *head, *_encoder(config, prefix)]


def roberta_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "roberta."
    head = [] if config.head == "none" else drop_modules(f"{prefix}pooler.dense")
    if config.head == "masked-lm":
        table, names = f"{prefix}embeddings.word_embeddings.weight", ("dense", "layer_norm", "decoder", "bias")
        head += masked_head(config, table, *(f"lm_head.{x}" for x in names))
    elif config.head == "classify":
        head += modules({"classifier.dense": "classifier.pooler.dense", "classifier.out_proj": "classifier.out"})
    return [*OLD_NORMS, *head, *_encoder(config, prefix)]


BERT = Family(("bert",), read, write, steps)
ROBERTA = Family(("roberta", "xlm-roberta", "camembert"), read_roberta, write_roberta, roberta_steps)
