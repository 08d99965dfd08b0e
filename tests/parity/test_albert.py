"""ALBERT: one layer's weights for all layers, a narrower token table; equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertModel,
    PreTrainedModel,
)

from .common import check_defaults, ours_of, refusal, same_tensors, tiny, twins
from .encoders import check, check_counts

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "embedding_size": 10, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_position_embeddings": 12},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"hidden_act": "gelu"},
    "relu": {"hidden_act": "relu"},
    "silu": {"hidden_act": "silu"},
    "eps": {"layer_norm_eps": 0.05},
    "segments": {"type_vocab_size": 4},
    "one segment": {"type_vocab_size": 1},
    "one layer": {"num_hidden_layers": 1},
    "as wide as the model": {"embedding_size": 24},
    "wider than the model": {"embedding_size": 30},
    "padding id": {"pad_token_id": 7},
    "chunks": {"chunk_size_feed_forward": 4},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_masked_lm(features: dict[str, Any], tmp_path: Path) -> None:
    model = check(AlbertForMaskedLM, AlbertConfig(**SIZES | features), tmp_path)
    assert len(model.stacks()[0].blocks) == 1


@pytest.mark.parametrize("pooler", [True, False])
def test_states_and_pooler(pooler: bool, tmp_path: Path) -> None:
    model = check(AlbertModel, AlbertConfig(**SIZES), tmp_path, pooler=pooler)
    assert (model.pooler is not None) == pooler


@pytest.mark.parametrize("n_labels", [1, 3])
def test_classifier(n_labels: int, tmp_path: Path) -> None:
    config = AlbertConfig(**SIZES, num_labels=n_labels, hidden_dropout_prob=0.2, classifier_dropout_prob=0.4)
    ours = check(AlbertForSequenceClassification, config, tmp_path).config
    assert (ours.n_classes, ours.dropout, ours.embedding_dropout, ours.classifier_dropout) == (n_labels, 0.2, 0.2, 0.4)


@pytest.mark.parametrize("head", [AlbertModel, AlbertForMaskedLM, AlbertForSequenceClassification])
def test_no_tensor_is_idle(head: type[PreTrainedModel], tmp_path: Path) -> None:
    check_counts(twins(tiny(head, AlbertConfig(**SIZES)), tmp_path).ours)


def test_an_old_file_with_everything_of_the_pretraining(tmp_path: Path) -> None:
    pair = twins(tiny(AlbertForMaskedLM, AlbertConfig(**SIZES)), tmp_path)
    old = dict(pair.tensors)
    old |= {f"albert.pooler.{kind}": torch.ones(24, 24) for kind in ("weight", "bias")}
    old |= {f"sop_classifier.classifier.{kind}": torch.ones(2, 24) for kind in ("weight", "bias")}
    old["albert.embeddings.position_ids"] = torch.arange(12)[None]
    old["predictions.decoder.weight"] = old["albert.embeddings.word_embeddings.weight"].clone()
    old["predictions.decoder.bias"] = old["predictions.bias"].clone()
    same_tensors(ours_of(pair.fields, old).state_dict(), pair.ours.state_dict())


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(AlbertConfig(**SIZES), *SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_groups", 2),
        ("inner_group_num", 2),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "mish"),
        ("type_vocab_size", 0),
        ("embedding_size", None),
        ("architectures", ["AlbertForMultipleChoice"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert field.removesuffix("s") in refusal({**AlbertConfig(**SIZES).to_dict(), field: value})
