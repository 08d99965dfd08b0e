"""The certificate notices what is wrong, and without it nothing is exported."""

from __future__ import annotations

import copy
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from generation.spoken import classifier
from models.small import shaken, small
from processor import needs_vnni
from regard.cli.export_command import export as export_command
from regard.errors import BadData, BadModelFile
from regard.export import BoundBroken, Bounds, certificate_text, certify, engines_in, export, open_engine
from regard.export.ctranslate2_export import export_ctranslate2
from regard.export.parity_cases import make_cases
from regard.generation import classify
from regard.hub import Manifest
from regard.models import Model
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

from .translators import QUICK, learned, pairs, tokenizers, translator, writer


def certificate(path: Path) -> dict[str, Any]:
    return json.loads((path / "certificate.json").read_text(encoding="utf-8"))


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["comparisons"]}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory, check: Path) -> Path:
    """What was learnt, for CTranslate2."""
    target = tmp_path_factory.mktemp("shipped") / "out"
    return export(learned(), "ctranslate2", target, check=check, n_shapes=40, compiled=False)


def test_every_way_is_near_the_formula(shipped: Path) -> None:
    document = certificate(shipped)
    rows = rows_of(document)
    assert set(rows) == {"fused", "cached", "compiled", "read back", "ctranslate2", "ctranslate2 int8"}
    for name in ("fused", "cached", "read back", "ctranslate2"):
        assert 0 < rows[name]["max_abs"] <= 1e-4
    for name in ("read back", "ctranslate2"):
        assert rows[name]["same_text"] >= 0.99
    assert rows["compiled"]["skipped"] == "not requested"
    assert 1e-4 < rows["ctranslate2 int8"]["max_abs"] < 5, "rounding is a number, and no bound is held against it"
    assert document["passes"] is True
    assert document["kinds"] == ["ctranslate2"]
    assert document["shapes"] == {"count": 40, "seed": 0, "most": document["shapes"]["most"]}


def test_bleu_on_a_file(shipped: Path) -> None:
    file = certificate(shipped)["file"]
    assert file["n"] == 12
    assert file["metric"].startswith("BLEU")
    assert file["value"] > 90, "the sentences were learnt"
    found = {row["name"]: row for row in file["engines"]}
    assert found["ctranslate2"]["worse_by"] == 0
    assert found["ctranslate2"]["same_text"] == 1.0
    assert found["ctranslate2 int8"]["bound"] is None


def test_the_directory_is_whole_and_every_engine_opens_it(shipped: Path) -> None:
    manifest = Manifest.read(shipped)
    assert manifest is not None
    manifest.check(shipped)
    names = {str(file.relative_to(shipped)) for file in shipped.rglob("*") if file.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "certificate.json"} <= names
    assert {"ctranslate2/model.bin", "ctranslate2/config.json"} <= names
    assert engines_in(shipped) == ["torch", "ctranslate2"]
    texts = [source for source, _ in pairs()[:5]]
    wanted = [target for _, target in pairs()[:5]]
    assert open_engine(shipped, "torch").translate(texts) == open_engine(shipped, "ctranslate2").translate(texts)
    assert open_engine(shipped).translate(texts) == wanted
    with pytest.raises(BadModelFile, match=r"was not exported as onnx; regard export \S+ onnx shipped makes one"):
        open_engine(shipped, "onnx")
    with pytest.raises(ValueError, match="engine='jax' is not one of torch, onnx, ctranslate2"):
        open_engine(shipped, "jax")  # type: ignore[arg-type]


def test_three_engines_on_one_directory(tmp_path: Path) -> None:
    path = export(translator(n_layers=1), ("onnx", "ctranslate2"), tmp_path / "out", **QUICK)
    assert engines_in(path) == ["torch", "onnx", "ctranslate2"]
    assert rows_of(certificate(path))["onnx"]["max_abs"] <= 1e-4
    texts = [source for source, _ in pairs()[:6]]
    for beam in (1, 4):
        said = [open_engine(path, name).translate(texts, beam=beam, max_new_tokens=9) for name in engines_in(path)]
        assert said[0] == said[1] == said[2]


def test_int8_drift_is_a_number_and_its_bleu_is_held(tmp_path: Path, check: Path) -> None:
    path = export(learned(), "int8", tmp_path / "out", check=check, **QUICK)
    row = rows_of(certificate(path))["int8"]
    assert row["max_abs"] > 1e-3
    assert row["bounds"] == {"max_abs": None, "same_text": None, "loss": 0.01}
    (found,) = certificate(path)["file"]["engines"]
    assert found["worse_by"] <= found["bound"] == 0.2
    assert engines_in(path) == ["torch"]
    assert open_engine(path).translate([pairs()[0][0]]) == [pairs()[0][1]]


@needs_vnni
def test_int8_graphs_are_small_near_and_open_in_plain_onnxruntime(
    tmp_path: Path, learned_graphs: dict[str, Path]
) -> None:
    import onnxruntime

    path, plain = learned_graphs["int8"], learned_graphs["float32"]
    assert engines_in(path) == ["torch", "onnx"]
    row = rows_of(certificate(path))["onnx int8"]
    assert 1e-4 < row["max_abs"] < 5
    assert row["bounds"] == {"max_abs": None, "same_text": None, "loss": 0.01}
    assert {x["name"]: x["bound"] for x in certificate(path)["file"]["engines"]} == {"read back": 0.2, "onnx int8": 0.2}
    for name in ("encoder.onnx", "decoder.onnx"):
        assert (path / "onnx" / name).stat().st_size < 0.6 * (plain / "onnx" / name).stat().st_size
        session = onnxruntime.InferenceSession(path / "onnx" / name, providers=["CPUExecutionProvider"])
        assert {x.name for x in session.get_outputs()} >= set(
            json.loads((path / "onnx" / "onnx.json").read_text())["graphs"][name.removesuffix(".onnx")]["outputs"]
        )
    assert open_engine(path, "onnx").translate([pairs()[0][0]]) == [pairs()[0][1]]
    with pytest.raises(ValueError, match="kind onnx and kind onnx-int8 both write the graphs"):
        export(learned(), ("onnx", "onnx-int8"), tmp_path / "both", **QUICK)


def test_the_same_document_every_time(tmp_path: Path) -> None:
    model = small("gpt2")
    path = export(model, ["ctranslate2"], tmp_path / "out", **QUICK)
    first = certificate(path)
    again = {"kinds": ["ctranslate2"], **certify(model, path, **QUICK)}
    assert again == first
    other = certify(model, path, **{**QUICK, "n_shapes": 6}, seed=1)
    assert other["comparisons"] != first["comparisons"]


def nudged(model: Model) -> Model:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(other.decoder.blocks)).ff.w_out.weight[0, 0] += 0.05
    return other


def test_another_model_is_noticed(shipped: Path, check: Path) -> None:
    document = certify(nudged(learned()), shipped, check=check, **QUICK)
    assert document["passes"] is False
    assert rows_of(document)["fused"]["max_abs"] <= 1e-4, "the model itself is in order"
    assert rows_of(document)["ctranslate2"]["max_abs"] > 1e-4
    assert "broken: ctranslate2: max_abs=" in certificate_text(document)


def test_a_broken_bound_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = small("transformer-tiny"), tmp_path / "out"
    exporting = importlib.import_module("regard.export.export_model")
    monkeypatch.setattr(exporting, "export_ctranslate2", lambda m, folder: export_ctranslate2(nudged(m), folder))
    with pytest.raises(BoundBroken, match=r"ctranslate2: max_abs=\S+ is more than the bound 0\.000") as raised:
        export(model, "ctranslate2", target, **QUICK)
    assert raised.value.document["passes"] is False
    assert raised.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broken_bound_leaves_what_was_there(tmp_path: Path) -> None:
    target = export(small("transformer-tiny"), "safetensors", tmp_path / "out", **QUICK)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(BoundBroken, match="fused: max_abs"):
        export(small("gpt2"), "safetensors", target, **QUICK, bounds=Bounds(max_abs=1e-12, times_fp32=None))
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    export(small("gpt2"), "safetensors", target, **QUICK)
    assert certificate(target)["task"] == "language model"


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("onyx", {}, "kind='onyx' is not one of onnx, onnx-int8, hf"),
        ((), {}, "kind is empty"),
        (("int8", "hf"), {}, "kind int8 and kind hf both write the weights"),
        ("hf", {"mixer": "additive"}, "transformers has no twin of this model"),
        ("ctranslate2", {"mixer": "additive"}, "CTranslate2 cannot run a model with mixer='additive'"),
    ],
)
def test_what_cannot_be_exported_is_said_first(kind: Any, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        export(small("gpt2", **fields), kind, tmp_path / "out", **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds thesis\.txt, not written by regard"):
        export(small("gpt2"), "safetensors", tmp_path, **QUICK)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(FileExistsError, match="is a file"):
        export(small("gpt2"), "safetensors", tmp_path / "thesis.txt", **QUICK)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere there is no umask")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        saved = small("gpt2").save(tmp_path / "saved")
        exported = export(small("gpt2"), ("onnx", "ctranslate2"), tmp_path / "out", n_shapes=1, compiled=False)
        int8 = export(small("gpt2"), "int8", tmp_path / "int8", n_shapes=1, compiled=False)
    finally:
        os.umask(before)
    files = [file for folder in (saved, exported, int8) for file in folder.rglob("*") if file.is_file()]
    assert {"model.safetensors", "decoder.onnx", "model.bin"} <= {file.name for file in files}
    assert {(file.name, oct(file.stat().st_mode & 0o777)) for file in files} == {(f.name, oct(mode)) for f in files}


def test_half_precision_is_compared_in_float32(tmp_path: Path) -> None:
    model = translator().bfloat16().train()
    path = export(model, "ctranslate2", tmp_path / "out", **QUICK)
    assert model.training
    assert next(model.parameters()).dtype == torch.bfloat16
    assert rows_of(certificate(path))["ctranslate2"]["max_abs"] <= 1e-4


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("llama-1b", "language model"),
        ("bert-base-masked", "masked language model"),
        ("vit-tiny", "classification"),
        ("captioner", "captioning"),
        ("captioner-regions", "captioning"),
        ("luong-lstm", "translation"),
        ("bert-base", "encoder"),
    ],
)
def test_every_task_has_its_shapes(name: str, task: str, tmp_path: Path) -> None:
    document = certificate(export(small(name), "safetensors", tmp_path / "out", **QUICK))
    assert document["task"] == task
    assert document["passes"]
    rows = rows_of(document)
    assert rows["read back"]["max_abs"] <= 1e-4
    assert ("skipped" in rows["cached"]) == (task not in ("language model", "captioning", "translation"))
    assert ("skipped" in rows["fused"]) == (name == "luong-lstm")


def test_random_shapes_reach_the_corners() -> None:
    cases = make_cases(small("transformer-tiny").config, 200, 0)
    assert {len(case.source) for case in cases} == {1, 2, 3, 4}
    lengths = [len(row) for case in cases for row in case.sources()]
    assert (min(lengths), max(lengths)) == (1, 23)
    assert any(case.padding_mask is not None and not case.padding_mask.all() for case in cases)
    assert all((case.target[:, 0] == 1).all() for case in cases if case.target is not None)


def test_a_language_model_by_its_perplexity(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{source}\n" for source, _ in pairs()[:8]), encoding="utf-8")
    path = export(writer(), "ctranslate2", tmp_path / "out", check=tmp_path / "text.txt", **QUICK)
    file = certificate(path)["file"]
    assert file["metric"] == "perplexity"
    found = {row["name"]: row for row in file["engines"]}
    assert found["ctranslate2"]["value"] == pytest.approx(file["value"], rel=1e-4)
    assert found["ctranslate2 int8"]["value"] != file["value"]


def test_sentences_without_translations(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{source}\n" for source, _ in pairs()[:8]), encoding="utf-8")
    path = export(learned(), "int8", tmp_path / "out", check=tmp_path / "text.txt", **QUICK, bounds=Bounds(delta=50))
    file = certificate(path)["file"]
    assert (file["metric"], file["value"]) == ("same translations in percent", 100)


def test_a_classifier_by_its_accuracy(tmp_path: Path) -> None:
    source, _ = tokenizers(True)
    model = small("sentiment", vocab_size=source.size, max_len=64)
    model.processor = Processor(source=source, labels=("bad", "good", "so"))
    lines = [f"{text}\t{label}\n" for (text, _), label in zip(pairs()[:30], ("bad", "good", "so") * 10, strict=True)]
    (tmp_path / "texts.tsv").write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    path = export(model, "int8", tmp_path / "out", check=tmp_path / "texts.tsv", **QUICK, bounds=Bounds(delta=50))
    file = certificate(path)["file"]
    assert file["metric"] == "accuracy in percent"
    assert file["n"] == 30
    assert open_engine(path).processor.labels == ("bad", "good", "so")


def test_a_classifier_of_pairs_by_its_accuracy(tmp_path: Path) -> None:
    """Read as by ``classify``: the second text in its own segment, pairs that are too long cut."""
    source = train_tokenizer([text for pair in pairs() for text in pair], "bpe", 300, "bos-eos")
    model = shaken(small("bert-base", head="classify", n_classes=3, vocab_size=source.size, max_len=24, eos_id=2))
    labels = ("bad", "good", "so")
    model.processor = Processor(source=source, labels=labels)
    own = [guess.label for guess in classify(model, list(pairs()[:30]), truncate=True)]
    assert len(set(own)) > 1
    lines = [f"{a}\t{b}\t{label}\n" for (a, b), label in zip(pairs()[:30], own, strict=True)]
    (tmp_path / "texts.tsv").write_text("premise\thypothesis\tlabel\n" + "".join(lines), encoding="utf-8")
    document = certify(model, model.save(tmp_path / "out"), check=tmp_path / "texts.tsv", **QUICK)
    assert [document["file"]["value"], document["file"]["engines"][0]["value"]] == [100, 100]


def test_a_file_to_check_is_read_in_its_encoding_or_its_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("고양이가 앉았다\n개가 뛰었다\n".encode("cp949"))
    path = writer().save(tmp_path / "out")
    assert certify(writer(), path, check=tmp_path / "text.txt", **QUICK)["file"]["n"] == 2
    (tmp_path / "text.txt").write_bytes(b"the cat\nthe \0 dog\n")
    with pytest.raises(BadData, match=r"text\.txt:2: a NUL character"):
        certify(writer(), path, check=tmp_path / "text.txt", **QUICK)


def test_bounds_and_counts_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_abs=-1 must not be negative"):
        Bounds(max_abs=-1)
    with pytest.raises(ValueError, match="n_shapes=0"):
        certify(small("gpt2"), tmp_path, n_shapes=0)


def command(*words: object) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(export_command)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command(tmp_path: Path, check: Path) -> None:
    learned().save(tmp_path / "model")
    quick = ("--shapes", 4, "--no-compile")
    done = command(tmp_path / "model", "ctranslate2", tmp_path / "out", "--check", check, *quick, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["file"]["n"] == 12
    shown = command(tmp_path / "model", "safetensors", tmp_path / "plain", *quick)
    assert "every bound holds" in shown.stdout
    broken = command(tmp_path / "model", "ctranslate2", tmp_path / "never", "--bound", 1e-12, *quick)
    assert isinstance(broken.exception, BoundBroken)
    assert not (tmp_path / "never").exists()
    assert "broken: ctranslate2" in broken.stderr


def test_int8_is_held_to_the_bound_on_texts_that_was_asked_for_and_to_no_other(tmp_path: Path) -> None:
    translator().save(tmp_path / "model")  # random weights: rounding changes some of its texts
    words = (tmp_path / "model", "int8", tmp_path / "out", "--shapes", 12, "--no-compile")
    shown = command(*words)
    assert shown.exit_code == 0, shown.output
    row = rows_of(certificate(tmp_path / "out"))["int8"]
    assert row["same_text"] < 0.99, "or this test shows nothing"
    assert "every bound holds" not in shown.stdout
    assert "the texts of int8 were measured, not held to a bound: --same-text 0.9 or --check FILE" in shown.stdout
    held = command(*words, "--same-text", 0.99)
    assert isinstance(held.exception, BoundBroken)
    assert f"int8: same_text={row['same_text']:g} is less than the bound 0.99" in str(held.exception)
    assert "every bound holds" in command(*words, "--same-text", 0).stdout


def test_a_classifier_has_no_texts_to_measure(tmp_path: Path) -> None:
    classifier().save(tmp_path / "model")
    shown = command(tmp_path / "model", "int8", tmp_path / "out", "--shapes", 4, "--no-compile")
    assert "every bound holds" in shown.stdout


@pytest.mark.slow
def test_the_compiled_graph_is_among_them(tmp_path: Path) -> None:
    path = export(small("transformer-tiny", n_layers=1), "safetensors", tmp_path / "out", n_shapes=12)
    row = rows_of(certificate(path))["compiled"]
    assert row["max_abs"] <= 1e-4
    assert row["shapes"] >= 5
