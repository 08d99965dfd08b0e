"""T5 and T5 1.1: encoder states and logits equal to transformers', both ways, padded and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
)

from regard.hub.families.t5 import T5
from regard.hub.hf_family import ForeignFields
from regard.models import Encoder, EncoderDecoder, build
from regard.presets import preset

from .common import check_round_trips, close, ours_of, padded, refusal, same_tensors, theirs_of, tiny, twins
from .decoder_cases import check_encoder_decoder, compare_translation

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide heads": {"d_kv": 16},
    "one head": {"num_heads": 1},
    "same depth": {"num_decoder_layers": None},
    "eps": {"layer_norm_epsilon": 0.05},
    "many buckets": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    "near buckets only": {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 3},
    "padding id": {"pad_token_id": 7},
    **{name: {"feed_forward_proj": name} for name in ("gated-gelu", "gated-silu", "gated-relu")},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def conditional(features: dict[str, Any]) -> PreTrainedModel:
    """A random T5; 1.1 with a head of its own, as its real checkpoints have, though the class starts out tied."""
    model = tiny(T5ForConditionalGeneration, T5Config(**SIZES | features))
    if not model.config.scale_decoder_outputs:
        own = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5)) / 24**0.5
        model.lm_head.weight = nn.Parameter(own)
        model.all_tied_weights_keys.pop("lm_head.weight")
    return model


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_translator(features: dict[str, Any], tmp_path: Path) -> None:
    check_encoder_decoder(conditional(features), tmp_path)


def test_mt5_is_one_point_one_under_other_names(tmp_path: Path) -> None:
    theirs = tiny(MT5ForConditionalGeneration, MT5Config(**SIZES))
    own = torch.randn(theirs.lm_head.weight.shape, generator=torch.Generator().manual_seed(5)) / 24**0.5
    theirs.lm_head.weight = nn.Parameter(own)
    theirs.all_tied_weights_keys.pop("lm_head.weight", None)
    pair = twins(theirs, tmp_path / "theirs")
    assert (pair.fields["model_type"], pair.ours.config.tie_head, pair.ours.config.logit_scale) == ("mt5", False, 1.0)
    assert isinstance(pair.ours, EncoderDecoder)
    for left in (False, True):
        compare_translation(pair.ours, theirs, left)
    back = theirs_of(pair.ours, T5, tmp_path / "back", T5ForConditionalGeneration)
    compare_translation(pair.ours, back, left=False)


def test_states_without_a_head(tmp_path: Path) -> None:
    assert check_encoder_decoder(tiny(T5Model, T5Config(**SIZES)), tmp_path).head is None


def test_encoder_alone(tmp_path: Path) -> None:
    theirs = tiny(T5EncoderModel, T5Config(**SIZES))
    pair = twins(theirs, tmp_path / "theirs")
    back = check_round_trips(pair, tmp_path)
    assert isinstance(pair.ours, Encoder)
    for other in (theirs, back):
        for left in (False, True):
            tokens, keep = padded((9, 4, 1), 41, 0, left)
            with torch.no_grad():
                told = other(input_ids=tokens, attention_mask=keep.long()).last_hidden_state
                close(pair.ours(tokens, padding_mask=keep), told, keep)


def test_one_point_one_in_every_version_of_its_config(tmp_path: Path) -> None:
    """The field that told T5 1.1 apart says something else today; all three spellings are the same model."""
    pair = twins(conditional(FEATURES["1.1"]), tmp_path / "theirs")
    told = {"tie_word_embeddings": pair.fields["tie_word_embeddings"], "scale": pair.fields["scale_decoder_outputs"]}
    assert told == {"tie_word_embeddings": True, "scale": False}
    assert not pair.ours.config.tie_head
    assert pair.ours.config.logit_scale == 1.0
    older = {name: value for name, value in pair.fields.items() if name != "scale_decoder_outputs"}
    untied, null = {"tie_word_embeddings": False}, {"scale_decoder_outputs": None}
    for fields in (older | untied, pair.fields | untied, pair.fields | null):
        same_tensors(ours_of(fields, pair.tensors).state_dict(), pair.ours.state_dict())
        assert ours_of(fields, pair.tensors).config == pair.ours.config
    written = T5.write(pair.ours.config)
    assert (written["tie_word_embeddings"], written["scale_decoder_outputs"]) == (False, False)


def test_one_point_one_saved_while_its_head_was_still_the_table(tmp_path: Path) -> None:
    theirs = tiny(T5ForConditionalGeneration, T5Config(**SIZES | FEATURES["1.1"]))
    pair = twins(theirs, tmp_path / "theirs")
    assert "lm_head.weight" not in pair.tensors
    assert isinstance(pair.ours, EncoderDecoder)
    compare_translation(pair.ours, theirs, left=False)
    back = theirs_of(pair.ours, T5, tmp_path / "back", T5ForConditionalGeneration)
    same_tensors(back.state_dict(), theirs.state_dict())


def test_the_original_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    pair = twins(conditional(FEATURES["1.1"]), tmp_path)
    with pytest.raises(ValueError, match=r"lm_head.weight and shared.weight are tied by the config"):
        ours_of(pair.fields | {"scale_decoder_outputs": True}, pair.tensors)


def test_an_old_file_with_every_name_of_the_table(tmp_path: Path) -> None:
    pair = twins(conditional({}), tmp_path)
    old = dict(pair.tensors)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        old[name] = old["shared.weight"].clone()
    old["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 4)
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())
    del old["shared.weight"]
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())


@pytest.mark.parametrize(
    ("name", "fields"), [("t5-small", {"logit_scale": 24**-0.5}), ("t5-v1.1-small", {}), ("t5-base", {"head": "none"})]
)
def test_our_presets_open_there(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_head": 6, "d_ff": 40}
    ours = build(name, **sizes | fields).eval()
    assert isinstance(ours, EncoderDecoder)
    back = theirs_of(ours, T5, tmp_path / "ours", T5Model if ours.head is None else T5ForConditionalGeneration)
    compare_translation(ours, back, left=True)


@pytest.mark.parametrize("name", ["t5-small", "t5-base", "t5-v1.1-small"])
def test_the_presets_have_a_twin(name: str) -> None:
    config = preset(name)
    rates = dict.fromkeys(("attention_dropout", "embedding_dropout", "activation_dropout"), config.dropout)
    said = {"n_decoder_layers": config.n_layers, "d_head": config.head_width, **rates}  # T5 has one rate for all
    assert T5.read(ForeignFields(json.loads(json.dumps(T5.write(config))))) == config.with_(**said)


FIELDS = {**T5Config(**SIZES).to_dict(), "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_decoder": True}, "is_decoder=True"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj='gelu'"),
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj='gated-mish'"),
        ({"scale_decoder_outputs": True, "tie_word_embeddings": False}, "scale_decoder_outputs=True"),
        ({"dense_act_fn": "silu"}, "dense_act_fn='silu'"),
        ({"is_gated_act": True}, "is_gated_act=True"),
        ({"d_kv": None}, "d_kv"),
        ({"architectures": ["T5ForTokenClassification"]}, "T5ForTokenClassification"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    assert named in refusal(FIELDS | change)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layer"},
        {"positions": "alibi"},
        {"activation": "gelu"},
        {"attention_scale": None},
        {"qkv_bias": True},
        {"ff_bias": True},
        {"logit_scale": 1.0},
        {"tie_head": False},
        {"n_decoder_heads": 4},
        {"d_decoder_ff": 1024},
        {"target_vocab_size": 100},
        {"head_bias": True},
        {"architecture": "decoder"},
        {"architecture": "encoder", "head": "masked-lm"},
    ],
    ids=str,
)
def test_what_t5_cannot_say_is_not_its_twin(change: dict[str, Any]) -> None:
    config = T5.read(ForeignFields(T5.write(preset("t5-small"))))
    assert T5.read(ForeignFields(T5.write(config))) == config
    config = config.with_(**change)
    try:
        again = T5.read(ForeignFields(T5.write(config)))
    except ValueError:
        return
    assert again != config
