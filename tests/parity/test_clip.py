"""CLIP and SigLIP: vectors and logits of both towers equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedConfig, PreTrainedModel, SiglipConfig, SiglipModel

from regard.config import ModelConfig
from regard.hub import write_config
from regard.hub.config_diff import differences
from regard.hub.families import BY_TYPE
from regard.hub.hf_family import ForeignFields
from regard.lens import look
from regard.models import TwoTower

from .common import check_directories, check_every_tensor_counts, check_round_trips, close, refusal, tiny, twins

TOWER: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
TEXT = {**TOWER, "hidden_size": 18, "vocab_size": 50, "max_position_embeddings": 9, "bos_token_id": 48}
TEXT |= {"eos_token_id": 49, "pad_token_id": 0}
VISION = {**TOWER, "hidden_size": 24, "image_size": 12, "patch_size": 4}
CASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "clip": (CLIPModel, CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)),
    "clip, gelu, another eps": (
        CLIPModel,
        CLIPConfig(text_config={**TEXT, "hidden_act": "gelu", "layer_norm_eps": 1e-3}, vision_config=VISION),
    ),
    "siglip": (
        SiglipModel,
        SiglipConfig(text_config={**TEXT, "projection_size": 24}, vision_config={**VISION, "hidden_act": "gelu"}),
    ),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of two images, three texts padded right, and which of their tokens are real."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 48, (3, 9), generator=generator)
    lengths = torch.tensor([9, 6, 4])
    tokens[torch.arange(3), lengths - 1] = 49
    keep = torch.arange(9) < lengths[:, None]
    return torch.randn(2, 3, 12, 12, generator=generator), torch.where(keep, tokens, 0), keep


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_both_ways(case: str, tmp_path: Path) -> None:
    model_class, config = CASES[case]
    theirs = tiny(model_class, config)
    pair = twins(theirs, tmp_path / "theirs")
    back = check_round_trips(pair, tmp_path)
    check_directories(pair, tmp_path)
    ours, (pixels, tokens, keep) = pair.ours, inputs()
    assert isinstance(ours, TwoTower)
    mask = None if config.model_type == "siglip" else keep
    for model in (theirs, back):
        named = {} if mask is None else {"attention_mask": mask.long()}
        told = model(pixel_values=pixels, input_ids=tokens, **named)
        close(ours.embed_images(pixels), told.image_embeds)
        close(ours.embed_texts(tokens, mask), told.text_embeds)
        close(ours(pixels, tokens, padding_mask=mask), told.logits_per_image)


@pytest.mark.parametrize("case", ["clip", "siglip"])
@torch.no_grad()
def test_no_tensor_is_idle(case: str, tmp_path: Path) -> None:
    ours, (pixels, tokens, _) = twins(tiny(*CASES[case]), tmp_path).ours, inputs()
    check_every_tensor_counts(ours, lambda: ours(pixels, tokens))


@pytest.mark.parametrize("case", ["clip", "siglip"])
@torch.no_grad()
def test_the_lens_shows_the_attentions_of_both_towers(case: str, tmp_path: Path) -> None:
    theirs = tiny(*CASES[case])
    theirs.set_attn_implementation("eager")
    ours, (pixels, tokens, _) = twins(theirs, tmp_path).ours, inputs()
    seen = look(ours, pixels[0], tokens[0].tolist())
    told = theirs(pixel_values=pixels[:1], input_ids=tokens[:1], output_attentions=True)
    assert seen.kinds == ("encoder", "self")
    for kind, output in (("encoder", told.vision_model_output), ("self", told.text_model_output)):
        for layer, weights in enumerate(output.attentions):
            for head in range(3):
                found = seen.weights(layer=layer, head=head, kind=kind)
                torch.testing.assert_close(found, weights[0, head], atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_end_token_of_older_files_is_the_last_of_the_vocabulary(tmp_path: Path) -> None:
    config = CLIPConfig(text_config={**TEXT, "eos_token_id": 2, "bos_token_id": 0}, vision_config=VISION)
    pair = twins(tiny(CLIPModel, config), tmp_path)
    assert (pair.ours.config.bos_id, pair.ours.config.eos_id) == (48, 49)
    pixels, tokens, keep = inputs()
    told = pair.theirs(pixel_values=pixels, input_ids=tokens, attention_mask=keep.long())
    close(pair.ours(pixels, tokens, padding_mask=keep), told.logits_per_image)


@pytest.mark.parametrize("case", ["clip", "siglip"])
def test_missing_fields_mean_their_defaults(case: str) -> None:
    config = CLIPConfig() if case == "clip" else SiglipConfig()
    full, short = (BY_TYPE[case].read(ForeignFields(x)) for x in (config.to_dict(), {"model_type": case}))
    assert full.text_model is not None
    assert full.with_(init_std=None, text_model=full.text_model.with_(init_std=None)) == short


def test_older_files_have_their_sections_twice() -> None:
    """CLIPConfig takes text_config_dict and vision_config_dict for the sections, with defaults for what they lack."""
    fields: dict[str, Any] = {"text_config": {"hidden_size": 64, "num_hidden_layers": 3}, "vision_config": {}}
    fields |= {"text_config_dict": {"num_hidden_layers": 5}, "vision_config_dict": {"patch_size": 16}}
    meant = BY_TYPE["clip"].read(ForeignFields(CLIPConfig(**fields).to_dict()))
    config = BY_TYPE["clip"].read(ForeignFields({**fields, "model_type": "clip"}))
    assert (config.text_tower.n_layers, config.text_tower.d_model, config.patch_size) == (5, 512, 16)
    assert not differences(config, meant)


@pytest.mark.parametrize(
    ("case", "section", "field", "value"),
    [
        ("clip", None, "architectures", ["CLIPVisionModel"]),
        ("clip", "text_config", "hidden_act", "mish"),
        ("clip", "vision_config", "image_size", [12, 8]),
        ("siglip", "vision_config", "vision_use_head", False),
        ("siglip", "text_config", "projection_size", 30),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case: str, section: str | None, field: str, value: Any) -> None:
    fields = CASES[case][1].to_dict()
    changed = fields if section is None else fields[section]
    changed[field] = value
    assert field.removesuffix("s") in refusal(fields)


SMALL: dict[str, Any] = {
    **{"architecture": "two-tower", "source": "image", "head": "none", "norm_place": "pre", "positions": "learned"},
    "text_model": {"architecture": "decoder", "head": "none", "pooling": "end"},
}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text_model": None}, "needs text_model"),
        ({"source": "text"}, "source='image'"),
        ({"text_model": {"architecture": "decoder"}}, "head='none'"),
        ({"class_tokens": 0}, "but class_tokens=0"),
        ({"eos_id": None}, "eos_id"),
        ({"architecture": "encoder"}, "text_model=… is for architecture='two-tower'"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**{**SMALL, **fields})


def test_towers_that_transformers_lacks_say_why() -> None:
    assert write_config(ModelConfig(**{**SMALL, "positions": "sinusoidal"})).obstacles
