"""A run that was stopped and goes on is the run that was never stopped: bit for bit, wherever it was stopped."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import regard
from regard.data.sources import open_source
from regard.errors import RegardError
from regard.recipes import run_config
from regard.training.compilation import Compiled
from regard.training.run_directory import RunDirectory
from regard.training.tasks import open_task
from trust.promises import size

from .runs import (
    assert_same,
    bits_equal,
    latest,
    losses,
    names,
    resume,
    stopped_after,
    train,
    use_backend,
    words_of,
    write_data,
)

STEPS, ACCUMULATE = 8, 3
COMMON = (
    *(f"train.steps={STEPS}", f"train.accumulate={ACCUMULATE}", "train.ema=0.9"),
    *("train.eval_every=3", "train.save_every=4"),
)
RUNS: dict[str, tuple[str, ...]] = {
    "adamw": ("translate", "train.optimiser=adamw", "train.weight_decay=0.1"),
    "adam": ("lm", "train.optimiser=adam", "train.schedule=noam", "model.attention_dropout=0.1"),
    "muon": ("classify", "train.optimiser=muon", "train.label_smoothing=0.1", "data.hide_rate=0.2"),
    "bf16": ("translate", "train.optimiser=muon", "train.precision=bf16"),
    "mlm": ("mlm", "train.optimiser=adamw", "train.schedule=wsd"),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Each run as it is when nothing happens, made when it is first asked for, and what it learns from."""

    class Made(dict[str, tuple[Path, str]]):
        def __missing__(self, kind: str) -> tuple[Path, str]:
            folder = tmp_path_factory.mktemp(kind)
            data = write_data(RUNS[kind][0], folder)
            train(RUNS[kind][0], folder / "whole", data, *COMMON, *RUNS[kind][1:])
            self[kind] = folder / "whole", data
            return self[kind]

    return Made()


POINTS = sorted(random.Random(4).sample(range(1, STEPS * ACCUMULATE), size(short=10, full=20)))


def check_from(point: int, kind: str, reference: tuple[Path, str], out: Path) -> None:
    whole, data = reference
    stopped_after(point, train, RUNS[kind][0], out, data, *COMMON, *RUNS[kind][1:])
    saved = latest(out)
    assert (saved.step, saved.state["at"]["micro"]) == divmod(point, ACCUMULATE)
    assert bool(saved.names("grad/")) == (point % ACCUMULATE > 0)
    assert not (out / "model").exists()
    resume(out)
    assert_same(whole, out)


@pytest.mark.promise(1, "runs stopped at any batch, also within a step, go on bit for bit")
@pytest.mark.parametrize("point", POINTS)
def test_stopped_at_any_point(point: int, uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    check_from(point, "adamw", uninterrupted["adamw"], tmp_path / "run")


def test_those_points_lie_within_epochs_and_within_steps(uninterrupted: dict[str, tuple[Path, str]]) -> None:
    run = RunDirectory.open(uninterrupted["adamw"][0])
    an_epoch = open_task(run.config, open_source(run.config.data), run.processor).batches_per_epoch
    assert 1 < an_epoch < STEPS * ACCUMULATE, "the run must see its data more than once"
    assert any(point % an_epoch for point in POINTS)
    assert {point % ACCUMULATE for point in POINTS} == {0, 1, 2}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16", "mlm")]


@pytest.mark.parametrize("kind", ["adam", "muon", *SLOW])
def test_every_optimiser_precision_and_task(
    kind: str, uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path
) -> None:
    chosen = random.Random(kind)
    step = chosen.randrange(1, STEPS - 1)
    for point in (step * ACCUMULATE, step * ACCUMULATE + chosen.choice([1, 2])):
        check_from(point, kind, uninterrupted[kind], tmp_path / str(point))


def test_the_comparison_can_fail(uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    """A run whose chance came from elsewhere in one batch is another one."""
    whole, data = uninterrupted["adamw"]
    train("translate", tmp_path / "run", data, *COMMON, *RUNS["adamw"][1:], "train.seed=1")
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(whole, tmp_path / "run")


def test_stopped_twice(uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    whole, data = uninterrupted["adamw"]
    out = tmp_path / "run"
    stopped_after(4, train, "translate", out, data, *COMMON, *RUNS["adamw"][1:])
    # The first batch of step 2 is done: four more end in the next step, after its second.
    stopped_after(4, resume, out)
    assert (latest(out).step, latest(out).state["at"]["micro"]) == (2, 2)
    resume(out)
    assert_same(whole, out)


def test_stopped_in_the_first_step(uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    whole, data = uninterrupted["adamw"]
    stopped_after(1, train, "translate", tmp_path / "run", data, *COMMON, *RUNS["adamw"][1:])
    assert latest(tmp_path / "run").step == 0
    resume(tmp_path / "run")
    assert_same(whole, tmp_path / "run")


def test_a_finished_run_resumed_is_the_same(uninterrupted: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    whole, _ = uninterrupted["adamw"]
    shutil.copytree(whole, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same(whole, tmp_path / "run")


def test_more_steps_than_it_began_with(tmp_path: Path) -> None:
    """With a schedule that does not ask how long a run will be."""
    data = write_data("translate", tmp_path)
    words = ("train.schedule=constant", "train.save_every=2", "train.eval_every=0")
    train("translate", tmp_path / "long", data, "train.steps=7", *words)
    train("translate", tmp_path / "run", data, "train.steps=4", *words)
    resume(tmp_path / "run", steps=7)
    here, there = latest(tmp_path / "long").tensors(), latest(tmp_path / "run").tensors()
    assert all(bits_equal(here[name].reshape(-1), there[name].reshape(-1)) for name in here)
    assert losses(tmp_path / "long") == losses(tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").config.train.steps == 7


def test_what_is_averaged_does_not_depend_on_where_it_was_stopped(tmp_path: Path) -> None:
    """A checkpoint that was written only because the run was to stop is not one of the last two."""
    data = write_data("translate", tmp_path)
    words = ("train.steps=6", "train.save_every=2", "train.average=2", "train.keep=1", "train.eval_every=0")
    train("translate", tmp_path / "whole", data, *words)
    stopped_after(5, train, "translate", tmp_path / "run", data, *words)
    assert RunDirectory.open(tmp_path / "run").checkpoints().steps() == [4, 5]
    resume(tmp_path / "run")
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").checkpoints().steps() == [4, 6]


def test_a_damaged_checkpoint_is_passed_over_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_data("translate", tmp_path)
    words = ("train.steps=9", "train.save_every=2", "train.keep=1", "train.eval_every=0")
    train("translate", tmp_path / "whole", data, *words)
    train("translate", tmp_path / "run", data, *words, "train.stop_at=6", "train.keep=2")
    broken = tmp_path / "run/checkpoints/step-000006/model.safetensors"
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    stopped_after(1, resume, tmp_path / "run", keep=1)
    assert "step-000006" in caplog.text
    assert "the checkpoint before it is used" in caplog.text
    assert latest(tmp_path / "run").step == 5, "of the two that are whole the newer one"
    resume(tmp_path / "run")
    assert_same(tmp_path / "whole", tmp_path / "run", files=False)
    assert names(tmp_path / "run/model") == names(tmp_path / "whole/model")


def test_an_end_that_lies_behind_is_refused(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)
    train("translate", tmp_path / "run", data, "train.steps=4", "train.stop_at=3")
    with pytest.raises(ValueError, match=r"^train\.steps=2 is less than the 3 steps that .*run has done$"):
        resume(tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match=r"^train\.stop_at=3 is not after the 3 steps that .*run has done$"):
        resume(tmp_path / "run", stop_at=3)
    assert RunDirectory.open(tmp_path / "run").config.train.steps == 4


def test_changed_data_is_refused(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)
    train("translate", tmp_path / "run", data, "train.steps=4", "train.stop_at=3")
    before = Path(data).read_text(encoding="utf-8")
    Path(data).write_text(before.replace("zwei", "zwo"), encoding="utf-8")
    with pytest.raises(RegardError, match=r"pairs\.tsv has changed since the run began: its SHA-256 is \w{12}…"):
        resume(tmp_path / "run")
    Path(data).write_text(before, encoding="utf-8")
    assert resume(tmp_path / "run").finished


@pytest.mark.parametrize("name", ["seed", "batch_tokens", "optimiser", "accumulate", "out", "init", "metric"])
def test_what_would_make_it_another_run_cannot_change(name: str, uninterrupted: dict[str, tuple[Path, str]]) -> None:
    with pytest.raises(ValueError, match=rf"^train\.{name} cannot change when a run is resumed; steps, stop_at,"):
        regard.resume(uninterrupted["adamw"][0], **{name: 1})


COMPILED = ("train.steps=6", "train.eval_every=0", "train.optimiser=adamw", "train.eps=1e-6")


def compiled_run(out: Path, data: str, *more: str) -> None:
    """A run, or what is left of it, whose graphs are compiled once, for one shape or for all shapes."""

    def fail(self: Compiled, error: Exception) -> None:
        raise error  # where a user's run would go on eagerly

    torch._dynamo.reset()  # as in a new process
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        torch._inductor.config.patch(compile_threads=1),
        mock.patch.object(Compiled, "_give_up", fail),
    ):
        if out.exists():
            resume(out)
        else:
            train("lm", out, data, "train.compile=on", *COMPILED, *more)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"


def assert_near(here: Path, there: Path) -> None:
    assert losses(here) == pytest.approx(losses(there), rel=2e-6)
    ours, theirs = (latest(path).tensors("model/") for path in (here, there))
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_it_goes_on_but_for_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled, and for which shapes, does not depend on where a run was stopped."""
    use_backend(monkeypatch, "eager")
    data, whole, out = write_data("lm", tmp_path), tmp_path / "whole", tmp_path / "run"
    compiled_run(whole, data)
    compiled_run(out, data, "train.stop_at=3")
    compiled_run(out, data)
    assert_near(out, whole)


@pytest.mark.slow
def test_inductor_trains_as_torch_does(tmp_path: Path) -> None:
    """Without dropout, whose numbers a compiled graph draws in another order."""
    data, more = write_data("lm", tmp_path), ("model.dropout=0", "model.embedding_dropout=0")
    compiled_run(tmp_path / "compiled", data, *more)
    train("lm", tmp_path / "eager", data, *COMPILED, *more)
    assert_near(tmp_path / "compiled", tmp_path / "eager")


@pytest.mark.parametrize(
    ("more", "ragged"), [("data.packing=blocks", False), ("train.batch_tokens=24", False), ("data.max_len=24", True)]
)
def test_whether_batches_differ_in_shape_is_known_beforehand(more: str, ragged: bool, tmp_path: Path) -> None:
    """Code compiled for one shape would be compiled anew at the end of an epoch."""
    config = run_config("lm", words_of("lm", write_data("lm", tmp_path), more))
    task = open_task(config, open_source(config.data))
    shapes = {task.batch(number).targets.shape for number in range(task.batches_per_epoch)}
    assert (len(shapes) > 1) == task.ragged == ragged
