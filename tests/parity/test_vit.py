"""ViT: states, pooled output and class logits equal to transformers', both ways, at its own and other image sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTModel

from regard.hub.families import BY_TYPE
from regard.hub.hf_family import ForeignFields
from regard.models import Encoder, Model
from regard.presets import preset

from .common import (
    check_defaults,
    check_directories,
    check_every_tensor_counts,
    check_round_trips,
    close,
    refusal,
    tiny,
    twins,
)

SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40},
    **{"image_size": 12, "patch_size": 4},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"hidden_act": "relu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "quick_gelu": {"hidden_act": "quick_gelu"},
    "eps": {"layer_norm_eps": 0.05},
    "no qkv bias": {"qkv_bias": False},
    "one channel": {"num_channels": 1},
    "patches of 3": {"patch_size": 3},
    "one patch": {"patch_size": 12},
    "sides as lists": {"image_size": [8, 8], "patch_size": [4, 4]},
    "five channels, 16 by 16": {"num_channels": 5, "image_size": 16, "patch_size": 2},
    "dropouts": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2},
}


def pixels_for(model: Model, height: int | None = None, width: int | None = None) -> Tensor:
    config = model.config
    size = (2, config.n_channels, height or config.image_size, width or config.image_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def compare(ours: Model, theirs: PreTrainedModel) -> None:
    assert isinstance(ours, Encoder)
    pixels = pixels_for(ours)
    told = theirs(pixels)
    if ours.classifier is not None:
        close(ours(pixels), told.logits)
        close(ours.hidden(pixels), theirs.vit(pixels).last_hidden_state)
        return
    close(ours(pixels), told.last_hidden_state)
    if ours.pooler is not None:
        close(ours.pooled(ours(pixels)), told.pooler_output)


def check(model_class: type[PreTrainedModel], config: ViTConfig, folder: Path, pooler: bool | None = None) -> Model:
    arguments = {} if pooler is None else {"add_pooling_layer": pooler}
    theirs = tiny(model_class, config, **arguments)
    pair = twins(theirs, folder / "theirs", **({} if pooler is None else {"has_pooler": pooler}))
    back = check_round_trips(pair, folder, **arguments)
    check_directories(pair, folder, **arguments)
    compare(pair.ours, theirs)
    compare(pair.ours, back)
    return pair.ours


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_classifier(features: dict[str, Any], tmp_path: Path) -> None:
    ours = check(ViTForImageClassification, ViTConfig(**SIZES | features, num_labels=7), tmp_path).config
    assert ours.n_classes == 7
    assert ours.dropout == ours.embedding_dropout == features.get("hidden_dropout_prob", 0.0)
    assert ours.attention_dropout == features.get("attention_probs_dropout_prob", 0.0)


@pytest.mark.parametrize("n_labels", [1, 2])
def test_few_classes(n_labels: int, tmp_path: Path) -> None:
    config = ViTConfig(**SIZES, num_labels=n_labels)
    assert check(ViTForImageClassification, config, tmp_path).config.n_classes == n_labels


@pytest.mark.parametrize("act", ["tanh", "relu"])
@pytest.mark.parametrize("pooler", [True, False])
def test_states_and_pooler(pooler: bool, act: str, tmp_path: Path) -> None:
    ours = check(ViTModel, ViTConfig(**SIZES, pooler_act=act), tmp_path, pooler).config
    assert ours.pooler == (act if pooler else "none")


@pytest.mark.parametrize(("height", "width"), [(20, 20), (8, 16), (12, 24)])
@torch.no_grad()
def test_images_of_another_size(height: int, width: int, tmp_path: Path) -> None:
    """The table of positions is stretched, as transformers does when it is asked to."""
    pair = twins(tiny(ViTForImageClassification, ViTConfig(**SIZES, num_labels=7)), tmp_path)
    pixels = pixels_for(pair.ours, height, width)
    close(pair.ours(pixels), pair.theirs(pixels, interpolate_pos_encoding=True).logits)


@pytest.mark.parametrize("head", [ViTModel, ViTForImageClassification])
@torch.no_grad()
def test_no_tensor_is_idle(head: type[PreTrainedModel], tmp_path: Path) -> None:
    ours = twins(tiny(head, ViTConfig(**SIZES)), tmp_path).ours
    assert isinstance(ours, Encoder)
    pixels = pixels_for(ours)

    def run() -> Tensor:
        out = ours(pixels)
        return out if ours.pooler is None else torch.cat((out[:, 0], ours.pooled(out)))

    check_every_tensor_counts(ours, run)


@pytest.mark.parametrize(
    "change", [{}, {"head": "none", "n_classes": 2}, {"head": "none", "n_classes": 2, "pooler": "tanh"}]
)
def test_the_preset_has_a_twin(change: dict[str, Any]) -> None:
    config = preset("vit-base-16", **change)
    assert BY_TYPE["vit"].read(ForeignFields(BY_TYPE["vit"].write(config))) == config


def test_local_windows_have_no_twin() -> None:
    config = preset("swin-tiny")
    assert BY_TYPE["vit"].read(ForeignFields(BY_TYPE["vit"].write(config))) != config


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(ViTConfig(), "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pooler_act", "gelu"),
        ("pooler_output_size", 30),
        ("image_size", [12, 8]),
        ("patch_size", [4, 2]),
        ("head_dim", 16),
        ("hidden_act", "mish"),
        ("pruned_heads", {"0": [1]}),
        ("image_size", 13),
        ("architectures", ["ViTForMaskedImageModeling"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert field.removesuffix("s") in refusal({**ViTConfig(**SIZES).to_dict(), field: value})
