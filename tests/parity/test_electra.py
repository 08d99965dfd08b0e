"""ELECTRA: BERT's body, a narrower table where it is small, heads of its own; equal to transformers', both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraModel,
    PreTrainedModel,
)

from .encoders import check

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "embedding_size": 16},
    **{"intermediate_size": 40, "max_position_embeddings": 12},
}


@pytest.mark.parametrize(
    ("model_class", "features"),
    [
        (ElectraForMaskedLM, {}),
        (ElectraForMaskedLM, {"embedding_size": 24, "hidden_act": "relu"}),
        (ElectraModel, {}),
        (ElectraForPreTraining, {}),
        (ElectraForPreTraining, {"embedding_size": 24, "hidden_act": "relu"}),
        (ElectraForSequenceClassification, {"num_labels": 3}),
        (ElectraForTokenClassification, {"num_labels": 5}),
    ],
)
def test_every_head(model_class: type[PreTrainedModel], features: dict[str, Any], tmp_path: Path) -> None:
    check(model_class, ElectraConfig(**SIZES | features), tmp_path)
