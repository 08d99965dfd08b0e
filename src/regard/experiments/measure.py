"""Time and peak memory of one piece of work, each measured in a process of its own.

A process that has already computed something answers wrongly: memory it has freed but kept hides the next peak.
``Children`` holds one interpreter that has imported torch and computed nothing. It forks for every question, which
takes milliseconds where a new interpreter would take seconds; as it never computes, it has no threads to lose.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import RegardError


@dataclass(frozen=True)
class Measured:
    """The best time of several runs, and how far the first one raised the resident memory above what was there."""

    seconds: float
    peak_bytes: int
    runs: int


def measure(work: Callable[[], object], *, enough_s: float, most_runs: int = 20) -> Measured:
    """Run ``work`` until ``enough_s`` seconds are spent. Only in a fresh process does the memory mean anything."""
    before, peak, times = peak_resident(), 0, list[float]()
    while not times or (sum(times) < enough_s and len(times) < most_runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        # Later runs would count again what the allocator has not yet taken back from the first.
        peak = peak or peak_resident()
    return Measured(min(times), max(0, peak - before), len(times))


def peak_resident() -> int:
    """The most memory this process has held so far, in bytes."""
    import resource  # POSIX only; so is fork

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Children:
    """Functions called each in a fresh process: ``children.call("module:function", argument=…)``, JSON in and out."""

    def __init__(self, imports: str) -> None:
        """``imports``: the module to have ready in every child."""
        if not hasattr(os, "fork"):
            raise RegardError(f"measuring memory needs a system with fork; {sys.platform} has none")
        start = f"import sys; sys.path[:] = {sys.path!r}; import {imports}; from {__name__} import serve; serve()"
        # A process group of its own: Ctrl-C is the business of whoever asked, who then ends server and fork together.
        self._server = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )

    def call(self, function: str, **arguments: Any) -> Any:
        """What the function returns; ``RegardError`` with what it raised, or with how its process ended."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then the answer below is missing too
            print(json.dumps([function, arguments]), file=self._server.stdin, flush=True)
        line = self._server.stdout.readline()
        answer = json.loads(line) if line else {"error": "the measuring process ended"}
        if "error" in answer:
            raise RegardError(answer["error"])
        return answer["result"]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()  # its signal to leave
        try:
            self._server.wait(timeout=5 if failure is None else 0)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server.stdout.close()


def serve() -> None:
    """Answer one request a line, each in a fork, until the input ends."""
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(_in_a_fork(function, arguments), flush=True)


def _in_a_fork(function: str, arguments: dict[str, Any]) -> str:
    answers, answer_here = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        with os.fdopen(answer_here, "w") as out:
            out.write(_answer(function, arguments))
        os._exit(0)  # without the clean-up that is the server's to do
    os.close(answer_here)
    with os.fdopen(answers) as answer:
        text = answer.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text or json.dumps({"error": f"{function} ended with exit status {ended}"})


def _answer(function: str, arguments: dict[str, Any]) -> str:
    try:
        module, name = function.split(":")
        call = cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
        return json.dumps({"result": call(**arguments)}, allow_nan=False)
    except Exception as failure:  # whatever it was, the parent is told; this process has no one else to tell
        return json.dumps({"error": f"{type(failure).__name__}: {failure}"})
