"""Executes the runs of a sweep in separate processes, several at a time, on this machine or on a Ray cluster.

A ``Runner`` makes each call in a fresh process, so that calls share neither memory nor random generators, and one that
crashes or is killed does not affect the others. ``run_sweep`` submits the unfinished runs of a sweep to it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from ..data.corpora import CORPORA
from ..errors import RegardError, UsageError
from ..foundation.checks import check_positive
from ..foundation.device import n_cores
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import to_json
from ..foundation.plugins import import_optional
from ..training.signals import Interrupted, Signals
from .sweep_cell import CellRun, run_cell
from .sweep_report import SweepReport, write_report
from .sweep_spec import FINAL, RESULT_FILE, SWEEP_FILE, Sweep, fingerprint, prune_run, read_result, run_folder

A = TypeVar("A")
R = TypeVar("R")
_SAVE_SECONDS = 30.0  # time for a run to save and stop when it is interrupted
# Imported once by the fork server; torch's optimisers import its compiler, which takes seconds.
_PRELOAD = [
    *("regard.experiments.sweep_runner", "regard.experiments.bench_attention", "torch._dynamo"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard", "sacrebleu", "rich.live"),
]

# ------------------------------------------------------------------------------------- runners


class JobFailed(RegardError):
    """A job raised an exception, its process died, or it took too long."""


class JobLost(JobFailed):
    """The process of a job died or was killed; the same job may succeed elsewhere."""


class Runner(ABC):
    """Calls functions of one argument, each in a process of its own, ``workers`` at a time."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="job")

    def submit(self, function: Callable[[A], R], argument: A, max_seconds: float | None = None) -> Future[R]:
        """A future of the result, or of JobFailed; function, argument and result must be picklable."""
        return self._threads.submit(self._call, function, argument, max_seconds)

    @abstractmethod
    def _call(self, function: Callable[[A], R], argument: A, max_seconds: float | None) -> R:
        """Make the call in another process and wait for it; runs in a thread."""

    @abstractmethod
    def stop(self, force: bool = False) -> None:
        """Tell the running jobs to save and stop, as Ctrl-C does; ``force`` kills them."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop(force=True)
        self._threads.shutdown(cancel_futures=True)


class LocalRunner(Runner):
    """Processes on this machine, forked from one that has imported torch and computed nothing.

    Without fork, or with REGARD_FORK=0, every job starts a new interpreter instead.
    """

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        fork = "forkserver" in multiprocessing.get_all_start_methods() and os.environ.get("REGARD_FORK") != "0"
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            self._context.set_forkserver_preload(_PRELOAD)
        self._start_lock, self._lock = threading.Lock(), threading.Lock()
        self._stopping = False
        self._processes: dict[BaseProcess, bool] = {}  # True once the job has begun and can save

    def _call(self, function: Callable[[A], R], argument: A, max_seconds: float | None) -> R:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_job_process, args=(sender, dict(os.environ), function, argument))
        with self._start_lock, _child_environment():
            process.start()
        sender.close()
        with self._lock:
            self._processes[process] = False
        try:
            if self._stopping:
                raise JobFailed("stopped before it started")
            _receive(receiver, process, None)
            with self._lock:
                self._processes[process] = True
            ok, value = _receive(receiver, process, max_seconds)
        except TimeoutError:
            raise JobFailed(f"it took longer than max_seconds={max_seconds:g}") from None
        finally:
            with self._lock:
                del self._processes[process]
            process.join(0 if sys.exc_info()[0] else 5)
            _kill(process)
            process.join()
            receiver.close()
        if not ok:
            raise JobFailed(value)
        return value

    def stop(self, force: bool = False) -> None:
        self._stopping = True
        with self._lock:
            for process, begun in self._processes.items():
                if force or not begun or not hasattr(os, "killpg"):  # nothing to save yet, or no signals
                    _kill(process)
                else:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid or 0, signal.SIGINT)


def _receive(receiver: Connection, process: BaseProcess, seconds: float | None) -> Any:
    """The child's next message. Raises JobLost if it exits without one, TimeoutError after ``seconds``."""
    if not wait_for_connections([receiver, process.sentinel], seconds):
        raise TimeoutError
    with suppress(EOFError):
        if receiver.poll():
            return receiver.recv()
    process.join()
    raise JobLost(f"its process ended with exit status {process.exitcode}")


def _kill(process: BaseProcess) -> None:
    """Kill a process and its children, which are in its process group."""
    with suppress(ProcessLookupError):
        process.kill()
        if hasattr(os, "killpg"):
            os.killpg(process.pid or 0, signal.SIGKILL)


@contextmanager
def _child_environment() -> Iterator[None]:
    """Context in which processes, and the fork server, are started.

    It hides the caller's ``__main__``, which multiprocessing would import again in every child: jobs do not need it,
    and a script without a main guard would run again. SIGINT is blocked, so that Ctrl-C reaches only the caller, which
    then interrupts the jobs. torch looks for GPUs through NVML, because a process that forks must not initialise CUDA.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    changes = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        sys.modules["__main__"] = main


def _job_process(sender: Connection, environment: dict[str, str], function: Callable[[A], object], argument: A) -> None:
    """The main function of a LocalRunner process."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        """Exit if the sweep is killed; otherwise its runs would compete with those of the next one."""
        parent.join()
        os._exit(137)

    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    sender.send("begun")  # imports are done, so the time limit starts here
    try:
        message: tuple[bool, object] = (True, function(argument))
    except BaseException as failure:  # any failure is reported to the caller
        traceback.print_exc()
        message = (False, f"{type(failure).__name__}: {failure}")
    sender.send(message)


class RayRunner(Runner):
    """Workers of a Ray cluster: ``ray`` for the one this machine belongs to, ``ray://HOST:PORT`` for another.

    The nodes need this version of regard, and the data at the same paths. Results come back whether or not the sweep's
    directory is shared, but an interrupted run can resume from its checkpoint only in a shared directory. A time limit
    includes the start of a worker. With ``fresh=False`` a worker process makes several calls and can keep state between
    them.
    """

    def __init__(self, address: str, workers: int | None = None, *, fresh: bool = True) -> None:
        ray, self._connected_here = connect_ray(address)
        self._ray = ray
        resources = ray.cluster_resources()
        super().__init__(workers or max(1, int(resources.get("CPU", 1))))
        n_gpus = 0.25 if resources.get("GPU") else 0  # runs are small, so four share a GPU
        # A fresh worker exits after one call; failed calls are not retried.
        options = ray.remote(num_cpus=1, num_gpus=n_gpus, max_calls=1 if fresh else 0, max_retries=0)
        self._remote, self._references = options(_ray_job()), set[Any]()

    def _call(self, function: Callable[[A], R], argument: A, max_seconds: float | None) -> R:
        ray, variables = self._ray, {name: x for name, x in os.environ.items() if name.startswith("REGARD_")}
        reference = self._remote.remote(os.getcwd(), sys.path, variables, pickle.dumps((function, argument)))
        self._references.add(reference)
        try:
            if not ray.wait([reference], timeout=max_seconds)[0]:
                ray.cancel(reference, force=True)
                raise JobFailed(f"it took longer than max_seconds={max_seconds:g}")
            return ray.get(reference)
        except ray.exceptions.RayTaskError as failure:
            raise JobFailed(f"{type(failure.cause).__name__}: {failure.cause}") from None
        except ray.exceptions.RayError as failure:
            raise JobLost(f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}") from None
        finally:
            self._references.discard(reference)

    def stop(self, force: bool = False) -> None:
        for reference in list(self._references):
            self._ray.cancel(reference, force=force)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._connected_here:
            self._ray.shutdown()


def connect_ray(address: str) -> tuple[Any, bool]:
    """The ray module, connected, and whether this call connected it; then the caller must disconnect."""
    ray = import_optional("ray", f"on={address}", "cluster")
    if ray.is_initialized():
        return ray, False
    try:
        ray.init("auto" if address == "ray" else address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        reason = f"no Ray cluster answers ({str(error).partition(chr(10))[0]}); start one with ray start --head"
        raise RegardError(f"on={address}: {reason}") from None
    return ray, True


def _ray_job() -> Callable[..., Any]:
    """The function that Ray workers call.

    It is a local function, which Ray pickles by value, because regard may not be importable in the worker until the
    caller's import path is set.
    """

    def call_job(directory: str, path: list[str], variables: dict[str, str], job: bytes) -> Any:
        import contextlib
        import os
        import pickle
        import sys

        sys.path += [entry for entry in path if entry not in sys.path]
        os.environ.update(variables)
        with contextlib.suppress(OSError):
            os.chdir(directory)
        function, argument = pickle.loads(job)
        return function(argument)

    return call_job


def open_runner(on: str, jobs: int | None, max_workers: int, *, fresh: bool = True) -> Runner:
    """The runner ``local``, ``ray`` or ``ray://HOST:PORT`` with ``jobs`` workers, but at most ``max_workers``.

    The default is one worker per core, since a run uses one thread; with a GPU, which they share, at most four.
    """
    check_runner(on)
    if on != "local":
        return RayRunner(on, None if jobs is None else min(jobs, max_workers), fresh=fresh)
    default = min(4, n_cores()) if torch.cuda.is_available() else n_cores()
    return LocalRunner(min(jobs or default, max_workers))


def check_runner(on: str) -> None:
    if on not in ("local", "ray") and not on.startswith("ray://"):
        raise UsageError(f"on={on} is not one of local, ray, ray://HOST:PORT")


# ------------------------------------------------------------------------------------- all runs of a sweep


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    jobs: int | None = None,
    minutes: float | None = None,
    max_seconds: float | None = None,
    keep: bool = False,
    progress: Callable[[str], None] | None = None,
    on: str = "local",
) -> SweepReport:
    """Execute the unfinished runs, each (cell, seed) in its own process, ``jobs`` at a time; then write the report.

    minutes      stop after this time; unfinished runs are saved and resumed by the next call
    max_seconds  a run that takes longer counts as failed
    keep         keep the weights of finished runs
    on           local, ray (the cluster this machine belongs to) or ray://HOST:PORT
    All cells are run with one seed before the next, so that a sweep cut short has results for every cell. Ctrl-C saves
    the running jobs and raises ``Interrupted``.
    """
    out, report = Path(out), progress or (lambda line: None)
    for cell in sweep.rows:
        sweep.config(cell)  # an invalid cell is refused before anything is run
    sweep.check_measures(out / SWEEP_FILE)
    check_positive(jobs=jobs)
    check_runner(on)
    out.mkdir(parents=True, exist_ok=True)
    with file_lock(out, "is in use by another sweep"):
        sweep.write(out)
        waiting, n_done = unfinished_runs(sweep, out, keep)
        n_all = len(waiting) + n_done
        if n_done:
            report(f"{n_done} of {n_all} runs are already done")
        if waiting:
            if on == "local":
                _check_tests(sweep)
            with open_runner(on, jobs, len(waiting)) as runner:
                _Schedule(out, runner, n_done, n_all, report).run(waiting, minutes, max_seconds)
    return write_report(out, sweep)


def _check_tests(sweep: Sweep) -> None:
    """Raise UsageError for a missing file of further examples; otherwise every run would fail, after its training."""
    for name, source in sweep.tests.items():
        if source in CORPORA or source.startswith("hf:") or Path(source).expanduser().exists():
            continue
        for file in map(str.strip, source.split(",")):
            if not Path(file).expanduser().exists():
                raise UsageError(f"the examples {name}={source}: there is no file {file}")


def unfinished_runs(sweep: Sweep, out: Path, keep: bool) -> tuple[list[CellRun], int]:
    """The runs without a final result, and the number of runs with one."""
    waiting, n_done, shared = [], 0, (out / "shared").absolute()
    for seed, cell in product(sweep.seeds, sweep.rows):
        config, folder = sweep.config(cell, seed), run_folder(out, cell.name, seed)
        digest, result = fingerprint(config), read_result(out, cell.name, seed)
        if result is None or result["status"] not in FINAL:
            run = CellRun(
                cell.name,
                seed,
                folder=folder.absolute(),
                shared=shared,
                config=config.model_dump(mode="json"),
                fingerprint=digest,
                tests=dict(sweep.tests),
                measures=list(sweep.measures),
                keep=keep,
            )
            waiting.append(run)
            continue
        if result.get("fingerprint") != digest:
            raise RegardError(f"{folder} was run with other settings; choose another directory with --out")
        if result.get("keep") is False:  # a run that was killed before it pruned itself has left its weights
            prune_run(folder)
        n_done += 1
    return waiting, n_done


class _Schedule:
    """Starts runs while there is time, collects their results, and stops them at the deadline or on a signal."""

    def __init__(self, out: Path, runner: Runner, n_done: int, n_all: int, report: Callable[[str], None]) -> None:
        self.out, self.runner, self.n_done, self.n_all, self.report = out, runner, n_done, n_all, report
        self.n_before, self.start, self.longest = n_done, time.monotonic(), 0.0
        self.running: dict[Future[dict[str, Any] | None], tuple[CellRun, float]] = {}

    def run(self, waiting: list[CellRun], minutes: float | None, max_seconds: float | None) -> None:
        deadline = math.inf if minutes is None else self.start + 60 * minutes
        with Signals() as signals:
            while not signals.exit_code and time.monotonic() <= deadline:
                # A run that would probably not finish in time is not started.
                while waiting and len(self.running) < self.runner.workers:
                    if time.monotonic() + self.longest >= deadline:
                        break
                    run = waiting.pop(0)
                    future = self.runner.submit(run_cell, run, max_seconds)
                    self.running[future] = run, time.monotonic()
                if not self.running:
                    break
                self._collect()
            left, before = len(waiting) + len(self.running), self.n_done
            if self.running:
                self.runner.stop()
                until = time.monotonic() + _SAVE_SECONDS
                while self.running and time.monotonic() < until:
                    self._collect(stopping=True)
            left -= self.n_done - before  # runs that finished while stopping
        if signals.exit_code:
            message = f"stopped with {left} of {self.n_all} runs to do; run the same command to continue"
            raise Interrupted(message, signals.exit_code)
        if left:
            self.report(f"time is up with {left} of {self.n_all} runs to do; run the same command to continue")

    def _collect(self, stopping: bool = False) -> None:
        for future in wait(self.running, 0.25, FIRST_COMPLETED)[0]:
            run, start = self.running.pop(future)
            try:
                result = future.result()
            except Exception as failure:  # an exception fails only its own run
                if stopping:
                    continue
                reason = str(failure)
                if "exit status" in reason:
                    reason += f"; see {run_folder(self.out, run.cell, run.seed) / 'log.txt'}"
                failed = {"fingerprint": run.fingerprint, "status": "failed", "message": reason, "metrics": {}}
                _write_result(run, failed)
                self.report(f"{run.cell}, seed {run.seed}: failed: {reason}")
            else:
                if result is not None:  # None: interrupted, and saved
                    self._record(run, result, time.monotonic() - start)

    def _record(self, run: CellRun, result: dict[str, Any], seconds: float) -> None:
        if read_result(self.out, run.cell, run.seed) is None:  # it ran on a node that does not share this directory
            _write_result(run, result)
        self.n_done += 1
        self.longest = max(self.longest, seconds)
        outcome = f"{result['status']}: {result.get('message', '')}"
        if result["status"] == "done":
            metrics = {name: result["metrics"].get(name) for name in ("valid_loss", "bleu", "accuracy", "test_bleu")}
            outcome = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)
        spent, done = time.monotonic() - self.start, max(1, self.n_done - self.n_before)
        left = self.n_all - self.n_done
        estimate = f"; about {spent / done * left / 60:.1f} min left" if left > 0 else ""
        name = f"[{self.n_done}/{self.n_all}] {run.cell}, seed {run.seed}"
        self.report(f"{name}: {outcome}, {result['seconds']:.0f} s{estimate}")


def _write_result(run: CellRun, result: dict[str, Any]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run.folder / RESULT_FILE, to_json(result))
