"""Roles of heads: what they move, against the logits by hand; heads that were made for a role; sinks and outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from models.small import inputs_of, small
from regard.lens.activations import capture
from regard.lens.head_roles import HeadRoles, head_roles, massive_activations, moved_logits, sink_scores
from regard.lens.interventions import patch
from regard.lens.why import split_query


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {}),
        ("llama-1b", {"n_kv_heads": 2}),
        ("llama-1b", {"norm_place": "both"}),
        ("gpt2", {"layer_scale": 0.1}),
        ("gpt2", {"norm_place": "post"}),
    ],
    ids=["gpt2", "grouped", "norms on both sides", "layer scale", "post-norm"],
)
def test_what_heads_move_is_what_the_logits_of_their_keys_get(name: str, fields: dict[str, Any]) -> None:
    model = small(name, **fields).double()
    record = capture(model, [[5, 6, 7, 8, 9, 5]])
    found = moved_logits(record)
    total = torch.zeros(2).double()
    for query in range(6):  # the attribution of each key's own token, over the mean of the vocabulary
        logits = [record.logit_attribution(token, position=query) for token in range(31)]
        every = torch.stack([torch.stack([each.tokens(layer=n)[2] for n in range(2)]) for each in logits])
        mean = every.mean(0)  # (layers, keys)
        for key, token in enumerate([5, 6, 7, 8, 9, 5]):
            total += (every[token] - mean)[:, key] / 6
    torch.testing.assert_close(found[:, 2].double(), total, atol=1e-5, rtol=0)


def test_writers_of_a_query_sum_to_its_scores() -> None:
    model = small("llama-1b", n_kv_heads=2)
    record = capture(model, *inputs_of(model.config))
    names, scores = split_query(record, "self", 1, 3, 5)
    expected = record.call(layer=1).tile(slice(5, 6), masked=False)[0, 3, 0].double()
    torch.testing.assert_close(scores.sum(0), expected, atol=1e-4, rtol=1e-4)
    assert {"token", "self.0.2", "ff.0"} <= set(names)


def test_a_head_that_looks_at_the_first_token_is_a_sink_and_only_mixed_texts_tell_of_inhibition() -> None:
    model = small("gpt2")
    with torch.no_grad():  # scores of layer 1, head 0 grow with the first dimension, which position 0 alone has
        attention: Any = model.decoder.blocks[0].attention
        attention.w_q.zero_()
        attention.w_k.zero_()
        attention.w_qkv.bias.zero_()
        attention.w_qkv.bias[:6] = 30.0  # queries of head 0
        attention.w_k[:6] = 1.0
    with patch(model, {"decoder.blocks.0.attention.input": first_only}):
        roles = head_roles(model)
    assert roles.labels(0, 0)[0] == "sink"
    assert roles.scores["inhibition"].isnan().all()
    assert roles.top("sink", 1)[0][:2] == (0, 0)
    assert "sink" in roles.to_text()
    mixed = head_roles(model, [[5, 6, 7, 8, 5, 9, 6]])
    assert not mixed.scores["inhibition"][0].isnan().any()
    assert mixed.to_dict()["labels"][0][0] == mixed.labels(0, 0)
    with pytest.raises(ValueError, match="defined for language models only"):
        head_roles(small("sentiment"))
    with pytest.raises(ValueError, match="'name' is not one of"):
        mixed.top("name")


def first_only(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[1]) == 0).to(x)[None, :, None].expand_as(x)


def test_the_weight_a_key_gets_and_activations_out_of_range() -> None:
    model = small("transformer-base")
    record = capture(model, *inputs_of(model.config))
    for kind in ("self", "cross", "encoder"):
        weights = record.attention(layer=1, kind=kind).tile()[2]
        counts = (weights > 0).sum(1)
        torch.testing.assert_close(sink_scores(record, kind=kind, prompt=2)[1], weights.sum(1) / counts)
    windowed = small("mistral-7b")
    record_of_window = capture(windowed, *inputs_of(windowed.config))
    weights = record_of_window.attention(layer=1).tile()[2]
    torch.testing.assert_close(sink_scores(record_of_window, prompt=2)[1], weights.sum(1) / (weights > 0).sum(1))
    assert massive_activations(record) == []
    site = "decoder.blocks.0.output"
    record[site][1, 2, 5] = -5e4
    (found,) = massive_activations(record)
    assert found[:5] == (site, 1, 2, 5, -5e4)
    assert isinstance(HeadRoles({"sink": torch.zeros(1, 2)}).labels(0, 1), list)


def test_a_learned_sink_is_not_the_first_token() -> None:
    model, tokens = small("gpt2", attention_sinks=True), [5, 6, 7, 5, 8, 9]
    weights = torch.stack([regard.look(model, tokens).map(layer=layer).tile()[0] for layer in range(2)])
    torch.testing.assert_close(head_roles(model, [tokens]).scores["sink"], weights[:, :, 1:, 0].mean(-1))


def test_padding_is_not_searched_for_massive_activations() -> None:
    record = capture(small("gpt2"), [[5, 6, 7, 8], [5, 6]])
    record["decoder.blocks.0.output"][1, 3, 5] = 5e4
    assert massive_activations(record) == []
    assert all(found.position < 2 for found in massive_activations(record, least=0, ratio=0, k=999) if found.prompt)
    some = capture(small("gpt2"), [[5, 6, 7, 8], [5, 6]], positions=[1, 2])
    found = massive_activations(some, least=0, ratio=0, k=999)
    assert {(each.prompt, each.position) for each in found} == {(0, 0), (0, 1), (1, 0)}
