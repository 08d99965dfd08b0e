"""Precision and compilation of a run: chosen by timing, and by what compiling cost and gained on this machine before.

Measurements are remembered from run to run in the user's cache directory; a table of guesses stands in where there are
none. Losing the file loses nothing but those measurements.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import ModelConfig, TrainConfig
from ..errors import RegardError
from ..foundation.files import cache_folder, write_atomic
from .loss import Batch
from .precision import Precision, PrecisionName, supported_precisions

_BUDGET = 1.5  # seconds of timing, all in all
_WORTH_IT = 1.1  # how much faster than fp32 bf16 must be: below that fewer digits buy nothing
_MARGIN = 1.2  # compiling must bring this many times what it costs: guesses are guesses
_MOST_ENTRIES = 1000
# Guesses, used until a compiled run of the same model has been recorded here: what a small Transformer takes cold.
_SECONDS_PER_LAYER = {"cpu": 25.0 / 4, "cuda": 40.0 / 4}
_SPEED_UP = {"cpu": 1.25, "cuda": 1.6}
_LAYERS_AT_LEAST = 2  # what is compiled around the layers


@dataclass(frozen=True)
class Choice:
    """What was chosen, what was measured for it, and why in one sentence."""

    precision: PrecisionName
    compile: bool
    table: dict[str, float]  # milliseconds of an eager forward and backward pass in each precision that was timed
    reason: str
    key: str = ""  # under which ``record`` stores the measured cost and gain


def choose(
    objective: nn.Module, make_batch: Callable[[int], Batch], train: TrainConfig, device: torch.device
) -> Choice:
    """Precision and compilation of a run; ``make_batch(n)`` gives batch n on the device.

    Everything is left as it was: parameters, gradients, buffers, modes and generators.
    """
    if train.compile == "on" and (trouble := compiler_trouble(device.type)) is not None:
        raise RegardError(f"train.compile=on cannot be done here: {trouble}; train.compile=auto goes on without")
    with preserve_state(objective):
        timer = _Timer(objective, make_batch(0), device, train.steps * train.accumulate)
        precision, why = _choose_precision(timer, train)
        key = _key(timer, precision)
        compiles, why_compile = _choose_compilation(timer, train, precision, key)
    table = {name: seconds * 1e3 for name, seconds in timer.best.items()}
    return Choice(precision, compiles, table, f"{why}; {why_compile}", key)


def _choose_precision(timer: _Timer, train: TrainConfig) -> tuple[PrecisionName, str]:
    if train.precision != "auto":
        return train.precision, f"{train.precision} as asked"
    device = timer.device.type
    has_bf16 = "bf16" in supported_precisions(timer.device)
    if device == "cuda":
        return ("bf16", "bf16, which this GPU computes") if has_bf16 else ("fp32", "fp32: this GPU has no bf16")
    if not has_bf16:
        return "fp32", f"fp32: this {device} has no bf16"
    if timer.n_passes * timer.once("fp32") < _BUDGET:  # a run shorter than the timing is not worth timing
        return "fp32", "fp32: the run is over before bf16 could be timed"
    timer.time(["fp32", "bf16"])
    fp32, bf16 = timer.best["fp32"], timer.best["bf16"]
    name: PrecisionName = "bf16" if fp32 / bf16 >= _WORTH_IT else "fp32"
    return name, f"{name}: a pass takes {fp32 * 1e3:.1f} ms in fp32, {bf16 * 1e3:.1f} ms in bf16"


def _choose_compilation(timer: _Timer, train: TrainConfig, precision: PrecisionName, key: str) -> tuple[bool, str]:
    device = timer.device.type
    if train.compile != "auto":
        return train.compile == "on", f"compile {train.compile} as asked"
    if device not in ("cpu", "cuda"):
        return False, f"not compiled on {device}"
    if (trouble := compiler_trouble(device)) is not None:
        return False, f"not compiled: {trouble}"
    seconds, speed_up, is_measured = compile_cost(key, timer.objective, device)
    if speed_up <= 1:
        return False, f"not compiled: measured {speed_up:.2f}× as fast"
    eager = timer.best.get(precision) or timer.once(precision)
    if precision not in timer.best and timer.n_passes * eager >= _BUDGET:
        timer.time([precision])
        eager = timer.best[precision]
    known = "measured" if is_measured else "expected"
    terms = f"{known}: {seconds:.0f} s for {speed_up:.2f}× in {timer.n_passes} passes of {eager * 1e3:.1f} ms"
    pays = timer.n_passes * eager * (1 - 1 / speed_up) - seconds > (_MARGIN - 1) * seconds
    return pays, f"{'compiled' if pays else 'not compiled, it would not pay back'} ({terms})"


class _Timer:
    """Best seconds of forward and backward in each precision, taken in turns so that what disturbs one disturbs all."""

    def __init__(self, objective: nn.Module, batch: Batch, device: torch.device, n_passes: int) -> None:
        self.objective, self.batch, self.device, self.n_passes = objective, batch, device, n_passes
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.best: dict[str, float] = {}

    def once(self, name: PrecisionName) -> float:
        """One pass; the first of a precision also warms up, so only later ones count."""
        started = time.perf_counter()
        with Precision(name, self.device).forward():
            loss = self.objective(self.batch)
        # Not backward(): gradients that are already there, and hooks on them, are none of our business.
        torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def time(self, names: list[PrecisionName]) -> None:
        until = time.perf_counter() + _BUDGET
        for name in names:
            self.once(name)
        for turn in range(50):
            for name in names:
                self.best[name] = min(self.best.get(name, float("inf")), self.once(name))
            if turn and time.perf_counter() > until:
                return


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """In training mode inside; afterwards buffers, modes and all random generators are restored."""
    python, of_numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    modes = {part: part.training for part in module.modules()}
    buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
    module.train()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        with torch.no_grad():
            for name, x in module.named_buffers():
                if name in buffers and x.shape == buffers[name].shape:
                    x.copy_(buffers[name])
        random.setstate(python)
        np.random.set_state(of_numpy)


def compile_cost(key: str, module: nn.Module, device_type: str) -> tuple[float, float, bool]:
    """Seconds until a compiled step runs, how many times faster than an eager one it then is, and whether this was
    measured under this key; else it is a guess from the number of layers."""
    with suppress(TypeError, ValueError, KeyError):
        entry = _read_table()[key]
        seconds, speed_up = float(entry["seconds"]), float(entry["speed_up"])
        if seconds >= 0 and speed_up > 0:
            return seconds, speed_up, True
    kind = device_type if device_type in _SPEED_UP else "cpu"
    n_layers = sum(len(part) for part in module.modules() if isinstance(part, nn.ModuleList))  # traced one by one
    return _SECONDS_PER_LAYER[kind] * max(n_layers, _LAYERS_AT_LEAST), _SPEED_UP[kind], False


def record(choice: Choice, compile_seconds: float, compiled_ms: float) -> None:
    """After a compiled run: what it cost and brought, for the next run to know.

    A cache that cannot be written is no reason to stop a run.
    """
    eager_ms = choice.table.get(choice.precision)
    if not choice.key or not eager_ms:
        return
    table = _read_table()
    # With inductor's own cache a second compilation takes a moment; the first one's cost is what has to pay back.
    with suppress(TypeError, ValueError, KeyError):
        compile_seconds = max(compile_seconds, float(table.pop(choice.key)["seconds"]))
    measured = {"speed_up": eager_ms / compiled_ms, "eager_ms": eager_ms, "compiled_ms": compiled_ms}
    table[choice.key] = {"seconds": compile_seconds, **measured}
    with suppress(OSError):
        path = table_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(dict(list(table.items())[-_MOST_ENTRIES:]), indent=1).encode())


def table_path() -> Path:
    """speed.json in the cache folder."""
    return cache_folder() / "speed.json"


def _read_table() -> dict[str, Any]:
    try:
        found = json.loads(table_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def _key(timer: _Timer, precision: str) -> str:
    """What a measurement holds for: device, torch, threads, model, precision, and a batch's size to a power of 2."""
    config = getattr(getattr(timer.objective, "model", None), "config", None)
    fields = config.model_dump_json() if isinstance(config, ModelConfig) else ""
    n_numbers = sum(x.numel() for x in timer.batch.inputs)
    name = f"{timer.device.type} {platform.processor() or platform.machine()}"
    if timer.device.type == "cuda":
        name = torch.cuda.get_device_name(timer.device)
    else:
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
            name = f"{timer.device.type} {models[0]}" if models else name
    parts = (
        name,
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        f"model {hashlib.sha256(fields.encode()).hexdigest()[:16]}",
        precision,
        f"batch 2^{max(n_numbers, 1).bit_length()}",
    )
    return " | ".join(parts)


class Compiled(nn.Module):
    """A module that runs compiled, or eagerly from the first failure on: ``note`` then says what failed.

    ``dynamic`` where batches differ in shape. ``inner`` itself stays eager.
    torch compiles at the first call, and some of it in the backward pass. The first call is therefore tried out, both
    ways, with nothing left behind; ``seconds`` is what that took.
    """

    def __init__(self, inner: nn.Module, dynamic: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.note: str | None = None
        self.seconds: float | None = None
        # In a tuple: registered, its parameters would appear under a second name.
        self._fast: tuple[Any, ...] = (torch.compile(inner, dynamic=True if dynamic else None),)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, unless that was done. What is compiled first shapes the code for all others, so
        a run that goes on has to begin with what it began with."""
        if not self._fast or self.seconds is not None:
            return
        started = time.perf_counter()
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        sharded = any(hasattr(p, "to_local") for p in parameters)  # FSDP gathers in hooks that belong to a real step
        if torch.is_grad_enabled() and parameters and not sharded:
            try:
                with preserve_state(self.inner):
                    loss = self._fast[0](*args, **kwargs)
                    if isinstance(loss, Tensor) and loss.requires_grad:
                        torch.autograd.grad(loss.float().sum(), parameters, allow_unused=True)
            except Exception as error:
                self._give_up(error)
        self.seconds = time.perf_counter() - started

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare(*args, **kwargs)
        if self._fast:
            try:
                return self._fast[0](*args, **kwargs)
            except Exception as error:  # a new shape is compiled anew, and may fail anew
                result = self.inner(*args, **kwargs)  # what is wrong with the arguments is said by the module itself
                self._give_up(error)
                return result
        return self.inner(*args, **kwargs)

    def _give_up(self, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        self.note = f"torch.compile failed, going on without it: {' '.join(lines[:2])[:300]}"
        self._fast = ()


def compiler_trouble(device_type: str) -> str | None:
    """Why torch.compile cannot work here, in a few words; None where it can."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "triton is not installed"
        cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        return None if cc is not None else "there is no C compiler, which triton needs"
    return _cpp_trouble(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _cpp_trouble(cxx: str | None, path: str | None) -> str | None:
    """What torch's code for CPUs takes: a C++ compiler that finds Python's headers. Tried with an empty program."""
    name = cxx or ("clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++")
    found = shutil.which(name, path=path)
    if found is None:
        return f"there is no C++ compiler ({name})"
    if sys.platform == "win32":
        return None
    include = sysconfig.get_path("include")
    command = [found, "-std=c++17", "-x", "c++", "-fsyntax-only", f"-I{include}", "-"]
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler {name} does not run: {error}"
    if done.returncode == 0:
        return None
    says = next((line for line in done.stderr.splitlines() if "error" in line), "it fails on an empty program")
    return f"the C++ compiler {name} does not work: {says.strip()[:200]}"
