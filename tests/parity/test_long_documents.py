"""Longformer and BigBird, whose tokens see a part of the text, and FNet, which mixes without weights: equal to
transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import regard
from regard.hub import write_config

from .common import check_defaults, check_round_trips, close, padded, refusal, tiny, twins
from .encoders import check, check_counts, settle_idle_bias

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_position_embeddings": 40},
}
LONG = {**SIZES, "attention_window": 4}
BLOCKS = {**SIZES, "block_size": 2, "num_random_blocks": 1}  # texts of up to 14 tokens are seen whole
FNET = {name: value for name, value in SIZES.items() if name != "num_attention_heads"}
TEXT = [5, 9, 3, 17, 4, 22, 8, 30, 12, 6, 19, 33, 7, 28, 11, 25, 14, 39, 10]


@pytest.mark.parametrize(
    ("model_class", "features"),
    [
        (hf.LongformerForMaskedLM, {}),
        (hf.LongformerModel, {"attention_window": [6, 6]}),
        (hf.LongformerForSequenceClassification, {"num_labels": 3}),
        (hf.LongformerForTokenClassification, {"num_labels": 5, "hidden_act": "relu"}),
    ],
)
def test_longformer(model_class: type[PreTrainedModel], features: dict[str, Any], tmp_path: Path) -> None:
    model = check(model_class, hf.LongformerConfig(**LONG | features), tmp_path)
    assert model.config.window == (4 if isinstance(features.get("attention_window"), list) else 3)
    assert model.config.global_tokens == (model.config.head == "classify")


def test_every_tensor_counts_where_tokens_are_global(tmp_path: Path) -> None:
    config = twins(tiny(hf.LongformerModel, hf.LongformerConfig(**LONG)), tmp_path).ours.config
    check_counts(regard.models.build(config.with_(global_tokens=2, pooler="none")).eval())


@torch.no_grad()
def test_global_tokens_are_theirs(tmp_path: Path) -> None:
    """Two of them, and no head: what theirs is told with a mask, ours has as a field."""
    theirs = tiny(hf.LongformerModel, hf.LongformerConfig(**LONG))
    pair = twins(theirs, tmp_path)
    ours = regard.models.build(pair.ours.config.with_(global_tokens=2)).eval()
    ours.load_state_dict(pair.ours.state_dict())
    tokens, keep = padded((19, 12, 5), 41, 1, left=False)
    told = theirs(tokens, attention_mask=keep.long(), global_attention_mask=(torch.arange(19) < 2).long().expand(3, -1))
    close(ours(tokens, padding_mask=keep), told.last_hidden_state, keep)
    assert write_config(ours.config).obstacles


@torch.no_grad()
def test_the_lens_shows_a_longformers_weights(tmp_path: Path) -> None:
    """Theirs lie by distance, and those of and to global tokens by themselves."""
    theirs = tiny(hf.LongformerForSequenceClassification, hf.LongformerConfig(**LONG))
    ours = twins(theirs, tmp_path).ours
    look = regard.look(ours, TEXT)
    told = theirs(torch.tensor([TEXT]), output_attentions=True)
    n, side = len(TEXT), 2
    for layer, (near, far) in enumerate(zip(told.attentions, told.global_attentions, strict=True)):
        for head in range(3):
            wanted = torch.zeros(n, n)
            for i in range(n):
                for j in range(max(0, i - side), min(n, i + side + 1)):
                    wanted[i, j] = near[0, head, i, 1 + j - i + side]
            wanted[:, 0] += near[0, head, :n, 0]
            wanted[0] = far[0, head, :n, 0]
            torch.testing.assert_close(look.weights(layer=layer, head=head), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model_class", "features"),
    [
        (hf.BigBirdForMaskedLM, {"attention_type": "original_full", "rescale_embeddings": True}),
        (hf.BigBirdForMaskedLM, {"use_bias": False, "hidden_act": "relu"}),
        (hf.BigBirdModel, {}),
    ],
)
def test_bigbird_on_short_texts(model_class: type[PreTrainedModel], features: dict[str, Any], tmp_path: Path) -> None:
    model = check(model_class, hf.BigBirdConfig(**BLOCKS | features), tmp_path)
    assert model.config.sparsity == ("none" if "attention_type" in features else "end-blocks")


@torch.no_grad()
@pytest.mark.parametrize("length", [15, 22, 37])
def test_bigbird_on_long_texts(length: int, tmp_path: Path) -> None:
    """Blocks, of which the last is not full; where theirs has random blocks in training, it now counts the first."""
    theirs = tiny(hf.BigBirdForMaskedLM, hf.BigBirdConfig(**BLOCKS))
    ours = twins(theirs, tmp_path).ours
    tokens, keep = padded((length, length - 7, 3), 41, 0, left=False)
    close(ours(tokens, padding_mask=keep), theirs(tokens, attention_mask=keep.long()).logits, keep)
    assert theirs.bert.attention_type == "block_sparse"
    whole = ours.config.with_(sparsity="none", sparsity_repeats=0)
    dense = regard.models.build(whole).eval()
    dense.load_state_dict(ours.state_dict())
    assert (dense(tokens, padding_mask=keep) - ours(tokens, padding_mask=keep))[keep].abs().max() > 1e-3


@torch.no_grad()
def test_the_lens_shows_bigbirds_weights(tmp_path: Path) -> None:
    """Theirs shows one of the r + 1 times that the first block is counted."""
    theirs = tiny(hf.BigBirdModel, hf.BigBirdConfig(**BLOCKS))
    ours = twins(theirs, tmp_path).ours
    look, told = regard.look(ours, TEXT), theirs(torch.tensor([TEXT]), output_attentions=True)
    n = len(TEXT)
    times = torch.ones(n, n)
    times[2:18, :2] = 2
    for layer, weights in enumerate(told.attentions):
        got = torch.stack([look.weights(layer=layer, head=h) for h in range(3)])
        torch.testing.assert_close(got, weights[0, :, :n, :n] * times, atol=1e-5, rtol=1e-5)


def test_a_bigbird_that_sees_all_is_a_bert() -> None:
    fields = {**hf.BigBirdConfig(**BLOCKS, attention_type="original_full").to_dict(), "architectures": ["BigBirdModel"]}
    config = regard.hub.read_config(fields).config
    assert write_config(config).model_type == "bert"
    assert write_config(config.with_(sparsity="end-blocks")).model_type == "big_bird"


@torch.no_grad()
@pytest.mark.parametrize("model_class", [hf.FNetModel, hf.FNetForMaskedLM, hf.FNetForSequenceClassification])
def test_fnet(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    """Theirs takes no mask: padding is a token like any other."""
    theirs = tiny(model_class, hf.FNetConfig(**FNET))
    settle_idle_bias(theirs)
    pair = twins(theirs, tmp_path / "theirs")
    back = check_round_trips(pair, tmp_path)
    opened = regard.load(regard.load(pair.folder).save(tmp_path / "saved"))
    assert opened.config == pair.ours.config
    tokens, _ = padded((9, 4), 41, 3, left=False)
    segments = torch.randint(4, tokens.shape, generator=torch.Generator().manual_seed(1))
    for model in (theirs, back):
        told = model(tokens, token_type_ids=segments)
        for ours in (pair.ours, opened):
            wanted = told.logits if hasattr(told, "logits") else told.last_hidden_state
            close(ours(tokens, segments=segments), wanted)
    if model_class is hf.FNetModel:
        close(pair.ours.pooled(pair.ours(tokens, segments=segments)), told.pooler_output)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (hf.LongformerConfig(**LONG), {"attention_window": [4, 6]}, "attention_window=[4, 6]"),
        (hf.LongformerConfig(**LONG), {"attention_window": 5}, "attention_window=[5, 5]"),
        (hf.LongformerConfig(**LONG), {"architectures": ["LongformerForQuestionAnswering"]}, "QuestionAnswering"),
        (hf.BigBirdConfig(**BLOCKS), {"attention_type": "dense"}, "attention_type='dense'"),
        (hf.BigBirdConfig(**BLOCKS), {"is_decoder": True}, "is_decoder=True"),
        (hf.BigBirdConfig(**BLOCKS), {"architectures": ["BigBirdForCausalLM"]}, "BigBirdForCausalLM"),
        (hf.FNetConfig(**FNET), {"use_tpu_fourier_optimizations": True}, "use_tpu_fourier_optimizations=True"),
        (hf.FNetConfig(**FNET), {"architectures": ["FNetForMultipleChoice"]}, "FNetForMultipleChoice"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, change: dict[str, Any], named: str) -> None:
    assert named in refusal(config.to_dict() | change)


@pytest.mark.parametrize("config", [hf.LongformerConfig(**SIZES), hf.BigBirdConfig(**SIZES), hf.FNetConfig(**FNET)])
def test_missing_fields_mean_their_defaults(config: Any) -> None:
    check_defaults(config, *(SIZES if "num_attention_heads" in config.to_dict() else FNET))
