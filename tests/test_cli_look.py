"""`regard look`: in the terminal, as files, as one document; what is wrong in one line and with an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import regard
from generation.spoken import captioner, language_model, translator
from regard.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    translator().save(folder / "translator")
    translator(n_layers=2).save(folder / "other")
    language_model().save(folder / "lm")
    captioner().save(folder / "captioner")
    return folder


def test_a_heat_map_in_the_terminal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(saved / "translator"), "the cat", "--target", "고양이", "--words"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cross attention, layer 2 of 2, mean of heads")
    assert "고양이" in said


def test_top_says_where_each_token_looks(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["look", str(saved / "lm"), "the cat sat", "--top", "2", "--layer", "1", "--head", "2"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = regard.look(saved / "lm", "the cat sat").top(2, layer=0, head=1)
    assert lines == [str(looks) for looks in wanted]


def test_json_is_one_document_with_the_exact_weights(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["look", str(saved / "translator"), "the cat", "--beam", "2", "--top", "3", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    look = regard.look(saved / "translator", "the cat", generate={"beam": 2})
    assert found["target"] == look.target_text
    assert (found["kind"], found["layer"], found["head"]) == ("cross", 1, None)
    assert found["kinds"]["cross"]["cols"] == len(look.cols(kind="cross"))
    weights = look.weights(layer=1, kind="cross")
    for row in found["rows"]:
        for at in row["looks_at"]:
            assert at["weight"] == pytest.approx(float(weights[row["index"], at["index"]]), abs=1e-6)
            assert at["text"] == look.cols(kind="cross")[at["index"]].text


@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.pdf", "x.csv", "x.html"])
def test_files(saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    command = ["look", str(saved / "translator"), "the cat", "--target", "고양이", "--no-specials", "--out", str(file)]
    assert main(command) == 0
    assert file.stat().st_size > 100
    said = capsys.readouterr()
    assert said.out == ""
    assert f"wrote {file}" in said.err


def test_an_image_is_looked_at_through_a_captioner(saved: Path, tmp_path: Path) -> None:
    picture = tmp_path / "in.png"
    Image.new("RGB", (30, 20), "red").save(picture)
    out = str(tmp_path / "out.png")
    assert main(["look", str(saved / "captioner"), str(picture), "--max-new-tokens", "3", "--out", out]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_language_model_goes_on_where_that_is_asked_for(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(saved / "lm"), "the cat", "--max-new-tokens", "3", "--json"]) == 0
    longer = json.loads(capsys.readouterr().out)
    assert main(["look", str(saved / "lm"), "the cat", "--json"]) == 0
    assert len(longer["rows"]) > len(json.loads(capsys.readouterr().out)["rows"])


def test_two_models_side_by_side(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["look", str(saved / "translator"), "the cat", "--compare"]
    assert main([*command, str(saved / "translator")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["1", *["0.0000"] * 4]
    assert main([*command, str(saved / "other"), "--json"]) == 0
    assert torch.tensor(json.loads(capsys.readouterr().out)["divergence"]).shape == (2, 4)


def test_the_score_comes_with_a_table_and_as_a_document(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.lens import head_scores

    monkeypatch.setattr(head_scores, "score", lambda model: {"error": 0.25, "table": "a table"})
    assert main(["look", str(saved / "translator"), "--score"]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert main(["look", str(saved / "translator"), "--score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"error": 0.25}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lm"], 2, "there is nothing to look at"),
        (["lm", "the cat", "--layer", "3"], 2, "--layer 3: this model has 2 layers, 1 … 2"),
        (["lm", "the cat", "--head", "0"], 2, "--head 0: this model has 4 heads, 1 … 4"),
        (["lm", "the cat", "--head", "5"], 2, "--head 5: this model has 4 heads, 1 … 4"),
        (["lm", "the cat", "--kind", "cross"], 2, "--kind 'cross': this model has 'self' attention"),
        (["lm", "the cat", "--target", "x"], 1, "target is for models with an encoder"),
        (["lm", "the cat " * 100], 1, "but this model reads at most max_len=96"),
        (["lm", "the cat", "--out", "x.jpg"], 2, "it may end in .png, .svg, .pdf, .csv, .html"),
        (["lm", "the cat", "--out", "nowhere/x.png"], 2, "there is no directory nowhere\n"),  # no hint about models
        (["lm", "--score"], 1, "a score needs cross-attention"),
        (["translator", "the cat", "--score"], 2, "leave out the text"),
        (["lm", "the cat", "--compare", "other", "--out", "x.png"], 2, "leave out --out and --top"),
        (["lm", "the cat", "--history", "--top", "2"], 2, "leave out --score, --compare and --top"),
        (
            ["lm", "the cat", "--device", "cuda"],
            2,
            "not available on this machine or in this build of torch; use --device cpu",
        ),
        (["captioner", "nothing.png"], 2, "no such file"),
        (["missing", "x"], 3, "missing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    saved: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["look", str(saved / words[0]), *words[1:]]) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
