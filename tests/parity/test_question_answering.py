"""Heads for question answering: logits equal to transformers', and the answer marked in the best passage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import regard
from generation.spoken import classifier
from regard.models import Encoder

from .encoders import check

SIZES: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_position_embeddings": 14},
}
CASES = {
    "bert": (hf.BertForQuestionAnswering, hf.BertConfig, SIZES),
    "roberta": (hf.RobertaForQuestionAnswering, hf.RobertaConfig, {**SIZES, "pad_token_id": 1}),
    "albert": (hf.AlbertForQuestionAnswering, hf.AlbertConfig, {**SIZES, "embedding_size": 16}),
    "electra": (hf.ElectraForQuestionAnswering, hf.ElectraConfig, {**SIZES, "embedding_size": 16}),
    "distilbert": (
        hf.DistilBertForQuestionAnswering,
        hf.DistilBertConfig,
        {"vocab_size": 41, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 14},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_family(name: str, tmp_path: Path) -> None:
    model_class, config_class, fields = CASES[name]
    model = check(model_class, config_class(**fields), tmp_path)
    assert model.config.head == "span"


def test_the_best_span_of_any_passage() -> None:
    """Planted logits: of two passages the second has the larger sum, and ends never come before beginnings."""
    speaker = classifier()
    config = speaker.config.with_(head="span", n_classes=2, pooler="none")
    model = regard.build(config).eval()
    assert isinstance(model, Encoder)
    model.processor = speaker.processor
    tokenizer = model.processor.source
    rows = list(tokenizer.encode_pairs([("who", "the cat sat"), ("who", "a dog ran")]))
    width = max(map(len, rows))
    logits = torch.zeros(2, width, 2)
    last = len(rows[1]) - 2
    logits[1, last, 0], logits[1, last - 1, 1], logits[1, last, 1] = 6.0, 9.0, 4.0
    model.forward = lambda *inputs, **options: logits  # type: ignore[method-assign]
    (found,) = regard.answer(model, "who", [["the cat sat", "a dog ran"]])
    assert found.source == 1
    assert found.text == tokenizer.decode(rows[1][last : last + 1])
    assert found.score == pytest.approx(10.0)
    with pytest.raises(ValueError, match="extracts its answers"):
        regard.answer(model, "who", [["the cat sat"]], beam=2)
