"""DistilBERT: states, masked-token and class logits equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertModel,
    PreTrainedModel,
)

from .common import check_defaults, refusal, tiny, twins
from .encoders import check, check_counts

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 12},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"activation": "relu"},
    "silu": {"activation": "silu"},
    "gelu_new": {"activation": "gelu_new"},
    "one head": {"n_heads": 1},
    "padding id": {"pad_token_id": 7},
    "chunks": {"chunk_size_feed_forward": 4},
    "sinusoids to begin with": {"sinusoidal_pos_embds": True},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_masked_lm(features: dict[str, Any], tmp_path: Path) -> None:
    check(DistilBertForMaskedLM, DistilBertConfig(**SIZES | features), tmp_path)


def test_states(tmp_path: Path) -> None:
    config = check(DistilBertModel, DistilBertConfig(**SIZES), tmp_path).config
    assert (config.n_segments, config.pooler, config.norm_eps) == (0, "none", 1e-12)


@pytest.mark.parametrize("n_labels", [1, 3])
def test_classifier(n_labels: int, tmp_path: Path) -> None:
    config = DistilBertConfig(**SIZES, num_labels=n_labels)
    assert check(DistilBertForSequenceClassification, config, tmp_path).config.n_classes == n_labels


def test_dropouts_are_read_and_written(tmp_path: Path) -> None:
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "seq_classif_dropout": 0.4}
    ours = check(DistilBertModel, DistilBertConfig(**SIZES, **rates), tmp_path).config
    assert (ours.dropout, ours.embedding_dropout) == (0.3, 0.3)
    assert (ours.attention_dropout, ours.classifier_dropout) == (0.2, 0.4)


@pytest.mark.parametrize("head", [DistilBertModel, DistilBertForMaskedLM, DistilBertForSequenceClassification])
def test_no_tensor_is_idle(head: type[PreTrainedModel], tmp_path: Path) -> None:
    check_counts(twins(tiny(head, DistilBertConfig(**SIZES)), tmp_path).ours)


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(DistilBertConfig(**SIZES), *SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pruned_heads", {"1": [0]}),
        ("activation", "mish"),
        ("activation", "geglu"),
        ("architectures", ["DistilBertForMultipleChoice"]),
        ("dim", None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert field.removesuffix("s") in refusal({**DistilBertConfig(**SIZES).to_dict(), field: value})
