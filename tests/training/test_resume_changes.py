"""A run that goes on otherwise: changed fields, a longer schedule, chosen checkpoints averaged, data that moved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.errors import BadData
from regard.recipes import run_config
from regard.training.averaging import average
from regard.training.run_directory import RunDirectory

from .runs import assert_same, metrics, resume, train, words_of, write_data

WORDS = ("train.steps=4", "train.save_every=2", "train.eval_every=0", "train.lr=0.01", "train.schedule=cosine")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project: data, and a finished run over it."""
    folder = tmp_path_factory.mktemp("project")
    train("translate", folder / "runs/a", write_data("translate", folder), *WORDS)
    return folder


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, with its data at the place the run knows."""
    return Path(shutil.copytree(finished, tmp_path / "project"))


def rates(out: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in metrics(out) if "lr" in line}


# ------------------------------------------------------------------------------------- fields that may change


def test_harmless_fields_change_and_the_run_notes_them(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = project / "runs/a"
    words = ["train.steps=6", "train.lr=0.002", "train.average=2", "train.device=auto", "train.schedule=constant"]
    assert cli.main(["train", "--resume", str(out), *words]) == 0
    err = capsys.readouterr().err
    assert (
        "changed after step 4: train.steps from 4 to 6, train.lr from 0.01 to 0.002, train.average from 0 to 2" in err
    )
    (noted,) = RunDirectory.open(out).facts["changes"]
    assert noted["step"] == 4
    assert noted["train"]["lr"] == [0.01, 0.002]
    assert rates(out)[5] == rates(out)[6] == 0.002
    assert RunDirectory.open(out).config.train.lr == 0.002
    assert json.loads((out / "evaluation.json").read_bytes())["weights"] == "the average of steps 4, 6"


def test_nothing_is_noted_where_nothing_changed(project: Path) -> None:
    resume(project / "runs/a", lr=0.01)
    assert "changes" not in RunDirectory.open(project / "runs/a").facts


# ------------------------------------------------------------------------------------- a longer schedule


def test_a_longer_cosine_says_what_the_learning_rate_will_do(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = project / "runs/a"
    assert cli.main(["train", "--resume", str(out), "train.steps=8"]) == 0
    assert (
        "the learning rate was 0 at step 4; cosine over 8 steps continues with 0.005 and ends with 0 at step 8; "
        "--schedule restart warms up again instead" in capsys.readouterr().err.splitlines()
    )
    assert rates(out)[5] == pytest.approx(0.005)


def test_a_schedule_can_start_again(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stopped = project / "runs/a", tmp_path / "stopped"
    shutil.copytree(out, stopped)
    assert cli.main(["train", "--resume", str(out), "train.steps=9", "--schedule", "restart"]) == 0
    assert (
        "the learning rate was 0 at step 4; it warms up again over 2 steps to 0.01 and ends with 0 at step 9"
        in capsys.readouterr().err.splitlines()
    )
    found = rates(out)
    assert [found[step] for step in (5, 6, 9)] == pytest.approx([0.005, 0.01, 0.0])
    resume(stopped, steps=9, restart_schedule=True, stop_at=6)
    resume(stopped)
    assert_same(out, stopped)


def test_a_restart_needs_steps_that_remain(project: Path) -> None:
    out = project / "runs/a"
    with pytest.raises(ValueError, match=r"^a schedule cannot restart: .*a has done its 4 steps; raise train\.steps$"):
        resume(out, restart_schedule=True)
    resume(out, steps=5, restart_schedule=True)
    with pytest.raises(ValueError, match=r"^train\.steps=3 is less than the 5 steps that .*a has done$"):
        resume(out, steps=3)


# ------------------------------------------------------------------------------------- chosen checkpoints averaged


def test_chosen_checkpoints_are_averaged_after_the_fact(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = finished / "runs/a", tmp_path / "averaged"
    assert cli.main(["average", f"{run}@2", f"{run}@4", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"{out}: the average of {run}@2, {run}@4",
        f"next: regard eval {out} data.source=FILE",
    ]
    assert said.err == ""
    checkpoints = RunDirectory.open(run).checkpoints()
    expected = average(checkpoints.at(step).tensors("model/") for step in (2, 4))
    model = regard.load(out)
    assert model.processor is not None
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)
    record = model.training_record  # which no evaluation has measured
    assert record is not None
    assert (record["run"], record["weights"], record["metrics"]) == ("a", "the average of step 2, step 4", {})
    assert "| run | a: the average of step 2, step 4 |\n| data |" in (out / "README.md").read_text(encoding="utf-8")
    other = regard.load(f"{run}@4")
    assert other.training_record is not None
    other.training_record["run"] = "another"
    assert cli.main(["average", f"{run}@2", str(other.save(tmp_path / "other")), str(tmp_path / "of two runs")]) == 0
    assert regard.load(tmp_path / "of two runs").training_record is None


def test_what_has_no_average_is_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = finished / "runs/a", tmp_path / "other"
    assert cli.main(["average", f"{run}@2", str(tmp_path / "out")]) == 2
    assert "regard average takes two or more models" in capsys.readouterr().err
    regard.build("gpt2", d_model=8, n_layers=1, n_heads=1, d_ff=8, vocab_size=9, max_len=8).save(other)
    assert cli.main(["average", f"{run}@2", str(other), str(tmp_path / "out")]) == 1
    assert f"{other} and {run}@2 cannot be averaged: they differ in config or vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- data that moved


def test_a_run_finds_its_data_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data("classify", tmp_path)
    monkeypatch.chdir(tmp_path)
    train("classify", Path("run"), "labels.tsv", "train.steps=1")
    assert RunDirectory.open("run").config.data.source == str(tmp_path / "labels.tsv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = json.loads((tmp_path / "run/evaluation.json").read_bytes())["metrics"]["accuracy"]
    assert regard.evaluate("../run").metrics["accuracy"] == pytest.approx(before)


def test_a_project_that_moved_as_a_whole_goes_on(project: Path, tmp_path: Path) -> None:
    run, before = project / "runs/a", tmp_path / "where/it/was"
    for name, change in {
        "run.json": lambda known: known["data"].update(source=str(before / "pairs.tsv")),
        "provenance.json": lambda known: known.update(folder=str(before / "runs/a")),
    }.items():
        known = json.loads((run / name).read_bytes())
        change(known)
        (run / name).write_text(json.dumps(known))
    (run / "manifest.json").unlink()  # it is the run as if made elsewhere that is tested
    assert RunDirectory.open(run).config.data.source == str(project / "pairs.tsv")
    assert resume(run, steps=5).finished


def test_an_old_run_with_a_relative_path_is_found_from_above(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = project / "runs/a/run.json"
    known = json.loads(run_file.read_bytes())
    known["data"]["source"] = "pairs.tsv"
    (run_file.parent / "manifest.json").unlink()  # older versions wrote none
    run_file.write_text(json.dumps(known))
    monkeypatch.chdir("/")
    assert RunDirectory.open(project / "runs/a").config.data.source == str(project / "pairs.tsv")


def test_data_that_is_nowhere_is_asked_for(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished / "runs/a", tmp_path / "deep/er/run"))
    monkeypatch.chdir(tmp_path)
    lost = tmp_path / "lost/pairs.tsv"
    known = json.loads((run / "run.json").read_bytes())
    known["data"]["source"] = str(lost)
    (run / "manifest.json").unlink()
    (run / "run.json").write_text(json.dumps(known))
    sentence = f"{lost}, the data of {run}, does not exist; data.source=FILE gives its new location"
    with pytest.raises(BadData) as asked:
        resume(run)
    assert str(asked.value) == sentence
    assert cli.main(["eval", str(run)]) == 1
    assert capsys.readouterr().err == f"regard: {sentence}\n"
    moved = tmp_path / "renamed.tsv"
    shutil.copy(finished / "pairs.tsv", moved)
    report = regard.evaluate(run, str(moved))
    assert report.splits[0].n == RunDirectory.open(run).facts["data"]["valid"], "what it held out, not all of it"
    assert cli.main(["train", "--resume", str(run), f"data.source={os.path.relpath(moved)}", "train.steps=5"]) == 0
    assert json.loads((run / "run.json").read_bytes())["data"]["source"] == str(moved)
    other = tmp_path / "other.tsv"
    other.write_text((finished / "pairs.tsv").read_text() + "one more\teins mehr\n")
    assert cli.main(["train", "--resume", str(run), f"data.source={other}"]) == 1
    assert "has changed since the run began" in capsys.readouterr().err


def test_words_are_kept_for_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "en-ko").mkdir()
    words = [w for w in words_of("translate", "en-ko", "train.steps=2") if not w.startswith("data.valid_fraction")]
    words += ["data.epoch_examples=60", "data.valid_rows=4", "train.out=run", "train.stop_at=1"]
    regard.train(run_config("translate", words), style="quiet")
    data = RunDirectory.open("run").config.data
    assert (data.source, data.tokenizer) == ("en-ko", "words")
