"""Runs on files that count as large, here very small ones: the same numbers, and what was stored is used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import regard
from regard.data import example_files
from regard.recipes import run_config
from regard.text.tokenizer import Tokenizer
from regard.training.run_inputs import open_run_source, resolve_run
from regard.training.tasks import open_task

from .runs import losses, resume, train, words_of, write_data

TASKS = ("translate", "classify", "lm", "mlm")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything counts as large; the cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(example_files, "_IN_MEMORY", 64)
    monkeypatch.setattr(example_files, "LARGE", 64)
    monkeypatch.setattr("regard.training.tasks.task.LARGE", 64)
    return tmp_path / "cache" / "regard"


@pytest.mark.parametrize("task", TASKS)
def test_a_run_on_a_large_file_is_the_run_on_a_small_one(
    task: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words = write_data(task, tmp_path), ("train.steps=6", "train.eval_every=3", "train.save_every=3")
    train(task, tmp_path / "small", data, *words)
    cache = request.getfixturevalue("large")
    train(task, tmp_path / "large", data, *words)
    assert losses(tmp_path / "large") == losses(tmp_path / "small")
    assert list(cache.glob("examples/*/train.texts"))
    assert list(cache.glob("tokens/*.bin"))
    assert not (tmp_path / "large" / "tokens").exists()
    train(task, tmp_path / "cut", data, *words, "train.stop_at=4")
    # What comes now is read from the cache: nothing is encoded but held-out texts.
    monkeypatch.setattr("regard.data.sources._load_files", lambda *_: pytest.fail("the file was read before"))
    monkeypatch.setattr("regard.data.token_files.write_tokens", lambda *_: pytest.fail("it was tokenised before"))
    monkeypatch.setattr("regard.text.tokenizer_training.train_tokenizer", lambda *_: pytest.fail("there is one"))
    resume(tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "small")
    train(task, tmp_path / "again", data, *words)
    assert losses(tmp_path / "again") == losses(tmp_path / "small")


def test_tokens_that_a_run_stored_before_are_used(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Runs had their tokens in their own directory, however large; they go on with them."""
    data = write_data("lm", tmp_path)
    train("lm", tmp_path / "run", data, "train.steps=4", "train.stop_at=2")
    assert list((tmp_path / "run" / "tokens").glob("*.bin"))
    cache = request.getfixturevalue("large")
    resume(tmp_path / "run")
    assert not list(cache.glob("tokens/*"))


def test_a_run_of_an_older_version_goes_on_with_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config says valid_rows: null, which holds out the whole share."""
    monkeypatch.setattr("regard.data.splits.MAX_HELD_OUT_ROWS", 2)
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    train("translate", out, data, "train.steps=4", "train.stop_at=2", "data.valid_rows=null")
    stored = json.loads((out / "run.json").read_text())
    assert stored["data"]["valid_rows"] is None
    n_held_out = json.loads((out / "provenance.json").read_text())["data"]["valid"]
    assert n_held_out > 2
    assert resume(out).finished


def test_the_output_says_that_fewer_are_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.data.splits.MAX_HELD_OUT_ROWS", 2)
    words = words_of("translate", write_data("translate", tmp_path), f"train.out={tmp_path / 'run'}", "train.steps=2")
    result = regard.train(run_config("translate", words), style="plain")
    said = " ".join(capfd.readouterr().err.split())  # however wide the terminal is
    assert "examples 58 to train on, 2 held out" in said, "in whole, however long the path of the data is"
    assert "at most 2 examples; data.valid_rows=… sets another number" in said
    assert result.metrics["n"] == 2, "the last evaluation has as many"


def test_long_work_before_the_first_step_is_shown(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.foundation.progress._AFTER_S", -1.0)
    data = write_data("translate", tmp_path)
    words = words_of("translate", data, f"train.out={tmp_path / 'run'}", "train.steps=1")
    regard.train(run_config("translate", words), style="plain")
    said = capfd.readouterr().err
    assert "reading pairs.tsv …\nreading pairs.tsv took 0 s" in said
    assert "tokenising sources …\ntokenising sources took 0 s" in said
    assert "tokenising targets …\ntokenising targets took 0 s" in said
    train("translate", tmp_path / "quiet", write_data("translate", tmp_path, 70), "train.steps=1")
    assert capfd.readouterr().err == "", "a quiet run is quiet"


def test_a_tokenizer_is_trained_on_a_bounded_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "text.txt", []
    path.write_text("".join(f"word{number} and word{number + 1}\n" for number in range(20_000)))

    def note(texts: object, *about: object) -> Tokenizer:
        seen.append(list(texts))  # type: ignore[call-overload]
        return train_tokenizer(["a"], "chars")

    from regard.text.tokenizer_training import train_tokenizer

    monkeypatch.setattr("regard.training.tasks.task.train_tokenizer", note)
    monkeypatch.setattr("regard.text.tokenizer._PIECE_CHARACTERS", 1000)
    config = run_config("lm", [f"data.source={path}"])
    inputs = resolve_run(config)
    open_task(config, open_run_source(inputs))
    for module in ("task", "language_modelling"):
        monkeypatch.setattr(f"regard.training.tasks.{module}.MAX_TOKENIZER_CHARACTERS", 50_000)
    open_task(config, open_run_source(inputs))
    (whole,), some = seen
    assert len(whole) > 400_000
    assert sum(map(len, some)) < 60_000
    places = [whole.index(piece) for piece in some]
    assert max(places) > 0.9 * len(whole), "from all of the text"
