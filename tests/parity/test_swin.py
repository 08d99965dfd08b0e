"""Swin: states, class logits and the attention of every window equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, SwinConfig, SwinForImageClassification, SwinModel

import regard
from regard.config import ModelConfig
from regard.lens import look
from regard.models import build

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

SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4]}
CASES: dict[str, dict[str, Any]] = {
    "even windows": {"window_size": 4},
    "odd windows, three stages": {
        **{"image_size": 24, "window_size": 3, "depths": [2, 3, 1], "num_heads": [1, 2, 4], "drop_path_rate": 0.0},
    },
    "relu, no qkv bias, another ratio": {"window_size": 8, "hidden_act": "relu", "qkv_bias": False, "mlp_ratio": 2.0},
}


def pixels_for(config: SwinConfig) -> Tensor:
    side = config.image_size
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model_class", [SwinModel, SwinForImageClassification])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_both_ways(case: str, model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    config = SwinConfig(**SIZES | CASES[case], num_labels=5)
    theirs = tiny(model_class, config)
    pair = twins(theirs, tmp_path / "theirs")
    back = check_round_trips(pair, tmp_path)
    check_directories(pair, tmp_path)
    pixels = pixels_for(config)
    for model in (theirs, back):
        told = model(pixels)
        close(pair.ours(pixels), told.logits if pair.ours.class_head is not None else told.last_hidden_state)


@pytest.mark.parametrize("case", ["even windows", "odd windows, three stages"])
@torch.no_grad()
def test_the_lens_shows_the_weights_of_every_window(case: str, tmp_path: Path) -> None:
    config = SwinConfig(**SIZES | CASES[case])
    theirs = tiny(SwinModel, config)
    theirs.set_attn_implementation("eager")
    ours, pixels = twins(theirs, tmp_path).ours, pixels_for(config)[:1]
    told: list[Tensor] = []  # they hand out those of one layer a stage; a hook sees them all
    for module in theirs.modules():
        if type(module).__name__ == "SwinAttention":
            module.register_forward_hook(lambda _, args, output: told.append(output[1]))
    theirs(pixels)
    seen = look(ours, pixels[0])
    assert seen.kinds == tuple(f"stage{n}" for n in range(len(config.depths)))
    told_layers, side, grid = iter(told), config.window_size, config.image_size // config.patch_size
    for kind, depth in zip(seen.kinds, config.depths, strict=True):
        assert len(seen.rows(kind=kind)) == grid**2
        for layer in range(depth):
            weights = next(told_layers)
            if layer % 2 == 0 or grid == side:  # shifted ones are rolled there: their order is another
                for row in range(grid // side):
                    for column in range(grid // side):
                        cells = [y * grid + x for y in inside(row, side) for x in inside(column, side)]
                        found = seen.weights(layer=layer, head=0, kind=kind, rows=cells, cols=cells)
                        theirs_here = weights[row * (grid // side) + column, 0]
                        torch.testing.assert_close(found, theirs_here, atol=1e-5, rtol=0)
            whole = seen.weights(layer=layer, head=0, kind=kind)
            torch.testing.assert_close(whole.sum(-1), torch.ones(grid**2))
            assert (whole > 0).sum(-1).max() <= side**2
        grid //= 2


def inside(window: int, side: int) -> range:
    """The rows, or the columns, of the patches of one window."""
    return range(window * side, (window + 1) * side)


@torch.no_grad()
def test_no_tensor_is_idle(tmp_path: Path) -> None:
    config = SwinConfig(**SIZES, window_size=4)
    ours, pixels = twins(tiny(SwinForImageClassification, config), tmp_path).ours, pixels_for(config)
    check_every_tensor_counts(ours, lambda: ours(pixels))


def test_it_trains_and_drops_paths_only_then() -> None:
    config = ModelConfig(
        **{"architecture": "encoder", "source": "image", "head": "classify", "class_tokens": 0, "pooling": "mean"},
        **{"positions": "window", "norm_place": "pre", "image_size": 16, "patch_size": 2, "shifted_windows": 2},
        **{"stages": (1, 1), "stage_heads": (2, 4), "n_layers": 2, "n_heads": 4, "d_model": 16, "d_ff": 32},
        drop_path=0.9,
    )
    torch.manual_seed(0)
    model, pixels = build(config), torch.randn(4, 3, 16, 16)
    assert not torch.equal(model(pixels), model(pixels))
    model(pixels).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert torch.equal(model(pixels), model(pixels))
    assert regard.cost(config, batch=1).flops_forward.total > 0


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(SwinConfig())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("use_absolute_embeddings", True, "use_absolute_embeddings"),
        ("image_size", 40, "not divisible by shifted_windows"),
        ("architectures", ["SwinForMaskedImageModeling"], "SwinForMaskedImageModeling"),
        ("num_heads", [2], "stage_heads"),
        ("hidden_act", "mish", "hidden_act"),
        ("layer_norm_eps", 1e-6, "layer_norm_eps=1e-06"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, said: str) -> None:
    assert said in refusal({**SwinConfig(**SIZES, window_size=4).to_dict(), field: value})
