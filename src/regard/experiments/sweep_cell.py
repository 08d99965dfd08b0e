"""One run of a sweep: train, evaluate, measure, write result.json; and the measures of finished runs.

A measure maps the directory of a finished run to further metrics by name. Two are defined here: the loss at lengths
beyond training (Press et al. 2022, §2), and the loss of a decoder computed token by token.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pkgutil
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import RunConfig
from ..data.packing import IGNORE
from ..data.sources import open_source
from ..errors import BadModelFile, Diverged, RegardError
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import to_json, to_jsonable
from ..models import Model
from ..models.build import build
from ..text.processor import Processor
from ..training.console_display import Style
from ..training.evaluation import evaluate
from ..training.loss import Batch
from ..training.predictors import open_validation_task
from ..training.reporter import peak_memory_mib
from ..training.run_directory import RUN_FILE, RunDirectory, absolute_paths, provenance
from ..training.signals import Interrupted
from ..training.tasks import TextTask, open_task
from ..training.trainer import TrainResult, resume, train
from .sweep_spec import RESULT_FILE, data_hash, prune_run

FACTORS = (1, 2, 4, 8)  # the multiples of the training length that ``measure_lengths`` evaluates
EXTRAPOLATION_METRICS = tuple(f"loss_{factor}x" for factor in FACTORS)
_CURVE_POINTS = 80  # points of the learning curve in a result
_HELD_OUT_TEXTS, _HELD_OUT_TOKENS, _BATCH_TOKENS = 24, 1 << 16, 1 << 14
_EXAMPLES, _SAMPLES = 64, 3


class CellRun(NamedTuple):
    """One run of a sweep that has not been done yet."""

    cell: str
    seed: int
    folder: Path
    shared: Path  # folder of the tokenizers that all runs of the sweep share
    config: dict[str, Any]
    fingerprint: str
    tests: dict[str, str]
    measures: list[str]
    keep: bool


def run_cell(run: CellRun) -> dict[str, Any] | None:
    """Train in ``folder``/run and write ``folder``/result.json; None if it was interrupted and saved.

    Must be called in a process of its own, whose output goes to log.txt.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "log.txt", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)  # results must not depend on the number of parallel runs
    try:
        with file_lock(run.folder):  # waits for an orphaned run of a killed sweep
            return _train_and_evaluate(run)
    except (Interrupted, KeyboardInterrupt):
        return None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _train_and_evaluate(run: CellRun) -> dict[str, Any]:
    start, root, config = time.perf_counter(), run.folder, RunConfig(**run.config)
    result: dict[str, Any] = {"fingerprint": run.fingerprint, "status": "done", "metrics": {}}
    result |= {"keep": run.keep, "tests": run.tests, "measures": run.measures}
    try:
        seconds_before = float(json.loads((root / "spent.json").read_bytes())["seconds"])
    except (OSError, ValueError, KeyError):
        seconds_before = 0.0
    try:
        outcome = _train_or_resume(config, root / "run", run.shared, "quiet" if run.keep else "records")
        result |= {"weights": outcome.weights, "train_seconds": outcome.seconds, "steps": outcome.steps}
        result["metrics"] = dict(outcome.metrics)
        check_convergence(result | run_facts(root / "run"))
        _evaluate(result, run, config)
    except Interrupted:
        write_atomic(root / "spent.json", to_json({"seconds": seconds_before + time.perf_counter() - start}))
        raise
    except Diverged as failure:
        result |= {"status": "diverged", "message": str(failure)}
    except Exception as failure:  # any failure is reported in the table, and the other cells continue
        traceback.print_exc()
        result |= {"status": "failed", "message": f"{type(failure).__name__}: {failure}"}
    result |= run_facts(root / "run")
    result |= {"seconds": seconds_before + time.perf_counter() - start, "memory_mib": peak_memory_mib()}
    result = to_jsonable(result)
    write_atomic(root / RESULT_FILE, to_json(result))
    if not run.keep and result["status"] != "failed":
        prune_run(root)
    return result


def _train_or_resume(config: RunConfig, run: Path, shared: Path, style: Style) -> TrainResult:
    """Train from scratch, or resume an interrupted run on the same data."""
    if (run / RUN_FILE).exists() and any((run / "checkpoints").glob("step-*")):
        try:
            stored = RunDirectory.open(run)
            before, now = ((x.source, x.valid) for x in (stored.config.data, absolute_paths(config.data)))
            if before == now or stored.facts["data"]["sha256"] == data_hash(config):
                return resume(run, style=style)
        except BadModelFile:  # an incomplete or damaged checkpoint: start over
            traceback.print_exc()
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    config = config.with_(train=config.train.with_(out=str(run)))
    return train(config, style=style, processor=_shared_processor(config, shared))


def _shared_processor(config: RunConfig, shared: Path) -> Processor | None:
    """The tokenizers for this data, trained by the first run that needs them; None for images, or if train.init
    provides them."""
    if config.model.source != "text" or (config.train.init is not None and config.data.tokenizer == "auto"):
        return None
    text = json.dumps([config.task, config.data.model_dump(mode="json")], sort_keys=True)
    root = shared / hashlib.sha256(text.encode()).hexdigest()[:16]
    root.mkdir(parents=True, exist_ok=True)
    with file_lock(root):
        if not (root / "made" / RUN_FILE).exists():
            shutil.rmtree(root / "made", ignore_errors=True)
            source = open_source(config.data)
            processor = open_task(config, source).processor
            RunDirectory.create(root / "made", config, processor, provenance(source, ()))
    return RunDirectory.open(root / "made").processor


def _evaluate(result: dict[str, Any], run: CellRun, config: RunConfig) -> None:
    """Add the finished model's metrics on the further examples, and those of the measures, to the result."""
    model = run.folder / "run"
    for name, source in run.tests.items():
        precision = json.loads((model / "choice.json").read_bytes())["precision"]
        evaluation = evaluate(model, {"source": source}, device=config.train.device, precision=precision)
        result["metrics"] |= {f"{name}_{key}": value for key, value in evaluation.metrics.items()}
    for measure in run.measures:
        metrics = pkgutil.resolve_name(measure)(model)
        result.setdefault("samples", []).extend(metrics.pop("samples", []))
        result["metrics"] |= metrics


def check_convergence(result: dict[str, Any]) -> None:
    """Raise Diverged if the loss is not finite, or is 1 nat worse than guessing and above its initial value."""
    loss, curve = result["metrics"].get("valid_loss"), result.get("curve")
    if loss is None:
        raise RegardError("no held-out loss was computed")
    if not math.isfinite(loss):
        raise Diverged(f"the held-out loss is {loss}")
    if curve and loss > result["guessing"] + 1 and result["train_loss"] > curve[0][1]:
        guess = f"{result['guessing']:.3g}"
        raise Diverged(f"the held-out loss is {loss:.3g}, worse than at the start and than guessing ({guess})")


def run_facts(run: Path) -> dict[str, Any]:
    """Facts from the run's own files, which exist however it ended."""
    if not (run / RUN_FILE).exists():
        return {}
    opened = RunDirectory.open(run)
    model, data = opened.config.model, opened.facts["data"]
    with torch.device("meta"):
        n_parameters = build(model).n_parameters
    # Everything that determines the batches: the hash of the data, not its path.
    reading = opened.config.data.model_dump(mode="json", exclude={"source", "valid"})
    batches = opened.config.train.model_dump(include={"batch_tokens", "batch_size", "accumulate", "seed"})
    order: list[Any] = [data["sha256"], sorted(reading.items()), sorted(batches.items())]
    order += [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(run.glob("tokenizer*.json"))]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines() if line.endswith("}")]
    steps = [line for line in lines if "loss_mean" in line]
    last = steps[-max(1, len(steps) // 10) :]
    return {
        "parameters": n_parameters,
        "guessing": math.log(model.n_classes if model.head == "classify" else model.output_vocab_size),
        "data_sha256": data["sha256"],
        "order": hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16],
        "reached": steps[-1]["step"] if steps else 0,
        "train_loss": sum(line["loss_mean"] for line in last) / len(last) if last else None,
        "curve": [[line["step"], line["loss_mean"]] for line in steps[:: max(1, len(steps) // _CURVE_POINTS)]],
    }


# ------------------------------------------------------------------------------------- measures of finished runs


def _open_run(run: Path) -> tuple[Any, Any]:
    """The trained system of a run, and its task with the run's data."""
    return open_validation_task(run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def measure_lengths(run: Path) -> dict[str, Any]:
    """Losses of a language model at FACTORS times its training length, ``loss_1x`` …; ``cannot`` gives the reason for a
    missing one."""
    system, task = _open_run(run)
    tokens = cast(TextTask, task).token_file(task.examples("valid", _HELD_OUT_TEXTS)).tokens
    length = system.config.data.max_len
    losses, refusals = losses_by_length(system.model, tokens, [factor * length for factor in FACTORS])
    metrics = {f"loss_{n // length}x": loss for n, loss in losses.items()}
    return {**metrics, "cannot": {f"loss_{n // length}x": why for n, why in refusals.items()}}


def losses_by_length(model: Model, tokens: np.ndarray, lengths: list[int]) -> tuple[dict[int, float], dict[int, str]]:
    """Mean −log p of the same tokens in pieces of each length, and the reason where the model refuses a length.

    Longer pieces give more context: with a position scheme that extrapolates the loss falls, with others it rises. A
    table of learned positions has no entries beyond the training length, so such a model refuses longer pieces.
    """
    longest = max(lengths)
    n_pieces = min(_HELD_OUT_TOKENS, len(tokens) - 1) // longest
    if n_pieces < 1:
        raise ValueError(f"{len(tokens):,} held-out tokens are too few for one piece of {longest + 1:,}")
    starts = np.linspace(0, len(tokens) - 1 - longest, n_pieces).astype(np.int64)  # spread over the whole text
    text = torch.from_numpy(np.stack([tokens[start : start + longest + 1] for start in starts]).astype(np.int64))
    losses, refusals = {}, {}
    for length in lengths:
        try:
            losses[length] = _mean_loss(model, text[:, :-1].reshape(-1, length), text[:, 1:].reshape(-1, length))
        except ValueError as error:
            refusals[length] = str(error)
    return losses, refusals


@torch.no_grad()
def _mean_loss(model: Model, inputs: Tensor, targets: Tensor) -> float:
    total, rows = 0.0, max(1, _BATCH_TOKENS // inputs.shape[1])
    for batch, labels in zip(inputs.split(rows), targets.split(rows), strict=True):
        logits = model(batch.to(model.device)).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.to(model.device).flatten(), reduction="sum"))
    return total / targets.numel()


def token_by_token_loss(model: Model, batch: Batch) -> tuple[float, int]:
    """The sum of −log p(y_t | x, y_<t) over the batch's targets, from forward passes over y_<t alone, and their number.

    With a causal mask this equals the ordinary loss. Without one the ordinary loss sees the answer in the input, and
    only this one shows what was learned.
    """
    *sources, target_inputs = batch.inputs
    total, n_targets = 0.0, 0
    for t in range(1, target_inputs.shape[1] + 1):
        labels = batch.targets[:, t - 1]  # (B,)
        output = model(*sources, target_inputs[:, :t], **batch.options)
        logits = (output if isinstance(output, Tensor) else output.logits)[:, -1]  # (B, V)
        total += float(F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum"))
        n_targets += int((labels != IGNORE).sum())
    return total, n_targets


def measure_token_by_token(run: Path) -> dict[str, Any]:
    """The token-by-token loss on the first held-out examples of a run, and a few sample outputs."""
    system, task = _open_run(run)
    if (head := system.config.model.head) != "lm":
        raise ValueError(f"the token-by-token loss needs a model that generates, not head={head}")
    total, n_targets = 0.0, 0
    with torch.no_grad():
        for batch in task.valid_batches(task.examples("valid", _EXAMPLES)):
            loss, n = token_by_token_loss(system.model, batch.to(system.model.device))
            total, n_targets = total + loss, n_targets + n
    return {"loss_token_by_token": total / n_targets, "samples": task.sample(system.model, _SAMPLES)}
