"""One run of a sweep: train, evaluate, measure, write result.json. It runs in a process of its own.

``serve`` is an interpreter that has imported everything and computed nothing; it forks for every run, which saves each
the seconds of importing torch. It answers a line of JSON with the run's exit code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data.sources import open_source
from ..errors import BadModelFile, Diverged, RegardError
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import to_json
from ..models.build import build
from ..text.processor import Processor
from ..training.evaluating import evaluate
from ..training.reporter import peak_memory_mib
from ..training.run_directory import RUN_FILE, RunDirectory, provenance
from ..training.signals import Interrupted
from ..training.tasks import open_task
from ..training.trainer import TrainResult, resume, train
from .sweep import RESULT_FILE, prune

_CURVE = 80
"""Points of a learning curve that a result keeps."""


def run_cell(
    folder: str,
    shared: str,
    config: dict[str, Any],
    fingerprint: str,
    tests: dict[str, str],
    measures: list[str],
    keep: bool,
) -> None:
    """Train as ``config`` says in ``folder``/run and write ``folder``/result.json; raises Interrupted when stopped."""
    root, started = Path(folder), time.perf_counter()
    torch.set_num_threads(1)  # however many run beside it, the sums come out the same
    found: dict[str, Any] = {"fingerprint": fingerprint, "status": "done", "metrics": {}}
    found |= {"keep": keep, "tests": tests, "measures": measures}
    resolved = RunConfig(**config)
    with file_lock(root):  # an orphan of a killed sweep may still be in there: it is waited for
        before = _spent(root)
        try:
            result = _trained(resolved, root / "run", Path(shared))
            found |= {"weights": result.weights, "train_seconds": result.seconds, "steps": result.steps}
            found["metrics"] = dict(result.metrics)
            _need_sound(found | _facts(root / "run"))
            _evaluated(found, root / "run", resolved, tests, measures)
        except Interrupted:
            write_atomic(root / "spent.json", to_json({"seconds": before + time.perf_counter() - started}))
            raise
        except Diverged as failure:
            found |= {"status": "diverged", "message": str(failure)}
        except Exception as failure:  # whatever it was, the table says so, and the other cells go on
            traceback.print_exc()
            found |= {"status": "failed", "message": f"{type(failure).__name__}: {failure}"}
        found |= _facts(root / "run")
        found |= {"seconds": before + time.perf_counter() - started, "memory_mib": peak_memory_mib()}
        write_atomic(root / RESULT_FILE, to_json(_plain(found)))
        if not keep and found["status"] != "failed":
            prune(root)


def _trained(config: RunConfig, run: Path, shared: Path) -> TrainResult:
    """Trained from the start, or from where it was interrupted."""
    if (run / RUN_FILE).exists() and any((run / "checkpoints").glob("step-*")):
        try:
            return resume(run, style="quiet")
        except BadModelFile:  # half copied, or damaged: begin again
            traceback.print_exc()
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    own = config.with_(train=config.train.with_(out=str(run)))
    return train(own, style="quiet", processor=_shared_processor(own, shared))


def _shared_processor(config: RunConfig, shared: Path) -> Processor | None:
    """The tokenizers of this data, made by the first run that needs them; None where a task has more than those."""
    if config.task not in ("translate", "lm", "mlm", "classify"):
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


def _evaluated(found: dict[str, Any], run: Path, config: RunConfig, tests: dict[str, str], measures: list[str]) -> None:
    """What the finished model says of further examples, and what else was asked of it."""
    for name, source in tests.items():
        device = config.train.device
        asked = evaluate(run, {"source": source}, device=device, precision=_precision(run))
        found["metrics"] |= {f"{name}_{key}": value for key, value in asked.metrics.items()}
    for place in measures:
        module, _, function = place.partition(":")
        more = getattr(importlib.import_module(module), function)(run)
        found.setdefault("samples", []).extend(more.pop("samples", []))
        found["metrics"] |= more


def _precision(run: Path) -> Any:
    return json.loads((run / "choice.json").read_bytes())["precision"]


def _need_sound(found: dict[str, Any]) -> None:
    """Loss and gradients may stay finite in a run that has left the road all the same: much worse than guessing (by a
    factor e), and worse than it began."""
    loss, curve = found["metrics"].get("valid_loss"), found.get("curve")
    if loss is None:
        raise RegardError("no held-out loss was computed")
    if not math.isfinite(loss):
        raise Diverged(f"the held-out loss is {loss}")
    if curve and loss > found["guessing"] + 1 and found["train_loss"] > curve[0][1]:
        guess = f"{found['guessing']:.3g}"
        raise Diverged(f"the held-out loss is {loss:.3g}, worse than at the start and than guessing ({guess})")


def _facts(run: Path) -> dict[str, Any]:
    """What the run's own files say, however it ended."""
    if not (run / RUN_FILE).exists():
        return {}
    opened = RunDirectory.open(run)
    model = opened.config.model
    with torch.device("meta"):
        n_parameters = build(model).n_parameters
    data = opened.facts["data"]
    # All that decides which batches there are. Where the files lie does not: the sum of their bytes is known.
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
        "curve": [[line["step"], line["loss_mean"]] for line in steps[:: max(1, len(steps) // _CURVE)]],
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _spent(root: Path) -> float:
    try:
        return float(json.loads((root / "spent.json").read_bytes())["seconds"])
    except (OSError, ValueError, KeyError):
        return 0.0


# ------------------------------------------------------------------------------------- the process


def serve() -> None:
    """Run what each line of the input asks for, in a fork, until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which is in the same group
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer
    forks = _warm()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if not forks:
            print(_exit_code(line), file=answers, flush=True)
            return  # memory and generators are those of a new process for the next run
        child = os.fork()
        if child == 0:
            os._exit(_exit_code(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _warm() -> bool:
    """Import what a run would import later; True where runs may be forks. A GPU already in use does not survive one."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401  only to have it imported

    torch.optim.Adam(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # torch's optimisers import its compiler, which takes seconds
    return hasattr(os, "fork") and not torch.cuda.is_initialized() and os.environ.get("REGARD_FORK") != "0"


def _exit_code(line: str) -> int:
    asked = json.loads(line)
    root = Path(asked["folder"])
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "log.txt", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_leave_with_the_sweep, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        run_cell(**asked)
    except (Interrupted, KeyboardInterrupt):
        return 130
    except RegardError:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _leave_with_the_sweep() -> None:
    """A sweep that was killed takes its runs with it: they would compute beside those of the next one."""
    if not hasattr(select, "poll"):
        return
    watch = select.poll()
    watch.register(0, 0)  # its end of the pipe was closed
    watch.poll()
    os._exit(137)
