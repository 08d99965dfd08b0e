"""The runs of a sweep, each in a process of its own, several at once, on this machine or on a Ray cluster.

A ``Runner`` calls functions, each in a fresh process: memory and random generators are that call's own, and a call that
crashes or is killed fails alone. ``run_sweep`` gives it the runs of a sweep that are not done yet.
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

from ..errors import RegardError, UsageError
from ..foundation.checks import check_positive
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import to_json
from ..training.signals import Interrupted, Signals
from .sweep_cell import CellRun, run_cell
from .sweep_report import SweepReport, write_report
from .sweep_spec import FINAL, RESULT_FILE, SWEEP_FILE, Sweep, fingerprint, prune_run, read_result, run_folder

A = TypeVar("A")
R = TypeVar("R")
_SAVE_SECONDS = 30.0  # how long a run that was asked to save and stop may take
# Imported once by the process that forks for every job; torch's optimisers import its compiler, which takes seconds.
_PRELOAD = [
    *("regard.experiments.sweep_runner", "regard.experiments.bench_attention", "torch._dynamo"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard", "sacrebleu", "rich.live"),
]

# ------------------------------------------------------------------------------------- runners


class JobFailed(RegardError):
    """A job raised, its process ended by itself or was killed, or it took too long."""


class Runner(ABC):
    """Calls functions of one argument, each in a process of its own, ``workers`` at once."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="job")

    def submit(self, function: Callable[[A], R], argument: A, max_seconds: float | None = None) -> Future[R]:
        """The result to come, or JobFailed; function, argument and result must be picklable."""
        return self._threads.submit(self._call, function, argument, max_seconds)

    @abstractmethod
    def _call(self, function: Callable[[A], R], argument: A, max_seconds: float | None) -> R:
        """Run it elsewhere and wait for it; called in a thread."""

    @abstractmethod
    def stop(self, force: bool = False) -> None:
        """Ask the running jobs to save and stop, as Ctrl-C does; ``force`` ends them at once."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop(force=True)
        self._threads.shutdown(cancel_futures=True)


class LocalRunner(Runner):
    """Processes of this machine, forked from one that has imported torch and computed nothing.

    Where there is no fork, or REGARD_FORK=0, every job starts a new interpreter instead.
    """

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        fork = "forkserver" in multiprocessing.get_all_start_methods() and os.environ.get("REGARD_FORK") != "0"
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            self._context.set_forkserver_preload(_PRELOAD)
        self._start_lock, self._lock, self._stopping = threading.Lock(), threading.Lock(), False
        self._processes: dict[BaseProcess, bool] = {}  # True: the job has begun, so it can save

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
                raise JobFailed("stopped before it began")
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
                if force or not begun or not hasattr(os, "killpg"):  # nothing to save yet, or no way to say so
                    _kill(process)
                else:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid or 0, signal.SIGINT)


def _receive(receiver: Connection, process: BaseProcess, seconds: float | None) -> Any:
    """The child's next message; JobFailed when it ended without one."""
    if not wait_for_connections([receiver, process.sentinel], seconds):
        raise TimeoutError
    with suppress(EOFError):
        if receiver.poll():
            return receiver.recv()
    process.join()
    raise JobFailed(f"its process ended with exit status {process.exitcode}")


def _kill(process: BaseProcess) -> None:
    """The process and what it has started, which is in its group."""
    with suppress(ProcessLookupError):
        process.kill()
        if hasattr(os, "killpg"):
            os.killpg(process.pid or 0, signal.SIGKILL)


@contextmanager
def _child_environment() -> Iterator[None]:
    """How processes are started, and the one that forks for them.

    multiprocessing would import the caller's script again in each: jobs need nothing of it, and one without a main
    guard would start itself anew. Ctrl-C reaches the caller alone, who then interrupts the jobs. Asking NVML whether
    there is a GPU leaves CUDA untouched, which a process that forks must.
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
    """What a process of LocalRunner does."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        """A sweep that was killed takes its runs with it: they would compute beside those of the next one."""
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
    sender.send("begun")  # everything is imported: the time limit counts from here
    try:
        message: tuple[bool, object] = (True, function(argument))
    except BaseException as failure:  # the caller is told whatever it was
        traceback.print_exc()
        message = (False, f"{type(failure).__name__}: {failure}")
    sender.send(message)


class RayRunner(Runner):
    """Workers of a running Ray cluster: ``ray`` the one this machine belongs to, ``ray://HOST:PORT`` another.

    The nodes need this version of regard, and the data at the same place. Sweep directories may be shared or not: a
    result comes back either way, but only a shared directory lets an interrupted run go on from its checkpoint. A time
    limit includes the start of a worker.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise RegardError("on=ray needs Ray: pip install 'regard[cluster]'") from None
        self._ray = ray
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            try:
                ray.init("auto" if address == "ray" else address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError) as error:
                why = f"no Ray cluster answers ({str(error).partition(chr(10))[0]}); ray start --head begins one"
                raise RegardError(f"on={address}: {why}") from None
        resources = ray.cluster_resources()
        super().__init__(workers or max(1, int(resources.get("CPU", 1))))
        n_gpus = 0.25 if resources.get("GPU") else 0  # runs are small: four share a GPU
        # A worker ends after one call, and a call that failed is not repeated.
        options = ray.remote(num_cpus=1, num_gpus=n_gpus, max_calls=1, max_retries=0)
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
            raise JobFailed(f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}") from None
        finally:
            self._references.discard(reference)

    def stop(self, force: bool = False) -> None:
        for reference in list(self._references):
            self._ray.cancel(reference, force=force)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._connected_here:
            self._ray.shutdown()


def _ray_job() -> Callable[..., Any]:
    """The function that Ray workers call. It is local, hence sent by value: this package need not be importable before
    the caller's import path is set."""

    def call_job(directory: str, path: list[str], variables: dict[str, str], job: bytes) -> Any:
        import contextlib
        import os
        import pickle
        import sys

        sys.path += [place for place in path if place not in sys.path]
        os.environ.update(variables)
        with contextlib.suppress(OSError):
            os.chdir(directory)
        function, argument = pickle.loads(job)
        return function(argument)

    return call_job


def open_runner(on: str, jobs: int | None, most: int) -> Runner:
    """``local``, ``ray`` or ``ray://HOST:PORT`` with ``jobs`` workers, or one a core; never over ``most``.

    A run computes with one thread, so there are as many as cores; on a GPU, which they share, four.
    """
    check_runner(on)
    if on != "local":
        return RayRunner(on, None if jobs is None else min(jobs, most))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LocalRunner(min(jobs or (min(4, cores) if torch.cuda.is_available() else cores), most))


def check_runner(on: str) -> None:
    if on not in ("local", "ray") and not on.startswith("ray://"):
        raise UsageError(f"on={on} is none of local, ray, ray://HOST:PORT")


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
    """Run what is not yet done, each (cell, seed) in a process of its own, ``jobs`` of them at once; then report.

    minutes      stop in time to be done after so many: what is in flight is saved, the next call goes on
    max_seconds  a run that takes longer has failed
    keep         leave the weights of finished runs where they are
    on           local, ray (the cluster this machine belongs to) or ray://HOST:PORT
    Seeds go round by round, so that a sweep cut short has seen every cell. Ctrl-C saves what is in flight and raises
    ``Interrupted``.
    """
    out, report = Path(out), progress or (lambda line: None)
    for cell in sweep.rows:
        sweep.config(cell)  # what cannot be meant is refused before anything is run
    sweep.check_measures(out / SWEEP_FILE)
    check_positive(jobs=jobs)
    check_runner(on)
    out.mkdir(parents=True, exist_ok=True)
    with file_lock(out, "is being swept by another process"):
        sweep.write(out)
        waiting, n_done = unfinished_runs(sweep, out, keep)
        n_all = len(waiting) + n_done
        if n_done:
            report(f"{n_done} of {n_all} runs are done already")
        if waiting:
            with open_runner(on, jobs, len(waiting)) as runner:
                _Schedule(out, runner, n_done, n_all, report).run(waiting, minutes, max_seconds)
    return write_report(out, sweep)


def unfinished_runs(sweep: Sweep, out: Path, keep: bool) -> tuple[list[CellRun], int]:
    """The runs without a final result, and the number of those with one."""
    waiting, n_done, shared = [], 0, (out / "shared").absolute()
    for seed, cell in product(sweep.seeds, sweep.rows):
        config, folder = sweep.config(cell, seed), run_folder(out, cell.name, seed)
        mark, known = fingerprint(config), read_result(out, cell.name, seed)
        if known is None or known["status"] not in FINAL:
            asked = dict(sweep.tests), list(sweep.measures), keep
            fields = config.model_dump(mode="json")
            waiting.append(CellRun(cell.name, seed, folder.absolute(), shared, fields, mark, *asked))
            continue
        if known.get("fingerprint") != mark:
            raise RegardError(f"{folder} was run with other settings; --out names another directory")
        if known.get("keep") is False:  # killed just then, a run may have left its weights
            prune_run(folder)
        n_done += 1
    return waiting, n_done


class _Schedule:
    """Starts runs while there is time, collects their results, and stops them when asked to."""

    def __init__(self, out: Path, runner: Runner, n_done: int, n_all: int, report: Callable[[str], None]) -> None:
        self.out, self.runner, self.n_done, self.n_all, self.report = out, runner, n_done, n_all, report
        self.n_before, self.start, self.longest = n_done, time.monotonic(), 0.0
        self.running: dict[Future[dict[str, Any] | None], tuple[CellRun, float]] = {}

    def run(self, waiting: list[CellRun], minutes: float | None, max_seconds: float | None) -> None:
        deadline = math.inf if minutes is None else self.start + 60 * minutes
        with Signals() as signals:
            while not signals.asked and time.monotonic() <= deadline:
                # A run that is not likely to be done in time is not started.
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
            left -= self.n_done - before  # what was done while it was asked to stop
        if signals.asked:
            message = f"stopped with {left} of {self.n_all} runs to do; starting it again goes on"
            raise Interrupted(message, signals.asked)
        if left:
            self.report(f"time is up with {left} of {self.n_all} runs to do; starting it again goes on")

    def _collect(self, stopping: bool = False) -> None:
        for future in wait(self.running, 0.25, FIRST_COMPLETED)[0]:
            run, start = self.running.pop(future)
            try:
                result = future.result()
            except Exception as failure:  # whatever a job raised fails its own run only
                if stopping:
                    continue
                why = str(failure)
                if "exit status" in why:
                    why += f"; {run_folder(self.out, run.cell, run.seed) / 'log.txt'} may say why"
                failed = {"fingerprint": run.fingerprint, "status": "failed", "message": why, "metrics": {}}
                _write_result(run, failed)
                self.report(f"{run.cell}, seed {run.seed}: failed: {why}")
            else:
                if result is not None:  # None: interrupted, and saved
                    self._record(run, result, time.monotonic() - start)

    def _record(self, run: CellRun, result: dict[str, Any], seconds: float) -> None:
        if read_result(self.out, run.cell, run.seed) is None:  # a node that does not share this directory
            _write_result(run, result)
        self.n_done += 1
        self.longest = max(self.longest, seconds)
        outcome = f"{result['status']}: {result.get('message', '')}"
        if result["status"] == "done":
            metrics = {name: result["metrics"].get(name) for name in ("valid_loss", "bleu", "accuracy", "test_bleu")}
            outcome = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)
        spent, done = time.monotonic() - self.start, max(1, self.n_done - self.n_before)
        left = self.n_all - self.n_done
        guess = f"; about {spent / done * left / 60:.1f} min left" if left > 0 else ""
        name = f"[{self.n_done}/{self.n_all}] {run.cell}, seed {run.seed}"
        self.report(f"{name}: {outcome}, {result['seconds']:.0f} s{guess}")


def _write_result(run: CellRun, result: dict[str, Any]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run.folder / RESULT_FILE, to_json(result))
