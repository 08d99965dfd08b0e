"""BERT (Devlin et al. 2019), and RoBERTa (Liu et al. 2019), which counts positions behind a row for padding."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Step

FIELDS: hf.Fields = {
    "vocab_size": ("vocab_size", hf.NEEDED),
    "hidden_size": ("d_model", hf.NEEDED),
    "num_hidden_layers": ("n_layers", hf.NEEDED),
    "num_attention_heads": ("n_heads", hf.NEEDED),
    "intermediate_size": ("d_ff", hf.NEEDED),
    "max_position_embeddings": ("max_len", hf.NEEDED),
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
_CLASSES = hf.encoder_classes("Bert")
# XLM-R and CamemBERT are RoBERTa under other class names; what is saved is called RoBERTa.
_ROBERTA_CLASSES = hf.encoder_classes("Roberta", "XLMRoberta", "Camembert")
_LAYER = {
    "attention.output.dense": "attention.w_o",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "ff.w_in",
    "output.dense": "ff.w_out",
    "output.LayerNorm": "ff_norm",
}


def read_text(theirs: hf.ForeignFields, classes: dict[str, str], fields: hf.Fields, activation: str) -> dict[str, Any]:
    """Our fields of a BERT-like encoder with segments."""
    theirs.only("is_decoder", False)
    theirs.only("add_cross_attention", False)
    theirs.only("position_embedding_type", "absolute")
    theirs.only("pruned_heads", {})
    ours = {
        **hf.TEXT,
        **hf.read_fields(theirs, fields),
        **hf.read_head(theirs, classes, "tanh", "tanh"),
        "activation": theirs.activation("hidden_act", activation),
    }
    if ours["n_segments"] < 1:
        raise ValueError(f"config.json has type_vocab_size={ours['n_segments']}; {theirs.model_type} needs at least 1")
    return {**ours, "embedding_dropout": ours["dropout"]}


def read(theirs: hf.ForeignFields) -> ModelConfig:
    ours = read_text(theirs, _CLASSES, FIELDS, "gelu")
    return ModelConfig(**ours, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"]))


def read_roberta(theirs: hf.ForeignFields) -> ModelConfig:
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
        **hf.write_head(config, _CLASSES),
        **hf.write_fields(config, FIELDS),
        "hidden_act": hf.from_our_activation(config.activation),
        "classifier_dropout": config.classifier_dropout,
    }


def write_roberta(config: ModelConfig) -> dict[str, Any]:
    return {
        **write(config),
        "model_type": "roberta",
        **hf.write_head(config, _ROBERTA_CLASSES),
        "max_position_embeddings": config.max_len + config.position_offset,
    }


def _encoder(config: ModelConfig, prefix: str) -> list[Step]:
    qkv = tuple(f"attention.self.{x}" for x in hf.QUERY_KEY_VALUE)
    return [
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, qkv),
    ]


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "bert."
    head: list[Step] = []
    if config.head == "masked-lm":
        table, cls = f"{prefix}embeddings.word_embeddings.weight", "cls.predictions"
        transform = (f"{cls}.transform.dense", f"{cls}.transform.LayerNorm")
        head = [
            *hf.drop_modules(f"{prefix}pooler.dense", "cls.seq_relationship"),
            *hf.masked_head(config, table, *transform, decoder=f"{cls}.decoder", bias=f"{cls}.bias"),
        ]
    elif config.head == "classify":
        head = hf.modules({f"{prefix}pooler.dense": "classifier.pooler.dense", "classifier": "classifier.out"})
    return [*hf.OLD_NORMS, *head, *_encoder(config, prefix)]


def roberta_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "roberta."
    head = [] if config.head == "none" else hf.drop_modules(f"{prefix}pooler.dense")
    if config.head == "masked-lm":
        table, names = f"{prefix}embeddings.word_embeddings.weight", ("dense", "layer_norm", "decoder", "bias")
        head += hf.masked_head(config, table, *(f"lm_head.{x}" for x in names))
    elif config.head == "classify":
        head += hf.modules({"classifier.dense": "classifier.pooler.dense", "classifier.out_proj": "classifier.out"})
    return [*hf.OLD_NORMS, *head, *_encoder(config, prefix)]


BERT = hf.Family(("bert",), read, write, steps)
ROBERTA = hf.Family(("roberta", "xlm-roberta", "camembert"), read_roberta, write_roberta, roberta_steps)
