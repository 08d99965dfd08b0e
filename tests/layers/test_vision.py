"""Patches and regions: equal to a strided convolution, to ViT's embeddings at its own and other sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regard.layers import (
    LayerNorm,
    Learned,
    PatchEmbedding,
    RegionEmbedding,
    Sinusoidal,
    VisionEmbeddings,
    box_geometry,
    interpolate_positions,
)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 4),
    patch=st.integers(1, 5),
    channels=st.integers(1, 4),
    batch=st.integers(1, 3),
)
def test_patches_are_a_strided_convolution(rows: int, cols: int, patch: int, channels: int, batch: int) -> None:
    embed = PatchEmbedding((rows * patch, cols * patch), patch, channels, 7)
    nn.init.normal_(embed.bias)  # type: ignore[arg-type]
    pixels = torch.randn(batch, channels, rows * patch, cols * patch)
    expected = F.conv2d(pixels, embed.weight, embed.bias, stride=patch).flatten(2).transpose(1, 2)
    assert embed(pixels).shape == (batch, embed.n_patches, 7)
    torch.testing.assert_close(embed(pixels), expected, atol=2e-5, rtol=1e-5)


def vit_pair() -> tuple[nn.Module, VisionEmbeddings]:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    theirs = ViTEmbeddings(ViTConfig(hidden_size=10, image_size=24, patch_size=4)).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    patches = PatchEmbedding(24, 4, 3, 10)
    ours = VisionEmbeddings(patches, position=Learned(patches.n_patches + 1, 10))
    with torch.no_grad():
        patches.load_state_dict(theirs.patch_embeddings.projection.state_dict())
        ours.class_token.copy_(theirs.cls_token[0])  # type: ignore[union-attr]
        ours.position.weight.copy_(theirs.position_embeddings[0])  # type: ignore[union-attr]
    return theirs, ours


@pytest.mark.parametrize("size", [(24, 24), (48, 48), (12, 12), (36, 16), (16, 36)])
def test_vit_at_its_own_and_other_sizes(size: tuple[int, int]) -> None:
    theirs, ours = vit_pair()
    pixels = torch.randn(2, 3, *size)
    expected = theirs(pixels, interpolate_pos_encoding=size != (24, 24))
    torch.testing.assert_close(ours(pixels), expected, atol=1e-6, rtol=1e-6)


def test_interpolation_keeps_class_tokens_and_is_the_identity_on_its_own_grid() -> None:
    table = torch.randn(2 + 12, 5)
    assert torch.equal(interpolate_positions(table, (3, 4), (6, 2), 2)[:2], table[:2])
    assert interpolate_positions(table, (3, 4), (6, 2), 2).shape == (14, 5)
    torch.testing.assert_close(interpolate_positions(table, (3, 4), (3, 4), 2), table, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n_class_tokens", [0, 1, 2])
@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "none"])
def test_optional_parts(n_class_tokens: int, kind: str) -> None:
    patches = PatchEmbedding((8, 12), 4, 3, 10)
    places = n_class_tokens + patches.n_patches
    position = {"learned": Learned(places, 10, offset=1), "sinusoidal": Sinusoidal(10), "none": None}[kind]
    embed = VisionEmbeddings(patches, position=position, n_class_tokens=n_class_tokens, norm=LayerNorm(10))
    pixels = torch.randn(2, 3, 8, 12)
    tokens = patches(pixels)
    if embed.class_token is not None:
        tokens = torch.cat((embed.class_token.expand(2, -1, -1), tokens), dim=1)
    if position is not None:
        tokens = tokens + position(torch.arange(places))
    torch.testing.assert_close(embed(pixels), embed.norm(tokens), atol=1e-6, rtol=0)  # type: ignore[misc]
    assert embed(torch.randn(1, 3, 16, 4)).shape == (1, n_class_tokens + 4, 10)


def test_vision_trains_every_part() -> None:
    _, ours = vit_pair()
    ours(torch.randn(2, 3, 48, 24)).square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("d_box", [0, 4, 5])
def test_regions(d_box: int) -> None:
    embed = RegionEmbedding(32, d_model=10, d_box=d_box, norm=LayerNorm(10))
    features = torch.randn(2, 6, 32)
    boxes = torch.rand(2, 6, d_box) if d_box else None
    expected = features @ embed.w_feature.weight.T + embed.w_feature.bias
    if embed.w_box is not None:
        expected = expected + boxes @ embed.w_box.weight.T + embed.w_box.bias  # type: ignore[operator]
    torch.testing.assert_close(embed(features, boxes), F.layer_norm(expected, (10,)), atol=1e-5, rtol=0)
    assert RegionEmbedding(d_model=4)(torch.zeros(1, 36, 2048)).shape == (1, 36, 4)


def test_box_geometry() -> None:
    out = box_geometry(torch.tensor([[0.0, 0.0, 200.0, 100.0], [50.0, 25.0, 100.0, 75.0]]), height=100, width=200)
    expected = [[0.0, 0.0, 1.0, 1.0, 1.0], [0.25, 0.25, 0.5, 0.75, 0.125]]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_bad_input_is_said_clearly() -> None:
    patches = PatchEmbedding(8, 4, 3, 10)
    with pytest.raises(ValueError, match="image height=9 is not divisible by patch=4"):
        PatchEmbedding(9, 4, 3, 10)
    with pytest.raises(ValueError, match="image width=10 is not divisible by patch=4"):
        patches(torch.zeros(1, 3, 8, 10))
    with pytest.raises(ValueError, match=r"pixels must be \(B, channels=3, H, W\), got shape \(1, 1, 8, 8\)"):
        patches(torch.zeros(1, 1, 8, 8))
    with pytest.raises(ValueError, match="position has max_len=4, but there are 5 class tokens and patches"):
        VisionEmbeddings(patches, position=Learned(4, 10))
    with pytest.raises(ValueError, match="position has d_model=8, but patches have d_model=10"):
        VisionEmbeddings(patches, position=Learned(5, 8))
    with pytest.raises(ValueError, match="n_class_tokens=-1 must not be negative"):
        VisionEmbeddings(patches, n_class_tokens=-1)
    with pytest.raises(ValueError, match="table has 4 rows"):
        interpolate_positions(torch.zeros(4, 2), (2, 2), (4, 4), 1)
    with pytest.raises(ValueError, match="d_box=3 must be 0"):
        RegionEmbedding(d_model=4, d_box=3)
    regions = RegionEmbedding(8, d_model=4, d_box=4)
    with pytest.raises(ValueError, match="features have width 6, but d_region=8"):
        regions(torch.zeros(1, 2, 6))
    with pytest.raises(ValueError, match="no boxes were given, but d_box=4"):
        regions(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="boxes have 5 numbers, but d_box=4"):
        regions(torch.zeros(1, 2, 8), torch.zeros(1, 2, 5))
