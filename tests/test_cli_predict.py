"""Bulk prediction: tables, folders and streams in, the same out with new columns."""

from __future__ import annotations

import csv
import datetime
import io
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import regard
from child_process import child_process
from forked_shell import Shell
from generation.spoken import captioner, classifier, image_classifier, language_model, picture, translator
from regard import cli
from regard.generation.bulk_prediction import newest_weights

Said = pytest.CaptureFixture[str]
REVIEWS = [("the cat sat", "good"), ('a dog ran, "fast"', "bad"), ("", "bad"), ("고양이가\n앉았다.", "good")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"classifier": classifier(), "translator": translator(), "speaker": language_model()}
    made |= {"images": image_classifier(), "captioner": captioner()}
    return {name: model.save(folder / name) for name, model in made.items()}


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text", "label"), *((str(n), *row) for n, row in enumerate(REVIEWS))])
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos/more").mkdir(parents=True)
    picture(tmp_path / "photos/a.png")
    picture(tmp_path / "photos/more/b.png", (0, 0, 255))
    (tmp_path / "photos/notes.txt").write_text("no image")
    return tmp_path / "photos"


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


def told(capsys: Said, *words: Any) -> str:
    assert run(*words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: Said, code: int, *words: Any) -> str:
    assert run(*words) == code
    answer = capsys.readouterr()
    assert answer.out == ""
    return answer.err


def expected_labels(models: dict[str, Path]) -> list[str]:
    return [regard.classify(models["classifier"], text)[0].label if text else "" for text, _ in REVIEWS]


# ---- tables


def test_classify_reads_a_column_of_a_csv_file_and_keeps_the_others(
    models: dict[str, Path], reviews: Path, tmp_path: Path, capsys: Said
) -> None:
    out = tmp_path / "out.csv"
    assert told(capsys, "classify", models["classifier"], "--file", reviews, "--out", out, "--probabilities") == ""
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["text"], row["label"]) for row in rows] == REVIEWS
    assert [row["predicted_label"] for row in rows] == expected_labels(models)
    first = regard.classify(models["classifier"], REVIEWS[0][0])[0]
    assert {name: float(rows[0][f"p_{name}"]) for name in first.all} == pytest.approx(first.all, abs=1e-5)
    assert rows[2]["probability"] == rows[2]["p_cats"] == ""  # a blank cell gets a blank answer
    printed = told(capsys, "classify", models["classifier"], "--file", reviews, "--probabilities")
    assert printed == out.read_text(encoding="utf-8")  # the same on stdout
    assert not (tmp_path / "out.csv.partial").exists()


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_other_tables_and_the_summary(models: dict[str, Path], tmp_path: Path, capsys: Said, form: str) -> None:
    path, out = tmp_path / f"in.{form}", tmp_path / f"out.{form}"
    rows = [{"en": "the cat", "n": "1"}, {"en": "  ", "n": "2"}, {"en": "a dog", "n": "3"}]
    if form == "tsv":
        path.write_text("en\tn\n" + "".join(f"{row['en']}\t{row['n']}\n" for row in rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run("translate", models["translator"], "--file", path, "--out", out, "--beam", 1) == 0
    assert "3 rows; 1 blank; new columns translation, score; wrote" in capsys.readouterr().err
    made = regard.translate(models["translator"], ["the cat", "a dog"], beam=1)
    if form == "tsv":
        found = list(csv.DictReader(out.open(encoding="utf-8"), delimiter="\t", quoting=csv.QUOTE_NONE))
    else:
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["n"] for row in found] == ["1", "2", "3"]
    assert [row["translation"] for row in found] == [" ".join(made[0].split("\n")), "", " ".join(made[1].split("\n"))]


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
def test_half_a_surrogate_does_not_lose_the_answers(models: dict[str, Path], tmp_path: Path, form: str) -> None:
    """JSON may hold one; the file is written when all rows have been answered."""
    (tmp_path / "in.jsonl").write_text('{"text": "the \\ud800 cat"}\n{"text": "a dog"}\n', encoding="utf-8")
    assert (
        run("classify", models["classifier"], "--file", tmp_path / "in.jsonl", "--out", tmp_path / f"out.{form}") == 0
    )
    rows = (tmp_path / f"out.{form}").read_bytes().decode("utf-8", "surrogatepass").splitlines()
    assert sum("a dog" in row for row in rows) == 1
    assert form != "jsonl" or json.loads(rows[0])["text"] == "the \ud800 cat"


def test_a_column_by_name_or_number_and_a_message_that_lists_them(
    models: dict[str, Path], tmp_path: Path, capsys: Said
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("opinion,stars\nthe cat,5\na dog,1\n", encoding="utf-8")
    err = refused(capsys, 2, "classify", models["classifier"], "--file", path)
    assert f"{path} has the columns opinion, stars; say which to read: --column opinion" in err
    by_name = told(capsys, "classify", models["classifier"], "--file", path, "--column", "opinion")
    assert by_name == told(capsys, "classify", models["classifier"], "--file", path, "--column", 0)
    assert by_name.splitlines()[0] == "opinion,stars,predicted_label,probability"
    err = refused(capsys, 2, "classify", models["classifier"], "--file", path, "--column", "text")
    assert f"--column text: {path} has the columns opinion, stars" in err


def test_korean_columns_are_found_as_macos_writes_them_too(
    models: dict[str, Path], tmp_path: Path, capsys: Said
) -> None:
    path, names = tmp_path / "table.csv", unicodedata.normalize("NFD", "번호,리뷰")
    path.write_text(f"{names}\n1,the cat\n2,a dog\n", encoding="utf-8")
    found = told(capsys, "classify", models["classifier"], "--file", path, "--column", "리뷰")
    assert found == told(capsys, "classify", models["classifier"], "--file", path), "a known name"
    assert found.splitlines()[0] == f"{names},predicted_label,probability"


def test_new_columns_never_replace_old_ones(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,predicted_label\nthe cat,mine\n", encoding="utf-8")
    head, row = told(capsys, "classify", models["classifier"], "--file", path).splitlines()
    assert head == "text,predicted_label,predicted_label_2,probability"
    assert row.startswith("the cat,mine,")


def test_answers_never_replace_the_file_they_are_made_from(
    models: dict[str, Path], reviews: Path, tmp_path: Path, capsys: Said
) -> None:
    before, link = reviews.read_bytes(), tmp_path / "link.csv"
    link.symlink_to(reviews)
    for out in (reviews, link):
        assert run("classify", models["classifier"], "--file", reviews, "--out", out) == 2
        assert f"--out {out} is the file to read" in capsys.readouterr().err
    assert reviews.read_bytes() == before


def test_columns_of_one_name_stay_apart(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,text,label\nthe cat,le chat,good\na dog,un chien,bad\n", encoding="utf-8")
    head, row, _ = told(capsys, "classify", models["classifier"], "--file", path).splitlines()
    assert head == "text,text_2,label,predicted_label,probability"
    assert row.startswith(f"the cat,le chat,good,{regard.classify(models['classifier'], 'the cat')[0].label},")


def test_values_of_old_columns_are_not_rounded(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "the cat", "price": 1234567.89, "tags": ["a", "ä"]}\n', encoding="utf-8")
    assert run("classify", models["classifier"], "--file", path, "--out", tmp_path / "t.csv") == 0
    (row,) = csv.DictReader((tmp_path / "t.csv").open(encoding="utf-8"))
    assert (row["price"], row["tags"]) == ("1234567.89", '["a", "ä"]')


def test_a_threshold_leaves_uncertain_labels_blank(models: dict[str, Path], reviews: Path, capsys: Said) -> None:
    sure = regard.classify(models["classifier"], REVIEWS[0][0])[0].probability
    for threshold, label in ((sure - 1e-4, expected_labels(models)[0]), (sure + 1e-4, "")):
        out = told(capsys, "classify", models["classifier"], "--file", reviews, "--threshold", threshold)
        assert next(iter(csv.DictReader(io.StringIO(out))))["predicted_label"] == label
    assert told(capsys, "classify", models["classifier"], "the cat", "--threshold", 1).startswith("\t0.")


def test_generate_for_a_table(models: dict[str, Path], reviews: Path, capsys: Said) -> None:
    out = told(capsys, "generate", models["speaker"], "--file", reviews, "--max-new-tokens", 3)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert rows[0]["generated"] == regard.generate(models["speaker"], "the cat sat", max_new_tokens=3)[0]
    assert rows[2]["generated"] == ""
    file = reviews.with_name("generated.csv")
    assert run("generate", models["speaker"], "--file", reviews, "--max-new-tokens", 3, "--out", file) == 0
    capsys.readouterr()
    assert list(csv.DictReader(file.open(newline="", encoding="utf-8"))) == rows


def test_a_table_of_images_and_a_folder(models: dict[str, Path], photos: Path, tmp_path: Path, capsys: Said) -> None:
    names = ["a.png", "more/b.png"]
    table = photos / "images.tsv"
    table.write_text("id\timage\n" + "".join(f"{n}\t{name}\n" for n, name in enumerate(names)), encoding="utf-8")
    labels = [regard.classify(models["images"], photos / name)[0].label for name in names]
    texts = [" ".join(text.split("\n")) for text in regard.caption(models["captioner"], [photos / x for x in names])]
    lines = told(capsys, "classify", models["images"], photos).splitlines()
    assert [line.split("\t")[:2] for line in lines] == [list(pair) for pair in zip(names, labels, strict=True)]
    out = tmp_path / "captions.csv"
    assert told(capsys, "caption", models["captioner"], photos, "--out", out) == ""
    with out.open(newline="", encoding="utf-8") as file:
        assert [(row["image"], row["caption"]) for row in csv.DictReader(file)] == list(zip(names, texts, strict=True))
    of_table = told(capsys, "classify", models["images"], "--file", table).splitlines()
    assert [line.split("\t")[2] for line in of_table] == ["predicted_label", *labels]
    table.write_text("id\timage\n1\tgone.png\n", encoding="utf-8")
    assert f"{table}:2: {photos / 'gone.png'}: no such file" in refused(
        capsys, 1, "caption", models["captioner"], "--file", table
    )


def test_parquet_without_its_library_says_what_to_install(
    models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    err = refused(capsys, 1, "classify", models["classifier"], "--file", tmp_path / "x.parquet")
    assert 'pip install "regard[data]"' in err


def test_parquet(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(arrow.table({"text": [text for text, _ in REVIEWS], "n": [1, 2, 3, 4]}), path)
    assert told(capsys, "classify", models["classifier"], "--file", path, "--out", out) == ""
    table = parquet.read_table(out).to_pydict()
    assert table["n"] == [1, 2, 3, 4]
    assert [label or "" for label in table["predicted_label"]] == expected_labels(models)
    assert table["probability"][2] is None
    assert "--out" in refused(capsys, 2, "classify", models["classifier"], "--file", path)


def test_values_that_the_other_format_lacks(models: dict[str, Path], tmp_path: Path) -> None:
    """JSON lines with numbers become text in Parquet, dates of Parquet become text in JSON lines."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, other = tmp_path / "in.jsonl", tmp_path / "in.parquet"
    path.write_text('{"text": "the cat", "id": 7}\n{"text": "a dog", "id": null}\n', encoding="utf-8")
    assert run("classify", models["classifier"], "--file", path, "--out", tmp_path / "out.parquet") == 0
    assert parquet.read_table(tmp_path / "out.parquet").to_pydict()["id"] == ["7", None]
    parquet.write_table(arrow.table({"text": ["the cat"], "day": [datetime.date(2020, 1, 2)]}), other)
    assert run("classify", models["classifier"], "--file", other, "--out", tmp_path / "out.jsonl") == 0
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["day"] == "2020-01-02"


# ---- interrupted, and gone on with


def test_a_stopped_prediction_goes_on_where_it_stopped(
    models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.bulk_answers._LINES_AT_ONCE", 2)
    path, out, whole = tmp_path / "in.csv", tmp_path / "out.csv", tmp_path / "whole.csv"
    path.write_text("id,text\n" + "".join(f"{n},the cat {n}\n" for n in range(7)), encoding="utf-8")
    words = ["classify", models["classifier"], "--file", path, "--out"]
    assert told(capsys, *words, whole) == ""
    asked: list[list[str]] = []
    answer = regard.generation.classify

    def stops(model: Any, texts: list[str], **options: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(texts)
        return answer(model, texts, **options)

    patched = "regard.generation.label_answers.classify"
    monkeypatch.setattr(patched, stops)
    assert run(*words, out) == 130
    assert "stopped after 4 of 7 rows; run the same command again to resume" in capsys.readouterr().err
    assert not out.exists()
    partial = tmp_path / "out.csv.partial"
    partial.write_bytes(partial.read_bytes() + b'{"label": "ca')  # as a process leaves it that was killed
    asked.clear()
    monkeypatch.setattr(
        "regard.generation.label_answers.classify", lambda m, x, **o: [asked.append(x), answer(m, x, **o)][1]
    )
    assert run(*words, out) == 0
    said = capsys.readouterr().err
    assert "7 rows; 4 of them answered before" in said
    assert [text for texts in asked for text in texts] == ["the cat 4", "the cat 5", "the cat 6"]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_answers_of_another_file_or_setting_are_not_gone_on_with(
    models: dict[str, Path], tmp_path: Path, capsys: Said
) -> None:
    path, out = tmp_path / "in.txt", tmp_path / "out.txt"
    path.write_text("the cat\na dog\n", encoding="utf-8")
    (tmp_path / "out.txt.partial").write_text('{"model": "another"}\n{"label": "x", "probability": 1, "all": {}}\n')
    assert run("classify", models["classifier"], "--file", path, "--out", out) == 0
    said = capsys.readouterr().err
    assert "answered before" not in said
    assert "out.txt.partial holds answers of another command, file or model: starting from the first row" in said
    assert out.read_text() == told(capsys, "classify", models["classifier"], "the cat", "a dog")


def test_answers_to_a_file_read_in_another_encoding_are_not_gone_on_with(
    models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_bytes("고양이\n".encode("cp949"))
    words = ["classify", models["classifier"], "--file", tmp_path / "in.txt", "--out", tmp_path / "out.txt"]

    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.generation.bulk_prediction.atomic_file", stop)  # all answers, and no output
    for encoding in ("latin-1", "auto"):
        assert run(*words, "--encoding", encoding) == 130
    assert "starting from the first row" in capsys.readouterr().err


def test_words_with_their_tags_are_no_lines_of_text(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "people.conll").write_text("Anna B-PER\nsleeps O\n")
    assert run("classify", models["classifier"], "--file", tmp_path / "people.conll") == 2
    assert (
        "people.conll holds words with their tags; predictions need a sentence on each line" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "ctranslate2/model.bin", "onnx/decoder.onnx"])
def test_weights_of_any_format_have_an_age(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    assert newest_weights(str(tmp_path)) == newest_weights(str(tmp_path / name)) > 0


# ---- lines


def test_blank_lines_give_blank_answers_everywhere(models: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "in.txt"
    path.write_text("the cat\n\na dog\n   \n", encoding="utf-8")
    for words in (
        ["classify", models["classifier"]],
        ["translate", models["translator"], "--beam", 1],
        ["generate", models["speaker"], "--lines", "--max-new-tokens", 1],
    ):
        lines = told(capsys, *words, "--file", path).split("\n")
        assert (lines[1], lines[3:]) == ("", ["", ""]), words
        assert lines[0].strip() or lines[2].strip(), words
        results = json.loads(told(capsys, *words, "--file", path, "--json"))["results"]
        assert [x["input"] for x in results] == ["the cat", "", "a dog", "   "]


def test_a_line_that_is_too_long_is_named_as_the_file_numbers_it(
    models: dict[str, Path], reviews: Path, tmp_path: Path, capsys: Said
) -> None:
    with reviews.open("a", encoding="utf-8") as file:
        file.write(f"9,{'the cat ' * 90},good\n")
    line = 7  # the header is 1, and one cell holds a line end
    err = refused(capsys, 1, "classify", models["classifier"], "--file", reviews)
    assert f"{reviews}:{line}: 184 tokens, but max_len=96; --truncate keeps its beginning" in err
    assert run("classify", models["classifier"], "--file", reviews, "--truncate") == 0
    assert f"1 cut to max_len=96 (line {line})" in capsys.readouterr().err


def test_a_coprocess_answers_line_by_line(bash: Shell, models: dict[str, Path]) -> None:
    words = [bash.regard, "classify", str(models["classifier"]), "--stream"]
    with child_process(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("the cat", "", "a dog"):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            line = process.stdout.readline()  # before the next one is sent
            assert line.endswith("\n")
            assert bool(line.strip()) == bool(text)
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait() == 0


def test_a_byte_order_mark_is_removed_from_the_first_line_only(
    models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\ufeffthe cat\n\ufeffa dog\n"
    (tmp_path / "lines.txt").write_text(lines, encoding="utf-8")
    told(capsys, "classify", models["classifier"], "--file", tmp_path / "lines.txt", "--out", tmp_path / "out.jsonl")
    answers = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    stream = told(capsys, "classify", models["classifier"], "--stream", "--json").splitlines()
    assert [json.loads(line)["input"] for line in stream] == ["the cat", "\ufeffa dog"]
    assert [json.loads(line)["text"] for line in answers] == ["the cat", "\ufeffa dog"]


@pytest.mark.parametrize(
    ("command", "name"), [("translate --beam 1", "translator"), ("generate --max-new-tokens 2", "speaker")]
)
def test_a_stream_is_one_line_out_for_one_in(
    models: dict[str, Path], capsys: Said, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    words = [*command.split(), models[name], "--stream"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n\na dog\r\n")))
    assert told(capsys, *words).count("\n") == 3
    assert "--stream answers the lines of stdin" in refused(capsys, 2, *words, "--file", "x.txt")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n" + b"the cat " * 90)))
    assert run(*words, "--json") == 1
    said = capsys.readouterr()
    assert [json.loads(line)["input"] for line in said.out.splitlines()] == ["the cat"]
    assert "regard: stdin:2: 18" in said.err


def test_a_column_of_a_file_of_lines_is_told_which_names_are_tables(
    models: dict[str, Path], tmp_path: Path, capsys: Said
) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text("a cat\teine Katze\n", encoding="utf-8")
    said = refused(capsys, 2, "translate", models["translator"], "--file", file, "--column", "0")
    assert f"{file} has no columns: by its name it is read as lines, not as a table (.csv, .tsv," in said


@pytest.mark.parametrize("command", ["classify", "translate", "caption", "generate"])
def test_an_ending_that_is_no_table_we_write_is_refused_before_anything(
    command: str, reviews: Path, tmp_path: Path, capsys: Said
) -> None:
    """Lines of text in a file called x.xlsx would be answers that no program opens."""
    (lines := tmp_path / "lines.en").write_text("the cat sat\na dog ran\n", encoding="utf-8")
    endings = "it may end in .csv, .tsv, .jsonl, .ndjson, .parquet, .txt\n"
    for source, name in ((reviews, "x.xlsx"), (reviews, "x.CSW"), (lines, "x.xlsx"), (lines, "x.json")):
        out = tmp_path / name
        err = refused(capsys, 2, command, tmp_path / "no-model", "--file", source, "--out", out)
        assert err == f"regard: --out {out} ends in {out.suffix}; {endings}"


def test_lines_go_to_a_file_of_any_other_name(models: dict[str, Path], tmp_path: Path) -> None:
    (lines := tmp_path / "lines.en").write_text("the cat sat\na dog ran\n", encoding="utf-8")
    for name in ("news.ko", "news", "news.TXT"):
        assert run("translate", models["translator"], "--file", lines, "--out", tmp_path / name) == 0
        assert len((tmp_path / name).read_text(encoding="utf-8").splitlines()) == 2
