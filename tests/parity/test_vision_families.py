"""DeiT and DINOv2: states, class logits and attention weights equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from regard.config import ModelConfig
from regard.lens import look
from regard.models import Encoder

from .common import check_defaults, check_directories, check_round_trips, close, refusal, tiny, twins

SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12, "patch_size": 4},
}
DEIT = {**SIZES, "intermediate_size": 40}
CASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "deit": (DeiTModel, DeiTConfig(**DEIT)),
    "deit, classes": (DeiTForImageClassification, DeiTConfig(**DEIT, num_labels=7)),
    "deit, two classifiers": (DeiTForImageClassificationWithTeacher, DeiTConfig(**DEIT, num_labels=7)),
    "dinov2": (Dinov2Model, Dinov2Config(**SIZES)),
    "dinov2, classes": (Dinov2ForImageClassification, Dinov2Config(**SIZES, num_labels=7, mlp_ratio=2)),
    "dinov2, swiglu, no mask token": (
        Dinov2ForImageClassification,
        Dinov2Config(**SIZES, use_swiglu_ffn=True, use_mask_token=False, hidden_act="gelu"),
    ),
    "registers": (Dinov2WithRegistersModel, Dinov2WithRegistersConfig(**SIZES, num_register_tokens=3)),
    "registers, classes, swiglu": (
        Dinov2WithRegistersForImageClassification,
        Dinov2WithRegistersConfig(**SIZES, num_labels=7, use_swiglu_ffn=True, layerscale_value=0.5),
    ),
}


def pixels_of_size(side: int = 12) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_both_ways(case: str, tmp_path: Path) -> None:
    model_class, config = CASES[case]
    theirs = tiny(model_class, config)
    pair = twins(theirs, tmp_path / "theirs")
    back = check_round_trips(pair, tmp_path)
    if "two" not in case:  # transformers has no automatic class for it
        check_directories(pair, tmp_path)
    ours, pixels = pair.ours, pixels_of_size()
    assert isinstance(ours, Encoder)
    for model in (theirs, back):
        told = model(pixels)
        close(ours(pixels), told.logits if ours.classifier is not None else told.last_hidden_state)
        if ours.pooler is not None:
            close(ours.pooled(ours(pixels)), told.pooler_output)


@pytest.mark.parametrize("case", ["deit, two classifiers", "registers, classes, swiglu"])
@torch.no_grad()
def test_the_lens_shows_their_attentions(case: str, tmp_path: Path) -> None:
    model_class, config = CASES[case]
    theirs = tiny(model_class, config)
    theirs.set_attn_implementation("eager")
    ours, pixels = twins(theirs, tmp_path).ours, pixels_of_size()[:1]
    seen, told = look(ours, pixels[0]), theirs(pixels, output_attentions=True).attentions
    for layer, weights in enumerate(told):
        for head in range(3):
            found = torch.as_tensor(seen.weights(layer=layer, head=head, kind="encoder"))
            torch.testing.assert_close(found.float(), weights[0, head], atol=1e-5, rtol=0)


@torch.no_grad()
def test_hidden_patches_become_the_mask_token(tmp_path: Path) -> None:
    pair = twins(tiny(*CASES["registers"]), tmp_path)
    pixels, masked = pixels_of_size(), torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    close(pair.ours.hidden(pixels, masked=masked), pair.theirs(pixels, bool_masked_pos=masked).last_hidden_state)
    with pytest.raises(ValueError, match="mask_token=True"):
        twins(tiny(*CASES["deit"]), tmp_path / "other").ours.hidden(pixels, masked=masked)


@torch.no_grad()
def test_images_of_another_size(tmp_path: Path) -> None:
    pair = twins(tiny(*CASES["dinov2, classes"]), tmp_path)
    close(pair.ours(pixels_of_size(20)), pair.theirs(pixels_of_size(20)).logits)


def test_missing_fields_mean_their_defaults() -> None:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    check_defaults(DeiTConfig(), *sizes, "intermediate_size")
    check_defaults(Dinov2Config(), *sizes)
    check_defaults(Dinov2WithRegistersConfig(), *sizes)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (DeiTConfig(**DEIT), "pooler_act", "gelu"),
        (DeiTConfig(**DEIT), "architectures", ["DeiTForMaskedImageModeling"]),
        (Dinov2Config(**SIZES), "drop_path_rate", 0.1),
        (Dinov2Config(**SIZES), "architectures", ["Dinov2Backbone"]),
        (Dinov2WithRegistersConfig(**SIZES), "hidden_act", "mish"),
        (Dinov2WithRegistersConfig(**SIZES), "image_size", [12, 8]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: PreTrainedConfig, field: str, value: Any) -> None:
    assert field.removesuffix("s") in refusal({**config.to_dict(), field: value})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "text", "class_tokens": 2}, "class_tokens=2 is for source='image'"),
        ({"source": "image", "head": "classify", "class_tokens": 0}, "reads a class token, but class_tokens=0"),
        ({"source": "text", "head": "classify", "pooling": "class-tokens"}, "needs source='image'"),
        ({"source": "image", "layer_scale": 0.1, "norm_place": "post"}, "needs norm_place='pre'"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig(architecture="encoder", **{"head": "none", **fields})
