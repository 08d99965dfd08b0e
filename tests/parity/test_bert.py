"""BERT: states, pooled output, masked-token and class logits equal to transformers', both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedModel,
)

from regard.hub.families import BY_TYPE
from regard.hub.hf_family import ForeignFields
from regard.hub.weight_steps import to_ours
from regard.io import load
from regard.presets import preset

from .common import check_defaults, close, ours_of, padded, refusal, same_tensors, tiny, twins
from .encoders import check, check_counts

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_position_embeddings": 12},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"hidden_act": "relu"},
    "silu": {"hidden_act": "silu"},
    "swish": {"hidden_act": "swish"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "quick_gelu": {"hidden_act": "quick_gelu"},
    "relu2": {"hidden_act": "relu2"},
    "eps": {"layer_norm_eps": 0.05},
    "segments": {"type_vocab_size": 4},
    "one segment": {"type_vocab_size": 1},
    "one head": {"num_attention_heads": 1},
    "padding id": {"pad_token_id": 7},
    "chunks": {"chunk_size_feed_forward": 4},
    "untied": {"tie_word_embeddings": False},
}
HEADS = (BertModel, BertForMaskedLM, BertForSequenceClassification)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_masked_lm(features: dict[str, Any], tmp_path: Path) -> None:
    check(BertForMaskedLM, BertConfig(**SIZES | features), tmp_path)


def test_a_pretraining_model_is_its_masked_half(tmp_path: Path) -> None:
    theirs = tiny(BertForPreTraining, BertConfig(**SIZES))
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["model_type"]  # as files were before there was such a field: the class tells
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = load(tmp_path)
    tokens, keep = padded((8, 5), 41, 0, left=False)
    with torch.no_grad():
        told = theirs(input_ids=tokens, attention_mask=keep.long()).prediction_logits
        close(ours(tokens, padding_mask=keep, segments=torch.zeros_like(tokens)), told, keep)


@pytest.mark.parametrize("pooler", [True, False])
def test_states_and_pooler(pooler: bool, tmp_path: Path) -> None:
    model = check(BertModel, BertConfig(**SIZES), tmp_path, pooler=pooler)
    assert (model.pooler is not None) == pooler


@pytest.mark.parametrize("labels", [{"num_labels": 1}, {"num_labels": 5}, {"id2label": {0: "a", 1: "b", 2: "c"}}])
def test_classifier(labels: dict[str, Any], tmp_path: Path) -> None:
    model = check(BertForSequenceClassification, BertConfig(**SIZES, **labels), tmp_path)
    assert model.config.n_classes == labels.get("num_labels", 3)


@pytest.mark.parametrize("head", HEADS)
def test_no_tensor_is_idle(head: type[PreTrainedModel], tmp_path: Path) -> None:
    check_counts(twins(tiny(head, BertConfig(**SIZES)), tmp_path).ours)


def test_dropouts_are_read_and_written(tmp_path: Path) -> None:
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    ours = check(BertForMaskedLM, BertConfig(**SIZES, **rates), tmp_path).config
    assert (ours.dropout, ours.embedding_dropout, ours.attention_dropout) == (0.3, 0.3, 0.2)
    assert ours.classifier_dropout == 0.3  # not given: that of the hidden states
    given = BY_TYPE["bert"].read(ForeignFields({**SIZES, **rates, "model_type": "bert", "classifier_dropout": 0.4}))
    assert given.classifier_dropout == 0.4


@pytest.mark.parametrize("name", ["bert-base", "bert-base-masked"])
def test_the_presets_have_a_twin(name: str) -> None:
    config = preset(name)
    assert BY_TYPE["bert"].read(ForeignFields(BY_TYPE["bert"].write(config))) == config


def test_an_old_file_with_everything_of_the_pretraining(tmp_path: Path) -> None:
    """The first BERT files: norms in TensorFlow's words, the second head and pooler, tied tensors twice, a buffer."""
    pair = twins(tiny(BertForMaskedLM, BertConfig(**SIZES)), tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in pair.tensors.items()
    }
    old |= {f"bert.pooler.dense.{kind}": torch.ones(24, 24) for kind in ("weight", "bias")}
    old |= {f"cls.seq_relationship.{kind}": torch.ones(2, 24) for kind in ("weight", "bias")}
    old["bert.embeddings.position_ids"] = torch.arange(12)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())
    old["cls.predictions.decoder.weight"][3, 3] += 1.0
    with pytest.raises(ValueError, match=r"decoder\.weight and .*word_embeddings\.weight are tied"):
        ours_of(pair.fields, old)


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_an_old_tagger_still_has_its_pooler(kind: str, tmp_path: Path) -> None:
    config = BertConfig(**SIZES) if kind == "bert" else AlbertConfig(**SIZES, embedding_size=16)
    theirs = tiny(BertForTokenClassification if kind == "bert" else AlbertForTokenClassification, config)
    pair = twins(theirs, tmp_path)
    name = "bert.pooler.dense" if kind == "bert" else "albert.pooler"
    old = pair.tensors | {f"{name}.weight": torch.ones(24, 24), f"{name}.bias": torch.ones(24)}
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())


def test_the_bias_that_an_untied_head_reads(tmp_path: Path) -> None:
    """Untied, transformers reads the decoder's bias; the other is kept idle, and stands in for it in older files."""
    theirs = tiny(BertForMaskedLM, BertConfig(**SIZES, tie_word_embeddings=False))
    pair = twins(theirs, tmp_path)
    assert torch.equal(pair.ours.state_dict()["head.bias"], pair.tensors["cls.predictions.decoder.bias"])
    older = {name: x for name, x in pair.tensors.items() if name != "cls.predictions.decoder.bias"}
    read = to_ours(pair.family.steps(pair.ours.config), older)
    assert torch.equal(read["head.bias"], pair.tensors["cls.predictions.bias"])


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(BertConfig(**SIZES), *SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "relative_key_query"),
        ("pruned_heads", {"0": [1]}),
        ("hidden_act", "mish"),
        ("hidden_act", "swiglu"),
        ("type_vocab_size", 0),
        ("hidden_size", None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert field in refusal({**BertConfig(**SIZES).to_dict(), "architectures": ["BertModel"], field: value})


def test_other_heads_are_refused_by_name() -> None:
    for name in ("BertLMHeadModel", "BertForMultipleChoice"):
        assert name in refusal({**BertConfig(**SIZES).to_dict(), "architectures": [name]})


@pytest.mark.parametrize(
    "change",
    [
        {"norm_place": "pre"},
        {"norm": "rms"},
        {"n_segments": 0},
        {"activation": "swiglu"},
        {"positions": "rope"},
        {"qkv_bias": False},
        {"embedding_norm": False},
        {"window": 4},
    ],
)
def test_what_bert_cannot_say_is_not_its_twin(change: dict[str, Any]) -> None:
    config = preset("bert-base").with_(**change)
    try:
        again = BY_TYPE["bert"].read(ForeignFields(BY_TYPE["bert"].write(config)))
    except ValueError:
        return
    assert again != config
