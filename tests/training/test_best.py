"""Which checkpoint is the best: measured on all held-out classes or a fair sample of texts, by the metric asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import regard
from regard import cli
from regard.data.examples import Labelled, Pair
from regard.data.splits import stratified_sample

from .runs import latest, metrics, train, words_of, write_data

EVALUATED = "accuracy"


@pytest.fixture(scope="module")
def sorted_valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run whose held-out file begins with 240 rows of one class, as files sorted by label do."""
    folder = tmp_path_factory.mktemp("sorted")
    data, valid = write_data("classify", folder), folder / "valid.tsv"
    rows = [f"one two number {i}\teven" for i in range(240)] + [f"one three number {i}\todd" for i in range(60)]
    valid.write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = (f"data.valid={valid}", "train.steps=2", "train.eval_every=1", "train.save_every=1")
    train("classify", folder / "run", data, *words, "train.eval_examples=none")
    return folder / "run", data, str(valid)


def test_classes_are_told_apart_for_every_held_out_row(sorted_valid: tuple[Path, str, str]) -> None:
    run = sorted_valid[0]
    (at_one,) = (line for line in metrics(run) if EVALUATED in line and line["step"] == 1)
    assert at_one["n"] == 300
    report = regard.evaluate(f"{run}@1")
    assert report.metrics["accuracy"] == pytest.approx(at_one["accuracy"])


def test_the_number_of_examples_is_printed(
    sorted_valid: tuple[Path, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, data, valid = sorted_valid
    more = (f"data.valid={valid}", "train.steps=1", "train.eval_examples=30", f"train.out={tmp_path / 'run'}")
    assert cli.main(["train", "classify", *words_of("classify", data, *more)]) == 0
    said = capsys.readouterr()
    (line,) = (line for line in said.err.splitlines() if "valid loss" in line)
    assert "n 30 " in line
    assert said.out.splitlines()[1].endswith("n 300"), "the last evaluation takes all"


def test_a_sample_has_the_classes_and_lengths_of_all() -> None:
    labelled = [Labelled(f"text {i}", int(i >= 160)) for i in range(200)]
    chosen = stratified_sample(labelled, 20, seed=0)
    assert len(set(chosen)) == 20
    assert sum(labelled[i].label for i in chosen) == 4
    assert chosen == stratified_sample(labelled, 20, seed=0)
    assert chosen != stratified_sample(labelled, 20, seed=1)
    pairs = [Pair("x" * (1 + i // 10), "y") for i in range(200)]
    lengths = [len(pairs[i].source) for i in stratified_sample(pairs, 20, seed=0)]
    assert lengths == list(range(1, 21))
    assert stratified_sample(pairs, 500, seed=0) == list(range(200))


def test_texts_are_a_sample_not_the_first_rows(tmp_path: Path) -> None:
    data, asked = write_data("translate", tmp_path, 200), []

    def answers(task: Any, model: Any, examples: Any, **options: Any) -> Any:
        asked.append([x.source for x in examples])
        return {"n": len(examples), "bleu": 0.0}, []

    with mock.patch("regard.training.tasks.translation.Translate.answers", answers):
        train("translate", tmp_path / "run", data, "train.steps=2", "train.eval_every=1", "train.eval_examples=6")
    one, two, everything = asked
    assert one == two, "every evaluation asks the same"
    assert len(one) == 6
    assert set(one) < set(everything)
    assert one != everything[:6]


@pytest.mark.parametrize(("metric", "best"), [("auto", 2), ("accuracy", 2), ("macro_f1", 1), ("loss", 3)])
def test_the_metric_chooses_the_best(metric: str, best: int, tmp_path: Path) -> None:
    data, out = write_data("classify", tmp_path), tmp_path / "run"
    left = [(1.0, 0.5, 0.9), (0.9, 0.7, 0.3), (0.8, 0.6, 0.4), (0.8, 0.6, 0.4)]

    def found(*args: Any, **options: Any) -> Any:
        return dict(zip(("valid_loss", "accuracy", "f1"), left.pop(0), strict=True))

    words = ("train.steps=3", "train.eval_every=1", "train.save_every=0", f"train.metric={metric}")
    with mock.patch("regard.training.tasks.Task.validate", found):
        done = train("classify", out, data, *words)
    assert latest(out).state["at"]["best_step"] == best
    assert done.weights == f"step {best}, the best"


@pytest.mark.parametrize(
    ("task", "words", "sentence"),
    [
        ("classify", ["train.metric=bleu"], "train.metric=bleu is not measured by the task classify, which has loss, "),
        ("lm", ["train.metric=accuracy"], "train.metric=accuracy is not measured by the task lm, which has loss"),
        ("translate", ["train.metric=bleu", "train.eval_examples=0"], "train.eval_examples=0 leaves no bleu to choose"),
        ("classify", ["train.metric=f2"], "train.metric=f2 is not one of auto, loss, accuracy, macro_f1, micro_f1, "),
    ],
)
def test_a_metric_the_task_has_not_is_refused_before_anything_is_written(
    task: str, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_data(task, tmp_path), tmp_path / "run"
    assert cli.main(["train", task, *words_of(task, data, f"train.out={out}", *words)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"regard: {sentence}")
    assert not out.exists()


def test_stopping_early_is_said_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    left = [(20.0, 3.0), (30.0, 2.0), (25.0, 1.0), (25.0, 0.5), (30.0, 0.5)]

    def found(*args: Any, **options: Any) -> Any:
        return dict(zip(("bleu", "valid_loss"), left.pop(0), strict=True))

    words = ("train.steps=50", "train.eval_every=1", "train.patience=2", "train.metric=bleu", f"train.out={out}")
    with (
        mock.patch("regard.training.tasks.Task.validate", found),
    ):
        assert cli.main(["train", "translate", *words_of("translate", data, *words)]) == 0
    why = "stopped early at step 4 of 50: 2 evaluations without a better bleu than 30 at step 2 (train.patience=2)"
    assert why in capsys.readouterr().err.splitlines()
    assert json.loads((out / "evaluation.json").read_bytes())["stopped"] == why


@pytest.mark.parametrize("n_texts", [1, 2, 3])
def test_few_distinct_texts_are_split_or_refused_before_training(
    n_texts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{text}\t{'no' if text == 'bad' else 'yes'}" for text in ("good", "bad", "very good")[:n_texts] * 9]
    (tmp_path / "labels.tsv").write_text("\n".join(rows), encoding="utf-8")
    words = words_of("classify", str(tmp_path / "labels.tsv"), "train.steps=1", f"train.out={tmp_path / 'run'}")
    words = [word for word in words if not word.startswith("data.valid")]
    done = cli.main(["train", "classify", "--quiet", *words])
    if n_texts == 1:
        assert done == 1
        assert "no held-out examples to evaluate on; data.valid=" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    else:
        assert done == 0
        assert json.loads((tmp_path / "run/evaluation.json").read_bytes())["metrics"]["n"] == 9
