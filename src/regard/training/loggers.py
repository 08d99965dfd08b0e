"""Loggers of a run besides metrics.jsonl: TensorBoard, Weights & Biases and MLflow (``train.loggers``).

Each opens its library when the run begins and receives the same calls. A failure is noted once and never stops a run.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RegardError
from ..foundation.files import write_atomic
from ..foundation.jsonio import read_json, to_json

Note = Callable[[str], None]
RUN_IDS = "loggers.json"  # the ids that loggers gave to the run, so that a resumed run continues under them
PROJECT = "regard"  # the wandb project and MLflow experiment, unless environment variables name another


class MetricLogger:
    """Base class of loggers. ``settings`` is the flat config of the run; ``start_step`` the step it continues after."""

    name: str
    without = "nothing is logged there"  # the consequence when the library is not installed

    def __init__(self, out: Path, start_step: int, settings: Mapping[str, Any], note: Note) -> None:
        self._note, self._writer = note, None
        try:
            self._writer = self.open(out, start_step, settings)
        except ImportError:
            note(f"{self.name} is not installed: {self.without}")
        except Exception as failure:  # a full disk, no network, no account: none may end a run
            self._give_up(failure)

    def open(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> Any:
        """Open the library; returns the object that the ``write_`` methods receive."""
        raise NotImplementedError

    def write_scalars(self, writer: Any, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def write_text(self, writer: Any, step: int, name: str, markdown: str) -> None:
        raise NotImplementedError

    def finish(self, writer: Any) -> None:
        raise NotImplementedError

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers by name, such as ``train/loss``; values that are not finite numbers are left out."""
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float) and math.isfinite(x)}
        self._call(self.write_scalars, step, numbers)

    def text(self, step: int, name: str, markdown: str) -> None:
        self._call(self.write_text, step, name, markdown)

    def close(self) -> None:
        self._call(self.finish)
        self._writer = None

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        if self._writer is not None:
            try:
                method(self._writer, *args)
            except Exception as failure:
                self._give_up(failure)

    def _give_up(self, failure: Exception) -> None:
        self._writer = None
        self._note(f"{self.name} cannot be written to: {getattr(failure, 'strerror', None) or failure}")


class TensorBoard(MetricLogger):
    """Event files in ``tensorboard/``."""

    name, without = "tensorboard", "no events are written"

    def open(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = out / "tensorboard"
        # Hide earlier events of the steps that a resumed run repeats.
        return SummaryWriter(str(folder), purge_step=start_step + 1 if folder.exists() else None, flush_secs=30)

    def write_scalars(self, writer: Any, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def write_text(self, writer: Any, step: int, name: str, markdown: str) -> None:
        writer.add_text(name, markdown, step)

    def finish(self, writer: Any) -> None:
        writer.close()


class Wandb(MetricLogger):
    """Weights & Biases; account, project and mode come from ``wandb login`` and its WANDB_ variables."""

    name = "wandb"

    def open(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> Any:
        import wandb

        run_id = _read_run_id(out, self.name) if start_step else None
        project = None if "WANDB_PROJECT" in os.environ else PROJECT
        location: dict[str, Any] = {"project": project, "name": out.name, "dir": str(out)}
        run = wandb.init(**location, config=dict(settings), id=run_id, resume="allow")
        _write_run_id(out, self.name, run.id)
        return run

    def write_scalars(self, writer: Any, step: int, values: dict[str, float]) -> None:
        writer.log(values, step=step)

    def write_text(self, writer: Any, step: int, name: str, markdown: str) -> None:
        import wandb

        writer.log({name: wandb.Html(f"<pre>{html.escape(markdown)}</pre>")}, step=step)

    def finish(self, writer: Any) -> None:
        writer.finish()


class MLflow(MetricLogger):
    """MLflow; the server and the experiment come from its MLFLOW_ variables."""

    name = "mlflow"

    def open(self, out: Path, start_step: int, settings: Mapping[str, Any]) -> Any:
        import mlflow

        if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            mlflow.set_experiment(PROJECT)
        run_id = _read_run_id(out, self.name) if start_step else None
        run = mlflow.start_run(run_id=run_id, run_name=out.name)
        if run_id is None:
            _write_run_id(out, self.name, run.info.run_id)
            items = list(settings.items())
            for first in range(0, len(items), 100):  # MLflow takes at most 100 parameters per request
                mlflow.log_params(dict(items[first : first + 100]))
        return mlflow

    def write_scalars(self, writer: Any, step: int, values: dict[str, float]) -> None:
        writer.log_metrics(values, step=step)

    def write_text(self, writer: Any, step: int, name: str, markdown: str) -> None:
        writer.log_text(markdown, f"{name}/step-{step:06}.md")

    def finish(self, writer: Any) -> None:
        writer.end_run()


LOGGERS: dict[str, type[MetricLogger]] = {logger.name: logger for logger in (TensorBoard, Wandb, MLflow)}


def check_loggers(names: Sequence[str]) -> None:
    """Raise RegardError if the library of a requested logger is not installed; TensorBoard is always optional."""
    for name in names:
        if name != TensorBoard.name and importlib.util.find_spec(name) is None:
            raise RegardError(f'train.loggers={name}: {name} is not installed: pip install "regard[{name}]"')


def _read_run_id(out: Path, name: str) -> str | None:
    path = out / RUN_IDS
    return read_json(path).get(name) if path.exists() else None


def _write_run_id(out: Path, name: str, run_id: str) -> None:
    path = out / RUN_IDS
    run_ids = read_json(path) if path.exists() else {}
    write_atomic(path, to_json({**run_ids, name: run_id}))
