"""BERT (Devlin et al. 2019) and its descendants.

RoBERTa      positions start after the padding id (Liu et al. 2019)
Longformer   RoBERTa with a window, and separate projections for global tokens (Beltagy et al. 2020)
BigBird      BERT with block-sparse attention (Zaheer et al. 2020)
ALBERT       weights shared by all layers, narrower token embeddings (Lan et al. 2020)
DistilBERT   no segments, no pooler, a fixed ε (Sanh et al. 2019)
ELECTRA      BERT's encoder with other heads; small models have narrower token embeddings (Clark et al. 2020)
FNet         a Fourier transform instead of attention (Lee-Thorp et al. 2022)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Step

_FIELDS = hf.field_names("encoder", "bert")
_QKV = [f"attention.self.{x}" for x in hf.QUERY_KEY_VALUE]
_BERT_CLASSES = hf.encoder_classes("Bert")
_WITHOUT_POOLER = ("masked-lm", "span", "tag")  # heads that do not read it, though a file may still hold it
_BERT_MASKED = [f"cls.predictions.{x}" for x in ("transform.dense", "transform.LayerNorm", "decoder", "bias")]
# XLM-R and CamemBERT are RoBERTa under other class names; they are saved as RoBERTa.
_ROBERTA_CLASSES = hf.encoder_classes("Roberta", "XLMRoberta", "Camembert")


def _read_text(theirs: hf.ForeignFields, classes: dict[str, str], fields: hf.Fields, activation: str) -> dict[str, Any]:
    """Our fields for a BERT-like encoder with segments."""
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
    """The steps of a head; ``masked`` are the dense layer, norm, decoder and bias of the masked-token head."""
    if config.head == "masked-lm":
        return hf.masked_head(config, f"{prefix}embeddings.word_embeddings.weight", *masked)
    if config.head == "span":
        return hf.modules({"qa_outputs": "classifier.out"})
    if config.head == "tag":
        return hf.modules({"classifier": "classifier.out"})
    names = {pooler: "classifier.pooler.dense", classifier: "classifier.out"}
    return hf.modules(names) if config.head == "classify" else []


def read_bert(theirs: hf.ForeignFields) -> ModelConfig:
    ours = _read_text(theirs, _BERT_CLASSES, _FIELDS, "gelu")
    return ModelConfig(**ours, classifier_dropout=theirs.get("classifier_dropout", ours["dropout"]))


def write_bert(config: ModelConfig, classes: Mapping[str, str] = _BERT_CLASSES) -> dict[str, Any]:
    return hf.write_encoder(config, "bert", classes, _FIELDS) | {"classifier_dropout": config.classifier_dropout}


def bert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "bert."
    has_no_pooler = config.head in _WITHOUT_POOLER
    return [
        *hf.OLD_NORMS,
        *(hf.drop_modules(f"{prefix}pooler.dense", "cls.seq_relationship") if has_no_pooler else []),
        *_head_steps(config, prefix, _BERT_MASKED, f"{prefix}pooler.dense", "classifier"),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


def _read_roberta_like(theirs: hf.ForeignFields, classes: dict[str, str]) -> dict[str, Any]:
    ours = _read_text(theirs, classes, {**_FIELDS, "pad_token_id": ("pad_id", 1)}, "gelu")
    ours["position_offset"] = ours["pad_id"] + 1
    ours["max_len"] -= ours["position_offset"]
    if ours["head"] == "masked-lm" and ours["activation"] != "gelu":
        ours["head_activation"] = "gelu"
    dropout = theirs.get("classifier_dropout", ours["dropout"])
    return {**ours, "positions_skip_padding": True, "classifier_dropout": dropout}


def read_roberta(theirs: hf.ForeignFields) -> ModelConfig:
    return ModelConfig(**_read_roberta_like(theirs, _ROBERTA_CLASSES))


def write_roberta(config: ModelConfig, classes: Mapping[str, str] = _ROBERTA_CLASSES) -> dict[str, Any]:
    return {
        **write_bert(config, classes),
        "model_type": "roberta",
        "max_position_embeddings": config.max_len + config.position_offset,
    }


def roberta_steps(config: ModelConfig, name: str = "roberta") -> list[Step]:
    prefix = "" if config.head == "none" else f"{name}."
    masked = [f"lm_head.{x}" for x in ("dense", "layer_norm", "decoder", "bias")]
    return [
        *hf.OLD_NORMS,
        *([] if config.head == "none" else hf.drop_modules(f"{prefix}pooler.dense")),
        *_head_steps(config, prefix, masked, "classifier.dense", "classifier.out_proj"),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


# Question answering is left out: its global tokens depend on the separators, for which we have no config field.
_LONGFORMER_CLASSES = {
    name: head
    for name, head in hf.encoder_classes("Longformer").items()
    if not name.endswith(("Training", "Answering"))
}


def read_longformer(theirs: hf.ForeignFields) -> ModelConfig:
    """transformers makes the first token global for a classifier, and none for the other heads."""
    ours = _read_roberta_like(theirs, _LONGFORMER_CLASSES)
    windows = theirs.get("attention_window", 512)
    windows = [windows] * ours["n_layers"] if isinstance(windows, int) else windows
    if len(windows) != ours["n_layers"] or len(set(windows)) > 1 or windows[0] % 2 or windows[0] < 2:
        raise ValueError(
            f"config.json has attention_window={windows}; regard supports one even number for all of "
            f"{ours['n_layers']} layers"
        )
    # attention_window counts the keys on both sides; our window counts one side and the token itself.
    return ModelConfig(
        **ours, window=windows[0] // 2 + 1, global_tokens=int(ours["head"] == "classify"), global_projections=True
    )


def write_longformer(config: ModelConfig) -> dict[str, Any]:
    if config.window is None:
        raise ValueError("window=None: a Longformer needs a window")
    fields = write_roberta(config, _LONGFORMER_CLASSES)
    return {**fields, "model_type": "longformer", "attention_window": [2 * (config.window - 1)] * config.n_layers}


def longformer_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "longformer."
    theirs = [f"{prefix}encoder.layer.{{i}}.{x}_global" for x in _QKV]
    rows = (config.d_model,) * 3
    joins = hf.join_modules(theirs, "encoder.blocks.{i}.attention.w_qkv_global", rows)
    return [*roberta_steps(config, "longformer"), *joins]


_BIG_BIRD_CLASSES = {
    f"BigBird{kind}": head
    for kind, head in {"Model": "none", "ForMaskedLM": "masked-lm", "ForPreTraining": "masked-lm"}.items()
}
_BIG_BIRD_FIELDS = hf.field_names("encoder", "bert", "big_bird")
_BIG_BIRD_KINDS = {"block_sparse": "end-blocks", "original_full": "none"}


def read_big_bird(theirs: hf.ForeignFields) -> ModelConfig:
    """The classes with a head also have a pooler, which the head does not read."""
    theirs.only("attention_type", *_BIG_BIRD_KINDS)
    ours = _read_text(theirs, _BIG_BIRD_CLASSES, _BIG_BIRD_FIELDS, "gelu_new")
    if ours["head"] != "none":
        ours["pooler"] = "tanh"
    kind = theirs.get("attention_type", "block_sparse")
    if kind == "block_sparse":
        ours |= {"sparsity_size": theirs.get("block_size", 64), "sparsity_repeats": theirs.get("num_random_blocks", 3)}
    return ModelConfig(**ours | {"sparsity": _BIG_BIRD_KINDS[kind]})


def write_big_bird(config: ModelConfig) -> dict[str, Any]:
    kinds = {ours: theirs for theirs, ours in _BIG_BIRD_KINDS.items()}
    if config.sparsity not in kinds or (config.head != "none" and config.pooler != "tanh"):
        raise ValueError(f"sparsity={config.sparsity!r} with pooler={config.pooler!r} is not a BigBird")
    return {
        **hf.write_encoder(config, "big_bird", _BIG_BIRD_CLASSES, _BIG_BIRD_FIELDS),
        "attention_type": kinds[config.sparsity],
        "block_size": config.sparsity_size,
        "num_random_blocks": config.sparsity_repeats,
    }


def big_bird_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "bert."
    return [
        *hf.OLD_NORMS,
        *hf.drop_modules("cls.seq_relationship"),
        *_head_steps(config, prefix, _BERT_MASKED, "", ""),
        *hf.modules({f"{prefix}pooler": "pooler.dense"}),
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
    fields = hf.write_encoder(config, "albert", _ALBERT_CLASSES, _ALBERT_FIELDS)
    return fields | {"num_hidden_groups": 1, "inner_group_num": 1}


def albert_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "albert."
    masked = [f"predictions.{x}" for x in ("dense", "LayerNorm", "decoder", "bias")]
    layer = f"{prefix}encoder.albert_layer_groups.0.albert_layers.0."
    qkv = [f"attention.{x}" for x in hf.QUERY_KEY_VALUE]
    pooler = hf.modules({"pooler": "pooler.dense"}) if config.head == "none" else []
    if config.head in _WITHOUT_POOLER:
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
    """``sinusoidal_pos_embds`` only affects the initial position table, which the file holds in any case."""
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
    fields = hf.write_encoder(config, "distilbert", _DISTILBERT_CLASSES, _DISTILBERT_FIELDS, activation="activation")
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
_ELECTRA_CLASSES["ElectraForPreTraining"] = "replaced"
_DETECTOR = {"dense": "dense", "dense_prediction": "out"}
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
        **write_bert(config, _ELECTRA_CLASSES),
        "model_type": "electra",
        "embedding_size": config.d_embed or config.d_model,
    }


def electra_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "electra."
    masked = [f"generator_{x}" for x in ("predictions.dense", "predictions.LayerNorm", "lm_head", "lm_head.bias")]
    return [
        *hf.OLD_NORMS,
        *_head_steps(config, prefix, masked, "classifier.dense", "classifier.out_proj"),
        *(hf.modules(_DETECTOR, "discriminator_predictions.", "detector.") if config.head == "replaced" else []),
        *hf.modules({f"{prefix}embeddings_project": "embeddings.projection"}),
        *hf.text_embeddings(prefix),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", hf.layer_names("bert"), _QKV),
    ]


_FNET_CLASSES = {
    f"FNet{kind}": head
    for kind, head in {
        **{"Model": "none", "ForMaskedLM": "masked-lm", "ForPreTraining": "masked-lm"},
        "ForSequenceClassification": "classify",
    }.items()
}
_FNET_FIELDS = hf.field_names("encoder", "fnet")


def read_fnet(theirs: hf.ForeignFields) -> ModelConfig:
    """transformers mixes padding like any other token; regard leaves it out if there is a padding mask."""
    theirs.only("use_tpu_fourier_optimizations", False)
    ours = {
        **hf.TEXT,
        **hf.read_fields(theirs, _FNET_FIELDS),
        **hf.read_head(theirs, _FNET_CLASSES, "tanh", "tanh"),
        "activation": theirs.activation("hidden_act", "gelu_new"),
    }
    if ours["head"] == "masked-lm":
        ours["pooler"] = "tanh"
    dropouts = dict.fromkeys(("embedding_dropout", "classifier_dropout"), ours["dropout"])
    # A projection after the embeddings of the same width (d_embed = d_model); no heads.
    return ModelConfig(**ours, **dropouts, mixer="fourier", d_embed=ours["d_model"], n_heads=1)


def write_fnet(config: ModelConfig) -> dict[str, Any]:
    if config.head == "masked-lm" and config.pooler != "tanh":
        raise ValueError(f"pooler={config.pooler!r}: an FNet with a masked-token head has a tanh pooler")
    return hf.write_encoder(config, "fnet", _FNET_CLASSES, _FNET_FIELDS)


def fnet_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "fnet."
    pooler = [] if config.head == "classify" else hf.modules({f"{prefix}pooler.dense": "pooler.dense"})
    return [
        *hf.drop_modules("cls.seq_relationship"),
        *pooler,
        *_head_steps(config, prefix, _BERT_MASKED, f"{prefix}pooler.dense", "classifier"),
        *hf.modules({f"{prefix}embeddings.projection": "embeddings.projection"}),
        *hf.text_embeddings(prefix),
        *hf.modules(hf.layer_names("fnet"), f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}."),
    ]


BERT = hf.Family(("bert",), read_bert, write_bert, bert_steps)
ROBERTA = hf.Family(("roberta", "xlm-roberta", "camembert"), read_roberta, write_roberta, roberta_steps)
LONGFORMER = hf.Family(("longformer",), read_longformer, write_longformer, longformer_steps)
BIG_BIRD = hf.Family(("big_bird",), read_big_bird, write_big_bird, big_bird_steps)
ALBERT = hf.Family(("albert",), read_albert, write_albert, albert_steps)
ELECTRA = hf.Family(("electra",), read_electra, write_electra, electra_steps)
DISTILBERT = hf.Family(("distilbert",), read_distilbert, write_distilbert, distilbert_steps)
FNET = hf.Family(("fnet",), read_fnet, write_fnet, fnet_steps)
