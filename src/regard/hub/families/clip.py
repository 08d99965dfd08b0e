"""Two towers: CLIP (Radford et al. 2021) with a causal text tower, SigLIP (Zhai et al. 2023) with a sigmoid loss."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Drop, Rename, Reshape, SplitRows, Step
from .vit import square_sides

_TOWER, _TEXT = hf.field_names("tower"), hf.field_names("tower_text")
_TEXT_TOWER, _IMAGE_TOWER = hf.field_names("tower", "tower_text"), hf.field_names("tower", "tower_vision")
_LAYER = hf.layer_names("tower")
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {  # values of missing fields
    "clip": {
        "text_config": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 49408},
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": 32},
        "both": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 77},
    },
    "siglip": {
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "vocab_size": 32000},
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": 16},
        "both": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "max_position_embeddings": 64},
    },
}


def _towers(theirs: hf.ForeignFields) -> tuple[hf.ForeignFields, hf.ForeignFields]:
    """The sections of text and image tower, with defaults for missing fields.

    Older CLIP files also have ``text_config_dict`` and ``vision_config_dict``, which replace the sections.
    """
    defaults = _DEFAULTS[theirs.model_type]

    def section(name: str) -> hf.ForeignFields:
        stored = theirs.get(f"{name}_dict", theirs.get(name, {}))
        stored = {key: value for key, value in stored.items() if value is not None}
        fields = {"num_hidden_layers": 12, **defaults["both"], **defaults[name], **stored}
        return hf.ForeignFields({**fields, "model_type": theirs.model_type})

    return section("text_config"), section("vision_config")


def _read(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.head({"SiglipModel" if theirs.model_type == "siglip" else "CLIPModel": "none"})
    text, vision = _towers(theirs)
    ours = square_sides(vision, {"dropout": 0.0, **hf.read_fields(vision, _IMAGE_TOWER)})
    ours |= {"activation": vision.activation("hidden_act", ""), "head": "none", "architecture": "two-tower"}
    fields: dict[str, Any] = hf.read_fields(text, _TOWER)
    fields |= {"activation": text.activation("hidden_act", ""), "head": "none", "positions": "learned"}
    fields |= {"norm_place": "pre"}
    tokens = hf.read_fields(text, _TEXT) | _token_ids(text)
    if theirs.model_type == "siglip":
        vision.only("vision_use_head", True)
        text.only("projection_size", ours["d_model"])
        fields |= {"architecture": "encoder", "pooling": "last"}
        special: dict[str, Any] = {"class_tokens": 0, "pooling": "map", "contrast": "sigmoid"}
    else:
        fields |= {"architecture": "decoder", "pooling": "end"}
        special = {"patch_bias": False, "embedding_norm": True, "d_shared": theirs.get("projection_dim", 512)}
    return ModelConfig(**ours, **tokens, **special, text_model=ModelConfig(**fields))


def _token_ids(text: hf.ForeignFields) -> dict[str, Any]:
    """Padding, start and end token. Older CLIP files give 2 as the end but mean the last token of the vocabulary."""
    size = text.need("vocab_size")
    bos_id, eos_id = text.get("bos_token_id", 49406), text.token_id("eos_token_id")
    eos_id = 49407 if eos_id is None else eos_id
    if text.model_type == "clip" and eos_id == 2:
        bos_id, eos_id = size - 2, size - 1
    # SigLIP's defaults are outside its vocabulary.
    ids = {"bos_id": bos_id if bos_id < size else None, "eos_id": eos_id if eos_id < size else None}
    return {"pad_id": text.get("pad_token_id", 1), **ids}


def _write(config: ModelConfig) -> dict[str, Any]:
    text, sigmoid = config.text_tower, config.contrast == "sigmoid"
    ids = {"pad_token_id": config.pad_id, "bos_token_id": config.bos_id, "eos_token_id": config.eos_id}
    fields = {
        **hf.write_fields(text, _TEXT_TOWER),
        **{name: index for name, index in ids.items() if index is not None},
        "hidden_act": hf.from_our_activation(text.activation),
    }
    vision = hf.write_fields(config, _IMAGE_TOWER)
    vision |= {"hidden_act": hf.from_our_activation(config.activation)}
    both = {"text_config": fields, "vision_config": vision}
    if sigmoid:
        fields["projection_size"] = config.d_model
        return {"model_type": "siglip", "architectures": ["SiglipModel"], **both}
    for tower in both.values():
        tower["projection_dim"] = config.d_shared
    return {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": config.d_shared, **both}


def _steps(config: ModelConfig) -> list[Step]:
    text, width = config.text_tower, config.d_model
    names = {
        "text_model.final_layer_norm": "decoder.norm",
        "text_model.head" if config.contrast == "sigmoid" else "text_projection": "text_projection",
        "visual_projection": "image_projection",
        "vision_model.embeddings.patch_embedding": "embeddings.patches",
        "vision_model.pre_layrnorm": "embeddings.norm",
        "vision_model.post_layernorm": "encoder.norm",
    }
    return [
        Drop("text_model.embeddings.position_ids"),
        Drop("vision_model.embeddings.position_ids"),
        Rename("logit_scale", "log_scale"),
        *([] if config.contrast == "sigmoid" else [Reshape("log_scale", (), (1,))]),
        Rename("logit_bias", "bias"),
        Rename("text_model.embeddings.token_embedding.weight", "token.weight"),
        Rename("text_model.embeddings.position_embedding.weight", "target_embeddings.position.weight"),
        Rename("vision_model.embeddings.class_embedding", "embeddings.class_token"),
        Reshape("embeddings.class_token", (width,), (1, width)),
        Rename("vision_model.embeddings.position_embedding.weight", "embeddings.position.weight"),
        *hf.modules(names),
        *_pooler_steps(config),
        *hf.layer(text, "text_model.encoder.layers.{i}.", "decoder.blocks.{i}.", _LAYER, _QKV),
        *hf.layer(config, "vision_model.encoder.layers.{i}.", "encoder.blocks.{i}.", _LAYER, _QKV),
    ]


def _pooler_steps(config: ModelConfig) -> list[Step]:
    theirs, ours, width = "vision_model.head.", "pooler.", config.d_model
    names = {"attention.out_proj": "attention.w_o", "layernorm": "norm", "mlp.fc1": "ff.w_in", "mlp.fc2": "ff.w_out"}
    parts = [
        SplitRows(
            f"{theirs}attention.in_proj_{kind}",
            (f"{ours}attention.w_query.{kind}", f"{ours}attention.w_kv.{kind}"),
            (width, 2 * width),
        )
        for kind in ("weight", "bias")
    ]
    return [
        Rename(f"{theirs}probe", f"{ours}query"),
        Reshape(f"{ours}query", (1, 1, width), (width,)),
        *parts,
        *hf.modules(names, theirs, ours),
    ]


CLIP = hf.Family(("clip", "siglip"), _read, _write, _steps)
