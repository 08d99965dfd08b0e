"""`regard classify` of models whose answer is not one class of one text: pairs, several labels, numbers, tags."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import cli
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

TEXTS = ["Anna lives in Paris .", "a man plays", "somebody sleeps"]
SIZES: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_ff": 16, "n_layers": 1, "max_len": 32, "vocab_size": 300}
LABELS = {"single_label": ("no", "yes"), "multi_label": ("love", "war"), "regression": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory of an untrained model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(TEXTS, "bpe", 300, "bos-eos")
    for kind, labels in LABELS.items():
        fields = {"problem_type": kind, "n_classes": len(labels or "x"), "head": "classify"}
        model = regard.build("bert-base", **SIZES, **fields, n_segments=2)
        model.processor = Processor(source=tokenizer, labels=labels)
        model.save(folder / kind)
    model = regard.build("bert-base", **SIZES, head="tag", n_classes=3)
    model.processor = Processor(source=tokenizer, labels=("O", "B-PER", "B-LOC"))
    model.save(folder / "tag")
    return {kind: str(folder / kind) for kind in (*LABELS, "tag")}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["classify", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_pairs_are_typed_or_two_columns(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models["single_label"]
    (expected,) = regard.classify(model, [("a man plays", "somebody sleeps")])
    label, chance = said(capsys, model, "a man plays", "--second", "somebody sleeps").split()
    assert (label, float(chance)) == (expected.label, pytest.approx(expected.probability, abs=1e-4))
    (tmp_path / "claims.csv").write_text(
        "id,premise,hypothesis\n7,a man plays,somebody sleeps\n8,,\n", encoding="utf-8"
    )
    assert cli.main(["classify", model, "--file", f"{tmp_path}/claims.csv"]) == 2
    assert "id, premise, hypothesis; say which to read: --column premise,hypothesis" in capsys.readouterr().err
    words = ("--file", f"{tmp_path}/claims.csv", "--column", "premise,hypothesis", "--out", f"{tmp_path}/o.csv")
    said(capsys, model, *words)
    first, blank = csv.DictReader((tmp_path / "o.csv").open(encoding="utf-8"))
    assert first["predicted_label"] == expected.label
    assert float(first["probability"]) == pytest.approx(expected.probability, abs=1e-4)
    assert blank["predicted_label"] == ""
    assert cli.main(["classify", model, "a", "b", "--second", "c"]) == 2


def test_a_model_of_pairs_refuses_single_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"the man plays {n},{'nobody plays' if n % 2 else 'he plays'},{'no' if n % 2 else 'yes'}" for n in range(40)
    ]
    (tmp_path / "pairs.csv").write_text("\n".join(["premise,hypothesis,label", *rows]), encoding="utf-8")
    words = [f"data.source={tmp_path}/pairs.csv", f"train.out={tmp_path}/run", "train.steps=2", "train.device=cpu"]
    sizes = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=32"]
    assert cli.main(["train", "classify", *words, *sizes, "train.lr=0.01"]) == 0
    note = "train.warmup=100 is longer than the 2 steps: the learning rate only reaches 0.0002 of 0.01"
    assert note in capsys.readouterr().err
    assert cli.main(["export", f"{tmp_path}/run", "int8", f"{tmp_path}/int8"]) == 0
    for model in (f"{tmp_path}/run", f"{tmp_path}/int8"):
        capsys.readouterr()
        assert cli.main(["classify", model, "the man plays"]) == 2
        assert "this model reads pairs of texts: give the second text" in capsys.readouterr().err
        said(capsys, model, "the man plays", "--second", "he plays")
    with pytest.raises(ValueError, match="reads pairs of texts"):
        regard.classify(f"{tmp_path}/run", ["the man plays"])
    single = [*words[:1], "data.columns=premise,label", f"train.init={tmp_path}/run", f"train.out={tmp_path}/b"]
    assert cli.main(["train", "classify", *single, *words[2:], "train.warmup=2"]) == 0
    assert "train.warmup" not in capsys.readouterr().err
    said(capsys, f"{tmp_path}/b", "the man plays")


def test_several_labels(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models["multi_label"]
    (expected,) = regard.classify(model, "a man plays", threshold=0.0)
    assert expected.labels == ("love", "war")
    line = said(capsys, model, "a man plays", "--threshold", "0").rstrip("\n")
    assert line.split("\t")[0] == "love;war"
    document = json.loads(said(capsys, model, "a man plays", "--threshold", "1", "--json"))
    assert document["results"][0]["labels"] == []
    (tmp_path / "t.jsonl").write_text('{"text": "a man plays"}\n', encoding="utf-8")
    words = ("--file", str(tmp_path / "t.jsonl"), "--probabilities", "--threshold", "0")
    row = json.loads(said(capsys, model, *words))
    assert row["predicted_labels"] == "love;war"
    assert row["p_war"] == pytest.approx(expected.all["war"], abs=1e-4)


def test_numbers(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models["regression"]
    (expected,) = regard.classify(model, "a man plays")
    assert float(said(capsys, model, "a man plays")) == pytest.approx(expected.value, rel=1e-3)
    (result,) = json.loads(said(capsys, model, "a man plays", "--json"))["results"]
    assert result["value"] == pytest.approx(expected.value)
    (tmp_path / "t.csv").write_text("text\na man plays\n", encoding="utf-8")
    table = said(capsys, model, "--file", str(tmp_path / "t.csv"), "--column", "text")
    assert table.splitlines()[0] == "text,predicted_value"


@pytest.mark.parametrize("kind", ["regression", "tag"])
@pytest.mark.parametrize("words", [["--threshold", "0.5"], ["--top", "2"], ["--probabilities"]])
def test_an_option_for_classes_is_refused_where_there_are_none(
    models: dict[str, str], kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["classify", models[kind], "a man plays", *words]) == 2
    assert f"{words[0]} " in capsys.readouterr().err
    assert cli.main(["classify", models["tag"], "a man plays", "--second", "b"]) == 2


def test_tags(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models["tag"]
    (expected,) = regard.tag(model, "Anna lives in Paris .")
    assert said(capsys, model, "Anna lives in Paris .").rstrip() == str(expected)
    (result,) = json.loads(said(capsys, model, "Anna lives in Paris .", "--json"))["results"]
    assert result["tags"] == expected.tags
    assert [entity["text"] for entity in result["entities"]] == [entity.text for entity in expected.entities]
    (tmp_path / "t.txt").write_text("Anna lives\n\nParis\n", encoding="utf-8")
    lines = said(capsys, model, "--file", str(tmp_path / "t.txt")).split("\n")
    assert [len(line.split()) for line in lines[:3]] == [2, 0, 1]
