"""The graphs of a page: activations, switches and depths equal those of the model they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import RegardError
from regard.export.onnx_graphs import Graph
from regard.export.onnx_runtime import OnnxSession
from regard.export.onnx_trace import write_graph
from regard.export.page_graphs import describe_attention, describe_vocabulary, page_graphs
from regard.lens.activations import capture_inputs
from regard.lens.effects import logit_lens
from regard.lens.interventions import attention_scale, no_causal_mask, switch_off
from regard.lens.labels import token_labels
from regard.text import train_tokenizer
from regard.web.circuit_queries import pass_inputs

SIZES: dict[str, Any] = {"d_model": 16, "n_heads": 4, "d_ff": 24, "n_layers": 2, "max_len": 32}
SOURCE, TARGET = [4, 9, 7, 5], [1, 6, 8]


def small(preset: str, **options: Any) -> Any:
    """A model whose attention is far from uniform, so that changes to it show."""
    torch.manual_seed(0)
    model = regard.build(preset, **{"vocab_size": 20, **SIZES, **options}).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4) if weight.dim() > 1 else None
    return model


def feed(graph: Graph, **given: Tensor) -> dict[str, Tensor]:
    """Inputs of one text; switches as trained and an empty cache, unless given."""
    examples = dict(zip(graph.input_names, graph.examples, strict=True))
    for name, x in examples.items():
        if name.startswith("past"):
            examples[name] = x[:1, :0] if x.dim() == 2 else x[:1, :, :0]
        elif name == "keep":
            examples[name] = torch.ones(1, len(SOURCE), dtype=torch.bool)
    return examples | given


def decoder_inputs(graph: Graph, ids: list[int], **given: Tensor) -> dict[str, Tensor]:
    n, depth = len(ids), graph.examples[graph.input_names.index("depths")][0]
    rows = {"tokens": torch.tensor([ids]), "positions": torch.arange(n)[None], "wanted": torch.arange(n)}
    return feed(graph, **{**rows, "depths": depth.repeat(n), **given})


@torch.no_grad()
def test_an_encoder_decoder_shows_all_that_a_capture_shows() -> None:
    model = small("transformer-base")
    graphs = page_graphs(model)
    encoded = graphs["encoder"].compute(feed(graphs["encoder"], source=torch.tensor([SOURCE])))
    memory = {name: x for name, x in encoded.items() if name.startswith("cross")}
    decoded = graphs["decoder"].compute(decoder_inputs(graphs["decoder"], TARGET, **memory))
    look = regard.look(model, SOURCE, TARGET)
    record = capture_inputs(model, pass_inputs(look))
    shown = {**encoded, **decoded}
    sites = model.sites().items()
    names = [name for name, site in sites if not name.endswith("attention.input") and not site.is_derived]
    assert len(names) > 40
    for name in names:
        torch.testing.assert_close(shown[name], record[name], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(decoded["logits"], record.logits, atol=1e-5, rtol=1e-5)
    for stack in ("encoder", "decoder"):
        parts = shown[f"{stack}.token"] + shown[f"{stack}.position"]
        torch.testing.assert_close(parts, shown[stack], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_switches_are_the_interventions() -> None:
    model = small("gpt2")
    graph = page_graphs(model)["decoder"]
    gates = torch.ones(2, 4)
    gates[1, 2] = 0
    changed = graph.compute(
        decoder_inputs(graph, SOURCE, gates=gates, score_factor=torch.tensor([2.0]), see_all=torch.tensor([True]))
    )
    with switch_off(model, [("self", 1, 2)]), attention_scale(model, 2.0), no_causal_mask(model):
        look = regard.look(model, SOURCE)
        expected = look.logits()
    torch.testing.assert_close(changed["logits"][0], expected, atol=1e-5, rtol=1e-5)
    plain = graph.compute(decoder_inputs(graph, SOURCE))["logits"][0]
    torch.testing.assert_close(plain, regard.look(model, SOURCE).logits(), atol=1e-5, rtol=1e-5)
    assert (plain - expected).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_depths_are_the_logit_lens(norm_place: str) -> None:
    model = small("gpt2", norm_place=norm_place)
    graph = page_graphs(model)["decoder"]
    inputs = decoder_inputs(graph, SOURCE, wanted=torch.tensor([2, 2, 2]), depths=torch.tensor([0, 1, 2]))
    found = graph.compute(inputs)["logits"][0].softmax(-1)
    for layer, expected in enumerate(logit_lens(regard.look(model, SOURCE), 2, k=20)):
        by_token = torch.tensor([one.probability for one in sorted(expected.best)])
        torch.testing.assert_close(found[layer], by_token, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_classifier_layer_by_layer() -> None:
    model = small("bert-base", head="classify", n_classes=3)
    graph = page_graphs(model)["model"]
    look = regard.look(model, SOURCE)
    source = {"source": torch.tensor([SOURCE]), "segments": torch.zeros(1, len(SOURCE), dtype=torch.long)}
    for depth, expected in enumerate(logit_lens(look, 0, k=3)):
        logits = graph.compute(feed(graph, **source, depth=torch.tensor([depth])))["logits"]
        by_class = torch.tensor([one.probability for one in sorted(expected.best)])
        torch.testing.assert_close(logits[0].softmax(-1), by_class, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_graph_in_onnx_runtime(tmp_path: Path) -> None:
    model = small("gpt2", n_layers=1, n_kv_heads=2)
    graph = page_graphs(model)["decoder"]
    write_graph(graph, tmp_path / "decoder.onnx")
    inputs = decoder_inputs(graph, SOURCE, gates=torch.tensor([[1.0, 0.0, 1.0, 1.0]]), see_all=torch.tensor([True]))
    expected = graph.compute(inputs)
    found = OnnxSession(tmp_path / "decoder.onnx").run(inputs)
    assert list(found) == list(expected)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-4)


def test_what_a_page_has_to_know_of_an_attention() -> None:
    model = small("t5-small")
    found = describe_attention(model)
    assert list(found) == ["encoder", "self", "cross"]
    first = found["self"][0]
    assert (first["site"], first["heads"], first["causal"], first["window"]) == (
        "decoder.blocks.0.attention", 4, True, None,
    )  # fmt: skip
    assert first["bias"]["low"] == -31
    assert len(first["bias"]["values"]) == 4
    assert found["cross"][1]["bias"] is None
    assert not found["cross"][1]["causal"]
    with pytest.raises(RegardError, match="dot products"):
        describe_attention(small("gpt2", mixer="additive"))


def test_what_a_page_has_to_know_of_a_vocabulary() -> None:
    tokenizer = train_tokenizer(["고양이가 잔다", "a cat sleeps"] * 4, vocab_size=300)
    found = describe_vocabulary(tokenizer, small("gpt2", vocab_size=300).config)
    assert found is not None
    assert found["native"]
    ids = tokenizer.encode("a 고양이")
    bytes_of = b"".join((found["pieces"][index] or "").encode("latin-1") for index in ids)
    assert bytes_of.decode().strip() == "a 고양이"
    specials = [label.special for label in token_labels(ids, tokenizer, small("gpt2").config)]
    assert [found["names"].get(index, ["", False])[1] for index in ids] == specials
