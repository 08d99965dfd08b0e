"""A run from the outside: its directory, what it starts from, what it ships, and how wrong words are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import cli
from regard.errors import BadModelFile, RegardError
from regard.recipes import run_config
from regard.training import compilation
from regard.training.run_directory import RunDirectory

from .runs import (
    assert_same,
    bits_equal,
    call,
    latest,
    losses,
    metrics,
    resume,
    stopped_after,
    train,
    words_of,
    write_data,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, and what it learned from."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_data("translate", folder)
    train("translate", folder / "run", data, "train.steps=4", "train.save_every=2")
    return folder / "run", data


# ------------------------------------------------------------------------------------- its directory


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        ("translate", "data.max_len=2", "every example is longer than max_len=2"),
        ("lm", "data.max_len=5000", r"text.txt has [\d,]+ tokens .* data.max_len=5000 .* set data.max_len to at most"),
    ],
)
def test_a_run_that_was_refused_before_its_first_step_leaves_its_name_free(
    task: str, wrong: str, message: str, tmp_path: Path
) -> None:
    data, out, field = write_data(task, tmp_path), tmp_path / "run", wrong.partition("=")[0]
    whole = ("data.documents=whole",) if task == "lm" else ()
    with pytest.raises((ValueError, RegardError), match=message):
        train(task, out, data, wrong, *whole)
    assert not list(out.iterdir())
    assert train(task, out, data, f"{field}=24", "train.steps=1", *whole).finished


def test_everything_about_a_run_is_in_its_directory(trained: tuple[Path, str]) -> None:
    out, data = trained
    found = {path.name for path in out.iterdir()}
    assert found == {
        *("run.json", "manifest.json", "provenance.json", "choice.json", "metrics.jsonl", "evaluation.json"),
        *("tokenizer.source.json", "tokenizer.target.json", "checkpoints", "tensorboard", "model"),
    }
    run = RunDirectory.open(out)
    assert run.config.task == "translate"
    assert run.config.model.vocab_size == run.processor.source.size  # type: ignore[union-attr]
    facts = run.facts
    assert facts["versions"]["torch"] == torch.__version__
    assert (facts["data"]["train"], facts["data"]["valid"]) == (48, 12)
    assert len(facts["data"]["sha256"]) == 64
    assert data.endswith("pairs.tsv")
    evaluation = json.loads((out / "evaluation.json").read_bytes())
    assert evaluation["steps"] == 4
    assert evaluation["metrics"]["n"] == 12


def test_the_command_is_kept(tmp_path: Path) -> None:
    data, out = write_data("classify", tmp_path), tmp_path / "run"
    typed = ["train", "classify", *words_of("classify", data, f"train.out={out}", "train.steps=1"), "--quiet"]
    assert cli.main(typed) == 0
    assert RunDirectory.open(out).facts["command"] == ["regard", *typed]


def test_the_model_it_ships_is_the_one_it_evaluated(trained: tuple[Path, str]) -> None:
    out, _ = trained
    best = latest(out).state["at"]["best_step"]
    weights = RunDirectory.open(out).checkpoints().at(best).tensors("model/")
    model = regard.load(out)
    assert all(bits_equal(x, weights[name]) for name, x in model.state_dict().items())
    assert not model.training
    at_two = regard.load(f"{out}@2").state_dict()
    two = RunDirectory.open(out).checkpoints().at(2).tensors("model/")
    assert all(bits_equal(x, two[name]) for name, x in at_two.items())
    with pytest.raises(BadModelFile, match=r"has no checkpoint of step 3; there are 2, 4"):
        regard.load(f"{out}@3")


def test_a_run_is_not_written_over(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    out, data = trained
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    words = words_of("translate", data, f"train.out={out}", "train.steps=1")
    assert cli.main(["train", "translate", *words]) == 1
    assert capsys.readouterr().err == (
        f"regard: {out} already holds a run; --resume continues it; train.out=… names another directory\n"
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_nor_is_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert cli.main(["train", "translate", *words_of("translate", data, f"train.out={out}")]) == 1
    assert "already holds other files" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    out.mkdir()
    assert train("translate", out, data, "train.steps=1").finished


def test_without_a_name_it_is_named_after_task_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data("translate", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = run_config("translate", words_of("translate", data, "train.steps=1", "train.stop_at=1"))
    done = regard.train(config, style="quiet")
    assert done.path.parent == Path("runs")
    assert done.path.name.startswith("translate-2")
    assert RunDirectory.open(done.path).config.train.out == str(done.path)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--resume", "nowhere"], 3, "nowhere has no run.json, so it is not a training run"),
        (["--resume", "{run}", "train.seed=1"], 2, "train.seed cannot change in a resumed run; train.steps, "),
        (["--resume", "{run}", "data.max_len=4"], 2, "data.max_len cannot change in a resumed run; data.source, "),
        (["--resume", "{run}", "translate"], 2, "--resume RUN knows its task: leave out 'translate'"),
        (["--resume", "{run}", "train.steps=2"], 1, "train.steps=2 is less than the 4 steps that {run} has done"),
        (["--resume", "{run}", "train.steps=0"], 2, "train.steps=0 must be at least 1"),
        (["--resume", "{run}", "--preset", "en-ko"], 2, "--resume keeps the run's own recipe; --preset cannot"),
    ],
)
def test_wrong_words_for_a_run_that_goes_on(
    words: list[str], code: int, sentence: str, trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained[0])
    assert cli.main(["train", *(word.format(run=run) for word in words)]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("regard: " + sentence.format(run=run))


def test_two_processes_do_not_train_in_one_directory(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    with run.lock():
        assert cli.main(["train", "--resume", str(run.root), "train.steps=5"]) == 1
    assert capsys.readouterr().err == f"regard: {run.root} is being trained by another process\n"
    assert cli.main(["train", "--resume", str(run.root), "train.steps=5"]) == 0


def test_a_run_with_a_damaged_config_is_told_apart(trained: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run/manifest.json").unlink()
    (tmp_path / "run/run.json").write_text('{"task": "translate", "train": {"stepz": 4}}')
    with pytest.raises(BadModelFile, match=r"run\.json is not the config of a run"):
        resume(tmp_path / "run")


# ------------------------------------------------------------------------------------- what it starts from


def test_it_starts_from_a_run(trained: tuple[Path, str], tmp_path: Path) -> None:
    """With the same tokens everything is copied: the first loss is that of the weights there."""
    before, data = trained
    out = tmp_path / "run"
    still = ("train.steps=1", "train.lr=1e-12", "train.muon_lr=1e-12", "train.eval_every=0")
    train("translate", out, data, *still, f"train.init={before}")
    assert metrics(out)[-1]["valid_loss"] == pytest.approx(metrics(before)[-1]["valid_loss"], rel=1e-5)
    started = json.loads((out / "started.json").read_bytes())
    assert (started["new"], started["unlearned"], started["left"]) == ({}, [], [])


def test_it_starts_from_a_saved_model_with_a_new_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A masked language model becomes a classifier: the encoder is kept, the classifier is new."""
    texts, labelled = write_data("mlm", tmp_path), write_data("classify", tmp_path)
    body = ("model.pooling=mean", "data.tokenizer=bytes")
    train("mlm", tmp_path / "first", texts, "train.steps=2", "data.tokenizer=bytes", "data.max_len=48")
    model = tmp_path / "first/model"
    out = tmp_path / "run"
    more = (f"train.out={out}", *body, f"train.init={model}", "train.steps=2", "data.max_len=48")
    assert cli.main(["train", "classify", *words_of("classify", labelled, *more)]) == 0
    said = capsys.readouterr().err
    assert "weights copied" in said
    assert "new, not among those weights: classifier" in said
    started = json.loads((out / "started.json").read_bytes())
    assert any(name.startswith("encoder.blocks") for name in started["copied"])
    assert all(name.startswith("classifier") for name in started["new"])


def test_what_fits_nothing_is_refused(trained: tuple[Path, str], tmp_path: Path) -> None:
    before, data = trained
    with pytest.raises(ValueError, match=r"^train\.init=.*: none of its weights fit this model \(d_model is 16 there"):
        train("translate", tmp_path / "run", data, f"train.init={before}", "model.d_model=12", "model.d_ff=20")


def test_it_goes_on_when_what_it_started_from_is_gone(trained: tuple[Path, str], tmp_path: Path) -> None:
    before, data = trained
    shutil.copytree(before, tmp_path / "before")
    words = ("train.steps=4", "train.accumulate=2", f"train.init={tmp_path / 'before'}", "train.lora=2")
    train("translate", tmp_path / "whole", data, *words)
    stopped_after(3, train, "translate", tmp_path / "run", data, *words)
    shutil.rmtree(tmp_path / "before")
    resume(tmp_path / "run")
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_frozen_parts_stay_as_they_are(trained: tuple[Path, str], tmp_path: Path) -> None:
    before, data = trained
    out = tmp_path / "run"
    words = ("train.steps=4", f"train.init={before}", "train.freeze=encoder.*,token", "train.weight_decay=0.5")
    train("translate", out, data, *words, "train.ema=0.5")
    first, last = regard.load(before).state_dict(), regard.load(out).state_dict()
    still = {name for name in first if bits_equal(first[name], last[name])}
    assert still == {name for name in first if name.startswith("encoder.") or name == "token.weight"}
    with pytest.raises(ValueError, match=r"^freeze='encodr\.\*' matches no parameter; the nearest are encoder"):
        train("translate", tmp_path / "wrong", data, "train.freeze=encodr.*")


def test_low_rank_additions_are_all_that_learns_and_are_merged_on_save(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    before, data = trained
    out, words = tmp_path / "run", ("train.steps=4", f"train.init={before}", "train.lora=2", "train.accumulate=2")
    train("translate", out, data, *words, "train.lora_targets=w_q,w_o")
    saved, base = latest(out), regard.load(before).state_dict()
    weights = saved.tensors("model/")
    added = {name for name in weights if ".lora_" in name}
    assert added
    assert all(bits_equal(weights[name], base[name]) for name in weights if name not in added)
    merged = regard.load(out).state_dict()
    assert merged.keys() == base.keys()
    moved = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {"w_qkv", "w_query", "w_o"}
    layer = "encoder.blocks.0.attention.w_o"
    a, b = (weights[f"{layer}.lora_{which}.whole"].double() for which in "ab")
    expected = base[f"{layer}.weight"].double() + 2.0 * (b @ a)
    torch.testing.assert_close(merged[f"{layer}.weight"].double(), expected, rtol=1e-6, atol=1e-7)


def test_a_run_with_additions_goes_on(trained: tuple[Path, str], tmp_path: Path) -> None:
    before, data = trained
    words = ("train.steps=4", f"train.init={before}", "train.lora=2", "train.accumulate=2", "train.ema=0.9")
    train("translate", tmp_path / "whole", data, *words)
    stopped_after(5, train, "translate", tmp_path / "run", data, *words)
    assert all(".lora_" in name for name in latest(tmp_path / "run").names("grad/"))
    resume(tmp_path / "run")
    assert_same(tmp_path / "whole", tmp_path / "run")


# ------------------------------------------------------------------------------------- the machine at hand


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_device_is_chosen_or_named(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("classify", tmp_path), tmp_path / "run"
    words = words_of("classify", data, f"train.out={out}", "train.steps=1", f"train.device={device}")
    assert cli.main(["train", "classify", *words]) == 0
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    said = " ".join(capsys.readouterr().err.split())  # however the names are aligned
    assert f"device {best if device == 'auto' else device}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data("classify", tmp_path)
    words = words_of("classify", data, f"train.out={tmp_path / 'run'}", "train.device=cuda")
    assert cli.main(["train", "classify", *words]) == 1
    expected = (
        "regard: train.device=cuda is not available on this machine or in this build of torch; use train.device=cpu\n"
    )
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_machine_without_a_compiler_trains_all_the_same(tmp_path: Path) -> None:
    """As a user has it: no g++ to be found, precision and compilation left to regard, which would like to compile."""
    data, out = write_data("lm", tmp_path), tmp_path / "run"
    cache = tmp_path / "cache"
    more = (f"train.out={out}", "train.steps=3", "train.precision=auto", "train.compile=auto", "train.eval_every=0")
    done = call("train", "lm", *words_of("lm", data, *more), PATH="/nonexistent", XDG_CACHE_HOME=str(cache))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "there is no C++ compiler (g++)" in json.loads((out / "choice.json").read_bytes())["reason"]
    assert len(losses(out)) == 3


def test_compile_on_without_a_compiler_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data("lm", tmp_path)
    monkeypatch.setattr(compilation, "compiler_trouble", lambda device: "there is no C++ compiler (g++)")
    words = words_of("lm", data, f"train.out={tmp_path / 'run'}", "train.compile=on")
    assert cli.main(["train", "lm", *words, "--quiet"]) == 1
    assert capsys.readouterr().err == (
        "regard: train.compile=on is not possible here: there is no C++ compiler (g++); "
        "train.compile=auto trains without it\n"
    )


def test_precision_and_compilation_are_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice would round otherwise, and a run that goes on would not be the same."""
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    chosen: list[Any] = []
    choose = compilation.choose

    def noted(*args: Any, **options: Any) -> Any:
        chosen.append(choose(*args, **options))
        return chosen[-1]

    monkeypatch.setattr("regard.training.trainer.choose", noted)
    train("translate", out, data, "train.steps=3", "train.stop_at=1", "train.precision=auto")
    (out / "manifest.json").unlink()
    (out / "choice.json").write_text((out / "choice.json").read_text().replace('"fp32"', '"bf16"', 1))
    resume(out)
    assert len(chosen) == 1
    assert json.loads((out / "choice.json").read_bytes())["precision"] == "bf16"


def test_a_step_that_was_not_saved_is_not_described(trained: tuple[Path, str]) -> None:
    out, _ = trained
    assert regard.io.describe(f"{out}@4").n_parameters == regard.io.describe(out).n_parameters
    with pytest.raises(BadModelFile, match=r"run has no checkpoint of step 3; there are 2, 4"):
        regard.io.describe(f"{out}@3")
