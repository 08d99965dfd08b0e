"""The numbers of a run reach wandb and MLflow as they reach TensorBoard, and no failure there stops a run."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from regard import cli
from regard.training.reporter import Reporter

from .runs import metrics, words_of, write_data


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module in place of a library that needs an account or a server."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What both libraries are asked for, in order."""
    said: list[tuple[Any, ...]] = []

    def note(name: str) -> Any:
        return lambda *args, **options: said.append((name, *args, options))

    def init(**options: Any) -> SimpleNamespace:
        said.append(("wandb.init", options))
        return SimpleNamespace(id="w-1", log=note("wandb.log"), finish=note("wandb.finish"))

    def start_run(**options: Any) -> SimpleNamespace:
        said.append(("mlflow.start_run", options))
        return SimpleNamespace(info=SimpleNamespace(run_id="m-1"))

    stub(monkeypatch, "wandb", init=init, Html=str)
    names = ("set_experiment", "log_params", "log_metrics", "log_text", "end_run")
    stub(monkeypatch, "mlflow", start_run=start_run, **{name: note(f"mlflow.{name}") for name in names})
    return said


def of(calls: list[tuple[Any, ...]], name: str) -> list[tuple[Any, ...]]:
    return [call[1:] for call in calls if call[0] == name]


def test_a_run_tells_wandb_and_mlflow_what_it_writes(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    more = ("train.steps=3", f"train.out={out}", "train.loggers=tensorboard,wandb,mlflow", "train.samples=1")
    assert cli.main(["train", "translate", *words_of("translate", data, *more), "--quiet"]) == 0
    ((init,),) = of(calls, "wandb.init")
    assert (init["project"], init["name"], init["config"]["train.steps"]) == ("regard", "run", 3)
    assert init["config"]["task"] == "translate"
    written = {row["step"]: row["loss"] for row in metrics(out) if "loss_mean" in row}
    for name in ("wandb.log", "mlflow.log_metrics"):
        logged = {
            options["step"]: values["train/loss"] for values, options in of(calls, name) if "train/loss" in values
        }
        assert logged == written
        assert any("valid/loss" in values for values, _ in of(calls, name))
    assert any("samples" in values for values, _ in of(calls, "wandb.log"))
    assert of(calls, "mlflow.log_text")
    parameters = {name: x for values, _ in of(calls, "mlflow.log_params") for name, x in values.items()}
    assert parameters == init["config"]
    assert len(of(calls, "wandb.finish")) == len(of(calls, "mlflow.end_run")) == 1
    assert (out / "tensorboard").is_dir()


def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    for start_step in (0, 2):
        with Reporter(
            tmp_path, steps=4, log_every=1, style="quiet", start_step=start_step, loggers=("wandb", "mlflow")
        ):
            pass
    assert [options["id"] for (options,) in of(calls, "wandb.init")] == [None, "w-1"]
    assert [options["run_id"] for (options,) in of(calls, "mlflow.start_run")] == [None, "m-1"]
    assert not (tmp_path / "tensorboard").exists()


def test_a_failure_there_is_noted_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no network")

    stub(monkeypatch, "wandb", init=lambda **_: SimpleNamespace(id="w", log=fail, finish=fail))
    with Reporter(tmp_path, steps=3, log_every=1, style="plain", loggers=("wandb",)) as reporter:
        for step in (1, 2, 3):
            reporter.step(step, loss=1.0, lr=0.1, grad_norm=1.0, n_tokens=4)
    assert capsys.readouterr().err.count("wandb cannot be written to: no network") == 1
    assert len(metrics(tmp_path)) == 3


def test_a_logger_that_is_not_installed_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = words_of("lm", write_data("lm", tmp_path), f"train.out={tmp_path / 'run'}", "train.loggers=wandb")
    assert cli.main(["train", "lm", *words]) == 1
    assert 'train.loggers=wandb: wandb is not installed: pip install "regard[wandb]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    with Reporter(tmp_path, steps=2, log_every=1, style="quiet", loggers=("mlflow",), settings={"train.lr": 0.1}) as it:
        it.step(1, loss=1.5, lr=0.1, grad_norm=1.0, n_tokens=4)
    (run,) = mlflow.search_runs(experiment_names=["regard"], output_format="list")
    assert (run.data.metrics["train/loss"], run.data.params["train.lr"]) == (1.5, "0.1")
