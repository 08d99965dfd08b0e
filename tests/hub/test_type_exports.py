"""Every type of the table as ONNX graphs and in int8, each with its certificate; what has no such form says why.

REGARD_TRUST=1 exports every type instead of one of each structure.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.config import ModelConfig
from regard.export import export
from regard.export.export_model import Kind
from regard.export.onnx_graphs import onnx_obstacle
from regard.hub import write_config
from regard.hub.families import BY_TYPE
from regard.models import Model, build

from .test_model_types import default_config

# One of each structure; the other types differ from it in fields whose graphs tests/export has.
STRUCTURES = ("mixtral", "mamba2", "m2m_100", "longformer", "big_bird", "swin", "clip")
TYPES = tuple(BY_TYPE) if os.environ.get("REGARD_TRUST") else STRUCTURES
SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "max_len": 40, "image_size": 16},
    **{"patch_size": 4, "n_decoder_layers": 2, "n_decoder_heads": 4, "d_decoder_ff": 48, "d_head": 8, "d_embed": 16},
    **{"window": 5, "window_layers": (0,), "rope_layers": (0,), "experts": 4, "experts_per_token": 2, "d_shared": 16},
    **{"bos_id": 2, "eos_id": 3, "mixer_size": 12, "shifted_windows": 2, "stages": (1, 1), "stage_heads": (2, 4)},
    **{"sparsity_size": 2, "sparsity_repeats": 1},
}


def tiny_config(model_type: str) -> ModelConfig:
    """The type with every size of it small, and its features as they are."""
    return shrink(default_config(model_type))


def shrink(config: ModelConfig) -> ModelConfig:
    features = config.model_dump(exclude_defaults=True)
    sizes = {name: value for name, value in SIZES.items() if getattr(config, name) is not None}
    if config.n_kv_heads is not None:
        sizes["n_kv_heads"] = 4 if config.n_kv_heads == config.n_heads else 2
    if config.d_embed == config.d_model:
        sizes["d_embed"] = SIZES["d_model"]
    if config.mixing.recurrent:
        width = min(SIZES["d_head"], config.head_width)
        sizes |= {"n_heads": 64 // width, "d_head": width, "d_ff": 0}  # twice as wide as the model
    if config.logit_scale != 1:
        sizes["logit_scale"] = SIZES["d_model"] ** -0.5
    if config.text_model is not None:
        sizes["text_model"] = {
            **features["text_model"],
            **{name: SIZES[name] for name in ("d_model", "n_layers", "n_heads", "d_ff")},
        }
    return ModelConfig(**features | sizes | {"pad_id": min(config.pad_id, 1) if config.position_offset else 0})


def tiny_model(model_type: str) -> Model:
    torch.manual_seed(0)
    model = build(tiny_config(model_type)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_onnx_and_int8(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    assert write_config(model.config).model_type == write_config(default_config(model_type)).model_type
    kinds: list[Kind] = ["int8", "onnx"]
    if (obstacle := onnx_obstacle(model.config)) is not None:
        kinds.remove("onnx")
        with pytest.raises(ValueError, match=re.escape(obstacle)):
            export(model, "onnx", tmp_path / "out")
    export(model, kinds, tmp_path / "out", n_shapes=6, compiled=False)
    document = json.loads((tmp_path / "out" / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in document["comparisons"] if "skipped" not in row}
    assert document["passes"], rows
    assert set(kinds) <= set(rows)
    if model.generates and "onnx" in kinds:
        assert rows["onnx"]["same_text"] == 1
