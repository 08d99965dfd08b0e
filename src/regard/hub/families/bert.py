"""BERT (Devlin et al. 2019) and its line.

RoBERTa (Liu et al. 2019) counts positions behind a row for padding; ALBERT (Lan et al. 2020) has one set of weights for
all layers and a narrower token table; DistilBERT (Sanh et al. 2019) has no segments, no pooler and a fixed ε; ELECTRA
(Clark et al. 2020) has BERT's body, a narrower token table where it is small, and other heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Step

_FIELDS = hf.field_names("encoder", "bert")
_QKV = [f"attention.self.{x}" for x in hf.QUERY_KEY_VALUE]
_BERT_CLASSES = hf.encoder_classes("Bert")
# XLM-R and CamemBERT are RoBERTa under other class names; what is saved is called RoBERTa.
_ROBERTA_CLASSES = hf.encoder_classes("Roberta", "XLMRoberta", "Camembert")


def _read_text(theirs: hf.ForeignFields, classes: dict[str, str], fields: hf.Fields, activation: str) -> dict[str, Any]:
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


def _head_steps(config: ModelConfig, prefix: str, masked: Sequence[str], pooler: str, classifier: str) -> list[Step]:
    """The tensors of a head; ``masked`` are dense layer, norm, decoder and bias of the one for masked tokens."""
    if config.head == "masked-lm":
        return hf.masked_head(config, f"{prefix}embeddings.word_embeddings.weight", *masked)
    if config.head == "tag":
        return hf.modules({"classifier": "classifier.out"})
    names = {pooler: "classifier.pooler.dense", classifier: "classifier.out"}
    return hf.modules(names) if config.head == "classify" else []


def read_bert(theirs: hf.ForeignFields) -> ModelConfig:
    ours = _read_text(theirs, _BERT_CLASSES, _FIELDS, "gelu")
    return ModelConfig(**ours, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"]))


def write_bert(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **hf.write_head(config, _BERT_CLASSES),
        **hf.write_fields(config, _FIELDS),
        "hidden_act": hf.from_our_activation(config.activation),
        "classifier_dropout": config.classifier_dropout,
    }


def bert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "bert."
    masked = [f"cls.predictions.{x}" for x in ("transform.dense", "transform.LayerNorm", "decoder", "bias")]
    is_masked = config.head == "masked-lm"
    return [
        *hf.OLD_NORMS,
        *(hf.drop_modules(f"{prefix}pooler.dense", "cls.seq_relationship") if is_masked else []),
        *_head_steps(config, prefix, masked, f"{prefix}pooler.dense", "classifier"),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


def read_roberta(theirs: hf.ForeignFields) -> ModelConfig:
    ours = _read_text(theirs, _ROBERTA_CLASSES, {**_FIELDS, "pad_token_id": ("pad_id", 1)}, "gelu")
    ours["position_offset"] = ours["pad_id"] + 1
    ours["max_len"] -= ours["position_offset"]
    if ours["head"] == "masked-lm" and ours["activation"] != "gelu":
        ours["head_activation"] = "gelu"
    return ModelConfig(
        **ours, positions_skip_padding=True, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"])
    )


def write_roberta(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_bert(config),
        "model_type": "roberta",
        **hf.write_head(config, _ROBERTA_CLASSES),
        "max_position_embeddings": config.max_len + config.position_offset,
    }


def roberta_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "roberta."
    masked = [f"lm_head.{x}" for x in ("dense", "layer_norm", "decoder", "bias")]
    return [
        *hf.OLD_NORMS,
        *([] if config.head == "none" else hf.drop_modules(f"{prefix}pooler.dense")),
        *_head_steps(config, prefix, masked, "classifier.dense", "classifier.out_proj"),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


_ALBERT_CLASSES = hf.encoder_classes("Albert")
_ALBERT_FIELDS = hf.field_names("encoder", "bert", "albert")


def read_albert(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("num_hidden_groups", 1)
    theirs.only("inner_group_num", 1)
    return ModelConfig(**_read_text(theirs, _ALBERT_CLASSES, _ALBERT_FIELDS, "gelu_new"), share_layers=True)


def write_albert(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "albert",
        **hf.write_head(config, _ALBERT_CLASSES),
        **hf.write_fields(config, _ALBERT_FIELDS),
        "hidden_act": hf.from_our_activation(config.activation),
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def albert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "albert."
    masked = [f"predictions.{x}" for x in ("dense", "LayerNorm", "decoder", "bias")]
    layer = f"{prefix}encoder.albert_layer_groups.0.albert_layers.0."
    qkv = [f"attention.{x}" for x in hf.QUERY_KEY_VALUE]
    pooler = hf.modules({"pooler": "pooler.dense"}) if config.head == "none" else []
    if config.head == "masked-lm":
        pooler = hf.drop_modules(f"{prefix}pooler", "sop_classifier.classifier")
    return [
        *hf.OLD_NORMS,
        *pooler,
        *_head_steps(config, prefix, masked, f"{prefix}pooler", "classifier"),
        *hf.modules({f"{prefix}encoder.embedding_hidden_mapping_in": "embeddings.projection"}),
        *hf.text_embeddings(prefix),
        *hf.layer(config, layer, "encoder.blocks.0.", hf.layer_names("albert"), qkv),
    ]


_DISTILBERT_CLASSES = hf.encoder_classes("DistilBert")
_DISTILBERT_FIELDS = hf.field_names("encoder", "distilbert")


def read_distilbert(theirs: hf.ForeignFields) -> ModelConfig:
    """``sinusoidal_pos_embds`` only says what the table started as; the file holds it either way."""
    theirs.only("pruned_heads", {})
    ours = hf.read_fields(theirs, _DISTILBERT_FIELDS)
    return ModelConfig(
        **hf.TEXT,
        **ours,
        **hf.read_head(theirs, _DISTILBERT_CLASSES, pooler="none", class_pooler="relu"),
        activation=theirs.activation("activation", "gelu"),
        norm_eps=1e-12,
        embedding_dropout=ours["dropout"],
    )


def write_distilbert(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "model_type": "distilbert",
        **hf.write_head(config, _DISTILBERT_CLASSES),
        **hf.write_fields(config, _DISTILBERT_FIELDS),
        "activation": hf.from_our_activation(config.activation),
    }
    fields.pop("has_pooler", None)
    return fields


def distilbert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "distilbert."
    masked = ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
    qkv = [f"attention.{x}_lin" for x in "qkv"]
    return [
        *hf.OLD_NORMS,
        *_head_steps(config, prefix, masked, "pre_classifier", "classifier"),
        *hf.text_embeddings(prefix),
        *hf.layer(
            config, f"{prefix}transformer.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("distilbert"), qkv
        ),
    ]


_ELECTRA_CLASSES = hf.encoder_classes("Electra")
del _ELECTRA_CLASSES["ElectraForPreTraining"]  # tells replaced tokens, which is no head of ours
_ELECTRA_FIELDS = hf.field_names("encoder", "bert", "electra")


def read_electra(theirs: hf.ForeignFields) -> ModelConfig:
    ours = _read_text(theirs, _ELECTRA_CLASSES, _ELECTRA_FIELDS, "gelu")
    ours |= {"pooler": "gelu" if ours["head"] == "classify" else "none", "head_activation": None}
    if ours["d_embed"] == ours["d_model"]:
        ours["d_embed"] = None
    if ours["head"] == "masked-lm" and ours["activation"] != "gelu":
        ours["head_activation"] = "gelu"
    return ModelConfig(**ours, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"]))


def write_electra(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_bert(config),
        "model_type": "electra",
        **hf.write_head(config, _ELECTRA_CLASSES),
        "embedding_size": config.d_embed or config.d_model,
    }


def electra_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "electra."
    masked = [f"generator_{x}" for x in ("predictions.dense", "predictions.LayerNorm", "lm_head", "lm_head.bias")]
    return [
        *hf.OLD_NORMS,
        *_head_steps(config, prefix, masked, "classifier.dense", "classifier.out_proj"),
        *hf.modules({f"{prefix}embeddings_project": "embeddings.projection"}),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


BERT = hf.Family(("bert",), read_bert, write_bert, bert_steps)
ROBERTA = hf.Family(("roberta", "xlm-roberta", "camembert"), read_roberta, write_roberta, roberta_steps)
ALBERT = hf.Family(("albert",), read_albert, write_albert, albert_steps)
ELECTRA = hf.Family(("electra",), read_electra, write_electra, electra_steps)
DISTILBERT = hf.Family(("distilbert",), read_distilbert, write_distilbert, distilbert_steps)
