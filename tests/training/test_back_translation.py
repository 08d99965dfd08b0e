"""`regard backtranslate`: pairs of texts in one language, and training on real and made pairs together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import regard
from generation.spoken import language_model, translator
from regard import cli
from regard.data.sources import open_source
from regard.errors import UsageError
from regard.training.run_directory import RunDirectory

TEXTS = ["고양이가 앉았다.", "", "the cat sat on  the mat.", "주의력만 " * 60, "a dog ran"]


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random translator that ends its texts soon."""
    model = translator(head_bias=True)
    model.head.bias.data[2] += 4.0
    return model.save(tmp_path_factory.mktemp("models") / "reverse")


@pytest.fixture
def mono(tmp_path: Path) -> Path:
    (tmp_path / "mono.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return tmp_path / "mono.txt"


def rows(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_line_gets_a_source(reverse: Path, mono: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, words = mono.with_name("more.tsv"), ["--beam", "2", "--device", "cpu"]
    assert cli.main(["backtranslate", str(reverse), str(mono), str(out), *words, "--tag", "<BT>", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    kept = [TEXTS[0], TEXTS[2], TEXTS[4]]
    made = regard.translate(reverse, kept, beam=2)
    ended = [(x.text, text) for x, text in zip(made.best, kept, strict=True) if x.finish == "end" and x.text.strip()]
    assert rows(out) == [[f"<BT> {' '.join(x.split())}", " ".join(text.split())] for x, text in ended]
    assert said["pairs"] == len(ended) > 0
    assert said["left_out"]["blank"] == said["left_out"]["too long"] == 1
    assert sum(said["left_out"].values()) + said["pairs"] == len(TEXTS)
    assert not out.with_name("more.tsv.partial").exists()


def test_no_pair_at_all_is_a_failure(reverse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    assert cli.main(["backtranslate", str(reverse), f"{tmp_path}/blank.txt", f"{tmp_path}/more.tsv"]) == 1
    assert "gave a pair: 2 blank" in capsys.readouterr().err
    assert not (tmp_path / "more.tsv").exists()


def test_a_table_and_what_is_drawn(reverse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, drawn = tmp_path / "mono.csv", []
    table.write_text("id,ko\n" + "".join(f"{n},고양이가 {n}\n" for n in range(8)), encoding="utf-8")
    for number, words in enumerate((["--sample"], ["--sample"], ["--sample", "--seed", "5"], ["--top-k", "3"])):
        out = tmp_path / f"{number}.jsonl"
        assert cli.main(["backtranslate", str(reverse), str(table), str(out), "--column", "ko", *words]) == 0
        drawn.append([json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()])
    assert f"{out}: {len(drawn[3])} pairs (sampled, top_k 3)" in capsys.readouterr().out
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(pair["target"].startswith("고양이가") for pair in drawn[0])
    assert len({pair["source"] for pair in drawn[0]}) > 1  # each line is drawn by itself
    capsys.readouterr()
    for words, code, said in (
        (["out.txt", "--column", "ko"], 2, "pairs are written as .tsv or .jsonl"),
        (["x.tsv", "--column", "en"], 2, "--column en: "),
        (["x.tsv", "--column", "ko", "--beam", "3", "--sample"], 2, "--beam 3 searches for the best text"),
    ):
        assert cli.main(["backtranslate", str(reverse), str(table), *words]) == code
        assert said in capsys.readouterr().err
    speaker = language_model().save(tmp_path / "speaker")
    assert cli.main(["backtranslate", str(speaker), str(table), str(tmp_path / "x.tsv"), "--column", "ko"]) == 1
    assert f"it is for lm: regard generate {speaker}" in capsys.readouterr().err


def test_the_texts_are_not_overwritten(reverse: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.tsv"
    texts.write_text("text\n고양이가 앉았다.\n", encoding="utf-8")
    before = texts.read_bytes()
    with pytest.raises(UsageError, match=r"texts.tsv is the file to read, which would be lost"):
        regard.back_translate(reverse, texts, texts, beam=1)
    assert texts.read_bytes() == before


def test_a_stopped_command_goes_on(
    reverse: Path, mono: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.training.back_translation._TEXTS_AT_ONCE", 2)
    whole, out = mono.with_name("whole.tsv"), mono.with_name("parts.tsv")
    regard.back_translate(reverse, mono, whole, beam=2)

    def stop_after_two(line: str) -> None:
        if line.startswith("2 of 5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regard.back_translate(reverse, mono, out, beam=2, progress=stop_after_two)
    assert not out.exists()
    again = regard.back_translate(reverse, mono, out, beam=2)
    assert again.resumed == 2
    assert out.read_bytes() == whole.read_bytes()


# ---- several tables of pairs


def test_real_and_made_pairs_are_read_together(tmp_path: Path) -> None:
    real, made = tmp_path / "real.tsv", tmp_path / "made.jsonl"
    real.write_text("en\tde\n" + "".join(f"house {n}\tHaus {n}\n" for n in range(40)), encoding="utf-8")
    lines = (json.dumps({"target": f"Hof {n}", "source": f"<BT> court {n}"}) + "\n" for n in range(60))
    made.write_text("".join(lines), encoding="utf-8")
    source = open_source(f"{real},{made}", valid_fraction=0.2)
    assert len(source.train) + len(source.valid) == 100
    assert source.kind == "pairs"
    assert source.report.n_read == 100
    assert 0 < len(source.valid) < 20
    assert all(x.source.startswith("house") for x in source.valid)  # only of the first are any held out
    assert "in the first file" in source.split.how
    assert [x.target for x in source.train][-1] == "Hof 59"
    assert open_source([real], valid_fraction=0.2).split.valid_sha256 == source.split.valid_sha256
    once = open_source([real, real], deduplicated="exact", valid_fraction=0.2)
    assert len(once.train) + len(once.valid) == 40
    other = open_source(f"{real},{made}", valid=str(real))
    assert (len(other.train), len(other.valid)) == (100, 40)
    beside = open_source(f"{real},{real}", format="parallel", valid_fraction=0.0)
    assert beside.train[1].source == "house 0\tHaus 0" == beside.train[1].target
    with pytest.raises(ValueError, match="names several files, which are read as pairs, not as kind=labelled"):
        open_source(f"{real},{made}", kind="labelled")


def test_a_run_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real.tsv").write_text("".join(f"house {n}\tHaus {n}\n" for n in range(30)), encoding="utf-8")
    Path("made.tsv").write_text("".join(f"court {n}\tHof {n}\n" for n in range(30)), encoding="utf-8")
    words: list[Any] = ["data.source=real.tsv,made.tsv", "data.tokenizer=chars", "data.max_len=32", "model.max_len=32"]
    words += ["model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.d_ff=16", "train.batch_tokens=128"]
    words += ["train.steps=2", "train.warmup=1", "train.samples=0", "train.eval_examples=2", "train.device=cpu"]
    assert cli.main(["train", "translate", *words, "train.out=run", "--quiet"]) == 0
    run = RunDirectory.open("run")
    assert run.config.data.source == f"{tmp_path / 'real.tsv'},{tmp_path / 'made.tsv'}"
    assert run.facts["data"]["train"] + run.facts["data"]["valid"] == 60
    assert cli.main(["train", "--resume", "run", "train.steps=3", "--quiet"]) == 0
