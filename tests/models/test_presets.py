"""The presets have the sizes of the originals: by the papers' arithmetic, by the published counts, by transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from regard.hub import write_config
from regard.models import build
from regard.presets import PRESETS, preset

PUBLISHED = {
    "transformer-base": 63_082_496,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "bert-base": 109_482_240,
    "bert-base-masked": 109_514_298,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-v1.1-small": 76_961_152,
    "vit-base-16": 86_567_656,
}
WITH_A_TWIN = (
    *("transformer-tiny", "transformer-base", "transformer-big", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    *("llama-7b", "llama-1b", "mistral-7b", "bert-base", "bert-base-masked", "t5-small", "t5-base", "t5-v1.1-small"),
    *("vit-base-16", "vit-tiny"),
)


def count(name: str, **fields: Any) -> int:
    return build(name, device="meta", **fields).n_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_on_meta(name: str) -> None:
    model = build(name, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config == preset(name)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items(), ids=PUBLISHED)
def test_published_counts(name: str, parameters: int) -> None:
    assert count(name) == parameters


def paper(vocab: int, d: int, ff: int, n: int, attention_bias: bool = True) -> int:
    """The Transformer of table 3, written out: one table for source, target and output, no last norm."""
    attention = 4 * (d * d + (d if attention_bias else 0))
    feed_forward = (d * ff + ff) + (ff * d + d)
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return vocab * d + n * (encoder_layer + decoder_layer)


def test_the_paper_by_hand() -> None:
    assert paper(37000, 512, 2048, 6) == count("transformer-base") == 63_082_496
    no_bias = {"qkv_bias": False, "out_bias": False}
    assert paper(37000, 512, 2048, 6, attention_bias=False) == count("transformer-base", **no_bias) == 63_045_632
    assert paper(37000, 1024, 4096, 6) == count("transformer-big") == 214_245_376
    assert paper(37000, 1024, 4096, 6, attention_bias=False) == count("transformer-big", **no_bias) == 214_171_648


def test_what_tying_saves() -> None:
    tied, table = count("transformer-base"), 37000 * 512
    assert count("transformer-base", tie_head=False) == tied + table
    assert count("transformer-base", target_vocab_size=37000) == tied + table
    assert count("transformer-base", target_vocab_size=37000, tie_head=False) == tied + 2 * table


@pytest.mark.parametrize("name", WITH_A_TWIN)
def test_transformers_counts_the_same(name: str) -> None:
    written = write_config(preset(name))
    assert not written.obstacles
    fields = {field: value for field, value in written.fields.items() if field != "regard"}
    (architecture,) = fields["architectures"]
    with torch.device("meta"):
        theirs = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**fields))
    counted = sum(p.numel() for p in theirs.parameters() if p.requires_grad)  # Marian's sinusoids are frozen ones
    if name == "t5-v1.1-small":  # their class makes it tied; the published files have a head of their own
        counted += 32128 * 512
    assert counted == count(name)


def test_those_without_a_twin_say_so() -> None:
    for name in set(PRESETS) - set(WITH_A_TWIN):
        assert write_config(preset(name)).obstacles, name


def test_any_field_can_be_overridden() -> None:
    assert preset("gpt2", n_layers=2, dropout=0.3) == preset("gpt2").with_(n_layers=2, dropout=0.3)
    assert build("gpt2", device="meta", n_layers=2).config.n_layers == 2
    assert build(preset("gpt2"), device="meta", n_layers=3).config.n_layers == 3


def test_an_unknown_preset_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no preset 'gpt-2'; did you mean 'gpt2'\?"):
        preset("gpt-2")
    with pytest.raises(ValueError, match=r"no preset 'zzz' \(all: transformer-tiny"):
        build("zzz")
