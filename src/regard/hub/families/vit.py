"""ViT (Dosovitskiy et al. 2021): an image as a row of patches behind a class token, read by a pre-norm encoder."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Rename, Reshape, Step

_CLASSES = {"ViTModel": "none", "ViTForImageClassification": "classify"}
_FIELDS, _LAYER = hf.field_names("vit"), hf.layer_names("vit")


def read(theirs: hf.ForeignFields) -> ModelConfig:
    ours = hf.read_fields(theirs, _FIELDS)
    theirs.only("pruned_heads", {})
    theirs.only("pooler_act", "tanh", "relu")
    theirs.only("pooler_output_size", None, ours["d_model"])
    theirs.only("head_dim", None, ours["d_model"] // ours["n_heads"])
    for name in ("image_size", "patch_size"):  # one number, or two equal ones
        sides = {ours[name]} if isinstance(ours[name], int) else set(ours[name])
        if len(sides) > 1:
            raise ValueError(f"config.json has {name}={ours[name]}; regard's are square")
        ours[name] = sides.pop()
    return ModelConfig(
        architecture="encoder",
        source="image",
        positions="learned",
        norm_place="pre",
        **ours,
        **hf.read_head(theirs, _CLASSES, pooler=theirs.get("pooler_act", "tanh"), class_pooler="none"),
        activation=theirs.activation("hidden_act", "gelu"),
        embedding_dropout=ours["dropout"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "vit",
        **hf.write_head(config, _CLASSES),
        **hf.write_fields(config, _FIELDS),
        "hidden_act": hf.from_our_activation(config.activation),
        "pooler_act": "tanh" if config.pooler == "none" else config.pooler,
    }


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "vit."
    embeddings = f"{prefix}embeddings."
    qkv = tuple(f"attention.attention.{x}" for x in hf.QUERY_KEY_VALUE)
    places, width = (config.image_size // config.patch_size) ** 2 + 1, config.d_model
    head: list[Step] = []
    if config.head == "classify":
        head = [*hf.drop_modules(f"{prefix}pooler.dense"), *hf.modules({"classifier": "classifier.out"})]
    return [
        *head,
        *hf.modules({f"{embeddings}patch_embeddings.projection": "embeddings.patches"}),
        Rename(f"{embeddings}cls_token", "embeddings.class_token"),
        Reshape("embeddings.class_token", (1, 1, width), (1, width)),
        Rename(f"{embeddings}position_embeddings", "embeddings.position.weight"),
        Reshape("embeddings.position.weight", (1, places, width), (places, width)),
        *hf.modules({f"{prefix}layernorm": "encoder.norm"}),
        *hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, qkv),
    ]


VIT = hf.Family(("vit",), read, write, steps)
