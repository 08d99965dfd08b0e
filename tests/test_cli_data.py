"""`regard data describe`: what is in files is said, and what is wrong with them is said line by line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from regard import cli

Said = pytest.CaptureFixture[str]

BAD = {
    2: "wrong column count: 1 instead of 2",
    3: "wrong column count: 3 instead of 2",
    4: "invalid UTF-8: byte 0xff at 4",
    5: "empty: column 1 of 2",
    6: "empty: column 2 of 2",
    7: "line too long: 1,000,003 bytes, more than max_chars=100000",
}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    lines = [
        "Go.\t가.".encode(),
        b"one column",
        b"a\tb\tc",
        b"bad \xff byte\tx",
        b"\tempty source",
        b"empty target\t",
        b"x" * 1_000_000 + b"\ty",
        *(f"sentence {n}\tsatz {n}".encode() for n in range(30)),
    ]
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def describe(*words: str | Path) -> int:
    return cli.main(["data", "describe", *map(str, words)])


def document(said: Said, *words: str | Path) -> dict[str, Any]:
    assert describe(*words, "--json") == 0
    return json.loads(said.readouterr().out)


def test_columns_that_are_not_read_are_named(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "stars.csv").write_text("review,stars\na cat,5\na dog,1\n", encoding="utf-8")
    assert describe(tmp_path / "stars.csv") == 0
    assert "columns that are not read: stars; data.columns=…" in capsys.readouterr().err
    assert describe(tmp_path / "stars.csv", "data.columns=review,stars") == 0
    assert "not read" not in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_bad_lines_are_refused_each_with_its_place_and_reason(bad: Path, capsys: Said, form: list[str]) -> None:
    assert describe(bad, *form) == 1
    said = capsys.readouterr()
    assert said.out == ""
    head, *lines = said.err.splitlines()
    assert head.startswith("regard: 6 bad lines of 37; ")
    assert lines == [f"{bad}:{number}: {reason}" for number, reason in BAD.items()]


def test_images_that_are_not_there_may_lie_in_another_folder(tmp_path: Path, capsys: Said) -> None:
    table = tmp_path / "captions.tsv"
    table.write_text("a.png\ta dog\nb.png\ta cat\n", encoding="utf-8")
    assert cli.main(["train", "caption", f"data={table}", f"train.out={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err.splitlines()[0].endswith("data.images=FOLDER sets the folder of the images")


def test_bad_lines_are_counted_and_listed_when_they_are_to_be_skipped(
    bad: Path, capsys: Said, caplog: pytest.LogCaptureFixture
) -> None:
    assert describe(bad, "data.bad_lines=skip") == 0
    said = capsys.readouterr()
    assert "6 of 37 lines were bad and left out" in said.out
    for number, reason in BAD.items():
        assert said.out.count(f"{bad}:{number}: {reason}") == 1
    assert str(bad) + ":" not in said.err.replace(f"{bad}: ", ""), "said once"
    assert not caplog.records
    assert logging.getLogger("regard.data.sources").level == logging.NOTSET
    found = document(capsys, bad, "data.bad_lines=skip")
    assert {x["line"]: x["reason"] for x in found["bad_lines"]["first"]} == BAD
    assert found["n_train"] + found["n_valid"] == 31


def test_more_bad_lines_than_are_listed_are_still_counted(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "p.tsv"
    path.write_text("a\tb\n" * 20 + "one column\n" * 50)
    assert describe(path) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == f"… and {50 - (len(lines) - 1)} more"


def test_lengths_and_what_is_dropped(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "p.tsv"
    path.write_text("".join(f"{'a' * n}\tb\n" for n in range(1, 21)))
    words = [
        path,
        "data.kind=pairs",
        "data.valid_fraction=0",
        "--tokenizer",
        "chars",
        "--max-len",
        "11",
        "--examples",
        "2",
    ]
    found = document(capsys, *words)
    assert found["tokens"]["source"]["percentiles"]["max"] == 21, "the letters and the end"
    expected = {"max_len": 11, "n_longer": 10, "tokens_lost": sum(range(1, 11)), "n_unknown": 0}
    assert expected.items() <= found["losses"].items()
    assert found["examples"] == [["a", "b"], ["aa", "b"]]
    assert describe(*words) == 0
    assert "10 examples longer than max_len=11: left out\n" in capsys.readouterr().out
    assert describe(*words, "data.too_long=truncate", "data.max_target_len=1") == 0
    said = capsys.readouterr().out
    assert "20 examples longer than max_len=11 or max_target_len=1: cut short; tokens lost: 65" in said
    assert document(capsys, path, "--tokenizer", "none")["tokens"] == {}


def test_two_vocabularies_count_for_themselves(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "p.tsv"
    path.write_text("".join(f"aaaa bbbb {n}\tcccc dddd {n}\n" for n in range(40)))
    for joint in ("true", "false"):
        found = document(capsys, path, f"data.joint_vocab={joint}", "data.tokenizer=words")
        assert set(found["tokens"]) == {"source", "target"}
        assert found["losses"]["n_unknown"] == 0


def test_csv_with_labels_repeats_and_leaks(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "train.csv").write_text("text,label\ngood film,pos\nbad film,neg\ngood film,pos\n좋아요,pos\n")
    (tmp_path / "valid.csv").write_text("text,label\ngood film,pos\nnew,neg\n")
    found = document(capsys, tmp_path / "train.csv", f"data.valid={tmp_path / 'valid.csv'}")
    assert found["labels"] == {"neg": 1, "pos": 3}
    assert (found["n_train"], found["n_valid"]) == (4, 2)
    assert (found["duplicates"], found["leaked_sources"], found["leaked_examples"]) == (1, 1, 1)
    assert describe(tmp_path / "train.csv", "data.valid_fraction=0") == 0
    assert "good film → pos" in capsys.readouterr().out


def test_documents_are_not_cut_short(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "t.txt"
    path.write_text("word " * 2000)
    found = document(capsys, path, "--tokenizer", "chars", "--max-len", "16")
    assert found["losses"] is None
    assert found["tokens"]["text"]["total"] > 9000


def test_a_folder_of_images(tmp_path: Path, capsys: Said) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for n in range(3):
            Image.new("L", (4, 6), n).save(tmp_path / label / f"{n}.png")
    (tmp_path / "dog" / "3.png").write_bytes(b"no image")
    assert describe(tmp_path) == 1
    assert "3.png" in capsys.readouterr().err
    found = document(capsys, tmp_path, "data.bad_lines=skip", "data.valid_fraction=0")
    assert (found["labels"], found["images"]) == ({"cat": 3, "dog": 3}, {"4 × 6": 6})


@pytest.mark.parametrize(
    ("corpus", "tokenizer", "kind", "fact"),
    [
        ("en-ko", "auto", "pairs", "tokens\n  source  "),
        ("stdlib", "none", "text", "characters\n  text  "),
        ("shapes", "words", "captions", "64 × 64  50"),
    ],
)
def test_embedded_corpora(capsys: Said, corpus: str, tokenizer: str, kind: str, fact: str) -> None:
    assert describe(corpus, "data.epoch_examples=50", "data.valid_rows=20", "--tokenizer", tokenizer) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{corpus}: {kind}\n")
    assert fact in said


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["en-ko", "data.nope=1"], 2, "there is no data.nope"),
        (["en-ko", "train.steps=1"], 2, "train.steps=1: only data.* can be given here"),
        (["en-ko", "data.max_len=3", "--max-len", "4"], 2, "data.max_len is given twice: data.max_len=4 and data.max_"),
        (["en-ko", "data.source=x"], 2, "data.source is given twice: data.source=en-ko and data.source=x"),
        (
            ["en-ko", "--tokenizer", "bpee"],
            2,
            "'bpee' is not one of chars, bytes, words, bpe, unigram, nor a tokenizer",
        ),
        (["no-such-file.tsv"], 2, "no-such-file.tsv"),
        (["labels.csv", "data.columns=0,9"], 1, "columns has 9, but labels.csv has the columns text, label"),
        (["en-ko", "--tokenizer", "missing.json"], 2, "there is no file missing.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("text,label\na cat,good\na dog,bad\n", encoding="utf-8")
    assert describe(*words, *(["data.epoch_examples=10"] if "missing.json" in words else [])) == code
    said = capsys.readouterr()
    assert said.out == ""
    line = said.err.splitlines()[-1]
    assert line.startswith("regard: ")
    assert sentence in line
