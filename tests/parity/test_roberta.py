"""RoBERTa, XLM-R and CamemBERT: positions counted over real tokens behind the padding row, a head of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)

from .common import check_defaults, close, refusal, tiny, twins
from .encoders import check, check_counts, inputs

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_position_embeddings": 14, "type_vocab_size": 1},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"hidden_act": "relu"},  # in the layers; the masked-token head keeps gelu
    "gelu_new": {"hidden_act": "gelu_new"},
    "silu": {"hidden_act": "silu"},
    "eps": {"layer_norm_eps": 0.05},
    "segments": {"type_vocab_size": 3},
    "padding id 0": {"pad_token_id": 0},
    "padding id 4": {"pad_token_id": 4},
    "chunks": {"chunk_size_feed_forward": 4},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_masked_lm(features: dict[str, Any], tmp_path: Path) -> None:
    model = check(RobertaForMaskedLM, RobertaConfig(**SIZES | features), tmp_path)
    assert model.config.position_offset == features.get("pad_token_id", 1) + 1
    assert model.config.max_len == 14 - model.config.position_offset


@pytest.mark.parametrize("pooler", [True, False])
def test_states_and_pooler(pooler: bool, tmp_path: Path) -> None:
    model = check(RobertaModel, RobertaConfig(**SIZES), tmp_path, pooler=pooler)
    assert (model.pooler is not None) == pooler


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("features", [{}, {"hidden_act": "relu"}], ids=["gelu", "relu"])
def test_classifier(n_labels: int, features: dict[str, Any], tmp_path: Path) -> None:
    config = RobertaConfig(**SIZES, **features, num_labels=n_labels, classifier_dropout=0.4)
    model = check(RobertaForSequenceClassification, config, tmp_path)
    assert (model.config.n_classes, model.config.classifier_dropout) == (n_labels, 0.4)


@pytest.mark.parametrize("name", ["XLMRoberta", "Camembert"])
@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_the_same_under_other_names(name: str, kind: str, tmp_path: Path) -> None:
    """Read from their class, saved as RoBERTa's, which computes the same."""
    config = getattr(transformers, f"{name}Config")(**SIZES)
    theirs: type[PreTrainedModel] = getattr(transformers, f"{name}{kind}")
    check(theirs, config, tmp_path, back_class=getattr(transformers, f"Roberta{kind}"))


@pytest.mark.parametrize("head", [RobertaModel, RobertaForMaskedLM, RobertaForSequenceClassification])
def test_no_tensor_is_idle(head: type[PreTrainedModel], tmp_path: Path) -> None:
    check_counts(twins(tiny(head, RobertaConfig(**SIZES)), tmp_path).ours)


@torch.no_grad()
def test_positions_go_by_the_token_and_not_by_the_mask(tmp_path: Path) -> None:
    """A real token that the mask hides still takes up a place, as it does in transformers."""
    pair = twins(tiny(RobertaForMaskedLM, RobertaConfig(**SIZES)), tmp_path)
    tokens, keep, _ = inputs(pair.ours, left=False)
    keep = keep.clone()
    keep[0, 2] = keep[1, 1] = False
    close(pair.ours(tokens, padding_mask=keep), pair.theirs(tokens, attention_mask=keep.long()).logits, keep)


@torch.no_grad()
def test_text_as_long_as_the_table_allows(tmp_path: Path) -> None:
    pair = twins(tiny(RobertaForMaskedLM, RobertaConfig(**SIZES)), tmp_path)
    tokens = torch.randint(2, 41, (2, 12), generator=torch.Generator().manual_seed(0))
    close(pair.ours(tokens), pair.theirs(tokens).logits)
    with pytest.raises(ValueError, match="max_len=12"):
        pair.ours(torch.full((1, 13), 5))


def test_missing_fields_mean_their_defaults() -> None:
    check_defaults(RobertaConfig(**SIZES | {"type_vocab_size": 2}), *SIZES.keys() - {"type_vocab_size"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "mish"),
        ("type_vocab_size", 0),
        ("architectures", ["RobertaForCausalLM"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    told = refusal({**RobertaConfig(**SIZES).to_dict(), field: value})
    assert field.removesuffix("s") in told
