"""``regard.train`` from Python: task names, sections as dicts, examples in memory, own tasks, callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import regard
from regard.data.examples import Labelled, Question, Triplet
from regard.errors import BadData, UsageError
from regard.recipes import run_config
from regard.training import StepRecord
from regard.training.loss import Batch, batch_loss
from regard.training.run_inputs import open_run_source, resolve_run
from regard.training.tasks.translation import Translate

SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "max_len": 32}
PAIRS = [(f"a{i % 7} b{i % 5} c{i}", f"C{i} B{i % 5} A{i % 7}") for i in range(200)]


def fields(out: Path, **more: Any) -> dict[str, Any]:
    quick = {"steps": 2, "precision": "fp32", "compile": "off", "device": "cpu", "eval_every": 0, "samples": 0}
    return {**quick, "out": str(out), **more}


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss_mean" in line]


def test_a_task_and_sections_are_the_config_the_command_line_makes(tmp_path: Path) -> None:
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")
    done = regard.train(
        "translate",
        data={"source": str(data), "vocab_size": 300},
        model=SMALL,
        train=fields(tmp_path / "a", log_every=1),
        style="quiet",
    )
    words = [f"data.source={data}", "data.vocab_size=300", *(f"model.{name}={value}" for name, value in SMALL.items())]
    typed = fields(tmp_path / "b", log_every=1)
    config = run_config("translate", [*words, *(f"train.{name}={value}" for name, value in typed.items())])
    regard.train(config, style="quiet")
    assert done.finished
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_module_that_is_no_regard_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model is a Linear: your own models must be subclasses of regard\.Model"):
        regard.train("translate", data=PAIRS, model=nn.Linear(2, 2), train=fields(tmp_path / "run"))  # type: ignore[arg-type]


def test_unknown_fields_offer_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="steps"):
        regard.train("translate", data="en-ko", train={"stepz": 3})
    with pytest.raises(UsageError, match="translate"):
        regard.train("translat", data="en-ko")
    with pytest.raises(UsageError, match="with_"):
        regard.train(run_config("translate", ["data=en-ko"]), train={"steps": 3})


class Rows(Dataset[tuple[str, str]]):
    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return PAIRS[index]


@pytest.mark.parametrize("examples", [PAIRS, Rows(), (pair for pair in PAIRS)], ids=["list", "dataset", "generator"])
def test_examples_in_memory_and_callbacks(examples: Any, tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    train = fields(tmp_path / "run", eval_every=2)
    done = regard.train("translate", data=examples, model=SMALL, train=train, callbacks=[seen.append], style="quiet")
    assert [record.step for record in seen] == [1, 2]
    assert seen[0].metrics == {}
    assert seen[1].metrics["valid_loss"] > 0
    assert seen[0].loss > 0
    assert seen[0].model.n_parameters > 0
    with pytest.raises(UsageError, match="again"):
        regard.resume(done.path, steps=3, style="quiet")
    assert regard.resume(done.path, steps=3, data=PAIRS, style="quiet").steps == 3
    with pytest.raises(BadData, match="does not keep the examples it was given in memory"):
        regard.evaluate(done.path)
    with pytest.raises(TypeError, match="data is a list, not a file"):
        regard.evaluate(done.path, PAIRS)  # type: ignore[arg-type]  # what regard.train takes


def test_labels_in_memory(tmp_path: Path) -> None:
    rows = [(f"good {i}", "yes") if i % 2 else (f"bad {i}", "no") for i in range(40)]
    done = regard.train("classify", data=rows, model=SMALL, train=fields(tmp_path / "run"), style="quiet")
    assert regard.load(done.path).processor.labels == ("no", "yes")  # type: ignore[union-attr]  # a run brings one


def examples_of(task: str, rows: list[Any], **fields: Any) -> tuple[list[Any], tuple[str, ...] | None]:
    config = run_config(task, data={"source": "memory", **fields})
    inputs = resolve_run(config, data=rows)
    return inputs.examples or [], inputs.labels


def test_labels_in_memory_may_be_numbers_tensors_or_named_by_the_config() -> None:
    numbered = [Labelled("a", 0), Labelled("b", 2)]  # none of class 1
    assert examples_of("classify", numbered) == (numbered, ("0", "1", "2"))
    rows = [("a", torch.tensor(4)), ("b", torch.tensor(7)), ("c", torch.tensor(4))]
    assert examples_of("classify", rows) == ([Labelled("a", 0), Labelled("b", 1), Labelled("c", 0)], ("4", "7"))
    named = [("a", "good"), ("b", "bad")]
    assert examples_of("classify", named, labels=("good", "bad"))[0] == [Labelled("a", 0), Labelled("b", 1)]
    with pytest.raises(BadData, match="the label 'bad' is not one of good, fine"):
        examples_of("classify", named, labels=("good", "fine"))


def test_images_in_memory(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    for image in (pixels, torch.from_numpy(pixels)):
        ((found,), _) = examples_of("classify-images", [(image, "red")])
        assert isinstance(found.image, np.ndarray)
        assert found.image.shape == (4, 6, 3)
    ((found,), _) = examples_of("caption", [("a.png", "a square")])
    assert found.image == Path("a.png")
    with pytest.raises(BadData, match=r"an image is torch.float32 of shape \(3, 4, 6\); uint8 pixels"):
        examples_of("classify-images", [(torch.zeros(3, 4, 6), "red")])


def test_three_texts_are_a_triplet_for_the_task_that_learns_from_them() -> None:
    assert examples_of("embed", [("a", "b", "c")])[0] == [Triplet("a", "b", "c")]
    with pytest.raises(BadData, match="does not fit the kind pairs"):
        examples_of("translate", [("a", "b", "c")])


def test_passages_in_memory() -> None:
    assert examples_of("answer", [("q", "a", "one passage")])[0] == [Question("q", "a", ("one passage",))]
    for nothing in (("q", "a", []), Question("q", "a", ())):
        with pytest.raises(BadData, match="a question in data has no passage"):
            examples_of("answer", [nothing])


def test_examples_of_one_source_leave_none_to_train_on_or_none_to_hold_out(tmp_path: Path) -> None:
    for seed in range(60):  # the only hash is below the share of one seed in twenty
        config = run_config("translate", data={"source": "memory", "split_seed": seed})
        with pytest.raises(BadData, match=r"has no example to train on|has no held-out examples"):
            open_run_source(resolve_run(config, data=[("one", "eins"), ("one", "ein")]))


class ScaledLoss(Translate):
    """Twice the loss, and one metric more."""

    @staticmethod
    def loss(model: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return 2 * batch_loss(model, batch, smoothing)

    def answers(self, model: Any, examples: Any, **options: Any) -> Any:
        found, rows = super().answers(model, examples, **options)
        return {**found, "n_outputs": float(len(rows))}, rows


def test_a_task_of_ones_own_brings_loss_and_metric(tmp_path: Path) -> None:
    plain = regard.train(
        "translate", data=PAIRS, model=SMALL, train=fields(tmp_path / "a", lr=1e-30, muon_lr=1e-30), style="quiet"
    )
    own = regard.train(
        task=ScaledLoss, data=PAIRS, model=SMALL, train=fields(tmp_path / "b", lr=1e-30, muon_lr=1e-30), style="quiet"
    )
    assert own.metrics["valid_loss"] == pytest.approx(2 * float(plain.metrics["valid_loss"]), rel=1e-6)
    assert float(own.metrics["n_outputs"]) > 0
    assert losses(tmp_path / "b")[0] == pytest.approx(2 * losses(tmp_path / "a")[0], rel=1e-5)


@pytest.mark.parametrize(("began", "continued"), [(ScaledLoss, None), (ScaledLoss, Translate), (Translate, ScaledLoss)])
def test_a_run_is_not_resumed_with_the_loss_of_another_task(began: Any, continued: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    regard.train(task=began, data=PAIRS, model=SMALL, train=fields(out, stop_at=1, save_every=1), style="quiet")
    kind = "built-in task 'translate'" if began is Translate else "task class .*:ScaledLoss"
    with pytest.raises(UsageError, match=f"was trained with the {kind}"):
        regard.resume(out, task=continued, data=PAIRS, style="quiet")
    assert regard.resume(out, task=began, data=PAIRS, style="quiet").finished


def test_a_task_class_named_like_the_built_in_is_not_taken_for_it(tmp_path: Path) -> None:
    own: Any = type("Translate", (ScaledLoss,), {"__module__": __name__})
    out = tmp_path / "run"
    regard.train(task=own, data=PAIRS, model=SMALL, train=fields(out, stop_at=1, save_every=1), style="quiet")
    with pytest.raises(UsageError, match="was trained with the task class"):
        regard.resume(out, data=PAIRS, style="quiet")


def test_a_model_is_the_start_and_can_be_evaluated(tmp_path: Path) -> None:
    first = regard.train("translate", data=PAIRS, model=SMALL, train=fields(tmp_path / "a"), style="quiet")
    model = regard.load(first.path)
    again = regard.train(
        "translate", data=PAIRS, model=model, train=fields(tmp_path / "b", lr=1e-30, muon_lr=1e-30), style="quiet"
    )
    assert float(again.metrics["valid_loss"]) == pytest.approx(float(first.metrics["valid_loss"]), rel=1e-5)
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS[:10]), encoding="utf-8")
    report = regard.evaluate(model, file, device="cpu")
    assert report.path == "model"
    assert report["whole"].n == 10
