"""Classes that are not equally many: factors on their loss, and epochs that show them equally often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from regard import cli
from regard.data.batching import balanced_rows
from regard.data.sources import open_source
from regard.errors import UsageError
from regard.models import build
from regard.recipes import run_config
from regard.training.loss import Objective
from regard.training.tasks import Task, open_task

from .runs import losses as losses_of
from .runs import resume, train, words_of, write_data


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine rows of one class to one of another."""
    path = tmp_path_factory.mktemp("rare") / "rare.tsv"
    rows = [f"{'one two' if i % 10 else 'nine ten'} number {i}\t{'common' if i % 10 else 'rare'}" for i in range(120)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def open_(data: str, *more: str) -> Task:
    config = run_config("classify", words_of("classify", data, "data.columns=0,1", *more))
    return open_task(config, open_source(config.data))


def test_balanced_weights_are_those_of_scikit_learn_and_of_the_training_loss_only(rare: str) -> None:
    task, plain = open_(rare, "train.class_weights=balanced"), open_(rare)
    n_of = Counter(x.label for x in task.source.train)  # type: ignore[union-attr]
    expected = [sum(n_of.values()) / (2 * n_of[c]) for c in (0, 1)]
    model = build(task.model_config)
    batch, same = task.batch(0), plain.batch(0)
    logits = model.eval()(*batch.inputs, **batch.options)
    each = F.cross_entropy(logits, batch.targets, weight=torch.tensor(expected), reduction="sum")
    torch.testing.assert_close(Objective(model, loss=task.loss)(batch), each)
    assert torch.equal(batch.targets, same.targets), "which examples a batch has stays"
    assert all(held.weights is None for held in task.valid_batches(task.examples()))
    assert task.notes == [f"class weights: common {expected[0]:.3g}, rare {expected[1]:.3g}"]


def test_weights_may_be_typed_in_the_order_of_the_labels(rare: str) -> None:
    batch = open_(rare, "train.class_weights=1,4", "data.labels=rare,common").batch(0)
    assert batch.weights is not None
    assert torch.equal(batch.weights, torch.tensor([1.0, 4.0])[batch.targets])
    with pytest.raises(UsageError, match="class_weights has 3 numbers for 2 classes: common, rare"):
        open_(rare, "train.class_weights=1,2,3").batch(0)
    with pytest.raises(UsageError, match=r"class_weights.*must not be negative"):
        open_(rare, "train.class_weights=-1,1")


def test_a_balanced_epoch_shows_all_classes_equally_often(rare: str) -> None:
    task = open_(rare, "train.sampling=balanced")
    shown = Counter(int(y) for n in range(task.batches_per_epoch) for y in task.batch(n).targets)
    n_common = sum(x.label == 0 for x in task.source.train)  # type: ignore[union-attr]
    assert shown == {0: n_common, 1: n_common}
    assert balanced_rows([0, 0, 0, 2, 2]).tolist() == [0, 1, 2, 3, 4, 3]


def test_a_weighted_and_balanced_run_is_trained_resumed_and_said(
    rare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("train.class_weights=balanced", "train.sampling=balanced", "train.steps=4", "data.columns=0,1")
    words = words_of("classify", rare, f"train.out={tmp_path / 'run'}", *more)
    assert cli.main(["train", "classify", *words]) == 0
    assert "class weights: common" in capsys.readouterr().err
    train("classify", tmp_path / "half", rare, *more, "train.stop_at=2")
    resume(tmp_path / "half")
    assert losses_of(tmp_path / "half") == losses_of(tmp_path / "run")


@pytest.mark.parametrize("field", ["train.class_weights=balanced", "train.sampling=balanced"])
def test_tasks_without_classes_refuse(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data("translate", tmp_path)
    assert cli.main(["train", "translate", *words_of("translate", data, field, f"train.out={tmp_path / 'run'}")]) == 2
    name = field.partition("=")[0]
    assert f"{name} is for tasks with classes, which translate does not have" in capsys.readouterr().err
