"""Every preset at a tiny size: it runs, learns with all its parameters, decodes with a cache as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import record
from regard.attention.masks import grid_windows
from regard.config import ModelConfig
from regard.models import Decoder, Encoder, EncoderDecoder, Model, build
from regard.presets import PRESETS, preset

from .small import DECODING, SIZES, decode, inputs_of, outputs_of, shaken, small, small_config, source_of, target_of

RECURRENT = tuple(name for name, fields in PRESETS.items() if fields["architecture"] == "recurrent")
TRANSFORMERS = tuple(name for name in PRESETS if name not in RECURRENT)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_shape_and_a_gradient_for_every_parameter(name: str) -> None:
    model = small(name)
    config, inputs = model.config, inputs_of(model.config)
    out = model(*inputs)
    widths = {"lm": config.output_vocab_size, "masked-lm": config.vocab_size, "classify": config.n_classes}
    width = widths.get(config.head, config.d_model)
    assert out.shape == ((3, width) if config.head == "classify" else (3, inputs[-1].shape[1], width))
    seen = outputs_of(model, inputs)
    (seen * torch.randn(seen.shape, generator=torch.Generator().manual_seed(9))).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_few_steps_of_training_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = build(small_config(name)).train()  # as it is initialised, dropout and all
    inputs = inputs_of(model.config)

    def loss() -> Tensor:
        out = model(*inputs)
        if model.config.head == "none":
            return (out - 1).square().mean()
        target = torch.arange(out[..., 0].numel()) % out.shape[-1]
        return F.cross_entropy(out.flatten(0, -2), target)

    model.eval()
    before = loss().item()
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    model.eval()
    assert loss().item() < 0.97 * before


@torch.no_grad()
@pytest.mark.parametrize("name", DECODING)
def test_cached_is_uncached(name: str) -> None:
    model = small(name)
    inputs = inputs_of(model.config)
    whole = model(*inputs)
    for cache in (model.new_cache(), model.new_cache(3, inputs[-1].shape[1] + 2)):
        close(decode(model, inputs, cache), whole)
        cache.reset()
        close(decode(model, inputs, cache, prompt=1), whole)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODING)
def test_the_future_changes_nothing(name: str) -> None:
    model = small(name)
    *source, tokens = inputs_of(model.config)
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 7) % 28 + 3
    one, two = model(*source, tokens), model(*source, other)
    close(one[:, :4], two[:, :4], 1e-6)
    assert (one[:, 4:] - two[:, 4:]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in PRESETS if preset(name).source == "text"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_changes_nothing(name: str, left: bool) -> None:
    """Real tokens give the same alone and beside padding, whatever stands there; padded left, by their positions."""
    model = small(name)
    source, fill = source_of(model.config, 1, 6), source_of(model.config, 1, 3, seed=8)
    parts = (fill, source) if left else (source, fill)
    keep = torch.cat([torch.full_like(part, part is source, dtype=torch.bool) for part in parts], dim=1)
    positions = torch.where(keep, keep.long().cumsum(-1) - 1, -1) if left else None
    padded = torch.cat(parts, dim=1)
    if isinstance(model, Decoder):
        named: dict[str, Any] = {"positions": positions} if left else {"padding_mask": keep}
        close(model(padded, **named)[keep], model(source)[0])
    elif isinstance(model, Encoder):
        states = model.hidden(padded, padding_mask=keep, positions=positions)
        close(states[keep], model.hidden(source)[0])
        if model.classifier is not None and model.config.pooling != "first":
            close(model(padded, padding_mask=keep, positions=positions), model(source))
    else:
        target = target_of(model.config, 1)
        close(model(padded, target, source_padding_mask=keep, source_positions=positions), model(source, target))


def test_checkpointing_is_switched_from_outside_and_changes_no_gradient() -> None:
    for name in ("transformer-tiny", "gpt2", "t5-small", "vit-tiny"):
        model = small(name).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        inputs, grads = inputs_of(model.config), []
        for on in (False, True, False):
            model.use_checkpointing(on)
            assert [stack.checkpointing for stack in model.stacks()] == [on] * len(model.stacks())
            model.zero_grad()
            calls = _count_block_calls(model, inputs)
            grads.append([p.grad.clone() for p in model.parameters()])
            assert calls == (2 if on else 1) * sum(stack.n_layers for stack in model.stacks())
        for one, two in ((0, 1), (0, 2)):
            for a, b in zip(grads[one], grads[two], strict=True):
                close(a, b, 1e-6)


def _count_block_calls(model: Model, inputs: tuple[Tensor, ...]) -> int:
    """Forward and backward; how often blocks ran."""
    calls: list[int] = []
    hooks = [b.register_forward_pre_hook(lambda *_: calls.append(1)) for stack in model.stacks() for b in stack.blocks]
    model(*inputs).square().sum().backward()
    for hook in hooks:
        hook.remove()
    return len(calls)


def test_checkpointing_repeats_the_same_dropout() -> None:
    model = small("gpt2", dropout=0.3, attention_dropout=0.3, embedding_dropout=0.3, activation_dropout=0.3).train()
    grads = []
    for on in (False, True):
        model.use_checkpointing(on)
        model.zero_grad()
        torch.manual_seed(5)
        model(*inputs_of(model.config)).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-5)


# ---- what the presets are for


def test_three_way_tying() -> None:
    """The paper §3.4: one matrix is the source's table, the target's and the output's."""
    model = small("transformer-base")
    assert isinstance(model, EncoderDecoder)
    assert model.target_token is None
    assert model.head.weight is None
    assert model.output_table is model.token.weight
    source, target = inputs_of(model.config)
    before = model.encode(source).states, model(source, target)
    with torch.no_grad():
        model.token.weight.mul_(1.5)
    assert (model.encode(source).states - before[0]).abs().max() > 1e-2
    assert (model(source, target) - before[1]).abs().max() > 1e-2


def test_embeddings_are_scaled_as_in_the_paper() -> None:
    model = small("transformer-base", positions="none")
    assert isinstance(model, EncoderDecoder)
    x = model.embeddings(model.token(torch.tensor([[5]])))
    close(x[0, 0], model.token.weight[5] * 24**0.5)


def test_sentiment_has_three_classes_and_learns_them() -> None:
    torch.manual_seed(0)
    model = build(small_config("sentiment", d_model=32, dropout=0.0, embedding_dropout=0.0, classifier_dropout=0.0))
    assert model.config.n_classes == 3
    tokens = torch.randint(9, 31, (48, 10))
    label = torch.arange(48) % 3
    tokens[torch.arange(48), torch.randint(0, 10, (48,))] = label + 4  # one word in each text says what it is
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimiser.zero_grad()
        F.cross_entropy(model(tokens), label).backward()
        optimiser.step()
    assert model.eval()(tokens).argmax(-1).eq(label).float().mean() > 0.95


@torch.no_grad()
def test_captions_look_at_every_patch_and_region() -> None:
    for name, places in (("captioner", 17), ("captioner-regions", 9)):
        model = small(name)
        source, target = inputs_of(model.config)
        with record(model) as seen:
            model(source, target)
        weights = seen.map("decoder.blocks.0.cross_attention").dense()
        assert weights.shape == (3, 4, 7, places)  # the image's class token and 4 × 4 patches; 9 regions
        assert (weights > 0).all()
        other = source.clone()
        other[..., -1, -1] += 1.0  # the last pixel, the last region's last number
        assert (model(other, target) - model(source, target)).abs().max() > 1e-4


@torch.no_grad()
def test_thirty_six_regions_of_2048() -> None:
    torch.manual_seed(0)
    model = build("captioner-regions", vocab_size=50, n_layers=1).eval()
    regions, tokens = torch.randn(2, 36, 2048), torch.randint(3, 50, (2, 5))
    assert model(regions, tokens).shape == (2, 5, 50)
    keep = torch.ones(2, 36, dtype=torch.bool)
    keep[:, 20:] = False
    close(model(regions, tokens, source_padding_mask=keep), model(regions[:, :20], tokens))


@torch.no_grad()
def test_an_image_captioner_reads_pixels() -> None:
    torch.manual_seed(0)
    model = build("captioner", vocab_size=50, n_layers=1).eval()
    pixels, tokens = torch.randn(2, 3, 112, 112), torch.randint(3, 50, (2, 5))
    assert isinstance(model, EncoderDecoder)
    assert model.encode(pixels).states.shape == (2, 50, 256)
    assert model(pixels, tokens).shape == (2, 5, 50)


@torch.no_grad()
def test_shifted_windows_stay_in_their_windows_and_alternate() -> None:
    """Swin: attention inside 2 × 2 patches, every other layer shifted by one; the class token sees all, all see it."""
    model = small("swin-tiny")
    with record(model) as seen:
        model(source_of(model.config))
    row, col = torch.arange(16) // 4, torch.arange(16) % 4
    for layer, shift in ((0, 0), (1, 1)):
        weights = seen.map(f"encoder.blocks.{layer}.attention").dense()
        window = (row + shift) // 2 * 10 + (col + shift) // 2
        inside = window[:, None] == window[None]
        assert weights[:, :, 1:, 1:][:, :, ~inside].eq(0).all()
        assert weights[:, :, 1:, 1:][:, :, inside].gt(0).all()
        assert weights[:, :, 0].gt(0).all()
        assert weights[:, :, :, 0].gt(0).all()
    assert not torch.equal(grid_windows(4, 2, 0).dense(16), grid_windows(4, 2, 1).dense(16))


@torch.no_grad()
def test_two_layers_of_shifted_windows_reach_across_a_border() -> None:
    """One layer's output depends on its own window alone, two on the neighbour's as well (without the class token)."""
    config = small_config("swin-tiny", positions="none", d_ff=16)
    model = shaken(build(config)).eval()
    assert isinstance(model, Encoder)
    pixels = source_of(config, batch=1)
    other = pixels.clone()
    other[..., :4, 4:8] += 3.0  # patch (0, 1): in the first window with (0, 0), with (0, 2) only after the shift
    one, two = ({}, {})
    for store, x in ((one, pixels), (two, other)):
        with record(model) as seen:
            model(x)
        store |= {layer: seen.tensors[f"encoder.blocks.{layer}.output"][0][0, 1:] for layer in (0, 1)}
    changed = {layer: (one[layer] - two[layer]).abs().amax(-1).view(4, 4) for layer in (0, 1)}
    # What went through the class token is small beside what was looked at directly.
    assert changed[0][0, 1] > 0.1
    assert changed[0][:2, 2:].max() < 1e-6
    assert changed[1][0, 2] > 5 * changed[1][3, 3]


def test_models_of_one_seed_are_equal_and_of_another_are_not() -> None:
    def first_weight(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return next(build(small_config("gpt2")).parameters())

    assert torch.equal(first_weight(1), first_weight(1))
    assert not torch.equal(first_weight(1), first_weight(2))


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = build(small_config("gpt2", d_model=64, d_ff=256, vocab_size=500, n_layers=8))
    spread = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    assert spread["token.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["decoder.blocks.3.attention.w_qkv.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["decoder.blocks.3.attention.w_o.weight"] == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert spread["decoder.blocks.3.ff.w_out.weight"] == pytest.approx(0.02 / 16**0.5, rel=0.05)
    torch.manual_seed(0)
    xavier = build(ModelConfig(**SIZES | {"d_model": 64})).state_dict()["encoder.blocks.0.attention.w_qkv.weight"]
    assert xavier[:64].abs().max().item() == pytest.approx((6 / 128) ** 0.5, rel=0.01)  # each of q, k and v on its own
