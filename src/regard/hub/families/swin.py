"""Swin (Liu et al. 2021): windows shifted in every other layer, and stages between which four patches become one."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Rename, Step
from .vit import square_sides

_CLASSES = {"SwinModel": "none", "SwinForImageClassification": "classify"}
_FIELDS, _LAYER = hf.field_names("swin"), hf.layer_names("vit")
_QKV = tuple(f"attention.self.{x}" for x in hf.QUERY_KEY_VALUE)


def _read(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("use_absolute_embeddings", False)
    depths, heads = theirs.get("depths", [2, 2, 6, 2]), theirs.get("num_heads", [3, 6, 12, 24])
    width = theirs.get("embed_dim", 96) * 2 ** (len(depths) - 1)
    ours = hf.read_fields(theirs, _FIELDS) | {"d_model": width, "n_heads": heads[-1]}
    ours = square_sides(theirs, ours) | {"positions": "window", "class_tokens": 0, "embedding_norm": True}
    head = hf.read_head(theirs, _CLASSES, pooler="none", class_pooler="none")
    return ModelConfig(
        **ours,
        **head,
        n_layers=sum(depths),
        stages=tuple(depths),
        stage_heads=tuple(heads),
        d_ff=int(width * theirs.get("mlp_ratio", 4.0)),
        pooling="mean",
        activation=theirs.activation("hidden_act", "gelu"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.stages is None or config.stage_heads is None:
        raise ValueError("stages=None: swin needs stages")
    return {
        **hf.write_encoder(config, "swin", _CLASSES, _FIELDS),
        "embed_dim": config.d_model // 2 ** (len(config.stages) - 1),
        "depths": list(config.stages),
        "num_heads": list(config.stage_heads),
        "mlp_ratio": config.d_ff / config.d_model,
    }


def _steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "swin."
    steps: list[Step] = [*hf.modules({"classifier": "classifier.out"})] if config.head == "classify" else []
    steps += hf.modules(
        {
            f"{prefix}embeddings.patch_embeddings.projection": "embeddings.patches",
            f"{prefix}embeddings.norm": "embeddings.norm",
            f"{prefix}layernorm": "encoder.norm",
        }
    )
    stages = len(config.stages or ())
    for stage in range(stages):
        theirs, ours = f"{prefix}encoder.layers.{stage}.", f"encoder.stages.{stage}.blocks.{{i}}."
        width = config.d_model // 2 ** (stages - 1 - stage)
        table = "attention.self.relative_position_bias_table"
        steps += [
            Rename(f"{theirs}blocks.{{i}}.{table}", f"{ours}attention.position_bias.w"),
            *hf.modules(_LAYER, f"{theirs}blocks.{{i}}.", ours),
            *hf.join_modules(
                [f"{theirs}blocks.{{i}}.{x}" for x in _QKV], f"{ours}attention.w_qkv", (width, width, width)
            ),
            Rename(f"{theirs}downsample.reduction.weight", f"encoder.merges.{stage}.w.weight"),
            *hf.modules({f"{theirs}downsample.norm": f"encoder.merges.{stage}.norm"}),
        ]
    return steps


SWIN = hf.Family(("swin",), _read, _write, _steps)
