"""BART and Marian: encoder states and logits equal to transformers', both ways, padded and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    M2M100ForConditionalGeneration,
    M2M100Model,
    MarianConfig,
    MarianModel,
    MarianMTModel,
    MBartForConditionalGeneration,
    MBartModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from regard.hub import differences
from regard.hub.families.bart import BART
from regard.hub.hf_family import ForeignFields
from regard.models import EncoderDecoder, build
from regard.presets import preset

from .common import ours_of, refusal, same_tensors, theirs_of, tiny, twins
from .decoder_cases import check_encoder_decoder, compare_translation

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 32, "max_position_embeddings": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53}
FEATURES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "bart": (BartForConditionalGeneration, {}),
    "bart scaled": (BartForConditionalGeneration, {"scale_embedding": True}),
    "bart untied": (BartForConditionalGeneration, {"tie_word_embeddings": False}),
    "bart ids": (BartForConditionalGeneration, {"pad_token_id": 7, "decoder_start_token_id": 2, "eos_token_id": 3}),
    "bart states": (BartModel, {}),
    "bart states untied": (BartModel, {"tie_word_embeddings": False}),
    **{
        f"bart {name}": (BartForConditionalGeneration, {"activation_function": name})
        for name in ("relu", "silu", "gelu_new", "quick_gelu")
    },
    "mbart": (MBartForConditionalGeneration, {"scale_embedding": True}),
    "mbart states": (MBartModel, {"activation_function": "relu"}),
    "m2m_100": (M2M100ForConditionalGeneration, {"pad_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 2}),
    "m2m_100 states": (M2M100Model, {"scale_embedding": False}),
    "marian": (MarianMTModel, {}),
    "marian scaled, swish": (MarianMTModel, {"scale_embedding": True, "activation_function": "swish"}),
    "marian untied": (MarianMTModel, {"tie_word_embeddings": False}),
    "marian two vocabularies": (MarianMTModel, SEPARATE),
    "marian two vocabularies, untied": (MarianMTModel, {**SEPARATE, "tie_word_embeddings": False}),
    "marian odd width": (MarianMTModel, {"d_model": 15, "encoder_attention_heads": 5, "decoder_attention_heads": 3}),
    "marian states": (MarianModel, {}),
    "marian states of two vocabularies": (MarianModel, SEPARATE),
}


@torch.no_grad()
def model_of(model_class: type[PreTrainedModel], features: dict[str, Any]) -> PreTrainedModel:
    """A random model with a bias on its logits; the sinusoids stay, and one table stays one where it is shared."""
    config_class = cast(type[PreTrainedConfig], model_class.config_class)
    model = tiny(model_class, config_class(**SIZES | features))
    generator = torch.Generator().manual_seed(6)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    base = getattr(model, "model", model)
    for stack in (base.encoder, base.decoder):
        if config_class is MarianConfig:
            stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
        if hasattr(base, "shared"):  # untied they are three tables since transformers 5, and were one before
            stack.embed_tokens.weight.copy_(base.shared.weight)
    return model


@pytest.mark.parametrize("case", FEATURES.values(), ids=FEATURES)
def test_translator(case: tuple[type[PreTrainedModel], dict[str, Any]], tmp_path: Path) -> None:
    check_encoder_decoder(model_of(*case), tmp_path)


def test_dropouts_are_read_and_written(tmp_path: Path) -> None:
    rates = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    ours = check_encoder_decoder(model_of(BartForConditionalGeneration, rates), tmp_path).config
    assert (ours.dropout, ours.attention_dropout, ours.activation_dropout) == (0.1, 0.2, 0.3)
    assert ours.embedding_dropout == 0.1


@pytest.mark.parametrize("model_class", [BartForConditionalGeneration, MarianMTModel])
def test_different_tables_for_source_and_target_are_refused(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    pair = twins(model_of(model_class, {"tie_word_embeddings": False}), tmp_path)
    other = {**pair.tensors, "model.decoder.embed_tokens.weight": torch.randn(41, 24)}
    with pytest.raises(ValueError, match=r"model.decoder.embed_tokens.weight and model.shared.weight differ"):
        ours_of(pair.fields, other)


def test_files_of_older_versions(tmp_path: Path) -> None:
    """Tied tensors under every name, positions that Marian computes, an untied head without copies of the table."""
    pair = twins(model_of(MarianMTModel, {}), tmp_path / "tied")
    old = dict(pair.tensors)
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        old[name] = old["model.shared.weight"].clone()
    for stack in ("encoder", "decoder"):
        name = f"model.{stack}.embed_positions.weight"
        old[name] = pair.theirs.state_dict()[name].clone()
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())
    old[name] = old[name].flip(0)
    with pytest.raises(ValueError, match=r"model.decoder.embed_positions.weight does not hold the sinusoids"):
        ours_of(pair.fields, old)

    pair = twins(model_of(BartForConditionalGeneration, {"tie_word_embeddings": False}), tmp_path / "untied")
    old = {name: x for name, x in pair.tensors.items() if "embed_tokens" not in name}
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())


def test_a_config_that_knows_of_no_bias(tmp_path: Path) -> None:
    """What we write for a model without a bias on its logits: zeros there, and a sign to read it back by."""
    torch.manual_seed(0)
    ours = small("transformer-base")
    assert ours.head is not None
    assert ours.head.bias is None
    back = theirs_of(ours, BART, tmp_path / "back", MarianMTModel)
    assert not back.final_logits_bias.any()
    pair = twins(back, tmp_path / "again")
    assert pair.ours.head.bias is None
    with pytest.raises(ValueError, match=r"every element of final_logits_bias must be 0.0"):
        ours_of(pair.fields, pair.tensors | {"final_logits_bias": torch.ones(1, 41)})


def small(name: str, **fields: Any) -> EncoderDecoder:
    sizes = {"vocab_size": 41, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 40, "max_len": 16}
    ours = build(name, **sizes | fields).eval()
    assert isinstance(ours, EncoderDecoder)
    return ours


@pytest.mark.parametrize(
    ("fields", "model_class"),
    [
        ({}, MarianMTModel),
        ({"tie_head": False}, MarianMTModel),
        ({"target_vocab_size": 30}, MarianMTModel),
        ({"head": "none"}, MarianModel),
        ({"positions": "learned", "position_offset": 2, "embedding_norm": True}, BartForConditionalGeneration),
        ({"positions": "learned", "position_offset": 2, "embedding_norm": True, "head": "none"}, BartModel),
    ],
    ids=str,
)
def test_what_we_build_opens_there(fields: dict[str, Any], model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    """The paper's Transformer is Marian's."""
    torch.manual_seed(0)
    ours = small("transformer-base", **fields)
    back = theirs_of(ours, BART, tmp_path / "back", model_class)
    for left in (False, True):
        compare_translation(ours, back, left)


@pytest.mark.parametrize("name", ["transformer-tiny", "transformer-base", "transformer-big"])
def test_the_presets_have_a_twin(name: str) -> None:
    config = preset(name)
    assert not differences(config, BART.read(ForeignFields(json.loads(json.dumps(BART.write(config))))))


BART_FIELDS = {**BartConfig(**SIZES).to_dict(), "architectures": ["BartForConditionalGeneration"]}
MARIAN_FIELDS = {**MarianConfig(**SIZES).to_dict(), "architectures": ["MarianMTModel"]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (BART_FIELDS | {"is_decoder": True}, "is_decoder=True"),
        (BART_FIELDS | {"normalize_before": True}, "normalize_before=True"),
        (BART_FIELDS | {"add_final_layer_norm": True}, "add_final_layer_norm=True"),
        (BART_FIELDS | {"activation_function": "mish"}, "activation_function='mish'"),
        (BART_FIELDS | {"activation_function": "swiglu"}, "activation_function='swiglu'"),
        (BART_FIELDS | {"decoder_ffn_dim": None}, "decoder_ffn_dim"),
        (BART_FIELDS | {"architectures": ["BartForSequenceClassification"]}, "BartForSequenceClassification"),
        (BART_FIELDS | {"architectures": ["BartForCausalLM"]}, "BartForCausalLM"),
        (MARIAN_FIELDS | {"activation_function": "mish"}, "activation_function='mish'"),
        (MARIAN_FIELDS | {"architectures": ["MarianForCausalLM"]}, "MarianForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "rms"},
        {"norm_place": "pre"},
        {"norm_eps": 1e-6},
        {"positions": "rope"},
        {"positions": "learned"},
        {"sinusoid_layout": "interleaved"},
        {"embedding_norm": True},
        {"activation": "swiglu"},
        {"qkv_bias": False},
        {"ff_bias": False},
        {"n_kv_heads": 2},
        {"d_head": 32},
        {"window": 8},
        {"residual": False},
        {"mixer": "linear"},
        {"max_target_len": 20, "positions": "learned", "position_offset": 2, "embedding_norm": True},
        {"source": "image"},
        {"architecture": "encoder", "head": "classify"},
    ],
    ids=str,
)
def test_what_marian_and_bart_cannot_say_is_not_their_twin(change: dict[str, Any]) -> None:
    config = preset("transformer-base", **change)
    try:
        again = BART.read(ForeignFields(BART.write(config)))
    except ValueError:
        return
    assert differences(config, again)
