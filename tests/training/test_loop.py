"""What the loop does between the first step and the last: steps, evaluations, saving, stopping, breaking down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import cli
from regard.errors import Diverged
from regard.recipes import run_config
from regard.training import trainer as run_module
from regard.training.averaging import average
from regard.training.checkpoint import Checkpoints, first_non_finite
from regard.training.loop import Loop, Prefetch, seed_everything
from regard.training.loss import IGNORE, Batch, Objective
from regard.training.precision import Precision
from regard.training.run_directory import RunDirectory

from .runs import (
    assert_same,
    bits_equal,
    latest,
    losses,
    metrics,
    resume,
    stopped_after,
    told_after,
    train,
    words_of,
    write_data,
)


def steps_of(out: Path) -> list[int]:
    return RunDirectory.open(out).checkpoints().steps()


def evaluated(out: Path) -> list[int]:
    return [line["step"] for line in metrics(out) if "loss_mean" not in line]


@contextmanager
def before_batch(number: int, change: Callable[[Loop], Any]) -> Iterator[None]:
    """Something happens to a run before batch ``number``."""
    accumulate = Loop._accumulate

    def changed(self: Loop, batch: Batch, at: int) -> None:
        if at == number:
            change(self)
        accumulate(self, batch, at)

    with mock.patch.object(Loop, "_accumulate", changed):
        yield


@contextmanager
def valid_losses(*values: float) -> Iterator[None]:
    """Evaluations find these, one after the other; the last one again and again."""
    left = list(values)

    def found(task: Any, model: Any, loss_of: Any, **options: Any) -> Any:
        value = left.pop(0) if len(left) > 1 else left[0]
        return {"valid_loss": value}

    with mock.patch("regard.training.tasks.Task.validate", found):
        yield


# ------------------------------------------------------------------------------------- a step


def test_a_step_is_the_mean_over_all_targets_of_its_batches(tmp_path: Path) -> None:
    """Two batches of different size, without chance: the first loss is that of both as one."""
    data = write_data("translate", tmp_path)
    still = ("model.dropout=0", "model.embedding_dropout=0", "train.steps=1", "train.eval_every=0")
    heard: dict[str, Any] = {}

    def listen(loop: Loop) -> None:
        batches = [loop.task.batch(n) for n in (0, 1)]
        with torch.no_grad():
            total = sum(float(loop.objective(batch)) for batch in batches)
        heard["loss"] = total / sum(batch.n_targets for batch in batches)
        heard["sizes"] = {batch.n_targets for batch in batches}

    with before_batch(0, listen):
        train("translate", tmp_path / "run", data, *still, "train.accumulate=2")
    assert len(heard["sizes"]) == 2
    assert losses(tmp_path / "run")[0] == pytest.approx(heard["loss"], rel=1e-6)
    assert metrics(tmp_path / "run")[0]["tokens"] > 0


def test_smoothing_is_for_training_alone(tmp_path: Path) -> None:
    data = write_data("classify", tmp_path)
    still = ("model.dropout=0", "model.embedding_dropout=0", "data.hide_rate=0", "train.steps=1", "train.lr=1e-12")
    for name, share in (("plain", 0.0), ("smooth", 0.3)):
        train("classify", tmp_path / name, data, *still, f"train.label_smoothing={share}")
    plain, smooth = (metrics(tmp_path / name) for name in ("plain", "smooth"))
    assert plain[0]["loss"] != smooth[0]["loss"]
    assert plain[1]["valid_loss"] == pytest.approx(smooth[1]["valid_loss"], rel=1e-6)


def test_recomputed_layers_give_the_same_gradients(tmp_path: Path) -> None:
    """Bit for bit, dropout included: the whole run is the same."""
    data = write_data("translate", tmp_path)
    words = ("train.steps=3", "train.accumulate=2", "model.n_layers=2", "train.optimiser=muon")
    train("translate", tmp_path / "plain", data, *words)
    train("translate", tmp_path / "again", data, *words, "train.checkpointing=true")
    assert_same(tmp_path / "plain", tmp_path / "again")


def test_batches_know_their_targets_before_they_go_to_a_device() -> None:
    made = Batch(
        (torch.zeros(2, 3),), torch.tensor([[1, 2, IGNORE], [3, IGNORE, IGNORE]]), {"padding_mask": torch.ones(2)}
    )
    moved = made.to(torch.device("meta"))
    assert (made.n_counted, moved.n_counted, moved.n_targets) == (None, 3, 3)
    assert moved.targets.is_meta
    assert moved.inputs[0].is_meta
    assert moved.options["padding_mask"].is_meta
    with Prefetch(lambda number: made, torch.device("cpu")) as prefetch:
        assert prefetch.batch(5).n_counted == 3


def test_seeds_follow_from_the_run_what_is_drawn_and_its_number_alone() -> None:
    def drawn(*of: Any) -> float:
        seed_everything(*of)
        return float(torch.rand(()))

    draws = [(0, "weights"), (1, "weights"), (0, "batch", 0), (0, "batch", 1), (1, "batch", 0), (1, "batch", 1)]
    numbers = [drawn(*of) for of in draws]
    assert len(set(numbers)) == len(draws)
    assert [drawn(*of) for of in reversed(draws)] == numbers[::-1]


class Table(nn.Module):
    """Just enough of a model for an objective to be asked for logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_an_objective_sums_over_targets_and_smooths_only_in_training() -> None:
    logits, targets = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, IGNORE, 4, 2])
    objective = Objective(Table(), smoothing=0.2)  # type: ignore[arg-type]
    batch = Batch((logits,), targets)
    plain = nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
    smooth = nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE, label_smoothing=0.2)
    torch.testing.assert_close(objective.train()(batch), smooth)
    torch.testing.assert_close(objective.eval()(batch), plain)


# ------------------------------------------------------------------------------------- when things happen


def test_evaluations_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    written: list[int] = []
    write = Checkpoints.write

    def noted(self: Checkpoints, step: int, *args: Any) -> Path:
        written.append(step)
        return write(self, step, *args)

    with mock.patch.object(Checkpoints, "write", noted), valid_losses(3.0, 2.0, 5.0):
        train("translate", out, data, "train.steps=11", "train.eval_every=3", "train.save_every=4", "train.keep=2")
    assert evaluated(out)[:4] == [3, 6, 9, 11]
    # Every fourth step, the two at which it was never better, and the last.
    assert written == [3, 4, 6, 8, 11]
    assert steps_of(out) == [6, 8, 11], "the last two and the best"
    assert RunDirectory.open(out).model()[1] == "step 6, the best"


@pytest.mark.parametrize("log_every", [1, 3])
def test_lines_of_metrics_come_when_they_are_due(log_every: int, tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    train("translate", out, data, "train.steps=7", "train.eval_every=0", f"train.log_every={log_every}")
    lines = [line for line in metrics(out) if "loss_mean" in line]
    assert [line["step"] for line in lines] == ([1, 3, 6, 7] if log_every == 3 else list(range(1, 8)))
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_zero_is_only_at_the_end(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    train("translate", out, data, "train.steps=4", "train.eval_every=0", "train.save_every=0")
    assert set(evaluated(out)) == {4}
    assert steps_of(out) == [4]


def test_out_of_patience_it_stops_saves_and_ships_the_best(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = ("train.steps=50", "train.eval_every=2", "train.save_every=0", "train.patience=2")
    with valid_losses(3.0, 2.0, 2.5, 2.0):
        done = train("translate", out, data, *words)
    assert (done.steps, done.weights, done.finished) == (8, "step 4, the best", True)
    assert steps_of(out) == [2, 4, 8]
    with valid_losses(1.0):
        assert resume(out).steps == 8, "it is out of patience still"
    with valid_losses(1.0):
        assert resume(out, patience=3, steps=12).steps == 12
    assert steps_of(out)[-1] == 12


def test_what_is_better_depends_on_what_is_measured(tmp_path: Path) -> None:
    """Accuracy is to be large."""
    data, out = write_data("classify", tmp_path), tmp_path / "run"
    left = [0.5, 0.7, 0.6, 0.7]  # at each step, and at the end

    def found(*args: Any, **options: Any) -> Any:
        return {"valid_loss": 1.0, "accuracy": left.pop(0)}

    with mock.patch("regard.training.tasks.Task.validate", found):
        train("classify", out, data, "train.steps=3", "train.eval_every=1", "train.save_every=0")
    assert latest(out).state["at"]["best_step"] == 2


def test_the_average_is_the_mean_of_the_last_checkpoints(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = ("train.steps=8", "train.save_every=2", "train.eval_every=0", "train.average=3", "train.keep=1")
    assert train("translate", out, data, *words).weights == "the average of steps 4, 6, 8"
    checkpoints = RunDirectory.open(out).checkpoints()
    expected = average(checkpoints.at(step).tensors("model/") for step in (4, 6, 8))
    model = regard.load(out).state_dict()
    assert model.keys() == expected.keys()
    for name, x in model.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)
        one = checkpoints.at(4).tensor(f"model/{name}").double()
        mean = (one + checkpoints.at(6).tensor(f"model/{name}") + checkpoints.at(8).tensor(f"model/{name}")) / 3
        torch.testing.assert_close(x.double(), mean, rtol=1e-6, atol=1e-8)
    records: list[Any] = [regard.load(path).training_record for path in (out, f"{out}@8")]
    losses = [record["metrics"]["valid_loss"] for record in records]  # step 8 has its own
    assert losses[0] == json.loads((out / "evaluation.json").read_bytes())["metrics"]["valid_loss"] != losses[1]


def test_the_moving_average_is_evaluated_and_shipped(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    seen: list[dict[str, Tensor]] = []

    def found(task: Any, model: nn.Module, loss_of: Any, **options: Any) -> Any:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {"valid_loss": 1.0}

    with mock.patch("regard.training.tasks.Task.validate", found):
        done = train("translate", out, data, "train.steps=5", "train.eval_every=0", "train.ema=0.9")
    assert done.weights == "step 5, moving average"
    saved = latest(out)
    averages, own = saved.tensors("ema/average/"), saved.tensors("model/")
    model = regard.load(out).state_dict()
    for name, x in averages.items():
        assert bits_equal(x, model[name]), name
        assert bits_equal(x, seen[0][name]), name
    assert any(not torch.equal(x, own[name]) for name, x in averages.items())


# ------------------------------------------------------------------------------------- what is not finite


def assert_all_finite(out: Path) -> None:
    checkpoints = RunDirectory.open(out).checkpoints()
    for step in checkpoints.steps():
        assert first_non_finite(checkpoints.at(step).tensors()) is None, step


def test_a_learning_rate_that_blows_up_ends_with_4_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    more = (f"train.out={out}", "train.lr=1e30", "train.steps=9", "train.save_every=1", "train.eval_every=0")
    assert cli.main(["train", "translate", *words_of("translate", data, *more), "--quiet"]) == 4
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("regard: step 2: loss nan, gradient norm nan; not finite first in the output of ")
    assert "; the last checkpoint is that of step 1; a smaller train.lr" in said
    assert steps_of(out) == [1]
    assert_all_finite(out)
    assert not (out / "model").exists()


def test_weights_that_became_infinite_are_not_saved(tmp_path: Path) -> None:
    """The gradient was finite, the step it led to was not: nothing of it reaches a checkpoint."""
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    more = ("train.lr=3e38", "train.warmup=0", "train.schedule=constant", "train.weight_decay=10", "train.save_every=1")
    with pytest.raises(Diverged, match=r"^step 1: not finite in model/\S+, so it is not saved; there is no "):
        train("translate", out, data, "train.steps=3", "train.eval_every=0", *more)
    assert steps_of(out) == []


def test_a_broken_layer_is_named(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"

    def poison(loop: Loop) -> None:
        loop.model.get_parameter("decoder.blocks.0.ff.w_out.weight").data[0, 0] = math.nan

    with before_batch(7, poison), pytest.raises(Diverged) as broken:
        train("translate", out, data, "train.steps=9", "train.accumulate=2", "train.save_every=2")
    assert str(broken.value) == (
        "step 4: loss nan, gradient norm nan; not finite first in the output of decoder.blocks.0.ff.w_out; "
        "the last checkpoint is that of step 2"
    )
    assert steps_of(out) == [2]
    assert_all_finite(out)
    resume(out)
    train("translate", tmp_path / "whole", data, "train.steps=9", "train.accumulate=2", "train.save_every=2")
    assert_same(tmp_path / "whole", out)


def test_the_first_batch_of_a_step_may_be_the_one_that_broke(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)

    def poison(loop: Loop) -> None:
        layer = loop.model.get_submodule("encoder.blocks.0.ff.w_in")
        bad = loop.task.batch(2).inputs[0].shape

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output * math.inf if output.shape[:2] == bad else None

        layer.register_forward_hook(hook)

    with (
        before_batch(2, poison),
        pytest.raises(Diverged, match=r"the output of encoder\.blocks\.0\.ff\.w_in; there is"),
    ):
        train("translate", tmp_path / "run", data, "train.steps=9", "train.accumulate=2")


def test_a_broken_gradient_is_named(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"

    def poison(loop: Loop) -> None:
        loop.model.get_parameter("encoder.blocks.0.ff.w_in.weight").register_hook(lambda grad: grad * math.inf)

    with (
        before_batch(2, poison),
        pytest.raises(Diverged, match=r"^step 3: loss [\d.]+, gradient norm (inf|nan); ") as at,
    ):
        train("translate", out, data, "train.steps=9", "train.save_every=1", "train.eval_every=0")
    assert "; not finite first in the gradient of encoder.blocks.0.ff.w_in.weight; " in str(at.value)
    assert steps_of(out) == [1, 2]
    assert_all_finite(out)


def test_a_step_that_broke_halfway_is_not_saved_by_a_signal(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"

    def poison(loop: Loop) -> None:
        loop.model.get_parameter("token.weight").data[:] = math.nan

    with told_after(4), before_batch(3, poison), pytest.raises(Diverged, match="so it is not saved"):
        train("translate", out, data, "train.steps=9", "train.accumulate=3", "train.save_every=1")
    assert steps_of(out) == [1]
    assert_all_finite(out)


# ------------------------------------------------------------------------------------- fp16's scaled loss


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 with fp16's scaler: what a GPU would do, without one."""

    class Scaled(Precision):
        def __init__(self, name: str, device: torch.device) -> None:
            super().__init__("fp32", device)
            self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)

    monkeypatch.setattr(run_module, "Precision", Scaled)


MUON = ("train.optimiser=muon", "train.save_every=1", "train.eval_every=0", "train.keep=20")


@pytest.mark.usefixtures("scaled")
def test_a_scaled_loss_changes_nothing_but_its_scale(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)
    train("translate", tmp_path / "run", data, "train.steps=7", "train.accumulate=2", *MUON)
    scales = [
        RunDirectory.open(tmp_path / "run").checkpoints().at(step).state["scaler"]["scale"] for step in range(1, 8)
    ]
    assert scales == [16, 16, 32, 32, 32, 64, 64]
    with mock.patch.object(run_module, "Precision", Precision):
        train("translate", tmp_path / "plain", data, "train.steps=7", "train.accumulate=2", *MUON)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.usefixtures("scaled")
def test_a_step_whose_gradients_overflow_is_left_out_whole(tmp_path: Path) -> None:
    """Muon's overflow, AdamW's do not: neither makes the step, the scale is halved, the run goes on."""
    data, out = write_data("translate", tmp_path), tmp_path / "run"

    def overflow(loop: Loop) -> None:
        handle = loop.model.get_parameter("encoder.blocks.0.ff.w_in.weight").register_hook(
            lambda grad: (handle.remove(), grad * math.inf)[1]
        )

    with before_batch(2, overflow):
        train("translate", out, data, "train.steps=5", *MUON)
    checkpoints = RunDirectory.open(out).checkpoints()
    two, three, four = (checkpoints.at(step) for step in (2, 3, 4))
    assert [x.state["scaler"]["scale"] for x in (two, three, four)] == [16, 8, 8]
    for prefix in ("model/", "optimiser/"):
        before, after, later = (x.tensors(prefix) for x in (two, three, four))
        assert all(bits_equal(before[name].reshape(-1), after[name].reshape(-1)) for name in before)
        assert any(not torch.equal(after[name], later[name]) for name in after)
    assert_all_finite(out)


@pytest.mark.usefixtures("scaled")
def test_gradients_that_overflow_unscaled_have_diverged(tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"

    def overflow(loop: Loop) -> None:
        loop.model.get_parameter("encoder.blocks.0.ff.w_in.weight").register_hook(lambda grad: grad * math.inf)

    with before_batch(1, overflow), pytest.raises(Diverged, match=r"^step 6: .* the gradient of encoder"):
        train("translate", out, data, "train.steps=20", *MUON)  # 16, 8, 4, 2, 1
    assert_all_finite(out)


@pytest.mark.usefixtures("scaled")
def test_the_scale_is_kept_when_a_run_goes_on(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)
    train("translate", tmp_path / "whole", data, "train.steps=7", "train.accumulate=2", *MUON)
    stopped_after(9, train, "translate", tmp_path / "run", data, "train.steps=7", "train.accumulate=2", *MUON)
    resume(tmp_path / "run")
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_batches_of_many_shapes_are_not_planned_one_by_one(tmp_path: Path) -> None:
    """cuDNN takes half a second for the plan of every new shape."""
    seen = []
    for task, more in (("translate", ()), ("lm", ("data.packing=blocks", "data.documents=whole"))):
        words = words_of(task, write_data(task, tmp_path), f"train.out={tmp_path / task}", "train.steps=1", *more)
        regard.train(
            run_config(task, words),
            style="quiet",
            callbacks=[lambda _: seen.append(torch.backends.cuda.cudnn_sdp_enabled())],
        )
    assert seen == [False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()
