"""Padding changes nothing for real tokens, whatever the model is made of and whether or not it decodes with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.models import Decoder, Encoder, build

from .small import small


def padded(length: int, n_padding: int, left: bool) -> tuple[Tensor, Tensor]:
    """Two texts of a batch, the second with padding."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 31, (2, length))
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[1, slice(0, n_padding) if left else slice(length - n_padding, length)] = False
    return tokens, keep


@torch.no_grad()
@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "mistral-7b"])
def test_a_padded_prompt_decodes_as_if_it_stood_alone(name: str, left: bool, preallocated: bool) -> None:
    model = small(name)
    assert isinstance(model, Decoder)
    prompt, keep = padded(6, 2, left)
    steps = torch.randint(3, 31, (2, 4))
    cache = model.new_cache(2, 12) if preallocated else model.new_cache()
    first = model(prompt, padding_mask=keep, cache=cache)
    rest = torch.cat([model(steps[:, i : i + 1], cache=cache) for i in range(4)], dim=1)
    for row in range(2):
        alone = torch.cat([prompt[row][keep[row]], steps[row]])[None]
        wanted = model(alone)[0]
        torch.testing.assert_close(first[row][keep[row]], wanted[: keep[row].sum()], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rest[row], wanted[keep[row].sum() :], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["dot", "additive", "linear", "performer", "linformer", "fourier"])
@pytest.mark.parametrize("pooling", ["first", "mean", "attention"])
def test_what_stands_in_the_padding_does_not_matter(mixer: str, pooling: Any) -> None:
    model = small("sentiment", mixer=mixer, pooling=pooling)
    tokens, keep = padded(7, 3, left=False)
    other = torch.where(keep, tokens, (tokens + 5) % 31)
    assert not torch.equal(tokens, other)
    torch.testing.assert_close(model(tokens, padding_mask=keep), model(other, padding_mask=keep), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_pooling_of_a_headless_encoder_leaves_padding_out() -> None:
    model = small("bert-base", pooling="mean")
    assert isinstance(model, Encoder)
    tokens, keep = padded(7, 3, left=False)
    states = model.hidden(tokens, padding_mask=keep)
    other = states.masked_fill(~keep[..., None], 9.0)
    torch.testing.assert_close(model.pooled(states, keep), model.pooled(other, keep))
    assert not torch.allclose(model.pooled(states), model.pooled(other))


@pytest.mark.parametrize("given", [{"batch": 2}, {"max_len": 9}])
def test_half_a_shape_makes_no_cache(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both to preallocate"):
        small("gpt2").new_cache(**given)


def test_token_ids_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token ids must be \(batch, length\), got shape \(4,\)"):
        small("gpt2")(torch.arange(4))


@pytest.mark.parametrize("name", ["gpt2", "transformer-tiny", "bert-base", "vit-tiny", "t5-small"])
def test_shapes_can_be_asked_of_a_model_without_memory(name: str) -> None:
    config = small(name).config
    with torch.device("meta"):
        model = build(config).eval()
        if config.source == "image":
            inputs = [torch.empty(2, config.n_channels, config.image_size, config.image_size)]
        else:
            inputs = [torch.empty(2, 5, dtype=torch.long)]
        if config.architecture == "encoder-decoder":
            inputs.append(torch.empty(2, 4, dtype=torch.long))
        assert model(*inputs).is_meta
