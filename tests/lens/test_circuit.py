"""Circuits: running with chosen edges against patches, edge scores against the edges taken out, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generation.spoken import translator
from models.small import inputs_of, small, source_of
from regard.cli import main
from regard.data.corpora.repeats import WORDS, Repeats, induction_pairs
from regard.errors import BadData
from regard.lens.activations import capture
from regard.lens.capture import attention_name
from regard.lens.circuit import edges_on_paths, find_circuit, read_task
from regard.lens.interventions import patch
from regard.lens.patching import logit_difference, read_pairs
from regard.lens.residual_graph import CircuitRunner, Edge, ResidualGraph, edge_scores, path_patching
from regard.models import Model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "grouped": ("llama-1b", {"n_kv_heads": 2}),
    "parallel": ("gpt2", {"parallel_residual": "two-norms"}),
    "one norm for both": ("gpt2", {"parallel_residual": "one-norm"}),
    "layer scale": ("gpt2", {"layer_scale": 0.5}),
    "alibi": ("gpt2", {"positions": "alibi"}),
    "normed queries, capped, sinks": ("llama-1b", {"qk_norm": True, "score_cap": 5.0, "attention_sinks": True}),
}
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {  # which change queries and keys before they score them
    "additive": ("gpt2", {"mixer": "additive", "n_kv_heads": 2}),
    "performer": ("gpt2", {"mixer": "performer", "mixer_size": 8}),
}


@pytest.fixture(params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    name, fields = (MODELS | MECHANISMS)[request.param]
    return small(name, **fields).double()


def pair(model: Model) -> tuple[Tensor, Tensor]:
    return source_of(model.config, batch=1), source_of(model.config, batch=1, seed=9)


def runner_of(model: Model) -> CircuitRunner:
    (prompts,) = read_pairs(model, *pair(model), logit_difference(model, 4, 5))
    return CircuitRunner(model, ResidualGraph(model), *prompts)


def test_all_edges_are_the_clean_run_and_none_the_corrupted_one(model: Model) -> None:
    runner = runner_of(model)
    every = runner.graph.possible
    torch.testing.assert_close(runner.logits(every), runner.clean.logits, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(runner.logits(every & False), runner.corrupted.logits, atol=1e-6, rtol=1e-6)
    assert runner.faithfulness(every) == pytest.approx(1)


def test_a_part_without_its_edges_is_a_part_that_is_patched(model: Model) -> None:
    runner = runner_of(model)
    clean, corrupted = pair(model)
    other = capture(model, corrupted)
    for writer in ("self.0.1", "self.1.3", "ff.0"):
        kept = runner.graph.possible.clone()
        kept[runner.graph.writers.index(writer)] = False
        kind, layer, *head = writer.split(".")
        site = f"decoder.blocks.{layer}.ff.output"
        change: dict[Any, Tensor] = {site: other[site]}
        if kind == "self":
            heads = other[f"decoder.blocks.{layer}.attention.heads"]
            change = {("self", int(layer), int(head[0])): heads[:, int(head[0])]}
        with torch.no_grad(), patch(model, change):
            expected = model(clean)
        torch.testing.assert_close(runner.logits(kept), expected, atol=1e-6, rtol=1e-6)


def test_an_encoder_decoder_and_an_encoder_have_edges_too() -> None:
    for name in ("t5-small", "vit-tiny"):
        model = small(name).double()
        source, *target = inputs_of(model.config, batch=1)
        other, metric = source_of(model.config, batch=1, seed=9).to(source), logit_difference(model, 3, 4)
        source, other = (x.double() if x.is_floating_point() else x for x in (source, other))
        (prompts,) = read_pairs(model, source, other, metric, (target[0], target[0]) if target else None)
        runner = CircuitRunner(model, ResidualGraph(model), *prompts)
        graph, every = runner.graph, runner.graph.possible
        torch.testing.assert_close(runner.logits(every), runner.clean.logits, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(runner.logits(every & False), runner.corrupted.logits, atol=1e-6, rtol=1e-6)
        writers = {"encoder.0.1": ("encoder", 0, 1), "cross.1.2": ("cross", 1, 2), "self.0.3": ("self", 0, 3)}
        for writer, (kind, layer, head) in writers.items():
            if writer not in graph.writers:
                continue
            kept = every.clone()
            kept[graph.writers.index(writer)] = False
            heads = runner.corrupted[f"{attention_name(kind, layer)}.heads"][:, head]
            with torch.no_grad(), patch(model, {(kind, layer, head): heads}):
                expected = model(*prompts[0].tensors)
            torch.testing.assert_close(runner.logits(kept), expected, atol=1e-6, rtol=1e-6)
        found = find_circuit(
            model, source, other, metric, faithfulness=0.7, steps=2, target=target[0] if target else None
        )
        assert found.faithfulness >= 0.7
        assert {edge.reader for edge in found.edges} <= set(graph.readers)
        found._figure()
        if target:
            assert any(edge.reader.startswith("cross.") for edge in found.edges)  # only the source differs


@pytest.mark.parametrize("model", [*MODELS, *MECHANISMS], indirect=True)
def test_scores_of_near_prompts_are_what_each_edge_brings(model: Model) -> None:
    with torch.no_grad():  # embeddings that hardly differ: the first order is then all there is
        table = model.token.weight
        table.copy_(table[:1] + 1e-3 * (table - table[:1]))
    runner = runner_of(model)
    graph, scores = edge_scores(model, *pair(model), runner.metric, steps=1)
    brought = torch.zeros_like(scores)
    for writer, reader in graph.possible.nonzero().tolist():
        fewer = graph.possible.clone()
        fewer[writer, reader] = False
        brought[writer, reader] = 1 - runner.faithfulness(fewer)
    torch.testing.assert_close(scores, brought, atol=2e-2, rtol=2e-2)
    averaged = edge_scores(model, *pair(model), runner.metric, steps=3)[1]
    torch.testing.assert_close(averaged, scores, atol=2e-2, rtol=2e-2)


def test_a_path_is_patched_alone(model: Model) -> None:
    clean, corrupted = pair(model)
    metric = logit_difference(model, 4, 5)
    a, b = capture(model, clean), capture(model, corrupted)
    ends = [float(metric(x.logits)) for x in (a, b)]
    grouped = model.config.n_kv_heads == 2
    reader = "self.1.1.k" if grouped else "self.1.2.k"
    direct, through = ("self.0.1", "logits"), ("self.0.1", reader, "logits")
    found = path_patching(model, clean, corrupted, metric, [direct, through])
    # By hand: the last state with what head 1 of the first layer writes in the corrupted run in place of its own.
    scales = [block.attention_scale or nn.Identity() for block in model.decoder.blocks]
    change = scales[0](b.head_results(layer=0) - a.head_results(layer=0))[:, 1]
    with torch.no_grad():
        final = a["decoder.blocks.1.output"] + change
        value = float(metric(model.head(model.decoder.norm(final), model.output_table)))
        assert found[direct] == pytest.approx((value - ends[0]) / (ends[1] - ends[0]), abs=1e-6)
        # The keys of a head read that change; what the head writes then goes to the last state alone.
        block = model.decoder.blocks[1]
        k = block.attention.qkv(block.attention_norm(a["decoder.blocks.1.input"] + change))[1]
        group = 1 if grouped else 2
        keys = a["decoder.blocks.1.attention.k"].clone()
        keys[:, group] = k[:, group]
        with patch(model, {"decoder.blocks.1.attention.k": keys}):
            c = capture(model, clean)
        heads = slice(2, 4) if grouped else slice(2, 3)
        changed = scales[1](c.head_results(layer=1) - a.head_results(layer=1))[:, heads].sum(1)
        value = float(
            metric(model.head(model.decoder.norm(a["decoder.blocks.1.output"] + changed), model.output_table))
        )
    assert found[through] == pytest.approx((value - ends[0]) / (ends[1] - ends[0]), abs=1e-6)
    with pytest.raises(ValueError, match=r"'self.0.9' is not a writer of this model"):
        path_patching(model, clean, corrupted, metric, [("self.0.9", "logits")])
    with pytest.raises(ValueError, match=r"does not read the output of self.1.0"):
        path_patching(model, clean, corrupted, metric, [("self.1.0", "self.0.0.q", "logits")])


def test_edges_that_lead_nowhere_are_left_out() -> None:
    graph = ResidualGraph(small("gpt2"))
    kept = torch.zeros_like(graph.possible)
    for writer, reader in (
        ("embedding", "self.0.0.v"),
        ("self.0.0", "logits"),
        ("ff.0", "logits"),
        ("embedding", "ff.1"),
    ):
        kept[graph.writers.index(writer), graph.readers.index(reader)] = True
    left = [Edge(graph.writers[w], graph.readers[r]) for w, r in edges_on_paths(graph, kept).nonzero().tolist()]
    assert left == [Edge("embedding", "self.0.0.v"), Edge("self.0.0", "logits")]


def test_a_circuit_is_as_faithful_as_asked_and_nothing_in_it_is_idle() -> None:
    model = small("gpt2").double()
    metric = logit_difference(model, 4, 5)
    found = find_circuit(model, *pair(model), metric, faithfulness=0.8)
    assert found.faithfulness >= 0.8
    assert len(found.edges) < found.n_possible / 2
    runner = runner_of(model)
    kept = torch.zeros_like(runner.graph.possible)
    for edge in found.edges:
        kept[runner.graph.writers.index(edge.writer), runner.graph.readers.index(edge.reader)] = True
    assert runner.faithfulness(kept) == pytest.approx(found.faithfulness)
    assert 1 - runner.faithfulness(runner.graph.possible & ~kept) == pytest.approx(found.completeness)
    losses = []
    for writer, reader in kept.nonzero().tolist():
        fewer = kept.clone()
        fewer[writer, reader] = False
        losses.append(found.faithfulness - runner.faithfulness(edges_on_paths(runner.graph, fewer)))
    assert min(losses) == pytest.approx(found.minimality)
    assert found.minimality > found.faithfulness - 0.8, "each edge is needed for the faithfulness that was asked for"
    assert f"minimality {found.minimality:.3f}" in found.to_text()


def test_a_pair_with_the_same_metric_on_both_prompts_is_refused() -> None:
    model = small("llama-1b")
    text, metric = source_of(model.config, batch=1), logit_difference(model, 4, 5)
    for find in (find_circuit, lambda *given: path_patching(*given, [("embedding", "logits")])):
        with pytest.raises(ValueError, match="the metric of pair 0 is the same on both prompts"):
            find(model, text, text, metric)


def test_what_has_no_such_edges_is_refused() -> None:
    for name in ("transformer-base", "bert-base-masked"):
        with pytest.raises(ValueError, match="circuits need a pre-norm model"):
            ResidualGraph(small(name))


def test_repeats_are_said_twice_and_their_pairs_differ_in_one_word() -> None:
    corpus = Repeats()
    for split in corpus.splits:
        words = corpus.example(split, 3).split()
        half = len(words) // 2
        assert words[:half] == words[half:]
        assert len(set(words)) == half
        assert set(words) <= set(WORDS)
    assert corpus.example("train", 3) != corpus.example("valid", 3)
    for row in induction_pairs(5):
        clean, corrupted = row["clean"].split(), row["corrupted"].split()
        assert sum(a != b for a, b in zip(clean, corrupted, strict=True)) == 1
        assert clean[clean.index(clean[-1]) + 1] == row["answer"]
        assert row["wrong"] not in clean
        assert corrupted.count(corrupted[-1]) == 1


def test_a_task_is_read_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in induction_pairs(3)))
    task = read_task(file)
    assert len(task.clean) == len(task.wrong) == 3
    file.write_text('{"clean": "a", "corrupted": "b"}\n')
    with pytest.raises(BadData, match="needs the columns clean, corrupted, answer, wrong"):
        read_task(file)


def test_the_command_finds_one_in_a_translator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translator(norm_place="pre", joint=False).save(tmp_path / "model")
    rows = ["clean\tcorrupted\tanswer\twrong\ttarget", "qz\tzq\t고\t이\t고양"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows), encoding="utf-8")
    command = ["circuit", str(tmp_path / "model"), str(tmp_path / "pairs.tsv"), "--device", "cpu", "--json"]
    picture = tmp_path / "circuit.svg"
    assert main([*command, "--steps", "1", "--faithfulness", "0.5", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(edge["from"].startswith(("source", "encoder")) for edge in found["edges"])
    assert picture.is_file()
